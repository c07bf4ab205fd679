"""Profiles of runs, reduced to the seconds of each distinct op without its waiting for other ranks.

Several profiles of one machine are joined, as each may lack ops: stages have no collectives of replicas, for example.

    rank 0   |--compute--|  .. all_reduce ..............|      begins early and waits
    rank 1   |--------compute--------|  .. all_reduce ..|      the op's seconds count from here, when all have arrived
"""

from __future__ import annotations

import json
from base64 import b64decode
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf, isfinite
from statistics import fmean, median
from typing import Any

from attrs import define, evolve, frozen

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Location, fail
from ratrain.ratrain_ir.support.files import read_text
from ratrain.ratrainc.report.trace import MICROSECONDS
from ratrain.ratrainc.running.run_profile import FORMAT
from ratrain.targets.program.json_values import text, whole
from ratrain.targets.program.program import Program
from ratrain.targets.program.routine import Routine, routine_from_json
from ratrain.targets.program.rtx import parse_program
from ratrain.targets.runtime.engine.profile import CONCURRENCIES, Concurrency

_WARM_UP = 2
"""Steps left out at the beginning if there are more: in them kernels are compiled and memory is first touched."""
_SHORTEST = 1e-9
"""Least seconds of an op, for those shorter than the clock's resolution."""
LONGEST = 1e9
"""Most seconds of an op or step (thirty years); a larger number is an error in the file."""
_MESSAGE = ("send", "recv")
MALFORMED = (ValueError, KeyError, TypeError, IndexError, ArithmeticError, AttributeError, RecursionError)
"""Exceptions that reading malformed data may raise."""


@frozen
class ProfiledOp:
    """A distinct op of a profile: its key, its size in bytes, and the number of its routine."""

    key: str
    size: float
    routine: int | None


@frozen
class ProfiledOps:
    """Seconds of each distinct op, of a step, and between two ops."""

    ops: dict[ProfiledOp, float]
    step_seconds: float
    gap_seconds: float
    steps: int
    routines: tuple[Routine, ...]
    concurrency: Concurrency
    ranks_per_core: float
    program: Program | None = None
    """the program that ran, if ranks shared cores"""

    @property
    def shares_cores(self) -> bool:
        """True if ranks that are processes shared a core."""
        return self.ranks_per_core > 1


def read_profile(path: str) -> ProfiledOps:
    """Read the ops of a profile.

    Raises `DiagnosticError` RT002 if the file is not a profile, or several threads shared its kernels.
    """
    try:
        data = json.loads(read_text(path, "profile"))
        facts = data["otherData"]
        if facts["format"] != FORMAT:
            fail("RT002", f"this is not a profile of a run: its format is {facts['format']!r:.60}", Location(path, 1))
        concurrency = CONCURRENCIES[CONCURRENCIES.index(facts["concurrency"])]
        if whole(facts["kernel_threads"]) > 1:
            fail(
                "RT002",
                "several threads shared each kernel of this run: no thread has the time of an op",
                Location(path, 1),
                help="profile a run with --threads 1, or with no more threads than ranks",
            )
        routines = tuple(routine_from_json(routine) for routine in facts["routines"])
        spans = [_Span.of(event, len(routines), concurrency) for event in data["traceEvents"] if event["ph"] == "X"]
        steps = {whole(step): _seconds(duration) for step, _, duration in facts["steps"]}
        recording = _seconds(facts["recording"])
        ranks_per_core = float(facts.get("ranks_per_core") or 0.0)
        if not 0 <= ranks_per_core < inf:
            raise ValueError(f"{ranks_per_core} ranks a core")
        container = facts.get("rtx")
        program = None if container is None else _program_in(b64decode(container, validate=True), path)
    except json.JSONDecodeError as error:
        fail("RT002", f"the profile is not JSON: {error.msg}", Location(path, error.lineno, error.colno))
    except MALFORMED as error:
        fail("RT002", f"this is not a profile of a run: {type(error).__name__} {error}"[:200], Location(path, 1))
    if not spans or not {span.step for span in spans} <= steps.keys():
        fail("RT002", "the profile has no ops, or ops of steps that it does not have", Location(path, 1))
    if concurrency == "processes":
        _take_off_waiting(spans, path)
    found = _measured(spans, steps, recording, routines, concurrency)
    return evolve(found, ranks_per_core=ranks_per_core, program=program)


