"""What must hold of every sound module, checked by brute force; each function raises AssertionError saying what does not.

Nothing here uses `ratrain.ratrain_ir.analysis` or the verifier's sweeps, except where their result is what is checked: these are
second opinions, slow and plain. `check_pass` runs them all on what a pipeline makes of generated modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.diagnostics import DiagnosticError
from ratrain.ratrain_ir.equality import first_difference
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops import (
    AllGather,
    AllReduce,
    Forward,
    InputGradientOp,
    Op,
    Recompute,
    ReduceScatter,
    Release,
    Tensor,
    WeightGradientOp,
)
from ratrain.ratrain_ir.parser import parse_module
from ratrain.ratrain_ir.printer import print_module
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import Case, cases, targets
from ratrain.ratrain_ir.types import StateKind, aligned
from ratrain.ratrain_ir.verifier import check

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage

Runner = Callable[["Module", str, FakeTarget], object]
"""Runs a pipeline string on a module in place: `lambda m, text, target: PassManager(target, verify_each=True).run(m, text)`."""


def check_pass(pipeline: str, run: Runner, *, examples: int = 25, shrink: bool = True) -> None:
    """Run a pipeline over generated modules and check everything below: the one call a pass author needs.

    Raises AssertionError for a model and a plan that break an invariant, or whatever the pipeline raises; with `shrink`,
    which may take a minute, for small ones.
    """
    from hypothesis import HealthCheck, Phase, given, settings

    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]

    @settings(
        max_examples=examples, phases=phases, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(), targets())
    def every_example(case: Case, target: FakeTarget) -> None:
        module, again = case.module(), parse_module(print_module(case.module()))
        run(module, pipeline, target)
        run(again, pipeline, target)
        check_everything(module, target.capacity_bytes)
        work = mathematics(case.module())
        assert mathematics(module) == work, f"'{pipeline}' changed what is computed:\n{print_module(module)}"
        difference = first_difference(module, again)
        assert difference is None, f"'{pipeline}' gives two results for one module: {difference}"

    every_example()


def check_everything(module: Module, capacity_bytes: int | None = None) -> None:
    """Every invariant that a module's level and passes claim."""
    is_sound(module)
    text_round_trip_is_exact(module)
    for stage in module.stages:
        lifetimes_are_exact(stage)
        if any(type(op) is Release for op in stage.ops):
            nothing_is_used_after_release(stage)
            only_carried_bytes_are_live_at_the_end(stage)
        if module.level is not Level.DATAFLOW and module.plan.schedule == "1f1b":
            in_flight_is_exact(module, stage)
        if module.level is Level.ALLOCATED:
            no_byte_is_shared(stage)
            arena_is_within(stage, capacity_bytes)
            peak_is_within_arena(stage)


def is_sound(module: Module) -> None:
    """The verifier accepts the module."""
    try:
        check(module)
    except DiagnosticError as error:
        raise AssertionError(f"the verifier refuses the module:\n{error}\n{print_module(module)}") from None


def text_round_trip_is_exact(module: Module) -> None:
    """Printing and parsing gives an equal module and, printed again, the same text."""
    text = print_module(module)
    back = parse_module(text)
    difference = first_difference(module, back)
    assert difference is None, f"parsing what was printed gives another module: {difference}"
    assert print_module(back) == text, "printing what was parsed gives another text"


def live_sets(stage: Stage) -> list[set[Tensor]]:
    """The tensors live at each op, by brute force.

    A tensor is live at an op if it holds a value there that is still wanted: it was defined at or before the op (or carried
    in), and is accessed at or after it (or carried out) before it is defined anew.
    """
    live: list[set[Tensor]] = [set() for _ in stage.ops]
    for tensor in stage.tensors.values():
        for start, stop in _lives(stage, tensor):
            for position in range(start, stop):
                live[position].add(tensor)
    return live


def _lives(stage: Stage, tensor: Tensor) -> list[tuple[int, int]]:
    """[first access, end of the last) of each value a tensor holds in one step."""
    count = len(stage.ops)
    touching = [(p, op) for p, op in enumerate(stage.ops) if tensor in op.operands and type(op) is not Release]
    defining = [p for p, op in touching if tensor in op.writes or tensor in op.scratch]
    bounds = [-1, *defining, count]
    lives = []
    for first, following in pairwise(bounds):
        accesses = [p for p, _ in touching if max(first, 0) <= p < following]
        carried_in, carried_out = tensor.carried and first == -1, tensor.carried and following == count
        if carried_in and (accesses or carried_out):
            accesses.append(0)
        if carried_out:
            accesses.append(count - 1)
        if accesses:
            lives.append((min(accesses), max(accesses) + 1))
    return lives


def no_byte_is_shared(stage: Stage) -> None:
    """At every op, the byte ranges of the live tensors are disjoint."""
    for position, live in enumerate(live_sets(stage)):
        ranges = sorted((_start(tensor), _start(tensor) + tensor.type.nbytes, tensor.name) for tensor in live)
        for (_, end, name), (start, _, other) in pairwise(ranges):
            where = f"stage {stage.index}, op {position} '{stage.ops[position]!r}'"
            assert end <= start, f"{where}: %{name} ends at byte {end}, %{other} starts at {start}, and both are live"


def _start(tensor: Tensor) -> int:
    assert tensor.offset is not None, f"%{tensor.name} has no offset in an allocated module"
    return tensor.offset


