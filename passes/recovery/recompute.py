"""`recompute{policy=auto|full|none|attention|mlp placement=inline|forward-side gathered=auto|again store=nowhere|host|file|peer}`: which saved tensors are dropped after forward and recovered before backward.

Inline, recovery stands right before the backward that needs it; forward-side it fills the pipeline's idle windows
(`passes/recovery/recompute_placement.py`). Where nothing of a layer is kept, the layer is recovered as a whole from
its checkpoint, the input of its attention: `recompute attention` yields the input of `mlp`. Of a block either nothing is kept, or
what is expensive to recover (`lean`: the products; norms and elementwise results are recovered), or everything.

    %x.mlp.0.m0, %s.attention.0.m0.* = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
  becomes, under `full`,
    %x.mlp.0.m0 = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    ...
    %s.attention.0.m0.*, %r.mlp.0.m0 = recompute attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    %s.mlp.0.m0.* = recompute mlp.0 m0 (%r.mlp.0.m0, %w.mlp.0)

`auto` keeps, per layer and micro-batch, what fits the bytes that everything else leaves free (`passes/recovery/recompute_choice.py`), and
of what tensor peers gather what fits then (`passes/recovery/keep_gathered.py`; `gathered=again` drops it). It comes
after the passes that change how long gradients and views live.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

from attrs import evolve, field, frozen

from ratrain.passes.memory.allocate_ddr import step_seconds_placed
from ratrain.passes.memory.trial import Trials
from ratrain.passes.pass_base import Pass, PassContext
from ratrain.passes.recovery.guests import UnitTimes, take_in
from ratrain.passes.recovery.keep_gathered import keep_gathered
from ratrain.passes.recovery.lender_choice import choose_with_lender
from ratrain.passes.recovery.recompute_choice import choose
from ratrain.passes.recovery.recompute_placement import idle_windows, recover_forward_side
from ratrain.passes.recovery.rewriting import (
    CHOICES,
    ChoiceOf,
    Elsewhere,
    Lender,
    mark_checkpoints,
    rewrite,
    same_for_all,
)
from ratrain.passes.recovery.storing import store_kept
from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.ops import Piece, Recompute, Tensor
from ratrain.ratrain_ir.types import STORES, Home

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage

POLICIES = ("full", "none", "attention", "mlp", "auto")
NOWHERE = "nowhere"
PEER = "peer"
_HOMES = {home.value: home for home in STORES}
OFFLOAD_CHOICES = (NOWHERE, *_HOMES)
STORE_CHOICES = (*OFFLOAD_CHOICES, PEER)
GATHERED = ("auto", "again")


class Storing(Protocol):
    """A pass that may store."""

    def rewrite(self, module: Module, context: PassContext) -> list[Tensor]:
        """Rewrite the lists of every stage; the tensors that recovery starts from."""
        ...


@frozen
class RecomputePass(Pass):
    """Drop saved activations after forward and recover them right before backward."""

    name: ClassVar[str] = "recompute"
    policy: str = field(default="full", metadata={"choices": POLICIES})
    budget: int | None = field(default=None, metadata={"unit": "bytes"})
    """Bytes a stage may use, for `auto` and `forward-side`; None: what the machine has."""
    placement: str = field(default="inline", metadata={"choices": ("inline", "forward-side")})
    store: str = field(default="nowhere", metadata={"choices": STORE_CHOICES})
    """The memory in which what is kept waits for its backward: all of it; or, under `auto`, that of the layers that are worth it.

    With `peer` the DDR of the stage's mirror image in the pipeline, for stages of the first half."""
    gathered: str = field(default="auto", metadata={"choices": GATHERED})
    """Whether what tensor peers gathered for a forward is kept for its backward: where bytes are left, under policy=auto; or gathered again."""

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage under the policy.

        Raises `DiagnosticError` RT071 where recovery is placed already.
        """
        refuse_second_recovery(module)
        refuse_missing_memory(self.store, module, context)
        if self.store != NOWHERE and self.policy != "auto" and self.placement == "forward-side":
            text = (
                f"with policy={self.policy} all that recovery reads is stored, and comes back where it is needed inline"
            )
            fail("RT071", text, help="use policy=auto, which recovers what it does not store, or placement=inline")
        if self.store == NOWHERE or self.policy != "auto":
            mark_checkpoints(self.rewrite(module, context))
        else:
            take_the_shorter(module, context, evolve(self, store=NOWHERE), self, self.budget)

    def rewrite(self, module: Module, context: PassContext) -> list[Tensor]:
        """Rewrite the lists of every stage; the tensors that recovery starts from, to be marked once the module is final."""
        recovered = moved = stored = kept = 0
        starts: list[Tensor] = []
        windows = idle_windows(module) if self.placement == "forward-side" else []
        times = UnitTimes(module) if self.store == PEER else None
        for stage in module.stages:
            trials = Trials(module, context)
            choice_of, summary = self.choice(stage, trials, times)
            if summary:
                context.statistics[f"stage {stage.index}"] = summary
            recovery = rewrite(stage, choice_of)
            recovered += recovery.ops
            if self.store != NOWHERE:
                stored += store_kept(stage, trials, partial(_home, choice_of))
            lender = module.topology.lender(stage.index)
            if times is not None and lender is not None:
                take_in(module.stages[lender], stage, times)
            starts += recovery.starts
            if self.placement == "forward-side":
                moved += recover_forward_side(stage, trials, self.budget_within(trials), windows[stage.index])
            if self.policy == "auto" and self.gathered == "auto":
                kept += keep_gathered(stage, trials, self.budget_within(trials))
        context.statistics["recompute ops"] = recovered
        if self.store != NOWHERE:
            context.statistics["evict ops" if self.store == PEER else "store ops"] = stored
        context.statistics["moved to the forward side"] = moved
        if kept:
            context.statistics["gathers kept for the backward"] = kept
        return starts

    def budget_within(self, trials: Trials) -> int:
        """Bytes a stage may use."""
        return trials.context.target.capacity(trials.module).left if self.budget is None else self.budget

    def choice(self, stage: Stage, trials: Trials, times: UnitTimes | None = None) -> tuple[ChoiceOf, str]:
        """What to keep of each layer and micro-batch of a stage, and under `auto` the same in words; `times` where others may lend bytes."""
        home = _HOMES.get(self.store, Home.DDR)
        lender = trials.module.topology.lender(stage.index) if times is not None else None
        if self.policy != "auto":
            (choice,) = CHOICES[self.policy]
            return same_for_all(evolve(choice, home=home if lender is None else Lender(lender))), ""
        budget = self.budget_within(trials)
        if times is None or lender is None:
            chosen = choose(stage, trials, budget, home)
        else:
            chosen = choose_with_lender(stage, trials.module.stages[lender], trials, budget, times)
        return chosen.choice_of, chosen.summary


def take_the_shorter(
    module: Module, context: PassContext, without: Storing, storing: Storing, budget: int | None
) -> None:
    """Rewrite a module by a pass that stores, or by the same that does not where that makes the shorter step, bytes that are used twice included."""
    capacity = context.target.capacity(module).left if budget is None else budget
    found, before = [], dict(context.statistics)
    for each in (without, storing):
        context.statistics.clear()
        context.statistics |= before
        draft = module.draft()
        starts = each.rewrite(draft, context)
        found.append((step_seconds_placed(draft, context, capacity), draft, starts, dict(context.statistics)))
    seconds = [each[0] for each in found]
    _, draft, starts, statistics = found[seconds[1] < seconds[0]]
    module.adopt(draft)
    mark_checkpoints(starts)
    context.statistics.clear()
    context.statistics |= statistics
    context.statistics["simulated step, storing"] = f"{seconds[1]:.6g} s, and {seconds[0]:.6g} s with nothing stored"


def _home(choice_of: ChoiceOf, layer: int, piece: Piece) -> Elsewhere:
    return choice_of(layer, piece).home


def refuse_second_recovery(module: Module) -> None:
    """Raise `DiagnosticError` RT071 where recovery is placed already."""
    if any(type(op) is Recompute for stage in module.stages for op in stage.ops):
        message = "'recompute' cannot run twice: what the first run dropped is not there to be kept or dropped again"
        fail("RT071", message, help="give one 'recompute' with the policy you want")


def refuse_missing_memory(store: str, module: Module, context: PassContext) -> None:
    """Raise `DiagnosticError` RT065 where the machine does not have the memory."""
    if store == NOWHERE:
        return
    if store == PEER:
        _refuse_missing_lender(module)
        return
    info = context.target.info(module)
    if not info.capacity_of(_HOMES[store]):
        text = f"the machine '{info.name}' has no memory '{store}' to store in"
        way_out = f"say [{store}_capacity], [{store}_store] and [{store}_fetch] in its file (--machine)"
        fail("RT065", text, help=way_out)


def _refuse_missing_lender(module: Module) -> None:
    """Raise `DiagnosticError` RT071 where no stage lends bytes to another, or an order hangs beside which its list could not be laid."""
    if module.topology.stages == 1:
        text = "'store=peer' keeps activations in the DDR of another stage, and the plan has one stage"
        fail("RT071", text, help="leave 'store' out, or store in another memory that the machine has")
    try:
        UnitTimes(module)
    except ValueError as error:
        fail("RT071", f"'store=peer' needs an order that ends: {error}", help="'ratrainc verify' says what hangs")
