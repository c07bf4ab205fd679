"""Mutations of routines: what their steps compute, from what, in which order, and where their intermediates lie.

A program's model and plan say which steps an op has, so every other step must be refused. Intermediates may lie anywhere
in the workspace where none is overwritten before its last use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES
from tests.mutation.program_parts import NO_OP, operator, other_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from ratrain.targets.program.program import Program
    from ratrain.targets.program.routine import Routine, Step


def _steps(program: Program, random: Random, wanted: Callable[[Step], bool]) -> tuple[int, int] | None:
    """Draw a step of a routine: a routine first, as those of attention have more steps than others."""
    found = [
        (number, [at for at, step in enumerate(routine.steps) if wanted(step)])
        for number, routine in enumerate(program.routines)
    ]
    with_steps = [(number, places) for number, places in found if places]
    if not with_steps:
        return None
    number, places = random.choice(with_steps)
    return number, random.choice(places)


def _put(program: Program, number: int, **changes: Any) -> Routine:
    """Change a routine; return what it was."""
    before = program.routines[number]
    program.routines[number] = evolve(before, **changes)
    return before


def _change_step(program: Program, place: tuple[int, int], **changes: Any) -> str:
    """Change a step of a routine; return its title."""
    number, at = place
    steps = list(program.routines[number].steps)
    steps[at] = evolve(steps[at], **changes)
    before = _put(program, number, steps=tuple(steps))
    return f"{before.key}, step {at + 1} '{before.steps[at].kernel}'"


@operator(NO_OP, always=True)
def drop_step(program: Program, random: Random) -> str | None:
    place = _steps(program, random, lambda _: True)
    assert place is not None
    number, at = place
    steps = program.routines[number].steps
    before = _put(program, number, steps=steps[:at] + steps[at + 1 :])
    return f"{before.key}, step {at + 1} '{steps[at].kernel}'"


@operator(NO_OP, always=True)
def exchange_steps(program: Program, random: Random) -> str | None:
    """Two neighbours change places, though the second may need nothing of the first."""
    number = other_of(random, [n for n, routine in enumerate(program.routines) if len(routine.steps) > 1], None)
    if number is None:
        return None
    steps = list(program.routines[number].steps)
    at = random.randrange(len(steps) - 1)
    if steps[at] == steps[at + 1]:
        return None
    steps[at : at + 2] = [steps[at + 1], steps[at]]
    return f"{_put(program, number, steps=tuple(steps)).key}, steps {at + 1} and {at + 2}"


@operator(NO_OP, always=True)
def change_operand_of_step(program: Program, random: Random) -> str | None:
    """A step takes what another operand of the routine names, of equal type if there is such."""
    place = _steps(program, random, lambda step: bool(step.operands))
    assert place is not None
    routine = program.routines[place[0]]
    step = routine.steps[place[1]]
    name = random.choice(sorted(step.operands))
    mine = step.operands[name]
    known = sorted({reference for each in routine.steps for reference in each.operands.values()})
    alike = [reference for reference in known if routine.operand(reference) == routine.operand(mine)]
    other = other_of(random, alike, mine) or other_of(random, known, mine)
    if other is None:
        return None
    return f"{_change_step(program, place, operands={**step.operands, name: other})}: {name} = {other}"


@operator(NO_OP, always=True)
def swap_operands_of_step(program: Program, random: Random) -> str | None:
    place = _steps(program, random, lambda step: len({*step.operands.values()}) > 1)
    if place is None:
        return None
    operands = dict(program.routines[place[0]].steps[place[1]].operands)
    first = random.choice(sorted(operands))
    second = random.choice(sorted(name for name in operands if operands[name] != operands[first]))
    operands[first], operands[second] = operands[second], operands[first]
    return f"{_change_step(program, place, operands=operands)}: {first} and {second}"


@operator(NO_OP, always=True)
def change_context_rank_of_step(program: Program, random: Random) -> str | None:
    """A context rank leaves out a step, begins what it adds to, sees other keys, or does as another rank."""
    place = _steps(program, random, lambda step: bool(step.by_rank))
    if place is None:
        return None
    number, at = place
    by_rank = list(program.routines[number].steps[at].by_rank)
    rank = random.randrange(len(by_rank))
    own = by_rank[rank]
    others: list[Any] = [other for other in (*by_rank, None) if other != own]
    if own:
        name = random.choice(sorted(own))
        others.append({**own, name: not own[name] if isinstance(own[name], bool) else own[name] + 1})
    by_rank[rank] = random.choice(others)
    if random.random() < 0.2:
        by_rank = random.choice(([], by_rank[:1], [*by_rank, None]))
    return f"{_change_step(program, place, by_rank=tuple(by_rank))}: context rank {rank}"


@operator(NO_OP, always=True)
def change_option_of_step(program: Program, random: Random) -> str | None:
    """A flag turns, a number grows by 1 or a little, an option is left out."""
    place = _steps(program, random, lambda step: bool(step.options))
    if place is None:
        return None
    options = dict(program.routines[place[0]].steps[place[1]].options)
    name = random.choice(sorted(options))
    value = options.pop(name)
    if random.random() < 0.8:
        if isinstance(value, bool):
            options[name] = not value
        elif isinstance(value, float):
            options[name] = random.choice((value + 1, value * (1 + 2**-40), -value - 1))
        else:
            options[name] = value + 1 if isinstance(value, int) else 2 if value is None else f"{value}0"
    return f"{_change_step(program, place, options=options)}: {name} {value} -> {options.get(name, 'left out')}"


@operator(NO_OP)
def move_intermediate(program: Program, random: Random) -> str | None:
    """An intermediate lies where another does, or a little beside its place."""
    number = other_of(random, [n for n, routine in enumerate(program.routines) if routine.intermediates], None)
    if number is None:
        return None
    items = list(program.routines[number].intermediates)
    at = random.randrange(len(items))
    near = (items[at].offset + ALIGNMENT_BYTES, abs(items[at].offset - ALIGNMENT_BYTES), items[at].offset + 1)
    places = [item.offset for item in items] if random.random() < 0.8 else near
    offset = other_of(random, places, items[at].offset)
    if offset is None:
        return None
    items[at] = evolve(items[at], offset=offset)
    return f"{_put(program, number, intermediates=tuple(items)).key}: {items[at].name} at {offset}"


@operator(NO_OP, always=True)
def retype_intermediate(program: Program, random: Random) -> str | None:
    """An intermediate has a row less, or is not there."""
    number = other_of(random, [n for n, routine in enumerate(program.routines) if routine.intermediates], None)
    if number is None:
        return None
    items = list(program.routines[number].intermediates)
    item = items.pop(random.randrange(len(items)))
    if item.shape[0] > 1 and random.random() < 0.7:
        items.append(evolve(item, shape=(item.shape[0] - 1, *item.shape[1:])))
    return f"{_put(program, number, intermediates=tuple(items)).key}: {item.name}"
