"""The symbolic run over numbers alone, compiled: whether ops find the values they mean, where `symbolic_traces` has their steps.

A value is a number: `(template * span) + count`. Steps of a trace stand one after the other; of those that say so the count is the
micro-batch more.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ratrain.ratrain_ir.support.native_loops import native

NONE = -1
ONCE, EXPECT, SET, MADE_FORWARD, RECOVER, AMONG = range(6)
"""What a step is: something happens, for the only time; an operand must hold a value; it holds one from here on; it was made by a forward;
it was made by a recovery; one of the operands that are read holds a value."""


@cache
def compiled_sweep() -> Any:
    """The loop."""
    return native(sweep)


def sweep(
    kinds: Any, micro_batches: Any, bounds: Any, operands: Any,
    begins: Any, whats: Any, places: Any, values: Any, shifts: Any, owners: Any, owner_shifts: Any, from_before: Any,
    carried: Any, held: Any, carried_in: Any, owned: Any, recovered: Any, done: Any,
) -> int:  # fmt: skip
    """Run all ops; the position of the first that finds something else than it should, or whose operands are not all different, else -1.

    Trace `2 * kind` is that of ops of a kind without a micro-batch or of the first, the one behind it that of the others.
    """
    for op in range(len(kinds)):
        kind = kinds[op]
        if kind == NONE:
            continue
        micro_batch = max(micro_batches[op], 0)
        first = 0 if op == 0 else bounds[4 * op - 1]
        for place in range(first, bounds[4 * op + 2]):
            for other in range(first, place):
                if operands[other] == operands[place]:
                    return op
        trace = 2 * kind + (micro_batch > 0)
        for step in range(begins[trace], begins[trace + 1]):
            what = whats[step]
            value = values[step] + shifts[step] * micro_batch
            if what == ONCE:
                if done[value]:
                    return op
                done[value] = 1
                continue
            if what == AMONG:
                found = False
                for place in range(first, bounds[4 * op]):
                    if held[operands[place]] == value:
                        found = True
                if not found:
                    return op
                continue
            tensor = operands[first + places[step]]
            if what == MADE_FORWARD:
                if recovered[tensor]:
                    return op
                continue
            if what == RECOVER:
                recovered[tensor] = 1
                continue
            owner = owners[step] + owner_shifts[step] * micro_batch
            if what == SET:
                held[tensor] = value
                recovered[tensor] = 0
            else:
                if held[tensor] != NONE or not (carried[tensor] and from_before[step]):
                    if held[tensor] != value:
                        return op
                    continue
                held[tensor] = carried_in[tensor] = value
            if carried[tensor]:
                if owned[tensor] == NONE:
                    owned[tensor] = owner
                if owned[tensor] != owner:
                    return op
    return NONE
