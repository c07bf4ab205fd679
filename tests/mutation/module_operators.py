"""Mutations of schedules: what a slip of the hand, or a wrong pass, does to a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain_ir.blocks import Block, block, stage_blocks
from ratrain_ir.module import Level, Module, Stage, TargetInfo
from ratrain_ir.ops import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    Backward,
    Engine,
    Forward,
    Group,
    LoadInput,
    Op,
    Part,
    Payload,
    Phase,
    Quantity,
    Recompute,
    Recv,
    ReduceScatter,
    Release,
    Send,
    Tensor,
    Update,
)
from ratrain_ir.printer import op_text
from ratrain_ir.types import ALIGNMENT_BYTES, Dtype, StateKind, aligned, tensor_type
from tests.mutation.operators import Registry
from tests.mutation.subjects import copy_op

if TYPE_CHECKING:
    from random import Random

operator: Registry[Module] = Registry()
MODULE_OPERATORS = operator.operators

# What a change can cause, by cause. A later cause is seen only where the earlier ones are absent.
LIFE = "RT020 RT021 RT022 RT023 RT024 RT028"
VALUES = "RT030 RT031 RT032 RT024"
MESSAGES = "RT040 RT041"
ORDER = "RT042 RT043 RT044"
BYTES = "RT050"
OPERANDS = "RT025"

Place = tuple[Stage, int]
_GROUPS = ("reads", "writes", "updates", "scratch")
_BY_MICRO_BATCH = (LoadInput, Forward, Recompute, Backward, Send, Recv, ReduceScatter, AllGather)


def _places(module: Module, wanted: Callable[[Op], bool]) -> list[Place]:
    return [(stage, at) for stage in module.stages for at, op in enumerate(stage.ops) if wanted(op)]


def _is_work(op: Op) -> bool:
    return type(op) is not Release


def _is_release(op: Op) -> bool:
    return type(op) is Release


def _is(*kinds: type[Op]) -> Callable[[Op], bool]:
    return lambda op: isinstance(op, kinds)


def _pick(module: Module, random: Random, wanted: Callable[[Op], bool]) -> Place | None:
    found = _places(module, wanted)
    return random.choice(found) if found else None


def _pick_two(module: Module, random: Random, wanted: Callable[[Op], bool]) -> tuple[Stage, int, int] | None:
    """Two ops of one stage, in order."""
    stage = random.choice(module.stages)
    found = [at for at, op in enumerate(stage.ops) if wanted(op)]
    if len(found) < 2:
        return None
    first, second = sorted(random.sample(found, 2))
    return stage, first, second


def _name(place: Place, op: Op | None = None) -> str:
    stage, at = place
    return f"stage @{stage.index} op {at + 1} '{op_text(op or stage.ops[at])[:80]}'"


def _set(place: Place, **changes: Any) -> str:
    """Change an op in place; what was done, in words."""
    stage, at = place
    before = _name(place)
    stage.ops[at] = evolve(stage.ops[at], **changes)
    return f"{before} -> '{op_text(stage.ops[at])[:80]}'"


def _other(random: Random, values: Sequence[Any], than: Any) -> Any:
    """One of the values that differs, or None."""
    found = [value for value in values if value != than]
    return random.choice(found) if found else None


# The list


@operator(LIFE, VALUES, MESSAGES, ORDER)
def drop_op(module: Module, random: Random) -> str | None:
    place = _pick(module, random, _is_work)
    assert place is not None
    name = _name(place)
    del place[0].ops[place[1]]
    return name


@operator(LIFE, VALUES, MESSAGES, "RT043")
def repeat_op(module: Module, random: Random) -> str | None:
    """Write an op once more, at once or later."""
    place = _pick(module, random, lambda _op: True)
    assert place is not None
    stage, at = place
    to = random.choice((at + 1, random.randint(at + 1, len(stage.ops))))
    name = _name(place)
    stage.ops.insert(to, copy_op(stage.ops[at]))
    return f"{name} again as op {to + 1}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_neighbours(module: Module, random: Random) -> str | None:
    stage = random.choice(module.stages)
    at = random.randrange(len(stage.ops) - 1)
    stage.ops[at], stage.ops[at + 1] = stage.ops[at + 1], stage.ops[at]
    return f"{_name((stage, at))} before {_name((stage, at + 1))}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_distant(module: Module, random: Random) -> str | None:
    found = _pick_two(module, random, _is_work)
    if found is None:
        return None
    stage, first, second = found
    stage.ops[first], stage.ops[second] = stage.ops[second], stage.ops[first]
    return f"{_name((stage, first))} and {_name((stage, second))}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def move_op(module: Module, random: Random) -> str | None:
    place = _pick(module, random, _is_work)
    assert place is not None
    stage, at = place
    name = _name(place)
    op = stage.ops.pop(at)
    to = random.randint(0, len(stage.ops))
    stage.ops.insert(to, op)
    return f"{name} to {to + 1}" if to != at else None


def _hoist_of_kind(module: Module, random: Random, *kinds: type[Op]) -> str | None:
    """The later of two ops right before the earlier one, or the earlier one right after the later."""
    found = _pick_two(module, random, _is(*kinds))
    if found is None:
        return None
    stage, first, second = found
    start, to = random.choice(((second, first), (first, second)))
    name = _name((stage, start))
    stage.ops.insert(to, stage.ops.pop(start))
    return f"{name} to {to + 1}"


@operator(LIFE, VALUES, MESSAGES, "RT042", BYTES)
def cross_receives(module: Module, random: Random) -> str | None:
    return _hoist_of_kind(module, random, Recv)


@operator(LIFE, VALUES, MESSAGES, "RT042", BYTES)
def cross_sends(module: Module, random: Random) -> str | None:
    return _hoist_of_kind(module, random, Send)


@operator(LIFE, VALUES, ORDER, BYTES)
def cross_collectives(module: Module, random: Random) -> str | None:
    return _hoist_of_kind(module, random, ReduceScatter, AllReduce, AllReduceScalar, AllGather)


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_micro_batches(module: Module, random: Random) -> str | None:
    """Two forwards, or two backwards, of one block in the other order, with all that they touch."""
    kind = random.choice((Forward, Backward))
    place = _pick(module, random, _is(kind))
    assert place is not None
    stage, at = place
    unit = stage.ops[at].block
    partners = [i for i, op in enumerate(stage.ops) if type(op) is kind and op.block is unit and i != at]
    if not partners:
        return None
    to = random.choice(partners)
    stage.ops[at], stage.ops[to] = stage.ops[to], stage.ops[at]
    return f"{_name(place)} and {_name((stage, to))}"


# Whole parts of a stage: changes that leave every op right by itself


def _chain(stage: Stage, kinds: tuple[type[Op], ...], m: int) -> list[int]:
    """Positions of a micro-batch's ops of some kinds."""
    return [at for at, op in enumerate(stage.ops) if isinstance(op, kinds) and getattr(op, "micro_batch", None) == m]


