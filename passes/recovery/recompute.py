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

from typing import TYPE_CHECKING, ClassVar, Protocol

from attrs import evolve, field, frozen

from ratrain.passes.memory.allocate_ddr import step_seconds_placed
from ratrain.passes.memory.trial import Trials
from ratrain.passes.pass_base import Pass, PassContext
from ratrain.passes.recovery.guests import UnitTimes, take_in
from ratrain.passes.recovery.keep_gathered import keep_gathered
from ratrain.passes.recovery.lender_choice import choose_lenders
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
class _StageChoice:
    """What to keep of each layer and micro-batch of a stage."""

    of: ChoiceOf
    summary: str = ""
    """it in words, under `auto`"""
    borrows: bool = False
    """whether other stages keep any of it"""

    def home_of(self, layer: int, piece: Piece) -> Elsewhere:
        """Where what is kept waits for its backward."""
        return self.of(layer, piece).home


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

    With `peer` the DDR of other stages: under `auto` of those that have room; else of the mirror image in the pipeline, for stages of the
    first half."""
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
        choices = self.choices_with_lenders(module, context, times) if times is not None else {}
        borrowers = [module.stages[index] for index, choice in choices.items() if choice.borrows]
        for stage in sorted(module.stages, key=lambda stage: stage not in borrowers):
            trials = Trials(module, context)
            if times is not None and stage not in borrowers:
                take_in(stage, borrowers, times)
            choice = choices.get(stage.index) or self.choice(stage, trials)
            if choice.summary:
                context.statistics[f"stage {stage.index}"] = choice.summary
            recovery = rewrite(stage, choice.of)
            recovered += recovery.ops
            if self.store != NOWHERE:
                stored += store_kept(stage, trials, choice.home_of)
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

    def choice(self, stage: Stage, trials: Trials) -> _StageChoice:
        """What to keep of each layer and micro-batch of a stage by itself."""
        home = _HOMES.get(self.store, Home.DDR)
        if self.policy != "auto":
            (choice,) = CHOICES[self.policy]
            return _StageChoice(same_for_all(evolve(choice, home=home)))
        chosen = choose(stage, trials, self.budget_within(trials), home)
        return _StageChoice(chosen.choice_of, chosen.summary)

    def choices_with_lenders(self, module: Module, context: PassContext, times: UnitTimes) -> dict[int, _StageChoice]:
        """What to keep on each stage where others may lend bytes.

        All that another policy than `auto` keeps goes to the mirror image, from stages of the first half.
        """
        if self.policy == "auto":
            budget = self.budget_within(Trials(module, context))
            every = choose_lenders(module, context, budget, times)
            return {
                index: _StageChoice(chosen.choice_of, chosen.summary, chosen.stores)
                for index, chosen in enumerate(every)
            }
        (choice,) = CHOICES[self.policy]
        found = {}
        for stage in module.stages:
            lender = module.topology.mirror_image(stage.index)
            home = Lender(lender) if lender > stage.index else Home.DDR
            found[stage.index] = _StageChoice(same_for_all(evolve(choice, home=home)), borrows=home is not Home.DDR)
        return found


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
