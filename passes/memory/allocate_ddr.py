"""`allocate-ddr{capacity=...}`: gives every tensor an address in the stage's arena, within the capacity.

    tensors and their lives    a: ops 0-4, 8 bytes    b: ops 2-6, 4 bytes    c: ops 5-9, 8 bytes
    offsets                    a at 0                 b at 8                 c at 0: a is dead by then

Tensors of the other memories (host, file) get their addresses there.

Greedy placements come first, from the cheapest to the most expensive. Where they exceed the capacity, an exact search
takes on each overfull range of time of at most 500 tensors. Its budget counts nodes, not seconds: a module gets the
same addresses on any machine, unless two minutes are too short for the budget. docs/allocation.md describes the methods
and what each one buys.

When the live bytes alone exceed the capacity no allocation can help: the refusal names the op at the peak, the tensors
that hold the bytes there, and ways to free some.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, field, frozen

from ratrain.passes.memory.allocation import Allocation, allocate
from ratrain.passes.pass_base import Fact, Pass, PassContext
from ratrain.passes.trial.overlap import Occupancy, occupancy
from ratrain.passes.trial.trial import Trials, allocation_problem
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.analysis.progress import blocking_cycle
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.config.types import STORES, Home, StateKind
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.compute import BackwardWeight, Forward
from ratrain.ratrain_ir.process_pool import each_stage
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Note, fail
from ratrain.ratrain_ir.support.quantities import number_of, size_text

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.lifetime import Lifetimes
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.target import Capacity

_MAX_TRIALS = 8
"""Placements of a stage with ever less room for lag, before the last one without any."""


@frozen
class AllocateDdrPass(Pass):
    """Place every tensor in DDR, as low as a portfolio of methods can."""

    name: ClassVar[str] = "allocate-ddr"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED, Fact.RELEASED, Fact.LEGALISED})
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.ALLOCATED})
    capacity: int | None = field(default=None, metadata={"unit": "bytes"})
    """Bytes of the arena; None: those that the module names for this target, or all that the target has."""
    overlap: str = field(default="keep", metadata={"choices": ("keep", "ignore")})
    """`keep`: bytes that another engine still works on stay taken as far as the capacity allows.

    Then nothing waits for them.
    """

    def run(self, module: Module, context: PassContext) -> None:
        """Give every tensor of every stage its offset.

        Raises `DiagnosticError` RT053 (live bytes exceed the capacity) or RT052 (only the arena does) for every stage
        that does not fit.
        """
        found = context.target.capacity(module)
        capacity = self._capacity(module, context, found)
        for stage in module.stages:
            stage.prune()  # bytes that nothing touches would only make the arena larger
        placed = _place_without_hangs(module, capacity, context, keep=self.overlap == "keep")
        for stage, each in zip(module.stages, placed, strict=True):
            if each.peak_bytes > capacity:
                _refuse(lifetimes(stage), capacity, found, context, module)
        context.diagnostics.check()
        for stage, each in zip(module.stages, placed, strict=True):
            assert each.allocation is not None  # the live bytes of all stages fit, so all were placed
            _check_arena(stage, each.peak_bytes, each.allocation, capacity, found, context, module)
        context.diagnostics.check()
        context.peaks = [each.peak_bytes for each in placed]
        for home in STORES:
            _place_stored(module, home, context)
        module.level = Level.ALLOCATED
        module.target = evolve(context.target.info(module), capacity_bytes=capacity)

    def _capacity(self, module: Module, context: PassContext, found: Capacity) -> int:
        """Return the bytes that a stage may use.

        The option decides; else the module, if it was sized for this target; else all that the target has. Raises
        `DiagnosticError` RT052 where the option asks for more than the target has.
        """
        info, named = context.target.info(module), module.target
        if self.capacity is not None and self.capacity > info.capacity_bytes:
            text = f"'{self.name}' is to use {self.capacity} bytes; the machine '{info.name}' has {info.capacity_bytes}"
            fail(
                "RT052",
                text,
                notes=_account(found),
                help="lower the capacity, or give a machine file that has as many with --machine",
            )
        if self.capacity is None and named is not None and (named.name, named.digest) == (info.name, info.digest):
            return named.capacity_bytes
        return info.capacity_bytes if self.capacity is None else self.capacity


@frozen
class _Placed:
    """Result of placing a stage's tensors in one memory."""

    peak_bytes: int
    """Most bytes that are live at once."""
    allocation: Allocation | None
    """May be None where the live bytes of this or another stage exceed the capacity."""


def _place_without_hangs(
    module: Module, capacity: int, context: PassContext, *, keep: bool, trial: bool = False
) -> list[_Placed]:
    """Place every stage so that byte reuse makes no cycle of waits, even when sends wait for their receives.

    The placement passes order all stages so that reuse in list order closes no cycle. A schedule that was reordered by
    hand may let two neighbours each receive into the bytes that they still send to the other. Then the stages are
    placed again so that no received tensor shares bytes with a sent one. If it still hangs, its order is the cause, and
    verification says where.
    """
    placed = _place_all(module, module.stages, Home.DDR, capacity, context, keep=keep, trial=trial)
    if _exceeds(placed, capacity) or blocking_cycle(module, rendezvous=True) is None:
        return placed
    context.statistics["messages"] = (
        "what is received keeps apart from what is sent, so that no reuse of bytes can hang"
    )
    return _place_all(module, module.stages, Home.DDR, capacity, context, keep=keep, apart=True, trial=trial)


