"""Mutations of what instructions say and touch: operands and fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.ops.kinds import OP_CLASSES
from ratrain.targets.program.instruction import Access, Instruction
from tests.mutation.program_parts import (
    BYTES,
    HANG,
    IN_FLIGHT,
    MESSAGES,
    NO_OP,
    RACE,
    TOO_LITTLE,
    VALUES,
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

    from ratrain.targets.program.program import Program, ProgramStage

# Operands


def _alike(stage: ProgramStage, number: int, random: Random) -> int | None:
    """Another tensor of equal type, mostly of equal kind where there is one."""
    held = stage.tensors[number]
    like = [i for i, t in enumerate(stage.tensors) if t.type is held.type and i != number]
    same = [i for i in like if stage.tensors[i].kind is held.kind]
    chosen = same if same and random.random() < 0.8 else like
    return random.choice(chosen) if chosen else None


def _with_operand(item: Instruction, at: int, **changes: Any) -> dict[str, Any]:
    operands = list(item.operands)
    operands[at] = operands[at]._replace(**changes)
    return {"operands": tuple(operands)}


@operator(NO_OP, VALUES, MESSAGES, HANG, RACE, BYTES)
def replace_operand(program: Program, random: Random) -> str | None:
    place = pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    item, stage = item_at(place), place[1]
    at = random.randrange(len(item.operands))
    number = _alike(stage, item.operands[at].tensor, random)
    if number is None:
        return None
    put(place, **_with_operand(item, at, tensor=number))
    return f"{title_of(place)}: {item.operands[at].role} = %{stage.tensors[number].name}"


@operator(NO_OP, VALUES, MESSAGES, HANG, RACE, BYTES)
def exchange_operands(program: Program, random: Random) -> str | None:
    """Two instructions of one kind exchange the tensor of one role."""
    place = pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    item, stage = item_at(place), place[1]
    at = random.randrange(len(item.operands))
    mine = item.operands[at]
    partners = [
        other
        for other in places(program, lambda i: i.keyword == item.keyword and len(i.operands) > at)
        if other[1] is stage
        and item_at(other).operands[at].tensor != mine.tensor
        and stage.tensors[item_at(other).operands[at].tensor].type is stage.tensors[mine.tensor].type
    ]
    if not partners:
        return None
    other = random.choice(partners)
    theirs = item_at(other).operands[at]
    put(place, **_with_operand(item, at, tensor=theirs.tensor))
    put(other, **_with_operand(item_at(other), at, tensor=mine.tensor))
    return f"{title_of(place)} and {title_of(other)}: {mine.role}"


@operator(NO_OP, VALUES, MESSAGES, HANG, RACE, BYTES)
def exchange_tensors_of_one_engine(program: Program, random: Random) -> str | None:
    """From one instruction of an engine on, two tensors of equal type are taken for each other."""
    place = pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    _, stage, engine, at = place
    one = random.choice(item_at(place).operands).tensor
    other = _alike(stage, one, random)
    if other is None:
        return None
    renamed = {one: other, other: one}
    stream = stage.streams[engine]
    for i in range(at, len(stream)):
        operands = tuple(o._replace(tensor=renamed.get(o.tensor, o.tensor)) for o in stream[i].operands)
        stream[i] = evolve(stream[i], operands=operands)
    return f"{title_of(place)}: %{stage.tensors[one].name} and %{stage.tensors[other].name}"


@operator(NO_OP, VALUES, MESSAGES, RACE, BYTES)
def swap_operands(program: Program, random: Random) -> str | None:
    """Two operands of one instruction, of equal type if there are such, exchange their tensors."""
    place = pick(program, random, lambda item: len(item.operands) > 1)
    assert place is not None
    item, tensors = item_at(place), place[1].tensors
    count = len(item.operands)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    alike = [(i, j) for i, j in pairs if tensors[item.operands[i].tensor].type is tensors[item.operands[j].tensor].type]
    i, j = random.choice(alike or pairs)
    first, second = item.operands[i].tensor, item.operands[j].tensor
    put(place, **_with_operand(item, i, tensor=second))
    put(place, **_with_operand(item_at(place), j, tensor=first))
    return f"{title_of(place)}: {item.operands[i].role} and {item.operands[j].role}"


@operator(NO_OP)
def change_access(program: Program, random: Random) -> str | None:
    place = pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    item = item_at(place)
    at = random.randrange(len(item.operands))
    access = other_of(random, list(Access), item.operands[at].access)
    put(place, **_with_operand(item, at, access=access))
    return f"{title_of(place)}: {item.operands[at].role} {access.name}"


@operator(NO_OP)
def change_role(program: Program, random: Random) -> str | None:
    place = pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    item = item_at(place)
    at = random.randrange(len(item.operands))
    known = sorted({o.role for stream in place[1].streams.values() for i in stream for o in i.operands})
    role = other_of(random, known, item.operands[at].role)
    put(place, **_with_operand(item, at, role=role))
    return f"{title_of(place)}: {item.operands[at].role} called {role}"


@operator(NO_OP, VALUES, TOO_LITTLE)
def drop_operand(program: Program, random: Random) -> str | None:
    place = pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    operands = list(item_at(place).operands)
    gone = operands.pop(random.randrange(len(operands)))
    put(place, operands=tuple(operands))
    return f"{title_of(place)}: {gone.role}"


@operator(NO_OP)
def repeat_operand(program: Program, random: Random) -> str | None:
    place = pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    operands = list(item_at(place).operands)
    at = random.randrange(len(operands))
    operands.insert(random.randint(0, len(operands)), operands[at])
    put(place, operands=tuple(operands))
    return f"{title_of(place)}: {operands[at].role}"


# Fields


def _change(
    program: Program,
    random: Random,
    name: str,
    values: Callable[[Instruction], Any],
    wanted: Callable[[Instruction], bool],
) -> str | None:
    place = pick(program, random, wanted)
    if place is None:
        return None
    item = item_at(place)
    value = other_of(random, values(item), getattr(item, name))
    if value is None and name not in ("routine", "micro_batch", "peer"):
        return None
    title = title_of(place)
    put(place, **{name: value})
    return f"{title}: {name} {value}"


@operator(NO_OP, VALUES, MESSAGES, HANG, IN_FLIGHT, "RT026")  # RT026: a view gathered once gets a micro-batch
def change_micro_batch(program: Program, random: Random) -> str | None:
    numbers = (None, *range(program.plan.micro_batches + 1))
    return _change(program, random, "micro_batch", lambda _i: numbers, lambda _i: True)


@operator(NO_OP, "RT027")
def change_peer(program: Program, random: Random) -> str | None:
    return _change(program, random, "peer", lambda _i: (None, *range(len(program.stages) + 1)), lambda _i: True)


@operator(NO_OP, "RT026 RT027 RT030 RT031 RT033 RT034 RT043 RT040")
def change_variant(program: Program, random: Random) -> str | None:
    words = ("", "tokens", "labels", "activation", "gradient", "loss", "flags", "norm", "forward", "backward")
    return _change(
        program, random, "variant", lambda _i: words, lambda item: bool(item.variant) or random.random() < 0.1
    )


@operator(NO_OP, VALUES)
def change_head_group(program: Program, random: Random) -> str | None:
    def others(item: Instruction) -> list[str]:
        said = item.variant.rpartition(".")[0]
        groups = [f"g{each}" for each in range(program.plan.context_groups + 1)]
        return [said, *(f"{said}.{each}" if said else each for each in groups)]

    return _change(program, random, "variant", others, lambda item: item.head_group is not None)


@operator(NO_OP, "RT026 RT043 RT031 RT033 RT034")
def change_group(program: Program, random: Random) -> str | None:
    words = ("", "replicas", "ends", "all")
    return _change(program, random, "group", lambda _i: words, lambda item: bool(item.group) or random.random() < 0.1)


@operator(NO_OP, "RT027 RT043", VALUES)
def change_blocks(program: Program, random: Random) -> str | None:
    known = sorted({name for stage in program.stages for s in stage.streams.values() for i in s for name in i.blocks})
    place = pick(program, random, lambda item: bool(item.blocks))
    assert place is not None
    blocks = list(item_at(place).blocks)
    at = random.randrange(len(blocks))
    how = random.choice(("change", "drop", "add"))
    blocks[at : at + 1] = {"change": [random.choice(known)], "drop": [], "add": [blocks[at], random.choice(known)]}[how]
    if tuple(blocks) == item_at(place).blocks:
        return None
    title = title_of(place)
    put(place, blocks=tuple(blocks))
    return f"{title}: {'+'.join(blocks)}"


@operator(NO_OP, "RT030")
def change_keyword(program: Program, random: Random) -> str | None:
    return _change(program, random, "keyword", lambda _i: list(OP_CLASSES), lambda _i: True)


@operator(NO_OP)
def change_accumulates(program: Program, random: Random) -> str | None:
    return _change(program, random, "accumulates", lambda _i: (False, True), lambda _i: True)


@operator(NO_OP)
def change_routine(program: Program, random: Random) -> str | None:
    numbers = (None, *range(len(program.routines)))
    return _change(program, random, "routine", lambda _i: numbers, lambda _i: True)
