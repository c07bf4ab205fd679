"""Plan of one slice of every sequence, from which sizes and kernels of a slice follow as a whole sequence's do."""

from __future__ import annotations

from functools import cache

from attrs import field, fields, frozen

from ratrain.ratrain_ir.config.plan import Plan


@frozen(cache_hash=True)
class SlicePlan(Plan):
    """Plan of one slice of every sequence: `seq_len` is the slice's, and there are no slices."""

    parent: Plan = field(kw_only=True)
    """plan of whole sequences"""
    index: int = field(kw_only=True)
    """number of the slice"""

    @property
    def whole(self) -> Plan:
        """Plan of whole micro-batches."""
        return self.parent

    @property
    def first_position(self) -> int:
        """Position in its sequence at which the slice begins."""
        return sum(self.parent.slices[: self.index])


def plan_of_piece(plan: Plan, index: int | None) -> Plan:
    """Return the plan of an op's slice; `plan` itself for None: a collective works on no slice, whatever the plan."""
    return plan if index is None else slice_plan(plan, index)


@cache
def slice_plan(plan: Plan, index: int | None) -> Plan:
    """Return the plan of one slice; `plan` itself for None, if it has no slices.

    Raises IndexError if the plan has no such slice, or has slices and `index` is None.
    """
    if index is None and not plan.slices:
        return plan
    if index is None or not 0 <= index < len(plan.slices):
        raise IndexError(f"the plan has {len(plan.slices)} slices")
    values = {each.name: getattr(plan, each.name) for each in fields(Plan)}
    return SlicePlan(**{**values, "seq_len": plan.slices[index], "slices": ()}, parent=plan, index=index)
