"""End of a step in the symbolic run: gradients are reduced, state updated, views gathered, scalars combined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from ratrain.ratrain_ir.model.blocks import ties_gradients
from ratrain.ratrain_ir.model.expert_ranks import biases_choice, shares_experts
from ratrain.ratrain_ir.model.sharded_blocks import parts_view
from ratrain.ratrain_ir.ops.base import Group, Op, Quantity
from ratrain.ratrain_ir.verifier.symbolic_offload import SymbolicOffload
from ratrain.ratrain_ir.verifier.symbolic_values import FROZEN, FROZEN_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.ops.base import Piece
    from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, AllReduceScalar, ReduceScatter
    from ratrain.ratrain_ir.ops.compute import Backward, BackwardWeight, ScaleUpdate, Update
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.ratrain_ir.verifier.slices import Value


@define(eq=False)
class SymbolicUpdates(SymbolicOffload):
    """Visits of ops on whole gradients and state."""

    def reduce_scatter(self, op: ReduceScatter) -> None:
        """Reduce gradients into shards: whole ones, or one micro-batch's in ascending order."""
        roles = self.roles(op)
        count = self.module.plan.micro_batches
        for block in op.blocks:
            shard, flag = roles[f"gs.{block}"], roles[f"flag.{block}"]
            if op.micro_batch is None:
                self.expect("RT031", op, roles[f"g.{block}"], "g", block, self.sums.of_micro_batches(count))
                reduced = range(count)
            else:
                m = op.micro_batch
                self.expect("RT031", op, roles[f"g.{block}"], "g", block, self.sums.of_micro_batches(m + 1, m))
                reduced = range(m + 1)
                # The first micro-batch writes the shard; later ones add to it, in ascending order.
                if op.updates:
                    self.expect("RT031", op, shard, "reduced", block, range(m))
                    self.expect("RT031", op, flag, "flag", block, range(m))
                elif m != 0:
                    text = f"the first reduction of {block} must be m0: micro-batches ascend"
                    self.report.at_op("RT031", text, self.stage, op, shard)
            self.once(op, "RT031", "reduce", block, op.micro_batch)
            self.set(shard, "reduced", block, reduced)
            self.set(flag, "flag", block, reduced)

    def all_reduce(self, op: AllReduce) -> None:
        """Combine gradients over the op's group: replicas, tensor-parallel ranks or both ends of tied embeddings.

        One op combines over one group. Such ops follow each other in this order.
        """
        roles = self.roles(op)
        everything = range(self.module.plan.micro_batches)
        for block in op.blocks:
            self.once(op, "RT031", "all_reduce", op.group, block)
            # The three reductions follow each other; each expects the values that the one before left.
            if op.group in (Group.TENSOR, Group.EXPERTS):
                gradient, flag = self.reduced_values(block)
                self.expect("RT033", op, roles[f"gs.{block}"], *gradient)
                self.expect("RT033", op, roles[f"flag.{block}"], *flag)
                self.set(roles[f"gs.{block}"], "summed", block)
                self.set(roles[f"flag.{block}"], *flag, "of peers")
            elif op.group in (Group.REPLICAS, Group.COPIES):
                self.expect("RT031", op, roles[f"g.{block}"], "g", block, self.sums.of_micro_batches(len(everything)))
                self.set(roles[f"g.{block}"], "reduced", block, everything)
                self.set(roles[f"flag.{block}"], "flag", block, everything)
            else:
                gradient, flag = self.peer_values(block)
                self.expect("RT031", op, roles[f"gs.{block}"], *gradient)
                self.expect("RT031", op, roles[f"flag.{block}"], *flag)
                self.set(roles[f"gs.{block}"], "tied", block)
                self.set(roles[f"flag.{block}"], *flag, "tied")
        # Each end sums its side of the tied table: the embedding, the head, or both on one stage.
        if op.group is Group.ENDS:
            expected = {block for block in self.blocks if block.kind in ("embed", "head")}
            if set(op.blocks) != expected:
                names = ", ".join(sorted(map(str, expected)))
                text = f"'all_reduce ends' on stage @{self.stage.index} must cover {names}"
                self.report.at_op("RT031", text, self.stage, op)

    def is_tied(self, block: Block) -> bool:
        """Tell whether a block shares its embedding table with the other end of the pipeline."""
        return block.kind in ("embed", "head") and ties_gradients(self.module.model, self.module.plan)

    def update(self, op: Update) -> None:
        """Turn a block's state of this step into that of the next."""
        block = op.block
        roles = self.roles(op)
        self.once(op, "RT031", "update", block)
        self.expect_reduced(op, roles["g"], roles["flag"], block)
        if "norm" in roles:
            self.expect("RT031", op, roles["norm"], "norm")
        self.expect("RT031", op, roles["scale"], "scale", "this step")
        for name in ("p", "m1", "m2", "t"):
            self.expect("RT031", op, roles[name], name, block, "this step")
            self.set(roles[name], name, block, "next step")
        if "w" in roles:
            self.set(roles["w"], "view", block, "next step")

    def all_gather(self, op: AllGather) -> None:
        """Make views of masters: of this step within it, of the next one at its end.

        Where groups share a view, its parts are made of masters at the end, and the whole is made of the parts within
        the step.
        """
        roles = self.roles(op)
        step = "next step" if op.phase is None else "this step"
        for block in op.blocks:
            master, part, whole = ("p", "p"), ("v", "part of view"), ("w", "view")
            source, made = master, whole
            if parts_view(self.module.model, self.module.plan, block):
                source, made = (master, part) if op.phase is None else (part, whole)
            frozen = zip(FROZEN_PARTS.items(), FROZEN.items(), strict=True)
            for (read, value), (name, whole_value) in ((source, made), *frozen):
                if f"{read}.{block}" in roles:
                    view = roles[f"{name}.{block}"]
                    self.expect("RT031", op, roles[f"{read}.{block}"], value, block, step)
                    self.set(view, whole_value, block, step)
                    self.gathers[view] = op

    def all_reduce_scalar(self, op: AllReduceScalar) -> None:
        """Combine the loss of all micro-batches, the flags of all blocks, the norm, or counts of experts' tokens."""
        self.once(op, "RT030", "all_reduce_scalar", op.quantity)
        if op.quantity in (Quantity.NORM, Quantity.COUNTS):
            (self.norm if op.quantity is Quantity.NORM else self.move_biases)(op)
            return
        if op.quantity is Quantity.LOSS:
            count = self.module.plan.micro_batches * self.sums.slices
            self.expect("RT030", op, op.reads[0], "loss", self.sums.shares(count, descending=False))
            return
        for block in self.trained:
            if not self.holds(op.reads, self.final_values(block)[1]):
                text = f"the overflow flag of {block}, of all micro-batches, is left out"
                self.report.at_op("RT031", text, self.stage, op)
        self.set(op.writes[0], "overflow")

    def norm(self, op: AllReduceScalar) -> None:
        """Take the norm of every block's reduced gradient, once; tied gradients count after they are summed."""
        roles = self.roles(op)
        for block in op.blocks:
            self.expect_reduced(op, roles[f"gs.{block}"], roles[f"flag.{block}"], block)
        if op.blocks != self.trained:
            missing = ", ".join(str(block) for block in self.trained if block not in op.blocks) or "the order"
            self.report.at_op("RT031", f"the norm takes the stage's blocks in order; wrong: {missing}", self.stage, op)
        self.set(op.writes[0], "norm")

    @property
    def biased(self) -> tuple[Block, ...]:
        """Blocks of the stage whose routers choose with a bias, in order."""
        return tuple(block for block in self.blocks if biases_choice(self.module.model, self.module.plan, block))

    def count_tokens(self, op: Backward | BackwardWeight, roles: Mapping[str, Tensor], block: Block, m: Piece) -> None:
        """Add the tokens of a piece to the counts of a block's experts, in the order of gradients."""
        if "load" in roles:
            share = self.sums.share(m, descending=True)
            before = self.sums.shares(share, 0) if share else "this step"
            self.expect("RT031", op, roles["load"], "load", block, before)
            self.set(roles["load"], "load", block, self.sums.shares(share + 1, 0))

    def move_biases(self, op: AllReduceScalar) -> None:
        """Move each bias by the counts of a whole step, and begin those of the next one."""
        roles = self.roles(op)
        everything = self.sums.of_micro_batches(self.module.plan.micro_batches)
        for block in op.blocks:
            bias, load = roles[f"bias.{block}"], roles[f"load.{block}"]
            self.expect("RT031", op, roles[f"flag.{block}"], *self.final_values(block)[1])
            self.expect("RT031", op, load, "load", block, everything)
            self.expect("RT031", op, bias, "bias", block, "this step")
            for name, tensor in (("bias", bias), ("load", load)):
                self.set(tensor, name, block, "next step")
        if "norm" in roles:
            self.expect("RT031", op, roles["norm"], "norm")
        if op.blocks != self.biased:
            missing = ", ".join(str(block) for block in self.biased if block not in op.blocks) or "the order"
            text = f"the counts are of the stage's mlps in order; wrong: {missing}"
            self.report.at_op("RT031", text, self.stage, op)

    def expect_reduced(self, op: Op, gradient: Tensor, flag: Tensor, block: Block) -> None:
        """Check that a gradient and its flag are final: of all micro-batches, replicas, ranks and tied ends."""
        values = self.final_values(block)
        self.expect("RT031", op, gradient, *values[0])
        self.expect("RT031", op, flag, *values[1])

    def reduced_values(self, block: Block) -> tuple[Value, Value]:
        """Return the values of a gradient and its flag after reduction over micro-batches and replicas."""
        everything = range(self.module.plan.micro_batches)
        return ("reduced", block, everything), ("flag", block, everything)

    def peer_values(self, block: Block) -> tuple[Value, Value]:
        """Return the values of a gradient and its flag after tensor-parallel or expert ranks have summed shared."""
        gradient, flag = self.reduced_values(block)
        shared = self.module.plan.tp > 1 or shares_experts(self.module.model, self.module.plan, block)
        return (("summed", block), (*flag, "of peers")) if shared else (gradient, flag)

    def final_values(self, block: Block) -> tuple[Value, Value]:
        """Return the values of a gradient and its flag that the update reads.

        Tied gradients are summed with the other end; their flag is combined after that, because the sum may overflow
        where neither part does.
        """
        gradient, flag = self.peer_values(block)
        return (("tied", block), (*flag, "tied")) if self.is_tied(block) else (gradient, flag)

    def scale_update(self, op: ScaleUpdate) -> None:
        """Set the next step's loss scale from the combined flag of all ranks."""
        self.once(op, "RT030", "scale_update")
        self.expect("RT031", op, op.reads[0], "overflow")
        self.expect("RT031", op, op.updates[0], "scale", "this step")
        self.set(op.updates[0], "scale", "next step")
