"""A timed run of a program's own streams: when each instruction starts and ends on every engine of every stage.

Engines take their streams in order; an instruction starts when its engine is free and its waits are met. A buffered send occupies
its engine for the message's time and its receive ends no earlier; a rendezvous send starts and ends with its receive. A collective
starts when all members are at it. Resources are not shared yet: each instruction takes the time it takes alone. Replicas are alike,
so one of each stage is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import define, field, frozen

from ratrain_ir.diagnostics import fail
from ratrain_ir.ops import ENGINES, Engine
from targets.program import Instruction, Program

DurationOf = Callable[[int, Instruction], float]
"""Seconds of an instruction of a stage that runs alone."""

STEPS = 3
"""Consecutive steps that are timed: the first from cold, the distance of the last two is the steady period."""


@frozen
class Span:
    """One executed instruction: seconds from the start of the first step."""

    instruction: Instruction
    start: float
    end: float


@frozen(eq=False)
class Timeline:
    """Spans by stage and engine, in stream order, step after step."""

    program: Program
    spans: list[dict[Engine, list[Span]]]
    steps: int

    @property
    def makespan_seconds(self) -> float:
        """One step from cold: when the last instruction of the first step ends."""
        return max((span.end for _, _, step in self.by_step(0) for span in step), default=0.0)

    @property
    def step_seconds(self) -> float:
        """The steady period: the largest distance between the ends of equal streams in the last two steps."""
        last = {(s, e): step for s, e, step in self.by_step(self.steps - 1)}
        before = {(s, e): step for s, e, step in self.by_step(self.steps - 2)}
        return max((last[key][-1].end - before[key][-1].end for key in last), default=0.0)

    def by_step(self, step: int) -> Iterator[tuple[int, Engine, list[Span]]]:
        """The spans of one step, by stage and engine; engines without work are left out."""
        for stage, engines in enumerate(self.spans):
            for engine, spans in engines.items():
                count = len(self.program.stages[stage].streams[engine])
                if count:
                    yield stage, engine, spans[step * count : (step + 1) * count]

    def busy_seconds(self, stage: int, engine: Engine) -> float:
        """Seconds an engine works in one step."""
        count = len(self.program.stages[stage].streams[engine])
        return sum(span.end - span.start for span in self.spans[stage][engine][-count:]) if count else 0.0

    def exposed_tail_seconds(self, stage: int) -> float:
        """Idle time of a stage's compute engine in the last step that ended with the end of a collective or a host update.

        That is what gradient reduction, updates, gathers of views and barriers cost beyond what compute hides.
        """
        spans = self.spans[stage][Engine.COMPUTE]
        count = len(self.program.stages[stage].streams[Engine.COMPUTE])
        first = len(spans) - count
        tail = 0.0
        for index in range(max(first, 1), len(spans)):
            idle = spans[index].start - spans[index - 1].end
            if idle > 0 and self._last_awaited(stage, spans[index], index // count) in _TAIL_ENGINES:
                tail += idle
        return tail

    def _last_awaited(self, stage: int, span: Span, step: int) -> Engine | None:
        """The engine whose instruction an instruction waited for last."""
        latest: tuple[float, Engine | None] = (-1.0, None)
        for wait in span.instruction.waits:
            at = step - wait.previous_step
            if at >= 0:
                number = at * len(self.program.stages[stage].streams[wait.engine]) + wait.count - 1
                end = self.spans[stage][wait.engine][number].end
                if end > latest[0]:
                    latest = (end, wait.engine)
        return latest[1]


_TAIL_ENGINES = (Engine.COLLECTIVE, Engine.HOST)


def simulate(program: Program, duration_of: DurationOf, *, rendezvous: bool = False, steps: int = STEPS) -> Timeline:
    """Time `steps` consecutive steps.

    Raises `DiagnosticError` RT042 when the program cannot end, naming who waits.
    """
    run = _TimedRun(program, duration_of, rendezvous, steps)
    run.to_end()
    return Timeline(program, run.spans, steps)


@define(eq=False)
class _TimedRun:
    program: Program
    duration_of: DurationOf
    rendezvous: bool
    steps: int
    spans: list[dict[Engine, list[Span]]] = field(factory=list)
    sent: dict[tuple[int, int, str], list[float]] = field(factory=dict)
    """When the messages of a channel are complete, in send order."""
    received: dict[tuple[int, int, str], int] = field(factory=dict)

    def to_end(self) -> None:
        stages = self.program.stages
        self.spans = [{engine: [] for engine in ENGINES} for _ in stages]
        heads = [(s, e) for s, stage in enumerate(stages) for e in ENGINES if stage.streams[e]]
        while heads:
            ran = False
            for stage, engine in heads:
                while self.advance(stage, engine):
                    ran = True
            heads = [(s, e) for s, e in heads if self.has_work(s, e)]
            if heads and not ran:
                self.hang(heads)

    def has_work(self, stage: int, engine: Engine) -> bool:
        return len(self.spans[stage][engine]) < self.steps * len(self.program.stages[stage].streams[engine])

    def head(self, stage: int, engine: Engine) -> tuple[Instruction, int]:
        stream = self.program.stages[stage].streams[engine]
        step, position = divmod(len(self.spans[stage][engine]), len(stream))
        return stream[position], step

    def earliest(self, stage: int, engine: Engine) -> float | None:
        """When the head of an engine may start, as far as its own stage goes; None while a wait is not met."""
        instruction, step = self.head(stage, engine)
        spans = self.spans[stage]
        start = spans[engine][-1].end if spans[engine] else 0.0
        for wait in instruction.waits:
            at = step - 1 if wait.previous_step else step
            if at < 0:
                continue
            index = at * len(self.program.stages[stage].streams[wait.engine]) + wait.count - 1
            if index >= len(spans[wait.engine]):
                return None
            start = max(start, spans[wait.engine][index].end)
        return start

    def advance(self, stage: int, engine: Engine) -> bool:
        """Time the head of an engine if all it waits for is timed."""
        if not self.has_work(stage, engine):
            return False
        start = self.earliest(stage, engine)
        if start is None:
            return False
        instruction, _ = self.head(stage, engine)
        if instruction.keyword == "send":
            return self.send(stage, instruction, start)
        if instruction.keyword == "recv":
            return self.recv(stage, instruction, start)
        if instruction.group in ("ends", "all"):
            return self.collective(instruction)
        self.record(stage, engine, instruction, start, start + self.duration_of(stage, instruction))
        return True

    def record(self, stage: int, engine: Engine, instruction: Instruction, start: float, end: float) -> None:
        self.spans[stage][engine].append(Span(instruction, start, end))

    def send(self, stage: int, instruction: Instruction, start: float) -> bool:
        assert instruction.peer is not None
        peer = instruction.peer
        if self.rendezvous:
            if not self.has_work(peer, Engine.RECV):
                return False
            partner, _ = self.head(peer, Engine.RECV)
            other = self.earliest(peer, Engine.RECV)
            if other is None or partner.peer != stage or partner.variant != instruction.variant:
                return False
            begin = max(start, other)
            end = begin + self.duration_of(stage, instruction)
            self.record(stage, Engine.SEND, instruction, begin, end)
            self.record(peer, Engine.RECV, partner, begin, end)
            return True
        end = start + self.duration_of(stage, instruction)
        self.record(stage, Engine.SEND, instruction, start, end)
        self.sent.setdefault((stage, peer, instruction.variant), []).append(end)
        return True

    def recv(self, stage: int, instruction: Instruction, start: float) -> bool:
        assert instruction.peer is not None
        if self.rendezvous:
            return False  # its send takes it along
        channel = (instruction.peer, stage, instruction.variant)
        index = self.received.get(channel, 0)
        arrivals = self.sent.get(channel, [])
        if index >= len(arrivals):
            return False
        self.received[channel] = index + 1
        self.record(stage, Engine.RECV, instruction, start, max(start, arrivals[index]))
        return True

    def collective(self, instruction: Instruction) -> bool:
        count = len(self.program.stages)
        members = sorted({0, count - 1}) if instruction.group == "ends" else list(range(count))
        begin = 0.0
        for member in members:
            if not self.has_work(member, Engine.COLLECTIVE):
                return False
            partner, _ = self.head(member, Engine.COLLECTIVE)
            start = self.earliest(member, Engine.COLLECTIVE)
            if start is None or partner.title_without_blocks != instruction.title_without_blocks:
                return False
            begin = max(begin, start)
        duration = max(self.duration_of(m, self.head(m, Engine.COLLECTIVE)[0]) for m in members)
        for member in members:
            self.record(member, Engine.COLLECTIVE, self.head(member, Engine.COLLECTIVE)[0], begin, begin + duration)
        return True

    def hang(self, heads: list[tuple[int, Engine]]) -> None:
        waiting = [f"stage @{s} {e.value} engine at '{self.head(s, e)[0].title}'" for s, e in heads[:20]]
        mode = "rendezvous" if self.rendezvous else "buffered"
        fail("RT042", f"the program cannot end with {mode} sends; these wait for ever: {'; '.join(waiting)}")
