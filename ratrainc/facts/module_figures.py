"""The figures of a compiled module, as `--json` prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import STORES
from ratrain.targets.machine.capacity import capacity_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.targets.machine.machine import Machine


def module_figures(module: Module, machine: Machine, peaks: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the figures of a compiled module for a machine, as `--json` prints them.

    `peaks` are the most live bytes by stage; None computes them.
    """
    stages = []
    for number, stage in enumerate(module.stages):
        peak = lifetimes(stage).peak_bytes if peaks is None else peaks[number]
        figures = {"peak_live_bytes": peak, "arena_bytes": stage.arena_bytes, "ops": len(stage.ops)}
        stages.append({**figures, **stored_figures(stage)})
    return {
        "name": module.name,
        "level": module.level.value,
        "pipeline": module.pipeline,
        **capacity_figures(module, machine),
        "stages": stages,
    }


def stored_figures(stage: Stage) -> dict[str, Any]:
    """Return the bytes that a stage stores in other memories; empty if none."""
    stored = {home.value: stage.bytes_in(home) for home in STORES if stage.bytes_in(home)}
    return {"stored_bytes": stored} if stored else {}


def capacity_figures(module: Module, machine: Machine) -> dict[str, Any]:
    """Return the capacity of a rank for tensors and, if the machine has overheads, the bytes of each."""
    if module.target is None:
        return {"capacity_bytes": None}
    overheads = dict(capacity_of(machine, module.topology).overheads)
    return {"capacity_bytes": module.target.capacity_bytes} | ({"overhead_bytes": overheads} if overheads else {})
