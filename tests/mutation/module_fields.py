"""Mutations of what ops say and touch: fields and operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.copying import copy_op
from ratrain.ratrain_ir.ops.base import Engine, Group, Op, Part, Payload, Phase, Quantity
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, AllReduceScalar, ReduceScatter
from ratrain.ratrain_ir.ops.compute import Backward, Forward, LoadInput, Recompute, Update
from ratrain.ratrain_ir.ops.messages import Recv, Send
from tests.mutation.module_parts import (
    BYTES,
    GROUPS,
    LIFE,
    MESSAGES,
    OPERANDS,
    VALUES,
    is_kind,
    is_work,
    operator,
    other_of,
    pick,
    put,
    title_of,
)

if TYPE_CHECKING:
    from random import Random

    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.tensor import Tensor

_BY_MICRO_BATCH = (LoadInput, Forward, Recompute, Backward, Send, Recv, ReduceScatter, AllGather)


# Fields


@operator("RT027")
def retarget_peer(module: Module, random: Random) -> str | None:
    place = pick(module, random, is_kind(Send, Recv))
    if place is None:
        return None
    op = place[0].ops[place[1]]
    peer = other_of(random, range(len(module.stages) + 1), op.peer)
    return put(place, peer=peer)


@operator("RT027", VALUES, MESSAGES, "RT042 RT044")
def change_micro_batch(module: Module, random: Random) -> str | None:
    place = pick(module, random, lambda op: isinstance(op, _BY_MICRO_BATCH) and op.micro_batch is not None)
    if place is None:
        return None
    op = place[0].ops[place[1]]
    return put(place, micro_batch=other_of(random, range(module.plan.micro_batches + 1), op.micro_batch))


@operator("RT025 RT027", VALUES, MESSAGES)
def exchange_micro_batches(module: Module, random: Random) -> str | None:
    """Two ops of one kind and block exchange their micro-batch numbers, and keep their operands."""
    place = pick(module, random, is_kind(*_BY_MICRO_BATCH))
    if place is None:
        return None
    stage, at = place
    op = stage.ops[at]
    partners = [i for i, other in enumerate(stage.ops) if _same_but_micro_batch(op, other)]
    if not partners:
        return None
    other = random.choice(partners)
    mine, theirs = op.micro_batch, stage.ops[other].micro_batch
    return f"{put((stage, other), micro_batch=mine)}; {put(place, micro_batch=theirs)}"


def _same_but_micro_batch(op: Op, other: Op) -> bool:
    if type(op) is not type(other) or op.micro_batch == other.micro_batch:
        return False
    names = ("block", "blocks", "peer", "payload", "part", "phase")
    return all(getattr(op, name, None) == getattr(other, name, None) for name in names)


@operator("RT025", VALUES)
def change_head_group(module: Module, random: Random) -> str | None:
    """Another group of heads, one that there is not, or none."""
    place = pick(module, random, _is_of_heads)
    if place is None:
        return None
    groups = (*range(module.plan.context_groups + 1), None)
    return put(place, head_group=other_of(random, groups, place[0].ops[place[1]].head_group))


@operator("RT025", VALUES)
def exchange_head_groups(module: Module, random: Random) -> str | None:
    """Two ops of one kind and block exchange their groups of heads, and keep their operands."""
    place = pick(module, random, _is_of_heads)
    if place is None:
        return None
    stage, at = place
    op = stage.ops[at]
    alike = [i for i, other in enumerate(stage.ops) if type(other) is type(op) and other.block == op.block]
    other = random.choice([i for i in alike if stage.ops[i].head_group != op.head_group])
    mine, theirs = op.head_group, stage.ops[other].head_group
    return f"{put((stage, other), head_group=mine)}; {put(place, head_group=theirs)}"


def _is_of_heads(op: Op) -> bool:
    return getattr(op, "head_group", None) is not None


@operator("RT025 RT026 RT027 RT040", VALUES)
def change_block(module: Module, random: Random) -> str | None:
    place = pick(module, random, is_kind(Forward, Recompute, Backward, Update))
    assert place is not None
    op = place[0].ops[place[1]]
    others = (op.block, *module.topology.stage_blocks[random.randrange(len(module.stages))])
    unit = other_of(random, others, op.block)
    return None if unit is None else put(place, block=unit)


@operator("RT025 RT027 RT031 RT033 RT034 RT043")
def change_blocks(module: Module, random: Random) -> str | None:
    """A collective covers one block less, one twice, or has two in the other order."""
    place = pick(module, random, lambda op: bool(getattr(op, "blocks", ())))
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
    return put(place, blocks=tuple(blocks))


@operator("RT025 RT026 RT027 RT030 RT031 RT033 RT034 RT043 RT040")
def change_word(module: Module, random: Random) -> str | None:
    """Tokens for labels, activation for gradient, another group, another quantity, another phase."""
    place = pick(module, random, is_kind(LoadInput, Send, Recv, AllReduce, AllReduceScalar, AllGather))
    assert place is not None
    op = place[0].ops[place[1]]
    if isinstance(op, LoadInput):
        return put(place, part=other_of(random, list(Part), op.part))
    if isinstance(op, AllGather):
        return put(place, phase=other_of(random, [*Phase, None], op.phase))
    if isinstance(op, Send | Recv):
        return put(place, payload=other_of(random, list(Payload), op.payload))
    if isinstance(op, AllReduceScalar) and random.random() < 0.5:
        return put(place, quantity=other_of(random, list(Quantity), op.quantity))
    return put(place, group=other_of(random, list(Group), op.group))


@operator(BYTES, "RT042", "RT034")  # RT034: compute would wait for state that streams
def change_placement(module: Module, random: Random) -> str | None:
    """An update on the other engine: another schedule, the same training."""
    place = pick(module, random, is_kind(Update))
    assert place is not None
    placement = place[0].ops[place[1]].placement
    return put(place, placement=other_of(random, (Engine.COMPUTE, Engine.HOST), placement))


# Operands


def _with_operand(op: Op, group: str, index: int, tensor: Tensor) -> tuple[Tensor, ...]:
    tensors: tuple[Tensor, ...] = getattr(op, group)
    return (*tensors[:index], tensor, *tensors[index + 1 :])


def _operand(op: Op, random: Random) -> tuple[str, int] | None:
    found = [(group, index) for group in GROUPS for index in range(len(getattr(op, group)))]
    return random.choice(found) if found else None


@operator(LIFE, VALUES, MESSAGES, BYTES, OPERANDS, "RT042")
def replace_operand(module: Module, random: Random) -> str | None:
    """Another tensor of equal type, of equal kind where there is one."""
    place = pick(module, random, is_work)
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
    return put(place, **{group: _with_operand(stage.ops[at], group, index, random.choice(chosen))})


@operator(LIFE, VALUES, MESSAGES, BYTES, OPERANDS)
def swap_operands(module: Module, random: Random) -> str | None:
    """Two operands of one op, of equal type if there are such."""
    place = pick(module, random, lambda op: is_work(op) and len(op.operands) > 1)
    assert place is not None
    op = place[0].ops[place[1]]
    slots = [(group, index) for group in GROUPS for index in range(len(getattr(op, group)))]
    pairs = [(a, b) for i, a in enumerate(slots) for b in slots[i + 1 :]]
    alike = [(a, b) for a, b in pairs if getattr(op, a[0])[a[1]].type is getattr(op, b[0])[b[1]].type]
    (one, i), (other, j) = random.choice(alike or pairs)
    first, second = getattr(op, one)[i], getattr(op, other)[j]
    before = title_of(place)
    put(place, **{one: _with_operand(op, one, i, second)})
    changed = place[0].ops[place[1]]
    put(place, **{other: _with_operand(changed, other, j, first)})
    return f"{before}: %{first.name} and %{second.name}"


@operator(LIFE, VALUES, MESSAGES, BYTES, OPERANDS, "RT042")
def exchange_operands(module: Module, random: Random) -> str | None:
    """Two ops of one kind exchange one operand of equal type: each gets the other's."""
    place = pick(module, random, is_work)
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
    put((stage, to), **{group: _with_operand(other, group, index, mine)})
    return put(place, **{group: _with_operand(op, group, index, theirs)})


