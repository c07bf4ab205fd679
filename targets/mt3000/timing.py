"""Seconds of ops on the MT-3000: block ops by their routine, messages and collectives by link, updates by DDR."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from targets.mt3000.cost import (
    copy_seconds,
    message_seconds,
    ring_seconds,
    routine_seconds,
    scalar_seconds,
    update_seconds,
)
from targets.routine import Routine

if TYPE_CHECKING:
    from ratrain_ir.frontend.plan import Plan
    from targets.mt3000.machine import Machine


@frozen
class TimedOp:
    """What the time of an op depends on, read off an IR op or an instruction."""

    keyword: str
    group: str
    routine: Routine | None
    payload_bytes: int
    """bytes of what travels or is loaded: boundary, gradients, gathered views"""
    updated_parameters: int
    """master weights an update changes"""


def op_seconds(op: TimedOp, plan: Plan, machine: Machine) -> float:
    """Seconds of an op that has its engine, DDR and link to itself."""
    if op.routine is not None:
        return routine_seconds(op.routine, machine)
    if op.keyword in ("send", "recv"):
        return message_seconds(op.payload_bytes, machine)
    if op.keyword in ("reduce_scatter", "all_gather"):
        return ring_seconds(op.payload_bytes, plan.dp, machine)
    if op.keyword == "all_reduce":
        if op.group == "ends":
            return (
                message_seconds(op.payload_bytes, machine) if plan.pp > 1 else copy_seconds(op.payload_bytes, machine)
            )
        return 2 * ring_seconds(op.payload_bytes, plan.dp, machine)
    if op.keyword == "all_reduce_scalar":
        members = plan.dp if op.group == "replicas" else plan.dp * plan.pp
        return copy_seconds(op.payload_bytes, machine) + scalar_seconds(members, machine)
    if op.keyword == "update":
        return update_seconds(op.updated_parameters, machine)
    return copy_seconds(op.payload_bytes, machine)
