"""Race freedom of an emitted program: whatever interleaving the hardware chooses, the same bytes come out.

Two instructions of a stage race when both touch a byte, one of them writes, and nothing orders them. Order (happens-before) is that of
an engine's own stream and of the program's waits, nothing else. Vector clocks over two consecutive steps decide it: an access is
checked against the last write of each byte and the last read on each engine, so every conflicting pair is covered, by
transitivity, in one sweep (the epochs of FastTrack, Flanagan and Freund, PLDI 2009). A third step adds nothing: what is ordered before
its image of the next step is ordered before all later ones, since engines keep their order.

By the same clocks, a blocking collective and the compute instructions around it are ordered: its mark is no empty word. And what takes
back from another stage comes after what evicted the same, so that one stage's waits alone say so.
"""

from __future__ import annotations

from bisect import bisect_left

from attrs import define, field, frozen

from ratrain.ratrain_ir.diagnostics import Diagnostics, Note
from ratrain.ratrain_ir.ops import ENGINES, Engine, Evict, Piece, TakeBack
from ratrain.ratrain_ir.types import Home
from ratrain.targets.program.program import Access, Instruction, Program, ProgramStage

_COMPUTE, _COLLECTIVE = ENGINES.index(Engine.COMPUTE), ENGINES.index(Engine.COLLECTIVE)
_STORE, _FETCH = ENGINES.index(Engine.STORE), ENGINES.index(Engine.FETCH)
_NEVER = -1
_MAX_REPORTS = 20
_STEPS = 2


@frozen
class Race:
    """Two instructions, given as (engine, number in its stream from 1, step), and bytes both touch: none where they have another reason to be ordered.

    `first` is not of a later step than `second`.
    """

    first: tuple[Engine, int, int]
    second: tuple[Engine, int, int]
    start: int
    stop: int
    home: Home = Home.DDR
    """the memory whose bytes they are"""


def check_races(program: Program, diagnostics: Diagnostics) -> None:
    """Report RT081 for every pair of instructions that race, up to a limit a stage."""
    for index, stage in enumerate(program.stages):
        for race in stage_races(stage):
            first, second = _instruction(stage, race.first), _instruction(stage, race.second)
            text = (
                f"stage @{index}: '{first.title}' ({race.first[0].value} {race.first[1]}) and '{second.title}' "
                f"({race.second[0].value} {race.second[1]}{_later(race)}) {_reason(race, first)}, and no wait orders them"
            )
            notes = [Note(f"'{second.title}' waits for: {_waits(second)}")]
            diagnostics.error("RT081", text, notes=notes)


def _later(race: Race) -> str:
    return " of the next step" if race.second[2] > race.first[2] else ""


def _reason(race: Race, first: Instruction) -> str:
    if race.start == race.stop and first.keyword == Evict.keyword:
        return "must run one after the other, since the one takes back what the other evicts"
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
    """The races of one stage; at most one a pair of instructions, `_MAX_REPORTS` in all."""
    return _Sweep(stage).run()


def _lent(item: Instruction) -> tuple[int | None, tuple[str, ...], Piece]:
    """What an instruction sends to another stage or receives from there."""
    return item.peer, item.blocks, item.piece


@define(eq=False)
class _Segment:
    """Bytes with one history: the last write, and the last read on each engine since."""

    start: int
    stop: int
    writer: tuple[int, int] | None
    """(engine index, number over both steps)"""
    readers: dict[int, int]


