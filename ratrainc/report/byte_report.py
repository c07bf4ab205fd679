"""Report on the bytes of a stage: live tensors at the peak, the arena, and the changes that free bytes, with prices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.passes.manager import PassManager
from ratrain.passes.placed_by import placed_by
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import StateKind, aligned
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.module import Level, Module
from ratrain.ratrain_ir.process_pool import each, each_stage, processes_for
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.choices.levers import CompileSetting, LeverOutcome
from ratrain.ratrainc.choices.timed_plan import RefusedPlan
from ratrain.ratrainc.compiling.building import emit
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.console.progress import OnProgress, Progress
from ratrain.ratrainc.facts.expert_facts import expert_rows_note, experts_text
from ratrain.ratrainc.facts.module_figures import capacity_figures, stored_figures
from ratrain.ratrainc.facts.slices_note import slices_note
from ratrain.ratrainc.memory.lever_prices import Found, Prices, Pricing, pricing_of
from ratrain.ratrainc.memory.recovery_prices import recovery_facts, recovery_table, stores_anything
from ratrain.targets.codegen.emitter import without_reuse
from ratrain.targets.simulator.figures import simulated
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

_SHOWN_OWNERS = 12
_LEAST_FREED = 5243
"""Bytes that are shown as 0.01 MiB."""
_PASSES_OF_A_LEVER = 20
"""About how often each op is visited to compile, place and simulate a schedule; it decides how many processes share the
work.
"""


@frozen(repr=False)
class ByteReport(Shown):
    """An account of the bytes of a stage."""

    facts: dict[str, Any]
    """the report's figures, as `--json` prints them"""
    untried: str = ""
    """why no lever was tried although levers were asked for; else empty"""

    def parts(self) -> Iterator[Part]:
        """Yield sentences about peak and arena, and tables of live tensors and of changes that free bytes."""
        yield from _parts(self.facts)
        yield from self.lever_parts()

    def lever_parts(self) -> Iterator[Part]:
        """Yield the last of the parts: the table of changes that free bytes, and those left for want of time."""
        if self.facts["levers"]:
            yield from _levers(self.facts["levers"])
        if self.facts["levers_left"]:
            yield _left_text(self.facts["levers_left"], self.facts["levers_seconds"])

    def to_json(self) -> dict[str, Any]:
        """Return the facts as `--json` prints them."""
        return self.facts


def byte_report(
    module: Module,
    machine: Machine,
    *,
    stage: int | None,
    levers: bool,
    seconds: float | None,
    progress: OnProgress,
    at_peak: Callable[[ByteReport], object] | None = None,
) -> ByteReport:
    """Report on a stage of a verified module; None takes the stage with the highest peak.

    With `levers`, changes that free bytes are tried for about `seconds` seconds (`pricing_of`). `at_peak` is called
    with the report without them, before the first is tried.
    """
    with paused_gc():
        program = None
        if module.level is Level.ALLOCATED:
            progress(Progress(0, None, "emitting"))
            program = emit(module, machine=machine)
        if stage is None:
            peaks = each_stage(_peak_bytes, module.stages) if program is None else _peaks(program)
            stage = peaks.index(max(peaks))
        facts = _facts(module, module.stages[stage], machine) | {"byte_reuse": None, "recovery": []}
        facts |= {"levers": [], "levers_left": [], "levers_seconds": 0.0}
        now = None
        if program is not None:
            progress(Progress(0, None, "simulating"))
            jobs: list[Callable[[], Any]] = [
                partial(_now, module, program, machine, stage),
                partial(_apart_seconds, module, program, machine),
            ]
            now, apart = each(_called, jobs, work=len(jobs) * _PASSES_OF_A_LEVER * _ops(module))
            facts["byte_reuse"] = {"step_seconds": now.step_seconds, "without_reuse_seconds": apart}
            facts["recovery"] = now.recovery
        if note := slices_note(module.plan, machine):
            facts["slices"] = note
        if module.model.experts:
            facts["experts"] = [experts_text(module.model), expert_rows_note(module.model, module.plan, machine)]
        if at_peak is not None:
            at_peak(ByteReport(dict(facts)))
        untried = _try_levers(facts, module, stage, machine, now, seconds, progress) if levers else ""
    return ByteReport(facts, untried)


