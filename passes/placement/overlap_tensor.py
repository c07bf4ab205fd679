"""`overlap-tensor{pieces=auto|apart|merged halves=auto|whole|split}`: hides exchanges within forwards and backwards.

    backward mlp.1, reduce_rows, gather_rows, gather_rows, backward attention.1, ...      becomes, with halves,
    gather_rows, backward_input mlp.1, [backward_weight mlp.1 | reduce_rows, gather_rows],
    backward_input attention.1, ...

Tensor-parallel, context and expert ranks exchange activations on the tensor engine. A block reads what was exchanged
just before, so in list order compute waits for every exchange. Three rewrites hide exchanges behind products that do
not need them. None adds a kind of op or changes a bit of the results:

- What a backward gathers again, its input or keys, is gathered a block earlier, while the input gradient of the block
  above runs. Recovery from it then runs while that block's gradient is exchanged.
- `halves=split`: each backward becomes its two halves, one right after the other. The weight half runs while the
  gradient of the input is exchanged.
- `pieces=merged`: neighbouring passes of different pieces (two slices, two micro-batches, a forward and a backward)
  become one list, block by block, in the order in which their ops could start (Domino, Wang et al., 2024). Where all
  tensors do not fit, a forward keeps pace with the backward merged with it, so that the two hold about what one does.

A merged pass takes as long as both, and the next stage waits for it. So `auto` tries the choices, simulates the whole
step for each, and takes the fastest; if none is faster the module stays unchanged. Halves and merged pieces hold more
tensors at once, so later passes (`recompute{policy=auto}`, `joint-order`) keep that much less. Rewrites that fit the
memory are preferred to those that fit only with everything recomputed, and these to all others. The order of the
schedule stays: two forwards, two backwards, or a forward and the backward after it are merged, never a backward and the
forward after it, which would put one more piece in flight. Cost: one simulated step per rewrite tried, at most eight
with `auto`.

The pass runs after placement, best before recovery, and before addresses. Strategies with `joint-order` contain it
where a plan has such ranks (tp, cp or ep above 1). Without, it changes nothing and has no options. `halves=auto` splits
backwards of tensor-parallel ranks alone.
"""

from __future__ import annotations

from functools import cached_property
from itertools import groupby, product
from math import inf
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from attrs import field, frozen

from ratrain.passes.pass_base import Decision, Idle, Pass, PassContext
from ratrain.passes.placement.split_backward import split_backwards
from ratrain.passes.placement.tensor_merging import halves_behind_the_embedding, hoisted, merged
from ratrain.passes.placement.work_groups import split_into_groups
from ratrain.passes.recovery.layer_choice import CHOICES, same_for_all
from ratrain.passes.recovery.rewriting import rewritten
from ratrain.passes.state.insert_prefetch import InsertPrefetchPass
from ratrain.passes.state.prefetch_depth import DEPTHS
from ratrain.passes.trial.trial import Trials, step_seconds_at_own_addresses
from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.analysis.progress import blocking_cycle
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.model.sharded_blocks import any_gathered_within_step
from ratrain.ratrain_ir.model.slots import SPLIT_KINDS
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
"""Choices of `OverlapTensorPass.pieces`."""
HALVES = ("auto", "whole", "split")
"""Choices of `OverlapTensorPass.halves`."""


_PACE = 5e-3
"""Relative time that a forward at the pace of a backward may cost a step that does not fit without recomputation."""


@frozen
class _Run:
    """Consecutive ops of one forward or backward pass of a piece; an op that serves none joins the run before it."""

    is_forward: bool
    work: Work
    ops: tuple[Op, ...]


