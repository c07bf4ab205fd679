"""Mutations of what slices of micro-batches add to a schedule: their numbers, keys and sums of each other, and the plan's lengths.

Each finds nothing to change in a module of whole micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.model.slots import KEY_SLOTS, SUM_SLOTS
from ratrain.ratrain_ir.ops.base import Op, Payload
from ratrain.ratrain_ir.ops.compute import (
    BLOCK_OPS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    LoadInput,
    Recompute,
)
from ratrain.ratrain_ir.ops.messages import Recv, Send
from tests.mutation.module_parts import (
    BYTES,
    LIFE,
    MESSAGES,
    OPERANDS,
    ORDER,
    VALUES,
    Place,
    operator,
    other_of,
    pick,
    places,
    put,
    title_of,
)
from tests.mutation.plan_shapes import other_lengths

if TYPE_CHECKING:
    from random import Random

    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.tensor import Tensor

OF_SLICES = (LoadInput, *BLOCK_OPS, Send, Recv)
BACKWARDS = (Backward, BackwardInput, BackwardWeight)


Found = tuple[Place, str, int]
"""An operand: where its op stands, the group it is in, and its place there."""


def _is_of_slice(op: Op) -> bool:
    return isinstance(op, OF_SLICES) and op.slice is not None


@operator("RT025 RT027", VALUES, MESSAGES, "RT042 RT044")
def change_slice(module: Module, random: Random) -> str | None:
    """Another slice, one that there is not, or none."""
    place = pick(module, random, _is_of_slice)
    if place is None:
        return None
    numbers = (*range(len(module.plan.slices) + 1), None)
    return put(place, slice=other_of(random, numbers, place[0].ops[place[1]].slice))


@operator("RT025 RT027", VALUES, MESSAGES)
def exchange_slices(module: Module, random: Random) -> str | None:
    """Two ops of one kind and block exchange the numbers of their slices, and keep their operands."""
    found = _pair_of_slices(module, random, OF_SLICES)
    if found is None:
        return None
    place, other = found
    mine, theirs = place[0].ops[place[1]].slice, other[0].ops[other[1]].slice
    return f"{put(other, slice=mine)}; {put(place, slice=theirs)}"


def _pair_of_slices(module: Module, random: Random, kinds: tuple[type[Op], ...]) -> tuple[Place, Place] | None:
    """Two ops of one stage that are alike but for the slice of one micro-batch that they work on."""
    place = pick(module, random, lambda op: isinstance(op, kinds) and _is_of_slice(op))
    if place is None:
        return None
    stage, at = place
    op = stage.ops[at]
    names = ("micro_batch", "block", "peer", "payload", "part")
    partners = [
        i
        for i, other in enumerate(stage.ops)
        if type(other) is type(op)
        and other.slice != op.slice
        and all(getattr(op, name, None) == getattr(other, name, None) for name in names)
    ]
    return (place, (stage, random.choice(partners))) if partners else None


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_backwards_of_slices(module: Module, random: Random) -> str | None:
    """Two slices of a micro-batch go backward through a block in the other order, with all that they touch."""
    return _swap(_pair_of_slices(module, random, BACKWARDS))


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_forwards_of_slices(module: Module, random: Random) -> str | None:
    return _swap(_pair_of_slices(module, random, (Forward, Recompute)))


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def cross_messages_of_slices(module: Module, random: Random) -> str | None:
    return _swap(_pair_of_slices(module, random, (Send, Recv)))


@operator(LIFE, VALUES, MESSAGES, ORDER, BYTES)
def swap_passes_of_slices(module: Module, random: Random) -> str | None:
    """Two slices of a micro-batch pass through a stage in the other order, with their messages, forward or backward."""
    found = _pair_of_slices(module, random, (Forward, Backward))
    if found is None:
        return None
    (stage, at), (_, to) = found
    one, other = stage.ops[at], stage.ops[to]
    payload = Payload.ACTIVATION if type(one) is Forward else Payload.GRADIENT
    kinds = (LoadInput, Forward) if type(one) is Forward else BACKWARDS
    first, second = (
        [
            i
            for i, op in enumerate(stage.ops)
            if _is_of_slice(op) and (op.micro_batch, op.slice) == (moved.micro_batch, moved.slice)
            if isinstance(op, kinds) or getattr(op, "payload", None) is payload
        ]
        for moved in (one, other)
    )
    if len(first) != len(second):
        return None
    for i, j in zip(first, second, strict=True):
        stage.ops[i], stage.ops[j] = stage.ops[j], stage.ops[i]
    return f"stage @{stage.index}: {payload.value}s of m{one.micro_batch}, s{one.slice} and s{other.slice}"


def _swap(found: tuple[Place, Place] | None) -> str | None:
    if found is None:
        return None
    (stage, one), (_, other) = found
    stage.ops[one], stage.ops[other] = stage.ops[other], stage.ops[one]
    return f"{title_of(found[0])} and {title_of(found[1])}"


@operator(LIFE, VALUES, MESSAGES, "RT042 RT044 RT050 RT027 RT025")
def exchange_slice_numbers(module: Module, random: Random) -> str | None:
    """A stage takes one slice for another, everywhere, or in the forward, or in the backward alone."""
    count = len(module.plan.slices)
    if count < 2:
        return None
    stage = random.choice(module.stages)
    one, other = random.sample(range(count), 2)
    number = {one: other, other: one}
    kinds = random.choice((OF_SLICES, (Forward, LoadInput), BACKWARDS))
    for at, op in enumerate(stage.ops):
        if isinstance(op, kinds) and op.slice in number:
            stage.ops[at] = evolve(op, slice=number[op.slice])
    return f"stage @{stage.index}: s{one} and s{other} of {', '.join(sorted(kind.keyword for kind in kinds))}"


# Keys and values of earlier slices, and the sums of their gradients


def _operands(module: Module, random: Random, slots: tuple[str, ...], groups: tuple[str, ...]) -> Found | None:
    """An operand of one of the slots, of an op of a slice."""
    found = [
        (place, group, at)
        for place in places(module, _is_of_slice)
        for group in groups
        for at, tensor in enumerate(getattr(place[0].ops[place[1]], group))
        if tensor.slot in slots
    ]
    return random.choice(found) if found else None


def _of_another_slice(module: Module, random: Random, slots: tuple[str, ...], groups: tuple[str, ...]) -> str | None:
    """Another tensor of the same slot and type: that of another slice, micro-batch or layer."""
    found = _operands(module, random, slots, groups)
    if found is None:
        return None
    (stage, at), group, index = found
    tensors = getattr(stage.ops[at], group)
    like = [t for t in stage.tensors.values() if t.slot == tensors[index].slot and t.type is tensors[index].type]
    other = other_of(random, like, tensors[index])
    if other is None:
        return None
    return put((stage, at), **{group: (*tensors[:index], other, *tensors[index + 1 :])})


@operator(LIFE, VALUES, BYTES, OPERANDS)
def read_keys_of_another(module: Module, random: Random) -> str | None:
    return _of_another_slice(module, random, KEY_SLOTS, ("reads",))


@operator(LIFE, VALUES, BYTES, OPERANDS)
def take_sum_of_another(module: Module, random: Random) -> str | None:
    return _of_another_slice(module, random, SUM_SLOTS, ("reads", "writes", "updates"))


@operator(LIFE, VALUES, OPERANDS)
def exchange_writing_and_adding(module: Module, random: Random) -> str | None:
    """A sum is written where a slice should add to it, or the other way round; keys and values alike, or one of the two."""
    found = _operands(module, random, SUM_SLOTS, ("writes", "updates"))
    if found is None:
        return None
    (stage, at), group, index = found
    op = stage.ops[at]
    chosen = getattr(op, group)[index]
    whole = random.random() < 0.5
    moved = [t for t in getattr(op, group) if t is chosen or (whole and _owner(t) == _owner(chosen))]
    left = tuple(t for t in getattr(op, group) if t not in moved)
    if group == "updates":
        begun = [t for t in op.writes if t.slot in SUM_SLOTS]
        place = max((op.writes.index(t) + 1 for t in begun), default=1)
        return put((stage, at), updates=left, writes=(*op.writes[:place], *moved, *op.writes[place:]))
    return put((stage, at), writes=left, updates=(*op.updates, *moved))


def _owner(tensor: Tensor) -> str:
    """The name of the block and slice that a saved tensor belongs to."""
    return tensor.name.rpartition(".")[0]


@operator(LIFE, VALUES, OPERANDS)
def leave_a_sum_out(module: Module, random: Random) -> str | None:
    """A slice does not take up, or does not add to, a sum, or both sums of a slice."""
    found = _operands(module, random, SUM_SLOTS, ("reads", "writes", "updates"))
    if found is None:
        return None
    place, group, index = found
    tensors = getattr(place[0].ops[place[1]], group)
    whole = random.random() < 0.5
    gone = [t for t in tensors if t is tensors[index] or (whole and _owner(t) == _owner(tensors[index]))]
    return put(place, **{group: tuple(t for t in tensors if t not in gone)})


@operator("RT025 RT027 RT030 RT031 RT033 RT034 RT044")
def change_lengths(module: Module, random: Random) -> str | None:
    """The plan cuts elsewhere, or otherwise often, than the ops under it."""
    before = module.plan.slices
    if not before:
        return None
    lengths = other_lengths(before, random)
    if lengths == before:
        return None
    module.plan = evolve(module.plan, slices=lengths)
    return f"slices = {list(lengths)}, not {list(before)}"
