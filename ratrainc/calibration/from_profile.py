"""A machine file of the machine that a run was profiled on: seconds of every op it ran, and fitted rates for others."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from math import inf, isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, frozen

from ratrain.ratrain_ir.diagnostics import Location, fail
from ratrain.ratrain_ir.files import read_text
from ratrain.ratrain_ir.ops import Engine
from ratrain.ratrainc.calibration.calibrated import Calibrated
from ratrain.ratrainc.calibration.fitting import Errors, Seconds, check_solver, errors, fitted_rates
from ratrain.ratrainc.console import seconds_text
from ratrain.ratrainc.run_profile import FORMAT
from ratrain.ratrainc.trace import MICROSECONDS
from ratrain.targets.machine.cost import routine_work
from ratrain.targets.machine.machine import Constant, Machine
from ratrain.targets.machine.op_table import MeasuredOp, OpTable, line_through
from ratrain.targets.program.json_values import text, whole
from ratrain.targets.program.routine import Routine, routine_from_json
from ratrain.targets.runtime.profile import CONCURRENCIES, Concurrency

if TYPE_CHECKING:
    from ratrain.ratrainc.parts import Part

_WARM_UP = 2
"""Steps that are left out where more follow: kernels are compiled and memory is touched for the first time."""
_SHORTEST = 1e-9
"""Seconds of an op that is shorter than its clock can tell."""
_LONGEST = 1e9
"""Seconds: no step of a run takes thirty years, and a machine file has no such ops."""
_MESSAGE = ("send", "recv")
_MALFORMED = (ValueError, KeyError, TypeError, IndexError, ArithmeticError, AttributeError, RecursionError)
"""What reading data that is not what it should be ends in."""
_AGAIN = "profile the run again: 'ratrainc run FILE.rtx --profile FILE.json'"
_FITTED = ("gemm_efficiency", "attention_efficiency", "head_efficiency", "ddr_bandwidth", "launch")


@frozen
class ProfiledOp:
    """An op as a profile has it: its key, its size in bytes, and its routine by its number."""

    key: str
    size: float
    routine: int | None


@frozen
class ProfiledOps:
    """The seconds of each distinct op, of one step, and between two ops."""

    ops: dict[ProfiledOp, float]
    step_seconds: float
    gap_seconds: float
    steps: int
    routines: tuple[Routine, ...]


@frozen(repr=False)
class ProfiledMachine(Calibrated):
    """A machine with a table, and how well the rates fit the routines of the table."""

    machine: Machine
    step_seconds: float
    """median of the profiled steps"""
    steps: int
    rates: Errors | None

    def parts(self) -> Iterator[Part]:
        """Sentences."""
        ops = len(self.machine.table.ops)
        yield f"{ops} distinct ops of {self.steps} steps, {seconds_text(self.step_seconds)} a step"
        if self.rates is not None:
            off = f"off by {100 * self.rates.mean:.0f} % on average on those that did"
            yield f"fitted rates, for ops that did not run: {off}"

    def to_json(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        return {
            "machine": self.machine.name,
            "ops": len(self.machine.table.ops),
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "constants": {name: each.value for name, each in self.machine.constants.items()},
            "rates_error": self.rates.to_json() if self.rates else None,
        }


def machine_from_profile(path: str, name: str, peak_flops: float) -> ProfiledMachine:
    """The machine that a profile was taken on; `peak_flops` is what its products reach (operations a second).

    Raises `DiagnosticError` RT002 as `check_solver` does, and where the file is not a profile of a run in order.
    """
    check_solver()
    profile = read_profile(path)
    start = _machine(name, peak_flops, profile, path)
    _check_routines(profile.routines, start, path)
    routines = [(profile.routines[op.routine], s) for op, s in profile.ops.items() if op.routine is not None]
    measured = np.array([seconds for _, seconds in routines])
    predict = partial(_routine_seconds, [routine for routine, _ in routines])
    source = f"fitted to {len(routines)} routines in {path}"
    unseen = "no routine of the profile depends on it"
    machine = fitted_rates(start, _FITTED, predict, measured, source=source, unseen=unseen, place=Location(path, 1))
    rates = errors(predict(machine), measured)
    machine = Machine(name, Engine.COMPUTE, machine.constants, "table", _table(profile, machine))
    return ProfiledMachine(machine, profile.step_seconds, profile.steps, rates)


def _check_routines(routines: tuple[Routine, ...], machine: Machine, path: str) -> None:
    """Refuse, with RT002, a profile with a routine that has no cost: it names what it does not have, or does nothing."""
    for number, routine in enumerate(routines):
        try:
            seconds = routine_work(routine, machine).seconds
            problem = None if 0 < seconds < inf else f"it takes {seconds} s"
        except _MALFORMED as error:
            problem = f"{type(error).__name__} {error}"
        if problem is not None:
            fail(
                "RT002",
                f"routine {number} of this profile cannot be timed: {problem}"[:200],
                Location(path, 1),
                help=_AGAIN,
            )


def _table(profile: ProfiledOps, machine: Machine) -> OpTable:
    """What ran; the size of a routine is what the machine's rates say of it."""
    ops = []
    for op, seconds in profile.ops.items():
        size = op.size if op.routine is None else routine_work(profile.routines[op.routine], machine).seconds
        ops.append(MeasuredOp(op.key, size, seconds))
    return OpTable(tuple(ops))


