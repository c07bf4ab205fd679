"""`overlap-tensor{pieces=auto|apart|merged halves=auto|whole|split}`: what tensor peers exchange runs beside products that do not need it.

Whatever a block reads was gathered or summed just before, so with one list after the other compute waits for every exchange. Three things
hide them, none of which is a new op or changes a bit:

- The input of a backward is gathered a block earlier, beside the input gradient of the block above; recovery from it then runs while
  that block's gradient is exchanged.
- `halves=split`: each backward is its two halves, one right after the other: the weight half runs while the gradient of the input is exchanged.
- `pieces=merged`: neighbouring passes of different pieces (two slices, two micro-batches, a forward and a backward) are made one list, block by
  block, in the order in which their ops could start (Domino, Wang et al., 2024).

    backward mlp.1, reduce_rows, gather_rows, gather_rows, backward attention.1, ...      becomes, with halves,
    gather_rows, backward_input mlp.1, [backward_weight mlp.1 | reduce_rows, gather_rows],
    backward_input attention.1, ...

A merged pass takes as long as both, which the next stage waits for. So under `auto` what there is to choose is tried, the whole step simulated
each time, and the fastest taken; where nothing is faster the module stays as it is. Halves and pieces hold more at once: what comes after, as
`recompute{policy=auto}` or `joint-order`, keeps as much less. Ways that fit as they are go before those that would with everything
recovered, and these before all others.
The order of the schedule stays what it was: two forwards, two backwards or a forward and the backward behind it are merged, never a
backward and the forward behind it, which would be a piece more in flight.

It comes after the order of the schedule, best before recovery, and before addresses. Strategies that decide with `joint-order` have it where
a plan has tensor peers; without peers it changes nothing, and has no options.
"""

from __future__ import annotations

from functools import cached_property
from itertools import groupby, product
from math import inf
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from ratrain.passes.memory.trial import Trials, step_seconds_at_own_addresses
from ratrain.passes.pass_base import Decision, Idle, Pass, PassContext
from ratrain.passes.placement.split_backward import split_backwards
from ratrain.passes.placement.tensor_merging import halves_behind_the_embedding, hoisted, merged
from ratrain.passes.placement.work_groups import split_into_groups
from ratrain.passes.recovery.rewriting import CHOICES, rewritten, same_for_all
from ratrain.passes.state.insert_prefetch import InsertPrefetchPass
from ratrain.passes.state.prefetch_depth import DEPTHS
from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.analysis.progress import blocking_cycle
from ratrain.ratrain_ir.model.blocks import SPLIT_KINDS, any_gathered_within_step, block_chain
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.ops.base import Op
from ratrain.ratrain_ir.ops.compute import Backward, Recompute
from ratrain.ratrain_ir.schedules.action import Work
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Stage

PIECES = ("auto", "apart", "merged")
HALVES = ("auto", "whole", "split")


@frozen
class _Run:
    """Ops that follow one another and serve one pass of a piece; what serves none belongs to the run before it."""

    is_forward: bool
    work: Work
    ops: tuple[Op, ...]

    def goes_with(self, later: _Run) -> bool:
        """Whether a later run may be merged with this one: of another piece, and with no more pieces in flight."""
        return self.work != later.work and (self.is_forward or not later.is_forward)


@frozen(slots=False, eq=False)
class _Way:
    """A module rewritten in one way, and its simulated step, were no bytes used twice; infinite where no step of it would end."""

    seconds: float
    module: Module
    context: PassContext
    halves: str = ""
    """how backwards are; empty where nothing is rewritten"""
    pairs: int = 0

    @cached_property
    def fits(self) -> bool:
        """Whether there are the bytes for it as it is."""
        trials, capacity = Trials(self.module, self.context), self.capacity
        if any(trials.occupancy(stage).peak_bytes(0.0) > capacity for stage in self.module.stages):
            return False  # as long as nothing is recovered yet: no arena needs to be tried
        return all(trials.fits(stage, 0.0, capacity) for stage in self.module.stages)

    @cached_property
    def fits_recovered(self) -> bool:
        """Whether there are with everything recovered."""
        if any(type(op) is Recompute for stage in self.module.stages for op in stage.ops):
            return self.fits
        (everything,) = CHOICES["full"]
        trials, capacity = Trials(self.module, self.context), self.capacity
        recovered = (rewritten(stage, same_for_all(everything)) for stage in self.module.stages)
        return not any(trials.occupancy(stage).peak_bytes(0.0) > capacity for stage in recovered)

    @property
    def capacity(self) -> int:
        """Bytes for tensors."""
        return self.context.target.capacity(self.module).left

    def __str__(self) -> str:
        return f"backwards {self.halves}, {self.pairs} pairs of passes merged" if self.halves else "as it was"


def _first_that_fits(ways: Sequence[_Way]) -> _Way:
    """The first way that fits as it is, or else with everything recovered, or else the first."""
    recovered = (way for way in ways if way.fits_recovered)
    return next((way for way in ways if way.fits), None) or next(recovered, ways[0])


def _by_seconds(ways: Iterable[_Way]) -> list[_Way]:
    return sorted(ways, key=lambda way: way.seconds)


