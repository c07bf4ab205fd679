"""Signatures: which tensors an op of a kind takes, in which order, of which state kind and type.

`bind` names an op's operands by role (`x`, `w`, `dy`, `q`, ...). The verifier reports what does not bind; emitters give
routines their operands by these names. Collectives take several blocks; their roles are `g.attention.0` and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attrs import frozen

from ratrain.ratrain_ir.config.plan import SlicePlan, slice_plan
from ratrain.ratrain_ir.config.types import Dtype, StateKind, TensorType, tensor_type
from ratrain.ratrain_ir.model.blocks import (
    HEADS_SLOTS,
    INPUT_HALF_SLOTS,
    KEY_SLOTS,
    PRODUCTS,
    SPLIT_KINDS,
    SQUARES,
    WEIGHT_HALF_SLOTS,
    Block,
    Slot,
    activation_type,
    block_chain,
    branch_slots,
    branch_sums,
    computed_type,
    exchanged_type,
    flat_elements,
    half_slots,
    is_sharded,
    keeps_view,
    kept_in_forward,
    last_viewer,
    next_block,
    normed_gradient_slots,
    parts_view,
    pending_slots,
    previous_block,
    projected_slots,
    reads_documents,
    row_sum_slots,
    row_sums_type,
    saved_slots,
    seen_slices,
    shard_elements,
    stream_type,
    sum_slots,
    token_type,
    tokens_per_micro_batch,
    view_shard_elements,
)
from ratrain.ratrain_ir.model.peer_blocks import adds_branch_apart, stands_beside
from ratrain.ratrain_ir.ops.ops import (
    BLOCK_OPS,
    GUEST_OPS,
    MEMORY_OPS,
    MESSAGE_OPS,
    PEER_OPS,
    AddBranch,
    AddBranchBackward,
    AllGather,
    AllReduce,
    AllReduceScalar,
    Backward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    CombineLoss,
    Evict,
    Fetch,
    Forward,
    GatherRows,
    GiveBack,
    Group,
    GuestOp,
    LoadInput,
    Op,
    Payload,
    Project,
    Quantity,
    Recompute,
    Recv,
    ReduceRows,
    ReduceScatter,
    ReduceSums,
    Release,
    ScaleUpdate,
    Send,
    Store,
    TakeBack,
    Tensor,
    Tensors,
    Update,
)
from ratrain.ratrain_ir.ops.per_op import PerOp

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

ACTIVATIONS = frozenset({StateKind.ACTIVATION, StateKind.BOUNDARY, StateKind.CHECKPOINT})
STORABLE = frozenset({*ACTIVATIONS, StateKind.SAVED})
"""What may be stored in another memory until it is used."""


class Role(NamedTuple):
    """One operand: its role, the state kinds it may have, its type; saved slots are known by their name too.

    A tuple, because every operand of every op is held against one, and taking a tuple apart is quick.
    """

    name: str
    kinds: frozenset[StateKind]
    type: TensorType
    optional: bool = False
    slot: str | None = None


Roles = tuple[Role, ...]


@frozen
class Signature:
    """The operands of an op, in order."""

    reads: Roles = ()
    writes: Roles = ()
    updates: Roles = ()


class SignatureError(ValueError):
    """An operand is missing, too many, or of the wrong kind or type. `tensor` is the one at fault, if any."""

    def __init__(self, message: str, tensor: Tensor | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


@frozen
class Binding:
    """Operands by role."""

    tensors: dict[str, Tensor]
    accumulates: bool
    """whether the result adds to an earlier one: a gradient after its first contribution, the loss after the first"""


def bind(op: Op, model: ModelConfig, plan: Plan) -> Binding:
    """The operands of an op by role.

    Raises `SignatureError` where they do not fit the op.
    """
    roles, accumulates = operand_roles(op, model, plan)
    return Binding(dict(zip(roles, op.reads + op.writes + op.updates, strict=True)), accumulates)


def operand_roles(op: Op, model: ModelConfig, plan: Plan) -> tuple[tuple[str, ...], bool]:
    """The roles of what an op reads, writes and updates, one by one, and whether its result adds to an earlier one.

    They depend on the fields of the op but for its micro-batch, and on kinds, types and saved slots of its operands. Raises
    `SignatureError` where these do not fit the op.
    """
    problem: SignatureError | None = None
    for accumulates, signature in signatures(op, model, plan):
        try:
            roles = [
                *_match(op, "reads", op.reads, signature.reads),
                *_match(op, "writes", op.writes, signature.writes),
                *_match(op, "updates", op.updates, signature.updates),
            ]
        except SignatureError as error:
            problem = problem or error
        else:
            return tuple(roles), accumulates
    assert problem is not None
    raise problem


def _match(op: Op, group: str, tensors: Tensors, roles: Roles) -> list[str]:
    matched: list[str] = []
    count = len(tensors)
    for role, kinds, type_, optional, slot in roles:
        tensor = tensors[len(matched)] if len(matched) < count else None
        if tensor is not None and tensor.kind in kinds and (slot is None or slot == tensor.slot):
            if tensor.type is not type_:
                raise SignatureError(f"%{tensor.name} is {tensor.type}, but {role} of '{op!r}' is {type_}", tensor)
            matched.append(role)
        elif not optional:
            expected = " or ".join(sorted(kind.value for kind in kinds))
            got = f"got {tensor.kind.value} %{tensor.name}" if tensor is not None else "nothing is there"
            raise SignatureError(f"'{op!r}' {group} {role} ({expected}, {type_}) here, but {got}", tensor)
    if len(matched) < count:
        extra = tensors[len(matched)]
        raise SignatureError(f"'{op!r}' has no use for {extra.kind.value} %{extra.name} among what it {group}", extra)
    return matched


Candidates = Sequence[tuple[bool, Signature]]


def signatures(op: Op, model: ModelConfig, plan: Plan) -> Candidates:
    """The signatures an op may have: (whether it accumulates, operands), the likelier first."""
    index = getattr(op, "slice", None)
    if index is not None or (plan.slices and type(op) in _OF_SLICES):
        plan = _plan_of_slice(op, plan, index)
    candidates = _MAKERS.by_kind[type(op)](op, model, plan)
    return candidates[::-1] if op.updates else candidates


def _plan_of_slice(op: Op, plan: Plan, index: int | None) -> Plan:
    try:
        return slice_plan(plan, index)
    except IndexError as error:
        named = "no slice" if index is None else f"s{index}"
        raise SignatureError(f"'{op!r}' names {named}: {error}") from None


def _of(name: str, kind: StateKind, type_: TensorType) -> Role:
    return Role(name, frozenset({kind}), type_)


_PARTIAL = frozenset({StateKind.PARTIAL})
_GUEST = frozenset({StateKind.GUEST})


def _before(name: str, model: ModelConfig, plan: Plan, block: Block) -> Role:
    """The input of a block, with all its rows, or what a block reads of the gradient of its output."""
    return Role(name, ACTIVATIONS, computed_type(model, plan, block))


def _after(name: str, model: ModelConfig, plan: Plan, block: Block, *, optional: bool = False) -> Role:
    """The output of a block, or its gradient; of several tensor peers each has a part of the output, or of what is to be normed and added."""
    kinds = _PARTIAL if plan.tp > 1 and name == "y" else ACTIVATIONS
    return Role(name, kinds, computed_type(model, plan, next_block(model, block)), optional)


def _input_gradient(model: ModelConfig, plan: Plan, block: Block) -> Role:
    """The gradient of a block's input, of which each of several tensor peers has a part."""
    return Role("dx", _PARTIAL if plan.tp > 1 else ACTIVATIONS, computed_type(model, plan, block))


