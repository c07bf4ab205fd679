"""A machine file of the machine that a run was profiled on: seconds of every op it ran, and fitted rates for others."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from functools import partial
from math import inf, isfinite
from statistics import mean, median
from typing import Any

import numpy as np
from attrs import frozen

from ratrain_ir.diagnostics import Location, fail
from ratrain_ir.files import read_text
from ratrain_ir.ops import Engine
from ratrainc.calibration.fitting import Errors, Seconds, errors, fitted
from ratrainc.run_profile import FORMAT
from ratrainc.trace import MICROSECONDS
from targets.json_values import text, whole
from targets.mt3000.cost import routine_work
from targets.mt3000.machine import Constant, Machine
from targets.mt3000.op_table import MeasuredOp, OpTable
from targets.routine import Routine, routine_from_json

_WARM_UP = 2
"""Steps that are left out where more follow: kernels are compiled and memory is touched for the first time."""
_FITTED = ("gemm_efficiency", "attention_efficiency", "head_efficiency", "ddr_bandwidth", "launch")


@frozen
class _Op:
    key: str
    size: float
    routine: int | None


@frozen
class _Measured:
    """The seconds of each distinct op, of one step, and between two ops."""

    ops: dict[_Op, float]
    step_seconds: float
    gap_seconds: float
    steps: int
    routines: tuple[Routine, ...]


@frozen
class ProfiledMachine:
    """A machine with a table, and how well the rates fit the routines of the table."""

    machine: Machine
    step_seconds: float
    """median of the profiled steps"""
    steps: int
    rates: Errors | None

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

    Raises `DiagnosticError` RT002 where the file is not a profile of a run in order.
    """
    found = _read(path)
    table = OpTable(tuple(MeasuredOp(op.key, op.size, seconds) for op, seconds in found.ops.items()))
    start = _machine(name, peak_flops, found.gap_seconds, path)
    routines = [(found.routines[op.routine], s) for op, s in found.ops.items() if op.routine is not None]
    measured = np.array([seconds for _, seconds in routines])
    predict = partial(_routine_seconds, [routine for routine, _ in routines])
    source = f"fitted to {len(routines)} routines in {path}"
    machine = fitted(start, _FITTED, predict, measured, source=source, place=Location(path, 1))
    rates = errors(predict(machine), measured)
    machine = Machine(name, Engine.COMPUTE, machine.constants, "table", table)
    return ProfiledMachine(machine, found.step_seconds, found.steps, rates)


def _routine_seconds(routines: list[Routine], machine: Machine) -> Seconds:
    return np.array([routine_work(routine, machine).seconds for routine in routines])


def _read(path: str) -> _Measured:
    try:
        data = json.loads(read_text(path, "profile"))
        facts = data["otherData"]
        if facts["format"] != FORMAT:
            fail("RT002", f"this is not a profile of a run: its format is {facts['format']!r:.60}", Location(path, 1))
        if not facts["ordered"]:
            fail(
                "RT002",
                "engines of this run shared the cores: its op times are not what an op takes alone",
                Location(path, 1),
                help="profile a run with --threads 1",
            )
        routines = tuple(routine_from_json(routine) for routine in facts["routines"])
        spans = [_Span.of(event, len(routines)) for event in data["traceEvents"] if event["ph"] == "X"]
    except json.JSONDecodeError as error:
        fail("RT002", f"the profile is not JSON: {error.msg}", Location(path, error.lineno, error.colno))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError, RecursionError) as error:
        fail("RT002", f"this is not a profile of a run: {type(error).__name__} {error}"[:200], Location(path, 1))
    if not spans:
        fail("RT002", "the profile has no ops", Location(path, 1))
    return _measured(spans, routines)


@frozen
class _Span:
    """An op of one rank; seconds, a member's share of a collective."""

    op: _Op
    step: int
    start: float
    end: float
    share: float

    @classmethod
    def of(cls, event: dict[str, Any], routines: int) -> _Span:
        args = event["args"]
        start, duration = float(event["ts"]) / MICROSECONDS, float(event["dur"]) / MICROSECONDS
        number = None if args["routine"] is None else whole(args["routine"])
        if number is not None and number >= routines:
            raise ValueError(f"routine {number} of {routines}")
        members = whole(args["members"])
        if not (duration > 0 and isfinite(start + duration)) or not members:
            raise ValueError("an op of no time or without members")
        op = _Op(text(args["op"]), float(whole(args["bytes"])), number)
        return cls(op, whole(args["step"]), start, start + duration, duration / members)


def _measured(spans: list[_Span], routines: tuple[Routine, ...]) -> _Measured:
    """Mean seconds of ops over the half of the steps that took most nearly the median: what disturbs others is left out."""
    first: dict[int, float] = defaultdict(lambda: inf)
    last: dict[int, float] = defaultdict(float)
    for span in spans:
        first[span.step], last[span.step] = min(first[span.step], span.start), max(last[span.step], span.end)
    steps = sorted(first)
    walls = {step: last[step] - first[step] for step in steps[_WARM_UP:] or steps}
    usual = median(walls.values())
    typical = {*sorted(walls, key=lambda step: abs(walls[step] - usual))[: -(-len(walls) // 2)]}
    seconds: dict[_Op, list[float]] = defaultdict(list)
    for span in spans:
        if span.step in typical:
            seconds[span.op].append(span.share)
    count = sum(len(each) for each in seconds.values())
    gap = max(0.0, sum(walls[step] for step in typical) - sum(map(sum, seconds.values()))) / count
    return _Measured({op: mean(each) for op, each in seconds.items()}, usual, gap, len(typical), routines)


def _machine(name: str, peak: float, gap: float, path: str) -> Machine:
    """Where the fit starts; a message inside a process is a copy."""
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
        "link_bandwidth": Constant(1e10, "bytes/s", "assumed", "a copy in memory; the table has the messages that ran"),
        "link_latency": Constant(0.0, "s", "assumed", "a copy in memory"),
        "launch": Constant(5e-6, "s", "assumed", assumed),
        "collective_chunk": Constant(float(1 << 20), "bytes", "assumed", "as in other machine files"),
        "engine_gap": Constant(gap, "s", "measured", f"between two ops of {path}"),
    }
    return Machine(name, Engine.COMPUTE, constants)
