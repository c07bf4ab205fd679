"""Block-quantised collectives in the price: the bytes that ranks send, passes to pack and unpack, and shorter steps where links bind."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.quantised import FORMATS, packed_bytes, packed_nbytes
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.targets.machine.collective_cost import all_to_all
from ratrain.targets.machine.machine import Machine, load_machine, parse_machine
from ratrain.targets.machine.timing import collective_way, op_key, op_work
from ratrain.targets.simulator.op_works import timed_instruction
from tests.end_to_end.tiny_runs import MODEL, make_program
from tests.targets.machine.test_collective_cost import MIB, SHARED, members_of
from tests.targets.runtime.ranks.thread_ranks import ThreadCommunicator, trained_by_threads

if TYPE_CHECKING:
    from ratrain.targets.machine.timing import TimedOp
    from ratrain.targets.program.program import Program

GATHER, REDUCE = "all_gather", "reduce_scatter"
KEYS = {GATHER: "gather_quantised", REDUCE: "reduce_quantised"}


def program_of(**keys: Any) -> Program:
    return make_program(MODEL, pp=1, cuts=(), micro_batches=1, **{"dp": 4, "zero": 1, **keys})


def collectives(program: Program, keyword: str) -> list[TimedOp]:
    stream = program.stages[0].streams[Engine.COLLECTIVE]
    return [timed_instruction(program, 0, Engine.COLLECTIVE, each) for each in stream if each.keyword == keyword]


@pytest.mark.parametrize(("keyword", "name"), [(GATHER, "int8-block"), (GATHER, "int4-block"), (REDUCE, "int8-block")])
def test_links_carry_packed_elements_and_ddr_the_passes(keyword: str, name: str) -> None:
    machine, bits = load_machine(None), FORMATS[name]
    exact, packed = program_of(), program_of(**{KEYS[keyword]: name})
    for other in collectives(packed, keyword):
        before, after = (op_work(other, program.plan, machine) for program in (exact, packed))
        travels = packed_nbytes(other.payload_elements, bits)
        assert after.link_bytes == pytest.approx(travels * 3 / 4, abs=1)
        assert after.link_bytes < before.link_bytes * (0.3 if bits == 4 else 0.52)
        arrives = after.link_bytes * (2 if keyword == REDUCE else 1)  # what is added is read from where it arrived
        stays = other.own_bytes - other.payload_bytes
        packing = other.payload_bytes + travels
        packing *= 1 if keyword == REDUCE else 5 / 4  # of a view its shard, then all of it
        assert after.ddr_bytes == pytest.approx(arrives + stays + travels + packing, abs=2)
        assert op_key(other, exact.plan) != op_key(other, packed.plan), (
            "what was measured of one says nothing of the other"
        )


@pytest.mark.parametrize("name", ["none", "int8-block"])
def test_parts_that_are_copied_one_by_one_cost_a_copy_a_member(name: str) -> None:
    """Lists of one tensor a member make gathers and reductions longer, and nothing else."""
    one_by_one = with_constants(load_machine(None), {"part_copy": 1e-3})
    program = program_of(**{key: name for key in KEYS.values() if name != "none"})
    for keyword in KEYS:
        for op in collectives(program, keyword):
            plain, copied = (op_work(op, program.plan, machine) for machine in (load_machine(None), one_by_one))
            assert copied.seconds == pytest.approx(plain.seconds + 4e-3)
            assert (copied.ddr_bytes, copied.link_bytes) == (plain.ddr_bytes, plain.link_bytes)
    for op in collectives(program, "all_reduce_scalar"):
        assert op_work(op, program.plan, one_by_one) == op_work(op, program.plan, load_machine(None))


def test_ranks_send_the_bytes_that_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what pads a packed part to whole scales, and blocks of which a part has a piece."""
    sent: Counter[tuple[str, int]] = Counter()

    def counted(name: str) -> None:
        call = getattr(ThreadCommunicator, name)

        def counting(self: ThreadCommunicator, whole: Any, part: Any = None) -> Any:
            given = whole if part is None else part
            if given.dtype.name == "uint8" and given.size > 64:
                sent[name, self.rank] += given.nbytes
            return call(self, whole, part)

        monkeypatch.setattr(ThreadCommunicator, name, counting)

    counted("iallgather")
    counted("ialltoall")
    program = program_of(gather_quantised="int4-block", reduce_quantised="int8-block")
    runs = trained_by_threads(program, 1)
    elements = [each.payload_elements for each in collectives(program, GATHER)]
    blocks = [tensor.type.elements for tensor in program.stages[0].tensors if str(tensor.kind.value) == "view"]
    assert sum(elements) == sum(blocks)
    for rank in range(4):
        assert sent["iallgather", rank] == sum(4 * packed_bytes(each // 4, 4) for each in blocks)
        assert sent["ialltoall", rank] == sum(4 * packed_bytes(each // 4, 8) for each in blocks)
    for run in runs:
        staging = run.engine.collectives.staging  # type: ignore[attr-defined]
        assert staging.high_water <= staging.capacity < 2 * staging.high_water + (1 << 15)


def slow(bandwidth: float) -> Machine:
    constant = f'value = {bandwidth}\nunit = "bytes/s"\ncertainty = "assumed"\nsource = "test"\n'
    return parse_machine(f'base = "mt3000"\nname = "slow"\n[link_bandwidth]\n{constant}', file="slow.toml")


def test_steps_are_shorter_where_links_bind() -> None:
    def seconds(machine: Machine, **keys: Any) -> float:
        return api.simulate(program_of(zero=3, reduce="each-micro-batch", **keys), machine=machine).step_seconds

    thin = slow(1e5)
    exact, gathered, narrow, reduced, both = (
        seconds(thin, **keys)
        for keys in (
            {},
            {"gather_quantised": "int8-block"},
            {"gather_quantised": "int4-block"},
            {"reduce_quantised": "int8-block"},
            {"gather_quantised": "int8-block", "reduce_quantised": "int8-block"},
        )
    )
    assert narrow < gathered < exact
    assert both < min(reduced, gathered)
    assert both == pytest.approx(exact * 0.52, rel=0.1), "of f16 half the bytes, and a scale for each block"


def test_packed_gradients_go_straight_to_their_owners() -> None:
    """Whatever a machine sums otherwise: a sum on the way would be packed anew."""
    group = members_of(8, SHARED)
    way = all_to_all(8 * MIB, group, staged=True)
    assert way.name == "pairwise"
    assert sum(rounds.nbytes for rounds in way.rounds) == 7 * MIB
    rings = parse_machine('base = "mt3000"\nname = "rings"\ncollectives = ["ring"]\n', file="m.toml")
    program = program_of(reduce_quantised="int8-block", shard_group=2)
    for op in collectives(program, REDUCE):
        found = collective_way(op, program.plan, rings)
        assert found is not None
        assert found.name == "pairwise, then ring of copies"
        travels = packed_nbytes(op.payload_elements, 8) * 3 / 4 + op.payload_elements / 2 * 2 / 2
        assert sum(rounds.nbytes for rounds in found.rounds) == pytest.approx(travels)
