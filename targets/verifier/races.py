"""Race freedom of a program: whatever interleaving the hardware chooses, the same bytes result.

Two instructions of a stage race if both touch a byte, one of them writes it, and nothing orders them. The only orders
(happens-before) are that of an engine's own stream and the program's waits.

    compute 1   write [0, 64)
    send 1      read  [0, 64)   waits for compute 1     ordered
    recv 1      write [0, 64)   waits for compute 1     races with send 1: no wait orders them

Vector clocks over two consecutive steps decide it (`race_sweep`): an access is compared with the last write of each
byte, and with the last read on each engine. By transitivity this covers every conflicting pair in one sweep (the epochs
of FastTrack, Flanagan and Freund, PLDI 2009). A third step adds nothing: an instruction that is ordered before one of
the next step is ordered before the same one in all later steps, since engines keep their order.

The same clocks check that a blocking collective is ordered with the compute instructions around it, and that each
`peer_reload` comes after the `peer_offload` of the same tensors, by the waits of that stage alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.ops.base import ENGINE_NUMBERS, ENGINES, Engine, Piece
from ratrain.ratrain_ir.ops.messages import PeerOffload, PeerReload
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Note
from ratrain.targets.program.columns import (
    ACCESS,
    ACCESSES,
    BLOCKING,
    FLAGS,
    KEYWORD,
    OPERANDS,
    TENSOR,
    WAITS,
    Int32s,
    Int64s,
    ProgramColumns,
)
from ratrain.targets.program.instruction import Access, Instruction
from ratrain.targets.verifier.race_sweep import Conflict, Swept, SweptStage, swept

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program, ProgramStage

_COMPUTE, _COLLECTIVE = ENGINE_NUMBERS[Engine.COMPUTE], ENGINE_NUMBERS[Engine.COLLECTIVE]
_STORE, _FETCH = ENGINE_NUMBERS[Engine.STORE], ENGINE_NUMBERS[Engine.FETCH]
_MAX_REPORTS = 20


@frozen
class Race:
    """Two instructions that race, each as (engine, number in its stream from 1, step), and the bytes both touch.

    The range of bytes is empty if they must be ordered for another reason. `first` is not of a later step than
    `second`.
    """

    first: tuple[Engine, int, int]
    second: tuple[Engine, int, int]
    start: int
    stop: int
    home: Home = Home.DDR
    """memory that the bytes are in"""


def check_races(program: Program, diagnostics: Diagnostics) -> None:
    """Report RT081 for every pair of instructions that race, up to a limit for each stage."""
    for index, stage in enumerate(program.stages):
        for race in stage_races(stage):
            first, second = _instruction(stage, race.first), _instruction(stage, race.second)
            text = (
                f"stage @{index}: '{first.title}' ({race.first[0].value} {race.first[1]}) and '{second.title}' "
                f"({race.second[0].value} {race.second[1]}{_later(race)}) {_reason(race, first)}, and no wait "
                "orders them"
            )
            notes = [Note(f"'{second.title}' waits for: {_waits(second)}")]
            diagnostics.error("RT081", text, notes=notes)


def _later(race: Race) -> str:
    return " of the next step" if race.second[2] > race.first[2] else ""


def _reason(race: Race, first: Instruction) -> str:
    if race.start == race.stop and first.keyword == PeerOffload.keyword:
        return "must run one after the other, since the one reloads what the other offloads"
    if race.start == race.stop:
        return "must not run at once, since one is a blocking collective and the other computes"
    where = "" if race.home is Home.DDR else f" of the memory '{race.home.value}'"
    return f"both touch the bytes {race.start:#x} to {race.stop:#x}{where}, one writes"


def _instruction(stage: ProgramStage, place: tuple[Engine, int, int]) -> Instruction:
    return stage.streams[place[0]][place[1] - 1]


def _waits(instruction: Instruction) -> str:
    waits = [
        f"{w.engine.value} {w.count}{' of the previous step' if w.previous_step else ''}" for w in instruction.waits
    ]
    return ", ".join(waits) or "nothing"


def stage_races(stage: ProgramStage) -> list[Race]:
    """Return the races of one stage: at most one for a pair of instructions, `_MAX_REPORTS` in all."""
    columns, number = stage.in_columns
    begins = _begins(columns, number)
    numbers = _as_numbers(columns, number, begins)
    found = swept(numbers)
    # Bytes, then the two orders that are demanded for other reasons; those have empty ranges of bytes.
    conflicts = [
        *found.conflicts,
        *_during_blocking(columns, number, numbers, found),
        *_taken_back(stage, columns, number, numbers, found),
    ]
    races: dict[object, Race] = {}
    for conflict in conflicts:
        me = _place(numbers.lengths, conflict.engine, conflict.number)
        other = _place(numbers.lengths, conflict.other_engine, conflict.other_number)
        # Nothing orders them, so the sweep may visit the one of the next step first.
        first, second = sorted((other, me), key=lambda place: place[2])
        # Translate the common address back: the memory that begins last at or before it.
        home = max((each for each in Home if begins[each] <= conflict.start), key=lambda each: begins[each])
        start, stop = conflict.start - begins[home], conflict.stop - begins[home]
        races.setdefault((first[:2], second[:2], second[2] - first[2]), Race(first, second, start, stop, home))
    return list(races.values())[:_MAX_REPORTS]


def _begins(columns: ProgramColumns, stage: int) -> dict[Home, int]:
    """Return the first byte of each memory in the common address space, where memories follow each other."""
    begins: dict[Home, int] = {}
    size = 0
    for home in Home:
        begins[home] = size
        size += columns.bytes_in(stage, home)
    return begins


def _as_numbers(columns: ProgramColumns, stage: int, begins: dict[Home, int]) -> SweptStage:
    """Convert a stage to the numbers that the sweep takes."""
    first, stop = columns.range_of(stage)
    rows = columns.instructions[first:stop]
    operand_ends, wait_ends = (np.cumsum(rows[:, column], dtype=np.int64) for column in (OPERANDS, WAITS))
    operands = _last(columns.operands, columns.operand_stops[first:stop], operand_ends)
    own = columns.tensors_of(stage)
    forms = columns.tensor_forms[own]
    starts = np.array([begins[form.home] for form in columns.forms], np.int64)[forms] + columns.offsets[own]
    return SweptStage(
        columns.lengths[stage].tolist(),
        operand_ends,
        operands[:, TENSOR].astype(np.int64),
        (operands[:, ACCESS] == ACCESSES.index(Access.READ)).astype(np.int64),
        wait_ends,
        _last(columns.waits, columns.wait_stops[first:stop], wait_ends).astype(np.int64).ravel(),
        starts,
        starts + columns.form_bytes[forms],
        sum(columns.bytes_in(stage, home) for home in Home),
    )


def _last(items: Int32s, stops: Int64s, ends: Int64s) -> Int32s:
    """Return the items of a run of instructions, whose exclusive ends are `stops` among all and `ends` among these."""
    return items[int(stops[-1] - ends[-1]) : int(stops[-1])] if len(stops) else items[:0]


def _during_blocking(columns: ProgramColumns, stage: int, numbers: SweptStage, found: Swept) -> Iterator[Conflict]:
    """Yield a conflict for each blocking collective that a compute instruction may overlap.

    The first compute instruction that is not complete when the collective starts must wait for it.
    """
    first = columns.range_of(stage)[0] + sum(numbers.lengths[:_COLLECTIVE])
    flags = columns.instructions[first : first + numbers.lengths[_COLLECTIVE], FLAGS]
    blocking = (flags & BLOCKING != 0).tolist()
    for number in range(found.done[_COLLECTIVE]):
        if not blocking[number % len(blocking)]:
            continue
        # `following` is the first compute instruction that the collective does not wait for; later ones know at least
        # as much.
        following = found.clock(numbers.lengths, _COLLECTIVE, number)[_COMPUTE] + 1
        if following < found.done[_COMPUTE]:
            knows = found.clock(numbers.lengths, _COMPUTE, following)[_COLLECTIVE]
            if number > knows:
                yield Conflict(_COMPUTE, following, _COLLECTIVE, number, 0, 0)


def _taken_back(
    stage: ProgramStage, columns: ProgramColumns, place: int, numbers: SweptStage, found: Swept
) -> Iterator[Conflict]:
    """Yield a conflict for each `peer_reload` that is not ordered after its `peer_offload` of the same step.

    `place` is the number of the stage in `columns`.
    """
    keywords = columns.instructions[slice(*columns.range_of(place)), KEYWORD]
    if not columns.where(keywords, PeerOffload.keyword).any():
        return
    stores, fetches = stage.streams[Engine.STORE], stage.streams[Engine.FETCH]
    # A `peer_offload` and its `peer_reload` are on different engines, so only waits order them.
    offloaded = {_lent(item): at for at, item in enumerate(stores) if item.keyword == PeerOffload.keyword}
    for number in range(found.done[_FETCH]):
        step, at = divmod(number, len(fetches))
        sent = offloaded.get(_lent(fetches[at])) if fetches[at].keyword == PeerReload.keyword else None
        if sent is None:
            continue
        offload = step * len(stores) + sent
        if offload > found.clock(numbers.lengths, _FETCH, number)[_STORE]:
            yield Conflict(_FETCH, number, _STORE, offload, 0, 0)


def _lent(item: Instruction) -> tuple[int | None, tuple[str, ...], Piece]:
    """Return the key that a `peer_offload` and its `peer_reload` share: other stage, blocks and piece."""
    return item.peer, item.blocks, item.piece


def _place(lengths: list[int], engine: int, number: int) -> tuple[Engine, int, int]:
    step, position = divmod(number, lengths[engine])
    return ENGINES[engine], position + 1, step