@operator(LIFE, VALUES, MESSAGES, BYTES, OPERANDS, "RT042")
def exchange_tensors_from_here(module: Module, random: Random) -> str | None:
    """From one op on, two tensors of equal type are taken for each other; no op looks wrong by itself."""
    place = pick(module, random, lambda op: bool(op.operands))
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
    return f"{title_of(place)}: %{one.name} and %{other.name}"


@operator(OPERANDS, LIFE, "RT026")
def change_access(module: Module, random: Random) -> str | None:
    """An operand moves between what is read, written and updated."""
    place = pick(module, random, is_work)
    assert place is not None
    op = place[0].ops[place[1]]
    found = _operand(op, random)
    if found is None:
        return None
    group, index = found
    tensors = getattr(op, group)
    to = other_of(random, GROUPS, group)
    moved = {group: (*tensors[:index], *tensors[index + 1 :]), to: (*getattr(op, to), tensors[index])}
    return put(place, **moved)


@operator(OPERANDS, "RT020 RT022 RT030 RT031 RT033 RT034 RT032 RT080")
def drop_operand(module: Module, random: Random) -> str | None:
    place = pick(module, random, is_work)
    assert place is not None
    op = place[0].ops[place[1]]
    found = _operand(op, random)
    if found is None:
        return None
    group, index = found
    tensors = getattr(op, group)
    return put(place, **{group: (*tensors[:index], *tensors[index + 1 :])})


@operator(OPERANDS, LIFE, VALUES, BYTES, "RT026")
def add_operand(module: Module, random: Random) -> str | None:
    place = pick(module, random, is_work)
    assert place is not None
    stage, at = place
    tensor = random.choice(list(stage.tensors.values()))
    group = random.choice(GROUPS)
    tensors = getattr(stage.ops[at], group)
    index = random.randint(0, len(tensors))
    return put(place, **{group: (*tensors[:index], tensor, *tensors[index:])})


@operator(OPERANDS, "RT050 RT026 RT042")
def change_scratch(module: Module, random: Random) -> str | None:
    """Drop an op's workspace, exchange it for another's, or give it one more."""
    stage = random.choice(module.stages)
    pool = [t for t in stage.tensors.values() if t.kind is StateKind.WORKSPACE]
    place = pick(module, random, is_work)
    assert place is not None
    if not pool:
        return None
    at = random.choice([i for i, op in enumerate(stage.ops) if is_work(op)])
    op = stage.ops[at]
    chosen = random.choice(pool)
    scratch = random.choice(((), (chosen,), (*op.scratch, chosen)))
    return None if scratch == op.scratch else put((stage, at), scratch=scratch)
