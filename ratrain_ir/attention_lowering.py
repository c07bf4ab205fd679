"""Lowering of what an attention reads and exchanges: its input, its parameters, and tokens or heads of other ranks.

Example: an attention whose keys context ranks share, and one for which they exchange heads (`ops/context_ranks.py`):

    project   gather_keys   forward                         backward_heads   reduce_keys   backward
    project   gather_heads  attend   return_heads  forward  backward_heads   gather_heads  attend_backward   ...

Where keys are gathered in groups of heads, each group is gathered before it attends, and again before it goes back.
"""

from __future__ import annotations

from typing import Any

from attrs import define

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block, next_block, previous_block
from ratrain.ratrain_ir.model.sharded_blocks import gathers_within_step, parts_view, shares_frozen
from ratrain.ratrain_ir.model.slots import (
    ATTENDED,
    HEADS_SLOTS,
    PRODUCTS,
    SQUARES,
    attended_slots,
    computed_type,
    half_slots,
    output_gradient_slots,
    shared_gradient_slots,
    shared_head_slots,
    shares_rows,
)
from ratrain.ratrain_ir.model.tensor_blocks import source_block, sum_block
from ratrain.ratrain_ir.ops.base import Op, Payload, Phase, Piece, piece_fields, piece_name
from ratrain.ratrain_ir.ops.collectives import AllGather, GatherRows, ReduceSums, shards_group
from ratrain.ratrain_ir.ops.compute import BackwardHeads, Forward, Project
from ratrain.ratrain_ir.ops.context_ranks import (
    Attend,
    AttendBackward,
    GatherHeads,
    GatherKeys,
    ReduceKeys,
    ReturnHeads,
)
from ratrain.ratrain_ir.ops.roles import view_roles
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.stage_tensors import StageTensors