@operator(VALUES, MESSAGES, "RT042 RT044 RT027")
def exchange_micro_batch_numbers(module: Module, random: Random) -> str | None:
    """A stage takes one micro-batch for another, everywhere."""
    stage = random.choice(module.stages)
    one, other = random.sample(range(module.plan.micro_batches), 2)
    number = {one: other, other: one}
    for at, op in enumerate(stage.ops):
        m = getattr(op, "micro_batch", None)
        if m in number:
            stage.ops[at] = evolve(op, micro_batch=number[m])
    return f"stage @{stage.index}: m{one} and m{other}"


@operator(OPERANDS, VALUES, "RT043")
def exchange_layers(module: Module, random: Random) -> str | None:
    """A stage takes one layer for another, everywhere."""
    stage = random.choice(module.stages)
    layers = sorted({b.layer for b in stage_blocks(module.model, module.plan, stage.index) if b.layer is not None})
    if len(layers) < 2:
        return None
    one, other = random.sample(layers, 2)
    number = {one: other, other: one}
    kind = random.choice(("attention", "mlp", "attention mlp"))

    def renamed(unit: Block) -> Block:
        return block(unit.kind, number.get(unit.layer, unit.layer)) if unit.kind in kind else unit

    for at, op in enumerate(stage.ops):
        if isinstance(op, Forward | Recompute | Backward | Update):
            stage.ops[at] = evolve(op, block=renamed(op.block))
        elif isinstance(op, ReduceScatter | AllReduce | AllGather):
            stage.ops[at] = evolve(op, blocks=tuple(map(renamed, op.blocks)))
    return f"stage @{stage.index}: {kind} of layers {one} and {other}"


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def run_ahead(module: Module, random: Random) -> str | None:
    """The whole forward of a micro-batch, its messages included, before the backward that stood before it."""
    stage = random.choice(module.stages)
    m = random.randrange(1, module.plan.micro_batches)
    forward = [
        at
        for at in _chain(stage, (LoadInput, Forward, Send, Recv), m)
        if getattr(stage.ops[at], "payload", Payload.ACTIVATION) is Payload.ACTIVATION
    ]
    before = [at for at, op in enumerate(stage.ops[: forward[0]]) if type(op) is Backward]
    if not before:
        return None
    to = random.choice(before)
    chain = [stage.ops[at] for at in forward]
    rest = [op for op in stage.ops if all(op is not moved for moved in chain)]
    stage.ops = [*rest[:to], *chain, *rest[to:]]
    return f"stage @{stage.index}: forward of m{m} to {to + 1}"