def _exceeds(placed: list[_Placed], capacity: int) -> bool:
    """Tell whether the live bytes of some stage exceed the capacity."""
    return any(each.peak_bytes > capacity for each in placed)


def _place_all(
    module: Module,
    stages: list[Stage],
    home: Home,
    capacity: int,
    context: PassContext,
    *,
    keep: bool,
    apart: bool = False,
    trial: bool = False,
) -> list[_Placed]:
    """Place the tensors of `stages` in the memory `home` and set their offsets.

    If the peak of one stage exceeds the capacity, no offset is set, and only the peaks of the result are meaningful.
    `keep` and `apart` are as in `_place` and `allocation_problem`.
    """
    too_much = False

    def place(stage: Stage) -> _Placed:
        nonlocal too_much  # known for the stages of this process only: it need not place the rest then
        forms = context.forms()
        occupied = occupancy(stage, lambda stage, op: context.op_seconds(module, stage, op, forms), home)
        peak = occupied.lives.peak_bytes
        too_much |= peak > capacity
        return _Placed(peak, None if too_much else _place(occupied, capacity, keep=keep, apart=apart, trial=trial))

    found = each_stage(place, stages)
    if not _exceeds(found, capacity):
        for stage, placed in zip(stages, found, strict=True):
            assert placed.allocation is not None
            tensors = (tensor for tensor in stage.tensors.values() if tensor.home is home)
            for tensor, offset in zip(tensors, placed.allocation.offsets, strict=True):
                tensor.offset = offset
    return found


def _place(occupied: Occupancy, capacity: int, *, keep: bool, apart: bool, trial: bool) -> Allocation:
    """Place a stage.

    With `keep`, intervals are lengthened as far as the capacity allows, so that few ops wait for bytes in use
    elsewhere.
    """
    room = capacity
    for trials_left in range(_MAX_TRIALS if keep else 0, -1, -1):
        lag = occupied.lag_within(room) if trials_left else 0.0
        placement = allocate(allocation_problem(occupied.within(lag), apart=apart), capacity=capacity, trial=trial)
        # Peak bytes are only a lower bound of the arena. Aim lower by what the arena exceeds, until it fits or no lag
        # is left.
        excess = placement.arena_bytes - capacity
        if excess <= 0 or lag <= 0:
            break
        room -= excess
    return placement


def step_seconds_placed(module: Module, context: PassContext, capacity: int) -> float:
    """Return the simulated seconds of a step of a placed module, as if it were legalised and allocated.

    Infinite where it does not fit, or where stages that offload to each other would wait in a cycle.
    """
    trials = Trials(module, context)
    copy = copy_module(evolve(module, stages=[trials.with_workspace(stage) for stage in module.stages]))
    info = context.target.info(module)
    for home in Home:
        room = capacity if home is Home.DDR else info.capacity_of(home)
        if home is Home.DDR:
            placed = _place_without_hangs(copy, room, context, keep=True, trial=True)
        else:
            stages = [stage for stage in copy.stages if home in stage.homes]
            placed = _place_all(copy, stages, home, room, context, keep=True, trial=True)
        if any(each.allocation is None or each.allocation.arena_bytes > room for each in placed):
            return inf
        if home is Home.DDR and _has_remote(copy) and blocking_cycle(copy, rendezvous=True) is not None:
            return inf
    return context.target.step_seconds(evolve(copy, level=Level.ALLOCATED, target=info))


def _has_remote(module: Module) -> bool:
    return any(tensor.kind is StateKind.REMOTE for stage in module.stages for tensor in stage.tensors.values())


def _place_stored(module: Module, home: Home, context: PassContext) -> None:
    """Place every stage's tensors of another memory; report RT053 or RT052 where that memory has no room for them."""
    capacity = context.target.info(module).capacity_of(home)
    stages = [stage for stage in module.stages if home in stage.homes]
    found = _place_all(module, stages, home, capacity, context, keep=True)
    for stage, placed in zip(stages, found, strict=True):
        peak, placement = placed.peak_bytes, placed.allocation
        if peak > capacity:
            needed, code = peak, "RT053"
        elif placement is not None and placement.arena_bytes > capacity and not _exceeds(found, capacity):
            needed, code = placement.arena_bytes, "RT052"
        else:
            if placement is not None:
                context.statistics[f"stage {stage.index} {home.value}"] = f"{placement.arena_bytes} bytes, {peak} live"
            continue
        has = f"the machine's {capacity} of it" if capacity else "the machine has none of it"
        context.diagnostics.error(
            code,
            f"stage @{stage.index} stores {needed} bytes in the memory '{home.value}': {has}",
            help=f"store less, or give a machine file with a larger {home.value}_capacity with --machine",
        )
    context.diagnostics.check()


