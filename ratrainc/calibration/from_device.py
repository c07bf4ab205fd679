"""A machine file of the device at hand: timed kernels, updates and copies, and rates for other shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.calibration.calibrated import Calibrated
from ratrain.ratrainc.calibration.device_constants import capacity_constants, copy_constants, link_part
from ratrain.ratrainc.calibration.device_ops import RunProgram, other_ops, run_programs
from ratrain.ratrainc.calibration.device_programs import USUAL_DTYPE, compiled, usual_programs
from ratrain.ratrainc.calibration.fitting import check_solver, fitted_rates
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, TextTable
from ratrain.ratrainc.facts.machine_facts import free_memory
from ratrain.ratrainc.validation.errors import Errors, Seconds, errors
from ratrain.targets.machine.constants import Constant
from ratrain.targets.machine.cost import kernel_flops, roofline_work
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.measured_kernels import kernel_key
from ratrain.targets.machine.op_table import MeasuredOp, OpTable
from ratrain.targets.program.routine import Routine, Step
from ratrain.targets.runtime.engine.routine_times import RoutineTimer, timer_bytes
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import HOST_DEVICE, default_kernels
from ratrain.targets.simulator.figures import one_core_step_seconds, simulated

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.kernels import KernelSet

TARGET = "pytorch"

_LEAST_TURNS = 3
_FOR_RUNS = 0.4
"""Share of the progress bar for the programs that run whole steps; the rest is for kernels."""
_RATES = ("gemm_efficiency", "gemm_half_extent", "attention_efficiency", "head_efficiency", "ddr_bandwidth", "launch")
_STARTS = {"gemm_efficiency": 0.7, "attention_efficiency": 0.3, "head_efficiency": 0.5}
_LINKS_OF = {
    HOST_DEVICE: "cpu",
    "H200": "h200",
    "H100": "h100-node",
    "A100": "a100-node",
    "B200": "b200-node",
    "V100": "v100-node",
}
"""Built-in machines whose links a device takes, by a word of the device's name."""

Tell = Callable[[float], None]
"""Called with the finished share of the work, from 0 to 1."""


@frozen
class DeviceChoice:
    """The device to time, the programs to time it with, and limits."""

    device: str
    kernels: str | None = None
    """kernel set; None: the device's default one"""
    model: str | None = None
    plan: str | None = None
    """plan whose kernels are timed too; None: only the usual programs' kernels"""
    dtype: str | None = None
    """type of views and gradients in the usual programs; None: as in the plan, else bf16"""
    seconds: float = 30.0
    """approximate time for kernels; each is timed in three turns at least"""
    links: str | None = None
    """machine whose links are taken; None: the built-in machine for the device"""


@frozen
class TimedCall:
    """A timed kernel call, with its routine."""

    routine: Routine
    step: Step
    seconds: float


@frozen
class StepCheck:
    """A program with the measured and the predicted seconds of a step."""

    name: str
    measured: float
    predicted: float
    issued: float | None = None
    """seconds of a step whose ops the host issues one by one, where `measured` is a graph's"""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        error = self.predicted / self.measured - 1
        figures = {"program": self.name, "measured": self.measured, "predicted": self.predicted, "error": error}
        return figures if self.issued is None else {**figures, "issued_one_by_one": self.issued}