def _called(job: Callable[[], Any]) -> Any:
    return job()


def _try_levers(
    facts: dict[str, Any],
    module: Module,
    stage: int,
    machine: Machine,
    now: _Now | None,
    seconds: float | None,
    progress: OnProgress,
) -> str:
    """Add levers to the facts; return the reason why none was tried, empty if one was.

    `now` is the unchanged schedule; None for a module that is not allocated.
    """
    pricing, outcome, untried = _pricing(module, stage, machine, seconds)
    if pricing is None:
        return untried
    if now is not None:
        outcome = _outcome(pricing.setting, now.peak_bytes, now.step_seconds)
    assert outcome is not None
    tasks = pricing.tasks
    work = len(tasks) * _PASSES_OF_A_LEVER * _ops(module)
    count = processes_for(len(tasks), work=work)

    def tried(number: int) -> Found:
        progress(Progress(number, len(tasks), f"trying change {number + 1} of {len(tasks)}"))
        return pricing.found(tasks[number])

    found = each(tried, range(len(tasks)), work=work)
    return _add_levers(facts, outcome, pricing.prices(outcome, found, count))


def _peak_bytes(stage: Stage) -> int:
    return lifetimes(stage).peak_bytes


def _peaks(program: Program) -> list[int]:
    return [stage.peak_live_bytes for stage in program.stages]


@frozen
class _Now:
    """Step time, peaks and recovery of the unchanged schedule."""

    step_seconds: float
    peak_bytes: tuple[int, ...]
    recovery: list[dict[str, Any]]


def _now(module: Module, program: Program, machine: Machine, stage: int) -> _Now:
    figures, timeline = simulated(program, machine)
    held = module.stages[stage]
    recovery = recovery_facts(module, held, target_of(machine), timeline if stores_anything(held) else None)
    return _Now(figures.step_seconds, tuple(_peaks(program)), recovery)


def _apart_seconds(module: Module, program: Program, machine: Machine) -> float:
    """Simulate a step in which no bytes are used twice; return its seconds."""
    return simulated(without_reuse(program, module), machine)[0].step_seconds


def _facts(module: Module, stage: Stage, machine: Machine) -> dict[str, Any]:
    lives = lifetimes(stage)
    position = lives.peak_position
    live = lives.live_at(position)
    owners: dict[str, int] = {}
    for tensor in live:
        owner = "ops" if tensor.kind is StateKind.WORKSPACE else _owner(tensor.name)
        name = f"{tensor.kind.value} of {owner}"
        owners[name] = owners.get(name, 0) + aligned(tensor.type.nbytes)
    return {
        "stage": stage.index,
        "peak_live_bytes": lives.peak_bytes,
        "peak_op": repr(stage.ops[position]) if stage.ops else "",
        "arena_bytes": stage.arena_bytes,
        **stored_figures(stage),
        **capacity_figures(module, machine),
        "by_kind": {kind.value: size for kind, size in lives.bytes_by_kind(position).items()},
        "by_owner": dict(sorted(owners.items(), key=lambda item: -item[1])),
        "live_tensors": len(live),
    }