@define(eq=False)
class _Sweep:
    stage: ProgramStage
    starts: list[int] = field(factory=list)
    segments: list[_Segment] = field(factory=list)
    races: list[Race] = field(factory=list)
    seen: set[tuple[tuple[Engine, int], tuple[Engine, int], int]] = field(factory=set)
    """Pairs found, and how many steps they are apart."""
    begins: dict[Home, int] = field(factory=dict)
    """Where the bytes of each memory begin, one memory behind the other."""
    spans: list[tuple[int, int]] = field(factory=list)
    """The bytes of each tensor, so counted."""

    def run(self) -> list[Race]:
        size = 0
        for home in Home:
            self.begins[home] = size
            size += self.stage.bytes_in(home)
        for tensor in self.stage.tensors:
            begin = self.begins[tensor.home]
            self.spans.append((begin + tensor.offset, begin + tensor.end))
        self.starts, self.segments = [0], [_Segment(0, size, None, {})]
        streams = [self.stage.streams[engine] for engine in ENGINES]
        done = [0] * len(ENGINES)
        clocks: list[list[list[int]]] = [[] for _ in ENGINES]
        """Per engine, after each instruction: the number of each engine's last instruction known to be complete."""
        running = True
        while running:
            running = False
            for engine, stream in enumerate(streams):
                while done[engine] < _STEPS * len(stream):
                    instruction = stream[done[engine] % len(stream)]
                    clock = self.clock(engine, done, instruction, clocks, streams)
                    if clock is None:
                        break
                    self.visit((engine, done[engine]), instruction, clock)
                    clock[engine] = done[engine]
                    clocks[engine].append(clock)
                    done[engine] += 1
                    running = True
        self.check_blocking(streams[_COLLECTIVE], clocks)
        self.check_taken_back(clocks)
        return self.races

    def check_blocking(self, collectives: list[Instruction], clocks: list[list[list[int]]]) -> None:
        """No compute instruction runs beside a blocking collective: the first that is not done when it starts waits for it."""
        for number, clock in enumerate(clocks[_COLLECTIVE]):
            following = clock[_COMPUTE] + 1
            if collectives[number % len(collectives)].blocking and following < len(clocks[_COMPUTE]):
                self.check((_COMPUTE, following), (_COLLECTIVE, number), clocks[_COMPUTE][following], 0, 0)

    def check_taken_back(self, clocks: list[list[list[int]]]) -> None:
        """What is taken back was evicted in the same step before."""
        streams = self.stage.streams
        evicted = {_lent(item): at for at, item in enumerate(streams[Engine.STORE]) if item.keyword == Evict.keyword}
        for number, clock in enumerate(clocks[_FETCH]):
            step, at = divmod(number, len(streams[Engine.FETCH]))
            item = streams[Engine.FETCH][at]
            sent = evicted.get(_lent(item)) if item.keyword == TakeBack.keyword else None
            if sent is not None:
                evict = _STORE, step * len(streams[Engine.STORE]) + sent
                self.check((_FETCH, number), evict, clock, 0, 0)

    def clock(
        self,
        engine: int,
        done: list[int],
        instruction: Instruction,
        clocks: list[list[list[int]]],
        streams: list[list[Instruction]],
    ) -> list[int] | None:
        """What is complete when the instruction starts, or None while a wait is not met."""
        step = done[engine] // len(streams[engine])
        clock = list(clocks[engine][-1]) if clocks[engine] else [_NEVER] * len(ENGINES)
        for wait in instruction.waits:
            other = ENGINES.index(wait.engine)
            number = (step - wait.previous_step) * len(streams[other]) + wait.count - 1
            if number < 0 or (wait.previous_step and step == 0):
                continue
            if number >= done[other]:
                return None
            for index, known in enumerate(clocks[other][number]):
                clock[index] = max(clock[index], known)
        return clock

    def visit(self, me: tuple[int, int], instruction: Instruction, clock: list[int]) -> None:
        for operand in instruction.operands:
            start, stop = self.spans[operand.tensor]
            if stop > start:
                self.touch(me, start, stop, clock, reads=operand.access is Access.READ)

    def touch(self, me: tuple[int, int], start: int, stop: int, clock: list[int], *, reads: bool) -> None:
        """Check an access against the history of its bytes, and enter it there."""
        first = self.split(start)
        engine, number = me
        segment = self.segments[first]
        if segment.stop == stop and (reads or not segment.readers):  # as most are: the same bytes as before
            self.check(me, segment.writer, clock, start, stop)
            if reads:
                segment.readers[engine] = number
            else:
                segment.writer = me
            return
        last = self.split(stop)
        for segment in self.segments[first:last]:
            self.check(me, segment.writer, clock, start, stop)
            if reads:
                segment.readers[engine] = number
            else:
                for reader in segment.readers.items():
                    self.check(me, reader, clock, start, stop)
        if not reads:  # one history from here on
            self.segments[first:last] = [_Segment(start, stop, me, {})]
            self.starts[first:last] = [start]

    def check(
        self, me: tuple[int, int], other: tuple[int, int] | None, clock: list[int], start: int, stop: int
    ) -> None:
        if other is None or other[0] == me[0] or other[1] <= clock[other[0]]:
            return
        # nothing orders them, so the sweep may come to the one of the next step first
        first, second = sorted((self.place(other), self.place(me)), key=lambda place: place[2])
        pair = (first[:2], second[:2], second[2] - first[2])
        if pair not in self.seen and len(self.races) < _MAX_REPORTS:
            self.seen.add(pair)
            home = max((each for each in Home if self.begins[each] <= start), key=lambda each: self.begins[each])
            begin = self.begins[home]
            self.races.append(Race(first, second, start - begin, stop - begin, home))

    def place(self, event: tuple[int, int]) -> tuple[Engine, int, int]:
        engine = ENGINES[event[0]]
        step, position = divmod(event[1], len(self.stage.streams[engine]))
        return engine, position + 1, step

    def split(self, at: int) -> int:
        """Make a segment start at a byte; its index."""
        index = bisect_left(self.starts, at)
        if index < len(self.starts) and self.starts[index] == at:
            return index
        before = self.segments[index - 1]
        if at >= before.stop:
            return index
        self.segments.insert(index, _Segment(at, before.stop, before.writer, dict(before.readers)))
        self.starts.insert(index, at)
        before.stop = at
        return index
