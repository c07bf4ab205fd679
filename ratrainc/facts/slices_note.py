"""What is to be said of slices that are too short for their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.machine.cost import weight_bound_rows

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine


def slices_note(plan: Plan, machine: Machine) -> str:
    """That the products of some slices are bound by DDR, as each slice reads all weights again; empty where none are.

    A slice has its tokens of each sequence of a micro-batch as rows.
    """
    if not plan.slices:
        return ""
    least = weight_bound_rows(machine, Dtype(plan.view_dtype).itemsize)
    short = [tokens for tokens in plan.slices if tokens * plan.micro_batch_size < least]
    if not short:
        return ""
    rows = min(short) * plan.micro_batch_size
    return (
        f"{len(short)} of {len(plan.slices)} slices are bound by DDR: each reads all weights again, which takes longer than its products do "
        f"below {least:.0f} rows on {machine.name}; the shortest has {rows}"
    )