def _routine_seconds(routines: list[Routine], machine: Machine) -> Seconds:
    return np.array([routine_work(routine, machine).seconds for routine in routines])


def read_profile(path: str) -> ProfiledOps:
    """The ops of a profile. Raises `DiagnosticError` RT002 where the file is none, or of kernels that several threads shared."""
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
    except json.JSONDecodeError as error:
        fail("RT002", f"the profile is not JSON: {error.msg}", Location(path, error.lineno, error.colno))
    except _MALFORMED as error:
        fail("RT002", f"this is not a profile of a run: {type(error).__name__} {error}"[:200], Location(path, 1))
    if not spans or not {span.step for span in spans} <= steps.keys():
        fail("RT002", "the profile has no ops, or ops of steps that it does not have", Location(path, 1))
    if concurrency == "processes":
        _take_off_waiting(spans, path)
    return _measured(spans, steps, recording, routines, ordered=concurrency == "ordered")


def _seconds(microseconds: Any) -> float:
    seconds = float(microseconds) / MICROSECONDS
    if not 0 <= seconds < _LONGEST:
        raise ValueError(f"{microseconds} us is not a time")
    return seconds


@define
class _Span:
    """An op of one rank; seconds."""

    op: ProfiledOp
    step: int
    process: int
    """of the trace: a rank"""
    start: float
    end: float
    members: int
    meeting: str | None
    seconds: float
    """what it takes by itself"""

    @classmethod
    def of(cls, event: dict[str, Any], routines: int, concurrency: Concurrency) -> _Span:
        args = event["args"]
        start, duration = float(event["ts"]) / MICROSECONDS, float(event["dur"]) / MICROSECONDS
        number = None if args["routine"] is None else whole(args["routine"])
        if number is not None and number >= routines:
            raise ValueError(f"routine {number} of {routines}")
        members = whole(args["members"])
        if not (0 < duration < _LONGEST and isfinite(start + duration)) or not members:
            raise ValueError("an op without a time or without members")
        meeting = None if args["meeting"] is None else text(args["meeting"])
        alone = duration if concurrency == "ordered" else _seconds(args["cpu"])  # engines side by side take turns
        share = duration if concurrency == "processes" and meeting else max(alone, _SHORTEST) / members
        op = ProfiledOp(text(args["op"]), float(whole(args["bytes"])), number)
        return cls(op, whole(args["step"]), whole(event["pid"]), start, start + duration, members, meeting, share)


