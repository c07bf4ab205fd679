"""Recovery written into a stage's lists: what a layer's forward keeps, and the ops that make the rest again before its backward.

Lists only: ops and tensors that others may have too stay as they are, so that a choice can be tried on a draft of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import attrs
from attrs import define, field, frozen

from ratrain.ratrain_ir import blocks
from ratrain.ratrain_ir.blocks import SQUARES, Block
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops import (
    AllGather,
    BackwardHeads,
    Forward,
    InputGradientOp,
    Op,
    Phase,
    Piece,
    Project,
    Recompute,
    Tensor,
    Tensors,
    piece_fields,
    piece_name,
    piece_of,
)
from ratrain.ratrain_ir.signatures import attends
from ratrain.ratrain_ir.types import Home, StateKind

LEAN_SLOTS = {
    "attention": ("q_in", "k_in", "q", "k", "v", "o", "lse", "branch"),
    "mlp": ("gate", "up", "branch"),
}
"""What `lean` keeps of a block: the results of its products and of attention."""


@frozen
class Lender:
    """Another stage, in whose DDR what is kept may wait."""

    stage: int

    @property
    def value(self) -> str:
        """It in words."""
        return f"@{self.stage}"


Elsewhere = Home | Lender
"""Where what is kept waits for its backward; DDR is the stage's own."""


@frozen
class LayerChoice:
    """What is kept of a layer's attention and mlp: `none`, `lean` or `all`."""

    attention: str
    mlp: str
    home: Elsewhere = Home.DDR
    """where what is kept waits for the backward"""

    @property
    def keeps_nothing(self) -> bool:
        """Whether the layer is recovered from its input, or from that of each of its blocks, alone."""
        return self.attention == self.mlp == "none"

    def kept(self, kind: str) -> str:
        """What is kept of one of the layer's blocks."""
        return self.attention if kind == "attention" else self.mlp


NOTHING, EVERYTHING = LayerChoice("none", "none"), LayerChoice("all", "all")
ChoiceOf = Callable[[int, Piece], LayerChoice]
"""The choice for a layer and a micro-batch, or a slice of one."""

CHOICES = {
    "full": (NOTHING,),
    "none": (EVERYTHING,),
    "attention": (LayerChoice("none", "all"),),
    "mlp": (LayerChoice("all", "none"),),
    "auto": tuple(LayerChoice(attention, mlp) for attention, mlp in product(("none", "lean", "all"), repeat=2)),
}
"""What each policy may choose for a layer of a micro-batch."""


def same_for_all(choice: LayerChoice) -> ChoiceOf:
    """One choice for every layer and micro-batch."""
    return lambda _layer, _micro_batch: choice


@frozen
class Recovery:
    """What a stage recovers."""

    ops: int
    """how many do it"""
    starts: list[Tensor]
    """inputs of the layers that are recovered as a whole"""


def rewrite(stage: Stage, choice_of: ChoiceOf) -> Recovery:
    """Drop and recover in a stage's lists; its ops and tensors, which others may have too, stay as they are."""
    rewriter = _Rewriter(stage, choice_of)
    rewriter.run()
    return Recovery(rewriter.recovered, rewriter.starts)


def rewritten(stage: Stage, choice_of: ChoiceOf) -> Stage:
    """A draft of a stage under a choice."""
    draft = stage.draft()
    rewrite(draft, choice_of)
    return draft


def mark_checkpoints(starts: Iterable[Tensor]) -> None:
    """Make checkpoints of the activations that recovery starts from."""
    for tensor in starts:
        if tensor.kind is StateKind.ACTIVATION:
            tensor.kind = StateKind.CHECKPOINT


