"""`joint-order`: decides reductions, updates, gathers and recovery together.

    joint-order{policy=... placement=... reduction=buckets|bulk|blocking-bulk state=ordered|bulk|blocking-bulk
                store=... offload=... gathered=...}

    joint-order   is one of   bucket-grad-sync{bytes=...},[schedule-update,]insert-prefetch{depth-blocks=...},
                              recompute{policy=auto placement=forward-side}

These compete for one link, one DDR bandwidth and one byte budget, so the best choice of one depends on the others. The
steps:

1. With ZeRO 3, choose how many blocks ahead each stage gathers its views (`passes/state/prefetch_depth.py`).
2. For each stage, try bucket sizes with both orders of updates; the stage's own period from step to step decides.
3. Keep activations in the bytes that buckets, prefetched views and lagging engines leave free (`recompute`).
4. Simulate the whole step, and the one with the default bucket size and update order; take the faster.

So, in the simulation without byte reuse, deciding together never costs time.

With `reduction=bulk` a stage's gradients are reduced at once after its whole backward. With `state=bulk` all updates
come before all gathers, in the order of blocks. With `blocking-bulk` compute also waits for the reductions, or the
gathers (`bucket-grad-sync`, `insert-prefetch`). These options show how much each mechanism gains.

With `store=host|file` activations of layers may be offloaded to another memory until their backward, with `store=peer`
to the DDR of another stage (`recompute`). With `offload=host|file` the masters and moments of some blocks stay in
another memory (`offload-state`): the number of blocks that makes the step shortest, with all of the above chosen anew
for each number tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from attrs import define, evolve, field, frozen

from ratrain.passes.pass_base import Decision, Idle, Pass, PassContext
from ratrain.passes.recovery.recompute import (
    GATHERED,
    NOWHERE,
    OFFLOAD_CHOICES,
    POLICIES,
    STORE_CHOICES,
    RecomputePass,
    idle_of_recovery,
    refuse_missing_memory,
    refuse_second_recovery,
    take_the_shorter,
)
from ratrain.passes.recovery.rewriting import mark_checkpoints
from ratrain.passes.state.bucket_grad_sync import LIMITS, BucketGradSyncPass, GradSync
from ratrain.passes.state.insert_prefetch import InsertPrefetchPass
from ratrain.passes.state.offload_choice import offload_as_much_as_pays
from ratrain.passes.state.prefetch_depth import DEPTHS, prefetch_depth
from ratrain.passes.state.schedule_update import ScheduleUpdatePass
from ratrain.passes.trial.trial import Trials, step_seconds_at_own_addresses
from ratrain.ratrain_ir.analysis.chunk_actions import most_in_flight_on
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.model.sharded_blocks import any_gathered_within_step, zero_level
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.kinds import brings_parameters
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.process_pool import each
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

T = TypeVar("T")
_WORTH = 2e-3
"""Relative gain that an order must show to be tried on the whole module, at the cost of a second recovery choice."""


@frozen
class _StateOrder:
    """Order of one stage's reductions, updates and gathers."""

    buckets: BucketGradSyncPass
    updates_when_final: bool
    """True: updates stand where their gradients become final."""
    prefetch: InsertPrefetchPass | None
    """None: gathers stay in place, after all updates or right before the use."""

    def rewrite(self, stage: Stage, trials: Trials) -> None:
        """Rewrite a stage's list."""
        self.make(stage, trials)
        self.reorder(stage, trials)

    def make(self, stage: Stage, trials: Trials) -> None:
        """Form the buckets and set blocking gathers, without moving updates or gathers."""
        self.buckets.rewrite(trials.module, stage, trials.context)
        if self.prefetch is not None:
            self.prefetch.block(stage)

    def reorder(self, stage: Stage, trials: Trials) -> None:
        """Move updates and gathers to their places."""
        if self.updates_when_final:
            ScheduleUpdatePass().rewrite(stage, trials)
        if self.prefetch is not None:
            self.prefetch.reorder(stage, trials)

    def __str__(self) -> str:
        updates = ", updates as gradients become final" if self.updates_when_final else ""
        depth = self.prefetch.depth_blocks if self.prefetch is not None else 0
        ahead = f", views gathered {depth} blocks ahead" if depth > 1 else ""
        return f"buckets of {self.buckets.bytes} bytes{updates}{ahead}"


