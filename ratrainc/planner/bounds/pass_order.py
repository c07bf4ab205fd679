"""Passes of a schedule in an order in which they can run, as numbers that a compiled loop reads.

A pass is a forward, a backward or half of one, of one micro-batch through one chunk. The two halves of a backward that
follow each other are one pass. Example, 1F1B on two stages with two micro-batches, stage by stage and merged:

    stage 0: F0 F1 B0 B1        stage 1: F0 B0 F1 B1        together: F0 F1 | F0 B0 F1 B1 | B0 B1
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.passes.placement.overlap_tensor import pairs_of
from ratrain.ratrain_ir.schedules.action import Action, ActionKind, Work
from ratrain.ratrain_ir.schedules.named import SCHEDULES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape

FORWARD, BACKWARD, INPUT_HALF, WEIGHT_HALF, BOTH_HALVES = range(5)
"""Kinds of passes."""
_KINDS = {
    (ActionKind.FORWARD,): FORWARD,
    (ActionKind.BACKWARD,): BACKWARD,
    (ActionKind.BACKWARD_INPUT,): INPUT_HALF,
    (ActionKind.BACKWARD_WEIGHT,): WEIGHT_HALF,
    (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT): BOTH_HALVES,
}
MERGINGS = ("none", "alike", "all")
"""Pairs of neighbouring passes that `overlap-tensor` may have merged, on all stages: none, two forwards or two
backwards, or these and forwards with the backward behind them."""
Integers = NDArray[np.int64]


@frozen(eq=False)
class PassOrder:
    """Passes of all stages, each behind those it waits for; arrays have one entry a pass."""

    stage: Integers
    kind: Integers
    chunk: Integers
    source: Integers
    """place of the pass whose output it takes; -1 if it takes none of another pass"""
    sent: Integers
    """1 if that output comes from another stage, else 0"""
    joins: Integers
    """1 if it is merged with the pass before it on its stage, else 0"""
    alone: Integers
    """1 for a forward that is merged with no pass, before a gradient of its stage may be final; else 0"""


@frozen
class Pass:
    """A pass: one action of an order, or both halves of a backward that follow each other."""

    actions: list[Action]

    @property
    def is_forward(self) -> bool:
        """True if it is a forward."""
        return self.actions[0].kind is ActionKind.FORWARD

    @property
    def work(self) -> Work:
        """The chunk, micro-batch and slice of its actions."""
        return self.actions[0].work

    @property
    def made(self) -> tuple[bool, Work] | None:
        """Key of the tensor that it makes for another pass; None for weight halves."""
        return None if self.actions[0].kind is ActionKind.BACKWARD_WEIGHT else (self.is_forward, self.work)

    def needed(self, chunks: int) -> tuple[bool, Work] | None:
        """Return the key of the tensor that it takes of another pass; None if it takes none."""
        chunk, micro_batch, piece = self.work
        if self.made is None or (self.is_forward and chunk == 0):
            return None
        before = chunk - 1 if self.is_forward else chunk + 1
        # the last chunk goes back from what its own forward made
        return (self.is_forward, (before, micro_batch, piece)) if before < chunks else (True, self.work)


@lru_cache(maxsize=1024)
def pass_order(schedule: str, shape: PipelineShape, merging: str = "none") -> PassOrder:
    """Return the passes of a schedule of whole micro-batches, merged as one of `MERGINGS` says."""
    stages = [grouped(passes_of(schedule, shape, stage), merging) for stage in range(shape.stages)]
    waiting = [_placed(groups, shape.micro_batches - 1) for groups in stages]
    chunk_stages = shape.chunk_stages
    at = [0] * shape.stages
    places: dict[tuple[bool, Work], int] = {}
    rows: list[tuple[int, ...]] = []
    found = -1
    while found < len(rows):
        found = len(rows)
        for stage, passes in enumerate(waiting):
            while at[stage] < len(passes):
                here, joins, alone = passes[at[stage]]
                needed = here.needed(len(chunk_stages))
                if needed is not None and needed not in places:
                    break
                source = -1 if needed is None else places[needed]
                sent = needed is not None and chunk_stages[needed[1][0]] != stage
                if here.made is not None:
                    places[here.made] = len(rows)
                kind = _KINDS[tuple(action.kind for action in here.actions)]
                rows.append((stage, kind, here.work[0], source, int(sent), joins, alone))
                at[stage] += 1
    return PassOrder(*np.array(rows, np.int64).T.copy())


def _placed(groups: list[tuple[Pass, ...]], last: int) -> list[tuple[Pass, int, int]]:
    """Return the passes of a stage, each with its place in its group and 1 if it is a forward alone (`PassOrder`).

    `last` is the last micro-batch, whose backwards make gradients final.
    """
    found: list[tuple[Pass, int, int]] = []
    before = True
    for group in groups:
        before = before and all(each.is_forward or each.work[1] < last for each in group)
        alone = before and len(group) == 1 and group[0].is_forward
        found += [(each, place, int(alone)) for place, each in enumerate(group)]
    return found


def passes_of(schedule: str, shape: PipelineShape, stage: int) -> list[Pass]:
    """Return the passes of a stage in its order."""
    passes: list[Pass] = []
    for action in SCHEDULES[schedule].actions(shape, stage):
        halves = passes and action.kind is ActionKind.BACKWARD_WEIGHT and not passes[-1].is_forward
        if halves and passes[-1].work == action.work:
            passes[-1].actions.append(action)
        else:
            passes.append(Pass([action]))
    return passes


def grouped(passes: list[Pass], merging: str) -> list[tuple[Pass, ...]]:
    """Return the passes of a stage, those that are merged together, under one of `MERGINGS`."""
    if merging == "none":
        return [(each,) for each in passes]
    return [(each,) if other is None else (each, other) for each, other in pairs_of(passes, mixed=merging == "all")]
