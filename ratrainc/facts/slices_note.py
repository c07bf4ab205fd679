"""A remark on slices that are too short to be worth reading the weights for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.machine.cost import weight_bound_rows

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine


def slices_note(plan: Plan, machine: Machine) -> str:
    """Return a remark if products of some slices are bound by DDR, since each slice reads all weights again; else "".

    The rows of a slice are its tokens of all sequences of a micro-batch.
    """
    if not plan.slices:
        return ""
    least = weight_bound_rows(machine, Dtype(plan.view_dtype).itemsize, half_sums=plan.half_run is not None)
    short = [tokens for tokens in plan.slices if tokens * plan.micro_batch_size < least]
    if not short:
        return ""
    rows = min(short) * plan.micro_batch_size
    return (
        f"{len(short)} of {len(plan.slices)} slices are bound by DDR: each reads all weights again, which takes "
        "longer than its products do "
        f"below {least:.0f} rows on {machine.name}; the shortest has {rows}"
    )
