"""Compiled loop of the symbolic run: runs the steps that `symbolic_traces` recorded, over numbers.

A value is a number, `template * span + count`: what it is of, and a count of micro-batches. The steps of all traces
stand one after the other. A step that shifts adds the op's micro-batch to its count. The loop costs one pass over the
steps of each op, and only answers yes or no; `SymbolicRun` finds the words.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ratrain.ratrain_ir.support.loops import part
from ratrain.ratrain_ir.support.native_loops import native

NONE = -1
ONCE, EXPECT, SET, MADE_FORWARD, RECOVER, AMONG = range(6)
"""Kinds of steps.

`ONCE`: something happens, and must not have happened before. `EXPECT`: an operand must hold a value. `SET`: it holds a
value from here on. `MADE_FORWARD`: it must not come from a recovery. `RECOVER`: it comes from a recovery. `AMONG`: one
of the operands that are read must hold a value.
"""


class Traces(NamedTuple):
    """Steps of traces, one trace after the other.

    Trace `2 * kind` is of ops of that kind without a micro-batch, or with the first one; trace `2 * kind + 1` is of
    those with later micro-batches.
    """

    begins: Any
    """first step of each trace, and the end of the last"""
    whats: Any
    places: Any
    """operand of each step, by its place among the op's operands"""
    values: Any
    shifts: Any
    """1 if the value grows with the micro-batch"""
    owners: Any
    owner_shifts: Any
    from_before: Any
    """1 if the value may be left by the step before, in a carried tensor"""


class Holdings(NamedTuple):
    """State of tensors: arrays indexed by tensor, `NONE` where there is no value."""

    carried: Any
    held: Any
    carried_in: Any
    owned: Any
    recovered: Any


@cache
def compiled_sweep() -> Any:
    """Return the compiled loop."""
    return native(sweep)


def sweep(
    kinds: Any, micro_batches: Any, bounds: Any, operands: Any, traces: Traces, tensors: Holdings, done: Any
) -> int:  # fmt: skip
    """Run all ops; return the position of the first that is wrong, or that has an operand twice, else -1.

    `done` is indexed by value, and marks what has happened.
    """
    for op in range(len(kinds)):
        if kinds[op] == NONE:
            continue
        micro_batch = max(micro_batches[op], 0)
        # Operands are in the order reads, updates, writes; `bounds` has their exclusive ends, then that of scratch.
        first = 0 if op == 0 else bounds[4 * op - 1]
        for place in range(first, bounds[4 * op + 2]):
            # Traces were recorded with distinct operands; with one tensor in two places the steps could differ.
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
    """Execute a step on one operand; return False if the operand does not hold what the step expects.

    A carried tensor, moreover, must belong to one thing throughout (its owner: the value without the step).
    """
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
        # A carried tensor without a value holds, at its first reader, what that reader takes it for; the end of the
        # step is compared with that (`carried_in`).
        tensors.held[tensor] = tensors.carried_in[tensor] = value
    if not tensors.carried[tensor]:
        return True
    owner = traces.owners[step] + traces.owner_shifts[step] * micro_batch
    if tensors.owned[tensor] == NONE:
        tensors.owned[tensor] = owner
    return bool(tensors.owned[tensor] == owner)
