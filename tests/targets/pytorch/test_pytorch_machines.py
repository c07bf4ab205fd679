"""The machines of GPUs and hosts: figures as on their data sheets, and plans that compile, verify and are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine, machine_names
from ratrain.targets.pytorch.pytorch_target import PytorchTarget
from ratrain.targets.target import target_of

ROOT = Path(__file__).resolve().parents[3]
FITTED = ("gemm_efficiency", "gemm_half_extent", "attention_efficiency", "head_efficiency", "launch", "dispatch")
MACHINES = [name for name in machine_names() if load_machine(name).target == "pytorch"]
GPUS = [name for name in MACHINES if name != "cpu"]
SHEETS = {
    "b200-node": {"ddr_capacity": 180e9, "ddr_bandwidth": 8e12, "fp16_peak": 2250e12},
    "v100-node": {"ddr_capacity": 32e9, "ddr_bandwidth": 900e9, "fp16_peak": 125e12},
    "a100-node": {"ddr_capacity": 80e9, "ddr_bandwidth": 2.039e12, "fp16_peak": 312e12},
    "h100-node": {"ddr_capacity": 80e9, "ddr_bandwidth": 3.35e12, "fp16_peak": 989.4e12},
    "h200": {"ddr_capacity": 141e9, "ddr_bandwidth": 4.8e12, "fp16_peak": 989.4e12},
}
LINKS = {
    "a100-node": (600e9, 200e9),
    "b200-node": (1800e9, 400e9),
    "h100-node": (900e9, 400e9),
    "h200": (900e9, 400e9),
    "v100-node": (300e9, 100e9),
}
"""Of a GPU: bytes a second of NVLink, both ways together; bits a second of its network port, each way."""


def test_there_is_a_machine_of_each_kind() -> None:
    assert set(MACHINES) == {*SHEETS, "cpu"}
    assert all(isinstance(target_of(load_machine(name)), PytorchTarget) for name in MACHINES)


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_those_of_the_data_sheet_each_way(name: str) -> None:
    machine = load_machine(name)
    assert {key: machine[key] for key in SHEETS[name]} == SHEETS[name]
    nvlink, port = LINKS[name]
    node, system = machine.link_groups
    assert (node.clusters, node.link.bandwidth, system.link.bandwidth) == (8, nvlink / 2, port / 8)
    gpus_of_a_port = 2 if name == "v100-node" else 1
    assert node.uplink == 8 * system.link.bandwidth / gpus_of_a_port
    stated = {*SHEETS[name], "node.clusters", "node.bandwidth", "node.uplink", "system.bandwidth"}
    assert {key for key, constant in machine.constants.items() if constant.certainty == "stated"} == stated
    others = {key: constant for key, constant in machine.constants.items() if key not in stated}
    assert {constant.certainty for constant in others.values()} <= {"assumed", "fitted", "measured"}
    fitted = {key for key, constant in others.items() if constant.certainty == "fitted"}
    assert fitted <= set(FITTED)
    assert bool(fitted) == (name != "h200"), "no step of an H200 is published here"
    measured = {key for key, constant in others.items() if constant.certainty == "measured"}
    assert measured == ({"runtime_overhead"} if name == "h200" else {"step_error"})


def test_every_figure_of_a_host_is_assumed() -> None:
    assert {constant.certainty for constant in load_machine("cpu").constants.values()} == {"assumed"}


@pytest.mark.parametrize("name", MACHINES)
def test_a_plan_for_it_compiles_verifies_and_is_timed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--clusters", "4", "--global-batch", "8", "--seq-len", "32"]
    goes_through(name, str(example_path("tiny.json")), [*size, "--quick"], tmp_path, capsys)


@pytest.mark.full
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(
    ("model", "clusters"), [("llama-2-7b", 16), (str(ROOT / "tests" / "data" / "configs" / "qwen3-0.6b.json"), 8)]
)
def test_plans_of_models_that_people_train(
    name: str, model: str, clusters: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--clusters", str(clusters), "--global-batch", "128", "--seq-len", "2048"]
    goes_through(name, model, size, tmp_path, capsys)


def goes_through(name: str, model: str, size: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan, compile, verify, simulate; only the first two are told the machine."""
    plan = str(folder / "P.toml")
    assert main(["plan", "--model", model, *size, "--machine", name, "-o", plan]) == 0
    schedule, program = str(folder / "a.rtir"), str(folder / "a.rtx")
    assert main(["compile", "--model", model, "--plan", plan, "--machine", name, "-o", schedule]) == 0
    assert main(["compile", schedule, "-o", program]) == 0
    assert "machine {" not in Path(schedule).read_text(encoding="utf-8"), "it is carried by its name and digest"
    seconds = []
    for path in (schedule, program):
        assert main(["verify", path]) == 0
        capsys.readouterr()
        assert main(["simulate", path, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["machine"] == name
        seconds.append(found["step_seconds"])
        assert 0 < found["mfu"] < 1
    assert seconds[0] == seconds[1]