def _program_in(container: bytes, path: str) -> Program:
    try:
        return parse_program(container, path)
    except DiagnosticError as error:
        text = f"the program in this profile cannot be read: {error.diagnostics[0].message}"
        fail("RT002", text, Location(path, 1))


def _seconds(microseconds: Any) -> float:
    seconds = float(microseconds) / MICROSECONDS
    if not 0 <= seconds < LONGEST:
        raise ValueError(f"{microseconds} us is not a time")
    return seconds


@define
class _Span:
    """One execution of an op on one rank; times in seconds."""

    op: ProfiledOp
    step: int
    process: int
    """process of the trace, that is, the rank"""
    start: float
    end: float
    members: int
    meeting: str | None
    seconds: float
    """seconds without waiting"""

    @classmethod
    def of(cls, event: dict[str, Any], routines: int, concurrency: Concurrency) -> _Span:
        args = event["args"]
        start, duration = float(event["ts"]) / MICROSECONDS, float(event["dur"]) / MICROSECONDS
        number = None if args["routine"] is None else whole(args["routine"])
        if number is not None and number >= routines:
            raise ValueError(f"routine {number} of {routines}")
        members = whole(args["members"])
        if not (0 < duration < LONGEST and isfinite(start + duration)) or not members:
            raise ValueError("an op without a time or without members")
        meeting = None if args["meeting"] is None else text(args["meeting"])
        alone = duration if concurrency == "ordered" else _seconds(args["cpu"])  # engines side by side take turns
        share = duration if concurrency == "processes" and meeting else max(alone, _SHORTEST) / members
        op = ProfiledOp(text(args["op"]), float(whole(args["bytes"])), number)
        return cls(op, whole(args["step"]), whole(event["pid"]), start, start + duration, members, meeting, share)


