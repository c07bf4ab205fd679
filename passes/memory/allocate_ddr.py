"""`allocate-ddr{capacity=...}`: gives every tensor its bytes in the stage's arena, under the capacity; and what is stored in other memories its bytes there.

Greedy placements come first, from the cheapest to the dearest. Where they exceed the capacity, two exact searches take turns on each
overfull range of time of at most 500 tensors, within a budget of nodes, not of seconds: the same module gets the same addresses on any
machine, unless two minutes do not last for it. `python benchmarks/minimalloc.py` shows what they reach on published problems.

When the live bytes alone exceed the capacity no allocation can help: the refusal names the op at the peak, who holds the bytes
there, and what would free some.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, field, frozen

from ratrain.passes.memory.allocation import Allocation, allocate
from ratrain.passes.memory.overlap import Occupancy, occupancy
from ratrain.passes.memory.trial import Trials, allocation_problem
from ratrain.passes.pass_base import Fact, Pass, PassContext
from ratrain.ratrain_ir.analysis.progress import blocking_cycle
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.diagnostics import Note, fail
from ratrain.ratrain_ir.module import Level, Module
from ratrain.ratrain_ir.ops import Forward, Op
from ratrain.ratrain_ir.types import STORES, Home, StateKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.lifetime import Lifetimes
    from ratrain.ratrain_ir.target import Capacity

_MAX_TRIALS = 8


@frozen
class AllocateDdrPass(Pass):
    """Place every tensor in DDR, as low as a portfolio of methods can."""

    name: ClassVar[str] = "allocate-ddr"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED, Fact.RELEASED, Fact.LEGALISED})
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.ALLOCATED})
    capacity: int | None = field(default=None, metadata={"unit": "bytes"})
    overlap: str = field(default="keep", metadata={"choices": ("keep", "ignore")})
    """Whether bytes that another engine still works on are left alone as far as the capacity lets, so that nothing waits for them."""

    def run(self, module: Module, context: PassContext) -> None:
        """Allocate every stage.

        Raises `DiagnosticError` RT053 or RT052 for every stage that does not fit.
        """
        found = context.target.capacity(module)
        capacity = self._capacity(module, context, found)
        for stage in module.stages:
            stage.prune()  # bytes that nothing touches would only make the arena larger
        op_seconds = partial(context.op_seconds, module)
        occupancies = [occupancy(stage, op_seconds) for stage in module.stages]
        for occupied in occupancies:
            if occupied.lives.peak_bytes > capacity:
                _refuse(occupied.lives, capacity, found, context, module)
        context.diagnostics.check()
        placed = _place_without_hangs(module, occupancies, capacity, context, keep=self.overlap == "keep")
        for occupied, placement in zip(occupancies, placed, strict=True):
            _check_arena(occupied.lives, placement, capacity, found, context, module)
        context.diagnostics.check()
        for home in STORES:
            _place_stored(module, home, context)
        module.level = Level.ALLOCATED
        module.target = evolve(context.target.info(module), capacity_bytes=capacity)

    def _capacity(self, module: Module, context: PassContext, found: Capacity) -> int:
        """The bytes a stage may use: those asked for, else those that a module sized for this target names, else all of the target's.

        Raises `DiagnosticError` RT052 where more are asked for than the target has.
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


def _place_without_hangs(
    module: Module,
    occupancies: list[Occupancy],
    capacity: int,
    context: PassContext,
    *,
    keep: bool,
    trial: bool = False,
) -> list[Allocation]:
    """Place every stage so that byte reuse makes no cycle of waits, even when sends wait for their receives.

    The placement passes order all stages so that reuse in list order closes no cycle. A schedule that was reordered by hand may
    let two neighbours each receive into what they are still sending to the other; then what is received takes no bytes of what
    is sent. What hangs even so hangs by its order, and verification says where.
    """
    placed = [_place(occupied, capacity, keep=keep, apart=False, trial=trial) for occupied in occupancies]
    if blocking_cycle(module, rendezvous=True) is None:
        return placed
    context.statistics["messages"] = (
        "what is received keeps apart from what is sent, so that no reuse of bytes can hang"
    )
    return [_place(occupied, capacity, keep=keep, apart=True, trial=trial) for occupied in occupancies]


def _place(occupied: Occupancy, capacity: int, *, keep: bool, apart: bool, trial: bool = False) -> Allocation:
    """Place a stage; `keep`: so that as few ops as the capacity lets wait for bytes that another engine still works on."""
    room = capacity
    for trials_left in range(_MAX_TRIALS if keep else 0, -1, -1):
        lag = occupied.lag_within(room) if trials_left else 0.0
        placement = allocate(allocation_problem(occupied.within(lag), apart=apart), capacity=capacity, trial=trial)
        excess = placement.arena_bytes - capacity
        if excess <= 0 or lag <= 0:
            break
        room -= excess
    for tensor, offset in zip(occupied.lives.intervals, placement.offsets, strict=True):
        tensor.offset = offset
    return placement


