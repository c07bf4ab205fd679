"""Price of an `all_reduce` over tensor-parallel ranks: the bytes that ranks hand each other and add, and no others."""

from __future__ import annotations

from collections import defaultdict
from threading import local
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.model.sharded_blocks import shard_elements
from ratrain.ratrain_ir.ops.base import Engine, Group
from ratrain.ratrain_ir.ops.collectives import AllReduce
from ratrain.ratrain_ir.topology import topology_of
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.shared_gradients import SharedElements, most_shared
from ratrain.targets.machine.timing import collective_way, op_work, sums_shared
from ratrain.targets.runtime.engine import tensor_collectives
from ratrain.targets.runtime.engine.tensor_collectives import shared_ranges
from ratrain.targets.runtime.ranks.collectives import _ALL_REDUCES
from ratrain.targets.simulator.op_works import timed_instruction
from ratrain.targets.target import target_of
from tests.end_to_end.tiny_runs import MODEL, make_plan
from tests.end_to_end.toys import GEMMA3, GPT2, NEOX
from tests.property.test_tensor_ranks import shared_models
from tests.targets.runtime.ranks.thread_ranks import ThreadCommunicator, trained_by_threads

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.topology import Rank
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.ranks.collectives import GroupCollectives, Phases
    from tests.property.test_tensor_ranks import Shared

TIED = evolve(MODEL, tied_embeddings=True)
CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "zero0-copied-heads": (MODEL, {"dp": 1, "tp": 4, "zero": 0, "sequence_sharding": False}),
    "zero1": (MODEL, {"dp": 2, "tp": 2, "zero": 1}),
    "zero2-tied": (TIED, {"dp": 3, "tp": 2, "zero": 2, "reduce": "each-micro-batch"}),
    "zero3-copied-heads": (MODEL, {"dp": 2, "tp": 4, "zero": 3, "view_dtype": "bf16", "sequence_sharding": False}),
    "zero0-replicas-biases": (GPT2, {"dp": 2, "tp": 2, "zero": 0}),
    "zero1-norms-at-the-end": (GEMMA3, {"dp": 2, "tp": 2, "zero": 1}),
    "zero2-layer-norms": (NEOX, {"dp": 2, "tp": 2, "zero": 2, "view_dtype": "f32"}),
}


@define
class Moved:
    """Bytes that a rank moves in a sum of shared gradients."""

    given: int = 0
    """to each other peer"""
    added: int = 0
    """read and written where parts are added up"""


def moved_by_ranks(program: Program, monkeypatch: pytest.MonkeyPatch) -> dict[Rank, list[Moved]]:
    """What every rank moves in a step, in the order of its sums of shared gradients."""
    found: dict[Rank, list[Moved]] = defaultdict(list)
    here = local()
    reduce, gather, summed = _ALL_REDUCES[Group.TENSOR], ThreadCommunicator.iallgather, tensor_collectives.summed

    def watched(self: GroupCollectives, instruction: Instruction) -> Phases:
        moved = Moved()
        found[self.rank.place].append(moved)
        phases = reduce(self, instruction)
        while True:
            here.moved = moved
            try:
                requests = next(phases)
            except StopIteration:
                return
            finally:
                here.moved = None
            yield requests

    def iallgather(self: ThreadCommunicator, whole: Any, part: Any = None) -> Any:
        if getattr(here, "moved", None) is not None:
            here.moved.given += part.nbytes
        return gather(self, whole, part)

    def adding(parts: Any, out: Any, *rest: Any) -> None:
        if getattr(here, "moved", None) is not None:
            here.moved.added += sum(part.nbytes for part in parts) + out.nbytes
        summed(parts, out, *rest)

    monkeypatch.setitem(_ALL_REDUCES, Group.TENSOR, watched)
    monkeypatch.setattr(ThreadCommunicator, "iallgather", iallgather)
    monkeypatch.setattr(tensor_collectives, "summed", adding)
    trained_by_threads(program, 1)
    return found


@pytest.mark.parametrize(
    "name", [name if name == "zero1" else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_the_bytes_that_are_priced_are_those_that_ranks_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, keys = CASES[name]
    plan, machine = make_plan(model, pp=1, micro_batches=1, **keys), load_machine(None)
    module = api.compile(model, plan, passes="allocate-ddr")
    program = api.emit(module)
    moved = moved_by_ranks(program, monkeypatch)
    assert len(moved) == plan.dp * plan.tp
    target, (stage,) = target_of(machine), module.stages
    shared = [op for op in stage.ops if isinstance(op, AllReduce) and op.group is Group.TENSOR]
    stream = [each for each in program.stages[0].streams[Engine.COLLECTIVE] if sums_shared(each.keyword, each.group)]
    assert len(shared) == len(stream) == len(block_chain(model))
    timed = [timed_instruction(program, 0, Engine.COLLECTIVE, each) for each in stream]
    assert [target.timed(module, stage, op) for op in shared] == timed, "passes and the simulator price the same"
    of_ranks = [*zip(*moved.values(), strict=True)]
    assert [each.payload_bytes for each in timed] == [max(rank.given for rank in ranks) for ranks in of_ranks]
    assert [each.own_bytes for each in timed] == [max(rank.added for rank in ranks) for ranks in of_ranks]
    assert any(each.payload_bytes for each in timed)
    for each in timed:
        way = collective_way(each, plan, machine)
        assert way is not None
        assert sum(rounds.nbytes for rounds in way.rounds) == (plan.tp - 1) * each.payload_bytes
        work = op_work(each, plan, machine)
        assert work.link_bytes == (plan.tp - 1) * each.payload_bytes
        assert work.ddr_bytes == work.link_bytes + each.own_bytes


@given(shared_models(), st.sampled_from((0, 1)), st.data())
def test_blocks_together_are_priced_by_the_replica_that_moves_most_of_all(
    shared: Shared, zero: int, data: st.DataObject
) -> None:
    model, plan = shared[0], evolve(shared[1], zero=zero)
    blocks = data.draw(st.lists(st.sampled_from(block_chain(model)), max_size=4, unique=True))
    program = SimpleNamespace(model=model, plan=plan, topology=topology_of(model, plan))
    given_, added = [], []
    for replica in range(plan.dp):
        ranges = [
            found
            for block in blocks
            for found in shared_ranges(
                SimpleNamespace(program=program, replica=replica),  # type: ignore[arg-type]
                str(block),
                shard_elements(model, plan, block),
                "tensor",
            )
        ]
        given_.append(sum(high - low for _, low, high in ranges))
        added.append(sum(copies * (high - low) for copies, low, high in ranges))
    assert most_shared(model, plan, blocks, "tensor") == SharedElements(max(given_), max(added))