@operator(LIFE, VALUES, MESSAGES, "RT043")
def drop_micro_batch(module: Module, random: Random) -> str | None:
    """A stage leaves a micro-batch out."""
    stage = random.choice(module.stages)
    m = random.randrange(module.plan.micro_batches)
    stage.ops = [op for op in stage.ops if getattr(op, "micro_batch", None) != m]
    return f"stage @{stage.index}: m{m}"


@operator(LIFE, VALUES, "RT043")
def drop_reduction(module: Module, random: Random) -> str | None:
    """A block's gradient is reduced nowhere, or its update, or its gather, is forgotten."""
    kinds = random.choice(((ReduceScatter, AllReduce), (Update,), (AllGather,)))
    stage = random.choice(module.stages)
    unit = random.choice(stage_blocks(module.model, module.plan, stage.index))
    kept = [
        op
        for op in stage.ops
        if not (isinstance(op, kinds) and unit in getattr(op, "blocks", (getattr(op, "block", None),)))
    ]
    if len(kept) == len(stage.ops):
        return None
    stage.ops = kept
    return f"stage @{stage.index} {unit}: {kinds[0].keyword}"


# Releases


@operator("RT020 RT021 RT022 RT023 RT024 RT028")
def release_earlier(module: Module, random: Random) -> str | None:
    return _move_release(module, random, lambda at, _count: random.randrange(at) if at else None)


@operator("RT022 RT024 RT028")
def release_later(module: Module, random: Random) -> str | None:
    return _move_release(
        module, random, lambda at, count: random.randint(at + 1, count - 1) if at + 1 < count else None
    )


def _move_release(module: Module, random: Random, where: Callable[[int, int], int | None]) -> str | None:
    place = _pick(module, random, _is_release)
    if place is None:
        return None
    stage, at = place
    to = where(at, len(stage.ops))
    if to is None:
        return None
    name = _name(place)
    stage.ops.insert(to, stage.ops.pop(at))
    return f"{name} to {to + 1}"


@operator("RT022 RT023")
def drop_release(module: Module, random: Random) -> str | None:
    """Forget one tensor of a release."""
    place = _pick(module, random, _is_release)
    if place is None:
        return None
    stage, at = place
    reads = stage.ops[at].reads
    kept = tuple(t for t in reads if t is not random.choice(reads))
    name = _name(place)
    if kept:
        return _set(place, reads=kept)
    del stage.ops[at]
    return name


