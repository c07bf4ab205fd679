# ruff: noqa: D102 - a visit has the name of the op whose meaning it is
"""Exchanges in the symbolic run: of tensor-parallel and context ranks, between slices, and of the parts of the loss.

A rank's part of something is a value of its own, `("part of x", block, m)`; the op that meets the other ranks turns it
into the whole, `("x", block, m)`. Each rank runs the same op with its own part, so one rank's run stands for all:

    %y_part = forward mlp.0 m0 (...)        %y_part holds ("part of x", attention.1, 0)
    %y = reduce_rows attention.1 m0 (...)   %y holds ("x", attention.1, 0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from ratrain.ratrain_ir.config.tensor_ranks import norms_over_ranks
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block, previous_block
from ratrain.ratrain_ir.model.slots import (
    ATTENDED,
    KEY_GRADIENTS,
    KEY_SLOTS,
    OUTPUT_GRADIENT,
    PRODUCTS,
    SQUARES,
    WHOLE_KEYS,
    branch_sums,
    made_by_project,
    shares_rows,
)
from ratrain.ratrain_ir.model.tensor_blocks import adds_branch_apart, source_block, sum_block
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops.base import Op, Payload, Phase, Piece, WorkGroup, piece_text
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.verifier.slices import seen_keys, sum_steps
from ratrain.ratrain_ir.verifier.symbolic_updates import SymbolicUpdates

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.collectives import CombineLoss, GatherRows, ReduceRows, ReduceSums
    from ratrain.ratrain_ir.ops.compute import Backward, BackwardWeight, BlockOp, Forward, Project
    from ratrain.ratrain_ir.ops.context_ranks import (
        Attend,
        AttendBackward,
        GatherHeads,
        GatherKeys,
        ReduceKeys,
        ReturnHeads,
    )
    from ratrain.ratrain_ir.ops.tensor import Tensor


_EXCHANGED = {Payload.ACTIVATION: "x", Payload.GRADIENT: "dx"}
"""Values that tensor-parallel ranks exchange, by payload."""


PARTS_OF_LOSS = ("lse", "loss")
"""Partial results of a tensor-parallel rank for its part of the vocabulary."""


_PART_OF_HEADS = "groups of heads"
"""Value, with the groups, of a tensor of all heads that some groups of heads have not been added to yet."""


def _group_of(op: Op) -> tuple[str, ...]:
    """Return the group of heads that an op names, as values end in it; nothing where it names none."""
    group = getattr(op, "head_group", None)
    return () if group is None else (f"g{group}",)


@define(eq=False)
class SymbolicExchanges(SymbolicUpdates):
    """Symbolic values of a stage, and the meaning of ops that exchange them with other ranks or slices."""

    def written(self, what: str) -> str:
        """Return the value that a block writes for an activation or gradient: with several ranks a part of it."""
        return what if self.module.plan.tp == 1 else f"part of {what}"

    def read(self, what: str) -> str:
        """Return the value that a block reads of an activation or gradient: all rows, gathered if ranks share rows."""
        return f"whole {what}" if shares_rows(self.module.plan) else what

    def check_branch_part(self, op: Op, roles: dict[str, Tensor], what: str, mlp: Block, m: Piece) -> None:
        """Check the partial sum of the parallel branch, which an op adds to, if it has one.

        In the forward the attention makes it for its mlp. In the backward the mlp makes it, of the gradient of their
        common input.
        """
        if "branch_part" in roles:
            self.expect("RT033", op, roles["branch_part"], f"part of {what}", mlp, m)

    def gather_rows(self, op: GatherRows) -> None:
        what, m = _EXCHANGED[op.payload], piece_of(op)
        self.once(op, "RT033", "gather_rows", op.payload, op.block, m, op.phase)
        owner = op.block
        # Behind a branch with a norm of its own, the gradient of the branch is gathered, not that of the stream.
        if op.payload is Payload.GRADIENT and self.adds_apart(before := previous_block(owner, self.module.model)):
            what, owner = "dbranch", before
        self.expect("RT033", op, op.reads[0], what, owner, m)
        if op.phase is Phase.FORWARD:
            self.expect_made_forward("RT033", op, op.reads[0])
        self.set(op.writes[0], f"whole {what}", owner, m)
        self.row_gathers[op.writes[0]] = op
        if op.phase is Phase.BACKWARD:
            # An evaluation gathers nothing for a backward, and what is gathered may come from a recovery.
            self.recover(op.writes[0], op)

    def reduce_rows(self, op: ReduceRows) -> None:
        """Sum the parts of all ranks and, once, the residual stream around the block that made them.

        In the forward the stream comes from the input of the block before, in the backward from the gradient behind the
        block.
        """
        what, m, block = _EXCHANGED[op.payload], piece_of(op), op.block
        self.once(op, "RT033", "reduce_rows", op.payload, block, m, op.phase)
        roles = self.roles(op)
        # The sum of a branch, which `add_branch` norms and adds to the stream; it is saved for the backward.
        if roles["sum"].kind is StateKind.SAVED:
            before = previous_block(block, self.module.model)
            self.expect("RT033", op, roles["part"], "part of branch", before, m)
            self.once(op, "RT032", "saved", before, m, roles["sum"].slot)
            self.set(roles["sum"], "saved", before, m, roles["sum"].slot)
            return
        self.expect("RT033", op, roles["part"], f"part of {what}", block, m)
        forward = op.payload is Payload.ACTIVATION
        if forward and op.phase is None:
            for tensor in op.reads:
                self.expect_made_forward("RT033", op, tensor)
        if "stream" in roles:
            model, plan = self.module.model, self.module.plan
            around = (
                source_block(model, plan, previous_block(block, model)) if forward else sum_block(model, plan, block)
            )
            self.expect("RT033", op, roles["stream"], what, around, m)
        self.set(roles["sum"], what, block, m)
        if op.phase is not None:
            self.recover(roles["sum"], op)

    def adds_apart(self, block: Block) -> bool:
        """Tell whether a block's output is normed, and added to the stream, by an op of its own."""
        return adds_branch_apart(self.module.model, self.module.plan, block)

    def take_branch_sums(self, op: Backward | BackwardWeight, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Check the sums that `add_branch_backward` left for the gradient of a block's norm."""
        for slot in branch_sums(self.module.model, self.plan_of(op), block):
            self.expect("RT030", op, roles[slot.name], "pending", block, m, slot.name)

    def norms_over_ranks(self, block: Block) -> bool:
        """Tell whether a block's norms of queries and keys take sums over tensor-parallel ranks."""
        return block.kind == "attention" and norms_over_ranks(self.module.model, self.module.plan)

    def shares_keys(self, block: Block) -> bool:
        """Tell whether context ranks exchange something for a block's attention."""
        return block.kind == "attention" and self.module.plan.cp > 1

    def reads_whole_keys(self, block: Block) -> bool:
        """Tell whether a block's own ops attend to gathered keys of all heads."""
        return self.shares_keys(block) and not self.module.plan.attends_apart

    def project_for_context(self, op: Project) -> None:
        """Make queries, keys and values, and the saved slots before them, which are recorded as made."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.documents(op, roles, m)
        for slot in made_by_project(self.module.model, self.plan_of(op), block):
            if slot.name not in roles:
                continue
            # a recovery may make queries again; where ranks exchange heads, none makes these
            if slot.name not in (("q",) if self.module.plan.exchanges_keys else ("q", *KEY_SLOTS)):
                self.once(op, "RT032", "saved", block, m, slot.name)
            self.set(roles[slot.name], "saved", block, m, slot.name)

    def documents(self, op: BlockOp, roles: dict[str, Tensor], m: Piece) -> None:
        """Check that an op which reads the starts of documents reads its own piece's."""
        if "documents" in roles:
            self.expect("RT030", op, roles["documents"], "documents", m)

    def gather_heads(self, op: GatherHeads) -> None:
        """Take all tokens of a share of the heads; each rank runs this op with its tokens of all heads."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT033", "gather_heads", op.payload, block, m)
        if op.payload is Payload.GRADIENT:
            self.expect("RT033", op, roles[OUTPUT_GRADIENT], "pending", block, m, OUTPUT_GRADIENT)
        else:
            for tensor in op.reads:
                self.expect_made_forward("RT033", op, tensor)
                if tensor.kind is StateKind.INPUT:
                    self.expect("RT033", op, tensor, "documents", m)
                else:
                    self.expect("RT033", op, tensor, "saved", block, m, tensor.slot)
        self.set_shared(op, block, m)

    def return_heads(self, op: ReturnHeads) -> None:
        """Take a rank's tokens of all heads; each rank runs this op with all tokens of its share of the heads."""
        block, m = op.block, piece_of(op)
        self.once(op, "RT033", "return_heads", op.payload, block, m)
        for tensor in op.reads:
            self.expect("RT033", op, tensor, "shared", block, m, tensor.slot)
        if op.payload is Payload.GRADIENT:
            for tensor in op.writes:
                self.set(tensor, "pending", block, m, tensor.slot)
        else:
            self.set_saved(op, self.roles(op), block, m)

    def attend(self, op: Attend | AttendBackward) -> None:
        """Attend with a share of the heads over all tokens, or go back through it."""
        if op.head_group is not None:
            self.attend_with_group(op)
            return
        block, m = op.block, piece_of(op)
        self.once(op, "RT030", op.keyword, block, m)
        for tensor in op.reads:
            self.expect("RT030", op, tensor, "shared", block, m, tensor.slot)
        self.set_shared(op, block, m)

    def attend_with_group(self, op: Attend | AttendBackward) -> None:
        """Attend with one group of the heads to its gathered keys, or go back through it; groups ascend."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT030", op.keyword, block, m, *_group_of(op))
        self.expect("RT030", op, roles["q"], "saved", block, m, "q")
        self.documents(op, roles, m)
        self.take_whole_keys(op, roles, block, m)
        if op.work_group is WorkGroup.FORWARD:
            self.expect_made_forward("RT030", op, roles["q"])
            for name in ATTENDED:
                if self.add_group(op, roles[name], "saved", block, m, name):
                    self.once(op, "RT032", "saved", block, m, name)
            return
        for name in ATTENDED:
            self.expect("RT030", op, roles[name], "saved", block, m, name)
        self.expect("RT030", op, roles[OUTPUT_GRADIENT], "pending", block, m, OUTPUT_GRADIENT)
        self.add_group(op, roles["dq_out"], "pending", block, m, "dq_out")
        for name in WHOLE_KEYS:
            self.set(roles[f"d{name}"], f"part of d{name}", block, m, *_group_of(op))

    def add_group(self, op: Attend | AttendBackward | ReduceKeys, tensor: Tensor, *value: object) -> bool:
        """Let a tensor hold a value, or the part of it that groups of heads so far have made; True if that is all.

        Without groups it is. The first group writes the tensor, each other one needs that all before it have added.
        """
        groups, group = self.module.plan.context_groups, op.head_group or 0
        if group:
            self.expect("RT030", op, tensor, _PART_OF_HEADS, *value, f"g0-g{group - 1}")
        complete = group == groups - 1
        self.set(tensor, *(value if complete else (_PART_OF_HEADS, *value, f"g0-g{group}")))
        return complete

    def set_shared(self, op: GatherHeads | Attend | AttendBackward, block: Block, m: Piece) -> None:
        """Set what an op writes of all tokens of a share of the heads."""
        for tensor in op.writes:
            self.set(tensor, "shared", block, m, tensor.slot)

    def gather_keys(self, op: GatherKeys) -> None:
        """Gather the keys and values of all context ranks, each of which runs this op with its own."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT033", "gather_keys", block, m, op.phase, *_group_of(op))
        for name, whole in zip(KEY_SLOTS, WHOLE_KEYS, strict=True):
            self.expect("RT033", op, roles[name], "saved", block, m, name)
            self.set(roles[whole], whole, block, m, *_group_of(op))
            self.key_gathers[roles[whole]] = op
            if op.phase is Phase.BACKWARD:
                self.recover(roles[whole], op)

    def take_whole_keys(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Check the keys and values of all context ranks that an op reads."""
        phase = Phase.FORWARD if op.work_group is WorkGroup.FORWARD else Phase.BACKWARD
        for name in WHOLE_KEYS:
            self.expect("RT030", op, roles[name], name, block, m, *_group_of(op))
        for tensor in (tensor for tensor in op.reads if tensor.slot in WHOLE_KEYS):
            if phase is Phase.FORWARD:
                self.expect_made_forward("RT030", op, tensor)
            gather = self.key_gathers.get(tensor)
            if self.module.level is Level.DATAFLOW and gather is not None and gather.phase is not phase:
                text = f"'{op!r}' uses %{tensor.name}, which was gathered for the {gather.phase.value}"
                note = self.report.note("gathered here", gather)
                way_out = "at level dataflow each pass needs its own gather"
                self.report.at_op("RT033", text, self.stage, op, tensor, notes=[note], help=way_out)

    def reduce_keys(self, op: ReduceKeys) -> None:
        """Sum all ranks' parts of the gradients of keys and values; they are pending for the backward."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT033", "reduce_keys", block, m, *_group_of(op))
        for name, whole in zip(KEY_GRADIENTS, WHOLE_KEYS, strict=True):
            self.expect("RT033", op, roles[f"d{whole}"], f"part of d{whole}", block, m, *_group_of(op))
            self.add_group(op, roles[name], "pending", block, m, name)

    def reduce_sums(self, op: ReduceSums) -> None:
        """Sum row statistics: squares are saved for all later uses, products are pending for the backward."""
        block, m, roles = op.block, piece_of(op), self.roles(op)
        self.once(op, "RT033", "reduce_sums", op.payload, block, m)
        name = SQUARES if op.payload is Payload.ACTIVATION else PRODUCTS
        self.expect("RT033", op, roles["part"], f"part of {name}", block, m)
        self.set(roles["sum"], "saved" if name == SQUARES else "pending", block, m, name)

    def combine_loss(self, op: CombineLoss) -> None:
        roles, m = self.roles(op), piece_of(op)
        self.once(op, "RT033", "combine_loss", m)
        for name in PARTS_OF_LOSS:
            self.expect("RT033", op, roles[f"{name}_part"], f"part of {name}", m)
        self.expect("RT033", op, roles["labels"], "labels", m)
        self.add_loss(op, roles["loss"], m)
        self.set_saved(op, roles, op.block, m)

    def add_loss(self, op: Forward | CombineLoss, loss: Tensor, m: Piece) -> None:
        """Add to the loss, a sum over micro-batches, and over their slices, in ascending order."""
        share = self.sums.share(m, descending=False)
        if op.updates:
            self.expect("RT030", op, loss, "loss", self.sums.shares(share, descending=False))
        elif share != 0:
            first = piece_text(self.sums.piece(0, descending=False))
            text = f"the first contribution to the loss must be {first}: micro-batches ascend"
            self.report.at_op("RT030", text, self.stage, op, loss)
        self.set(loss, "loss", self.sums.shares(share + 1, descending=False))

    def see_keys(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Check the keys and values of earlier slices that a slice attends to, as their forwards made them."""
        for role, value in seen_keys(self.module.model, self.module.plan, block, m):
            self.expect("RT030", op, roles[role], *value)

    def add_up_sums(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Check and update the sums of key and value gradients in the backward of a slice.

        It takes what later slices left for its own keys and values, and adds to the sums of earlier slices.
        """
        self.see_keys(op, roles, block, m)
        for step in sum_steps(self.module.model, self.module.plan, block, m):
            if step.before is not None:
                self.expect("RT031", op, roles[step.role], *step.before)
            if step.after is not None:
                self.set(roles[step.role], *step.after)

    def set_saved(self, op: Op, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Set the saved slots that an op writes; each may be made once, by the forward or by a recovery."""
        saved, writes = StateKind.SAVED, op.writes
        for name, tensor in roles.items():
            if tensor.kind is saved and tensor in writes:
                self.once(op, "RT032", "saved", block, m, name)
                self.set(tensor, "saved", block, m, name)
