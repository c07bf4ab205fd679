"""Of how many blocks masters and moments stay in another memory: as many as make the step shortest, with all else chosen for what is left.

State that leaves DDR frees its bytes for the whole step, and crosses the link once in it each way; activations that are stored cross it with
every micro-batch, and those that are recovered cost compute. Tried are no block, those that make room for all activations, half as many,
and all; then, of two numbers beside the best one, those between. Each is ordered, recovered, placed and simulated as the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.passes.memory.allocate_ddr import step_seconds_placed
from ratrain.passes.memory.trial import Trials
from ratrain.passes.pass_base import PassContext
from ratrain.passes.state.offload_state import state_of, state_of_last
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import Home, aligned
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

_SHARES = (0.0, 0.5, 1.0, inf)
"""Of the bytes that keeping everything lacks, those that state leaves, at first."""
_MOST_TRIALS = 9

Counts = tuple[int, ...]
"""Of how many blocks of each stage state is moved."""
Order = Callable[[Module, PassContext], None]
"""What comes after: orders and recovers a module whose state is where it stays."""


def offload_as_much_as_pays(module: Module, context: PassContext, home: Home, budget: int, order: Order) -> None:
    """Move the state of some blocks of a module, and order it.

    Raises `DiagnosticError` RT071 where state is in another memory already, RT053 where the machine has no such memory, and what `order`
    says where it can make nothing of the module however much is moved.
    """
    if any(tensor.home is not Home.DDR for stage in module.stages for tensor in stage.tensors.values()):
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
    """What modules with the state of so many blocks elsewhere give; of the modules, large as they are, the best alone is kept."""

    module: Module
    context: PassContext
    home: Home
    budget: int
    order: Order
    seconds: dict[Counts, float] = field(factory=dict)
    """of the step, by what was tried; infinite where it does not fit"""
    refused: dict[Counts, DiagnosticError] = field(factory=dict)
    best: Counts = field(init=False)
    """the shortest step; of equal ones that which moves less"""
    found: tuple[Module, PassContext] = field(init=False)
    """the module of the best number, and what its passes reported"""

    def search(self) -> None:
        """Try what is worth it. Raises the first `DiagnosticError` where none can be had."""
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
        while len(self.seconds) + len(self.refused) < _MOST_TRIALS and (between := self.beside_the_best()):
            for counts in between:
                self.attempt(counts)

    def beside_the_best(self) -> list[Counts]:
        """What was not tried, in the middle between the best number and those next to it."""
        known = sorted({*self.seconds, *self.refused}, key=sum)
        at = known.index(self.best)
        middles = [_middle(one, other) for one, other in pairwise(known[max(0, at - 1) : at + 2])]
        return [counts for counts in middles if counts not in self.seconds and counts not in self.refused]

    def attempt(self, counts: Counts) -> None:
        """Find out what some numbers give, if that is not known."""
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
        """The step that some numbers give."""
        seconds = self.seconds[counts]
        return "does not fit" if seconds == inf else f"{seconds:.6g} s"


def _middle(one: Counts, other: Counts) -> Counts:
    return tuple((a + b) // 2 for a, b in zip(one, other, strict=True))


def _lacking_bytes(stage: Stage, trials: Trials, budget: int) -> int:
    """Bytes that a stage lacks to keep everything until its backward."""
    return max(0, lifetimes(trials.with_workspace(stage)).peak_bytes - budget)


def _blocks_for(stage: Stage, module: Module, room: int, wanted: float) -> int:
    """The state of how many of the last blocks of a stage makes so many bytes free, or fills a memory of so much room."""
    moved = count = 0
    for block in reversed(module.topology.stage_blocks[stage.index]):
        size = sum(aligned(tensor.type.nbytes) for tensor in state_of(stage, [block]))
        if moved >= wanted or moved + size > room:
            break
        moved, count = moved + size, count + 1
    return count