@operator(LIFE)
def release_another(module: Module, random: Random) -> str | None:
    """Release a tensor that is nobody's to release here; where one is released, all must be."""
    place = _pick(module, random, lambda _op: True)
    assert place is not None
    if module.level is Level.DATAFLOW:
        return None
    stage, at = place
    tensor = random.choice([t for t in stage.tensors.values() if t.kind is not StateKind.WORKSPACE])
    stage.ops.insert(at, Release(reads=(tensor,)))
    return _name(place)


# Fields


@operator("RT027")
def retarget_peer(module: Module, random: Random) -> str | None:
    place = _pick(module, random, _is(Send, Recv))
    if place is None:
        return None
    op = place[0].ops[place[1]]
    peer = _other(random, range(len(module.stages) + 1), op.peer)
    return _set(place, peer=peer)


@operator("RT027", VALUES, MESSAGES, "RT042 RT044")
def change_micro_batch(module: Module, random: Random) -> str | None:
    place = _pick(module, random, lambda op: isinstance(op, _BY_MICRO_BATCH) and op.micro_batch is not None)
    if place is None:
        return None
    op = place[0].ops[place[1]]
    return _set(place, micro_batch=_other(random, range(module.plan.micro_batches + 1), op.micro_batch))


@operator("RT025 RT027", VALUES, MESSAGES)
def exchange_micro_batches(module: Module, random: Random) -> str | None:
    """Two ops of one kind and block exchange their micro-batch numbers, and keep their operands."""
    place = _pick(module, random, _is(*_BY_MICRO_BATCH))
    if place is None:
        return None
    stage, at = place
    op = stage.ops[at]
    partners = [i for i, other in enumerate(stage.ops) if _same_but_micro_batch(op, other)]
    if not partners:
        return None
    other = random.choice(partners)
    mine, theirs = op.micro_batch, stage.ops[other].micro_batch
    return f"{_set((stage, other), micro_batch=mine)}; {_set(place, micro_batch=theirs)}"


def _same_but_micro_batch(op: Op, other: Op) -> bool:
    if type(op) is not type(other) or op.micro_batch == other.micro_batch:
        return False
    names = ("block", "blocks", "peer", "payload", "part", "phase")
    return all(getattr(op, name, None) == getattr(other, name, None) for name in names)


@operator("RT025 RT027", VALUES)
def change_block(module: Module, random: Random) -> str | None:
    place = _pick(module, random, _is(Forward, Recompute, Backward, Update))
    assert place is not None
    op = place[0].ops[place[1]]
    others = (op.block, *stage_blocks(module.model, module.plan, random.randrange(len(module.stages))))
    unit = _other(random, others, op.block)
    return None if unit is None else _set(place, block=unit)


@operator("RT025 RT027 RT031 RT043")
def change_blocks(module: Module, random: Random) -> str | None:
    """A collective covers one block less, one twice, or has two in the other order."""
    place = _pick(module, random, lambda op: bool(getattr(op, "blocks", ())))
    assert place is not None
    blocks: list[Block] = list(place[0].ops[place[1]].blocks)
    how = random.choice(("drop", "twice", "swap"))
    at = random.randrange(len(blocks))
    if how == "drop" and len(blocks) > 1:
        del blocks[at]
    elif how == "swap" and len(blocks) > 1:
        other = at - 1
        blocks[at], blocks[other] = blocks[other], blocks[at]
    else:
        blocks.append(blocks[at])
    return _set(place, blocks=tuple(blocks))


@operator("RT025 RT026 RT027 RT030 RT031 RT043 RT040")
def change_word(module: Module, random: Random) -> str | None:
    """Tokens for labels, activation for gradient, another group, another quantity, another phase."""
    place = _pick(module, random, _is(LoadInput, Send, Recv, AllReduce, AllReduceScalar, AllGather))
    assert place is not None
    op = place[0].ops[place[1]]
    if isinstance(op, LoadInput):
        return _set(place, part=_other(random, list(Part), op.part))
    if isinstance(op, AllGather):
        return _set(place, phase=_other(random, [*Phase, None], op.phase))
    if isinstance(op, Send | Recv):
        return _set(place, payload=_other(random, list(Payload), op.payload))
    if isinstance(op, AllReduceScalar) and random.random() < 0.5:
        return _set(place, quantity=_other(random, list(Quantity), op.quantity))
    return _set(place, group=_other(random, list(Group), op.group))


