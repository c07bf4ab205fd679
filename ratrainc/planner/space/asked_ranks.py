"""Numbers of ranks that a search is asked for, of any kind: tensor-parallel, context or expert ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail

Problem = tuple[str, str]
"""Why ranks cannot be, and a way out."""


def problem_of(check: Callable[..., object], *values: Any) -> Problem | None:
    """Return the first problem that a check of a plan raises, None without one."""
    try:
        check(*values)
    except DiagnosticError as error:
        return error.diagnostics[0].message, error.diagnostics[0].help or ""
    return None


def check_asked(
    asked: Sequence[int], clusters: int, kind: str, key: str, problem: Callable[[int], Problem | None]
) -> None:
    """Raise `DiagnosticError` RT064 if a number of ranks exceeds the clusters or has a problem.

    The way out names the option of the plan's `key`.
    """
    for number in asked:
        if number > clusters:
            text = f"{number} {kind} ranks take more than the {clusters} clusters"
            fail("RT064", text, help=f"use more clusters, or fewer {kind} ranks (--{key})")
        if (found := problem(number)) is not None:
            text, way_out = found
            fail("RT064", text, help=way_out.replace(f"{key} = ", f"--{key} "))
