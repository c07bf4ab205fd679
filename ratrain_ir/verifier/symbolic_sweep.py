"""The symbolic run over numbers, compiled: ops must find the values they mean, by the steps of `symbolic_traces`.

A value is a number: `(template * span) + count`. Steps of a trace stand one after the other; a step that shifts has the
micro-batch added to its count.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ratrain.ratrain_ir.support.loops import part
from ratrain.ratrain_ir.support.native_loops import native

NONE = -1
ONCE, EXPECT, SET, MADE_FORWARD, RECOVER, AMONG = range(6)
"""Steps: something happens, for the only time; an operand must hold a value; it holds one from here on; it was made by
a forward; it was made by a recovery; one of the operands that are read holds a value."""


class Traces(NamedTuple):
    """Steps of traces, one trace behind the other.

    Trace `2 * kind` is that of ops of a kind without a micro-batch or of the first; the one behind it is that of the
    others.
    """

    begins: Any
    """of each trace its first step; one more at the end"""
    whats: Any
    places: Any
    """of each step the operand, by its place among those of the op"""
    values: Any
    shifts: Any
    """whether the value grows with the micro-batch"""
    owners: Any
    owner_shifts: Any
    from_before: Any
    """whether the value may come from the step before"""


class Holdings(NamedTuple):
    """Values and owners of tensors: arrays by tensor."""

    carried: Any
    held: Any
    carried_in: Any
    owned: Any
    recovered: Any


@cache
def compiled_sweep() -> Any:
    """Compile the loop."""
    return native(sweep)


def sweep(
    kinds: Any, micro_batches: Any, bounds: Any, operands: Any, traces: Traces, tensors: Holdings, done: Any
) -> int:  # fmt: skip
    """Run all ops; return the position of the first that finds something wrong, or has an operand twice, else -1."""
    for op in range(len(kinds)):
        if kinds[op] == NONE:
            continue
        micro_batch = max(micro_batches[op], 0)
        first = 0 if op == 0 else bounds[4 * op - 1]
        for place in range(first, bounds[4 * op + 2]):
            for other in range(first, place):
                if operands[other] == operands[place]:
                    return op
        trace = 2 * kinds[op] + (micro_batch > 0)
        for step in range(traces.begins[trace], traces.begins[trace + 1]):
            value = traces.values[step] + traces.shifts[step] * micro_batch
            if traces.whats[step] == ONCE:
                if done[value]:
                    return op
                done[value] = 1
            elif traces.whats[step] == AMONG:
                found = False
                for place in range(first, bounds[4 * op]):
                    if tensors.held[operands[place]] == value:
                        found = True
                if not found:
                    return op
            elif not _agrees(step, operands[first + traces.places[step]], value, micro_batch, traces, tensors):
                return op
    return NONE


@part
def _agrees(step: int, tensor: int, value: int, micro_batch: int, traces: Any, tensors: Any) -> bool:
    """Do a step with an operand; tell whether it holds what the step expects, and the tensor belongs to that."""
    what = traces.whats[step]
    if what == MADE_FORWARD:
        return not tensors.recovered[tensor]
    if what == RECOVER:
        tensors.recovered[tensor] = 1
        return True
    if what == SET:
        tensors.held[tensor] = value
        tensors.recovered[tensor] = 0
    elif tensors.held[tensor] != NONE or not (tensors.carried[tensor] and traces.from_before[step]):
        return bool(tensors.held[tensor] == value)
    else:
        tensors.held[tensor] = tensors.carried_in[tensor] = value
    if not tensors.carried[tensor]:
        return True
    owner = traces.owners[step] + traces.owner_shifts[step] * micro_batch
    if tensors.owned[tensor] == NONE:
        tensors.owned[tensor] = owner
    return bool(tensors.owned[tensor] == owner)