@operator(BYTES, "RT042")
def change_placement(module: Module, random: Random) -> str | None:
    """An update on the other engine: another schedule, the same training."""
    place = _pick(module, random, _is(Update))
    assert place is not None
    placement = place[0].ops[place[1]].placement
    return _set(place, placement=_other(random, (Engine.COMPUTE, Engine.HOST), placement))


# Operands


def _with_operand(op: Op, group: str, index: int, tensor: Tensor) -> tuple[Tensor, ...]:
    tensors: tuple[Tensor, ...] = getattr(op, group)
    return (*tensors[:index], tensor, *tensors[index + 1 :])


def _operand(op: Op, random: Random) -> tuple[str, int] | None:
    found = [(group, index) for group in _GROUPS for index in range(len(getattr(op, group)))]
    return random.choice(found) if found else None


@operator(LIFE, VALUES, MESSAGES, BYTES, OPERANDS, "RT042")
def replace_operand(module: Module, random: Random) -> str | None:
    """Another tensor of equal type, of equal kind where there is one."""
    place = _pick(module, random, _is_work)
    assert place is not None
    stage, at = place
    found = _operand(stage.ops[at], random)
    if found is None:
        return None
    group, index = found
    old: Tensor = getattr(stage.ops[at], group)[index]
    like = [t for t in stage.tensors.values() if t.type is old.type and t is not old]
    same_kind = [t for t in like if t.kind is old.kind]
    chosen = same_kind if same_kind and random.random() < 0.8 else like
    if not chosen:
        return None
    return _set(place, **{group: _with_operand(stage.ops[at], group, index, random.choice(chosen))})


@operator(LIFE, VALUES, MESSAGES, BYTES, OPERANDS)
def swap_operands(module: Module, random: Random) -> str | None:
    """Two operands of one op, of equal type if there are such."""
    place = _pick(module, random, lambda op: _is_work(op) and len(op.operands) > 1)
    assert place is not None
    op = place[0].ops[place[1]]
    slots = [(group, index) for group in _GROUPS for index in range(len(getattr(op, group)))]
    pairs = [(a, b) for i, a in enumerate(slots) for b in slots[i + 1 :]]
    alike = [(a, b) for a, b in pairs if getattr(op, a[0])[a[1]].type is getattr(op, b[0])[b[1]].type]
    (one, i), (other, j) = random.choice(alike or pairs)
    first, second = getattr(op, one)[i], getattr(op, other)[j]
    before = _name(place)
    _set(place, **{one: _with_operand(op, one, i, second)})
    changed = place[0].ops[place[1]]
    _set(place, **{other: _with_operand(changed, other, j, first)})
    return f"{before}: %{first.name} and %{second.name}"


@operator(LIFE, VALUES, MESSAGES, BYTES, "RT042")
def exchange_operands(module: Module, random: Random) -> str | None:
    """Two ops of one kind exchange one operand of equal type: each gets the other's."""
    place = _pick(module, random, _is_work)
    assert place is not None
    stage, at = place
    op = stage.ops[at]
    found = _operand(op, random)
    if found is None:
        return None
    group, index = found
    mine: Tensor = getattr(op, group)[index]
    partners = [
        i
        for i, other in enumerate(stage.ops)
        if type(other) is type(op) and len(getattr(other, group)) > index and getattr(other, group)[index] is not mine
        if getattr(other, group)[index].type is mine.type
    ]
    if not partners:
        return None
    to = random.choice(partners)
    other = stage.ops[to]
    theirs = getattr(other, group)[index]
    _set((stage, to), **{group: _with_operand(other, group, index, mine)})
    return _set(place, **{group: _with_operand(op, group, index, theirs)})


