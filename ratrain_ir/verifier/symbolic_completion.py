"""End of the symbolic run: everything that a step must do is done, and what is carried holds the next step's value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import define

from ratrain.ratrain_ir.model.blocks import has_backward
from ratrain.ratrain_ir.model.expert_ranks import shares_experts
from ratrain.ratrain_ir.model.sharded_blocks import is_sharded, reduces_each_micro_batch
from ratrain.ratrain_ir.ops.base import Group, Piece, Quantity
from ratrain.ratrain_ir.ops.collectives import mean_group
from ratrain.ratrain_ir.verifier.reporter import MAX_REPORTS
from ratrain.ratrain_ir.verifier.symbolic_exchanges import SymbolicExchanges
from ratrain.ratrain_ir.verifier.symbolic_values import FROZEN, FROZEN_PARTS, word_of, words_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.ratrain_ir.verifier.slices import Value


@define(eq=False)
class SymbolicCompletion(SymbolicExchanges):
    """Checks of a whole step of a stage."""

    def check_complete(self) -> None:
        """Report required work that is not done, and carried tensors that do not hold the next step's value."""
        for what in self.required():
            if len(self.report.diagnostics.items) >= MAX_REPORTS:
                break  # a plan can promise millions of micro-batches that a text does not have
            if what not in self.done:
                text = f"stage @{self.stage.index} never does '{' '.join(word_of(w) for w in what if w is not None)}'"
                code = "RT031" if what[0] in ("reduce", "update", "all_reduce") else "RT030"
                if Group.TENSOR in what:
                    code = "RT033"
                self.report.at_stage(code, text, self.stage)
        for tensor in self.stage.tensors.values():
            if tensor.carried and not self.report.diagnostics.errors:
                self.check_carried(tensor)

    def required(self) -> Iterator[Value]:
        """Yield everything that must be done in a step, as keys of `done`."""
        model, plan = self.module.model, self.module.plan
        for share in range(plan.micro_batches * self.sums.slices):
            yield from self.passes(self.sums.piece(share, descending=False))
        yield from (("backward_weight", block, m) for block, m in self.split)
        for block in self.trained:
            for m in range(plan.micro_batches) if reduces_each_micro_batch(model, plan, block) else ():
                yield "reduce", block, m
            yield from self.required_of(block)
        yield from self.required_at_end()

    def passes(self, m: Piece) -> Iterator[Value]:
        """Yield the forward of each block for a piece, and the backward of each that has one."""
        model, plan = self.module.model, self.module.plan
        for block in self.blocks:
            yield "forward", block, m
            if has_backward(model, plan, block):
                yield "backward", block, m

    def required_of(self, block: Block) -> Iterator[Value]:
        """Yield what must be done for a block once a step: reductions and the update."""
        model, plan = self.module.model, self.module.plan
        if not is_sharded(model, plan, block):
            yield ("all_reduce", mean_group(model, plan, block), block)
        elif not reduces_each_micro_batch(model, plan, block):
            yield ("reduce", block, None)
        if plan.tp > 1:
            yield ("all_reduce", Group.TENSOR, block)
        if shares_experts(model, plan, block):
            yield ("all_reduce", Group.EXPERTS, block)
        yield ("update", block)

    def required_at_end(self) -> Iterator[Value]:
        """Yield what must be done on the stage once a step: scalars."""
        plan = self.module.plan
        if self.stage.index == self.module.topology.last_stage:
            yield ("all_reduce_scalar", Quantity.LOSS)
        if plan.optimizer.clip == "global":
            yield ("all_reduce_scalar", Quantity.NORM)
        if self.biased:
            yield ("all_reduce_scalar", Quantity.COUNTS)
        if plan.has_dynamic_scale:
            yield from (("all_reduce_scalar", Quantity.FLAGS), ("scale_update",))

    def check_carried(self, tensor: Tensor) -> None:
        """Report RT024 unless a carried tensor ends with the next step's value of what it began with."""
        before, after = self.carried_in.get(tensor), self.values.get(tensor)
        if before is None or after is None:
            self.report.at_tensor("RT024", f"%{tensor.name} is carried, but nothing uses what it carries", tensor)
            return
        expected = self.next_value(before)
        if after != expected:
            text = (
                f"%{tensor.name} is carried: the step must leave {words_of(expected)} in it, but leaves "
                f"{words_of(after)}"
            )
            self.report.at_tensor("RT024", text, tensor)

    def next_value(self, before: Value) -> Value:
        """Return the value with which a carried tensor must end, given the one with which it began."""
        # A static loss scale and frozen parameters are never written, so they stay the values of this step.
        static = before[0] in _STATIC or (before[0] == "scale" and not self.module.plan.has_dynamic_scale)
        return before if static else (*before[:-1], "next step")


_STATIC = frozenset({*FROZEN.values(), *FROZEN_PARTS.values()})
"""Values that no step changes."""