def _account(found: Capacity) -> list[Note]:
    """Return a note on why the capacity is less than the machine's memory, if the target gives one."""
    return [] if found.account is None else [Note(found.account)]


def _check_arena(
    stage: Stage,
    peak_bytes: int,
    placement: Allocation,
    capacity: int,
    found: Capacity,
    context: PassContext,
    module: Module,
) -> None:
    ratio = stage.arena_bytes / max(1, placement.proved_bytes)
    overlap = placement.lower_bound_bytes - peak_bytes
    proved = placement.proved_bytes - placement.lower_bound_bytes
    holes = f", {proved} more that holes in lives cost" if proved else ""
    context.statistics[f"stage {stage.index}"] = (
        f"arena {stage.arena_bytes} bytes, lower bound {placement.proved_bytes} ({peak_bytes} live, {overlap} more "
        f"so that nothing waits for other engines{holes}), ratio {ratio:.4f}, {placement.method}, "
        f"{placement.seconds:.3f} s"
    )
    if stage.arena_bytes > capacity:
        short = stage.arena_bytes - capacity
        context.diagnostics.error(
            "RT052",
            f"stage @{stage.index} needs an arena of {stage.arena_bytes} bytes, {short} more than the capacity "
            f"of {capacity}, though only {peak_bytes} are live at once",
            notes=_account(found),
            help=_way_out(module),
        )


def _refuse(lives: Lifetimes, capacity: int, found: Capacity, context: PassContext, module: Module) -> None:
    position = lives.peak_position
    stage = lives.stage
    notes = [Note(f"{kind.value}: {_bytes_text(size)}") for kind, size in lives.bytes_by_kind(position).items()]
    context.diagnostics.error(
        "RT053",
        f"stage @{stage.index} has {lives.peak_bytes} bytes live at '{stage.ops[position]!r}', "
        f"{lives.peak_bytes - capacity} more than the capacity of {capacity}",
        notes=[*notes, *_account(found)],
        help=_way_out(module),
    )


def _bytes_text(size: int) -> str:
    """Format bytes exactly, and in a larger unit if one shows them."""
    shown = size_text(size)
    exact = number_of(size, "byte")
    return exact if shown == exact else f"{exact} ({shown})"


def _keeps_saved(op: Op) -> bool:
    """Tell whether an op is a layer's forward that keeps tensors for its backward that could be recomputed instead."""
    return type(op) is Forward and op.block.layer is not None and any(t.kind is StateKind.SAVED for t in op.writes)


def _more_groups(module: Module) -> int | None:
    """Return more groups of key heads than context ranks gather one after the other now; None if there are none.

    Without groups they save bytes where attention keeps its output: with groups it always does.
    """
    plan, heads = module.plan, rank_model(module.model, module.plan).kv_heads
    fits = [number for number in range(plan.context_groups + 1, heads + 1) if heads % number == 0]
    if not (plan.exchanges_keys and fits) or plan.slices or module.model.position == "alibi":
        return None
    keeps = any(
        type(op) is Forward and any(t.slot == "o" for t in op.writes) for stage in module.stages for op in stage.ops
    )
    return fits[0] if keeps or plan.context_groups > 1 else None


def _more_expert_ranks(module: Module) -> int | None:
    """Return a larger number of replicas that may share out the experts of a layer; None if there is none."""
    plan, experts = module.plan, module.model.experts
    if experts is None or any(type(op) is BackwardWeight for stage in module.stages for op in stage.ops):
        return None
    for number in range(plan.ep + 1, plan.dp + 1):
        if plan.dp % number == 0 and experts % number == 0:
            try:
                check_plan(evolve(plan, ep=number), module.model)
            except DiagnosticError:
                return None
            return number
    return None


def _way_out(module: Module) -> str:
    """Return a help text with the options that would lower the peak of this plan, cheapest first."""
    plan = module.plan
    levers = []
    if any(_keeps_saved(op) for stage in module.stages for op in stage.ops):
        levers.append("recompute{policy=full}")
    if plan.attention != "fused":
        levers.append('attention = "fused" in the plan')
    if plan.holds_logits:
        levers.append('logits = "chunked" in the plan')
    if plan.exchanges_heads:
        levers.append('context_exchange = "keys" in the plan')
    if more := _more_groups(module):
        levers.append(f"context_groups = {more} in the plan")
    if more := _more_expert_ranks(module):
        levers.append(f"ep = {more} in the plan")
    if plan.zero == 0 and plan.replicas > 1:
        levers.append("zero = 1 in the plan")
    elif plan.replicas > 1 and plan.reduce == "last":
        levers.append('zero = 2 with reduce = "each-micro-batch"')
    if plan.micro_batch_size > 1:
        levers.append("a smaller micro_batch_size")
    if plan.pp < module.model.layers:
        levers.append("more stages (pp)")
    free = "; ".join(levers) or "nothing in this plan; 'ratrainc plan' looks for another one"
    return f"what would free bytes: {free}"
