"""Layer 1, lives of tensors: each is defined before its use, not defined twice, and released once.

    %a = forward ...       %a becomes live
    ... (%a)               a use: %a must be live, else RT020 (never defined) or RT021 (released before)
    %a = forward ...       RT022 if %a is still live
    release (%a)           %a is no longer live; RT028 if it was not

At the end, RT023 for a tensor that is still live, and RT024 for a carried one that is not. One loop over the columns of
a stage finds all of this, linear in the operands: in plain Python for few ops, compiled for many. Messages are made
from its findings.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.support.native_loops import native
from ratrain.ratrain_ir.verifier.reporter import MAX_REPORTS

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.columns import StageColumns
    from ratrain.ratrain_ir.module import Stage
    from ratrain.ratrain_ir.verifier.reporter import Reporter

NONE = -1
UNDEFINED, ENDED, AGAIN, NOT_LIVE, CARRIED_ENDED, NEVER_RELEASED = range(6)
"""Kinds of findings."""
_ACCESSES = 100_000
"""Operands that plain Python handles in a tenth of a second: less than compiling the loop takes if it is not cached."""
ALLOWANCE = Allowance(_ACCESSES)


def check_lives(stage: Stage, columns: StageColumns, report: Reporter, *, has_releases: bool) -> None:
    """Report what is wrong with the lives of a stage's tensors.

    `has_releases` says that every step tensor must be released.
    """
    for what, op, tensor, earlier in _findings(columns, has_releases=has_releases):
        _report(what, op, tensor, earlier, stage, columns, report)


def _report(
    what: int, op: int, tensor: int, earlier: int, stage: Stage, columns: StageColumns, report: Reporter
) -> None:
    at, subject = columns.ops[op], columns.tensors[tensor]
    code, words, of_earlier, way_out = _WORDS[what]
    notes = [report.note(of_earlier, columns.ops[earlier])] if of_earlier and earlier != NONE else []
    way_out = way_out and way_out.format(subject.name)
    report.at_op(code, f"%{subject.name} {words}", stage, at, subject, notes=notes, help=way_out)


_WORDS = {
    UNDEFINED: ("RT020", "is used before it is defined", None, None),
    ENDED: ("RT021", "is used after its release", "released here", None),
    AGAIN: (
        "RT022",
        "is defined again while it is live",
        "defined here",
        "declare a separate tensor for this value, or release the first one before",
    ),
    NOT_LIVE: ("RT028", "is released but not live", "already released here", "release it once, after its last use"),
    CARRIED_ENDED: (
        "RT024",
        "is carried into the next step, but released and not defined again",
        None,
        "define it again before the step ends (a view by its all_gather), or leave it out of the release",
    ),
    NEVER_RELEASED: (
        "RT023",
        "is never released: it would leak into the next step",
        None,
        "write 'release (%{})' after its last use",
    ),
}


def _findings(columns: StageColumns, *, has_releases: bool) -> list[tuple[int, int, int, int]]:
    """Run the loop over a stage; list (kind, op, tensor, earlier op) of each finding, `NONE` without an earlier op."""
    given = columns.bounds, columns.operands, columns.ended_bounds, columns.ended, columns.carried
    tensors = len(columns.carried)
    sizes = tensors, tensors, tensors, tensors, 4 * MAX_REPORTS
    # The same function runs on lists as Python, and on arrays as machine code.
    if ALLOWANCE.take(len(columns.operands)):
        made: Any = [[value] * size for size, value in zip(sizes, (0, NONE, NONE, 0, 0), strict=True)]
        count = sweep(*given, has_releases, *made)
    else:
        made = [np.full(size, value, np.int64) for size, value in zip(sizes, (0, NONE, NONE, 0, 0), strict=True)]
        count = compiled_sweep()(*(np.asarray(each, np.int64) for each in given), has_releases, *made)
    found = [int(each) for each in made[-1][: 4 * count]]
    return list(zip(*(iter(found),) * 4, strict=True))


@cache
def compiled_sweep() -> Any:
    """Return the compiled loop."""
    return native(sweep)


def sweep(
    bounds: Any, operands: Any, ended_bounds: Any, ended: Any, carried: Any, has_releases: bool,
    live: Any, released: Any, defined: Any, assumed: Any, found: Any,
) -> int:  # fmt: skip
    """Write four numbers for each finding into `found`, as long as there is room; return the number of findings.

    Each is kind, op, tensor, earlier op. State for each tensor: whether it is `live`; the op that last `released` it
    and the op that last `defined` it (-1 if none); whether it is `assumed` live after a use before its definition, so
    that this is reported once, and the later definition is not reported at all.
    """
    count, room = 0, len(found) // 4
    for tensor in range(len(carried)):
        live[tensor] = carried[tensor]
    for op in range(len(ended_bounds)):
        # A release has no operands, and other ops end nothing, so the order of these loops does not matter.
        for place in range(0 if op == 0 else ended_bounds[op - 1], ended_bounds[op]):
            tensor = ended[place]
            if not live[tensor] and count < room:
                found[4 * count], found[4 * count + 1] = NOT_LIVE, op
                found[4 * count + 2], found[4 * count + 3] = tensor, released[tensor]
                count += 1
            live[tensor] = 0
            released[tensor] = op
        # Reads and updates: `bounds` has the exclusive ends of reads, updates, writes and scratch of each op.
        for place in range(0 if op == 0 else bounds[4 * op - 1], bounds[4 * op + 1]):
            tensor = operands[place]
            if live[tensor]:
                continue
            if count < room:
                found[4 * count], found[4 * count + 1] = UNDEFINED if released[tensor] == NONE else ENDED, op
                found[4 * count + 2], found[4 * count + 3] = tensor, released[tensor]
                count += 1
            if released[tensor] == NONE:
                live[tensor] = assumed[tensor] = 1
        # Writes. Scratch is left out: it lives only while its op runs.
        for place in range(bounds[4 * op + 1], bounds[4 * op + 2]):
            tensor = operands[place]
            # Before releases are inserted, a carried tensor may be written while it still holds the old value.
            may_be_live = assumed[tensor] or (carried[tensor] and not has_releases)
            if live[tensor] and not may_be_live and count < room:
                found[4 * count], found[4 * count + 1] = AGAIN, op
                found[4 * count + 2], found[4 * count + 3] = tensor, defined[tensor]
                count += 1
            live[tensor] = 1
            assumed[tensor] = 0
            released[tensor] = NONE
            defined[tensor] = op
    last = len(ended_bounds) - 1
    for tensor in range(len(carried)):
        is_lost = carried[tensor] and not live[tensor]
        if (is_lost or (has_releases and live[tensor] and not carried[tensor])) and count < room:
            found[4 * count] = CARRIED_ENDED if is_lost else NEVER_RELEASED
            found[4 * count + 1] = released[tensor] if is_lost else last if defined[tensor] == NONE else defined[tensor]
            found[4 * count + 2], found[4 * count + 3] = tensor, NONE
            count += 1
    return count
