"""Bytes of a rank that no program sees: what is left of the memory, what fits then, and who says so."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.idle_options import without_idle_options
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.target import Capacity
from ratrain.ratrain_ir.topology import Mesh, grid, topology_of
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.planner.answer.no_plan import no_plan
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.search.quick import estimated
from ratrain.targets.machine.capacity import capacity_of, mesh_capacity
from ratrain.targets.machine.constants import Constant
from ratrain.targets.machine.machine import Machine, load_machine, parse_machine
from ratrain.targets.machine.record import check_carried
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module

ROOT = Path(__file__).resolve().parents[3]
A100 = str(ROOT / "examples" / "a100-80gb-8.toml")
UNITS = {
    "runtime_overhead": "bytes",
    "transport_overhead": "bytes",
    "transport_overhead_per_group": "bytes",
    "allocator_slack": "fraction of ddr_capacity",
}
PASSES = strategy("full-save").passes


def machine_text(**constants: float) -> str:
    """The file of a machine on the MT-3000 with some constants."""
    units = {**UNITS, "ddr_capacity": "bytes", "collective_chunk": "bytes"}
    entries = [
        f'{key} = {{ value = {value}, unit = "{units[key]}", certainty = "assumed", source = "a test" }}'
        for key, value in constants.items()
    ]
    return "\n".join(['base = "mt3000"', 'name = "crowded"', *entries]) + "\n"


def machine(**constants: float) -> Machine:
    return parse_machine(machine_text(**constants), file="m.toml")


def compiled(on: Machine, **keys: Any) -> Module:
    return api.compile(MODEL, make_plan(**keys), machine=on, passes=PASSES)


@pytest.mark.parametrize(
    ("stages", "replicas", "tied", "expected"),
    [
        (1, 1, True, [0]),
        (1, 4, False, [2]),  # all, its replicas
        (1, 4, True, [2]),  # the ends are one stage, and no group
        (4, 1, False, [2, 3, 3, 2]),  # all, neighbours
        (4, 2, False, [3, 4, 4, 3]),
        (4, 2, True, [4, 4, 4, 4]),
        (2, 2, True, [4, 4]),
    ],
)
def test_communicators_are_groups_and_pairs(stages: int, replicas: int, tied: bool, expected: list[int]) -> None:
    mesh = grid(stages, replicas)
    assert [mesh.communicators(stage, tied=tied) for stage in range(stages)] == expected
    assert mesh.most_communicators(tied=tied) == max(expected)


def test_tensor_peers_have_two_communicators() -> None:
    """What the tensor engine and the collective engine do with them is under way at the same time."""
    assert Mesh(1, 1, 2, (0,)).communicators(0, tied=False) == 1 + 2
    assert Mesh(2, 2, 4, (0, 1)).most_communicators(tied=True) == 1 + 1 + 2 + 1 + 1


def test_shard_groups_have_two_communicators() -> None:
    """One gathers views, and one those replicas that have the same shard."""
    assert Mesh(1, 4, 1, (0,), shard_group=2).communicators(0, tied=False) == 2 + 2


def test_two_edges_between_two_stages_are_one_pair() -> None:
    assert Mesh(2, 1, 1, (0, 1, 0, 1)).communicators(0, tied=False) == 2


def test_a_machine_that_says_nothing_has_all_of_its_memory() -> None:
    on = load_machine(None)
    capacity = mesh_capacity(on, grid(4, 2), tied=True)
    assert capacity == Capacity(on.whole("ddr_capacity"))
    assert (capacity.left, capacity.account) == (on.whole("ddr_capacity"), None)


def test_what_is_left_is_memory_less_overheads() -> None:
    on = machine(
        ddr_capacity=10_000, runtime_overhead=100, transport_overhead=30, transport_overhead_per_group=7, allocator_slack=0.01001
    )  # fmt: skip
    capacity = mesh_capacity(on, grid(4, 2), tied=False)
    assert dict(capacity.overheads) == {
        "runtime_overhead": 100,
        "transport_overhead": 30,
        "transport_overhead_per_group": 4 * 7,
        "allocator_slack": 101,
    }
    assert capacity.left == 10_000 - 100 - 30 - 28 - 101
    assert str(capacity.account).startswith(
        "9741 of 10000 bytes are left for tensors: before them come runtime_overhead 100, "
    )
    alone = mesh_capacity(on, grid(1, 1), tied=False)
    assert dict(alone.overheads).keys() == {"runtime_overhead", "allocator_slack"}, (
        "who talks to nobody has no transport"
    )


@pytest.fixture(scope="module")
def needed() -> int:
    """The fewest bytes in which a plan of two stages and two replicas is placed."""
    least = max(lifetimes(stage).peak_bytes for stage in compiled(load_machine(None)).stages)
    for room in range(least, 2 * least, ALIGNMENT_BYTES):
        with suppress(DiagnosticError):
            compiled(machine(ddr_capacity=room))
            return room
    raise AssertionError("it can be placed in twice what is live")


TAKEN = {"runtime_overhead": 1, "transport_overhead": 1, "transport_overhead_per_group": 1, "allocator_slack": 1e-9}


@pytest.mark.parametrize("key", TAKEN)
def test_each_overhead_changes_what_fits(needed: int, key: str) -> None:
    taken = 3 if key == "transport_overhead_per_group" else 1
    assert compiled(machine(ddr_capacity=needed)).target
    with pytest.raises(DiagnosticError) as caught:
        compiled(machine(ddr_capacity=needed, **{key: TAKEN[key]}))
    assert caught.value.diagnostics[0].code in ("RT052", "RT053")
    account = f"{needed - taken} of {needed} bytes are left for tensors: before them come {key} {taken}"
    assert account in str(caught.value)
    on = machine(ddr_capacity=needed + taken, **{key: TAKEN[key]})
    fitting = compiled(on)
    assert fitting.target is not None
    assert fitting.target.capacity_bytes == needed == capacity_of(on, fitting.topology).left


def test_a_pass_that_asks_for_more_than_is_left_hears_why(needed: int) -> None:
    on = machine(ddr_capacity=4 * needed, runtime_overhead=2 * needed)
    told = without_idle_options(PASSES, make_plan(), MODEL).removesuffix("allocate-ddr")
    with pytest.raises(DiagnosticError, match=rf"RT052(.|\n)*runtime_overhead {2 * needed}"):
        api.compile(MODEL, make_plan(), machine=on, passes=f"{told}allocate-ddr{{capacity={3 * needed}}}")


def test_budgets_of_passes_are_what_is_left() -> None:
    plan = make_plan(dp=1, zero=0, seq_len=40)

    def made(on: Machine, policy: str) -> Module:
        return api.compile(MODEL, plan, machine=on, passes=f"place-1f1b,recompute{{policy={policy}}},allocate-ddr")

    chunk = 64  # so that activations make the peak, not the staging of reductions
    whole, least = (made(machine(collective_chunk=chunk), policy) for policy in ("auto", "full"))
    room = (max(s.arena_bytes for s in least.stages) + max(s.arena_bytes for s in whole.stages)) // 2
    small = made(machine(ddr_capacity=room, collective_chunk=chunk), "auto")
    beside = made(machine(ddr_capacity=3 * room, runtime_overhead=2 * room, collective_chunk=chunk), "auto")
    assert [[repr(op) for op in s.ops] for s in beside.stages] == [[repr(op) for op in s.ops] for s in small.stages]
    assert sum(len(s.ops) for s in beside.stages) > sum(len(s.ops) for s in whole.stages), "something is recovered"


def test_overheads_that_leave_nothing_are_refused_with_the_file() -> None:
    with pytest.raises(DiagnosticError) as caught:
        machine(ddr_capacity=1000, runtime_overhead=900, allocator_slack=0.1)
    (found,) = caught.value.diagnostics
    assert found.code == "RT065"
    assert "0 of 1000 bytes are left for tensors" in found.message
    assert found.location is not None
    assert found.location.line == 3


def test_overheads_that_leave_nothing_to_a_plan_are_refused_with_it() -> None:
    on = machine(ddr_capacity=1000, transport_overhead_per_group=250)
    assert mesh_capacity(on, grid(2, 2), tied=False).left == 250
    with pytest.raises(
        DiagnosticError, match=r"RT053.*has nothing left for tensors(.|\n)*transport_overhead_per_group 1000"
    ):
        compiled(on, pp=3)


@pytest.mark.parametrize(
    ("key", "value"), [("allocator_slack", 1.5), ("runtime_overhead", 0.5), ("transport_overhead", -1)]
)
def test_impossible_overheads_are_refused(key: str, value: float) -> None:
    with pytest.raises(DiagnosticError, match=f"RT065.*{key}"):
        machine(**{key: value})


def request(on: Machine) -> PlanRequest:
    return PlanRequest(MODEL, on, 4, 8, 16, strategy("ratrain"))


def test_the_planner_bounds_by_what_is_left() -> None:
    free = estimated(request(load_machine(None)))
    assert free.best is not None
    peak = free.best.peak_bytes
    crowded = machine(ddr_capacity=2 * peak, runtime_overhead=peak + peak // 2)
    answer = estimated(request(crowded))
    assert all(
        c.peak_bytes <= mesh_capacity(crowded, grid(c.shape.pp, c.shape.dp), tied=False).left for c in answer.candidates
    )
    assert not any(c.shape == free.best.shape for c in answer.candidates)
    full = estimated(request(machine(ddr_capacity=2 * peak, runtime_overhead=2 * peak - 64)))
    assert full.proven_empty
    with pytest.raises(
        DiagnosticError, match=f"of a rank 64 of {2 * peak} bytes are left .* runtime_overhead {2 * peak - 64}"
    ):
        no_plan(full)


def test_each_shape_has_what_its_communicators_leave() -> None:
    """Of one cluster nothing is taken, of four more than there is: the bounds know, and find the plan of one."""
    free = estimated(evolve(request(load_machine(None)), clusters=1))
    assert free.best is not None
    capacity = 2 * free.best.peak_bytes
    answer = estimated(request(machine(ddr_capacity=capacity, transport_overhead=capacity)))
    assert {c.plan.clusters for c in answer.candidates} == {1}


@pytest.fixture
def crowded_file(tmp_path: Path) -> str:
    path = tmp_path / "crowded.toml"
    path.write_text(machine_text(runtime_overhead=123_456_789, transport_overhead_per_group=1000), encoding="utf-8")
    return str(path)


def test_reports_name_overheads(tmp_path: Path, capsys: pytest.CaptureFixture[str], crowded_file: str) -> None:
    schedule, page = str(tmp_path / "x.rtir"), tmp_path / "x.html"
    given = ["--model", str(ROOT / "examples" / "tiny.json"), "--plan", str(ROOT / "examples" / "tiny.toml")]
    assert main(["compile", *given, "--machine", crowded_file, "-o", schedule]) == 0
    assert "before them come runtime_overhead 123456789, transport_overhead_per_group 3000" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["compile", *given, "--machine", crowded_file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["overhead_bytes"] == {"runtime_overhead": 123_456_789, "transport_overhead_per_group": 3000}
    assert found["capacity_bytes"] == 20 * 10**9 - 123_456_789 - 3000
    assert main(["explain", schedule, "--no-levers"]) == 0
    assert "runtime_overhead" in capsys.readouterr().out
    assert main(["report", schedule, "-o", str(page)]) == 0
    assert "<dt>runtime_overhead</dt><dd>117.74 MiB</dd>" in page.read_text(encoding="utf-8")
    assert main(["compile", *given, "--machine", crowded_file, "--capacity", "123456MB", "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out.splitlines()[-1])["capacity_bytes"] == 123_456_000_000 - 123_456_789 - 3000
    )
    assert main(["compile", *given, "--machine", crowded_file, "--capacity", "100MB", "--no-advice"]) == 1
    assert "nothing left for tensors" in capsys.readouterr().err


def test_a_machine_without_overheads_is_reported_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(ROOT / "examples" / "tiny.json"), "--plan", str(ROOT / "examples" / "tiny.toml")]
    assert main(["compile", *given, "--json"]) == 0
    assert "overhead_bytes" not in json.loads(capsys.readouterr().out)


def test_comparisons_say_what_each_row_lacks_of_what_is_left(
    capsys: pytest.CaptureFixture[str], crowded_file: str
) -> None:
    given = ["--model", str(ROOT / "examples" / "tiny.json"), "--plan", str(ROOT / "examples" / "tiny.toml")]
    words = ["--machine", crowded_file, "--capacity", "124MB", "--strategies", "full-save", "--json"]
    assert main(["compare", *given, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["strategies"]
    assert found["capacity_bytes"] == row["capacity_bytes"] == 124_000_000 - 123_456_789 - 3000
    assert not row["fits"]


def test_a_schedule_may_not_claim_what_overheads_take() -> None:
    on = machine(runtime_overhead=10**9)
    module = compiled(on)
    info = module.target
    assert info is not None
    check_carried(info, module.topology, "x.rtir")
    with pytest.raises(DiagnosticError, match="runtime_overhead 1000000000"):
        check_carried(evolve(info, capacity_bytes=info.capacity_bytes + 1), module.topology, "x.rtir")


def test_the_a100_file_says_where_its_bytes_go() -> None:
    on = load_machine(A100)
    assert set(UNITS) <= set(on.constants)
    assert all(isinstance(each, Constant) and each.source for each in on.constants.values())
    plan = make_plan(pp=3, dp=2)
    capacity = capacity_of(on, topology_of(MODEL, plan))
    assert dict(capacity.overheads)["transport_overhead_per_group"] == 4 * 544 * 2**20
    assert 0.93 < capacity.left / capacity.installed < 0.95
    assert [group.name for group in on.link_groups] == ["node", "system"]
    assert api.emit(compiled(on, pp=3, dp=2)).capacity_bytes == capacity.left