@define
class _Rewriter:
    stage: Stage
    choice_of: ChoiceOf
    forwards: dict[tuple[Block, Piece], Forward] = field(factory=dict)
    """Forward ops as they were, with all saved slots among their writes."""
    projects: dict[tuple[Block, Piece], Project] = field(factory=dict)
    """What projects before the forward where norms of queries and keys take sums over tensor peers."""
    passing: dict[Tensor, Tensor] = field(factory=dict)
    """What a forward alone reads in place of what is projected anew for the backward."""
    views: dict[tuple[Block, Piece], Tensor] = field(factory=dict)
    """The view each backward reads, which its recovery reads too."""
    inputs: dict[tuple[Block, Piece], Tensor] = field(factory=dict)
    """The input each backward reads, which its recovery reads too."""
    gathers: dict[Tensor, AllGather] = field(factory=dict)
    """Gathers of views that are not gathered yet, where views are sharded within the step."""
    seen_later: set[Tensor] = field(factory=set)
    """Keys and values that other slices of their micro-batch read: a forward keeps them."""
    recovered: int = 0
    starts: list[Tensor] = field(factory=list)

    def run(self) -> None:
        for op in self.stage.ops:
            if type(op) is Project:
                self.projects[op.block, piece_of(op)] = op
            if type(op) is Forward and op.block.layer is not None:
                self.forwards[op.block, piece_of(op)] = op
            if type(op) is Forward and op.slice:
                self.seen_later.update(_of_other_slices(op, self.projects.get((op.block, piece_of(op)))))
            if isinstance(op, InputGradientOp):
                if op.block.layer is not None:
                    self.inputs[op.block, piece_of(op)] = op.reads[1]
                for tensor in op.reads:
                    if tensor.kind is StateKind.VIEW:
                        self.views[op.block, piece_of(op)] = tensor
            elif type(op) is AllGather and op.phase is Phase.BACKWARD:
                self.gathers[op.writes[0]] = op
        ops: list[Op] = []
        for op in self.stage.ops:
            if type(op) is AllGather and op.phase is Phase.BACKWARD and self.gathers.pop(op.writes[0], None) is None:
                continue  # its recovery needed it earlier
            if type(op) is Forward and op.block.layer is not None:
                ops.append(self.lightened(op))
            elif type(op) is Project:
                ops.append(self.passing_on(op))
            elif isinstance(op, InputGradientOp | BackwardHeads) and op.block.layer is not None:
                ops.extend(self.with_recovery(op))
            else:
                ops.append(op)
        self.stage.ops = ops
        self.stage.prune()

    def lightened(self, op: Forward) -> Forward:
        """The forward op without the saved slots it does not keep."""
        dropped = set(self.dropped(op.block, piece_of(op)))
        if not dropped:
            return op
        reads = tuple(self.passing.get(t, t) for t in op.reads)
        return attrs.evolve(op, reads=reads, writes=tuple(t for t in op.writes if t not in dropped))

    def passing_on(self, op: Project) -> Project:
        """The op that projects, with tensors that end with the forward in place of what is not kept."""
        piece = piece_of(op)
        for tensor in self.dropped(op.block, piece):
            if tensor in op.writes:
                name = self.stage.free_name(f"f.{op.block}.{piece_name(piece)}.{tensor.slot}")
                self.passing[tensor] = self.stage.add(Tensor(name, StateKind.SAVED, tensor.type))
        return attrs.evolve(op, writes=tuple(self.passing.get(t, t) for t in op.writes))

    def saved(self, block: Block, m: Piece) -> Tensors:
        """The saved slots of a block, in their order."""
        forward = self.forwards[block, m]
        own = tuple(t for t in forward.writes if t.kind is StateKind.SAVED)
        return (*made_before(forward, self.projects.get((block, m))), *own)

    def dropped(self, block: Block, m: Piece) -> Tensors:
        """The saved slots of a block that are not kept."""
        assert block.layer is not None
        kept = self.choice_of(block.layer, m).kept(block.kind)
        if kept == "all":
            return ()
        lean = (SQUARES,) if kept == "none" else (SQUARES, *LEAN_SLOTS[block.kind])
        return tuple(t for t in self.saved(block, m) if t.slot not in lean and t not in self.seen_later)

    def with_recovery(self, op: InputGradientOp | BackwardHeads) -> list[Op]:
        """The backward op, after the recovery of what it, or its weight half, reads."""
        layer, m = op.block.layer, piece_of(op)
        assert layer is not None
        if (op.block, m) in self.projects and not isinstance(op, BackwardHeads):
            return [op]  # recovered already: its backward begins before the norms of queries and keys
        # what tensor peers exchange within a layer is small, and kept: each block is recovered from its own input
        in_parts = self.forwards[op.block, m].writes[0].kind is StateKind.PARTIAL
        if self.choice_of(layer, m).keeps_nothing and not in_parts:
            assert not isinstance(op, BackwardHeads)  # tensor peers have parts
            return self.with_whole_layer(op) if op.block.kind == "mlp" else [op]
        return [self.recompute(op.block, m), op] if self.dropped(op.block, m) else [op]

    def with_whole_layer(self, op: InputGradientOp) -> list[Op]:
        """An mlp's backward after the recovery of its attention, which yields its input again, and its own."""
        m = piece_of(op)
        attention_block = blocks.block("attention", op.block.layer)
        gather = self.gathers.pop(self.views[attention_block, m], None)
        attention = self.recompute(attention_block, m)
        source = self.forwards[op.block, m].reads[0]
        again = self.stage.add(
            Tensor(self.stage.free_name(f"r.{op.block}.{piece_name(m)}"), StateKind.ACTIVATION, source.type)
        )
        attention.writes = (*attention.writes, again)
        attention.reads = with_what_it_sees(attention, self.forwards[attention_block, m])
        self.starts.append(attention.reads[0])
        mlp = self.recompute(op.block, m)
        mlp.reads = (again, *mlp.reads[1:])
        reads = tuple(again if t is source else t for t in op.reads)
        recovery: list[Op] = [attention, mlp, attrs.evolve(op, reads=reads)]
        return [gather, *recovery] if gather is not None else recovery

    def recompute(self, block: Block, m: Piece) -> Recompute:
        """Recovery of a block's dropped slots from its input and the slots it kept."""
        forward, view = self.forwards[block, m], self.views[block, m]
        dropped = self.dropped(block, m)
        kept = tuple(t for t in self.saved(block, m) if t not in dropped)
        self.recovered += 1
        return recovery_op(forward, self.inputs[block, m], kept, view, dropped, self.projects.get((block, m)))


