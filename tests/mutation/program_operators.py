"""Mutations of programs: what a wrong emitter, or a hand that edits a container, does to streams, waits and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain_ir.ops import ENGINES, OP_CLASSES, Engine
from ratrain_ir.types import ALIGNMENT_BYTES, Dtype, StateKind, aligned, tensor_type
from targets.program import Access, CountWait, Instruction, Program, ProgramStage, ProgramTensor
from tests.mutation.operators import Registry

if TYPE_CHECKING:
    from random import Random

operator: Registry[Program] = Registry()
PROGRAM_OPERATORS = operator.operators

NO_OP = "RT080"
RACE = "RT081"
HANG = "RT042"
BYTES = "RT050"
VALUES = "RT020 RT022 RT024 RT030 RT031 RT032 RT040"
"""The program is lifted to a schedule, whose ops then find other values than they mean."""
MESSAGES = "RT041"
COLLECTIVES = "RT043"
IN_FLIGHT = "RT044"

Place = tuple[int, ProgramStage, Engine, int]


def _places(program: Program, wanted: Callable[[Instruction], bool]) -> list[Place]:
    return [
        (number, stage, engine, at)
        for number, stage in enumerate(program.stages)
        for engine in ENGINES
        for at, item in enumerate(stage.streams[engine])
        if wanted(item)
    ]


def _pick(program: Program, random: Random, wanted: Callable[[Instruction], bool] = lambda _i: True) -> Place | None:
    found = _places(program, wanted)
    return random.choice(found) if found else None


def _item(place: Place) -> Instruction:
    _, stage, engine, at = place
    return stage.streams[engine][at]


def _name(place: Place) -> str:
    number, _, engine, at = place
    return f"stage @{number} {engine.value} {at + 1} '{_item(place).title}'"


def _set(place: Place, **changes: Any) -> None:
    _, stage, engine, at = place
    stage.streams[engine][at] = evolve(_item(place), **changes)


def _other(random: Random, values: Any, than: Any) -> Any:
    """One of the values that differs, or None."""
    found = [value for value in values if value != than]
    return random.choice(found) if found else None


# Waits


def _waiting(item: Instruction) -> bool:
    return bool(item.waits)


def _change_wait(
    program: Program,
    random: Random,
    change: Callable[[ProgramStage, CountWait], CountWait | None],
    wanted: Callable[[CountWait], bool] = lambda _w: True,
) -> str | None:
    """Change one wait of those wanted; None from `change` drops it."""
    place = _pick(program, random, lambda item: any(map(wanted, item.waits)))
    if place is None:
        return None
    waits = list(_item(place).waits)
    at = random.choice([i for i, wait in enumerate(waits) if wanted(wait)])
    before, after = waits[at], change(place[1], waits[at])
    if after == before:
        return None
    waits[at : at + 1] = [] if after is None else [after]
    _set(place, waits=tuple(waits))
    return f"{_name(place)}: {_wait_text(before)} -> {_wait_text(after) if after else 'no wait'}"


def _wait_text(wait: CountWait) -> str:
    return f"{wait.engine.value} {wait.count}{' of the previous step' if wait.previous_step else ''}"


@operator(RACE, VALUES, BYTES)
def drop_wait(program: Program, random: Random) -> str | None:
    return _change_wait(program, random, lambda _stage, _wait: None)


@operator(RACE, VALUES, BYTES)
def weaken_wait(program: Program, random: Random) -> str | None:
    return _change_wait(
        program,
        random,
        lambda _stage, wait: evolve(wait, count=random.randint(1, wait.count - 1)),
        lambda w: w.count > 1,
    )


@operator(HANG)
def strengthen_wait(program: Program, random: Random) -> str | None:
    """Wait for more: it hangs, or is slower."""
    return _change_wait(
        program,
        random,
        lambda stage, wait: evolve(wait, count=random.randint(wait.count, len(stage.streams[wait.engine]))),
    )


@operator(RACE, VALUES, BYTES)
def wait_for_the_previous_step(program: Program, random: Random) -> str | None:
    return _change_wait(
        program, random, lambda _s, wait: evolve(wait, previous_step=True), lambda wait: not wait.previous_step
    )


@operator(HANG)
def wait_for_this_step(program: Program, random: Random) -> str | None:
    """What waited for the step before waits for its own step: it hangs, or is slower."""
    return _change_wait(
        program, random, lambda _s, wait: evolve(wait, previous_step=False), lambda wait: wait.previous_step
    )


@operator(RACE, VALUES, BYTES, HANG)
def wait_for_another_engine(program: Program, random: Random) -> str | None:
    def change(stage: ProgramStage, wait: CountWait) -> CountWait:
        engine = _other(random, [e for e in ENGINES if stage.streams[e]], wait.engine)
        return evolve(wait, engine=engine, count=min(wait.count, len(stage.streams[engine])))

    return _change_wait(program, random, change)


@operator(HANG)
def add_wait(program: Program, random: Random) -> str | None:
    place = _pick(program, random)
    assert place is not None
    stage = place[1]
    engine = random.choice([e for e in ENGINES if stage.streams[e]])
    wait = CountWait(engine, random.randint(1, len(stage.streams[engine])), random.random() < 0.3)
    _set(place, waits=(*_item(place).waits, wait))
    return f"{_name(place)}: {_wait_text(wait)}"


# Streams


def _renumber(stage: ProgramStage, engine: Engine, start: int, by: int) -> None:
    """Keep all waits on what they waited for, after instructions from `start` on have moved by one place."""
    for stream in stage.streams.values():
        for at, item in enumerate(stream):
            waits = tuple(
                evolve(w, count=w.count + by) if w.engine is engine and w.count > start else w for w in item.waits
            )
            stream[at] = evolve(item, waits=tuple(w for w in waits if w.count > 0))


def _remove(place: Place) -> Instruction:
    """Take an instruction out; who waited for it waits for the one before."""
    _, stage, engine, at = place
    item = stage.streams[engine].pop(at)
    _renumber(stage, engine, at, -1)
    return item


def _insert(stage: ProgramStage, engine: Engine, at: int, item: Instruction) -> None:
    _renumber(stage, engine, at, 1)
    stage.streams[engine].insert(at, item)


@operator(VALUES, HANG, COLLECTIVES, RACE, BYTES)
def drop_instruction(program: Program, random: Random) -> str | None:
    place = _pick(program, random)
    assert place is not None
    name = _name(place)
    _remove(place)
    return name


@operator(VALUES, HANG, COLLECTIVES, RACE)
def repeat_instruction(program: Program, random: Random) -> str | None:
    place = _pick(program, random)
    assert place is not None
    _, stage, engine, at = place
    name = _name(place)
    _insert(stage, engine, at + 1, evolve(_item(place)))
    return name


def _swap(place: Place, other: int, *, waits_stay: bool) -> str:
    _, stage, engine, at = place
    stream = stage.streams[engine]
    name = f"{_name(place)} and {other + 1} '{stream[other].title}'"
    one, two = stream[at], stream[other]
    if waits_stay:
        one, two = evolve(one, waits=two.waits), evolve(two, waits=one.waits)
    stream[at], stream[other] = two, one
    return f"{name}, waits {'stay' if waits_stay else 'go along'}"


@operator(VALUES, HANG, MESSAGES, COLLECTIVES, IN_FLIGHT, RACE, BYTES)
def swap_neighbours(program: Program, random: Random) -> str | None:
    place = _pick(program, random)
    assert place is not None
    at = place[3]
    if at + 1 == len(place[1].streams[place[2]]):
        return None
    return _swap(place, at + 1, waits_stay=random.random() < 0.5)


@operator(VALUES, HANG, MESSAGES, COLLECTIVES, IN_FLIGHT, RACE, BYTES)
def swap_distant(program: Program, random: Random) -> str | None:
    place = _pick(program, random)
    assert place is not None
    other = _other(random, range(len(place[1].streams[place[2]])), place[3])
    return None if other is None else _swap(place, other, waits_stay=random.random() < 0.5)


def _swap_on(*engines: Engine) -> Callable[[Program, Random], str | None]:
    def change(program: Program, random: Random) -> str | None:
        places = [place for place in _places(program, lambda _i: True) if place[2] in engines]
        place = random.choice(places) if places else None
        if place is None or len(place[1].streams[place[2]]) < 2:
            return None
        other = _other(random, range(len(place[1].streams[place[2]])), place[3])
        return _swap(place, other, waits_stay=random.random() < 0.5)

    return change


@operator(VALUES, HANG, COLLECTIVES, RACE, BYTES)
def swap_collectives(program: Program, random: Random) -> str | None:
    return _swap_on(Engine.COLLECTIVE)(program, random)


@operator(VALUES, HANG, MESSAGES, RACE, BYTES)
def swap_messages(program: Program, random: Random) -> str | None:
    return _swap_on(Engine.SEND, Engine.RECV)(program, random)


@operator(NO_OP, VALUES, HANG, RACE, BYTES)
def move_to_another_engine(program: Program, random: Random) -> str | None:
    """Updates may be on two engines; nothing else has a choice."""
    updates = random.random() < 0.3
    place = _pick(program, random, lambda item: item.keyword == "update" or not updates)
    assert place is not None
    _, stage, engine, _ = place
    to = _other(random, (Engine.COMPUTE, Engine.HOST) if updates else ENGINES, engine)
    name = _name(place)
    item = _remove(place)
    at = random.randint(0, len(stage.streams[to]))
    _insert(stage, to, at, evolve(item, waits=tuple(w for w in item.waits if w.engine is not to)))
    return f"{name} to {to.value} {at + 1}"


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
    operands[at] = evolve(operands[at], **changes)
    return {"operands": tuple(operands)}


@operator(NO_OP, VALUES, MESSAGES, HANG, RACE, BYTES)
def replace_operand(program: Program, random: Random) -> str | None:
    place = _pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    item, stage = _item(place), place[1]
    at = random.randrange(len(item.operands))
    number = _alike(stage, item.operands[at].tensor, random)
    if number is None:
        return None
    _set(place, **_with_operand(item, at, tensor=number))
    return f"{_name(place)}: {item.operands[at].role} = %{stage.tensors[number].name}"


@operator(NO_OP, VALUES, MESSAGES, HANG, RACE, BYTES)
def exchange_operands(program: Program, random: Random) -> str | None:
    """Two instructions of one kind exchange the tensor of one role."""
    place = _pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    item, stage = _item(place), place[1]
    at = random.randrange(len(item.operands))
    mine = item.operands[at]
    partners = [
        other
        for other in _places(program, lambda i: i.keyword == item.keyword and len(i.operands) > at)
        if other[1] is stage
        and _item(other).operands[at].tensor != mine.tensor
        and stage.tensors[_item(other).operands[at].tensor].type is stage.tensors[mine.tensor].type
    ]
    if not partners:
        return None
    other = random.choice(partners)
    theirs = _item(other).operands[at]
    _set(place, **_with_operand(item, at, tensor=theirs.tensor))
    _set(other, **_with_operand(_item(other), at, tensor=mine.tensor))
    return f"{_name(place)} and {_name(other)}: {mine.role}"


@operator(NO_OP, VALUES, MESSAGES, HANG, RACE, BYTES)
def exchange_tensors_of_one_engine(program: Program, random: Random) -> str | None:
    """From one instruction of an engine on, two tensors of equal type are taken for each other."""
    place = _pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    _, stage, engine, at = place
    one = random.choice(_item(place).operands).tensor
    other = _alike(stage, one, random)
    if other is None:
        return None
    renamed = {one: other, other: one}
    stream = stage.streams[engine]
    for i in range(at, len(stream)):
        operands = tuple(evolve(o, tensor=renamed.get(o.tensor, o.tensor)) for o in stream[i].operands)
        stream[i] = evolve(stream[i], operands=operands)
    return f"{_name(place)}: %{stage.tensors[one].name} and %{stage.tensors[other].name}"


@operator(NO_OP, VALUES, MESSAGES, RACE, BYTES)
def swap_operands(program: Program, random: Random) -> str | None:
    """Two operands of one instruction, of equal type if there are such, exchange their tensors."""
    place = _pick(program, random, lambda item: len(item.operands) > 1)
    assert place is not None
    item, tensors = _item(place), place[1].tensors
    count = len(item.operands)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    alike = [(i, j) for i, j in pairs if tensors[item.operands[i].tensor].type is tensors[item.operands[j].tensor].type]
    i, j = random.choice(alike or pairs)
    first, second = item.operands[i].tensor, item.operands[j].tensor
    _set(place, **_with_operand(item, i, tensor=second))
    _set(place, **_with_operand(_item(place), j, tensor=first))
    return f"{_name(place)}: {item.operands[i].role} and {item.operands[j].role}"


@operator(NO_OP)
def change_access(program: Program, random: Random) -> str | None:
    place = _pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    item = _item(place)
    at = random.randrange(len(item.operands))
    access = _other(random, list(Access), item.operands[at].access)
    _set(place, **_with_operand(item, at, access=access))
    return f"{_name(place)}: {item.operands[at].role} {access.name}"


@operator(NO_OP)
def change_role(program: Program, random: Random) -> str | None:
    place = _pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    item = _item(place)
    at = random.randrange(len(item.operands))
    known = sorted({o.role for stream in place[1].streams.values() for i in stream for o in i.operands})
    role = _other(random, known, item.operands[at].role)
    _set(place, **_with_operand(item, at, role=role))
    return f"{_name(place)}: {item.operands[at].role} called {role}"


@operator(NO_OP, VALUES)
def drop_operand(program: Program, random: Random) -> str | None:
    place = _pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    operands = list(_item(place).operands)
    gone = operands.pop(random.randrange(len(operands)))
    _set(place, operands=tuple(operands))
    return f"{_name(place)}: {gone.role}"


@operator(NO_OP)
def repeat_operand(program: Program, random: Random) -> str | None:
    place = _pick(program, random, lambda item: bool(item.operands))
    assert place is not None
    operands = list(_item(place).operands)
    at = random.randrange(len(operands))
    operands.insert(random.randint(0, len(operands)), operands[at])
    _set(place, operands=tuple(operands))
    return f"{_name(place)}: {operands[at].role}"


# Fields


def _change(
    program: Program,
    random: Random,
    name: str,
    values: Callable[[Instruction], Any],
    wanted: Callable[[Instruction], bool],
) -> str | None:
    place = _pick(program, random, wanted)
    if place is None:
        return None
    item = _item(place)
    value = _other(random, values(item), getattr(item, name))
    if value is None and name not in ("routine", "micro_batch", "peer"):
        return None
    title = _name(place)
    _set(place, **{name: value})
    return f"{title}: {name} {value}"


@operator(NO_OP, VALUES, MESSAGES, HANG, IN_FLIGHT)
def change_micro_batch(program: Program, random: Random) -> str | None:
    numbers = (None, *range(program.plan.micro_batches + 1))
    return _change(program, random, "micro_batch", lambda _i: numbers, lambda _i: True)


@operator(NO_OP, "RT027")
def change_peer(program: Program, random: Random) -> str | None:
    return _change(program, random, "peer", lambda _i: (None, *range(len(program.stages) + 1)), lambda _i: True)


@operator(NO_OP, "RT026 RT027 RT030 RT031 RT043 RT040")
def change_variant(program: Program, random: Random) -> str | None:
    words = ("", "tokens", "labels", "activation", "gradient", "loss", "flags", "norm", "forward", "backward")
    return _change(
        program, random, "variant", lambda _i: words, lambda item: bool(item.variant) or random.random() < 0.1
    )


@operator(NO_OP, "RT026 RT043 RT031")
def change_group(program: Program, random: Random) -> str | None:
    words = ("", "replicas", "ends", "all")
    return _change(program, random, "group", lambda _i: words, lambda item: bool(item.group) or random.random() < 0.1)


@operator(NO_OP, "RT027 RT043", VALUES)
def change_blocks(program: Program, random: Random) -> str | None:
    known = sorted({name for stage in program.stages for s in stage.streams.values() for i in s for name in i.blocks})
    place = _pick(program, random, lambda item: bool(item.blocks))
    assert place is not None
    blocks = list(_item(place).blocks)
    at = random.randrange(len(blocks))
    how = random.choice(("change", "drop", "add"))
    blocks[at : at + 1] = {"change": [random.choice(known)], "drop": [], "add": [blocks[at], random.choice(known)]}[how]
    if tuple(blocks) == _item(place).blocks:
        return None
    title = _name(place)
    _set(place, blocks=tuple(blocks))
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


# Tensors


def _change_tensor(
    program: Program,
    random: Random,
    change: Callable[[ProgramStage, ProgramTensor], ProgramTensor],
    wanted: Callable[[ProgramTensor], bool] = lambda _t: True,
) -> str | None:
    found = [(stage, i) for stage in program.stages for i, t in enumerate(stage.tensors) if wanted(t)]
    if not found:
        return None
    stage, at = random.choice(found)
    before = stage.tensors[at]
    stage.tensors[at] = change(stage, before)
    return None if stage.tensors[at] == before else f"%{before.name} -> {stage.tensors[at]}"


@operator(BYTES, RACE, "RT051 RT052")
def shift_offset(program: Program, random: Random) -> str | None:
    by = random.choice((ALIGNMENT_BYTES, -ALIGNMENT_BYTES, ALIGNMENT_BYTES, -ALIGNMENT_BYTES, 1))
    return _change_tensor(program, random, lambda _s, t: evolve(t, offset=abs(t.offset + by)))


@operator(BYTES, RACE)
def share_offset(program: Program, random: Random) -> str | None:
    return _change_tensor(program, random, lambda stage, t: evolve(t, offset=random.choice(stage.tensors).offset))


@operator(NO_OP, BYTES, RACE)
def change_shape(program: Program, random: Random) -> str | None:
    def change(_stage: ProgramStage, tensor: ProgramTensor) -> ProgramTensor:
        shape = tensor.type.shape
        changed = random.choice((shape[::-1], (max(1, shape[0] + random.choice((-1, 1))), *shape[1:])))
        return evolve(tensor, type=tensor_type(tensor.type.dtype, changed))

    return _change_tensor(program, random, change)


@operator(NO_OP, BYTES, RACE)
def change_dtype(program: Program, random: Random) -> str | None:
    return _change_tensor(
        program, random, lambda _s, t: evolve(t, type=tensor_type(random.choice(list(Dtype)), t.type.shape))
    )


@operator(NO_OP, "RT025")
def change_kind(program: Program, random: Random) -> str | None:
    return _change_tensor(program, random, lambda _s, t: evolve(t, kind=random.choice(list(StateKind))))


@operator(VALUES, BYTES)
def change_carried(program: Program, random: Random) -> str | None:
    return _change_tensor(program, random, lambda _s, t: evolve(t, carried=not t.carried))


@operator(NO_OP)
def shrink_workspace(program: Program, random: Random) -> str | None:
    def change(_stage: ProgramStage, tensor: ProgramTensor) -> ProgramTensor:
        size = max(ALIGNMENT_BYTES, aligned(tensor.type.nbytes) - ALIGNMENT_BYTES * random.randint(1, 8))
        return evolve(tensor, type=tensor_type(Dtype.U8, (size,)))

    return _change_tensor(program, random, change, lambda t: t.kind is StateKind.WORKSPACE)


@operator(BYTES, RACE)
def grow_workspace(program: Program, random: Random) -> str | None:
    def change(_stage: ProgramStage, tensor: ProgramTensor) -> ProgramTensor:
        size = aligned(tensor.type.nbytes) + ALIGNMENT_BYTES * random.randint(1, 8)
        return evolve(tensor, type=tensor_type(Dtype.U8, (size,)))

    return _change_tensor(program, random, change, lambda t: t.kind is StateKind.WORKSPACE)


@operator(NO_OP)
def rename_tensor(program: Program, random: Random) -> str | None:
    """A name means nothing, except the slot of a saved tensor."""
    return _change_tensor(program, random, lambda _s, t: evolve(t, name=f"{t.name}.z"))


@operator("RT052")
def shrink_capacity(program: Program, random: Random) -> str | None:
    largest = max(stage.arena_bytes for stage in program.stages)
    program.capacity_bytes = largest - ALIGNMENT_BYTES * random.randint(-2, 2)
    return f"{largest} -> {program.capacity_bytes}"
