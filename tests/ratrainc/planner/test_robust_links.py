"""What `plan --robust-links` says: the plan under other links, and whether shared ports make another one better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.plan_choices import SearchEffort
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console.parts import show
from ratrain.ratrainc.console.progress import Steps
from ratrain.ratrainc.planner.answer.planned import Planned
from ratrain.ratrainc.planner.answer.robust_links import robust_links
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.writer import write_machine
from tests.ratrainc.planner.small_requests import MODEL, SLOW

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SEARCH = ["--clusters", "8", "--global-batch", "16", "--seq-len", "64", "--seconds", "1.5", "--jobs", "1"]


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], constants: dict[str, float]) -> dict[str, Any]:
    """What the command says of a tiny model on a machine with other constants."""
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    write_machine(with_constants(load_machine(None), {**SLOW, **constants}), str(tmp_path / "machine.toml"))
    words = ["plan", "--model", str(tmp_path / "m.json"), *SEARCH, "--machine", str(tmp_path / "machine.toml")]
    assert main([*words, "--robust-links", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_constant_of_the_links_is_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, capsys, {})
    usual = found["plans"][0]["predicted_step_seconds"]
    steps = {item["change"]: item["step_seconds"] for item in found["robust_links"]["links"]}
    assert {"link_bandwidth x 0.5", "link_bandwidth x 2", "link_latency x 10", "rank_jitter = 0.01"} <= steps.keys()
    assert steps["link_bandwidth x 0.5"] >= usual >= steps["link_bandwidth x 2"]
    assert steps["rank_jitter = 0.01"] > usual
    assert steps["message_cost = 1e-05"] >= usual


@pytest.mark.full
def test_shared_ports_are_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four clusters a chip: one link's bandwidth for all of them; the plan anew is no slower there than the given one."""
    usual, pairwise = planned(tmp_path, capsys, {"chip_bandwidth": 15e9, "chip_latency": 1e-6})["robust_links"]["ports"]
    assert "ring" in usual["collectives"]
    assert pairwise["collectives"] == ["pairwise"]
    for ports in (usual, pairwise):
        assert ports["constant"] == "chip_uplink"
        assert ports["bytes_per_second"] == SLOW["link_bandwidth"]
        assert ports["plan"]["predicted_step_seconds"] <= ports["step_seconds_with_the_same_plan"] * (1 + 1e-9)
        assert ports["flips"] or ports["flips_at_bytes_per_second"] is None
    assert pairwise["step_seconds_with_the_same_plan"] >= usual["step_seconds_with_the_same_plan"]


def test_without_clusters_that_share_anything_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    (tmp_path / "one.toml").write_text(
        'base = "mt3000"\nname = "one"\n[clusters_per_chip]\nvalue = 1\nunit = "clusters"\n'
        'certainty = "assumed"\nsource = "test"\n'
    )
    words = ["plan", "--model", str(tmp_path / "m.json"), *SEARCH, "--machine", str(tmp_path / "one.toml")]
    assert main([*words, "--robust-links"]) == 0
    assert "no clusters share a chip or a node" in capsys.readouterr().out
    assert main([*words, "--robust-links", "--quick"]) == 2


def test_the_verdict_says_on_which_side_of_a_port_another_plan_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    machine = with_constants(load_machine(None), SLOW)
    request = planning_request(MODEL, 4, 8, 32, machine=machine, effort=SearchEffort(seconds=0.0))
    planned = Planned(Search(request).run(), False, None, "small.json", MachineChoice())
    found = robust_links(planned, Steps())
    usual = evolve(found.ports[0], flips=False, flips_at=None)
    verdicts = {
        "the answer does not flip": usual,
        "better one whatever the port carries": evolve(usual, flips=True),
        "both take equally long at 2.50 GB/s": evolve(usual, flips=True, flips_at=2.5e9),
    }
    for words, ports in verdicts.items():
        show(evolve(found, ports=(ports,)).parts())
        assert words in capsys.readouterr().out


@pytest.mark.parametrize("found", ["nothing", "slower"])
def test_the_plan_at_hand_is_the_best_anew_where_a_search_finds_none_that_is_faster(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = with_constants(load_machine(None), SLOW)
    request = planning_request(MODEL, 4, 8, 32, machine=machine, effort=SearchEffort(seconds=0.0))
    answer = Search(request).run()
    usual = answer.best
    assert usual is not None
    assert usual.evaluation is not None
    slower = evolve(usual, evaluation=evolve(usual.evaluation, step_seconds=1e6), plan=evolve(usual.plan, seed=1))
    anew = evolve(answer, candidates=[] if found == "nothing" else [slower])
    monkeypatch.setattr(Search, "run", lambda _: evolve(anew, candidates=list(anew.candidates)))
    for ports in robust_links(Planned(answer, False, None, "small.json", MachineChoice()), Steps()).ports:
        best = ports.answer.best
        assert best is not None
        assert (best.plan, best.seconds) == (usual.plan, ports.kept_seconds)
        assert not ports.flips
