"""`offload-state{home=host|file what=all|moments blocks=N}`: keeps masters and moments in another memory.

    master %p.mlp.0 : f32[16512] carried                      master %p.mlp.0 : f32[16512] carried in host
    update mlp.0 (%g.mlp.0, ...)                        ->    update mlp.0 (%g.mlp.0, ...) placement host

The update of a block streams its state through workspace, in pieces, on the host engine, while compute continues. The
gathers that make views of masters stream them too. Where the machine has a processor next to the host's memory that
updates (`host_update`), the state never moves: gradients go there, views come back.

Views stay in DDR. Under zero = 3 they are made of masters for each use, so a block leaves nothing in DDR between its
uses. With `blocks=N` only the state of the last N blocks of each stage moves, because their gradients are final first.
No computed value changes. The pass comes before passes that spend the bytes it frees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from ratrain.passes.pass_base import Fact, Pass, PassContext
from ratrain.ratrain_ir.config.types import STORES, Home, aligned
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.tensor import Tensor

_HOMES = {home.value: home for home in STORES}


@frozen
class OffloadStatePass(Pass):
    """Keep masters and moments in another memory."""

    name: ClassVar[str] = "offload-state"
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.LEGALISED, Fact.ALLOCATED})
    home: str = field(default=Home.HOST.value, metadata={"choices": tuple(_HOMES)})
    """Name of the memory."""
    what: str = field(default="all", metadata={"choices": ("all", "moments")})
    """`all`: masters and moments; `moments`: moments alone."""
    blocks: int | None = field(default=None, metadata={"unit": "blocks", "default": "all"})
    """Number of blocks per stage whose state moves, the last ones in forward order; None: all."""

    def run(self, module: Module, context: PassContext) -> None:
        """Move the state of every stage.

        Raises `DiagnosticError` RT053 where the machine has no such memory or too little of it, RT073 for a number of
        blocks that is 0 or more than any stage has.
        """
        most = max(map(len, module.topology.stage_blocks))
        if self.blocks is not None and not 0 < self.blocks <= most:
            text = f"'blocks={self.blocks}' of '{self.name}' is not of 1 to {most}, as many blocks as a stage has"
            fail("RT073", text, help="leave it out to move all of them; leave out the pass to move none")
        home = _HOMES[self.home]
        room = context.target.info(module).capacity_of(home)
        for stage in module.stages:
            moved = state_of_last(stage, module, self.blocks, moments_alone=self.what == "moments")
            needed = sum(aligned(tensor.type.nbytes) for tensor in moved)
            if needed > room:
                has = f"the machine's {room} of it" if room else "the machine has none of it"
                text = f"stage @{stage.index} has {needed} bytes of state for the memory '{home.value}': {has}"
                fail("RT053", text, help=f"give a machine file with a larger {home.value}_capacity with --machine")
            for tensor in moved:
                tensor.home = home
            context.statistics[f"stage {stage.index} {home.value}"] = f"{needed} bytes of state"


def state_of(stage: Stage, blocks: Iterable[Block], *, moments_alone: bool = False) -> list[Tensor]:
    """Return the masters and moments of some blocks of a stage, or the moments alone; a frozen block has none."""
    prefixes = ("m1", "m2") if moments_alone else ("p", "m1", "m2")
    names = [f"{prefix}.{block}" for block in blocks for prefix in prefixes]
    return [stage.tensors[name] for name in names if name in stage.tensors]


def state_of_last(stage: Stage, module: Module, count: int | None, *, moments_alone: bool = False) -> list[Tensor]:
    """Return the masters and moments (or moments alone) of the last `count` blocks of a stage.

    None: of all its blocks.
    """
    blocks = module.topology.stage_blocks[stage.index]
    first = 0 if count is None else max(0, len(blocks) - count)
    return state_of(stage, blocks[first:], moments_alone=moments_alone)