def arena_is_within(stage: Stage, capacity_bytes: int | None) -> None:
    """No byte of a live tensor lies beyond the arena, nor the arena beyond the capacity."""
    used = {tensor for live in live_sets(stage) for tensor in live}
    end = max((_start(tensor) + tensor.type.nbytes for tensor in used), default=0)
    assert end <= stage.arena_bytes, f"stage {stage.index} uses byte {end - 1} of an arena of {stage.arena_bytes}"
    assert capacity_bytes is None or stage.arena_bytes <= capacity_bytes, (
        f"the arena of stage {stage.index} has {stage.arena_bytes} bytes, the capacity is {capacity_bytes}"
    )


def peak_is_within_arena(stage: Stage) -> None:
    """The live bytes never exceed the arena."""
    for position, live in enumerate(live_sets(stage)):
        size = sum(aligned(tensor.type.nbytes) for tensor in live)
        assert size <= stage.arena_bytes, (
            f"stage {stage.index}, op {position}: {size} bytes are live in an arena of {stage.arena_bytes}"
        )


def lifetimes_are_exact(stage: Stage) -> None:
    """`analysis.lifetime` finds the same live tensors at every op, and the bytes they make."""
    analysis = lifetimes(stage)
    for position, live in enumerate(live_sets(stage)):
        analysed = set(analysis.live_at(position))
        more, fewer = sorted(t.name for t in analysed - live), sorted(t.name for t in live - analysed)
        assert analysed == live, f"stage {stage.index}, op {position}: lifetimes() has {more} too many, lacks {fewer}"
        size = sum(aligned(tensor.type.nbytes) for tensor in live)
        curve = int(analysis.live_bytes[position])
        assert curve == size, f"stage {stage.index}, op {position}: lifetimes() counts {curve} live bytes, not {size}"


def nothing_is_used_after_release(stage: Stage) -> None:
    """A released tensor is not accessed until it is defined again, and only live tensors are released."""
    live = {tensor for tensor in stage.tensors.values() if tensor.carried}
    for position, op in enumerate(stage.ops):
        where = f"stage {stage.index}, op {position} '{op!r}'"
        for tensor in op.reads + op.updates:
            assert tensor in live, f"{where}: %{tensor.name} is not live"
        if type(op) is Release:
            live.difference_update(op.reads)
        for tensor in op.writes:
            assert tensor not in live, f"{where}: %{tensor.name} is defined while it is live"
            live.add(tensor)


def only_carried_bytes_are_live_at_the_end(stage: Stage) -> None:
    """After the last op exactly the carried tensors are live: nothing leaks, nothing carried is lost."""
    live: Counter[Tensor] = Counter(tensor for tensor in stage.tensors.values() if tensor.carried)
    for op in stage.ops:
        live.update(op.writes)
        if type(op) is Release:
            live.subtract(op.reads)
    left = {tensor for tensor, count in live.items() if count > 0}
    carried = {tensor for tensor in stage.tensors.values() if tensor.carried}
    leaked, lost = sorted(t.name for t in left - carried), sorted(t.name for t in carried - left)
    assert left == carried, f"stage {stage.index} leaks {leaked} and loses {lost}"
    size, expected = (sum(aligned(t.type.nbytes) * n for t, n in c.items()) for c in (live, Counter(carried)))
    assert size == expected, f"stage {stage.index} ends with {size} live bytes, its carried tensors have {expected}"


def in_flight_is_exact(module: Module, stage: Stage) -> None:
    """Under 1F1B and ZB-H1, at the worst moment exactly min(P - s, M) micro-batches have started forward and not ended backward.

    Of a split backward the input half counts.
    """
    first = module.topology.stage_blocks[stage.index][0]
    started: set[int] = set()
    most = 0
    for op in stage.ops:
        if type(op) is Forward:
            started.add(op.micro_batch)
        most = max(most, len(started))
        if isinstance(op, InputGradientOp) and op.block is first:
            started.discard(op.micro_batch)
    expected = min(module.plan.pp - stage.index, module.plan.micro_batches)
    assert most == expected, f"stage {stage.index} has up to {most} micro-batches in flight, 1F1B has {expected}"


def mathematics(module: Module) -> list[Counter[tuple[str, ...]]]:
    """What every stage computes and exchanges, whatever the order, the bucketing and the recovery.

    A pass that is not meant to change the training leaves it as it is.
    """
    return [Counter(item for op in stage.ops for item in _work(op)) for stage in module.stages]


def _work(op: Op) -> list[tuple[str, ...]]:
    if isinstance(op, Release | Recompute):
        return []
    if isinstance(op, InputGradientOp | WeightGradientOp):  # two halves do what the whole does
        results = [t.name for t in op.writes + op.updates if t.kind is not StateKind.SAVED]
        return [("backward", str(op.block), f"m{op.micro_batch}", name) for name in results]
    if isinstance(op, ReduceScatter | AllReduce | AllGather):
        detail = str(getattr(op, "micro_batch", None))
        group = op.group.value if isinstance(op, AllReduce) else "replicas"
        return [(op.keyword, str(block), detail, group) for block in op.blocks]
    kinds = (StateKind.SAVED, StateKind.WORKSPACE)
    kept = [t.name for t in op.writes + op.updates if t.kind not in kinds]
    # an update may be moved to another engine by a target: its place is not part of what it computes
    words = repr(op).removesuffix(" host")
    return [(words, *sorted(kept))]