def made_before(forward: Forward, project: Project | None) -> Tensors:
    """The saved slots of a block that are there before its forward: what is projected for norms over tensor peers, and the sums of these."""
    if project is None:
        return ()
    return tuple(t for t in forward.reads if t in project.writes or t.slot == SQUARES)


def _of_other_slices(op: Forward, project: Project | None) -> Tensors:
    """The keys and values of earlier slices that a forward reads."""
    own = made_before(op, project)
    return tuple(t for t in op.reads if t.kind is StateKind.SAVED and t not in own)


def with_what_it_sees(op: Recompute, forward: Forward, project: Project | None = None) -> Tensors:
    """What a recovery reads, with where documents start, and with the keys and values of earlier slices where it computes attention again."""
    seen = _of_other_slices(forward, project)
    documents = tuple(t for t in forward.reads if t.kind is StateKind.INPUT and forward.block.kind == "attention")
    own = tuple(t for t in op.reads if t not in seen and t not in documents)
    return (*own, *documents, *seen) if attends(op) else (*own, *documents)


def recovery_op(
    forward: Forward, source: Tensor, kept: Tensors, view: Tensor, writes: Tensors, project: Project | None = None
) -> Recompute:
    """The op that makes again, from the block's input, what a forward did not keep."""
    reads = (source, *kept, view)
    op = Recompute(block=forward.block, **piece_fields(piece_of(forward)), reads=reads, writes=writes)
    op.reads = with_what_it_sees(op, forward, project)
    return op