def _beside(model: ModelConfig, plan: Plan, beside: bool) -> Roles:
    """What the other of an attention and an mlp side by side has made of the same sum of tensor peers' parts."""
    return (Role("beside", _PARTIAL, stream_type(model, plan)),) if beside else ()


def _exchanged(name: str, model: ModelConfig, plan: Plan, block: Block) -> Role:
    """The input of a block, or its gradient, as it is between blocks."""
    return Role(name, ACTIVATIONS, activation_type(model, plan, block))


def _scalar(name: str, dtype: Dtype, elements: int = 1) -> Role:
    return _of(name, StateKind.SCALAR, tensor_type(dtype, (elements,)))


def _scale() -> Role:
    return _scalar("scale", Dtype.F32, 2)


def _saved(model: ModelConfig, plan: Plan, block: Block, *, optional: bool, needed: tuple[str, ...] = ()) -> Roles:
    return tuple(
        Role(s.name, _SAVED, s.type, optional and s.name not in needed, s.name) for s in saved_slots(model, plan, block)
    )


def _seen_keys(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """The keys and values of the earlier slices that a slice of an attention sees, slice by slice."""
    if block.kind != "attention":
        return ()
    return tuple(
        Role(of_slice(slot.name, index), _SAVED, slot.type, slot=slot.name)
        for index in seen_slices(model, plan)
        for slot in saved_slots(model, slice_plan(plan.whole, index), block)
        if slot.name in KEY_SLOTS
    )


def _seen_sums(model: ModelConfig, plan: Plan, block: Block, *, first: bool) -> Roles:
    """The sums of key and value gradients that a slice of an attention adds to; `first`: those that it is the first to add to."""
    if block.kind != "attention":
        return ()
    index = plan.index if isinstance(plan, SlicePlan) else None
    earlier = [(each, slice_plan(plan.whole, each)) for each in seen_slices(model, plan)]
    return tuple(
        Role(of_slice(slot.name, each), _SAVED, slot.type, slot=slot.name)
        for each, other in earlier
        if (last_viewer(model, other) == index) is first
        for slot in sum_slots(model, other, block)
    )


def _own_sums(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """What later slices left for the gradients of a slice's own keys and values."""
    return tuple(Role(slot.name, _SAVED, slot.type, slot=slot.name) for slot in sum_slots(model, plan, block))


def of_slice(name: str, index: int) -> str:
    """The role of an operand that belongs to another slice of the same micro-batch."""
    return f"{name}_{index}"


def is_of_other_slice(role: str) -> bool:
    """Whether a role is that of an operand that belongs to another slice."""
    return role.rpartition("_")[2].isdigit()


_SAVED = frozenset({StateKind.SAVED})


def _view(model: ModelConfig, plan: Plan, block: Block, name: str = "w") -> Role:
    return _of(name, StateKind.VIEW, tensor_type(Dtype(plan.view_dtype), (flat_elements(model, plan, block),)))


def _view_shard(model: ModelConfig, plan: Plan, block: Block) -> Role:
    elements = view_shard_elements(model, plan, block)
    return _of(f"v.{block}", StateKind.VIEW_SHARD, tensor_type(Dtype(plan.view_dtype), (elements,)))


def _gradient(model: ModelConfig, plan: Plan, block: Block, name: str = "g") -> Role:
    return _of(name, StateKind.GRAD, tensor_type(Dtype(plan.grad_dtype), (flat_elements(model, plan, block),)))


def _shard(model: ModelConfig, plan: Plan, block: Block, name: str) -> Role:
    elements = shard_elements(model, plan, block)
    return _of(name, StateKind.GRAD_SHARD, tensor_type(Dtype(plan.grad_shard_dtype), (elements,)))


def _reduced(model: ModelConfig, plan: Plan, block: Block, name: str) -> Role:
    """The reduced gradient an update reads: the shard, or the whole where nothing is sharded."""
    return _shard(model, plan, block, name) if is_sharded(plan, block) else _gradient(model, plan, block, name)


def _input(name: str, plan: Plan) -> Role:
    return _of(name, StateKind.INPUT, token_type(plan))


def _documents(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Where the documents of a piece start, for a block that asks."""
    return (_input("documents", plan),) if reads_documents(model, plan, block) else ()


def _state(model: ModelConfig, plan: Plan, block: Block, name: str, kind: StateKind) -> Role:
    return _of(name, kind, tensor_type(Dtype.F32, (shard_elements(model, plan, block),)))


@cache
def _forward(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    view, documents = _view(model, plan, block), _documents(model, plan, block)
    if block.kind == "embed":
        reads: Roles = (_input("tokens", plan), view, *documents)
        return [(False, Signature(reads, (_after("y", model, plan, block),)))]
    source = _before("x", model, plan, block)
    if block.kind == "head":
        reads = (source, view, _input("labels", plan))
        saved, loss = _saved(model, plan, block, optional=False), _scalar("loss", Dtype.F64)
        if plan.tp > 1:
            return [(False, Signature(reads, (*_parts_of_loss(plan), *(role for role in saved if role.name != "lse"))))]
        return [(False, Signature(reads, (*saved, loss))), (True, Signature(reads, saved, (loss,)))]
    saved = _saved(model, plan, block, optional=True, needed=kept_in_forward(model, plan, block))
    if made := _made_before_forward(model, plan, block):
        names = [role.name for role in made]
        own = tuple(role for role in saved if role.name not in names)
        reads = (view, *documents, *made, *_seen_keys(model, plan, block))
        return [(False, Signature(reads, (_after("y", model, plan, block), *own)))]
    beside = _beside(model, plan, stands_beside(model, plan, block))
    reads = (source, view, *documents, *_seen_keys(model, plan, block), *beside)
    return [(False, Signature(reads, (_after("y", model, plan, block), *saved)))]


@cache
def _recompute(model: ModelConfig, plan: Plan, block: Block, *, attends: bool) -> Candidates:
    sums = tuple(slot.name for slot in row_sum_slots(model, plan, block, SQUARES))
    given = _saved(model, plan, block, optional=True, needed=sums)
    saved = tuple(role for role in given if role.name not in sums)
    seen = _seen_keys(model, plan, block) if attends else ()
    documents = _documents(model, plan, block)
    reads = (_before("x", model, plan, block), *given, _view(model, plan, block), *documents, *seen)
    if block.kind == "head":
        return [(False, Signature(reads, saved))]
    # what tensor peers exchange between blocks is small, and kept: making it again would take their collectives again
    writes = saved if plan.tp > 1 else (*saved, _after("y", model, plan, block, optional=True))
    return [(False, Signature(reads, writes))]


@cache
def _backward(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    source, view = _before("x", model, plan, block), _view(model, plan, block)
    outputs: Roles = (_input_gradient(model, plan, block),)
    saved, documents = _saved(model, plan, block, optional=False), _documents(model, plan, block)
    if projected_slots(model, plan, block):
        return _backward_of_norms(model, plan, block)
    if block.kind == "embed":
        reads: Roles = (_after("dy", model, plan, block), _input("tokens", plan), *documents)
        outputs = ()
    elif block.kind == "head":
        reads = (source, *saved, view, _input("labels", plan), _scale())
    else:
        others = (*documents, *_seen_keys(model, plan, block), *_own_sums(model, plan, block))
        others += _beside(model, plan, stands_beside(model, plan, next_block(model, block)))
        others += _branch_sums(model, plan, block)
        reads = (_after("dy", model, plan, block), source, *saved, view, *others)
    gradient = _gradient(model, plan, block)
    begun, added = (_seen_sums(model, plan, block, first=first) for first in (True, False))
    return [
        (False, Signature(reads, (*outputs, *begun, gradient), added)),
        (True, Signature(reads, (*outputs, *begun), (gradient, *added))),
    ]


def _backward_of_norms(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    """The backward of an attention from the gradients of normed queries and keys on, whose norms take sums over tensor peers."""
    names = [n for h in (INPUT_HALF_SLOTS, WEIGHT_HALF_SLOTS) for n in half_slots(model, plan, block, h)]
    saved = tuple(role for role in _saved(model, plan, block, optional=False) if role.name in names)
    ends = (_after("dy", model, plan, block), _before("x", model, plan, block))
    reads = (*ends, *saved, _view(model, plan, block), *_gradients_before_norms(model, plan, block))
    reads += _branch_sums(model, plan, block)
    dx, gradient = (_input_gradient(model, plan, block),), (_gradient(model, plan, block),)
    return [(False, Signature(reads, dx + gradient)), (True, Signature(reads, dx, gradient))]


def _made_before_forward(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Where norms of queries and keys take sums over tensor peers: what an attention's forward finds of its own saved slots."""
    return _slots((*projected_slots(model, plan, block), *row_sum_slots(model, plan, block, SQUARES)))


def _gradients_before_norms(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """There too: the gradients of normed queries and keys, and of values, and the sums that the norms' gradients take."""
    return _slots((*normed_gradient_slots(model, plan, block), *row_sum_slots(model, plan, block, PRODUCTS)))


def _part_of_sums(plan: Plan, name: str) -> Role:
    return Role(name, _PARTIAL, row_sums_type(plan))


def _of_row_sums(model: ModelConfig, plan: Plan, block: Block) -> None:
    """Raise `SignatureError` where nothing of a block is summed over rows of tensor peers."""
    if not projected_slots(model, plan, block):
        raise SignatureError(f"{block} norms no queries and keys over all heads of tensor peers: nothing is done apart")


@cache
def _project(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    _of_row_sums(model, plan, block)
    reads = (_before("x", model, plan, block), _view(model, plan, block))
    return [(False, Signature(reads, (_part_of_sums(plan, SQUARES), *_slots(projected_slots(model, plan, block)))))]


@cache
def _backward_heads(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    _of_row_sums(model, plan, block)
    others = (
        *_documents(model, plan, block),
        *_seen_keys(model, plan, block),
        *_own_sums(model, plan, block),
    )
    saved = _half_slots(model, plan, block, HEADS_SLOTS)
    reads = (_after("dy", model, plan, block), *saved, _view(model, plan, block), *others)
    begun, added = (_seen_sums(model, plan, block, first=first) for first in (True, False))
    made = (_part_of_sums(plan, PRODUCTS), *_slots(normed_gradient_slots(model, plan, block)))
    return [(False, Signature(reads, (*made, *begun), added))]


@cache
def _reduce_sums(model: ModelConfig, plan: Plan, block: Block, payload: Payload) -> Candidates:
    _of_row_sums(model, plan, block)
    (slot,) = row_sum_slots(model, plan, block, SQUARES if payload is Payload.ACTIVATION else PRODUCTS)
    return [(False, Signature((_part_of_sums(plan, "part"),), (Role("sum", _SAVED, slot.type, slot=slot.name),)))]


def _half_slots(model: ModelConfig, plan: Plan, block: Block, read: Mapping[str, tuple[str, ...]]) -> Roles:
    """The saved slots that a half of a split backward reads."""
    if block.kind not in SPLIT_KINDS:
        raise SignatureError(f"the backward of {block} is not split: only {' and '.join(SPLIT_KINDS)} blocks' are")
    wanted = half_slots(model, plan, block, read)
    return tuple(role for role in _saved(model, plan, block, optional=False) if role.name in wanted)


def _slots(slots: Iterable[Slot]) -> Roles:
    return tuple(Role(slot.name, _SAVED, slot.type, slot=slot.name) for slot in slots)


def _pending(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    return _slots(pending_slots(model, plan, block))


def _branch_sums(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """What the norm of the block's branch leaves for its backward, where an op of its own adds the branch."""
    return _slots(branch_sums(model, plan, block))


def _branch_slots(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """What a block adds, and the statistics of its norm."""
    if not adds_branch_apart(model, plan, block):
        raise SignatureError(f"what {block} gives is not normed behind a sum of tensor peers: nothing is added apart")
    return _slots(branch_slots(model, plan))


@cache
def _add_branch(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    branch, *statistics = _branch_slots(model, plan, block)
    reads = (_exchanged("stream", model, plan, block), branch, _view(model, plan, block))
    return [(False, Signature(reads, (_exchanged("sum", model, plan, next_block(model, block)), *statistics)))]


@cache
def _add_branch_backward(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    after = next_block(model, block)
    slots = _branch_slots(model, plan, block)
    reads = (_exchanged("dsum", model, plan, after), *slots, _view(model, plan, block))
    return [(False, Signature(reads, (_exchanged("dbranch", model, plan, after), *_branch_sums(model, plan, block))))]


@cache
def _backward_input(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    saved = _half_slots(model, plan, block, INPUT_HALF_SLOTS)
    others = (
        *_documents(model, plan, block),
        *_seen_keys(model, plan, block),
        *_own_sums(model, plan, block),
        *_beside(model, plan, stands_beside(model, plan, next_block(model, block))),
    )
    ends = (_after("dy", model, plan, block), _before("x", model, plan, block))
    if gradients := _gradients_before_norms(model, plan, block):
        reads = (*ends, *saved, _view(model, plan, block), *gradients)
        return [
            (False, Signature(reads, (_input_gradient(model, plan, block), *_pending(model, plan, block)))),
        ]
    reads = (*ends, *saved, _view(model, plan, block), *others)
    begun, added = (_seen_sums(model, plan, block, first=first) for first in (True, False))
    outputs = (_input_gradient(model, plan, block), *_pending(model, plan, block), *begun)
    return [(False, Signature(reads, outputs, added))]


@cache
def _backward_weight(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    saved = _half_slots(model, plan, block, WEIGHT_HALF_SLOTS)
    source = () if model.has_pre_norm else (_before("x", model, plan, block),)
    values = tuple(role for role in _gradients_before_norms(model, plan, block) if role.name == "dv")
    pending = (*_pending(model, plan, block), *values, *_branch_sums(model, plan, block))
    reads = (_after("dy", model, plan, block), *source, *saved, *pending)
    gradient = (_gradient(model, plan, block),)
    return [(False, Signature(reads, gradient)), (True, Signature(reads, (), gradient))]


@cache
def _boundary(model: ModelConfig, plan: Plan) -> Role:
    return Role("data", frozenset({StateKind.BOUNDARY}), exchanged_type(model, plan))


@cache
def _send(model: ModelConfig, plan: Plan) -> Candidates:
    return [(False, Signature(reads=(_boundary(model, plan),)))]


@cache
def _recv(model: ModelConfig, plan: Plan) -> Candidates:
    return [(False, Signature(writes=(_boundary(model, plan),)))]


@cache
def _load_input(plan: Plan) -> Candidates:
    return [(False, Signature(writes=(_input("data", plan),)))]


def _flags(blocks: tuple[Block, ...]) -> Roles:
    return tuple(_scalar(f"flag.{block}", Dtype.U32) for block in blocks)


@cache
def _reduce_scatter(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...]) -> Candidates:
    reads = tuple(_gradient(model, plan, block, f"g.{block}") for block in blocks)
    results = (*(_shard(model, plan, block, f"gs.{block}") for block in blocks), *_flags(blocks))
    return [(False, Signature(reads, results)), (True, Signature(reads, (), results))]


def _parts_of_loss(plan: Plan) -> Roles:
    """What a tensor peer makes of its part of the vocabulary: of each row the log of its sum of exponentials, and the loss within it."""
    rows = tensor_type(Dtype.F32, (tokens_per_micro_batch(plan),))
    return Role("lse", _PARTIAL, rows), Role("loss", _PARTIAL, tensor_type(Dtype.F64, (1,)))


@cache
def _gather_rows(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    whole = Role("whole", ACTIVATIONS, computed_type(model, plan, block))
    return [(False, Signature((_exchanged("rows", model, plan, block),), (whole,)))]


@cache
def _reduce_rows(model: ModelConfig, plan: Plan, block: Block, payload: Payload) -> Candidates:
    """The residual stream goes around all blocks but the embedding, and back around all but the head."""
    part = Role("part", _PARTIAL, computed_type(model, plan, block))
    activation = payload is Payload.ACTIVATION
    if (
        activation
        and block is not block_chain(model)[0]
        and adds_branch_apart(model, plan, previous_block(block, model))
    ):
        branch = branch_slots(model, plan)[0]
        return [(False, Signature((part,), (Role("sum", _SAVED, branch.type, slot=branch.name),)))]
    alone = block is block_chain(model)[1] if activation else block.kind == "head"
    around = () if alone else (_exchanged("stream", model, plan, block),)
    return [(False, Signature((part, *around), (_exchanged("sum", model, plan, block),)))]


@cache
def _combine_loss(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    lse = tuple(role for role in _saved(model, plan, block, optional=False) if role.name == "lse")
    parts = tuple(role._replace(name=f"{role.name}_part") for role in _parts_of_loss(plan))
    reads, loss = (*parts, _input("labels", plan)), _scalar("loss", Dtype.F64)
    return [(False, Signature(reads, (*lse, loss))), (True, Signature(reads, lse, (loss,)))]


COPY_SIDES = ("from", "to")
"""What the roles of a tensor that is stored or fetched, and of its copy, begin with; behind the dot is their number."""


def _copies(op: Store | Fetch) -> Candidates:
    """As many operands as there are, each with its copy; a copy of a saved slot is one of the same slot."""
    if not op.reads:
        raise SignatureError(f"'{op!r}' copies nothing")
    for tensor in op.reads:
        if tensor.kind not in STORABLE:
            raise SignatureError(
                f"%{tensor.name} is {tensor.kind.value}, which is not stored in another memory", tensor
            )
    return _copies_of(tuple((t.kind is StateKind.SAVED, t.type, t.slot) for t in op.reads))


@cache
def _copies_of(tensors: tuple[tuple[bool, TensorType, str], ...]) -> Candidates:
    sides: list[Roles] = []
    for side in COPY_SIDES:
        roles = (
            Role(f"{side}.{place}", _SAVED if saved else ACTIVATIONS, type_, slot=slot if saved else None)
            for place, (saved, type_, slot) in enumerate(tensors)
        )
        sides.append(tuple(roles))
    return [(False, Signature(sides[0], sides[1]))]


def _guests(op: GuestOp) -> Candidates:
    """As many operands as there are: at the stage that they belong to what may be stored, at the one that lends bytes guests."""
    moved = op.reads or op.writes
    if not moved:
        raise SignatureError(f"'{op!r}' moves nothing")
    kinds = STORABLE if isinstance(op, Evict | TakeBack) else _GUEST
    for tensor in moved:
        if tensor.kind not in kinds:
            what = "not evicted" if kinds is STORABLE else "no guest"
            raise SignatureError(f"%{tensor.name} is {tensor.kind.value}, which is {what}", tensor)
    return _guests_of(isinstance(op, Evict | GiveBack), tuple((t.kind, t.type, t.slot) for t in moved))


@cache
def _guests_of(leave: bool, tensors: tuple[tuple[StateKind, TensorType, str], ...]) -> Candidates:
    roles = tuple(_guest_role(f"data.{place}", *each) for place, each in enumerate(tensors))
    return [(False, Signature(roles) if leave else Signature((), roles))]


def _guest_role(name: str, kind: StateKind, type_: TensorType, slot: str) -> Role:
    if kind is StateKind.GUEST:
        return Role(name, _GUEST, type_)
    return Role(name, _SAVED, type_, slot=slot) if kind is StateKind.SAVED else Role(name, ACTIVATIONS, type_)


@cache
def _all_reduce(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...], group: Group) -> Candidates:
    if group in (Group.ENDS, Group.TENSOR):
        shards = tuple(_reduced(model, plan, block, f"gs.{block}") for block in blocks)
        return [(True, Signature(updates=(*shards, *_flags(blocks))))]
    gradients = tuple(_gradient(model, plan, block, f"g.{block}") for block in blocks)
    return [(True, Signature(writes=_flags(blocks), updates=gradients))]


@cache
def _all_gather(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...], *, within_step: bool) -> Candidates:
    reads, writes = [], []
    for block in blocks:
        part = _view_shard(model, plan, block) if parts_view(plan, block) else None
        reads.append(part if part and within_step else _state(model, plan, block, f"p.{block}", StateKind.MASTER))
        writes.append(part if part and not within_step else _view(model, plan, block, f"w.{block}"))
    return [(False, Signature(tuple(reads), tuple(writes)))]


@cache
def _norm(model: ModelConfig, plan: Plan, blocks: tuple[Block, ...]) -> Candidates:
    gradients = tuple(_reduced(model, plan, block, f"gs.{block}") for block in blocks)
    return [(False, Signature((*gradients, *_flags(blocks)), (_scalar("norm", Dtype.F64),)))]


@cache
def _all_reduce_scalar(quantity: Quantity, count: int) -> Candidates:
    if quantity is Quantity.LOSS:
        return [(False, Signature((_scalar("loss", Dtype.F64),)))]
    flags = tuple(_scalar(f"flag.{index}", Dtype.U32) for index in range(count))
    return [(False, Signature(flags, (_scalar("overflow", Dtype.U32),)))]


@cache
def _update(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    norm = (_scalar("norm", Dtype.F64),) if plan.optimizer.clip == "global" else ()
    reads = (_reduced(model, plan, block, "g"), _scalar("flag", Dtype.U32), _scale(), *norm)
    state = (
        _state(model, plan, block, "p", StateKind.MASTER),
        _state(model, plan, block, "m1", StateKind.MOMENT),
        _state(model, plan, block, "m2", StateKind.MOMENT),
        _scalar("t", Dtype.I64),
    )
    writes = (_view(model, plan, block),) if keeps_view(plan, block) else ()
    return [(True, Signature(reads, writes, state))]


@cache
def _scale_update() -> Candidates:
    return [(True, Signature((_scalar("overflow", Dtype.U32),), (), (_scale(),)))]


def attends(op: Recompute) -> bool:
    """Whether a recovery computes attention again, rather than what goes into it alone."""
    return any(tensor.kind is not StateKind.SAVED or tensor.slot in ("o", "lse", "probs") for tensor in op.writes)


_OF_SLICES = frozenset({LoadInput, *BLOCK_OPS, *PEER_OPS, *MEMORY_OPS, *MESSAGE_OPS})
"""What works on one slice where micro-batches are cut."""

_MAKERS: PerOp[Callable[[Any, ModelConfig, Plan], Candidates]] = PerOp(
    "signature",
    {
        LoadInput: lambda _op, _model, plan: _load_input(plan),
        Forward: lambda op, model, plan: _forward(model, plan, op.block),
        Recompute: lambda op, model, plan: _recompute(model, plan, op.block, attends=attends(op)),
        Backward: lambda op, model, plan: _backward(model, plan, op.block),
        BackwardInput: lambda op, model, plan: _backward_input(model, plan, op.block),
        BackwardWeight: lambda op, model, plan: _backward_weight(model, plan, op.block),
        AddBranch: lambda op, model, plan: _add_branch(model, plan, op.block),
        AddBranchBackward: lambda op, model, plan: _add_branch_backward(model, plan, op.block),
        Project: lambda op, model, plan: _project(model, plan, op.block),
        BackwardHeads: lambda op, model, plan: _backward_heads(model, plan, op.block),
        Send: lambda _op, model, plan: _send(model, plan),
        Recv: lambda _op, model, plan: _recv(model, plan),
        ReduceScatter: lambda op, model, plan: _reduce_scatter(model, plan, op.blocks),
        AllReduce: lambda op, model, plan: _all_reduce(model, plan, op.blocks, op.group),
        AllReduceScalar: lambda op, model, plan: (
            _norm(model, plan, op.blocks)
            if op.quantity is Quantity.NORM
            else _all_reduce_scalar(op.quantity, len(op.reads))
        ),
        AllGather: lambda op, model, plan: _all_gather(model, plan, op.blocks, within_step=op.phase is not None),
        GatherRows: lambda op, model, plan: _gather_rows(model, plan, op.block),
        ReduceRows: lambda op, model, plan: _reduce_rows(model, plan, op.block, op.payload),
        ReduceSums: lambda op, model, plan: _reduce_sums(model, plan, op.block, op.payload),
        CombineLoss: lambda op, model, plan: _combine_loss(model, plan, op.block),
        Store: lambda op, _model, _plan: _copies(op),
        Fetch: lambda op, _model, _plan: _copies(op),
        **dict.fromkeys(GUEST_OPS, lambda op, _model, _plan: _guests(op)),
        Update: lambda op, model, plan: _update(model, plan, op.block),
        ScaleUpdate: lambda _op, _model, _plan: _scale_update(),
    },
    never=(Release,),
)
"""Each by the fields that the signature of its kind depends on; the makers remember what they made.

Where there are two candidates, the one that does not accumulate stands first.
"""
