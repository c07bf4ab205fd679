"""Report on the time of a step: idle time of every engine by cause, waits between stages, and the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.report.summary_tables import collectives_parts
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.simulator.figures import Figures
from ratrain.targets.simulator.timeline import Timeline

if TYPE_CHECKING:
    from ratrain.targets.simulator.bubbles import PathOp

_SHOWN_CAUSES = 5
_SHOWN_RUNS = 40


@frozen(repr=False)
class TimeReport(Shown):
    """An account of the time of a simulated step, for the engines of one stage or of all."""

    timeline: Timeline = field(eq=False)
    figures: Figures
    stage: int | None
    cold: bool
    """True for the first step, from cold; False for a steady one"""

    def parts(self) -> Iterator[Part]:
        """Yield tables of idle time by cause and of the critical path, and the algorithms of collectives."""
        yield from time_parts(self.timeline, stage=self.stage, cold=self.cold)
        yield from collectives_parts(self.figures)

    def to_json(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        facts = time_facts(self.timeline, stage=self.stage, cold=self.cold)
        return facts | {"collectives": self.figures.collectives}


def time_facts(timeline: Timeline, *, stage: int | None = None, cold: bool) -> dict[str, Any]:
    """Return the report as plain data, for the engines of one stage or of all (None); seconds are simulated.

    `cold`: account for the first step of the timeline, else for a steady one. The critical path is always that of all
    stages.
    """
    bubbles = Bubbles(timeline, cold=cold)
    path = bubbles.critical_path()
    begin = _begin(path)
    return {
        "window": "first step, from cold" if cold else "steady step",
        "window_seconds": bubbles.window_seconds,
        "engines": [
            _engine_facts(bubbles, at, index)
            for at, held in enumerate(timeline.program.stages)
            for index, engine in enumerate(ENGINES)
            if held.streams[engine] and stage in (None, at)
        ],
        "critical_path": [
            {
                "op": op.instruction.title,
                "stage": op.stage,
                "engine": op.engine.value,
                "start_seconds": op.start - begin,
                "seconds": op.end - op.start,
                "alone_seconds": op.alone_seconds,
            }
            for op in path
        ],
    }


def _engine_facts(bubbles: Bubbles, stage: int, index: int) -> dict[str, Any]:
    engine = ENGINES[index]
    return {
        "stage": stage,
        "engine": engine.value,
        "busy_seconds": bubbles.busy_seconds(stage, engine),
        "idle_seconds": {cause.value: seconds for cause, seconds in bubbles.idle_seconds(stage, engine).items()},
        "waited_for_stage": {str(other): seconds for other, seconds in bubbles.waited_for(stage, engine).items()},
    }


def time_parts(timeline: Timeline, *, stage: int | None, cold: bool) -> Iterator[Part]:
    """Yield tables of the compute engines, of all engines of a stage if one is given, and of the critical path."""
    bubbles = Bubbles(timeline, cold=cold)
    kind = "first step, from cold" if cold else "steady step"
    yield f"{kind} (simulated): {seconds_text(bubbles.window_seconds)}"
    run = timeline.program.plan.half_run
    if run is not None:
        yield f"products with weights are summed in f16, {run} at a time, and priced so; all others in f32"
    if timeline.program.model.experts:
        yield "products of experts are priced as if routers sent all experts as many rows"
    stages = range(len(timeline.program.stages))
    yield from _idle_table(bubbles, [(s, Engine.COMPUTE) for s in stages], "compute engines: busy, and idle by cause")
    if stage is not None:
        held = timeline.columns.lengths[stage]
        chosen = [(stage, engine) for engine, length in zip(ENGINES, held, strict=True) if length]
        yield from _idle_table(bubbles, chosen, f"engines of stage @{stage}: busy, and idle by cause")
    yield from _path_tables(bubbles)


def _idle_table(bubbles: Bubbles, places: list[tuple[int, Engine]], title: str) -> Iterator[Part]:
    idle = [bubbles.idle_seconds(stage, engine) for stage, engine in places]
    every = causes_by_length(idle)
    causes = every[:_SHOWN_CAUSES]
    rows = []
    for (stage, engine), row in zip(places, idle, strict=True):
        cells = [seconds_text(row[cause]) if cause in row else "-" for cause in causes]
        if len(every) > len(causes):
            cells.append(seconds_text(sum(seconds for cause, seconds in row.items() if cause not in causes)))
        busy, longest = seconds_text(bubbles.busy_seconds(stage, engine)), longest_wait(bubbles, stage, engine)
        rows.append([f"@{stage} {engine.value}", busy, *cells, longest])
    names = [cause.value for cause in causes] + (["other"] if len(every) > len(causes) else [])
    yield TextTable(title, ("engine", "busy", *names, "longest for"), rows)
    if Cause.SETTLING in causes:
        yield "settling: the program has not settled: by so much the engine's last step is shorter than the step's time"


def causes_by_length(idle: Sequence[Mapping[Cause, float]]) -> list[Cause]:
    """Return the causes of idle time of several engines, those that cost most first."""
    totals = {cause: sum(row.get(cause, 0.0) for row in idle) for row in idle for cause in row}
    return sorted(totals, key=lambda cause: -totals[cause])


def longest_wait(bubbles: Bubbles, stage: int, engine: Engine) -> str:
    """Return the stage that an engine waited longest for, and for how long; a dash where it waited for none."""
    waits = sorted(bubbles.waited_for(stage, engine).items(), key=lambda item: -item[1])
    return f"@{waits[0][0]} {seconds_text(waits[0][1])}" if waits else "-"


def _path_tables(bubbles: Bubbles) -> Iterator[Part]:
    path = bubbles.critical_path()
    window = bubbles.window_seconds
    totals: dict[tuple[str, int, str], tuple[float, int]] = {}
    for op in path:
        key = op.instruction.keyword, op.stage, op.engine.value
        seconds, count = totals.get(key, (0.0, 0))
        totals[key] = seconds + op.end - op.start, count + 1
    rows = [
        [f"{keyword} @{stage} ({engine})", str(count), seconds_text(seconds), f"{100 * seconds / window:.2f} %"]
        for (keyword, stage, engine), (seconds, count) in sorted(totals.items(), key=lambda item: -item[1][0])
    ]
    yield TextTable(
        "critical path, by kind of op", ("op", "times", "seconds", "share of the step"), rows, most=_SHOWN_RUNS
    )
    begin = _begin(path)
    runs = [_run_row(list(ops), begin) for _, ops in groupby(path, key=lambda op: (op.stage, op.engine))]
    title = (
        f"critical path, op by op: {number_of(len(path), 'op')}, runs on one engine taken "
        f"together (all of them with --json)"
    )
    yield TextTable(title, ("from", "stage", "engine", "ops", "first op", "last op", "seconds"), runs, most=_SHOWN_RUNS)


def _begin(path: Sequence[PathOp]) -> float:
    """Return the second at which a critical path begins: seconds of reports count from there, whichever step it is."""
    return path[0].start if path else 0.0


def _run_row(ops: list[PathOp], begin: float) -> list[str]:
    first, last = ops[0], ops[-1]
    seconds = seconds_text(last.end - first.start)
    names = [first.instruction.title, last.instruction.title if len(ops) > 1 else "-"]
    return [seconds_text(first.start - begin), f"@{first.stage}", first.engine.value, str(len(ops)), *names, seconds]
