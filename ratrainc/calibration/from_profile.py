"""A machine file from profiles of runs: the seconds of every op that ran, and fitted rates for others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import Location, fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.calibration.calibrated import Calibrated
from ratrain.ratrainc.calibration.fitting import check_solver, fitted_rates
from ratrain.ratrainc.calibration.profiled_ops import LONGEST, MALFORMED, ProfiledOps, joined, read_profile
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.validation.errors import Errors, Seconds, errors
from ratrain.targets.machine.constants import Constant, largest_value, unit_of
from ratrain.targets.machine.cost import routine_work
from ratrain.targets.machine.machine import Machine
from ratrain.targets.machine.op_table import MeasuredOp, OpTable, line_through
from ratrain.targets.simulator.figures import shared_cores_step_seconds

if TYPE_CHECKING:
    from ratrain.ratrainc.console.parts import Part
    from ratrain.targets.program.routine import Routine

_AGAIN = "profile the run again: 'ratrainc run FILE.rtx --profile FILE.json'"
_SHARE_KNOWN = 1e-4
"""Precision of the fraction by which ops take longer if ranks share cores."""
_FITTED = ("gemm_efficiency", "attention_efficiency", "head_efficiency", "ddr_bandwidth", "launch")


@frozen(repr=False)
class ProfiledMachine(Calibrated):
    """A machine with a table of ops, and the errors of its rates on the table's routines."""

    machine: Machine
    step_seconds: float
    """median over the profiled steps; the mean of these medians for several profiles"""
    steps: int
    rates: Errors | None

    def parts(self) -> Iterator[Part]:
        """Yield sentences on the ops, the step, the cost of shared cores, and the fitted rates."""
        ops = len(self.machine.table.ops)
        yield f"{ops} distinct ops of {number_of(self.steps, 'step')}, {seconds_text(self.step_seconds)} a step"
        if "core_sharing" in self.machine.constants:
            more = 100 * self.machine["core_sharing"]
            yield f"where ranks share cores, a step is as if ops took {more:.1f} % longer"
        if self.rates is not None:
            off = f"off by {100 * self.rates.mean:.0f} % on average on those that did"
            yield f"fitted rates, for ops that did not run: {off}"

    def to_json(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return {
            "machine": self.machine.name,
            "ops": len(self.machine.table.ops),
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "constants": {name: each.value for name, each in self.machine.constants.items()},
            "rates_error": self.rates.to_json() if self.rates else None,
        }


def machine_from_profiles(paths: Sequence[str], name: str, peak_flops: float) -> ProfiledMachine:
    """Describe the machine that profiles were taken on; `peak_flops` is the rate of its products (operations a second).

    If only some runs had ranks that shared cores, ops come from the others, and these runs only determine
    `core_sharing`. Raises `DiagnosticError` RT002 as `check_solver` does, if a file is not a profile, or if profiles
    are of several kinds.
    """
    check_solver()
    profiles = [read_profile(path) for path in paths]
    for path, each in zip(paths, profiles, strict=True):
        _check_routines(each.routines, _machine(name, peak_flops, each, path), path)
        if each.concurrency != profiles[0].concurrency:
            kinds = f"'{each.concurrency}', and {paths[0]} of '{profiles[0].concurrency}'"
            text = f"this is a profile of a run of {kinds}: their seconds are not the same"
            fail("RT002", text, Location(path, 1), help="profile all runs with the same --engine and --threads")
    alone = [each for each in profiles if not each.shares_cores] or profiles
    profile = joined(alone)
    path = ", ".join(
        one for one, each in zip(paths, profiles, strict=True) if len(alone) == len(profiles) or not each.shares_cores
    )
    start = _machine(name, peak_flops, profile, path)
    routines = [(profile.routines[op.routine], s) for op, s in profile.ops.items() if op.routine is not None]
    measured = np.array([seconds for _, seconds in routines])
    predict = partial(_routine_seconds, [routine for routine, _ in routines])
    source = f"fitted to {number_of(len(routines), 'routine')} in {path}"
    unseen = "no routine of the profile depends on it"
    machine = fitted_rates(start, _FITTED, predict, measured, source=source, unseen=unseen, place=Location(path, 1))
    rates = errors(predict(machine), measured)
    machine = Machine(name, Engine.COMPUTE, machine.constants, "table", _table(profile, machine))
    if len(alone) < len(profiles):
        machine = _with_core_sharing(
            machine, [(path, p) for path, p in zip(paths, profiles, strict=True) if p.shares_cores]
        )
    return ProfiledMachine(machine, profile.step_seconds, profile.steps, rates)


def _with_core_sharing(machine: Machine, shared: Sequence[tuple[str, ProfiledOps]]) -> Machine:
    """Set `core_sharing` of a machine to the mean over profiles of ranks that shared cores."""
    more = fmean(_core_sharing(profile, machine, path) for path, profile in shared)
    source = f"steps of ranks that shared cores, in {', '.join(path for path, _ in shared)}"
    sharing = Constant(more, unit_of("core_sharing"), "fitted", source)
    return evolve(machine, constants=machine.constants | {"core_sharing": sharing})


def _core_sharing(profile: ProfiledOps, machine: Machine, path: str) -> float:
    """Find the fraction by which ops take longer, so that the simulated step equals the profiled one.

    It is the root that Brent's method finds. Sharing costs cache space, the time that waiting ranks take of a core, and
    cores that are idle although a rank could go on. A step shows all of it, an op only the first; so the step decides.
    Raises `DiagnosticError` RT002 if the profile does not determine it.
    """
    from scipy.optimize import brentq

    place, program = Location(path, 1), profile.program
    if program is None:
        text = "ranks shared cores in this run, and its profile does not have the program: an earlier version wrote it"
        fail("RT002", text, place, help=_AGAIN)
    if not {op.key for op in profile.ops if op.routine is not None} & {op.key for op in machine.table.ops}:
        text = "ranks shared cores in some of the runs, which ran other routines than those whose ranks had their own"
        fail("RT002", text, place, help="profile plans with the same micro-batches")
    cores, measured = max(1, round(program.topology.size / profile.ranks_per_core)), profile.step_seconds

    def too_long(sharing: float) -> float:
        constant = Constant(sharing, unit_of("core_sharing"), "", "")
        shared = evolve(machine, constants=machine.constants | {"core_sharing": constant})
        return shared_cores_step_seconds(program, shared, cores) - measured

    unshared, most = too_long(0.0), largest_value("core_sharing")
    # The simulated step grows with the fraction, so the signs at both ends tell whether there is a root.
    if unshared >= 0:
        return 0.0
    if too_long(most) < 0:
        longer = measured / (measured + unshared)
        text = f"steps of ranks that shared cores took {longer:.1f} times as long: more than these ranks was running"
        fail("RT002", text, place, help="profile again with nothing else running")
    return float(brentq(too_long, 0.0, most, xtol=_SHARE_KNOWN))


def _check_routines(routines: tuple[Routine, ...], machine: Machine, path: str) -> None:
    """Refuse (RT002) a profile with a routine that cannot be priced: it names missing operands, or does nothing."""
    for number, routine in enumerate(routines):
        try:
            seconds = routine_work(routine, machine).seconds
            problem = None if 0 < seconds < LONGEST else f"it takes {seconds} s"
        except MALFORMED as error:
            problem = f"{type(error).__name__} {error}"
        if problem is not None:
            fail(
                "RT002",
                f"routine {number} of this profile cannot be timed: {problem}"[:200],
                Location(path, 1),
                help=_AGAIN,
            )


def _table(profile: ProfiledOps, machine: Machine) -> OpTable:
    """Make the table of ops that ran; the size of a routine is its predicted seconds by the machine's rates."""
    ops = []
    for op, seconds in profile.ops.items():
        size = op.size if op.routine is None else routine_work(profile.routines[op.routine], machine).seconds
        ops.append(MeasuredOp(op.key, size, seconds))
    return OpTable(tuple(ops))


def _routine_seconds(routines: list[Routine], machine: Machine) -> Seconds:
    return np.array([routine_work(routine, machine).seconds for routine in routines])


def _link(profile: ProfiledOps, path: str) -> dict[str, Constant]:
    """Fit latency and bandwidth of messages as a line through the sent sizes; inside a process a message is a copy."""
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
    """Make the machine from which the fit starts."""
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