def step_seconds_placed(module: Module, context: PassContext, capacity: int) -> float:
    """Simulated seconds of a step of a placed module, were it sized for the target and allocated now; infinite where it does not fit.

    Infinite too where stages that keep something for each other would wait in a circle.
    """
    trials = Trials(module, context)
    copy = copy_module(evolve(module, stages=[trials.with_workspace(stage) for stage in module.stages]))
    op_seconds = partial(context.op_seconds, copy)
    info = context.target.info(module)
    for home in Home:
        room = capacity if home is Home.DDR else info.capacity_of(home)
        occupancies = [occupancy(stage, op_seconds, home) for stage in copy.stages if home in stage.homes]
        if any(occupied.lives.peak_bytes > room for occupied in occupancies):
            return inf
        if home is Home.DDR:
            placed = _place_without_hangs(copy, occupancies, room, context, keep=True, trial=True)
            if _has_guests(copy) and blocking_cycle(copy, rendezvous=True) is not None:
                return inf
        else:
            placed = [_place(occupied, room, keep=True, apart=False, trial=True) for occupied in occupancies]
        if any(placement.arena_bytes > room for placement in placed):
            return inf
    return context.target.step_seconds(evolve(copy, level=Level.ALLOCATED, target=info))


def _has_guests(module: Module) -> bool:
    return any(tensor.kind is StateKind.GUEST for stage in module.stages for tensor in stage.tensors.values())


def _place_stored(module: Module, home: Home, context: PassContext) -> None:
    """Place what every stage has in another memory; report RT053 or RT052 where that memory has no room for it."""
    capacity = context.target.info(module).capacity_of(home)
    for stage in module.stages:
        if home not in stage.homes:
            continue
        occupied = occupancy(stage, partial(context.op_seconds, module), home)
        peak = occupied.lives.peak_bytes
        placement = _place(occupied, capacity, keep=True, apart=False) if peak <= capacity else None
        if placement is not None and placement.arena_bytes <= capacity:
            context.statistics[f"stage {stage.index} {home.value}"] = f"{placement.arena_bytes} bytes, {peak} live"
            continue
        needed, code = (peak, "RT053") if placement is None else (placement.arena_bytes, "RT052")
        has = f"the machine's {capacity} of it" if capacity else "the machine has none of it"
        context.diagnostics.error(
            code,
            f"stage @{stage.index} stores {needed} bytes in the memory '{home.value}': {has}",
            help=f"store less, or give a machine file with a larger {home.value}_capacity with --machine",
        )
    context.diagnostics.check()


def _account(found: Capacity) -> list[Note]:
    """Why the capacity is less than the memory there is."""
    return [] if found.account is None else [Note(found.account)]


def _check_arena(
    lives: Lifetimes, placement: Allocation, capacity: int, found: Capacity, context: PassContext, module: Module
) -> None:
    stage = lives.stage
    ratio = stage.arena_bytes / max(1, placement.proved_bytes)
    overlap = placement.lower_bound_bytes - lives.peak_bytes
    proved = placement.proved_bytes - placement.lower_bound_bytes
    holes = f", {proved} more that holes in lives cost" if proved else ""
    context.statistics[f"stage {stage.index}"] = (
        f"arena {stage.arena_bytes} bytes, lower bound {placement.proved_bytes} ({lives.peak_bytes} live, {overlap} more "
        f"so that nothing waits for other engines{holes}), ratio {ratio:.4f}, {placement.method}, {placement.seconds:.3f} s"
    )
    if stage.arena_bytes > capacity:
        short = stage.arena_bytes - capacity
        context.diagnostics.error(
            "RT052",
            f"stage @{stage.index} needs an arena of {stage.arena_bytes} bytes, {short} more than the capacity "
            f"of {capacity}, though only {lives.peak_bytes} are live at once",
            notes=_account(found),
            help=_way_out(module),
        )


def _refuse(lives: Lifetimes, capacity: int, found: Capacity, context: PassContext, module: Module) -> None:
    position = lives.peak_position
    stage = lives.stage
    notes = [
        Note(f"{kind.value}: {size} bytes ({size / 2**30:.2f} GiB)")
        for kind, size in lives.bytes_by_kind(position).items()
    ]
    context.diagnostics.error(
        "RT053",
        f"stage @{stage.index} has {lives.peak_bytes} bytes live at '{stage.ops[position]!r}', "
        f"{lives.peak_bytes - capacity} more than the capacity of {capacity}",
        notes=[*notes, *_account(found)],
        help=_way_out(module),
    )


def _keeps_saved(op: Op) -> bool:
    """Whether a layer's forward keeps tensors for its backward that could be recovered instead."""
    return type(op) is Forward and op.block.layer is not None and any(t.kind is StateKind.SAVED for t in op.writes)


def _way_out(module: Module) -> str:
    """Levers that lower the peak of this plan, cheapest first."""
    plan = module.plan
    levers = []
    if any(_keeps_saved(op) for stage in module.stages for op in stage.ops):
        levers.append("recompute{policy=full}")
    if plan.attention != "fused":
        levers.append('attention = "fused" in the plan')
    if plan.holds_logits:
        levers.append('logits = "chunked" in the plan')
    if plan.zero == 0 and plan.dp > 1:
        levers.append("zero = 1 in the plan")
    elif plan.dp > 1 and plan.reduce == "last":
        levers.append('zero = 2 with reduce = "each-micro-batch"')
    if plan.micro_batch_size > 1:
        levers.append("a smaller micro_batch_size")
    if plan.pp < module.model.layers:
        levers.append("more stages (pp)")
    free = "; ".join(levers) or "nothing in this plan; 'ratrainc plan' looks for another one"
    return f"what would free bytes: {free}"
