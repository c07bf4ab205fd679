"""`offload-state{home=host|file what=all|moments|views blocks=N}`: keeps state in another memory.

    master %p.mlp.0 : f32[16512] carried                      master %p.mlp.0 : f32[16512] carried in host
    update mlp.0 (%g.mlp.0, ...)                        ->    update mlp.0 (%g.mlp.0, ...) placement host

With `what=all` masters and moments move, with `what=moments` moments alone. The update of a block streams its state
through workspace, in pieces, on the host engine, while compute continues. The gathers that make views of masters stream
them too. Where the machine has a processor next to the host's memory that updates (`host_update`), the state never
moves: gradients go there, views come back.

Views of what trains stay in DDR. Under zero = 3 they are made of masters for each use, so a block leaves nothing in DDR
between its uses. With `blocks=N` only the state of the last N blocks of each stage moves, because their gradients are
final first.

With `what=views` the frozen parameters of blocks move. They never change, so they are fetched for each pass that uses
them, and dropped behind it:

    frozen %f.mlp.0 : f16[24576] carried
    ... = forward mlp.0 m0 (%x.mlp.0.m0, %f.mlp.0)
  becomes
    frozen %f.mlp.0 : f16[24576] carried in host
    %back.f.mlp.0.m0.forward = fetch mlp.0 m0 forward (%f.mlp.0)
    ... = forward mlp.0 m0 (%x.mlp.0.m0, %back.f.mlp.0.m0.forward)

A recomputation shares the fetch of its backward. `insert-prefetch` and `joint-order` move fetches ahead of the use, as
gathers under zero = 3. There replicas have frozen parameters between them, and the gather of each use streams a
replica's part from the other memory.

No computed value changes. The pass comes before passes that spend the bytes it frees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, field, frozen

from ratrain.passes.pass_base import Fact, Pass, PassContext
from ratrain.ratrain_ir.config.types import STORES, Home, StateKind, aligned
from ratrain.ratrain_ir.ops.base import Phase, Piece, WorkGroup, piece_fields, piece_name
from ratrain.ratrain_ir.ops.compute import BlockOp
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.memory import Fetch
from ratrain.ratrain_ir.ops.state_homes import streamed_state
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op

_HOMES = {home.value: home for home in STORES}
ALL, MOMENTS, VIEWS = _WHAT = ("all", "moments", "views")


@frozen
class OffloadStatePass(Pass):
    """Keep masters and moments, or frozen parameters, in another memory."""

    name: ClassVar[str] = "offload-state"
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.LEGALISED, Fact.ALLOCATED})
    home: str = field(default=Home.HOST.value, metadata={"choices": tuple(_HOMES)})
    """Name of the memory."""
    what: str = field(default=ALL, metadata={"choices": _WHAT})
    """`all`: masters and moments; `moments`: moments alone; `views`: frozen parameters, fetched for each use."""
    blocks: int | None = field(default=None, metadata={"unit": "blocks", "default": "all"})
    """Number of blocks per stage whose state moves, the last ones in forward order; None: all."""

    @property
    def fetches_views(self) -> bool:
        """True if frozen parameters move."""
        return self.what == VIEWS

    def run(self, module: Module, context: PassContext) -> None:
        """Move the state of every stage.

        Raises `DiagnosticError` RT053 where the machine has no such memory or too little of it, RT073 for a number of
        blocks that is 0 or more than any stage has, and for views where none that is in DDR is frozen, RT071 where a
        gather would read from two memories.
        """
        most = max(map(len, module.topology.stage_blocks))
        if self.blocks is not None and not 0 < self.blocks <= most:
            text = f"'blocks={self.blocks}' of '{self.name}' is not of 1 to {most}, as many blocks as a stage has"
            fail("RT073", text, help="leave it out to move all of them; leave out the pass to move none")
        home = _HOMES[self.home]
        room = context.target.info(module).capacity_of(home)
        moved = [self.moved(stage, module) for stage in module.stages]
        if self.what == VIEWS and not any(moved):
            text = (
                f"'what={VIEWS}' of '{self.name}' changes nothing: no block that it is of has frozen parameters in DDR"
            )
            fail("RT073", text, help="leave it out; a plan freezes parameters by its part [train]")
        for stage, tensors in zip(module.stages, moved, strict=True):
            others = [tensor for tensor in _in(home, stage) if tensor not in tensors]
            needed, held = (sum(aligned(tensor.type.nbytes) for tensor in each) for each in (tensors, others))
            if needed + held > room:
                has = f"the machine's {room} of it" if room else "the machine has none of it"
                has += f", and {held} of them are taken" if room and held else ""
                text = f"stage @{stage.index} has {needed} bytes of state for the memory '{home.value}': {has}"
                fail("RT053", text, help=f"give a machine file with a larger {home.value}_capacity with --machine")
            context.statistics[f"stage {stage.index} {home.value}"] = f"{needed} bytes of state"
            if self.what == VIEWS:
                fetches = fetch_for_each_use(stage, frozenset(tensors))
                context.statistics[f"stage {stage.index} fetches"] = fetches
        for tensor in (tensor for tensors in moved for tensor in tensors):
            tensor.home = home
        for op in (op for stage in module.stages for op in stage.ops):
            self.refuse_two_memories(op)

    def refuse_two_memories(self, op: Op) -> None:
        """Refuse a gather of masters in one memory and frozen parameters in another, with RT071."""
        read = streamed_state(op)
        homes = list(dict.fromkeys(tensor.home.value for tensor in read))
        if len(homes) > 1:
            text = f"'{op!r}' would read %{read[0].name} in '{homes[0]}' and %{read[-1].name} in '{homes[1]}'"
            fail("RT071", text, help=f"let '{self.name}' move state and frozen parameters to one memory")

    def moved(self, stage: Stage, module: Module) -> list[Tensor]:
        """Return the tensors of a stage that move."""
        if self.what != VIEWS:
            return state_of_last(stage, module, self.blocks, moments_alone=self.what == MOMENTS)
        last = {str(block) for block in last_blocks(stage, module, self.blocks)}
        return [tensor for tensor in _in(Home.DDR, stage) if tensor.kind is StateKind.FROZEN and _owner(tensor) in last]


def _in(home: Home, stage: Stage) -> list[Tensor]:
    """Return the tensors of a stage that a memory holds from step to step."""
    return [tensor for tensor in stage.tensors.values() if tensor.carried and tensor.home is home]


def _owner(tensor: Tensor) -> str:
    """Return the block of a carried tensor, by its name."""
    return tensor.name.partition(".")[2]


def fetch_for_each_use(stage: Stage, views: frozenset[Tensor]) -> int:
    """Let each pass that reads some frozen parameters read copies, fetched before its first use of them.

    Return the number of fetches.
    """
    fetched: dict[tuple[Block, Piece, Phase], Fetch] = {}
    ops: list[Op] = []
    for op in stage.ops:
        read = tuple(tensor for tensor in op.reads if tensor in views)
        if read and isinstance(op, BlockOp):
            phase = Phase.FORWARD if op.work_group is WorkGroup.FORWARD else Phase.BACKWARD
            use = op.block, piece_of(op), phase
            if use not in fetched:
                fetched[use] = _fetch(stage, read, *use)
                ops.append(fetched[use])
            copies = dict(zip(read, fetched[use].writes, strict=True))
            ops.append(evolve(op, reads=tuple(copies.get(tensor, tensor) for tensor in op.reads)))
        else:
            ops.append(op)
    stage.ops = ops
    return len(fetched)


def _fetch(stage: Stage, views: Tensors, block: Block, piece: Piece, phase: Phase) -> Fetch:
    copies = []
    for view in views:
        name = stage.free_name(f"back.{view.name}.{piece_name(piece)}.{phase.value}")
        copies.append(stage.add(Tensor(name, StateKind.FROZEN, view.type)))
    return Fetch(block=block, **piece_fields(piece), phase=phase, reads=views, writes=tuple(copies))


def state_of(stage: Stage, blocks: Iterable[Block], *, moments_alone: bool = False) -> list[Tensor]:
    """Return the masters and moments of some blocks of a stage, or the moments alone; a frozen block has none."""
    prefixes = ("m1", "m2") if moments_alone else ("p", "m1", "m2")
    names = [f"{prefix}.{block}" for block in blocks for prefix in prefixes]
    return [stage.tensors[name] for name in names if name in stage.tensors]


def state_of_last(stage: Stage, module: Module, count: int | None, *, moments_alone: bool = False) -> list[Tensor]:
    """Return the masters and moments (or moments alone) of the last `count` blocks of a stage.

    None: of all its blocks.
    """
    return state_of(stage, last_blocks(stage, module, count), moments_alone=moments_alone)


def last_blocks(stage: Stage, module: Module, count: int | None) -> tuple[Block, ...]:
    """Return the last `count` blocks of a stage in forward order; None: all."""
    blocks = module.topology.stage_blocks[stage.index]
    first = 0 if count is None else max(0, len(blocks) - count)
    return blocks[first:]
