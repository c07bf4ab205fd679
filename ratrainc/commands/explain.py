"""`ratrainc explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ratrain.ratrainc.commands.options import Source, json_option, machine_option, refuse_idle, seconds_option
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.targets.machine.machine import Machine

_EPILOG = """\b
Examples:
  ratrainc explain 7b.rtir
  ratrainc explain 7b.rtir --stage 1 --no-levers
  ratrainc explain 7b.rtx --time
  ratrainc explain 7b.rtx --time --stage 0 --cold
"""

_SHOWN_OWNERS = 12


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("program"), metavar="FILE.rtir|FILE.rtx")
@click.option("--time", "of_time", is_flag=True, help="Explain the time of a step instead of its bytes.")
@click.option("--cold", is_flag=True, help="With --time: the first step, from cold, instead of a steady one.")
@click.option(
    "--stage", type=click.IntRange(min=0), help="The stage to explain. Default: the one with the highest peak."
)
@click.option(
    "--levers/--no-levers", default=True, show_default=True, help="Try changes that free bytes, and price them."
)
@seconds_option(60.0, "Time for trying levers.")
@machine_option
@json_option
def command(
    file: str,
    of_time: bool,
    cold: bool,
    stage: int | None,
    levers: bool,
    seconds: float,
    machine: str | None,
    as_json: bool,
) -> None:
    """Say why each byte is where it is: who is live at the peak, what the arena adds, which changes free how much.

    Every lever is tried: compiled, placed and simulated. Prices are simulated seconds.

    Bytes of a program (.rtx) are those of the schedule that its model, plan and passes give, where that is this very program.

    With --time, say where the time of a step goes: what every idle engine waited for, and the critical path op by op.
    """
    if of_time:
        refuse_idle("is for bytes: it does not go with --time", "levers", "seconds")
        _explain_time(file, stage, machine, cold=cold, as_json=as_json)
        return
    if not levers:
        refuse_idle("is the time for trying levers: it does not go with --no-levers", "seconds")
    if cold:
        raise click.UsageError("--cold goes with --time")
    from ratrain import api
    from ratrain.ratrain_ir.analysis.lifetime import lifetimes
    from ratrain.ratrainc.commands.loading import explained_schedule
    from ratrain.ratrainc.console import print_json
    from ratrain.ratrainc.slices_note import slices_note

    module, given = explained_schedule(file, machine)
    _check_stage(stage, len(module.stages))
    if stage is None:
        stage = max(range(len(module.stages)), key=lambda s: lifetimes(module.stages[s]).peak_bytes)
    facts = _facts(module, module.stages[stage], api.machine_for(module, given))
    facts["byte_reuse"] = _byte_reuse(module, given)
    facts["recovery"] = _recovery(module, module.stages[stage], given)
    if note := slices_note(module.plan, api.machine_for(module, given)):
        facts["slices"] = note
    facts["levers"] = _levers(module, stage, given, seconds) if levers else []
    if as_json:
        print_json(facts)
    else:
        _show(facts)


def _explain_time(file: str, stage: int | None, machine: str | None, *, cold: bool, as_json: bool) -> None:
    from ratrain import api
    from ratrain.ratrainc.commands.loading import checked_program
    from ratrain.ratrainc.console import print_json, status
    from ratrain.ratrainc.reports import show_collectives
    from ratrain.ratrainc.time_report import show_time, time_facts

    with status(f"simulating {file}"):
        program, chosen = checked_program(file, machine)
        _check_stage(stage, len(program.stages))
        figures, timeline = api.simulate_with_timeline(program, machine=chosen)
    if as_json:
        print_json(time_facts(timeline, stage=stage, cold=cold) | {"collectives": figures.collectives})
    else:
        show_time(timeline, stage=stage, cold=cold)
        show_collectives(figures)


def _check_stage(stage: int | None, stages: int) -> None:
    if stage is not None and stage >= stages:
        raise click.UsageError(f"there is no stage {stage}: the stages are 0 to {stages - 1}")


def _facts(module: Module, stage: Stage, machine: Machine) -> dict[str, Any]:
    from ratrain.ratrain_ir.analysis.lifetime import lifetimes
    from ratrain.ratrain_ir.types import aligned
    from ratrain.ratrainc.commands.compile import capacity_figures, stored_figures

    lives = lifetimes(stage)
    position = lives.peak_position
    live = lives.live_at(position)
    owners: dict[str, int] = {}
    for tensor in live:
        name = f"{tensor.kind.value} of {_owner(tensor.name)}"
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
    """The block a tensor's name speaks of; micro-batches and slots of a block are counted together."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part in ("attention", "mlp") and index + 1 < len(parts) and parts[index + 1].isdigit():
            return f"{part}.{parts[index + 1]}"
        if part in ("embed", "head"):
            return part
    return parts[0]


def _grouped(by_owner: dict[str, int]) -> list[tuple[str, int]]:
    """Owners with the layers of one block kind taken together, largest first."""
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for name, size in by_owner.items():
        kind, _, layer = name.partition(".")
        sizes[kind] = sizes.get(kind, 0) + size
        counts[kind] = counts.get(kind, 0) + bool(layer)
    named = [(f"{kind} ({counts[kind]} layers)" if counts[kind] else kind, size) for kind, size in sizes.items()]
    return sorted(named, key=lambda item: -item[1])


def _byte_reuse(module: Module, machine: Machine | None) -> dict[str, float] | None:
    """Seconds of a step as placed, and were no bytes used twice; None where nothing has an address yet."""
    from ratrain import api
    from ratrain.passes.memory.trial import at_own_addresses
    from ratrain.ratrain_ir.module import Level
    from ratrain.ratrainc.console import status
    from ratrain.targets.target import target_of

    if module.level is not Level.ALLOCATED:
        return None
    target = target_of(api.machine_for(module, machine))
    apart = at_own_addresses(module)
    with status("simulating"):
        return {"step_seconds": target.step_seconds(module), "without_reuse_seconds": target.step_seconds(apart)}


