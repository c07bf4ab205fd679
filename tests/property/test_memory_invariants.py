"""Passes keep modules sound: every invariant of `ratrain.ratrain_ir.testing`, over generated models, plans and pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import Phase, given, settings

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Payload
from ratrain.ratrain_ir.ops.compute import Backward, Forward, LoadInput, Release, Update
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS, PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing import invariants, slice_invariants
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases, for_plan, pipelines, targets

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.tensor import Tensor

PASSES = (
    ("place-1f1b", {}),
    ("place-zb-h1", {"delay": ("0", "1", "9")}),
    ("recompute", {"policy": ("full", "none", "attention", "mlp")}),
    ("bucket-grad-sync", {"bytes": ("1B", "1KiB", "64MiB"), "blocking": ("true",)}),
    ("insert-prefetch", {"blocking": ("true",)}),
    ("insert-release", {}),
    ("legalise", {}),
    ("allocate-ddr", {}),
)


def run(module, pipeline: str, target) -> None:
    PassManager(target, verify_each=True).run(module, pipeline)


@settings(max_examples=15)
@given(cases(), pipelines(PASSES), targets())
def test_every_pipeline_keeps_every_invariant(case, pipeline, target):
    module = case.module()
    run(module, for_plan(pipeline, case.plan), target)
    invariants.check_everything(module, target.capacity_bytes)
    assert invariants.mathematics(module) == invariants.mathematics(case.module())


@settings(max_examples=8)
@given(cases(), targets())
def test_whole_compilation_keeps_every_invariant(case, target):
    module = case.module()
    run(module, "recompute,bucket-grad-sync{bytes=1KiB},insert-prefetch,allocate-ddr", target)
    invariants.check_everything(module, target.capacity_bytes)


@settings(max_examples=5)
@given(cases(max_layers=4, max_micro_batches=3))
def test_the_capacity_is_kept_to_the_byte(case):
    """At the capacity an arena needs it fits; with a byte less than what is live at once it is refused, at its peak."""
    module = case.module()
    run(module, "allocate-ddr{overlap=ignore}", FakeTarget())
    needed = max(stage.arena_bytes for stage in module.stages)
    exact = case.module()
    run(exact, "allocate-ddr", FakeTarget(capacity_bytes=needed))
    invariants.check_everything(exact, needed)
    live = max(lifetimes(stage).peak_bytes for stage in exact.stages)
    with pytest.raises(DiagnosticError) as caught:
        run(case.module(), "allocate-ddr", FakeTarget(capacity_bytes=live - 1))
    assert {item.code for item in caught.value.diagnostics} == {"RT053"}


# -- the invariants themselves: each is broken once, and says so ---------------------------------------------------------


def test_the_pass_authors_entry_finds_what_is_broken():
    """`check_pass` accepts a sound pipeline and refuses one whose pass breaks what it must keep."""
    invariants.check_pass("place-1f1b", run, examples=5, shrink=False)

    def loses_a_release(module, pipeline, target):
        run(module, pipeline, target)
        ops = module.stages[-1].ops
        ops.remove(next(op for op in reversed(ops) if type(op) is Release))

    with pytest.raises(AssertionError, match="RT023"):
        invariants.check_pass("insert-release", loses_a_release, examples=5, shrink=False)

    def loads_no_input(module, pipeline, target):
        run(module, pipeline, target)
        for stage in module.stages:
            stage.ops = [op for op in stage.ops if type(op) is not LoadInput]

    with pytest.raises(AssertionError, match=r"RT020|RT030"):
        invariants.check_pass("place-1f1b", loads_no_input, examples=5, shrink=False)


def allocated() -> Module:
    model = ModelConfig("toy", "llama", 16, 8, 2, 2, 1, 4, 8, 1e-5)
    module = lower(model, Plan(2, 2, (1,), 1, 2, 4))
    run(module, "allocate-ddr", FakeTarget())
    return module


def two_live(stage: Stage) -> tuple[Tensor, Tensor]:
    """Return two tensors that are live together, the second of them below the arena's top."""
    one, other, *_ = sorted(invariants.live_sets(stage)[len(stage.ops) // 2], key=lambda tensor: tensor.offset)
    return one, other


def test_shared_bytes_are_found():
    stage = allocated().stages[0]
    one, other = two_live(stage)
    one.offset = other.offset
    with pytest.raises(AssertionError, match=f"%{one.name} ends at byte|%{other.name} ends at byte"):
        invariants.no_byte_is_shared(stage)


def test_an_arena_above_the_capacity_is_found():
    stage = allocated().stages[0]
    with pytest.raises(AssertionError, match="the capacity is 64"):
        invariants.arena_is_within(stage, 64)


def test_a_peak_above_the_arena_is_found():
    stage = allocated().stages[0]
    for tensor in stage.tensors.values():
        tensor.offset = 0
    with pytest.raises(AssertionError, match="bytes are live in an arena of"):
        invariants.peak_is_within_arena(stage)


def test_a_use_after_release_and_a_leak_are_found():
    stage = allocated().stages[0]
    release = next(op for op in stage.ops if type(op) is Release)
    place = stage.ops.index(release)
    stage.ops[place - 1 : place + 1] = [release, stage.ops[place - 1]]
    with pytest.raises(AssertionError, match="is not live"):
        invariants.nothing_is_used_after_release(stage)
    stage.ops.remove(release)
    with pytest.raises(AssertionError, match=f"leaks .*{release.reads[0].name}"):
        invariants.only_carried_bytes_are_live_at_the_end(stage)


def test_a_missing_micro_batch_in_flight_is_found():
    module = allocated()
    forwards = [op for op in module.stages[0].ops if type(op) is Forward and op.micro_batch == 1]
    for op in forwards:
        module.stages[0].ops.remove(op)
    with pytest.raises(AssertionError, match="up to 1 passes in flight, 1F1B has 2"):
        invariants.in_flight_is_exact(module, module.stages[0])


def chunked() -> Module:
    model = ModelConfig("toy", "llama", 16, 8, 4, 2, 1, 4, 8, 1e-5)
    module = lower(model, Plan(2, 2, (1, 2, 3), 1, 2, 4, schedule="breadth-first", chunks=2))
    run(module, "allocate-ddr", FakeTarget())
    return module


def test_a_pass_that_is_not_in_flight_is_found():
    """Of chunks 0 and 2 stage 0 has two micro-batches each in flight."""
    module = chunked()
    invariants.check_everything(module)
    stage = module.stages[0]
    late = [op for op in stage.ops if type(op) is Forward and op.micro_batch == 1 and str(op.block).endswith(".2")]
    stage.ops = [op for op in stage.ops if op not in late] + late
    with pytest.raises(AssertionError, match="up to 3 passes in flight, breadth-first has 4"):
        invariants.in_flight_is_exact(module, stage)


def test_blocks_of_another_chunk_are_found():
    module = chunked()
    module.plan = evolve(module.plan, layout="vee")
    with pytest.raises(AssertionError, match=r"stage 0 holds .*p.attention.2"):
        invariants.blocks_are_where_the_plan_says(module, module.stages[0])
    module = chunked()
    stage = module.stages[1]
    stage.ops.append(next(op for op in stage.ops if type(op) is Forward and str(op.block) == "mlp.3"))
    with pytest.raises(AssertionError, match=r"stage 1 does .*mlp.3.* too often"):
        invariants.blocks_are_where_the_plan_says(module, stage)


def test_messages_of_another_chunk_or_in_another_order_are_found():
    module = chunked()
    send = next(op for op in module.stages[0].ops if type(op) is Send)
    send.chunk = 3
    with pytest.raises(AssertionError, match="there are sent"):
        invariants.messages_pass_between_chunks(module)
    module = chunked()
    one, other = (
        op for op in module.stages[1].ops if type(op) is Recv and op.chunk == 1 and op.payload is Payload.ACTIVATION
    )
    one.micro_batch, other.micro_batch = other.micro_batch, one.micro_batch
    with pytest.raises(AssertionError, match="but received"):
        invariants.messages_pass_between_chunks(module)


def test_every_schedule_with_chunks_is_among_the_cases():
    seen: set[tuple[str | None, str]] = set()

    @settings(max_examples=400, phases=[Phase.generate], database=None, derandomize=True)
    @given(cases(max_micro_batches=2))
    def look(case):
        seen.add((case.plan.schedule, case.plan.layout))

    look()
    shapes = [
        PipelineShape(2, 2, chunks, layout, slices)
        for chunks in (1, 2, 3)
        for layout in LAYOUTS[:chunks]
        for slices in (1, 2)
    ]
    wanted = {
        (name, shape.layout)
        for name, known in SCHEDULES.items()
        for shape in shapes
        if shape.chunks > 1 and known.problem(shape) is None
    }
    assert seen == wanted | {(None, "loop")}


def sliced(window: int | None = None) -> Module:
    """A module of slices of 2 tokens, whose recoveries, sums and keys can be changed by hand."""
    model = ModelConfig("toy", "mistral", 16, 8, 2, 2, 1, 4, 8, 1e-5, sliding_window=window)
    plan = Plan(pp=2, dp=1, cuts=(1,), micro_batch_size=1, micro_batches=2, seq_len=8, slices=(2, 2, 2, 2))
    return PassManager(FakeTarget()).run(lower(model, plan), "recompute{policy=full}")


@pytest.mark.parametrize(
    ("window", "seen"),
    [
        (None, {1: {0}, 2: {0, 1}, 3: {0, 1, 2}}),
        (4, {1: {0}, 2: {0, 1}, 3: {1, 2}}),
        (3, {1: {0}, 2: {1}, 3: {2}}),
        (1, {}),
    ],
)
def test_which_slices_see_each_other_by_positions(window, seen):
    module = sliced(window)
    found = {
        later: {earlier for earlier in range(4) if slice_invariants.sees(module, later, earlier)} for later in range(4)
    }
    assert found == {later: seen.get(later, set()) for later in range(4)}
    invariants.check_everything(module)


def test_slices_that_see_others_or_sums_that_lack_one_are_found():
    def without(kind, slot, group) -> Module:
        module = sliced()
        at, op = next(
            (at, op)
            for at, op in enumerate(module.stages[1].ops)
            if isinstance(op, kind) and any(t.slot == slot for t in getattr(op, group))
        )
        tensors = tuple(t for t in getattr(op, group) if t.slot != slot)
        module.stages[1].ops[at] = evolve(op, **{group: tensors})
        return module

    for kind, slot, group, message in (
        (Forward, "k", "reads", "keys are"),
        (Backward, "v", "reads", "keys are"),
        (Backward, "dk_sum", "reads", "sums are"),
        (Backward, "dv_sum", "updates", "dv_sum has"),
    ):
        module = without(kind, slot, group)
        with pytest.raises(AssertionError, match=message):
            slice_invariants.slices_see_each_other(module, module.stages[1])


def test_a_text_that_reads_back_differently_is_found():
    module = allocated()
    module.stages[1].tensors["loss"].line = 7  # not part of the text
    invariants.text_round_trip_is_exact(module)
    module.name = "a b"
    with pytest.raises(DiagnosticError, match="RT001"):
        invariants.text_round_trip_is_exact(module)


def test_lost_work_is_found():
    module, same = allocated(), allocated()
    assert invariants.mathematics(module) == invariants.mathematics(same)
    module.stages[1].ops.remove(next(op for op in module.stages[1].ops if type(op) is Update))
    assert invariants.mathematics(module) != invariants.mathematics(same)