@define
class AttentionLowering(StageTensors):
    """Builder of the ops around an attention, and of gathers of what blocks read."""

    def emit(self, op: Op) -> None:
        """Add an op to the stage."""
        self.stage.ops.append(op)

    def views(self, block: Block, piece: Piece, phase: Phase) -> tuple[Tensor, ...]:
        """Return the parameters that a block reads in a phase: its view, if any of it trains, then frozen ones.

        They are carried, or gathered for this piece and phase: by one op, for all reads of a block by a piece in a
        phase.
        """
        views, gathered = [], []
        for role in view_roles(self.model, self.plan, block):
            is_view = role.name == "w"
            within = gathers_within_step(self.plan, block) if is_view else shares_frozen(self.model, self.plan, block)
            if not within:
                views.append(self.named(f"{role.name}.{block}"))
                continue
            name = f"{role.name}.{block}.{piece_name(piece)}.{phase.value}"
            if name not in self.stage.tensors:
                part = f"{role.name}s" if not is_view else "v" if parts_view(self.model, self.plan, block) else "p"
                gathered.append((self.named(f"{part}.{block}"), self.stage.add(Tensor(name, role.kind, role.type))))
            views.append(self.named(name))
        if gathered:
            parts, wholes = zip(*gathered, strict=True)
            group = shards_group(self.model, self.plan, block)
            fields = {"blocks": (block,), "group": group, **piece_fields(piece), "phase": phase}
            self.emit(AllGather(**fields, reads=parts, writes=wholes))
        return tuple(views)

    def read_activation(self, block: Block, piece: Piece, *, phase: Phase | None = None) -> Tensor:
        """Return an activation with all its rows; gather them from the tensor-parallel ranks if these share them.

        With a phase: the input of `block`, as the block reads it. Without: the gradient of that input, as the backward
        of the block before reads it.
        """
        gradient = phase is None
        before = previous_block(block, self.model) if gradient else None
        # With a post-norm the block before starts from the gradient of its own output, not from that of the stream.
        if before is not None and self.adds_apart(before):
            what, own = f"dbranch_whole.{before}", self.branch_gradient(before, piece)
        else:
            what, own = f"{'dx' if gradient else 'x'}_whole.{block}", self.activation(block, piece, gradient=gradient)
        if not shares_rows(self.plan):
            return own
        name = f"{what}.{piece_name(piece)}{f'.{phase.value}' if phase else ''}"
        if name in self.stage.tensors:  # parallel attention and mlp read the same rows: gathered for the other one
            return self.named(name)
        whole = self.tensor(StateKind.ACTIVATION, name, computed_type(self.model, self.plan_of(piece), block))
        payload = Payload.GRADIENT if gradient else Payload.ACTIVATION
        fields = {"payload": payload, "block": block, **piece_fields(piece), "phase": phase}
        self.emit(GatherRows(**fields, reads=(own,), writes=(whole,)))
        return whole

    def reduce_sums(self, block: Block, piece: Piece, name: str, payload: Payload) -> None:
        """Emit the sum of the ranks' parts of the sums over each row."""
        reads, writes = (self.part_of_sums(block, piece, name),), self.row_sums(block, piece, name)
        self.emit(ReduceSums(payload=payload, block=block, **piece_fields(piece), reads=reads, writes=writes))

    def project_for_context(self, block: Block, piece: Piece) -> None:
        """Emit the projection of queries, keys and values, and what context ranks exchange of them."""
        made = self.made_by_project(block, piece)
        source = self.read_activation(source_block(self.model, self.plan, block), piece, phase=Phase.FORWARD)
        reads = (source, *self.views(block, piece, Phase.FORWARD), *self.documents(block, piece))
        self.emit(Project(block=block, **piece_fields(piece), reads=reads, writes=made))
        if self.plan.exchanges_heads:
            self.attend(block, piece, made[:3])
        elif self.plan.attends_apart:
            self.attend_in_groups(block, piece, made[0])
        else:
            self.gather_keys(block, piece, Phase.FORWARD)

    def attend(self, block: Block, piece: Piece, projected: tuple[Tensor, ...]) -> None:
        """Emit the exchange of tokens for heads, attention with a share of the heads, and the exchange back."""
        own, fields = (*projected, *self.documents(block, piece)), {"block": block, **piece_fields(piece)}
        shared, attended = (self.of_heads(block, piece, of) for of in (shared_head_slots, attended_slots))
        (output,) = (tensor for tensor in self.saved(block, piece) if tensor.slot == "o")
        self.emit(GatherHeads(payload=Payload.ACTIVATION, **fields, reads=own, writes=shared))
        self.emit(Attend(**fields, reads=shared, writes=attended))
        self.emit(ReturnHeads(payload=Payload.ACTIVATION, **fields, reads=attended[:1], writes=(output,)))

    def attend_backward(self, block: Block, piece: Piece) -> None:
        """Emit attention's backward down to queries, keys and values, where context ranks exchange heads."""
        fields = {"block": block, **piece_fields(piece)}
        shared, attended = (self.of_heads(block, piece, of) for of in (shared_head_slots, attended_slots))
        own, gathered = self.of_heads(block, piece, output_gradient_slots)
        gradients = self.of_heads(block, piece, shared_gradient_slots)
        self.emit(BackwardHeads(**fields, reads=self.read_by_heads(block, piece), writes=(own,)))
        self.emit(GatherHeads(payload=Payload.GRADIENT, **fields, reads=(own,), writes=(gathered,)))
        self.emit(AttendBackward(**fields, reads=(*shared, *attended, gathered), writes=gradients))
        returned = self.head_gradients(block, piece)
        self.emit(ReturnHeads(payload=Payload.GRADIENT, **fields, reads=gradients, writes=returned))

    def attend_in_groups(self, block: Block, piece: Piece, queries: Tensor) -> None:
        """Emit for each group of heads the gather of its keys, and its attention."""
        made = self.attended(block, piece)
        for group in range(self.plan.context_groups):
            keys = self.gather_keys(block, piece, Phase.FORWARD, group)
            reads = (queries, *self.documents(block, piece), *keys)
            self.emit(Attend(block=block, **piece_fields(piece), head_group=group, reads=reads, **_joint(group, made)))

    def attended(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return what attention with a group of heads makes: the heads' output, and its log-sum-exp."""
        return tuple(tensor for tensor in self.saved(block, piece) if tensor.slot in ATTENDED)

    def attend_backward_in_groups(self, block: Block, piece: Piece) -> None:
        """Emit attention's backward down to queries, keys and values, one group of heads after the other."""
        fields, of_output = {"block": block, **piece_fields(piece)}, self.of_heads(block, piece, output_gradient_slots)
        self.emit(BackwardHeads(**fields, reads=self.read_by_heads(block, piece), writes=of_output))
        queries, *keys = self.head_gradients(block, piece)
        saved = (*self.attended(block, piece), *of_output, self.made_by_project(block, piece)[0])
        for group in range(self.plan.context_groups):
            whole, parts = self.gather_keys(block, piece, Phase.BACKWARD, group), self.key_parts(block, piece, group)
            reads = (*saved, *self.documents(block, piece), *whole)
            self.emit(AttendBackward(**fields, head_group=group, reads=reads, **_joint(group, (queries,), parts)))
            self.emit(ReduceKeys(**fields, head_group=group, reads=parts, **_joint(group, tuple(keys))))

    def gather_keys(self, block: Block, piece: Piece, phase: Phase, group: int | None = None) -> tuple[Tensor, ...]:
        """Emit the gather of keys and values over context ranks for a pass, of a group of heads; return them."""
        reads, writes = self.made_by_project(block, piece)[1:3], self.whole_keys(block, piece, phase, group)
        fields = {"block": block, **piece_fields(piece), "head_group": group, "phase": phase}
        self.emit(GatherKeys(**fields, reads=reads, writes=writes))
        return writes

    def backward_heads_of_context(self, block: Block, piece: Piece) -> None:
        """Emit attention's backward down to queries and parts of keys and values, and the sum of these parts."""
        for each in (*self.seen(block, piece), piece):
            if self.begins(piece, each):
                self.gather_keys(block, each, Phase.BACKWARD)
        reads = (*self.read_by_heads(block, piece), *self.documents(block, piece))
        reads += self.seen_whole_keys(block, piece, Phase.BACKWARD)
        queries, *keys = self.head_gradients(block, piece)
        begun, added = (self.seen_key_parts(block, piece, first=first) for first in (True, False))
        fields = piece_fields(piece)
        self.emit(BackwardHeads(block=block, **fields, reads=reads, writes=(queries, *begun), updates=added))
        self.emit(ReduceKeys(block=block, **fields, reads=self.key_parts(block, piece), writes=tuple(keys)))

    def read_by_heads(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Return what `backward_heads` reads of its block: the gradient of the output, saved slots and parameters."""
        names = half_slots(self.model, self.plan_of(piece), block, HEADS_SLOTS)
        saved = tuple(tensor for tensor in self.saved(block, piece) if tensor.slot in names)
        dy = self.read_activation(sum_block(self.model, self.plan, block), piece)
        # The backward proper reads these rows. Gathered here, they arrive while this op runs; recovery, which is
        # placed before this op, can read them too.
        self.read_activation(source_block(self.model, self.plan, block), piece, phase=Phase.BACKWARD)
        return (dy, *saved, *self.views(block, piece, Phase.BACKWARD))

    def project(self, block: Block, piece: Piece) -> None:
        """Emit the projection of queries, keys and values, and the sums over ranks that their norms take."""
        if self.made_by_project(block, piece):
            self.project_for_context(block, piece)
        elif projected := self.projected(block, piece):
            source = self.read_activation(source_block(self.model, self.plan, block), piece, phase=Phase.FORWARD)
            writes = (self.part_of_sums(block, piece, SQUARES), *projected)
            reads = (source, *self.views(block, piece, Phase.FORWARD))
            self.emit(Project(block=block, **piece_fields(piece), reads=reads, writes=writes))
            self.reduce_sums(block, piece, SQUARES, Payload.ACTIVATION)

    def backward_heads(self, block: Block, piece: Piece) -> None:
        """Emit attention's backward down to normed queries and keys, and the sums over ranks that their norms take.

        Nothing is emitted for a block whose query and key norms are not over all tensor-parallel ranks, unless context
        ranks share its keys.
        """
        if self.head_gradients(block, piece):
            if self.plan.exchanges_heads:
                self.attend_backward(block, piece)
            elif self.plan.attends_apart:
                self.attend_backward_in_groups(block, piece)
            else:
                self.backward_heads_of_context(block, piece)
            return
        if not (gradients := self.normed_gradients(block, piece)):
            return
        others = (*self.documents(block, piece), *self.seen_keys(block, piece), *self.sums(block, piece))
        begun, added = (self.seen_sums(block, piece, first=first) for first in (True, False))
        reads = (*self.read_by_heads(block, piece), *others)
        writes = (self.part_of_sums(block, piece, PRODUCTS), *gradients, *begun)
        self.emit(BackwardHeads(block=block, **piece_fields(piece), reads=reads, writes=writes, updates=added))
        self.reduce_sums(block, piece, PRODUCTS, Payload.GRADIENT)

    def forward_of_heads(self, block: Block, piece: Piece, projected: tuple[Tensor, ...]) -> Forward:
        """Build the forward of an attention from projected queries, keys and values and their norms' sums."""
        made = (*projected, *self.row_sums(block, piece, SQUARES))
        views = self.views(block, piece, Phase.FORWARD)
        reads = (*views, *self.documents(block, piece), *made, *self.seen_keys(block, piece))
        kept = tuple(tensor for tensor in self.saved(block, piece) if tensor not in made)
        output = self.written_activation(next_block(self.model, block), piece)
        return Forward(block=block, **piece_fields(piece), reads=reads, writes=(output, *kept))

    def forward_of_context(self, block: Block, piece: Piece, made: tuple[Tensor, ...]) -> Forward:
        """Build the forward of an attention from queries and all context ranks' keys, or its heads' output."""
        # tensor-parallel ranks add the input where they sum their parts
        source = self.read_activation(source_block(self.model, self.plan, block), piece, phase=Phase.FORWARD)
        stream = (source,) if self.plan.tp == 1 else ()
        reads = (*stream, *self.views(block, piece, Phase.FORWARD))
        kept = tuple(tensor for tensor in self.saved(block, piece) if tensor not in made)
        if self.plan.attends_apart:
            reads += tuple(tensor for tensor in kept if tensor.slot in ATTENDED)
            kept = tuple(tensor for tensor in kept if tensor.slot not in ATTENDED)
        else:
            reads += (*self.documents(block, piece), made[0], *self.seen_whole_keys(block, piece, Phase.FORWARD))
        output = self.written_activation(next_block(self.model, block), piece)
        return Forward(block=block, **piece_fields(piece), reads=reads, writes=(output, *kept))


def _joint(group: int, joint: tuple[Tensor, ...], own: tuple[Tensor, ...] = ()) -> dict[str, Any]:
    """Return what an op of a group of heads writes and updates: the first writes what all make jointly."""
    return {"writes": own, "updates": joint} if group else {"writes": (*joint, *own), "updates": ()}