@frozen
class OverlapTensorPass(Pass):
    """Run what tensor peers exchange beside products that do not need it."""

    name: ClassVar[str] = "overlap-tensor"
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.EXCHANGES})
    pieces: str = field(default="auto", metadata={"choices": PIECES})
    """Whether neighbouring passes of different pieces are merged."""
    halves: str = field(default="auto", metadata={"choices": HALVES})
    """Whether backwards are split, each right where it is."""

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """All without tensor peers."""
        del model
        if plan.tp == 1:
            for option in ("pieces", "halves"):
                why = "without tensor peers (tp = 1) there are no exchanges to hide"
                yield Idle(option, why, "leave it out, or use tp = 2 or more")

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage in the fastest of the ways that are open and have most room.

        Raises `DiagnosticError` RT073 where passes are to be merged and none can be, or backwards to be whole or split that are split already.
        """
        if module.plan.tp == 1:
            context.statistics["tensor peers"] = "none: nothing changed"
            return
        if self.halves != "auto" and not any(_can_be_split(op) for stage in module.stages for op in stage.ops):
            text = f"'halves={self.halves}' of '{self.name}' changes nothing: the order of the schedule has all backwards in halves already"
            fail("RT073", text, help="leave it out, or use a schedule with whole backwards, as 1f1b")
        before = _Way(_seconds(module, context), module, context)
        halves = _open(self.halves, ("whole", "split"))
        tried = [self.rewritten(module, context, each, "none") for each in halves]
        if self.pieces != "apart":
            apart = _first_that_fits(_by_seconds(tried))
            worth_it = (apart.halves,) if apart.fits or apart.fits_recovered else halves
            every = (self.rewritten(module, context, *each) for each in product(worth_it, ("alike", "all")))
            merging = _by_seconds(way for way in every if way.seconds < inf)
            tried = [_first_that_fits([*merging, apart])] if self.pieces == "merged" else [*tried, *merging]
            if self.pieces == "merged" and not any(way.pairs for way in tried):
                why = "of those that merge, none fits" if merging else "no two passes of a stage may be merged"
                text = f"'pieces=merged' of '{self.name}' is not possible: {why}"
                fail("RT073", text, help="use pieces=auto, or more micro-batches or slices in the plan")
        stays = [before] if self.pieces == self.halves == "auto" else []
        best = _first_that_fits(_by_seconds([*stays, *tried]))
        if best is not before:
            module.adopt(best.module)
        context.statistics["chosen"] = str(best)
        context.statistics["simulated step"] = f"{best.seconds:.6g} s, {before.seconds:.6g} s before"

    def rewritten(self, module: Module, context: PassContext, halves: str, pairs: str) -> _Way:
        """A draft of the module rewritten in one way. `pairs`: which passes are merged, none, those that are alike, or all that go together.

        Where none are to be had, or the stages would then wait for one another in a circle, it takes infinitely long.
        """
        draft = module.draft()
        count = 0
        for stage in draft.stages:
            stage.ops = hoisted(stage.ops)
            if halves == "split":
                split_backwards(draft, stage)
                stage.ops = halves_behind_the_embedding(stage.ops)
            if pairs != "none":
                count += _merge(draft, stage, Trials(draft, context), mixed=pairs == "all")
        if pairs != "none" and (not count or blocking_cycle(draft, rendezvous=True) is not None):
            return _Way(inf, draft, context, halves, count)
        return _Way(_seconds(draft, context), draft, context, halves, count)


def _can_be_split(op: Op) -> bool:
    return type(op) is Backward and op.block.kind in SPLIT_KINDS


def _seconds(module: Module, context: PassContext) -> float:
    """Seconds of a step, were no bytes used twice and no view gathered within the step only where it is used.

    What comes after this pass gathers these ahead. Where each is waited for, that hides what peers exchange meanwhile.
    """
    if any_gathered_within_step(module.plan, block_chain(module.model)):
        module = module.draft()
        for stage in module.stages:
            InsertPrefetchPass(DEPTHS[-1]).rewrite(stage, Trials(module, context))
    return step_seconds_at_own_addresses(module, context)


def _open(option: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    return choices if option == "auto" else (option,)


def _merge(module: Module, stage: Stage, trials: Trials, *, mixed: bool) -> int:
    """Merge the pairs of a stage's passes; how many."""
    ends = {id(op) for op, _ in chunk_actions(module, stage)}
    ops: list[Op] = []
    count = 0
    for run, partner in _pairs(_runs(module, stage), mixed=mixed):
        if partner is None:
            ops += run.ops
            continue
        one = merged(run.ops, partner.ops, _within(ends, run, partner), lambda op: trials.op_seconds(stage, op))
        count += one != [*run.ops, *partner.ops]
        ops += one
    stage.ops = ops
    return count


def _within(ends: Collection[int], *runs: _Run) -> set[int]:
    return {id(op) for run in runs for op in run.ops if id(op) in ends}


def _runs(module: Module, stage: Stage) -> list[_Run]:
    """The list of a stage, run by run."""
    groups = split_into_groups(stage, module.topology)
    served: dict[int, tuple[bool, Work]] = {}
    for forward, passes in ((True, groups.forward), (False, groups.backward), (False, groups.weight)):
        for work, ops in passes.items():
            served |= dict.fromkeys(map(id, ops), (forward, work))
    last: tuple[bool, Work] = (True, (-1, -1, -1))
    keys = []
    for op in stage.ops:
        last = served.get(id(op), last)
        keys.append(last)
    places = iter(stage.ops)
    return [_Run(*key, tuple(next(places) for _ in same)) for key, same in groupby(keys)]


def _pairs(runs: Sequence[_Run], *, mixed: bool) -> Iterator[tuple[_Run, _Run | None]]:
    """Runs with the one behind, where the two go together; where forwards may go with backwards (`mixed`), they do so first."""
    at = 0
    while at < len(runs):
        here = runs[at]
        behind, beyond = (runs[at + step] if at + step < len(runs) else None for step in (1, 2))
        fits = behind is not None and here.goes_with(behind)
        if fits and behind is not None and here.is_forward != behind.is_forward:
            fits = mixed
        elif fits and mixed and behind is not None and beyond is not None and behind.is_forward:
            fits = beyond.is_forward or not behind.goes_with(beyond)
        yield here, behind if fits else None
        at += 1 + fits
