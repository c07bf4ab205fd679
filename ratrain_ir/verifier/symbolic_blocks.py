"""Operands that ops on a block share in the symbolic run: views, inputs, saved slots, gradients that add up."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from attrs import define

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block, next_block
from ratrain.ratrain_ir.model.expert_ranks import copies_experts
from ratrain.ratrain_ir.model.sharded_blocks import reduces_each_micro_batch
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import saved_slots
from ratrain.ratrain_ir.model.tensor_blocks import source_block, sum_block
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops.base import Op, Phase, Piece, Slice, WorkGroup, piece_text
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.verifier.symbolic_completion import SymbolicCompletion
from ratrain.ratrain_ir.verifier.symbolic_values import FROZEN, word_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.ops.compute import Backward, BackwardWeight, BlockOp
    from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, Dispatch
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.ratrain_ir.verifier.slices import Shares


@define(eq=False)
class SymbolicBlocks(SymbolicCompletion):
    """Symbolic run of one stage: checks of what ops on a block read, and contributions to its gradient."""

    def view(self, op: BlockOp | Dispatch, roles: dict[str, Tensor], block: Block) -> None:
        """Check the parameters that an op computes with: the block's view, and its frozen ones."""
        for name, value in {"w": "view", "bias": "bias", **FROZEN}.items():
            if name in roles:
                self.expect("RT030", op, roles[name], value, block, "this step")
                if op.work_group is WorkGroup.FORWARD:
                    self.expect_made_forward("RT030", op, roles[name])
                self.own_gather(op, roles[name])

    def own_gather(self, op: BlockOp | Dispatch, view: Tensor) -> None:
        """Check at level dataflow that a view was gathered for the op's own piece and phase.

        A placed module may gather once for several uses. At level dataflow no order is claimed, so that is not sound.
        """
        gather = self.gathers.get(view)
        if self.module.level is not Level.DATAFLOW or gather is None or gather.phase is None:
            return
        phase = Phase.FORWARD if op.work_group is WorkGroup.FORWARD else Phase.BACKWARD
        assert gather.micro_batch is not None  # the structure of a sound module
        served = gather.micro_batch if gather.slice is None else Slice(gather.micro_batch, gather.slice)
        if (served, gather.phase) != (piece_of(op), phase):
            note = self.report.note("gathered here", gather)
            text = f"'{op!r}' uses %{view.name}, which was gathered for the {gather.phase.value} of {word_of(served)}"
            way_out = "at level dataflow, where no order is claimed, each use needs its own gather"
            self.report.at_op("RT030", text, self.stage, op, view, notes=[note], help=way_out)

    def serves_phase(self, op: BlockOp, tensor: Tensor) -> None:
        """Report RT033 unless, at level dataflow, each use of a sharded input has a gather of its own.

        No order is claimed there, so that one gather cannot serve several uses.
        """
        gather = self.row_gathers.get(tensor)
        phase = Phase.FORWARD if op.work_group is WorkGroup.FORWARD else Phase.BACKWARD
        if self.module.level is Level.DATAFLOW and gather is not None and gather.phase not in (None, phase):
            note = self.report.note("gathered here", gather)
            text = (
                f"'{op!r}' uses %{tensor.name}, which was gathered for the {gather.phase.value} of "
                f"{word_of(piece_of(gather))}"
            )
            way_out = "at level dataflow each use needs its own gather"
            self.report.at_op("RT033", text, self.stage, op, tensor, notes=[note], help=way_out)

    def block_input(self, op: BlockOp, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Check that a block reads its own input."""
        if block.kind == "embed":
            self.expect("RT030", op, roles["tokens"], "tokens", m)
        else:
            self.expect("RT030", op, roles["x"], self.read("x"), self.source(block), m)
            self.serves_phase(op, roles["x"])

    def source(self, block: Block) -> Block:
        """Return the block whose input a block reads: itself, or the attention whose parallel branch it is."""
        return source_block(self.module.model, self.module.plan, block)

    def expect_saved(self, op: Op, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Check the saved slots of its own piece that an op reads."""
        own = self.own_slots(block)
        for name, tensor in roles.items():
            if name in own and tensor.kind is StateKind.SAVED and tensor in op.reads:
                self.expect("RT032", op, tensor, "saved", block, m, name)

    def own_slots(self, block: Block) -> frozenset[str]:
        """Return the names of the slots that a forward saves; a sliced attention has operands of other slices too."""
        return _slot_names(self.module.model, self.module.plan, block)

    def output_gradient(self, op: BlockOp | Dispatch, roles: dict[str, Tensor], block: Block, m: Piece) -> None:
        """Check the gradient of a block's output, which comes from the block after it."""
        model = self.module.model
        if self.adds_apart(block):
            self.expect("RT030", op, roles["dy"], self.read("dbranch"), block, m)
        else:
            self.expect("RT030", op, roles["dy"], self.read("dx"), sum_block(model, self.module.plan, block), m)
        self.check_branch_part(op, roles, "dx", next_block(model, block), m)

    def contribute(
        self, op: Backward | BackwardWeight | BackwardExperts, gradient: Tensor, block: Block, m: Piece
    ) -> None:
        """Add to a gradient: micro-batches in ascending order, the slices of each in descending order."""
        share = self.sums.share(m, descending=True)
        # `begin` is the first contribution: the micro-batch's own if gradients are reduced after each micro-batch.
        alone = reduces_each_micro_batch(self.module.model, self.module.plan, block)
        begin = share - share % self.sums.slices if alone else 0
        if gradient in op.writes:
            if share != begin:
                first = piece_text(self.sums.piece(begin, descending=True))
                text = f"the first contribution to the gradient of {block} must be {first}: micro-batches ascend"
                self.report.at_op("RT031", text, self.stage, op, gradient)
            self.set(gradient, "g", block, self.sums.shares(share + 1, share))
            return
        self.expect("RT031", op, gradient, "g", block, self.sums.shares(share, begin))
        self.set(gradient, "g", block, self.sums.shares(share + 1, begin))

    def contributed(self, block: Block, m: Piece) -> range | Shares:
        """Return the contributions that a gradient has once a piece's is whole."""
        share = self.sums.share(m, descending=True)
        alone = reduces_each_micro_batch(self.module.model, self.module.plan, block)
        return self.sums.shares(share + 1, share - share % self.sums.slices if alone else 0)

    def end_contribution(self, op: Backward, gradient: Tensor, block: Block, m: Piece) -> None:
        """Add what a block's backward gives to the contribution that its experts and their copies have made."""
        begun = "g with copies" if copies_experts(self.module.plan) else "begun g"
        self.expect("RT031", op, gradient, begun, block, self.contributed(block, m))
        self.set(gradient, "g", block, self.contributed(block, m))


@cache
def _slot_names(model: ModelConfig, plan: Plan, block: Block) -> frozenset[str]:
    return frozenset(slot.name for slot in saved_slots(model, slice_plan(plan, 0) if plan.slices else plan, block))
