"""Collectives that compute waits for: their time is added to the step, where that of others is hidden; closed forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.trial.list_times import TimedRows
from ratrain.passes.trial.trial import at_own_addresses
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import AllGather, ReduceScatter
from ratrain.ratrain_ir.ops.compute import Update
from ratrain.targets.program.lifting import stored_fields
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.simulator.timed_run import simulate
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program

F, B, R, U, G = 1.0, 2.0, 1.5, 0.125, 0.25
"""Seconds of a forward and a backward of the layer, of the reduction of a stage's gradients, of an update and of a gather."""
MICRO_BATCHES = 4
BLOCKS = ("embed", "attention.0", "mlp.0", "head")


def module(passes: str, **keys: Any) -> Module:
    """One layer on one stage of two replicas; no bytes are used twice, so that nothing waits for bytes."""
    plan = make_plan(evolve(MODEL, layers=1), pp=1, dp=2, micro_batches=MICRO_BATCHES, loss_scale=1.0, **keys)
    return at_own_addresses(api.compile(evolve(MODEL, layers=1), plan, passes=f"place-1f1b,{passes},allocate-ddr"))


def program(passes: str, **keys: Any) -> Program:
    return api.emit(module(passes, **keys))


def seconds(_stage: int, item: Instruction) -> float:
    return seconds_of(item.keyword, item.blocks, within_step=item.micro_batch is not None)


def op_seconds(_stage: Stage, op: Op) -> float:
    stored = stored_fields(op)
    return seconds_of(op.keyword, stored.blocks, within_step=stored.micro_batch is not None)


def seconds_of(keyword: str, blocks: tuple[str, ...], *, within_step: bool) -> float:
    """The attention stands for the whole layer."""
    if keyword == "reduce_scatter":
        return R * len(blocks) / len(BLOCKS)
    if keyword in ("update", "all_gather"):
        return U if keyword == "update" else G
    return {"forward": F, "backward": B}.get(keyword, 0.0) if blocks == ("attention.0",) and within_step else 0.0


BULK = "bucket-grad-sync{unit=stage%s}"
COMPUTED = MICRO_BATCHES * (F + B) + len(BLOCKS) * U


@pytest.mark.parametrize("blocking", [False, True])
def test_the_reductions_of_micro_batches_are_added_if_compute_waits_and_hidden_if_not(blocking: bool) -> None:
    """Each fits under the micro-batch after it; the last one has nothing to hide under."""
    assert R < F + B
    passes = BULK % (" blocking=true" if blocking else "") + ",insert-prefetch{blocking=true}"
    found = simulate(program(passes, zero=2, reduce="each-micro-batch"), seconds)
    exposed = MICRO_BATCHES * R if blocking else R
    assert found.step_seconds == pytest.approx(COMPUTED + exposed + len(BLOCKS) * G, rel=1e-12)


def test_gathers_are_added_if_compute_waits() -> None:
    found = simulate(program(BULK % "" + ",insert-prefetch{blocking=true}"), seconds)
    assert found.step_seconds == pytest.approx(COMPUTED + R + len(BLOCKS) * G, rel=1e-12)
    bubbles = Bubbles(found)
    idle = bubbles.idle_seconds(0, Engine.COMPUTE)
    assert idle == pytest.approx({Cause.GRAD_SYNC: R, Cause.PREFETCH: len(BLOCKS) * G}), "none of it is for bytes"
    assert bubbles.exposed_tail_seconds(0) == pytest.approx(R + len(BLOCKS) * G)


def test_gathers_in_order_are_hidden_but_for_what_the_next_forward_needs_first() -> None:
    """Embedding and attention are gathered while others are updated; mlp and head while the attention computes."""
    found = simulate(program(BULK % "" + ",insert-prefetch"), seconds)
    assert COMPUTED + R < found.step_seconds < COMPUTED + R + 2 * G


def test_a_view_sharded_within_the_step_is_waited_for_at_every_use() -> None:
    """Forward and backward of each block but the embedding, whose backward reads no view."""
    blocking = program(f"{BULK % ' blocking=true'},insert-prefetch{{depth-blocks=0 blocking=true}}", zero=3)
    found = simulate(blocking, seconds)
    gathers = MICRO_BATCHES * (2 * len(BLOCKS) - 1)
    assert found.step_seconds == pytest.approx(COMPUTED + R + gathers * G, rel=1e-12)
    ahead = simulate(program(f"{BULK % ' blocking=true'},insert-prefetch", zero=3), seconds)
    assert ahead.step_seconds < found.step_seconds


def test_one_stage_on_its_own_takes_as_long_as_in_the_simulator() -> None:
    """The times that passes work with."""
    (stage,) = module(f"{BULK % ' blocking=true'},insert-prefetch{{blocking=true}}").stages
    timed = TimedRows()
    (times,) = timed.times(timed.of(stage, op_seconds), 1, arrays=False)
    assert times.ends.max() == pytest.approx(COMPUTED + R + len(BLOCKS) * G, rel=1e-12)
    kinds = [type(op) for op in stage.ops]
    start, end = times.starts[kinds.index(ReduceScatter)], times.ends[kinds.index(ReduceScatter)]
    assert start == pytest.approx(MICRO_BATCHES * (F + B))
    assert times.starts[kinds.index(Update)] == end == start + R
    last_update = len(kinds) - 1 - kinds[::-1].index(Update)
    assert times.starts[kinds.index(AllGather)] == times.ends[last_update]