def _owner(name: str) -> str:
    """Return the block in a tensor's name; micro-batches and slots of a block are counted together."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part in ("attention", "mlp") and index + 1 < len(parts) and parts[index + 1].isdigit():
            return f"{part}.{parts[index + 1]}"
        if part in ("embed", "head"):
            return part
    return parts[0]


def _grouped(by_owner: dict[str, int]) -> list[tuple[str, int]]:
    """Return owners with their bytes, largest first; the layers of one kind of block are added up."""
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for name, size in by_owner.items():
        kind, _, layer = name.partition(".")
        sizes[kind] = sizes.get(kind, 0) + size
        counts[kind] = counts.get(kind, 0) + bool(layer)
    layers = {kind: f" ({number_of(count, 'layer')})" if count else "" for kind, count in counts.items()}
    return sorted(((f"{kind}{layers[kind]}", size) for kind, size in sizes.items()), key=lambda item: -item[1])


def _ops(module: Module) -> int:
    return sum(len(stage.ops) for stage in module.stages)


def _pricing(
    module: Module, stage: int, machine: Machine, seconds: float | None
) -> tuple[Pricing | None, LeverOutcome | None, str]:
    """Return the levers to try, and the outcome of an unallocated module; or the reason why there are none.

    The outcome is None for an allocated module, whose figures come from its own program.
    """
    if not module.pipeline:
        return None, None, "no levers are tried: no pipeline made the module"
    # The plan of a placed module names the order that its pipeline made. The pipeline's own placement pass makes that
    # order again, so the plan to be compiled need not name it.
    made = module.level is not Level.DATAFLOW and placed_by(module.pipeline) is not None
    plan = evolve(module.plan, schedule=None) if made else module.plan
    is_allocated, outcome = module.level is Level.ALLOCATED, None
    pipeline = module.pipeline if is_allocated else f"{module.pipeline},allocate-ddr"
    setting = CompileSetting(module.model, plan, pipeline, machine)
    if not is_allocated:
        outcome = _allocated(setting, module)
        if outcome is None:
            return None, None, _refusal(setting)
    return pricing_of(setting, stage, _ops(module), seconds), outcome, ""


def _refusal(setting: CompileSetting) -> str:
    return f"no levers are tried: the pipeline '{setting.pipeline}' cannot be run again here"


def _add_levers(facts: dict[str, Any], outcome: LeverOutcome, prices: Prices) -> str:
    """Add levers that were tried, and those left for lack of time, to the facts.

    Returns the reason why none was tried; empty if one was.
    """
    if prices.refused:
        return _refusal(outcome.setting)
    facts["levers"] = [
        _lever(outcome, 0, estimated=False),
        *(
            _lever(each, freed, estimated=prices.estimated)
            for each, freed in zip(prices.tried, prices.freed_bytes, strict=True)
        ),
    ]
    facts["levers_left"] = prices.left
    facts["levers_seconds"] = prices.seconds
    return ""


def _allocated(setting: CompileSetting, module: Module) -> LeverOutcome | None:
    """Allocate a copy of a module and return its outcome; None if a pass refuses it for another reason than bytes."""
    copy = copy_module(module)
    try:
        PassManager(target_of(setting.machine)).run(copy, "allocate-ddr")
    except DiagnosticError as error:
        refused = RefusedPlan(error, tuple(lifetimes(stage).peak_bytes for stage in copy.stages))
        return _outcome(setting, refused.peak_bytes, None) if refused.is_for_bytes else None
    program = emit(copy, machine=setting.machine)
    return _outcome(setting, tuple(_peaks(program)), simulated(program, setting.machine)[0].step_seconds)


def _outcome(setting: CompileSetting, peak_bytes: tuple[int, ...], step_seconds: float | None) -> LeverOutcome:
    return LeverOutcome("unchanged", setting, peak_bytes, step_seconds)


def _lever(outcome: LeverOutcome, freed: int | None, *, estimated: bool) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "peak_bytes": max(outcome.peak_bytes),
        "freed_bytes": freed,
        "step_seconds": outcome.step_seconds,
        "estimated": estimated,
        "fits": outcome.fits,
    }


def _parts(facts: dict[str, Any]) -> Iterator[Part]:
    peak, arena = facts["peak_live_bytes"], facts["arena_bytes"]
    yield f"stage @{facts['stage']}: {peak} bytes ({size_text(peak)}) live at '{facts['peak_op']}'"
    if arena:
        yield (
            f"arena {arena} bytes, {arena - peak} more than is ever live ({100 * (arena / peak - 1):.3f} % "
            "fragmentation)"
        )
    if facts["capacity_bytes"] and arena:
        yield f"capacity {facts['capacity_bytes']} bytes: {facts['capacity_bytes'] - arena} free"
    for home, nbytes in facts.get("stored_bytes", {}).items():
        yield f"stored in the memory '{home}': {nbytes} bytes ({size_text(nbytes)})"
    if overheads := facts.get("overhead_bytes"):
        rows = [[name, str(nbytes), size_text(nbytes)] for name, nbytes in overheads.items()]
        yield TextTable("taken of the memory before any tensor has a place", ("overhead", "bytes", ""), rows)
    if facts["byte_reuse"]:
        step, apart = facts["byte_reuse"]["step_seconds"], facts["byte_reuse"]["without_reuse_seconds"]
        words = f"{seconds_text(step)} a step, {seconds_text(apart)} if no bytes were used twice"
        yield f"cost of reusing addresses: {words} ({_change_text(step, apart)}, simulated)"
    if "slices" in facts:
        yield facts["slices"]
    yield from facts.get("experts", ())
    rows = [[kind, str(size), size_text(size), f"{100 * size / peak:.1f} %"] for kind, size in facts["by_kind"].items()]
    yield TextTable("live at the peak, by state kind", ("kind", "bytes", "", "share"), rows)
    owners = _grouped(facts["by_owner"])
    rows = [[name, str(size), size_text(size), f"{100 * size / peak:.1f} %"] for name, size in owners[:_SHOWN_OWNERS]]
    yield TextTable(
        f"live at the peak, by owner (largest {len(rows)} of {len(owners)})", ("owner", "bytes", "", "share"), rows
    )
    if facts["recovery"]:
        yield recovery_table(facts["recovery"])


def _left_text(left: list[str], seconds: float) -> str:
    """Name the levers that there was no time for, and the time that would be enough."""
    enough = max(1, ceil(1.2 * seconds))
    return f"not tried, for want of time: {'; '.join(left)}. --seconds {enough} is about enough for all"


def _change_text(seconds: float, before: float) -> str:
    """Return the relative change in percent; adding 0.0 turns a rounded -0 into 0."""
    return f"{round(100 * (seconds / before - 1), 2) + 0.0:+.2f} %"


def _levers(levers: list[dict[str, Any]]) -> Iterator[Part]:
    """Yield a table of the changes that free something, and the names of those that were tried and do not."""
    now, *tried = levers
    freeing = [lever for lever in tried if _frees(lever, now)]
    others = [lever["name"] for lever in tried if lever not in freeing]
    if freeing:
        yield _levers_table([now, *freeing])
    if others:
        yield f"tried, and free less than 0.01 MiB of the peak: {'; '.join(others)}"


def _frees(lever: dict[str, Any], now: dict[str, Any]) -> bool:
    """Tell whether a change frees bytes as they are shown, without a higher peak elsewhere."""
    freed, less = lever["freed_bytes"], now["peak_bytes"] - lever["peak_bytes"]
    return bool(less >= 0 and (less if freed is None else freed) >= _LEAST_FREED)


def _levers_table(levers: list[dict[str, Any]]) -> TextTable:
    now = levers[0]["step_seconds"]
    rows = []
    for lever in levers:
        freed = lever["freed_bytes"]
        seconds = lever["step_seconds"]
        about = "about " if lever["estimated"] else ""
        price = "does not fit" if seconds is None else _change_text(seconds, now) if now else ""
        rows.append(
            [
                lever["name"],
                "-" if freed is None else about + ("-" if freed < 0 else "") + size_text(abs(freed)),
                about + size_text(lever["peak_bytes"]),
                "-" if seconds is None else about + seconds_text(seconds),
                price,
            ]
        )
    how = "estimated from fewer micro-batches" if any(lever["estimated"] for lever in levers) else "simulated"
    return TextTable(
        f"changes that free bytes, each tried alone (seconds {how})",
        ("change", "frees on this stage", "highest peak", "step", "price"),
        rows,
    )