@frozen(repr=False)
class DeviceMachine(Calibrated):
    """The machine file of a device, with figures of its accuracy."""

    machine: Machine
    kernels: str
    """the kernel set"""
    turns: int
    """times that each kernel call was measured; the table has the medians"""
    links: str
    """name of the machine whose links it has"""
    rates: Errors | None
    """errors of the fitted rates on the kernel calls they were fitted to"""
    steps: tuple[StepCheck, ...] = field(factory=tuple)

    def parts(self) -> Iterator[Part]:
        """Yield tables of the constants and of whole timed steps, and a sentence on what is not measured."""
        machine = self.machine
        ops = len(machine.table.ops)
        yield f"kernel set {self.kernels}: {ops} distinct kernel calls and ops; medians of {self.turns} turns"
        constants = [[key, f"{each.value:.6g}", each.unit, each.certainty] for key, each in machine.constants.items()]
        yield TextTable("constants", ("constant", "value", "unit", "certainty"), constants)
        steps = [
            [
                each.name,
                seconds_text(each.measured),
                seconds_text(each.predicted),
                f"{each.predicted / each.measured - 1:+.1%}",
            ]
            for each in self.steps
        ]
        yield TextTable("steps of the small programs", ("program", "measured", "predicted", "error"), steps)
        issued = [each.issued / each.measured for each in self.steps if each.issued is not None]
        if issued:
            yield (
                "steps are repeated as graphs, as 'ratrainc run --graph' does; "
                f"issued op by op they took {median(issued):.1f} times as long"
            )
        if self.rates is not None:
            off = f"off by {self.rates.median:.0%} in the median of those that did"
            yield f"fitted rates, for kernels that did not run: {off}"
        yield f"links were not measured: they are taken from the machine '{self.links}'"

    def to_json(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        constants = self.machine.constants.items()
        return {
            "machine": self.machine.name,
            "kernels": self.kernels,
            "ops": len(self.machine.table.ops),
            "turns": self.turns,
            "links": self.links,
            "constants": {name: {"value": each.value, "certainty": each.certainty} for name, each in constants},
            "rates_error": self.rates.to_json() if self.rates else None,
            "steps": [step.to_json() for step in self.steps],
        }


def machine_of_device(choice: DeviceChoice, name: str, tell: Tell = lambda _: None) -> DeviceMachine:
    """Time a device, and describe it as a machine called `name`; `tell` hears the finished share.

    Raises `DiagnosticError` RT002 as `check_solver` does, RT004 and RT093 as `kernel_set` does, RT004 if the links of a
    device are unknown, RT093 if its memory is too small, and other codes if model, plan or links are wrong.
    """
    check_solver()
    given = _given(choice)
    links = None if choice.links is None else load_machine(choice.links)
    kernels = kernel_set(choice.kernels or default_kernels(choice.device), 1, choice.device)
    facts = kernels.memory.device_facts()
    called = facts.name if facts else HOST_DEVICE
    links = links or load_machine(_usual_links(called))
    start = _start(name, links, kernels)
    chosen = [compiled(model, plan, start) for model, plan in given]
    dtype = choice.dtype or next((program.plan.view_dtype for program in chosen), USUAL_DTYPE)
    usual = usual_programs(start, dtype, on_host=facts is None)
    runs = []
    for number, run in enumerate(run_programs(usual, kernels)):
        runs.append(run)
        tell(_FOR_RUNS * (number + 1) / len(usual))
    calls, turns = _timed_calls(
        [*chosen, *usual], kernels, choice.seconds, lambda part: tell(_FOR_RUNS + (1 - _FOR_RUNS) * part)
    )
    where = f"{called}, kernel set {kernels.name}"
    machine = _with_rates(start, calls, where)
    rates = errors(_predicted(calls, machine), _measured(calls))
    gap = {} if kernels.memory.overlaps else {"engine_gap": _gap(runs, where)}
    machine = evolve(machine, constants=machine.constants | gap, cost="table", table=_table(calls, runs, machine))
    checks = tuple(_check(run, machine, overlaps=kernels.memory.overlaps) for run in runs)
    return DeviceMachine(machine, kernels.name, turns, links.name, rates, checks)


def predicted_step_seconds(program: Program, machine: Machine, *, overlaps: bool) -> float:
    """Simulate a step of a program of one rank on a device's machine; return seconds.

    With `overlaps` its streams run at the same time; otherwise, as on a host, one op runs at a time.
    """
    return simulated(program, machine)[0].step_seconds if overlaps else one_core_step_seconds(program, machine)


def _given(choice: DeviceChoice) -> list[tuple[ModelConfig, Plan]]:
    """Load the given model and plan, before the device is touched; return nothing unless both are given.

    Raises `DiagnosticError` where one cannot be loaded.
    """
    if choice.model is None or choice.plan is None:
        return []
    model = load_model(choice.model)
    return [(model, load_plan(choice.plan, model))]


def _usual_links(called: str) -> str:
    """Return the name of the built-in machine whose links a device takes. Raises `DiagnosticError` RT004 if unknown."""
    found = next((machine for word, machine in _LINKS_OF.items() if word in called), None)
    if found is None:
        fail(
            "RT004",
            f"one device cannot measure its links to others, and no built-in machine matches '{called}'",
            help="name a machine, or a file, whose links are taken: --links h100-node ('ratrainc machines' lists them)",
        )
    return found


def _start(name: str, links: Machine, kernels: KernelSet) -> Machine:
    """Make the machine for which the timed programs are compiled; apart from memory, its constants are guesses."""
    constants, groups, collectives = link_part(links)
    assumed = partial(Constant, certainty="assumed", source="where the fit of rates starts")
    rates = {each: assumed(value, "fraction of fp16_peak") for each, value in _STARTS.items()}
    constants = {
        **capacity_constants(kernels),
        **copy_constants(kernels),
        "fp16_peak": assumed(1e11, "flop/s"),
        **rates,
        "gemm_half_extent": assumed(32.0, "elements"),
        "launch": assumed(5e-6, "s"),
        **constants,
    }
    return Machine(name, Engine.COMPUTE, constants, target=TARGET, group_names=groups, collectives=collectives)


def _timed_calls(
    programs: Sequence[Program], kernels: KernelSet, seconds: float, tell: Tell
) -> tuple[list[TimedCall], int]:
    """Time every distinct kernel call of some programs; return the calls with medians, and the number of turns."""
    routines = _distinct(programs)
    _check_fits(routines, kernels)
    timer = RoutineTimer(routines, kernels)
    taken: list[list[tuple[float, ...]]] = [[] for _ in routines]
    for number in range(len(routines)):  # kernels are loaded or compiled, and memory is touched for the first time
        timer.turn(number)
    turns, start = 0, perf_counter()
    while turns < _LEAST_TURNS or perf_counter() - start < seconds:
        for number in range(len(routines)):  # all in turn, so that what disturbs one meets the others too
            taken[number].append(timer.turn(number))
        turns += 1
        passed = (perf_counter() - start) / seconds if seconds else 1.0
        tell(min(1.0, passed, turns / _LEAST_TURNS))
    return _median_calls(routines, taken), turns


def _distinct(programs: Sequence[Program]) -> list[Routine]:
    """Return the routines with a kernel call that no earlier routine has, in the order of the programs."""
    seen: set[str] = set()
    found = []
    for routine in (routine for program in programs for routine in program.routines):
        keys = {kernel_key(routine, step) for step in routine.steps}
        if keys - seen:
            found.append(routine)
        seen |= keys
    return found


def _check_fits(routines: Sequence[Routine], kernels: KernelSet) -> None:
    facts = kernels.memory.device_facts()
    free = free_memory() if facts is None else facts.total - facts.taken
    needed = timer_bytes(routines, kernels)
    if needed > free:
        text = f"to time these kernels takes {needed} bytes of the device at a time; {free} are free"
        fail("RT093", text, help="give a plan of smaller micro-batches, or free memory of the device")


def _median_calls(routines: Sequence[Routine], taken: list[list[tuple[float, ...]]]) -> list[TimedCall]:
    """Return one call for each key, with the median over all turns of all equal calls."""
    calls: dict[str, tuple[Routine, Step]] = {}
    mine = defaultdict[str, list[float]](list)
    for routine, seconds in zip(routines, taken, strict=True):
        for number, step in enumerate(routine.steps):
            key = kernel_key(routine, step)
            calls.setdefault(key, (routine, step))
            mine[key] += [turn[number] for turn in seconds]
    return [TimedCall(*call, median(mine[key])) for key, call in calls.items()]


def _with_rates(start: Machine, calls: Sequence[TimedCall], where: str) -> Machine:
    """Set the peak to the speed of the fastest product, and fit the rates to all calls."""
    speeds = [kernel_flops(call.routine, call.step) / call.seconds for call in calls]
    count = sum(speed > 0 for speed in speeds)
    source = f"fastest of {count} products and attentions timed: {where}"
    constants = start.constants | {"fp16_peak": Constant(max(speeds), "flop/s", "measured", source)}
    machine = evolve(start, constants=constants)
    predict, measured = partial(_predicted, calls), _measured(calls)
    source, unseen = f"fitted to {len(calls)} kernel calls: {where}", "no kernel that was timed depends on it"
    return fitted_rates(machine, _RATES, predict, measured, source=source, unseen=unseen)


def _predicted(calls: Sequence[TimedCall], machine: Machine) -> Seconds:
    return np.array([roofline_work(call.routine, call.step, machine).seconds for call in calls])


def _measured(calls: Sequence[TimedCall]) -> Seconds:
    return np.array([call.seconds for call in calls])


def _gap(runs: Sequence[RunProgram], where: str) -> Constant:
    gap = median(run.gap_seconds for run in runs)
    return Constant(gap, "s", "measured", f"median between two ops of {len(runs)} programs: {where}")


def _table(calls: Sequence[TimedCall], runs: Sequence[RunProgram], machine: Machine) -> OpTable:
    """Make the table of timed ops; the size of a kernel call is its predicted seconds by the machine's rates."""
    sizes = _predicted(calls, machine)
    kernels = [
        MeasuredOp(kernel_key(call.routine, call.step), float(size), call.seconds)
        for call, size in zip(calls, sizes, strict=True)
    ]
    return OpTable((*kernels, *other_ops(runs)))


def _check(run: RunProgram, machine: Machine, *, overlaps: bool) -> StepCheck:
    predicted = predicted_step_seconds(run.program, machine, overlaps=overlaps)
    return StepCheck(run.program.model.name, run.step_seconds, predicted, run.issued_seconds)
