"""Number of blocks whose masters and moments stay in another memory, chosen for the shortest step.

State that leaves DDR frees its bytes for the whole step, and crosses the link once per step each way. Offloaded
activations cross it with every micro-batch, and recomputed ones cost compute. The search tries a few numbers of blocks:

    none        half as many        enough for all activations        all
     0               4                          8                     24
                     ^ best so far: then the middles 2 and 6, and so on, until 9 or 10 were tried

For each number the whole module is ordered, recomputed, placed and simulated. Cost: about nine such compilations. The
result is the best of the numbers tried, not a proved optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.passes.memory.allocate_ddr import step_seconds_placed
from ratrain.passes.pass_base import PassContext
from ratrain.passes.state.offload_state import state_of, state_of_last
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import Home, StateKind, aligned
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

_SHARES = (0.0, 0.5, 1.0, inf)
"""Numbers tried first: shares of the bytes that keeping every activation lacks; infinite: the state of all blocks."""
_MOST_TRIALS = 9
"""Numbers tried after which no further middles are taken."""

Counts = tuple[int, ...]
"""By stage: number of blocks whose state is moved."""
Order = Callable[[Module, PassContext], None]
"""Callback that orders a module and chooses its recovery, once its state is in its final memory."""


def offload_as_much_as_pays(module: Module, context: PassContext, home: Home, budget: int, order: Order) -> None:
    """Move the state of some blocks of a module to the memory `home`, and order the module.

    `budget`: bytes of DDR for each stage. Raises `DiagnosticError` RT071 where state is in another memory already,
    RT053 where the machine has no such memory, and the first error of `order` where it fails however much is moved.
    """
    tensors = [tensor for stage in module.stages for tensor in stage.tensors.values()]
    if any(tensor.home is not Home.DDR and tensor.kind is not StateKind.FROZEN for tensor in tensors):
        text = (
            "state is in another memory already, by 'offload-state': what else goes there would be chosen a second time"
        )
        fail("RT071", text, help="leave 'offload-state' or the option 'offload' out")
    if not context.target.info(module).capacity_of(home):
        fail("RT053", f"the machine has no memory '{home.value}' for masters and moments")
    trials = _Numbers(module, context, home, budget, order)
    trials.search()
    found, trial = trials.found
    module.adopt(found)
    context.statistics |= trial.statistics
    for stage, count in zip(module.stages, trials.best, strict=True):
        context.statistics[f"stage {stage.index} {home.value}"] = f"state of {count} blocks"
    context.statistics["simulated step, offloading"] = str(trials)


@define
class _Numbers:
    """Results of the numbers of blocks tried; only the best module is kept, since modules are large."""

    module: Module
    context: PassContext
    home: Home
    budget: int
    order: Order
    seconds: dict[Counts, float] = field(factory=dict)
    """Seconds of the step by numbers tried; infinite where it does not fit."""
    refused: dict[Counts, DiagnosticError] = field(factory=dict)
    """Errors by numbers for which `order` failed."""
    best: Counts = field(init=False)
    """Numbers with the shortest step; among equal ones, those that move less."""
    found: tuple[Module, PassContext] = field(init=False)
    """Module of the best numbers, with the statistics of its passes."""

    def search(self) -> None:
        """Try numbers of blocks whose state is moved, by stage; keep the seconds of each and the best module.

        First come none, as many as free half of the bytes that activations lack, or all of these, and as many as the
        memory has room for; then middles between the best and its neighbours, until `_MOST_TRIALS` or more were tried.
        Raises the first `DiagnosticError` if `order` refused all of the first ones.
        """
        lacking = [
            _lacking_bytes(stage, Trials(self.module, self.context), self.budget) for stage in self.module.stages
        ]
        room = self.context.target.info(self.module).capacity_of(self.home)
        for share in _SHARES:
            self.attempt(
                tuple(
                    _blocks_for(stage, self.module, room, inf if share == inf else share * missing)
                    for stage, missing in zip(self.module.stages, lacking, strict=True)
                )
            )
        if not self.seconds:
            raise next(iter(self.refused.values()))
        while len(self.seconds) + len(self.refused) < _MOST_TRIALS and (between := self.middles_next_to_best()):
            for counts in between:
                self.attempt(counts)

    def middles_next_to_best(self) -> list[Counts]:
        """Return the untried middles between the best numbers and their neighbours."""
        known = sorted({*self.seconds, *self.refused}, key=sum)
        at = known.index(self.best)
        middles = [_middle(one, other) for one, other in pairwise(known[max(0, at - 1) : at + 2])]
        return [counts for counts in middles if counts not in self.seconds and counts not in self.refused]

    def attempt(self, counts: Counts) -> None:
        """Try numbers of blocks, unless they were tried before."""
        if counts in self.seconds or counts in self.refused:
            return
        draft, trial = copy_module(self.module), PassContext(self.context.target)
        for stage, count in zip(draft.stages, counts, strict=True):
            for tensor in state_of_last(stage, draft, count):
                tensor.home = self.home
        try:
            self.order(draft, trial)
            trial.diagnostics.check()
        except DiagnosticError as error:
            self.refused[counts] = error
            return
        self.seconds[counts] = step_seconds_placed(draft, trial, self.budget)
        if counts == min(self.seconds, key=lambda each: (self.seconds[each], sum(each))):
            self.best, self.found = counts, (draft, trial)

    def __str__(self) -> str:
        others = [f"{self.words(each)} with {sum(each)}" for each in self.seconds if each != self.best]
        return "; ".join([f"{self.words(self.best)} with the state of {sum(self.best)} blocks", *others])

    def words(self, counts: Counts) -> str:
        """Return the step time of some numbers for the statistics."""
        seconds = self.seconds[counts]
        return "does not fit" if seconds == inf else f"{seconds:.6g} s"


def _middle(one: Counts, other: Counts) -> Counts:
    return tuple((a + b) // 2 for a, b in zip(one, other, strict=True))


def _lacking_bytes(stage: Stage, trials: Trials, budget: int) -> int:
    """Return the bytes that a stage lacks to keep every activation until its backward."""
    return max(0, lifetimes(trials.with_workspace(stage)).peak_bytes - budget)


def _blocks_for(stage: Stage, module: Module, room: int, wanted: float) -> int:
    """Return how many of a stage's last blocks to move so that their state frees `wanted` bytes.

    Fewer if the memory's `room` in bytes is full before.
    """
    moved = count = 0
    for block in reversed(module.topology.stage_blocks[stage.index]):
        size = sum(aligned(tensor.type.nbytes) for tensor in state_of(stage, [block]))
        if moved >= wanted or moved + size > room:
            break
        moved, count = moved + size, count + 1
    return count
