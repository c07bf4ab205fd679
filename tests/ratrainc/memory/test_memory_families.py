"""Families of plans that may use a memory beside DDR: the choice against brute force, and the commands around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.machine_changes import parse_changes, with_constants
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.plan_choices import PlanChoice
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console.progress import Steps
from ratrain.ratrainc.planner.answer.fewest_clusters import fewest_clusters
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.family_spaces import family_spaces
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import estimated
from ratrain.ratrainc.planner.space.objective import OBJECTIVES
from ratrain.ratrainc.planner.space.plan_families import USUAL, families, with_memories
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.planner.small_requests import MODEL, SLOW, TINY, costs_of_every_plan, small_request

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

HOST = {"host_capacity": 1e9, "host_store": 1e9, "host_fetch": 1e9}


def request_with(*names: str, capacity: float, batch: int = 2, layers: int = 2, **host: float) -> PlanRequest:
    constants = {**SLOW, **HOST, "ddr_capacity": capacity, **host}
    request = evolve(small_request(clusters=2, batch=batch), machine=with_constants(load_machine(None), constants))
    request = evolve(request, model=evolve(MODEL, layers=layers), zero_levels=(0, 3), peers=(1,))
    return evolve(request, families=families(request.strategy, names))


@pytest.mark.parametrize(
    ("names", "capacity", "host"),
    [
        (("1f1b", "1f1b+host"), 1.2e6, {"batch": 1, "host_store": 1e8}),
        pytest.param(("1f1b", "1f1b+host"), 1.0e6, {"host_capacity": 1.2e6}, marks=pytest.mark.full),
        pytest.param(("1f1b", "1f1b+host"), 2.4e6, {"host_fetch": 1e8}, marks=pytest.mark.full),
        pytest.param(("seq1f1b", "seq1f1b+host"), 1.0e6, {"batch": 1}, marks=pytest.mark.full),
        pytest.param(("zb-h1+host",), 1.4e6, {"batch": 4}, marks=pytest.mark.full),
        pytest.param(("1f1b", "1f1b+peer"), 2.6e6, {"layers": 3, "batch": 4}, marks=pytest.mark.full),
    ],
)
def test_the_choice_is_that_of_brute_force(names, capacity, host):
    request = request_with(*names, capacity=capacity, **host)
    answer = Search(request).run()
    assert (answer.best.seconds,) * 2 == min(costs_of_every_plan(request).values())
    assert answer.proven
    assert answer.bound_seconds == answer.best.seconds >= answer.relaxed_bound_seconds > 0
    assert {each.text for each in answer.rejected_plans} >= {*names} - {answer.best.family}


def test_what_does_not_fit_without_a_memory_fits_with_it():
    """Fewer clusters are found; what loses says why, and in seconds."""
    request = request_with("1f1b", "1f1b+host", capacity=1.4e6)
    answer = Search(evolve(request, explain=True, objective=OBJECTIVES["clusters"])).run()
    assert (answer.best.family, answer.best.plan.clusters) == ("1f1b+host", 1)
    alone, with_host = (next(p for p in answer.rejected_plans if p.text == text) for text in ("1f1b", "P2"))
    assert "does not fit: stage @0 lacks at least" in alone.reason
    assert with_host.mechanisms["transfers"] < 0
    assert "transfers -" in with_host.reason
    without = Search(evolve(request, families=families(request.strategy, ("1f1b",)))).run()
    assert without.best is None
    fewest = fewest_clusters(evolve(request, clusters=2), MODEL.name, MachineChoice(), Steps())
    assert (fewest.clusters, fewest.best.family) == (1, "1f1b+host")
    assert estimated(request).best.family == "1f1b+host"


def test_the_least_bytes_are_those_with_all_state_elsewhere():
    request = evolve(request_with("1f1b", "1f1b+host", capacity=8e6, batch=1), objective=OBJECTIVES["memory"])
    answer = Search(request).run()
    assert answer.best.cost(request.objective) == min(costs_of_every_plan(request).values())
    assert answer.best.family == "1f1b+host"
    assert any(item.name == "offload-state" for item in parse_pipeline(answer.best.pipeline))


def test_families_with_memories_are_searched_where_the_machine_has_some():
    machine = load_machine(None)
    with_host = with_constants(machine, HOST)
    requests = [planning_request(MODEL, 2, 2, 32, machine=each, whole=True) for each in (machine, with_host)]
    names = [[family.name for family in each.families] for each in requests]
    assert names == [[*USUAL], [*USUAL, *(f"{each}+host" for each in USUAL)]]
    assert with_memories(USUAL, machine) == USUAL
    with pytest.raises(DiagnosticError, match="RT065"):
        planning_request(MODEL, 2, 2, 32, machine=machine, plans=PlanChoice(schedules=("1f1b", "1f1b+file")))
    for name, text in (("1f1b+disk", "not a memory"), ("1f2b+host", "not a schedule")):
        with pytest.raises(DiagnosticError, match=f"RT064.*{text}"):
            families(strategy("ratrain"), (name,))
    with pytest.raises(DiagnosticError, match=r"RT064.*does not choose what goes to the memory 'host'"):
        families(strategy("zero3"), ("1f1b+host",))
    assert parse_changes("host-store=2GB/s", with_host) == {"host_store": 2e9}


def test_nothing_is_kept_with_another_stage_where_there_is_none():
    (space,) = family_spaces((request := request_with("1f1b+peer", capacity=8e6)), Profiles(request.setting))
    assert {shape.pp for shape in space.shapes} == {2}


def test_a_plan_that_uses_a_memory_is_written_compiled_and_proved(capsys, tmp_path: Path):
    """From the file and the passes that stand in it, as the answer has it."""
    machine, plan, program = tmp_path / "m.toml", tmp_path / "p.toml", tmp_path / "p.rtx"
    sizes = 'ddr_capacity = "12MB"\nhost_capacity = "1GB"\nhost_store = "1GB/s"\nhost_fetch = "1GB/s"\n'
    machine.write_text(f'base = "mt3000"\nname = "small"\n{sizes}')
    words = ("plan", *TINY, "--clusters", "1", "--global-batch", "2", "--seq-len", "64", "--machine", str(machine))
    search = ("--schedules", "1f1b,1f1b+host", "--seconds", "1", "--jobs", "1", "--explain-rejected")
    assert main([*words, *search, "-o", str(plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["plans"][0]
    assert best["family"] == "1f1b+host"
    assert "host" in best["passes"]
    compiling = ("compile", *TINY, "--plan", str(plan), "--machine", str(machine), "--passes", best["passes"])
    assert main([*compiling, "-o", str(program)]) == 0
    assert main(["verify", str(program)]) == 0
    capsys.readouterr()
    assert main(["simulate", str(program), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(best["predicted_step_seconds"])
    assert main([*words, *search]) == 0
    assert "1 schedule and 'host'" in capsys.readouterr().out


def test_schedules_are_named_with_memories(capsys):
    words = ("plan", *TINY, "--clusters", "2", "--global-batch", "4", "--seq-len", "64", "--schedules", "1f1b+tape")
    assert main([*words]) == 2
    assert "the memories host, file and peer" in capsys.readouterr().err
