"""Stages below the lowest parameter that trains, in generated plans of all schedules with whole backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis.actions import (
    actions_of_module,
    actions_of_orders,
    compute_only,
    parse_torch_csv,
    torch_csv_lines,
)
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrain_ir.model.slots import KEY_SLOTS
from ratrain.ratrain_ir.ops.base import Payload, Quantity
from ratrain.ratrain_ir.ops.collectives import AllReduceScalar
from ratrain.ratrain_ir.ops.compute import Forward, LoadInput, Release, ScaleUpdate
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.schedules.action import ActionKind, most_in_flight
from ratrain.ratrain_ir.schedules.named import SCHEDULES, default_schedule, most_held
from ratrain.ratrain_ir.schedules.shape import LAYOUTS, PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.testing import invariants
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import Case, cases, for_plan
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule, verify_schedule
from ratrain.ratrainc.planner.bounds.held_passes import has_halves

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage

PIPELINES = (
    "allocate-ddr",
    "place-gpipe,insert-prefetch,recompute{policy=full},allocate-ddr",
    "recompute,bucket-grad-sync{bytes=1KiB},insert-prefetch,allocate-ddr",
    "recompute{policy=attention},bucket-grad-sync{bytes=1B blocking=true},allocate-ddr",
)
_ALONE = {Forward, LoadInput, Release, Send, Recv, AllReduceScalar, ScaleUpdate}
"""Ops of a stage that only goes forward."""
_OF_TRAINING = {StateKind.SAVED, StateKind.CHECKPOINT, StateKind.GRAD, StateKind.GRAD_SHARD, StateKind.MASTER}


@st.composite
def frozen_below(draw: st.DrawFn) -> Case:
    """A case of several stages whose blocks below one, drawn over the whole chain, are frozen."""
    case = draw(cases(min_stages=2, max_layers=6, max_micro_batches=4, max_contexts=1))
    assume(not has_halves(case.plan.schedule or default_schedule(case.plan.shape), case.plan.shape))
    chain = block_chain(case.model)
    names = [[each.name for each in parameters(case.model, owner)] for owner in chain]
    lowest = draw(st.integers(1, len(chain) - 1))
    frozen = [name for owned in names[:lowest] for name in owned]
    assume(any(name not in frozen for name in names[-1]))
    clip = draw(st.sampled_from(("none", "global")))
    optimizer = evolve(case.plan.optimizer, clip=clip)
    router = evolve(case.plan.router, bias_update=0.0)  # biases follow what trains
    training = Training(freeze=", ".join(frozen))
    return Case(case.model, evolve(case.plan, training=training, optimizer=optimizer, router=router))


def alone_forward(module: Module) -> list[Stage]:
    """Stages of which no chunk has a backward."""
    topology = module.topology
    return [stage for stage in module.stages if topology.chunks_of(stage.index)[-1] < topology.forward_only]


@settings(max_examples=25)
@given(frozen_below(), st.sampled_from(PIPELINES))
def test_stages_that_only_go_forward_do_nothing_else(case: Case, pipeline: str) -> None:
    module = case.module()
    PassManager(FakeTarget(), verify_each=True).run(module, for_plan(pipeline, case.plan))
    invariants.check_everything(module, FakeTarget().capacity_bytes)
    assert invariants.mathematics(module) == invariants.mathematics(case.module())
    alone = alone_forward(module)
    event(f"{len(alone)} of {len(module.stages)} stages")
    for stage in alone:
        assert {type(op) for op in stage.ops} <= _ALONE
        assert not any(op.payload is Payload.GRADIENT for op in stage.ops if isinstance(op, Send | Recv))
        scalars = [op for op in stage.ops if isinstance(op, AllReduceScalar)]
        assert all(not op.reads and op.quantity is not Quantity.LOSS for op in scalars)
        # later slices of a micro-batch read the keys and values of earlier ones
        held = [each for each in stage.tensors.values() if not (case.plan.slices and each.slot in KEY_SLOTS)]
        assert _OF_TRAINING.isdisjoint(each.kind for each in held)


@settings(max_examples=10)
@given(frozen_below())
def test_bytes_of_a_stage_that_only_goes_forward_do_not_grow_with_micro_batches(case: Case) -> None:
    def arenas(micro_batches: int) -> list[int]:
        plan = evolve(case.plan, micro_batches=micro_batches)
        module = PassManager(FakeTarget()).run(lower(case.model, plan), "allocate-ddr{overlap=ignore}")
        return [stage.arena_bytes for stage in alone_forward(module)]

    # how the same few tensors are placed may differ a little
    assert all(more <= 1.5 * few for few, more in zip(arenas(3), arenas(12), strict=True))


@settings(max_examples=20)
@given(frozen_below())
def test_a_table_of_a_module_is_sound_with_its_stages_that_only_go_forward_alone(case: Case) -> None:
    """Read it back; refuse one stage more or less that is said to go forward only."""
    module = PassManager(FakeTarget()).run(case.module(), for_plan("place-1f1b", case.plan))
    count = module.topology.forward_only
    full = actions_of_module(module)
    for table in (full, compute_only(full)):
        check_schedule(table, forward_only=count)
        assert parse_torch_csv("\n".join(torch_csv_lines(table)), "s.csv") == table
        for wrong in {max(count - 1, 0), count + 1} - {count}:
            with pytest.raises(DiagnosticError) as caught:
                check_schedule(table, forward_only=wrong)
            assert {each.code for each in caught.value.diagnostics} & {"RT030", "RT031"}


@given(
    st.sampled_from([name for name in SCHEDULES if not name.startswith("v-")]),
    st.integers(2, 4),
    st.integers(1, 6),
    st.integers(1, 7),
)
def test_orders_without_the_lowest_backwards_are_sound(
    name: str, stages: int, micro_batches: int, forward_only: int
) -> None:
    schedule = SCHEDULES[name]
    slices = 2 if name == "seq1f1b" else 1
    for layout in LAYOUTS:
        shape = PipelineShape(stages, micro_batches, schedule.chunks, layout, slices, forward_only)
        if schedule.problem(shape) is not None or forward_only >= len(shape.chunk_stages):
            continue
        orders = [schedule.order(shape, stage) for stage in range(stages)]
        wholes = [schedule.actions(shape.trained_whole, stage) for stage in range(stages)]
        for stage, (order, whole) in enumerate(zip(orders, wholes, strict=True)):
            left = [a for a in whole if a not in order]
            assert all(a.chunk < forward_only and a.kind is not ActionKind.FORWARD for a in left)
            assert most_held(name, shape, stage) <= most_held(name, shape.trained_whole, stage)
            assert most_held(name, shape, stage) == most_in_flight(
                (a.kind, a.chunk) for a in order if a.chunk >= forward_only
            )
        found = Diagnostics()
        verify_schedule(actions_of_orders(orders), found, forward_only=forward_only)
        assert found.items == []