@frozen
class _Computing:
    """Intervals in which the thread of each process ran ops that involve no other rank."""

    starts: dict[int, list[float]]
    ends: dict[int, list[float]]
    before: dict[int, list[float]]
    """seconds of all ops before each one"""

    @classmethod
    def of(cls, spans: Sequence[_Span]) -> _Computing:
        by_process: dict[int, list[_Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda each: each.start):
            by_process[span.process] += [span] if span.meeting is None else []
        starts = {process: [span.start for span in each] for process, each in by_process.items()}
        ends = {process: [span.end for span in each] for process, each in by_process.items()}
        seconds = {process: [span.end - span.start for span in each] for process, each in by_process.items()}
        return cls(starts, ends, {process: [0.0, *accumulate(each)] for process, each in seconds.items()})

    def seconds(self, process: int, start: float, end: float) -> float:
        """Return the seconds between two moments in which the process computed."""
        return max(0.0, self._until(process, end) - self._until(process, start))

    def _until(self, process: int, moment: float) -> float:
        if process not in self.starts:
            return 0.0
        count = bisect_right(self.starts[process], moment)
        over = max(0.0, self.ends[process][count - 1] - moment) if count else 0.0
        return self.before[process][count] - over


def _take_off_waiting(spans: list[_Span], path: str) -> None:
    """Shorten ops that involve other ranks: count from the last arrival, without the rank's own compute.

    A rank has one thread; while it computes, it does not see that others have done their part. Raises `DiagnosticError`
    RT002 if a partner of such an op is missing.
    """
    computing = _Computing.of(spans)
    counts: dict[tuple[str, int, str], int] = defaultdict(int)
    meetings: dict[tuple[str, int], list[_Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda each: each.start):
        if span.meeting is not None:
            # A meeting happens again in each step: the n-th op of each rank belongs to the n-th meeting.
            who = span.meeting, span.process, span.op.key
            meetings[span.meeting, counts[who]].append(span)
            counts[who] += 1
    for (meeting, _), met in meetings.items():
        if len(met) < max(2 if each.op.key in _MESSAGE else each.members for each in met):
            fail("RT002", f"not all who meet in '{meeting}' are in this profile", Location(path, 1))
        all_there = max(span.start for span in met)
        # A send counts until its receive has ended.
        arrived = [span for span in met if span.op.key == "recv"]
        for span in met:
            last = max(arrived, key=lambda each: each.end, default=span)
            span.seconds = max(last.end - all_there - computing.seconds(last.process, all_there, last.end), _SHORTEST)


def _measured(
    spans: list[_Span],
    steps: dict[int, float],
    recording: float,
    routines: tuple[Routine, ...],
    concurrency: Concurrency,
) -> ProfiledOps:
    """Take medians over the steps after the warm-up; other work on the machine lengthens some ops, not most medians."""
    counted = sorted(steps)[_WARM_UP:] or sorted(steps)
    by_step: dict[int, list[_Span]] = {step: [] for step in counted}
    seconds: dict[ProfiledOp, list[float]] = defaultdict(list)
    for span in spans:
        if span.step in by_step:
            by_step[span.step].append(span)
            seconds[span.op].append(span.seconds)
    usual = median(steps[step] for step in counted)
    gap = 0.0
    if concurrency == "ordered":
        # In one thread, the part of a step that no op covers is gaps. Between processes only a thread's own pairs of
        # ops tell. Both include the time to record an op, which is subtracted.
        gaps = [(steps[step] - _covered_seconds(inside)) / len(inside) for step, inside in by_step.items() if inside]
        gap = max(0.0, median(gaps) - recording)
    elif concurrency == "processes":
        gap = max(0.0, median(_between_ops(by_step.values()) or [0.0]) - recording)
    measured = {op: median(each) for op, each in seconds.items()}
    return ProfiledOps(measured, usual, gap, len(counted), routines, concurrency, 0.0)


def _between_ops(steps: Iterable[list[_Span]]) -> list[float]:
    """Return the seconds between ops that a rank's thread ran one after another.

    In most of these gaps it waited for nothing, so their median is the overhead between ops.
    """
    found = []
    for spans in steps:
        ends: dict[int, float] = {}
        for span in sorted((span for span in spans if span.meeting is None), key=lambda each: each.start):
            if span.process in ends:
                found.append(span.start - ends[span.process])
            ends[span.process] = span.end
    return found


def _covered_seconds(spans: list[_Span]) -> float:
    """Return the seconds in which at least one op ran."""
    covered, end = 0.0, -inf
    for span in sorted(spans, key=lambda each: each.start):
        covered += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return covered


def joined(profiles: Sequence[ProfiledOps]) -> ProfiledOps:
    """Join profiles of one machine; an op in several profiles, and the gap, take the mean of their medians."""
    if len(profiles) == 1:
        return profiles[0]
    routines: list[Routine] = []
    seconds: dict[tuple[str, float], list[float]] = defaultdict(list)
    first: dict[tuple[str, float], ProfiledOp] = {}
    for profile in profiles:
        for op, each in profile.ops.items():
            seconds[op.key, op.size].append(each)
            if (op.key, op.size) not in first:
                number = None if op.routine is None else op.routine + len(routines)
                first[op.key, op.size] = evolve(op, routine=number)
        routines += profile.routines
    return ProfiledOps(
        {op: fmean(seconds[key]) for key, op in first.items()},
        fmean(profile.step_seconds for profile in profiles),
        fmean(profile.gap_seconds for profile in profiles),
        sum(profile.steps for profile in profiles),
        tuple(routines),
        profiles[0].concurrency,
        max(profile.ranks_per_core for profile in profiles),
    )
