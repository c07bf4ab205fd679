"""Collectives: of replicas on gradients and views, of tensor-parallel ranks within a pass, of all ranks on scalars."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar, TypeGuard, final, get_args

from attrs import define

from ratrain.ratrain_ir.config.tensor_ranks import adds_branches_apart, norms_over_ranks
from ratrain.ratrain_ir.config.types import Dtype, StateKind
from ratrain.ratrain_ir.model.blocks import Block, block_chain, previous_block, trains
from ratrain.ratrain_ir.model.expert_ranks import biases_choice, shares_experts
from ratrain.ratrain_ir.model.sharded_blocks import parts_view, shares_frozen
from ratrain.ratrain_ir.model.slots import (
    PRODUCTS,
    SQUARES,
    branch_slots,
    computed_type,
    row_sum_slots,
    shares_rows,
)
from ratrain.ratrain_ir.model.tensor_blocks import adds_branch_apart, is_parallel_mlp
from ratrain.ratrain_ir.ops.base import (
    BlockPayloadOp,
    BlockPieceOp,
    Engine,
    Group,
    Op,
    Payload,
    Phase,
    Quantity,
    WorkGroup,
    phase_field,
)
from ratrain.ratrain_ir.ops.context_ranks import GatherHeads, GatherKeys, ReduceKeys, ReturnHeads
from ratrain.ratrain_ir.ops.expert_ranks import Combine, Dispatch
from ratrain.ratrain_ir.ops.op_fields import (
    blocking_field,
    blocks_field,
    enum_field,
    micro_batch_field,
    slice_field,
)
from ratrain.ratrain_ir.ops.operands import Candidates, Role, Signature, SignatureError
from ratrain.ratrain_ir.ops.roles import (
    ACTIVATIONS,
    PARTIAL,
    SAVED,
    check_row_sums,
    choice_bias_roles,
    exchanged_role,
    flag_roles,
    frozen_part_roles,
    frozen_roles,
    gradient_role,
    load_roles,
    part_of_sums,
    parts_of_loss,
    reduced_role,
    saved_roles,
    scalar_role,
    shard_role,
    state_role,
    token_role,
    view_role,
    view_shard_role,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BlocksOp(Op):
    """Base of collectives on the gradients or views of some blocks."""

    blocks: tuple[Block, ...] = blocks_field()

    def served_blocks(self, model: ModelConfig) -> tuple[Block, ...]:
        """List the blocks that this op names."""
        del model
        return self.blocks


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class TensorPieceOp(BlockPayloadOp):
    """Base of exchanges of a block's input, or of its gradient, between tensor-parallel ranks."""

    default_members = Group.TENSOR
    block_kinds: ClassVar[tuple[str, ...]] = ("attention", "mlp", "head")

    def served_blocks(self, model: ModelConfig) -> tuple[Block, ...]:
        """List the block whose result is exchanged: for an activation the one before, for a gradient this one."""
        return (previous_block(self.block, model) if self.payload is Payload.ACTIVATION else self.block,)

    def missing(self, model: ModelConfig, plan: Plan) -> str | None:
        """Explain why the plan has no such exchange; None if it has.

        It has none without tensor-parallel ranks, or if the block has no input of its own.
        """
        return _missing_input(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ReduceScatter(BlocksOp):
    """GradSync into shards: the mean over replicas of each block's gradient.

    An overflow flag goes with each shard. With a micro-batch it reduces the contribution of that micro-batch (`reduce =
    "each-micro-batch"`), without one the gradient of the whole step. Compute waits for it if it is blocking.
    """

    keyword = "reduce_scatter"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True
    group: Group = enum_field(Group, Group.REPLICAS, among=(Group.REPLICAS, Group.COPIES))
    micro_batch: int | None = micro_batch_field(optional=True)
    blocking: bool = blocking_field()

    @property
    def members(self) -> Group:
        """The group that the op's text names: all replicas, or those with the same experts."""
        return self.group

    @property
    def work_group(self) -> WorkGroup:
        """The end of the step; the weight half of the backward if it reduces one micro-batch."""
        return WorkGroup.STEP_END if self.micro_batch is None else WorkGroup.WEIGHT

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures: the reduced shards and flags are written, or added to earlier ones."""
        return _reduce_scatter(model, plan, self.blocks)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AllReduce(BlocksOp):
    """GradSync in place: the mean over replicas, or the sum of tied or shared gradients.

    The overflow flags are combined too. Tied gradients, of the embedding and the head, are summed over `ends`.
    Gradients of parameters that several tensor-parallel ranks hold are summed over `tensor`, after the mean over
    replicas; of an mlp whose experts replicas share out, the mean is over `copies`, and the gradients of what all have
    are summed over `experts`. Compute waits for it if it is blocking.
    """

    keyword = "all_reduce"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True
    group: Group = enum_field(Group, Group.REPLICAS)
    blocking: bool = blocking_field()

    @property
    def members(self) -> Group:
        """The group that the op's text names."""
        return self.group

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _all_reduce(model, plan, self.blocks, self.group)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class GatherRows(TensorPieceOp):
    """Gathers the input of a block, or its gradient, from the rows of all tensor-parallel ranks.

    `phase` is the pass that reads a gathered activation. A gathered gradient is read by the backward of the block
    before.
    """

    keyword = "gather_rows"
    default_engine = Engine.TENSOR
    alike_on_all_stages = True
    phase: Phase | None = phase_field()

    @property
    def work_group(self) -> WorkGroup:
        """The pass that reads the rows."""
        return WorkGroup.BACKWARD if self.phase is None else self.phase.work_group

    def served_blocks(self, model: ModelConfig) -> tuple[Block, ...]:
        """List the block that reads the rows: this one for an activation, the one before for a gradient."""
        return (self.block if self.payload is Payload.ACTIVATION else previous_block(self.block, model),)

    def missing(self, model: ModelConfig, plan: Plan) -> str | None:
        """Explain why the plan gathers no such rows; None if it does.

        It gathers none if nothing is exchanged, if every rank has all rows, or if `phase` does not fit the payload.
        """
        if (wrong := _missing_input(model, plan, self.block)) is not None:
            return wrong
        if not shares_rows(plan):
            return "every tensor-parallel rank has all rows (sequence_sharding = false)"
        if (self.phase is None) == (self.payload is Payload.ACTIVATION):
            return (
                "a gather of an activation says whether it is for the forward or the backward, "
                "one of a gradient does not"
            )
        return None

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _gather_rows(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ReduceRows(TensorPieceOp):
    """Sums tensor-parallel ranks' partial inputs of a block, or the partial gradients of its input.

    It sums in f32 in rank order and rounds once. It adds the residual stream once, if there is one: the input of the
    block before, or the gradient of its output. Each rank gets its own rows, or all rows if rows are not sharded. In
    models that apply a norm to the output of each block before adding it, it sums that output alone, without the
    stream.

    `phase` is `backward` if it repeats, in the backward, the sum of an activation whose parts a `recompute` has made
    again.
    """

    keyword = "reduce_rows"
    default_engine = Engine.TENSOR
    alike_on_all_stages = True
    phase: Phase | None = phase_field()

    @property
    def work_group(self) -> WorkGroup:
        """The pass of the payload; the backward if an activation is summed again."""
        if self.payload is Payload.ACTIVATION and self.phase is None:
            return WorkGroup.FORWARD
        return WorkGroup.BACKWARD

    def missing(self, model: ModelConfig, plan: Plan) -> str | None:
        """Explain why the plan sums no such rows; None if it does.

        It sums none if nothing is exchanged, if `phase` does not fit the payload, or if no recovery makes the parts
        again.
        """
        if (wrong := _missing_input(model, plan, self.block)) is not None or self.phase is None:
            return wrong
        if self.payload is Payload.GRADIENT or self.phase is Phase.FORWARD:
            return "only the sum of an activation is repeated, for the backward"
        return why_never_repeated(model, plan) or None

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _reduce_rows(model, plan, self.block, self.payload)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class CombineLoss(BlockPieceOp):
    """Combines the loss of a micro-batch from tensor-parallel ranks' parts of the vocabulary.

    The logits are not moved. Afterwards every rank has the loss and, for each row, the log of its sum of exponentials.
    """

    keyword = "combine_loss"
    default_engine = Engine.TENSOR
    default_members = Group.TENSOR
    default_work_group = WorkGroup.FORWARD
    alike_on_all_stages = True
    block_kinds: ClassVar[tuple[str, ...]] = ("head",)

    def missing(self, model: ModelConfig, plan: Plan) -> str | None:
        """Explain that the plan has no tensor-parallel ranks; None if it has."""
        return _missing_input(model, plan, self.block)

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _combine_loss(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ReduceSums(TensorPieceOp):
    """Sums the row statistics that norms of queries and keys need over tensor-parallel ranks.

    The statistics are the squares of queries and keys in the forward, and their products with the gradient in the
    backward. It sums in f32 in rank order; afterwards every rank has all sums.
    """

    keyword = "reduce_sums"
    default_engine = Engine.TENSOR
    alike_on_all_stages = True
    block_kinds = ("attention",)

    def served_blocks(self, model: ModelConfig) -> tuple[Block, ...]:
        """List the block that norms queries and keys."""
        del model
        return (self.block,)

    def missing(self, model: ModelConfig, plan: Plan) -> str | None:
        """Explain why the plan sums no rows; None if it does.

        It sums none without tensor-parallel ranks, or without norms over all heads of a token.
        """
        if plan.tp > 1 and not norms_over_ranks(model, plan):
            return f"{model.name} norms no queries and keys over all heads of a token"
        return _missing_input(model, plan, self.block)

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _reduce_sums(model, plan, self.block, self.payload)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AllReduceScalar(Op):
    """Combines scalars of a group: the loss, overflow flags, the gradient's norm or counts of experts' tokens.

    The loss is summed and reported. The flags are combined by "or". For the norm, the op names all blocks of the stage
    that train, and reads their reduced gradients; it is infinite if one of their flags is set anywhere. Ranks of a
    stage in which nothing trains meet the others without a block or a flag. The counts are those of the mlps that it
    names; after their sum it moves each expert's bias against its load, unless the block's update is skipped, and
    begins the counts of the next step.
    """

    keyword = "all_reduce_scalar"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True
    quantity: Quantity = enum_field(Quantity)
    group: Group = enum_field(Group)
    blocks: tuple[Block, ...] = blocks_field(optional=True)

    @property
    def members(self) -> Group:
        """The group that the op's text names."""
        return self.group

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        if self.quantity is Quantity.NORM:
            return _norm(model, plan, self.blocks)
        if self.quantity is Quantity.COUNTS:
            return _counts(model, plan, self.blocks)
        return _all_reduce_scalar(self.quantity, len(self.reads))


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AllGather(BlocksOp):
    """PrefetchW: makes parameter views whole from the replicas' master shards.

    It does so at the step's end for the next step or, with a micro-batch and a phase, within the step for one use (ZeRO
    3). Where a group of replicas shares a view (`view_group`), it makes the replica's part of the view at the step's
    end, and within the step the whole view from the parts of the group. Within the step it makes the block's frozen
    parameters whole too, from the parts of replicas; these never change. Compute waits for it if it is blocking.
    """

    keyword = "all_gather"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True
    group: Group = enum_field(Group, Group.SHARDS, among=(Group.SHARDS, Group.COPIES))
    micro_batch: int | None = micro_batch_field(optional=True)
    slice: int | None = slice_field()
    phase: Phase | None = phase_field()
    blocking: bool = blocking_field()

    @property
    def members(self) -> Group:
        """The ranks that exchange data, by what the op reads and writes.

        `VIEWS` if it reads parts of a view, `PARTS` if it makes a part of a view from masters, else the group of its
        text: `SHARDS`, or the replicas with the same experts.
        """
        if any(tensor.kind is StateKind.VIEW_SHARD for tensor in self.reads):
            return Group.VIEWS
        return Group.PARTS if any(tensor.kind is StateKind.VIEW_SHARD for tensor in self.writes) else self.group

    @property
    def work_group(self) -> WorkGroup:
        """The end of the step; the pass that uses the views if it gathers for one micro-batch."""
        if self.micro_batch is None:
            return WorkGroup.STEP_END
        return WorkGroup.BACKWARD if self.phase is None else self.phase.work_group

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _all_gather(model, plan, self.blocks, within_step=self.phase is not None)


def _missing_input(model: ModelConfig, plan: Plan, block: Block) -> str | None:
    """Explain why tensor-parallel ranks exchange nothing at the input of a block; None if they do."""
    if plan.tp == 1:
        return "the plan has no tensor-parallel ranks (tp = 1)"
    if is_parallel_mlp(model, plan, block):
        return f"attention and mlp of a layer are side by side: {block} has no input of its own"
    return None


TensorOp = (
    GatherRows
    | ReduceRows
    | ReduceSums
    | CombineLoss
    | GatherKeys
    | ReduceKeys
    | GatherHeads
    | ReturnHeads
    | Dispatch
    | Combine
)
TENSOR_OPS: tuple[type[Op], ...] = get_args(TensorOp)
"""Kinds of collectives of tensor-parallel, context or expert ranks within the passes of a micro-batch"""


STATE_OPS: tuple[type[Op], ...] = (ReduceScatter, AllReduce, AllReduceScalar, AllGather)
"""Kinds of collectives on gradients, views and scalars of a step"""


COLLECTIVE_OPS: tuple[type[Op], ...] = (*STATE_OPS, *TENSOR_OPS)
"""All kinds of collectives"""


TensorCollective = ReduceScatter | AllReduce | AllGather
"""Collectives on whole tensors; only these can be blocking"""


def why_never_repeated(model: ModelConfig, plan: Plan) -> str:
    """Return why a backward never repeats the sums of activations over tensor-parallel ranks; empty if it may."""
    if model.parallel_residual:
        return f"in {model.name} attention and mlp read one input, so no sum stands between them"
    if adds_branches_apart(model, plan):
        return f"{model.name} norms the output of each block, and keeps its sum over tensor-parallel ranks"
    return ""


def mean_group(model: ModelConfig, plan: Plan, block: Block) -> Group:
    """Return the replicas over which a block's gradient is averaged: all, or those with the same experts."""
    return Group.COPIES if shares_experts(model, plan, block) else Group.REPLICAS


def shards_group(model: ModelConfig, plan: Plan, block: Block) -> Group:
    """Return the ranks that have all shards of a block between them: of all replicas, or those with its experts."""
    return Group.COPIES if shares_experts(model, plan, block) else Group.SHARDS


def repeats_sum(op: Op) -> TypeGuard[ReduceRows]:
    """Tell whether an op repeats, for a recovery, the sum of an activation over tensor-parallel ranks."""
    return type(op) is ReduceRows and op.phase is Phase.BACKWARD


def reduces_over_replicas(op: Op) -> TypeGuard[ReduceScatter | AllReduce]:
    """Tell whether an op sums gradients over the replicas of its stage."""
    return isinstance(op, ReduceScatter) or (isinstance(op, AllReduce) and op.group in (Group.REPLICAS, Group.COPIES))


def is_blocking(op: Op) -> bool:
    """Tell whether compute waits for an op.

    A blocking op starts when all compute ops before it in the list are done; compute ops after it wait for it.
    """
    return isinstance(op, TensorCollective) and op.blocking


@cache
def _reduce_sums(model: ModelConfig, plan: Plan, block: Block, payload: Payload) -> Candidates:
    check_row_sums(model, plan, block)
    (slot,) = row_sum_slots(model, plan, block, SQUARES if payload is Payload.ACTIVATION else PRODUCTS)
    return [(False, Signature((part_of_sums(plan, "part"),), (Role("sum", SAVED, slot.type, slot=slot.name),)))]


@cache
def _reduce_scatter(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...]) -> Candidates:
    reads = tuple(gradient_role(model, plan, block, f"g.{block}") for block in blocks)
    results = (*(shard_role(model, plan, block, f"gs.{block}") for block in blocks), *flag_roles(blocks))
    return [(False, Signature(reads, results)), (True, Signature(reads, (), results))]


@cache
def _gather_rows(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    whole = Role("whole", ACTIVATIONS, computed_type(model, plan, block))
    return [(False, Signature((exchanged_role("rows", model, plan, block),), (whole,)))]


@cache
def _reduce_rows(model: ModelConfig, plan: Plan, block: Block, payload: Payload) -> Candidates:
    """List the one signature of a sum of rows.

    The residual stream is an operand except at the ends: the embedding's output has no stream before it in the forward,
    the head's input gradient none in the backward.
    """
    part = Role("part", PARTIAL, computed_type(model, plan, block))
    activation = payload is Payload.ACTIVATION
    if (
        activation
        and block is not block_chain(model)[0]
        and adds_branch_apart(model, plan, previous_block(block, model))
    ):
        branch = branch_slots(model, plan)[0]
        return [(False, Signature((part,), (Role("sum", SAVED, branch.type, slot=branch.name),)))]
    alone = block is block_chain(model)[1] if activation else block.kind == "head"
    around = () if alone else (exchanged_role("stream", model, plan, block),)
    return [(False, Signature((part, *around), (exchanged_role("sum", model, plan, block),)))]


@cache
def _combine_loss(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    lse = tuple(role for role in saved_roles(model, plan, block, optional=False) if role.name == "lse")
    parts = tuple(role._replace(name=f"{role.name}_part") for role in parts_of_loss(plan))
    reads, loss = (*parts, token_role("labels", plan)), scalar_role("loss", Dtype.F64)
    return [(False, Signature(reads, (*lse, loss))), (True, Signature(reads, lse, (loss,)))]


@cache
def _all_reduce(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...], group: Group) -> Candidates:
    if group in (Group.ENDS, Group.TENSOR, Group.EXPERTS):
        shards = tuple(reduced_role(model, plan, block, f"gs.{block}") for block in blocks)
        return [(True, Signature(updates=(*shards, *flag_roles(blocks))))]
    gradients = tuple(gradient_role(model, plan, block, f"g.{block}") for block in blocks)
    return [(True, Signature(writes=flag_roles(blocks), updates=gradients))]


@cache
def _all_gather(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...], *, within_step: bool) -> Candidates:
    reads, writes = [], []
    for block in blocks:
        if trains(model, plan, block):
            part = view_shard_role(model, plan, block) if parts_view(model, plan, block) else None
            master = state_role(model, plan, block, f"p.{block}", StateKind.MASTER)
            reads.append(part if part and within_step else master)
            writes.append(part if part and not within_step else view_role(model, plan, block, f"w.{block}"))
        if within_step and shares_frozen(model, plan, block):
            reads += frozen_part_roles(model, plan, block)
            writes += [role._replace(name=f"{role.name}.{block}") for role in frozen_roles(model, plan, block)]
    return [(False, Signature(tuple(reads), tuple(writes)))]


@cache
def _norm(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...]) -> Candidates:
    gradients = tuple(reduced_role(model, plan, block, f"gs.{block}") for block in blocks)
    return [(False, Signature((*gradients, *flag_roles(blocks)), (scalar_role("norm", Dtype.F64),)))]


@cache
def _counts(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...]) -> Candidates:
    for block in blocks:
        if not biases_choice(model, plan, block):
            raise SignatureError(f"nothing is counted for {block}: its experts are chosen without a bias (bias_update)")
    norm = (scalar_role("norm", Dtype.F64),) if plan.optimizer.clip == "global" else ()
    biases = (role for block in blocks for role in choice_bias_roles(model, plan, block, f"bias.{block}"))
    loads = (role for block in blocks for role in load_roles(model, plan, block, f"load.{block}"))
    return [(True, Signature((*flag_roles(blocks), *norm), (), (*biases, *loads)))]


@cache
def _all_reduce_scalar(quantity: Quantity, count: int) -> Candidates:
    if quantity is Quantity.LOSS:
        return [(False, Signature((scalar_role("loss", Dtype.F64),)))]
    flags = tuple(scalar_role(f"flag.{index}", Dtype.U32) for index in range(count))
    return [(False, Signature(flags, (scalar_role("overflow", Dtype.U32),)))]