def _take_off_waiting(spans: list[_Span], path: str) -> None:
    """Of what meets others: the seconds from when the last of them is there.

    Raises `DiagnosticError` RT002 where some met nobody.
    """
    counts: dict[tuple[str, int, str], int] = defaultdict(int)
    meetings: dict[tuple[str, int], list[_Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda each: each.start):
        if span.meeting is not None:
            who = span.meeting, span.process, span.op.key
            meetings[span.meeting, counts[who]].append(span)
            counts[who] += 1
    for (meeting, _), met in meetings.items():
        if len(met) < max(2 if each.op.key in _MESSAGE else each.members for each in met):
            fail("RT002", f"not all who meet in '{meeting}' are in this profile", Location(path, 1))
        all_there = max(span.start for span in met)
        arrived = [span.end for span in met if span.op.key == "recv"]
        for span in met:
            span.seconds = max(max(arrived, default=span.end) - all_there, _SHORTEST)


def _measured(
    spans: list[_Span], steps: dict[int, float], recording: float, routines: tuple[Routine, ...], *, ordered: bool
) -> ProfiledOps:
    """Medians over all steps but the first: what others do on the machine lengthens some ops, and leaves the median of most."""
    counted = sorted(steps)[_WARM_UP:] or sorted(steps)
    by_step: dict[int, list[_Span]] = {step: [] for step in counted}
    seconds: dict[ProfiledOp, list[float]] = defaultdict(list)
    for span in spans:
        if span.step in by_step:
            by_step[span.step].append(span)
            seconds[span.op].append(span.seconds)
    usual = median(steps[step] for step in counted)
    gap = 0.0
    if ordered:
        gaps = [(steps[step] - _covered_seconds(inside)) / len(inside) for step, inside in by_step.items() if inside]
        gap = max(0.0, median(gaps) - recording)
    return ProfiledOps({op: median(each) for op, each in seconds.items()}, usual, gap, len(counted), routines)


def _covered_seconds(spans: list[_Span]) -> float:
    """Seconds in which any op ran."""
    covered, end = 0.0, -inf
    for span in sorted(spans, key=lambda each: each.start):
        covered += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return covered


def _link(profile: ProfiledOps, path: str) -> dict[str, Constant]:
    """Latency and bandwidth of messages, as a line through the sizes that were sent; a message inside a process is a copy."""
    messages = {op.size: seconds for op, seconds in profile.ops.items() if op.key == "send" and op.size > 0}
    if not messages:
        return {
            "link_bandwidth": Constant(1e10, "bytes/s", "assumed", "a copy in memory: no message was sent"),
            "link_latency": Constant(0.0, "s", "assumed", "a copy in memory: no message was sent"),
        }
    latency, slope = line_through(messages)
    largest = max(messages)
    bandwidth = 1 / slope if slope else largest / messages[largest]
    source = f"line through {len(messages)} sizes of messages in {path}"
    return {
        "link_bandwidth": Constant(bandwidth, "bytes/s", "fitted", source),
        "link_latency": Constant(latency, "s", "fitted", source),
    }


def _machine(name: str, peak: float, profile: ProfiledOps, path: str) -> Machine:
    """Where the fit starts."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assumed = "where the fit of rates starts"
    constants = {
        "ddr_capacity": Constant(memory, "bytes", "measured", "memory of this machine"),
        "ddr_bandwidth": Constant(1e10, "bytes/s", "assumed", assumed),
        "fp16_peak": Constant(
            peak, "flop/s", "measured", "f32 matrix products on one core, in which float16 is computed"
        ),
        "gemm_efficiency": Constant(0.7, "fraction of fp16_peak", "assumed", assumed),
        "attention_efficiency": Constant(0.3, "fraction of fp16_peak", "assumed", assumed),
        "head_efficiency": Constant(0.5, "fraction of fp16_peak", "assumed", assumed),
        **_link(profile, path),
        "launch": Constant(5e-6, "s", "assumed", assumed),
        "collective_chunk": Constant(float(1 << 20), "bytes", "assumed", "as in other machine files"),
        "engine_gap": Constant(profile.gap_seconds, "s", "measured", f"between two ops of {path}"),
    }
    return Machine(name, Engine.COMPUTE, constants)
