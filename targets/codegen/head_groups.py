"""Copies between rows of all heads side by side and groups of heads below one another (`Plan.context_groups`).

Products, norms and rotations take rows of all heads; exchanges of keys, and attention with a group, neighbouring rows:

    2 rows, 2 groups:   row 0 of g0 | row 0 of g1         row 0 of g0
                        row 1 of g0 | row 1 of g1    ->   row 1 of g0
                                                          row 0 of g1
                                                          row 1 of g1

Without groups both are the same operand, and nothing is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.slots import KEY_SLOTS

if TYPE_CHECKING:
    from ratrain.targets.codegen.builder import Builder


def side_by_side(builder: Builder, name: str) -> str:
    """Return the operand for what all heads have of each row; with groups of heads an intermediate."""
    if builder.plan.context_groups == 1:
        return builder.slot(name)
    width = builder.model.kv_size if name in KEY_SLOTS else builder.model.q_size
    return builder.temporary(f"{name}_rows", builder.rows, width)


def put_side_by_side(builder: Builder, name: str) -> str:
    """Return what all heads have of each row of an operand; add its copy where groups lie below one another."""
    if builder.plan.context_groups == 1:
        return name
    rows = side_by_side(builder, name)
    group_heads(builder, name, rows, inverse=True)
    return rows


def group_heads(builder: Builder, src: str, dst: str, *, inverse: bool = False) -> None:
    """Add a copy with groups of heads below one another, or (`inverse`) side by side again."""
    builder.step("group_columns", {"src": src, "dst": dst}, groups=builder.plan.context_groups, inverse=inverse)