@frozen
class JointOrderPass(Pass):
    """Order reductions, updates and gathers, and choose what is recomputed where, together."""

    name: ClassVar[str] = "joint-order"
    decides: ClassVar[frozenset[Decision]] = frozenset(
        {Decision.REDUCTIONS, Decision.UPDATES, Decision.GATHERS, Decision.RECOVERY}
    )
    policy: str = field(default="auto", metadata={"choices": POLICIES})
    placement: str = field(default="forward-side", metadata={"choices": ("inline", "forward-side")})
    budget: int | None = field(default=None, metadata={"unit": "bytes"})
    bucket_bytes: int = field(default=LIMITS[-1], metadata={"unit": "bytes"})
    """Largest bucket size in bytes that is tried."""
    reduction: str = field(default="buckets", metadata={"choices": ("buckets", "bulk", "blocking-bulk")})
    state: str = field(default="ordered", metadata={"choices": ("ordered", "bulk", "blocking-bulk")})
    store: str = field(default=NOWHERE, metadata={"choices": STORE_CHOICES})
    """Memory to which activations of layers may be offloaded until their backward (`recompute`)."""
    offload: str = field(default=NOWHERE, metadata={"choices": OFFLOAD_CHOICES})
    """Memory in which masters and moments may stay (`offload-state`), of as many blocks as make the step shortest."""
    gathered: str = field(default="auto", metadata={"choices": GATHERED})
    """`auto`: what ranks exchanged for a forward is kept for the backward if bytes are left (`recompute`).

    `again`: they never are.
    """

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """Yield the ineffective options of `recompute`, and those on which no order that is tried depends."""
        within_step = any_gathered_within_step(plan, block_chain(model))
        chooses_depth = self.state == "ordered" and within_step
        elsewhere = self.store != NOWHERE or self.offload != NOWHERE
        yield from idle_of_recovery(self.policy, self.placement, plan, by_bytes=chooses_depth or elsewhere)
        if self.reduction != "buckets":
            why = f"with reduction={self.reduction} a bucket is all that a stage reduces, of whatever size"
            yield Idle("bucket_bytes", why, f"leave it out, or reduction={self.reduction}")
        elif self.bucket_bytes > LIMITS[-1]:
            yield Idle("bucket_bytes", f"the largest buckets that are tried have {LIMITS[-1]} bytes", "leave it out")
        if self.state == "blocking-bulk" and not (plan.shards_state or within_step):
            why = (
                f"with zero = {plan.zero} and dp = {plan.dp} nothing is sharded, and nothing gathered that "
                "compute could wait for"
            )
            yield Idle("state", why, "use state=bulk, or zero = 1 or more with dp = 2 or more")

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage.

        Raises `DiagnosticError` RT071 where recovery is placed already, or `store` meets a policy other than `auto`,
        and the errors of `refuse_missing_memory` where the machine lacks the memory of `store`.
        """
        refuse_second_recovery(module)
        refuse_missing_memory(self.store, module, context)
        if self.store != NOWHERE and self.policy != "auto":
            text = (
                f"'store={self.store}' is for policy=auto, which chooses what to store; the policy is '{self.policy}'"
            )
            fail("RT071", text, help="leave one of them out; 'recompute' stores all that another policy keeps")
        if self.offload != NOWHERE:
            budget = context.target.capacity(module).left if self.budget is None else self.budget
            order = evolve(self, offload=NOWHERE).run
            offload_as_much_as_pays(module, context, Home(self.offload), budget, order)
        elif self.store == NOWHERE:
            mark_checkpoints(self.rewrite(module, context))
        else:
            take_the_shorter(module, context, evolve(self, store=NOWHERE), self, self.budget)

    def rewrite(self, module: Module, context: PassContext) -> list[Tensor]:
        """Rewrite the lists of every stage; return the tensors that recovery starts from, for `mark_checkpoints`."""
        depths = self.depths(module, context)
        chosen = self.choose(module, context, depths)
        default = [self.orders(depth)[0] for depth in depths]
        if chosen == default:
            return self.ordered(module, context, default)
        joint = _Ordered(self, module.draft(), chosen, context)
        separate = _Ordered(self, module.draft(), default, context)
        best = joint if joint.seconds < separate.seconds else separate
        module.adopt(best.module)
        context.statistics |= best.statistics
        context.statistics["simulated step"] = (
            f"{joint.seconds:.6g} s ordered jointly, {separate.seconds:.6g} s one by one, "
            f"{separate.seconds / best.seconds - 1:.3%} gained"
        )
        return best.starts

    @property
    def recovery(self) -> RecomputePass:
        """The pass that chooses what is recomputed or stored."""
        return RecomputePass(self.policy, self.budget, self.placement, self.store, self.gathered)

    def depths(self, module: Module, context: PassContext) -> list[int]:
        """Return for each stage how many blocks ahead it gathers views that are sharded within the step.

        Stages that are alike share one answer.
        """
        brought = any(brings_parameters(op) for stage in module.stages for op in stage.ops)
        if self.state != "ordered" or not brought:
            return [InsertPrefetchPass().depth_blocks] * len(module.stages)

        recovery = evolve(self.recovery, store=NOWHERE)  # offloaded activations only leave more bytes for views

        def depth(stage: Stage) -> int:
            return prefetch_depth(stage, Trials(module, context), recovery, self.give_order)

        return _of_likes(depth, module.stages, _likenesses(module), len(DEPTHS))

    def give_order(self, stage: Stage, trials: Trials, depth: int) -> None:
        """Give a stage the default order with a prefetch depth."""
        self.orders(depth)[0].rewrite(stage, trials)

    def orders(self, depth: int) -> list[_StateOrder]:
        """Return the orders that a stage may take with a prefetch depth of `depth` blocks, the default first."""
        if self.reduction == "buckets":
            limits = (BucketGradSyncPass().bytes, *LIMITS)
            buckets = [BucketGradSyncPass(min(int(limit), self.bucket_bytes)) for limit in limits]
        else:
            buckets = [BucketGradSyncPass(unit="stage", blocking=self.reduction == "blocking-bulk")]
        when_final = (True, False) if self.state == "ordered" else (False,)
        prefetch = {
            "ordered": InsertPrefetchPass(depth),
            "bulk": None,
            "blocking-bulk": InsertPrefetchPass(depth_blocks=0, blocking=True),
        }[self.state]
        return list(dict.fromkeys(_StateOrder(item, final, prefetch) for final in when_final for item in buckets))

    def choose(self, module: Module, context: PassContext, depths: list[int]) -> list[_StateOrder]:
        """Return for each stage the order with the shortest period.

        Stages of like blocks and depth share one answer.
        """

        def best(stage: Stage) -> _StateOrder:
            return self.shortest(stage, Trials(module, context), self.orders(depths[stage.index]))

        likenesses = [(_kinds(module, stage), depth) for stage, depth in zip(module.stages, depths, strict=True)]
        return _of_likes(best, module.stages, likenesses, len(self.orders(depths[0])))

    def shortest(self, stage: Stage, trials: Trials, orders: list[_StateOrder]) -> _StateOrder:
        """Return the order with the shortest period of a stage; the default where none is clearly shorter."""
        best, best_seconds = orders[0], float("inf")
        tried = set()
        for order in orders:
            trial = stage.draft()
            order.rewrite(trial, trials)
            same = tuple(op.blocks for op in trial.ops if isinstance(op, GradSync)), order.updates_when_final
            if same in tried:
                continue
            tried.add(same)
            seconds = trials.period(trial)
            if seconds < best_seconds * (1 - _WORTH):
                best, best_seconds = order, seconds
        return best

    def ordered(self, module: Module, context: PassContext, orders: list[_StateOrder]) -> list[Tensor]:
        """Give each stage its order, then choose recovery; return the tensors that recovery starts from."""
        for stage, order in zip(module.stages, orders, strict=True):
            order.make(stage, Trials(module, context))
            context.statistics[f"state of stage {stage.index}"] = str(order)
        return self.recovery.rewrite(module, context, lambda stage, trials: orders[stage.index].reorder(stage, trials))


def _kinds(module: Module, stage: Stage) -> tuple[str, ...]:
    """Return the kind and ZeRO level of each block of a stage, and the memory of its frozen parameters."""
    homes = {tensor.name: tensor.home.value for tensor in stage.tensors.values() if tensor.kind is StateKind.FROZEN}
    blocks = module.topology.stage_blocks[stage.index]
    return tuple(
        f"{block.kind} {zero_level(module.plan, block)} {homes.get(f'f.{block}')} {homes.get(f'fq.{block}')}"
        for block in blocks
    )


def _likenesses(module: Module) -> list[object]:
    """Return a key per stage, equal for stages with like blocks and as many micro-batches in flight."""
    flights = [most_in_flight_on(module, stage) for stage in module.stages]
    return [(_kinds(module, stage), flight) for stage, flight in zip(module.stages, flights, strict=True)]


def _of_likes(
    function: Callable[[Stage], T], stages: Sequence[Stage], likenesses: Sequence[object], trials: int
) -> list[T]:
    """Return the result of `function` for each stage, called once per likeness, in a process pool if that pays.

    `trials`: about how many orders one call tries, from which the work is estimated.
    """
    first: dict[object, Stage] = {}
    for likeness, stage in zip(likenesses, stages, strict=True):
        first.setdefault(likeness, stage)
    work = trials * sum(len(stage.ops) for stage in first.values())
    found = dict(zip(first, each(function, list(first.values()), work=work), strict=True))
    return [found[likeness] for likeness in likenesses]


@define(eq=False)
class _Ordered:
    """Draft of the module with an order for each stage, and its simulated step if no bytes were used twice."""

    joint_order: JointOrderPass
    module: Module
    orders: list[_StateOrder]
    context: PassContext
    starts: list[Tensor] = field(init=False)
    """Tensors that recovery starts from."""
    seconds: float = field(init=False)
    statistics: dict[str, int | float | str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.starts = self.joint_order.ordered(self.module, self.context, self.orders)
        self.statistics = dict(self.context.statistics)
        self.seconds = step_seconds_at_own_addresses(self.module, self.context)
