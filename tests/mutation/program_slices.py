"""Mutations of what slices of micro-batches add to a program: their numbers, keys and sums of each other, and the plan's lengths.

Each finds nothing to change in a program of whole micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.model.slots import KEY_SLOTS, SUM_SLOTS
from ratrain.targets.program.instruction import Access, Instruction
from tests.mutation.plan_shapes import other_lengths
from tests.mutation.program_parts import (
    BYTES,
    HANG,
    IN_FLIGHT,
    MESSAGES,
    NO_OP,
    RACE,
    VALUES,
    Place,
    item_at,
    operator,
    other_of,
    pick,
    places,
    put,
    title_of,
)

if TYPE_CHECKING:
    from random import Random

    from ratrain.targets.program.instruction import ProgramTensor
    from ratrain.targets.program.program import Program


def _is_of_slice(item: Instruction) -> bool:
    return item.slice is not None


@operator(NO_OP, VALUES, MESSAGES, HANG, IN_FLIGHT)
def change_slice(program: Program, random: Random) -> str | None:
    place = pick(program, random, _is_of_slice)
    if place is None:
        return None
    number = other_of(random, range(len(program.plan.slices)), item_at(place).slice)
    title = title_of(place)
    put(place, slice=number)
    return f"{title}: s{number}"


def _slot(tensor: ProgramTensor) -> str:
    return tensor.name.rpartition(".")[2]


def _pair_of_slices(program: Program, random: Random) -> tuple[Place, Place] | None:
    """Two instructions of one engine that are alike but for the slice of one micro-batch that they work on."""
    place = pick(program, random, _is_of_slice)
    if place is None:
        return None
    item = item_at(place)
    partners = [
        other
        for other in places(program, lambda i: i.keyword == item.keyword and i.micro_batch == item.micro_batch)
        if other[1] is place[1]
        and other[2] is place[2]
        and (item_at(other).blocks, item_at(other).variant, item_at(other).peer)
        == (item.blocks, item.variant, item.peer)
        and item_at(other).slice != item.slice
    ]
    return (place, random.choice(partners)) if partners else None


@operator(NO_OP, VALUES, MESSAGES, HANG, IN_FLIGHT)
def exchange_slices(program: Program, random: Random) -> str | None:
    """Two instructions that are alike exchange the numbers of their slices, and nothing else."""
    found = _pair_of_slices(program, random)
    if found is None:
        return None
    mine, theirs = (item_at(place).slice for place in found)
    title = f"{title_of(found[0])} and {title_of(found[1])}"
    put(found[0], slice=theirs)
    put(found[1], slice=mine)
    return title


@operator(NO_OP, VALUES, MESSAGES, HANG, IN_FLIGHT, RACE, BYTES)
def swap_slices(program: Program, random: Random) -> str | None:
    """Two instructions that are alike stand in the other order, with all that they touch; their waits stay or go along."""
    found = _pair_of_slices(program, random)
    if found is None:
        return None
    title = f"{title_of(found[0])} and {title_of(found[1])}"
    one, two = map(item_at, found)
    if random.random() < 0.5:
        one, two = evolve(one, waits=two.waits), evolve(two, waits=one.waits)
    _, stage, engine, _ = found[0]
    stage.streams[engine][found[0][3]], stage.streams[engine][found[1][3]] = two, one
    return title


def _of_another_slice(program: Program, random: Random, slots: tuple[str, ...]) -> str | None:
    """Another tensor of the same slot and type: that of another slice, micro-batch or layer."""
    found = [
        (place, at)
        for place in places(program, _is_of_slice)
        for at, operand in enumerate(item_at(place).operands)
        if _slot(place[1].tensors[operand.tensor]) in slots
    ]
    if not found:
        return None
    place, at = random.choice(found)
    operands, tensors = list(item_at(place).operands), place[1].tensors
    held = tensors[operands[at].tensor]
    like = [number for number, t in enumerate(tensors) if _slot(t) == _slot(held) and t.type is held.type]
    number = other_of(random, like, operands[at].tensor)
    if number is None:
        return None
    title = f"{title_of(place)}: {operands[at].role} = %{tensors[number].name}"
    operands[at] = operands[at]._replace(tensor=number)
    put(place, operands=tuple(operands))
    return title


@operator(NO_OP, VALUES, RACE, BYTES)
def read_keys_of_another(program: Program, random: Random) -> str | None:
    return _of_another_slice(program, random, KEY_SLOTS)


@operator(NO_OP, VALUES, RACE, BYTES)
def take_sum_of_another(program: Program, random: Random) -> str | None:
    return _of_another_slice(program, random, SUM_SLOTS)


@operator(NO_OP, VALUES)
def exchange_writing_and_adding(program: Program, random: Random) -> str | None:
    """A sum is written where a slice should add to it, or the other way round."""
    found = [
        (place, at)
        for place in places(program, _is_of_slice)
        for at, operand in enumerate(item_at(place).operands)
        if _slot(place[1].tensors[operand.tensor]) in SUM_SLOTS and operand.access is not Access.READ
    ]
    if not found:
        return None
    place, at = random.choice(found)
    operands = list(item_at(place).operands)
    access = Access.WRITE if operands[at].access is Access.UPDATE else Access.UPDATE
    title = f"{title_of(place)}: {operands[at].role} {access.name}"
    operands[at] = operands[at]._replace(access=access)
    put(place, operands=tuple(operands))
    return title


@operator(NO_OP)
def take_routine_of_another_slice(program: Program, random: Random) -> str | None:
    """The routine of a like op of another slice: other lengths, positions and numbers of earlier keys."""
    found = _pair_of_slices(program, random)
    if found is None or item_at(found[0]).routine == item_at(found[1]).routine:
        return None
    title = f"{title_of(found[0])} as {title_of(found[1])}"
    put(found[0], routine=item_at(found[1]).routine)
    return title


@operator(NO_OP, VALUES, IN_FLIGHT, "RT064")  # RT064: the schedule that the plan names cannot have so few slices
def change_lengths(program: Program, random: Random) -> str | None:
    """The plan cuts elsewhere, or otherwise often, than the instructions under it."""
    before = program.plan.slices
    if not before:
        return None
    lengths = other_lengths(before, random)
    if lengths == before:
        return None
    program.plan = evolve(program.plan, slices=lengths)
    return f"slices = {list(lengths)}, not {list(before)}"