@frozen(slots=False, eq=False)
class _Way:
    """Module rewritten in one way, with the seconds of its simulated step if no bytes were used twice."""

    seconds: float
    """Infinite where nothing could be merged, or the stages would wait in a cycle."""
    module: Module
    context: PassContext
    halves: str = ""
    """`whole` or `split`; empty for the module that is not rewritten."""
    pairs: int = 0
    """Number of merged pairs of passes."""
    merging: str = "none"
    """Passes that were merged, as `OverlapTensorPass.rewritten` has it."""

    @cached_property
    def fits(self) -> bool:
        """True if every stage fits the capacity without recomputation."""
        trials, capacity = Trials(self.module, self.context), self.capacity
        if any(trials.occupancy(stage).peak_bytes(0.0) > capacity for stage in self.module.stages):
            return False  # return False  # live bytes alone exceed it: no arena needs to be tried
        return all(trials.fits(stage, 0.0, capacity) for stage in self.module.stages)

    @cached_property
    def fits_recovered(self) -> bool:
        """True if the live bytes fit with everything recomputed; a module with recompute ops is judged as it stands."""
        if any(type(op) is Recompute for stage in self.module.stages for op in stage.ops):
            return self.fits
        (everything,) = CHOICES["full"]
        trials, capacity = Trials(self.module, self.context), self.capacity
        recovered = (rewritten(stage, same_for_all(everything)) for stage in self.module.stages)
        return not any(trials.occupancy(stage).peak_bytes(0.0) > capacity for stage in recovered)

    @property
    def capacity(self) -> int:
        """Bytes for tensors on each stage."""
        return self.context.target.capacity(self.module).left

    def __str__(self) -> str:
        paced = ", forwards at the pace of backwards" if self.merging == "paced" else ""
        return f"backwards {self.halves}, {self.pairs} pairs of passes merged{paced}" if self.halves else "as it was"


def _first_that_fits(ways: Sequence[_Way]) -> _Way:
    """Return the first way that fits unchanged, else the first that fits with everything recomputed, else the first."""
    recovered = (way for way in ways if way.fits_recovered)
    return next((way for way in ways if way.fits), None) or next(recovered, ways[0])


def _by_seconds(ways: Iterable[_Way]) -> list[_Way]:
    return sorted(ways, key=lambda way: way.seconds)


