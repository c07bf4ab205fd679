"""RT030: every micro-batch, or every slice of it, runs forward and backward exactly once on every stage.

Stages that only go forward, which are the first ones, have no backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.actions import COMPUTES, Part, PlacedAction, part_text
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.verifier.schedule_numbers import parts_text, ranges_text

if TYPE_CHECKING:
    from ratrain.ratrain_ir.verifier.schedule_findings import ScheduleFindings

_HALVES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def check_complete(found: ScheduleFindings) -> None:
    """Report missing stages, micro-batches and slices, and actions that happen twice or by halves."""
    _check_stages_named(found)
    _check_once(found)
    _check_forward_only(found)
    by_stage: dict[int, set[Part]] = {stage: set() for stage in found.stages}
    named: dict[Part, PlacedAction] = {}
    for action in found.table.actions:
        if action.micro_batch is not None:
            named.setdefault(action.part, action)
            if action.kind in COMPUTES:
                by_stage[action.stage].add(action.part)
    if _cuts_in_two_ways(found, named):
        return
    for stage in sorted(by_stage):
        present = by_stage[stage]
        if not present:
            found.report("RT030", f"stage {stage} never runs forward or backward", found.stages[stage][0])
        elif len(present) < len(named):
            text = f"stage {stage} never runs {parts_text(named.keys() - present)}, which the schedule names elsewhere"
            found.report("RT030", text, found.stages[stage][0])
        for part in sorted(present, key=_numbers):
            _check_halves(found, stage, part)
    _check_micro_batches_named(found, named)
    _check_slices_named(found, named)


def _numbers(part: Part) -> tuple[int, int]:
    micro_batch, place = part
    assert micro_batch is not None
    return micro_batch, -1 if place is None else place


def _check_stages_named(found: ScheduleFindings) -> None:
    for first, last, after in _gaps(found.stages):
        text = f"no rank runs {ranges_text('stage', [(first, last)])}, but there is a stage {after}"
        found.report("RT030", text, found.stages[after][0], found.notes_of_empty())


def _gaps(numbers: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return (first, last, number after it) of each run of numbers from 0 on that is missing."""
    return [(a + 1, b - 1, b) for a, b in pairwise([-1, *sorted(numbers)]) if b > a + 1]


def _cuts_in_two_ways(found: ScheduleFindings, named: Mapping[Part, PlacedAction]) -> bool:
    """Report the first micro-batch that is whole in one place and in slices in another; return True if there is one."""
    cuts = (part for part in sorted(named, key=_numbers) if part[1] is not None)
    cut, whole = next(((named[part], named[part[0], None]) for part in cuts if (part[0], None) in named), (None, None))
    if cut is None or whole is None:
        return False
    text = f"micro-batch {cut.micro_batch} is cut into slices in '{cut}', but whole in '{whole}'"
    found.report("RT030", text, cut, [found.note("whole here", whole)])
    return True


def _check_micro_batches_named(found: ScheduleFindings, named: Mapping[Part, PlacedAction]) -> None:
    numbers = {m for m, _ in named if m is not None}
    gaps = _gaps(numbers)
    if gaps:
        last = max(numbers)
        example = next(action for action in found.table.actions if action.micro_batch == last)
        ranges = [(first, end) for first, end, _ in gaps]
        text = f"no stage runs {ranges_text('micro-batch', ranges)}, but there is a micro-batch {last}"
        found.report("RT030", text, example)


def _check_slices_named(found: ScheduleFindings, named: Mapping[Part, PlacedAction]) -> None:
    slices: dict[int, set[int]] = {}
    for micro_batch, place in named:
        if micro_batch is not None and place is not None:
            slices.setdefault(micro_batch, set()).add(place)
    for micro_batch, places in sorted(slices.items()):
        gaps = _gaps(places)
        if gaps:
            ranges = [(first, end) for first, end, _ in gaps]
            last = named[micro_batch, gaps[-1][2]]
            text = f"no stage runs {ranges_text('slice', ranges)} of micro-batch {micro_batch}, but there is '{last}'"
            found.report("RT030", text, last)


def _check_once(found: ScheduleFindings) -> None:
    for action in found.table.actions:
        if action.kind in COMPUTES:
            first = found.index.find(action.kind, action.stage, action.part)
            if first is not None and first is not action:
                found.report("RT030", f"'{action}' happens twice", action, [found.note("first done here", first)])


_OF_GRADIENTS = COMPUTES - {ActionKind.FORWARD} | {ActionKind.SEND_B, ActionKind.RECV_B, ActionKind.REDUCE_GRAD}


def _check_forward_only(found: ScheduleFindings) -> None:
    """Report what makes, moves or sums gradients of stages that only go forward."""
    if not found.forward_only:
        return
    if found.forward_only > found.last_stage:
        text = f"{found.forward_only} stages only go forward, and stage {found.last_stage} is the last one: none trains"
        found.report("RT030", text, found.stages[found.last_stage][0])
        return
    for action in found.table.actions:
        # the first stage with a backward makes no gradient of its input, so it sends none
        lowest = found.forward_only + (action.kind is ActionKind.SEND_B)
        if action.kind in _OF_GRADIENTS and action.stage < lowest:
            text = f"'{action}': nothing below stage {found.forward_only} trains, so there is no gradient"
            found.report("RT030", text, action, way_out="delete it: a stage below only goes forward")


def _check_halves(found: ScheduleFindings, stage: int, part: Part) -> None:
    """Check that a part has a forward, and a backward in one piece or in both halves."""
    forward = found.index.forward(stage, part)
    whole = found.index.find(ActionKind.BACKWARD, stage, part)
    made, weight = (found.index.find(kind, stage, part) for kind in _HALVES)
    m = part_text(part)
    if forward is None:
        other = whole or made or weight
        assert other is not None
        found.report("RT030", f"'{other}' has no forward: '{stage}F{m}' is missing", other)
    half = made or weight
    if whole is not None:
        if half is not None:
            notes = [found.note("the whole backward", whole)]
            found.report("RT030", f"'{half}' repeats what '{whole}' does", half, notes)
    elif made is not None and weight is None:
        found.report("RT030", f"'{made}' has no weight half: '{stage}W{m}' is missing", made)
    elif weight is not None and made is None:
        found.report("RT030", f"'{weight}' has no input half: '{stage}I{m}' is missing", weight)
    elif half is None and forward is not None and stage >= found.forward_only:
        text = f"'{forward}' has no backward: '{stage}B{m}' (or '{stage}I{m}' and '{stage}W{m}') is missing"
        found.report("RT030", text, forward)
