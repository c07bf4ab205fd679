"""What `explain` says of what is kept, recovered and stored, against the schedule it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.compute import Forward, Recompute
from ratrain.ratrain_ir.ops.memory import Store
from ratrain.ratrainc.console.parts import show
from ratrain.ratrainc.memory.recovery_prices import recovery_facts, recovery_table, stores_anything
from ratrain.ratrainc.report.summary_tables import module_parts
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.target import target_of
from tests.end_to_end.tiny_runs import make_plan
from tests.mutation.subjects import SMALL, SUBJECTS, WITH_STORES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module

STORING = ("p2-d2-zero1-host-memory", "p2-d1-slices-file")
RECOVERING = ("p2-d2-zero2-each", "p3-d2-zero1-tight", "p2-d2-gpipe-clip")


def facts_of(module: Module, index: int) -> list[dict[str, Any]]:
    timeline = api.simulate(api.emit(module, machine=WITH_STORES), machine=WITH_STORES).timeline
    stage = module.stages[index]
    return recovery_facts(module, stage, target_of(WITH_STORES), timeline if stores_anything(stage) else None)


@pytest.mark.parametrize("name", [*STORING, *RECOVERING])
def test_every_block_and_micro_batch_is_told_of_once(name: str) -> None:
    module = SUBJECTS[name].module()
    for index, stage in enumerate(module.stages):
        facts = facts_of(module, index)
        told = [(fact["block"], piece) for fact in facts for piece in fact["pieces"]]
        assert len(told) == len(set(told))
        assert len(told) == sum(1 for op in stage.ops if type(op) is Forward and op.block.layer is not None)
        made = {str(op.block) for op in stage.ops if type(op) is Recompute}
        assert {fact["block"] for fact in facts if "recovered" in fact["choice"]} == made
        stored = {str(op.block): op for op in stage.ops if type(op) is Store}
        for fact in facts:
            assert fact["recovering_seconds"] > 0
            assert set(fact["storing_seconds"]) == {home.value for home, _ in WITH_STORES.stores}
            if fact["choice"].startswith("stored"):
                store = stored[fact["block"]]
                assert fact["choice"].partition(",")[0] == f"stored in {store.writes[0].home.value}"
                assert fact["bytes"] == sum(aligned(t.type.nbytes) for t in store.reads)
                assert fact["seconds"] > 0
        show([recovery_table(facts)])


def test_what_it_would_cost_to_recover_is_what_it_costs_where_all_is_recovered() -> None:
    subject = SUBJECTS["p2-d2-gpipe-clip"]
    facts = facts_of(subject.module(), 0)
    assert facts
    assert all(fact["seconds"] == fact["recovering_seconds"] for fact in facts)


def test_a_slow_memory_is_waited_for() -> None:
    """Transfers are exposed as far as compute is idle while they are what it waits for."""
    subject = SUBJECTS["p2-d2-zero1-host-memory"]
    slow = api.compile(
        subject.model, make_plan(subject.model, **SMALL, **subject.keys), passes=subject.passes, machine=WITH_STORES
    )
    program = api.emit(slow, machine=WITH_STORES)
    timeline = api.simulate(program, machine=WITH_STORES).timeline
    bubbles = Bubbles(timeline)
    for index, _ in enumerate(slow.stages):
        waited = bubbles.waited_for_ops(index, Engine.COMPUTE)
        idle = bubbles.idle_seconds(index, Engine.COMPUTE)
        assert sum(waited.values()) == pytest.approx(sum(idle.values()) - idle.get(Cause.SETTLING, 0.0))
        moves = {timeline.instructions[number].keyword for number in waited} & {"store", "fetch"}
        told = sum(f["exposed_seconds"] * len(f["pieces"]) for f in facts_of(slow, index))
        here = [n for engine in (Engine.STORE, Engine.FETCH) for n in range(*timeline.ops_of(index, engine))]
        assert told == pytest.approx(sum(waited.get(number, 0.0) for number in here))
        assert moves or not told


def fact_of(block: str, pieces: list[str], nbytes: int) -> dict[str, Any]:
    figures = {"seconds": 1e-3, "exposed_seconds": 0.0, "recovering_seconds": 1e-3, "storing_seconds": {}}
    return {"block": block, "pieces": pieces, "choice": "recovered", "bytes": nbytes, **figures}


def test_a_row_names_the_layers_that_a_stage_holds_and_no_others() -> None:
    """A stage of an interleaved plan holds several runs of layers."""
    held = [0, 1, 2, 8, 9, 20]
    (row,) = recovery_table([fact_of(f"mlp.{layer}", ["m0"], 1 << 20) for layer in held]).rows
    assert row[0] == "mlp.0-2, 8-9, 20"


@pytest.mark.parametrize(
    ("micro_batches", "text"),
    [
        ([0], "m0"),
        ([0, 7], "m0, m7"),
        (range(12), "m0 .. m11 (12)"),
        (range(1, 12, 5), "m1, m6 .. m11 (3)"),
        ([0, 1, 2, 4], "4 of m0 .. m4"),
    ],
)
def test_what_reads_as_a_range_of_micro_batches_is_one(micro_batches: list[int], text: str) -> None:
    (row,) = recovery_table([fact_of("mlp.0", [f"m{number}" for number in micro_batches], 1 << 20)]).rows
    assert row[1] == text


def test_slices_of_a_block_share_a_row_with_their_mean() -> None:
    sizes = [1 << 20, 3 << 20]
    facts = [fact_of("mlp.0", [f"m{number} s{part}" for number in range(4)], sizes[part]) for part in range(2)]
    (row,) = recovery_table([*facts]).rows
    assert row[:4] == ["mlp.0", "m0 s0 .. m3 s1 (8)", "recovered", "2.00 MiB"]
    nothing_kept = fact_of("mlp.0", [f"m{number} s{part}" for number in range(4, 6) for part in range(2)], 0)
    assert len(recovery_table([*facts, nothing_kept]).rows) == 2


@pytest.mark.parametrize("name", RECOVERING)
def test_compile_says_how_many_forwards_are_recomputed(name: str) -> None:
    module = SUBJECTS[name].module()
    said = " ".join(part for part in module_parts(module, SUBJECTS[name].machine) if isinstance(part, str))
    made = sum(type(op) is Recompute for stage in module.stages for op in stage.ops)
    forwards = sum(type(op) is Forward and op.block.layer is not None for stage in module.stages for op in stage.ops)
    assert f"recomputed for their backwards: {made} of {forwards} forwards of blocks, most on @" in said