@operator(LIFE, VALUES, MESSAGES, BYTES, OPERANDS, "RT042")
def exchange_tensors_from_here(module: Module, random: Random) -> str | None:
    """From one op on, two tensors of equal type are taken for each other; no op looks wrong by itself."""
    place = _pick(module, random, lambda op: bool(op.operands))
    assert place is not None
    stage, at = place
    one = random.choice(stage.ops[at].operands)
    later = {t for op in stage.ops[at:] for t in op.operands}
    like = [
        t for t in stage.tensors.values() if t.type is one.type and t.kind is one.kind and t is not one and t in later
    ]
    if not like:
        return None
    other = random.choice(like)
    renamed = {one: other, other: one}
    for i in range(at, len(stage.ops)):
        stage.ops[i] = copy_op(stage.ops[i], lambda tensor: renamed.get(tensor, tensor))
    return f"{_name(place)}: %{one.name} and %{other.name}"


@operator(OPERANDS, LIFE, "RT026")
def change_access(module: Module, random: Random) -> str | None:
    """An operand moves between what is read, written and updated."""
    place = _pick(module, random, _is_work)
    assert place is not None
    op = place[0].ops[place[1]]
    found = _operand(op, random)
    if found is None:
        return None
    group, index = found
    tensors = getattr(op, group)
    to = _other(random, _GROUPS, group)
    moved = {group: (*tensors[:index], *tensors[index + 1 :]), to: (*getattr(op, to), tensors[index])}
    return _set(place, **moved)


@operator(OPERANDS, "RT020 RT022 RT030 RT031 RT032 RT080")
def drop_operand(module: Module, random: Random) -> str | None:
    place = _pick(module, random, _is_work)
    assert place is not None
    op = place[0].ops[place[1]]
    found = _operand(op, random)
    if found is None:
        return None
    group, index = found
    tensors = getattr(op, group)
    return _set(place, **{group: (*tensors[:index], *tensors[index + 1 :])})


@operator(OPERANDS, LIFE, VALUES, BYTES, "RT026")
def add_operand(module: Module, random: Random) -> str | None:
    place = _pick(module, random, _is_work)
    assert place is not None
    stage, at = place
    tensor = random.choice(list(stage.tensors.values()))
    group = random.choice(_GROUPS)
    tensors = getattr(stage.ops[at], group)
    index = random.randint(0, len(tensors))
    return _set(place, **{group: (*tensors[:index], tensor, *tensors[index:])})


@operator(OPERANDS, "RT050 RT026")
def change_scratch(module: Module, random: Random) -> str | None:
    """Drop an op's workspace, exchange it for another's, or give it one more."""
    stage = random.choice(module.stages)
    pool = [t for t in stage.tensors.values() if t.kind is StateKind.WORKSPACE]
    place = _pick(module, random, _is_work)
    assert place is not None
    if not pool:
        return None
    at = random.choice([i for i, op in enumerate(stage.ops) if _is_work(op)])
    op = stage.ops[at]
    chosen = random.choice(pool)
    scratch = random.choice(((), (chosen,), (*op.scratch, chosen)))
    return None if scratch == op.scratch else _set((stage, at), scratch=scratch)


# Tensors


def _tensor(module: Module, random: Random, wanted: Callable[[Tensor], bool] = lambda _t: True) -> Tensor | None:
    found = [t for stage in module.stages for t in stage.tensors.values() if wanted(t)]
    return random.choice(found) if found else None


def _is_placed(tensor: Tensor) -> bool:
    return tensor.offset is not None


@operator(BYTES, "RT051 RT042")
def shift_offset(module: Module, random: Random) -> str | None:
    """One alignment unit up or down; a single byte now and then."""
    tensor = _tensor(module, random, _is_placed)
    if tensor is None:
        return None
    assert tensor.offset is not None
    by = random.choice((ALIGNMENT_BYTES, -ALIGNMENT_BYTES, ALIGNMENT_BYTES, -ALIGNMENT_BYTES, 1))
    tensor.offset = abs(tensor.offset + by)
    return f"%{tensor.name} to {tensor.offset:#x}"


@operator(BYTES, "RT042")
def share_offset(module: Module, random: Random) -> str | None:
    """A tensor where another one is."""
    stage = random.choice(module.stages)
    one, other = random.sample(list(stage.tensors.values()), 2)
    if one.offset is None or one.offset == other.offset:
        return None
    one.offset = other.offset
    return f"stage @{stage.index} %{one.name} where %{other.name} is"


