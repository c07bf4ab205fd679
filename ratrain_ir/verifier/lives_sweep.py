"""The lives of a stage's tensors over numbers alone, compiled: whether RT020 - RT024 and RT028 find nothing.

It only accepts; what is wrong, `structure` says.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ratrain.ratrain_ir.support.native_loops import native


@cache
def compiled_sweep() -> Any:
    """The loop."""
    return native(sweep)


def sweep(bounds: Any, operands: Any, ended_bounds: Any, ended: Any, carried: Any, live: Any) -> bool:
    """Whether every op finds what it uses live and what it defines not, and at the end exactly what is carried is live.

    Ops are given as in `StageNumbersOfText`. `live` has a place for each tensor. Everything that is not carried must be released.
    """
    for tensor in range(len(carried)):
        live[tensor] = carried[tensor]
    for op in range(len(ended_bounds)):
        first = 0 if op == 0 else ended_bounds[op - 1]
        for place in range(first, ended_bounds[op]):  # of a release
            if not live[ended[place]]:
                return False
            live[ended[place]] = False
        first = 0 if op == 0 else bounds[4 * op - 1]
        for place in range(first, bounds[4 * op + 1]):
            if not live[operands[place]]:
                return False
        for place in range(bounds[4 * op + 1], bounds[4 * op + 2]):
            if live[operands[place]]:
                return False
            live[operands[place]] = True
    changed = 0
    for tensor in range(len(carried)):
        changed += live[tensor] != carried[tensor]
    return changed == 0