def _recovery(module: Module, stage: Stage, machine: Machine | None) -> list[dict[str, Any]]:
    """What is kept, recovered and stored of each block, and what that costs; nothing of what has no places yet."""
    from ratrain import api
    from ratrain.ratrain_ir.module import Level
    from ratrain.ratrainc.console import status
    from ratrain.ratrainc.recovery_prices import recovery_facts, stores_anything
    from ratrain.targets.target import target_of

    if module.level is not Level.ALLOCATED:
        return []
    chosen = api.machine_for(module, machine)
    timeline = None
    if stores_anything(stage):
        with status("simulating what is stored"):
            _, timeline = api.simulate_with_timeline(api.emit(module, machine=chosen), machine=chosen)
    return recovery_facts(module, stage, target_of(chosen), timeline)


def _levers(module: Module, stage: int, machine: Machine | None, seconds: float) -> list[dict[str, Any]]:
    from attrs import evolve

    from ratrain import api
    from ratrain.passes.placement.placed_by import placed_by
    from ratrain.ratrain_ir.module import Level
    from ratrain.ratrainc.console import status
    from ratrain.ratrainc.levers import Setting, outcomes, try_setting

    if not module.pipeline:
        return []
    # of a placed module the plan tells the order that its pipeline made, and a placement of its own name makes it again
    made = module.level is not Level.DATAFLOW and placed_by(module.pipeline) is not None
    plan = evolve(module.plan, schedule=None) if made else module.plan
    pipeline = module.pipeline if module.level is Level.ALLOCATED else f"{module.pipeline},allocate-ddr"
    setting = Setting(module.model, plan, pipeline, api.machine_for(module, machine))
    with status("trying levers"):
        now = try_setting(setting, "as it is")
        if now is None:
            echo(f"no levers are tried: the pipeline '{pipeline}' cannot be run again here", err=True)
            return []
        tried = [now, *(o for o in outcomes(setting, stage, seconds) if " and " not in o.name)]
    reference = now.peak_bytes[stage]
    return [
        {
            "name": outcome.name,
            "peak_bytes": max(outcome.peak_bytes),
            "freed_bytes": reference - outcome.peak_bytes[stage] if len(outcome.peak_bytes) > stage else None,
            "step_seconds": outcome.step_seconds,
            "fits": outcome.fits,
        }
        for outcome in tried
    ]


def _show(facts: dict[str, Any]) -> None:
    from ratrain.ratrainc.console import say, seconds_text, size_text, table
    from ratrain.ratrainc.recovery_prices import show_recovery

    peak, arena = facts["peak_live_bytes"], facts["arena_bytes"]
    say(f"stage @{facts['stage']}: {peak} bytes ({size_text(peak)}) live at '{facts['peak_op']}'")
    if arena:
        say(
            f"arena {arena} bytes, {arena - peak} more than is ever live ({100 * (arena / peak - 1):.3f} % fragmentation)"
        )
    if facts["capacity_bytes"] and arena:
        say(f"capacity {facts['capacity_bytes']} bytes: {facts['capacity_bytes'] - arena} free")
    for home, nbytes in facts.get("stored_bytes", {}).items():
        say(f"stored in the memory '{home}': {nbytes} bytes ({size_text(nbytes)})")
    if overheads := facts.get("overhead_bytes"):
        rows = [[name, str(nbytes), size_text(nbytes)] for name, nbytes in overheads.items()]
        table("taken of the memory before any tensor has a place", ("overhead", "bytes", ""), rows)
    if facts["byte_reuse"]:
        step, apart = facts["byte_reuse"]["step_seconds"], facts["byte_reuse"]["without_reuse_seconds"]
        words = f"{seconds_text(step)} a step, {seconds_text(apart)} if no bytes were used twice"
        say(f"waits for bytes that are used again: {words} ({100 * (step / apart - 1):+.2f} %, simulated)")
    if "slices" in facts:
        say(facts["slices"])
    rows = [[kind, str(size), size_text(size), f"{100 * size / peak:.1f} %"] for kind, size in facts["by_kind"].items()]
    table("live at the peak, by state kind", ("kind", "bytes", "", "share"), rows)
    owners = _grouped(facts["by_owner"])
    rows = [[name, str(size), size_text(size), f"{100 * size / peak:.1f} %"] for name, size in owners[:_SHOWN_OWNERS]]
    table(f"live at the peak, by owner (largest {len(rows)} of {len(owners)})", ("owner", "bytes", "", "share"), rows)
    if facts["recovery"]:
        show_recovery(facts["recovery"])
    if facts["levers"]:
        _show_levers(facts["levers"])


def _show_levers(levers: list[dict[str, Any]]) -> None:
    from ratrain.ratrainc.console import seconds_text, size_text, table

    now = levers[0]["step_seconds"]
    rows = []
    for lever in levers:
        freed = lever["freed_bytes"]
        seconds = lever["step_seconds"]
        price = "does not fit" if seconds is None else f"{100 * (seconds / now - 1):+.2f} %" if now else ""
        rows.append(
            [
                lever["name"],
                "-" if freed is None else ("-" if freed < 0 else "") + size_text(abs(freed)),
                size_text(lever["peak_bytes"]),
                "-" if seconds is None else seconds_text(seconds),
                price,
            ]
        )
    table(
        "levers, each tried alone (seconds simulated)", ("lever", "frees here", "highest peak", "step", "price"), rows
    )