@frozen
class OverlapTensorPass(Pass):
    """Run exchanges within forwards and backwards at the same time as products that do not need them."""

    name: ClassVar[str] = "overlap-tensor"
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.EXCHANGES})
    pieces: str = field(default="auto", metadata={"choices": PIECES})
    """`merged`: merge neighbouring passes of different pieces; `apart`: do not; `auto`: if that shortens the step."""
    halves: str = field(default="auto", metadata={"choices": HALVES})
    """`split`: split every backward in place; `whole`: do not; `auto`: if the simulated step is shorter."""

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """Yield both options where ranks compute micro-batches alone: there are no exchanges to hide."""
        del model
        if plan.is_whole:
            for option in ("pieces", "halves"):
                why = "without tensor-parallel, context and expert ranks there are no exchanges to hide"
                yield Idle(option, why, "leave it out, or use a tp, cp or ep of 2 or more")

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage in the fastest allowed way, preferring ways that fit.

        Raises `DiagnosticError` RT073 where `pieces=merged` finds no passes to merge, or `halves` is set and every
        backward is split already.
        """
        if module.plan.is_whole:
            context.statistics["exchanges"] = "none: nothing changed"
            return
        if self.halves != "auto" and not any(_can_be_split(op) for stage in module.stages for op in stage.ops):
            text = (
                f"'halves={self.halves}' of '{self.name}' changes nothing: the order of the schedule has all "
                "backwards in halves already"
            )
            fail("RT073", text, help="leave it out, or use a schedule with whole backwards, as 1f1b")
        before = _Way(_seconds(module, context), module, context)
        # halves of what trains less than the whole model are not built: only a plan that asks for them is refused
        in_halves = module.plan.tp > 1 and not module.plan.training and module.plan.ep == 1
        halves = _open(self.halves, ("whole", "split") if in_halves else ("whole",))
        tried = [self.rewritten(module, context, each, "none") for each in halves]
        if self.pieces != "apart":
            apart = _first_that_fits(_by_seconds(tried))
            # Merging is tried on the best choice of halves alone, unless that does not fit even with everything
            # recomputed.
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
        if best.merging == "all" and not best.fits:
            paced = self.rewritten(module, context, best.halves, "paced")
            best = paced if paced.seconds <= best.seconds * (1 + _PACE) else best
        if best is not before:
            module.adopt(best.module)
        context.statistics["chosen"] = str(best)
        context.statistics["simulated step"] = f"{best.seconds:.6g} s, {before.seconds:.6g} s before"

    def rewritten(self, module: Module, context: PassContext, halves: str, pairs: str) -> _Way:
        """Return a draft of the module rewritten in one way; `halves` is `whole` or `split`.

        `pairs` says which passes to merge: `none`, `alike` (two forwards or two backwards), `all` (also a forward with
        the backward after it), or `paced` (`all`, with forwards at the pace of these backwards). If nothing can be
        merged, or the stages would then wait in a cycle, its seconds are infinite.
        """
        draft = module.draft()
        count = 0
        for stage in draft.stages:
            stage.ops = hoisted(stage.ops)
            if halves == "split":
                split_backwards(draft, stage)
                stage.ops = halves_behind_the_embedding(stage.ops)
            if pairs != "none":
                count += _merge(draft, stage, Trials(draft, context), pairs)
        if pairs != "none" and (not count or blocking_cycle(draft, rendezvous=True) is not None):
            return _Way(inf, draft, context, halves, count, pairs)
        return _Way(_seconds(draft, context), draft, context, halves, count, pairs)


def _can_be_split(op: Op) -> bool:
    return type(op) is Backward and op.block.kind in SPLIT_KINDS


def _seconds(module: Module, context: PassContext) -> float:
    """Return the seconds of a step if no bytes were used twice and every view were gathered ahead of its use.

    A later pass gathers views ahead. Without that each use would wait for its gather, which would hide the exchanges
    that run meanwhile, and the comparison would be wrong.
    """
    if any_gathered_within_step(module.plan, block_chain(module.model)):
        module = module.draft()
        for stage in module.stages:
            InsertPrefetchPass(DEPTHS[-1]).rewrite(stage, Trials(module, context))
    return step_seconds_at_own_addresses(module, context)


def _open(option: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    return choices if option == "auto" else (option,)


def _merge(module: Module, stage: Stage, trials: Trials, merging: str) -> int:
    """Merge pairs of passes of a stage, in place, as `OverlapTensorPass.rewritten` says; return how many changed."""
    ends = {id(op) for op, _ in chunk_actions(module, stage)}
    ops: list[Op] = []
    count = 0
    for run, partner in pairs_of(_runs(module, stage), mixed=merging != "alike"):
        if partner is None:
            ops += run.ops
            continue
        of_pair = _within(ends, run, partner)
        paced = merging == "paced" and run.is_forward and not partner.is_forward
        one = merged(run.ops, partner.ops, of_pair, lambda op: trials.op_seconds(stage, op), paced=paced)
        count += one != [*run.ops, *partner.ops]
        ops += one
    stage.ops = ops
    return count


def _within(ends: Collection[int], *runs: _Run) -> set[int]:
    return {id(op) for run in runs for op in run.ops if id(op) in ends}


def _runs(module: Module, stage: Stage) -> list[_Run]:
    """Return the list of a stage, cut into runs."""
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


class _OfPiece(Protocol):
    """A pass of a piece, as `_Run`."""

    @property
    def is_forward(self) -> bool: ...
    @property
    def work(self) -> Work: ...


P = TypeVar("P", bound=_OfPiece)


def pairs_of(passes: Sequence[P], *, mixed: bool) -> Iterator[tuple[P, P | None]]:
    """Yield each pass of a stage's order with the next one if the two are to be merged, else with None.

    With `mixed`, a forward may merge with the backward after it, and such pairs are preferred to two forwards.
    """
    at = 0
    while at < len(passes):
        here = passes[at]
        behind, beyond = (passes[at + step] if at + step < len(passes) else None for step in (1, 2))
        fits = behind is not None and _goes_with(here, behind)
        if fits and behind is not None and here.is_forward != behind.is_forward:
            fits = mixed
        elif fits and mixed and behind is not None and beyond is not None and behind.is_forward:
            fits = beyond.is_forward or not _goes_with(behind, beyond)
        yield here, behind if fits else None
        at += 1 + fits


def _goes_with(earlier: _OfPiece, later: _OfPiece) -> bool:
    """Tell whether a later pass may be merged with an earlier one: another piece, and no more pieces in flight."""
    return earlier.work != later.work and (earlier.is_forward or not later.is_forward)