@operator("RT051")
def drop_offset(module: Module, random: Random) -> str | None:
    tensor = _tensor(module, random, _is_placed)
    if tensor is None:
        return None
    tensor.offset = None
    return f"%{tensor.name}"


@operator(OPERANDS, BYTES)
def change_shape(module: Module, random: Random) -> str | None:
    """A tensor with one element less or more, or with its dimensions turned round."""
    tensor = _tensor(module, random)
    assert tensor is not None
    shape = tensor.type.shape
    first = random.choice((max(1, shape[0] - 1), shape[0] + 1, max(1, shape[0] // 2)))
    changed = random.choice((shape[::-1], (first, *shape[1:])))
    if changed == shape:
        return None
    tensor.type = tensor_type(tensor.type.dtype, changed)
    return f"%{tensor.name} becomes {tensor.type}"


@operator(OPERANDS, BYTES)
def change_dtype(module: Module, random: Random) -> str | None:
    tensor = _tensor(module, random)
    assert tensor is not None
    dtype = _other(random, list(Dtype), tensor.type.dtype)
    tensor.type = tensor_type(dtype, tensor.type.shape)
    return f"%{tensor.name} becomes {tensor.type}"


@operator(OPERANDS, "RT026")
def change_kind(module: Module, random: Random) -> str | None:
    tensor = _tensor(module, random)
    assert tensor is not None
    tensor.kind = _other(random, list(StateKind), tensor.kind)
    return f"%{tensor.name} becomes {tensor.kind.value}"


@operator(LIFE, VALUES, BYTES)
def change_carried(module: Module, random: Random) -> str | None:
    tensor = _tensor(module, random)
    assert tensor is not None
    tensor.carried = not tensor.carried
    return f"%{tensor.name} {'carried' if tensor.carried else 'not carried'}"


@operator("RT006 RT025")
def rename_tensor(module: Module, random: Random) -> str | None:
    """A name means nothing, except the slot of a saved tensor."""
    stage = random.choice(module.stages)
    tensor = random.choice(list(stage.tensors.values()))
    name = f"{tensor.name}.z"
    stage.tensors = {(name if t is tensor else t.name): t for t in stage.tensors.values()}
    tensor.name = name
    return f"stage @{stage.index} %{name}"


@operator()
def shuffle_declarations(module: Module, random: Random) -> str | None:
    stage = random.choice(module.stages)
    names = list(stage.tensors)
    random.shuffle(names)
    stage.tensors = {name: stage.tensors[name] for name in names}
    return f"stage @{stage.index}: {names[0]} first"


@operator("RT024", "RT020 RT022 RT023")
def add_carried(module: Module, random: Random) -> str | None:
    """Declare a carried tensor that nothing uses."""
    stage = random.choice(module.stages)
    like = random.choice(list(stage.tensors.values()))
    end = stage.arena_bytes if module.level is Level.ALLOCATED else None
    stage.add(Tensor("idle", like.kind, like.type, carried=True, offset=end))
    return f"stage @{stage.index} like %{like.name}"


@operator("RT052 RT053")
def shrink_capacity(module: Module, random: Random) -> str | None:
    if module.target is None:
        return None
    largest = max(stage.arena_bytes for stage in module.stages)
    by = random.randint(-2, 2) * ALIGNMENT_BYTES
    module.target = TargetInfo(module.target.name, largest - by)
    return f"{largest} - {by}"


@operator("RT050 RT051")
def grow_into_next(module: Module, random: Random) -> str | None:
    """Workspace is larger than what the allocator gave it room for."""
    tensor = _tensor(module, random, lambda t: t.kind is StateKind.WORKSPACE and _is_placed(t))
    if tensor is None:
        return None
    size = aligned(tensor.type.nbytes) + ALIGNMENT_BYTES * random.randint(1, 4)
    tensor.type = tensor_type(Dtype.U8, (size,))
    return f"%{tensor.name} becomes {tensor.type}"
