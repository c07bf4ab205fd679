"""`recompute`: drops saved tensors after forward and recomputes them before backward.

    recompute{policy=auto|full|none|attention|mlp|ops|norms every=... placement=inline|forward-side gathered=auto|again
              store=nowhere|host|file|peer checkpoint=block|layer repeat=needed|all}

    %x.mlp.0.m0, %s.attention.0.m0.* = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
  becomes, under `full`,
    %x.mlp.0.m0 = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    ...
    %s.attention.0.m0.*, %r.mlp.0.m0 = recompute attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    %s.mlp.0.m0.* = recompute mlp.0 m0 (%r.mlp.0.m0, %w.mlp.0)

Inline, a recomputation stands right before the backward that needs it; forward-side it fills idle windows of the
pipeline (`passes/recovery/recompute_placement.py`). If nothing of a layer is kept, the whole layer is recomputed from
its checkpoint, the input of its attention: `recompute attention` also yields the input of `mlp`. A block keeps nothing,
or everything, or only what is expensive to recompute (`lean`: results of products and of attention; norms and
elementwise results are recomputed). `policy=ops` keeps results of attention and of every second product, as
torchtitan's selective recomputation by op; `policy=norms` keeps all but results of norms, as Megatron-LM's
`--recompute-modules layernorm`: with `sequence_sharding` they are whole on each rank, where the rest is a rank's part.
With `every` the policy is that of each N-th layer, and the others keep everything.

With tensor-parallel ranks the ops of a layer stand around exchanges. `checkpoint=block` keeps their results: a layer
has two checkpoints, and nothing is exchanged again. `checkpoint=layer` keeps the layer's input alone and repeats the
exchange between its blocks (`passes/recovery/rewriting.py` shows the ops), as frameworks do that call a layer again.
`repeat=all` also makes the layer's output again, which nothing reads, as Megatron-LM does
(megatron/core/tensor_parallel/random.py, CheckpointFunction). Both go with `policy=full`; `auto`, `joint-order` and the
planner keep results of exchanges.

`auto` keeps, per layer and micro-batch, as much as fits the bytes left free (`passes/recovery/recompute_choice.py`). If
bytes remain, it also keeps what came from other ranks: gathered rows and keys, rows of experts with their gate and up
(`passes/recovery/keep_gathered.py`; `gathered=again` never does). With `store` kept tensors are offloaded to another
memory or to a peer stage. The pass comes after those that change how long gradients and views live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Protocol

from attrs import define, evolve, field, frozen

from ratrain.passes.memory.allocate_ddr import step_seconds_placed
from ratrain.passes.pass_base import Decision, Idle, Pass, PassContext
from ratrain.passes.recovery.donor_choice import choose_donors
from ratrain.passes.recovery.keep_gathered import Twice, made_twice_to_keep, may_keep, with_kept
from ratrain.passes.recovery.layer_choice import (
    BLOCK,
    CHECKPOINTS,
    CHOICES,
    EVERYTHING,
    LAYER,
    NEEDED,
    REPEATS,
    ChoiceOf,
    Donor,
    KeptHome,
    LayerChoice,
    same_for_all,
)
from ratrain.passes.recovery.peer_offload import UnitTimes, add_remote_buffers
from ratrain.passes.recovery.recompute_choice import choose
from ratrain.passes.recovery.recompute_placement import (
    Moves,
    idle_windows,
    moved_ahead,
    moves_to_forward_side,
    why_inline,
)
from ratrain.passes.recovery.rewriting import Recovery, Rewriting, mark_checkpoints
from ratrain.passes.recovery.storing import store_kept
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.config.tensor_ranks import adds_branches_apart
from ratrain.ratrain_ir.config.types import STORES, Home
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.collectives import why_never_repeated
from ratrain.ratrain_ir.ops.compute import Recompute
from ratrain.ratrain_ir.process_pool import each_stage
from ratrain.ratrain_ir.schedules.action import Work
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.ops.base import Piece
    from ratrain.ratrain_ir.ops.tensor import Tensor

POLICIES = ("full", "none", "attention", "mlp", "ops", "norms", "auto")
"""Choices of `policy`: what to recompute."""
NOWHERE = "nowhere"
"""Value of `store` and `offload`: everything stays in DDR."""
PEER = "peer"
"""Value of `store`: the DDR of another stage."""
_HOMES = {home.value: home for home in STORES}
OFFLOAD_CHOICES = (NOWHERE, *_HOMES)
"""Choices of `offload`, for masters and moments."""
STORE_CHOICES = (*OFFLOAD_CHOICES, PEER)
"""Choices of `store`, for activations."""
GATHERED = ("auto", "again")
"""Choices of `gathered`."""


def idle_of_recovery(policy: str, placement: str, plan: Plan, *, by_bytes: bool = False) -> Iterator[Idle]:
    """Yield `placement` and `gathered` where they have no effect, and `budget` where no bytes decide.

    Bytes decide what `policy=auto` keeps, what recomputation with `placement=forward-side` may hold, and with
    `by_bytes` something else.
    """
    if policy == "none":
        yield Idle("placement", "with policy=none nothing is recovered", "leave it out, or use another policy")
    elif placement == "forward-side" and (why := why_inline(plan)):
        yield Idle("placement", why, "leave it out")
    if policy != "auto":
        why = f"what ranks exchanged is kept by policy=auto alone; the policy is '{policy}'"
        yield Idle("gathered", why, "leave it out, or use policy=auto")
    elif not may_keep(plan):
        why = (
            "no ranks exchange inputs, keys or rows of experts: that is with tp = 2 or more and sequence_sharding, "
            "or with cp or ep = 2 or more"
        )
        yield Idle("gathered", why, "leave it out, or use a plan with such ranks")
    moves = placement == "forward-side" and policy != "none" and not why_inline(plan)
    if policy != "auto" and not (moves or by_bytes):
        why = f"with policy={policy} and recovery inline nothing is chosen by its bytes"
        yield Idle("budget", why, "leave it out, or use policy=auto")


def _idle_of_every(policy: str, every: int | None) -> Iterator[Idle]:
    """Yield `every` where every layer does the same, or each layer is chosen for on its own."""
    if policy in ("none", "auto"):
        why = "nothing is recomputed" if policy == "none" else "each layer's policy is chosen"
        yield Idle("every", f"with policy={policy} {why}", "leave it out, or use another policy")
    elif every == 1:
        yield Idle("every", "each first layer is every layer", "leave it out, or say 2 or more")


def _idle_of_layers(policy: str, checkpoint: str, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
    """Yield `checkpoint` and `repeat` where no layer is recomputed as a whole, or there is but one way to do it."""
    never = why_never_repeated(model, plan) if plan.tp > 1 else ""
    if policy != "full":
        why = f"a layer is recomputed as a whole by policy=full alone; the policy is '{policy}'"
        yield Idle("checkpoint", why, "leave it out, or use policy=full")
        yield Idle("repeat", why, "leave it out, or use policy=full")
    elif plan.tp == 1:
        why = "without tensor-parallel ranks (tp = 1) a layer has one checkpoint, its input"
        yield Idle("checkpoint", why, "leave it out, or use a plan with tensor-parallel ranks")
    elif model.parallel_residual:
        why = f"attention and mlp of {model.name} read one input, which is the layer's checkpoint"
        yield Idle("checkpoint", why, "leave it out")
    if policy == "full" and plan.ep > 1 and not model.mlp_kinds:
        yield Idle("repeat", "an mlp whose experts replicas share out is never made again", "leave it out")
    if policy == "full" and plan.tp > 1 and (never or checkpoint == BLOCK):
        why = never or "results of exchanges are kept with checkpoint=block, and nothing makes a layer's output again"
        yield Idle("repeat", why, "leave it out" if never else "leave it out, or use checkpoint=layer")


class Storing(Protocol):
    """Pass that may store activations elsewhere."""

    def rewrite(self, module: Module, context: PassContext) -> list[Tensor]:
        """Rewrite the lists of every stage; return the tensors that recomputation starts from."""
        ...


@frozen
class _StageChoice:
    """Choice of what to keep of each layer and micro-batch of a stage."""

    of: ChoiceOf
    summary: str = ""
    """Description of the choice, under `auto`."""
    borrows: bool = False
    """True if other stages keep any of it."""

    def home_of(self, layer: int, piece: Piece) -> KeptHome:
        """Return the memory or donor where kept tensors of a layer wait for its backward."""
        return self.of(layer, piece).home


@frozen
class _Decided:
    """Decisions about a stage, small enough to be sent from another process.

    Positions are indices into the list that the step before leaves.
    """

    order: list[int]
    """Positions of the original ops, in their new order."""
    choice: _StageChoice
    moves: Moves
    kept: list[Twice]


@frozen(eq=False)
class _Recovered:
    """Draft of a stage with the decisions that made it."""

    stage: Stage
    choice: _StageChoice
    recovery: Recovery
    stored: int
    """Number of stores (or offloads to a peer)."""
    moves: Moves
    kept: list[Twice]


@frozen
class _EachNth:
    """Choice for each n-th layer, counted from 1; the other layers keep everything, in the same place."""

    choice: LayerChoice
    every: int

    def __call__(self, layer: int, _piece: Piece) -> LayerChoice:
        return evolve(EVERYTHING, home=self.choice.home) if (layer + 1) % self.every else self.choice


Reorder = Callable[["Stage", Trials], None]
"""Callback that gives the ops of a draft of a stage another order."""


def _as_it_is(_stage: Stage, _trials: Trials) -> None:
    pass


@frozen
class RecomputePass(Pass):
    """Drop saved activations after forward and recompute them right before backward."""

    name: ClassVar[str] = "recompute"
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.RECOVERY})
    policy: str = field(default="full", metadata={"choices": POLICIES})
    budget: int | None = field(default=None, metadata={"unit": "bytes"})
    """Bytes a stage may use, for `auto` and `forward-side`; None: the machine's."""
    placement: str = field(default="inline", metadata={"choices": ("inline", "forward-side")})
    store: str = field(default="nowhere", metadata={"choices": STORE_CHOICES})
    """Memory where kept tensors wait for their backward: all of them; or, under `auto`, those of layers worth it.

    With `peer` that is the DDR of other stages. Under `auto` stages with room become donors; otherwise stages of the
    first half offload to their mirror image in the pipeline.
    """
    gathered: str = field(default="auto", metadata={"choices": GATHERED})
    """`auto`: under policy=auto, what ranks exchanged for a forward is kept for its backward if bytes are left, and
    gate and up of rows that expert ranks exchanged.

    `again`: never.
    """
    checkpoint: str = field(default=BLOCK, metadata={"choices": CHECKPOINTS})
    """Unit that is recomputed from its input, under policy=full with tensor-parallel ranks."""
    repeat: str = field(default=NEEDED, metadata={"choices": REPEATS})
    """`all`: under policy=full the recomputation of a layer makes the layer's output again too."""
    every: int | None = field(default=None, metadata={"unit": "layers", "default": "all"})
    """Recompute each N-th layer, counted from 1; the others keep everything. None: all layers."""

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """Yield the options that `idle_of_recovery`, `_idle_of_every` and `_idle_of_layers` find without effect."""
        yield from idle_of_recovery(self.policy, self.placement, plan)
        yield from _idle_of_every(self.policy, self.every)
        yield from _idle_of_layers(self.policy, self.checkpoint, plan, model)

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage under the policy.

        Raises `DiagnosticError` RT071 where recomputation is placed already or `store` does not go with the other
        options, RT073 where something is to be stored and nothing is kept, or `every` is not a number of layers, RT065
        where the machine lacks the memory.
        """
        refuse_second_recovery(module)
        refuse_missing_memory(self.store, module, context)
        self._refuse_layers(module.model, module.plan)
        if self.every is not None and not 0 < self.every <= module.model.layers:
            most = module.model.layers
            text = f"'every={self.every}' of '{self.name}' is not of 1 to {most}, as many layers as there are"
            fail("RT073", text, help=f"write at most {most}")
        if self.store != NOWHERE and self.policy != "auto" and self.placement == "forward-side":
            text = (
                f"with policy={self.policy} all that recovery reads is stored, and comes back where it is needed inline"
            )
            fail("RT071", text, help="use policy=auto, which recovers what it does not store, or placement=inline")
        if self.store == NOWHERE or self.policy != "auto":
            mark_checkpoints(self.rewrite(module, context))
            if self.store != NOWHERE and not context.statistics["offload ops" if self.store == PEER else "store ops"]:
                text = (
                    f"'store={self.store}' of '{self.name}' changes nothing: with policy={self.policy} "
                    "nothing is kept that could be stored"
                )
                fail(
                    "RT073",
                    text,
                    help="leave it out, or use policy=none, which keeps all, or policy=auto, which chooses",
                )
        else:
            take_the_shorter(module, context, evolve(self, store=NOWHERE), self, self.budget)

    def rewrite(self, module: Module, context: PassContext, reorder: Reorder = _as_it_is) -> list[Tensor]:
        """Rewrite the lists of every stage, each after `reorder`; return the tensors that recomputation starts from.

        The caller marks these as checkpoints (`mark_checkpoints`) once the module is final.
        """
        windows = idle_windows(module) if self.placement == "forward-side" else [[] for _ in module.stages]
        if self.store == PEER:
            found = self._with_donors(module, context, windows, reorder)
        else:
            # Stages are independent here: decide them in a process pool, send small decisions back, and rebuild the
            # lists in this process, where ops and tensors have their identities.
            recovering = _Recovering(self, module, context, windows, reorder)
            found = list(map(recovering.made, module.stages, each_stage(recovering.decided, module.stages)))
        for stage, recovered in zip(module.stages, found, strict=True):
            stage.tensors, stage.ops = recovered.stage.tensors, recovered.stage.ops
            if recovered.choice.summary:
                context.statistics[f"stage {stage.index}"] = recovered.choice.summary
        context.statistics["recompute ops"] = sum(each.recovery.ops for each in found)
        if self.store != NOWHERE:
            name = "offload ops" if self.store == PEER else "store ops"
            context.statistics[name] = sum(each.stored for each in found)
        context.statistics["moved to the forward side"] = sum(sum(map(len, each.moves.values())) for each in found)
        if kept := sum(len(each.kept) for each in found):
            context.statistics["results of exchanges kept for the backward"] = kept
        return [tensor for each in found for tensor in each.recovery.starts]

    def _refuse_layers(self, model: ModelConfig, plan: Plan) -> None:
        """Raise `DiagnosticError` RT071 where `checkpoint=layer` would have to repeat sums that are always kept."""
        if self.policy == "full" and self.checkpoint == LAYER and adds_branches_apart(model, plan):
            text = f"'checkpoint=layer' is not built for this model: {why_never_repeated(model, plan)}"
            fail("RT071", text, help="use checkpoint=block, which recomputes each block from its own input")

    def _with_donors(
        self, module: Module, context: PassContext, windows: list[list[Work]], reorder: Reorder
    ) -> list[_Recovered]:
        """Return the rewritten stages where donors keep some of it.

        Borrowing stages come first, because donors receive what these offload.
        """
        for stage in module.stages:
            reorder(stage, Trials(module, context))
        times = UnitTimes(module)
        choices = self.choices_with_donors(module, context, times)
        borrowers = [module.stages[index] for index, choice in choices.items() if choice.borrows]
        found: dict[int, _Recovered] = {}
        for stage in sorted(module.stages, key=lambda stage: stage not in borrowers):
            # The borrowers' lists are final here, so the donor sees every `peer_offload` that it has to receive.
            if stage not in borrowers:
                add_remote_buffers(stage, [found[borrower.index].stage for borrower in borrowers], times)
            trials = Trials(module, context)
            found[stage.index] = self.recovered(Rewriting(stage), trials, choices[stage.index], windows[stage.index])
        return [found[stage.index] for stage in module.stages]

    def recovered(
        self,
        rewriting: Rewriting,
        trials: Trials,
        choice: _StageChoice,
        windows: list[Work],
        decided: _Decided | None = None,
    ) -> _Recovered:
        """Return a stage rewritten under a choice; moves, and what exchanges leave, as `decided` if that is given."""
        stage, recovery = rewriting.under(choice.of)
        stored = store_kept(stage, trials, choice.home_of) if self.store != NOWHERE else 0
        budget = self.budget_within(trials)
        moves = decided.moves if decided is not None else moves_to_forward_side(stage, trials, budget, windows)
        # Each step sees the list that the one before left: stores first, then moves to idle windows, then results of
        # exchanges that are kept, which take only the bytes left over.
        if moves:
            stage.ops = moved_ahead(stage.ops, moves)
        if decided is not None:
            kept = decided.kept
        else:
            keeps = self.policy == "auto" and self.gathered == "auto"
            kept = made_twice_to_keep(stage, trials, budget) if keeps else []
        if kept:
            stage = with_kept(stage, trials.module, kept)
            stage.prune()
        return _Recovered(stage, choice, recovery, stored, moves, kept)

    def budget_within(self, trials: Trials) -> int:
        """Return the bytes that a stage may use."""
        return trials.context.target.capacity(trials.module).left if self.budget is None else self.budget

    def choice(self, rewriting: Rewriting, trials: Trials) -> _StageChoice:
        """Choose what to keep of each layer and micro-batch of a stage on its own."""
        home = _HOMES.get(self.store, Home.DDR)
        if self.policy != "auto":
            return _StageChoice(self._one_choice(home))
        chosen = choose(rewriting, trials, self.budget_within(trials), home)
        return _StageChoice(chosen.choice_of, chosen.summary)

    def choices_with_donors(self, module: Module, context: PassContext, times: UnitTimes) -> dict[int, _StageChoice]:
        """Choose what to keep on each stage, where other stages may be donors.

        Under a policy other than `auto` stages of the first half offload all that is kept to their mirror image.
        """
        if self.policy == "auto":
            budget = self.budget_within(Trials(module, context))
            every = choose_donors(module, context, budget, times)
            return {
                index: _StageChoice(chosen.choice_of, chosen.summary, chosen.stores)
                for index, chosen in enumerate(every)
            }
        found = {}
        for stage in module.stages:
            donor = module.topology.mirror_image(stage.index)
            # Under 1F1B the later stage of the pair has fewer micro-batches in flight, so it is the one with room.
            home = Donor(donor) if donor > stage.index else Home.DDR
            found[stage.index] = _StageChoice(self._one_choice(home), borrows=home is not Home.DDR)
        return found

    def _one_choice(self, home: KeptHome) -> ChoiceOf:
        """Return the choice for all layers and micro-batches under a policy other than `auto`."""
        choice = evolve(self.choices[0], home=home)
        return same_for_all(choice) if self.every is None else _EachNth(choice, self.every)

    @property
    def choices(self) -> tuple[LayerChoice, ...]:
        """Choices for a layer and micro-batch that the policy allows, without the memories they may be kept in."""
        found = CHOICES[self.policy]
        if self.policy == "full":
            found = tuple(evolve(each, checkpoint=self.checkpoint, repeat=self.repeat) for each in found)
        return found if self.every is None else (*found, EVERYTHING)


def take_the_shorter(
    module: Module, context: PassContext, without: Storing, storing: Storing, budget: int | None
) -> None:
    """Rewrite a module by a pass that stores, or by the same pass without storing if that makes the shorter step.

    Both are placed and simulated, byte reuse included. `budget`: bytes per stage; None: the machine's.
    """
    capacity = context.target.capacity(module).left if budget is None else budget
    found, before = [], dict(context.statistics)
    for each in (without, storing):
        context.statistics.clear()
        context.statistics |= before
        # Each candidate gets its own draft and statistics; only those of the better one survive.
        draft = module.draft()
        starts = each.rewrite(draft, context)
        found.append((step_seconds_placed(draft, context, capacity), draft, starts, dict(context.statistics)))
    seconds = [each[0] for each in found]
    # A tie goes to the one without storing.
    _, draft, starts, statistics = found[seconds[1] < seconds[0]]
    module.adopt(draft)
    mark_checkpoints(starts)
    context.statistics.clear()
    context.statistics |= statistics
    context.statistics["simulated step, storing"] = f"{seconds[1]:.6g} s, and {seconds[0]:.6g} s with nothing stored"


def refuse_second_recovery(module: Module) -> None:
    """Raise `DiagnosticError` RT071 where recomputation is placed already."""
    if any(type(op) is Recompute for stage in module.stages for op in stage.ops):
        message = "'recompute' cannot run twice: what the first run dropped is not there to be kept or dropped again"
        fail("RT071", message, help="give one 'recompute' with the policy you want")


def refuse_missing_memory(store: str, module: Module, context: PassContext) -> None:
    """Raise `DiagnosticError` RT065 where the machine lacks the memory, RT071 where no stage can be a donor."""
    if store == NOWHERE:
        return
    if store == PEER:
        _refuse_missing_donor(module)
        return
    info = context.target.info(module)
    if not info.capacity_of(_HOMES[store]):
        text = f"the machine '{info.name}' has no memory '{store}' to store in"
        way_out = f"say [{store}_capacity], [{store}_store] and [{store}_fetch] in its file (--machine)"
        fail("RT065", text, help=way_out)


def _refuse_missing_donor(module: Module) -> None:
    """Raise `DiagnosticError` RT071 where the plan has one stage, or the module's order hangs."""
    if module.topology.stages == 1:
        text = "'store=peer' keeps activations in the DDR of another stage, and the plan has one stage"
        fail("RT071", text, help="leave 'store' out, or store in another memory that the machine has")
    try:
        UnitTimes(module)
    except ValueError as error:
        fail("RT071", f"'store=peer' needs an order that ends: {error}", help="'ratrainc verify' says what hangs")


@define(eq=False)
class _Recovering:
    """Recovery of stages that are independent of each other: decided in parallel processes, rebuilt in this one."""

    recompute: RecomputePass
    module: Module
    context: PassContext
    windows: list[list[Work]]
    reorder: Reorder
    _mine: dict[int, _Recovered] = field(factory=dict, init=False)
    """Stages that this process rewrote while it decided."""

    def decided(self, stage: Stage) -> _Decided:
        """Decide about a stage."""
        draft, trials = stage.draft(), Trials(self.module, self.context)
        self.reorder(draft, trials)
        # An order is sent between processes as positions, since ops are compared by identity.
        places = {op: place for place, op in enumerate(stage.ops)}
        order = [places[op] for op in draft.ops]
        rewriting = Rewriting(draft)
        choice = self.recompute.choice(rewriting, trials)
        made = self.recompute.recovered(rewriting, trials, choice, self.windows[stage.index])
        self._mine[stage.index] = made
        return _Decided(order, choice, made.moves, made.kept)

    def made(self, stage: Stage, decided: _Decided) -> _Recovered:
        """Return the stage rewritten by a decision."""
        # Without a pool, deciding has built the draft already.
        if stage.index in self._mine:
            return self._mine[stage.index]
        rewriting = Rewriting(stage.draft([stage.ops[place] for place in decided.order]))
        trials = Trials(self.module, self.context)
        return self.recompute.recovered(rewriting, trials, decided.choice, self.windows[stage.index], decided)
