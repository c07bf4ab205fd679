"""The kernel set that a run takes where none is named: by device, type of views, processor and what is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.accumulation import HALF_RUNS
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrainc.choices import kernel_choice
from ratrain.ratrainc.choices.kernel_choice import host_choice, with_kernels
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.facts.machine_facts import kernels_fact
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.settings import Execution, RunSettings, Start
from tests.end_to_end.tiny_runs import make_program

AUTO = RunSettings(1, execution=Execution(kernels="auto"))
VECTORS, UNITS = {"avx512f", "avx512_bf16"}, {"avx512_bf16", "amx_bf16"}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what the processor multiplies, whether PyTorch is installed, and the seconds of the two sets."""

    def set_to(flags: set[str], *, torch: bool = True, fast: float = 1.0, by_torch: float = 1.0) -> None:
        monkeypatch.setattr(kernel_choice, "cpu_flags", lambda: flags)
        monkeypatch.setattr(kernel_choice, "is_installed", lambda package: torch or package != "torch")
        seconds = {"fast": fast, "torch": by_torch}
        monkeypatch.setattr(kernel_choice, "_seconds", lambda name, _rows, _width: seconds[name])

    return set_to


@pytest.mark.parametrize(
    ("dtype", "flags", "has_torch", "wanted"),
    [
        (Dtype.F16, UNITS, True, "fast"),
        (Dtype.F32, UNITS, True, "fast"),
        (Dtype.BF16, {"avx2"}, True, "fast"),
        (Dtype.BF16, UNITS, False, "fast"),
        (Dtype.BF16, UNITS, True, "torch"),
        (Dtype.BF16, VECTORS, True, None),
        (Dtype.BF16, {"bf16"}, True, None),
    ],
)
def test_the_processor_and_what_is_installed_decide(
    dtype: Dtype, flags: set[str], has_torch: bool, wanted: str | None
) -> None:
    chosen = host_choice(dtype, flags, has_torch=has_torch)
    assert (chosen and chosen.name) == wanted
    if dtype is Dtype.BF16 and flags == UNITS and not has_torch:
        assert chosen is not None
        assert "pip install 'ratrain[torch]'" in chosen.reason
    told = kernels_fact(flags).remark
    assert all(each.value in told for each in (Dtype.F16, Dtype.BF16, Dtype.F32))


@pytest.mark.parametrize(("by_torch", "wanted"), [(0.5, "torch"), (0.99, "fast"), (2.0, "fast")])
def test_times_decide_where_it_is_close(processor: Any, by_torch: float, wanted: str) -> None:
    processor(VECTORS, by_torch=by_torch)
    program = make_program(view_dtype="bf16")
    chosen = with_kernels(program, AUTO, several=False).execution
    assert chosen.kernels == wanted
    assert "timed now" in chosen.kernels_reason
    assert with_kernels(program, AUTO, several=True).execution.kernels == "torch", "processes choose alike"


def test_what_is_said_is_taken_and_sums_in_runs_are_not_pytorchs(processor: Any) -> None:
    processor(UNITS)
    program = make_program(view_dtype="bf16")
    said = evolve(AUTO, execution=Execution(kernels="reference"))
    assert with_kernels(program, said, several=False) == said
    assert with_kernels(program, AUTO, several=False).execution.kernels == "torch"
    in_runs = evolve(program, plan=evolve(program.plan, accumulate=HALF_RUNS))
    assert with_kernels(in_runs, AUTO, several=False).execution.kernels == "fast"


def test_a_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = evolve(AUTO, execution=evolve(AUTO.execution, device="cuda"))
    for name in ("torch-triton", "torch-device"):
        monkeypatch.setattr(kernel_choice, "default_kernels", lambda _, name=name: name)
        assert with_kernels(make_program(), settings, several=False).execution.kernels == name


@pytest.mark.parametrize(
    ("kept", "device", "wanted"),
    [
        ("reference", "cpu", "reference"),
        ("tiled", "cpu", "tiled"),
        ("torch-triton", "cpu", "fast"),
        ("nobody's", "cpu", "fast"),
        (None, "cpu", "fast"),
        ("fast", "cuda", "torch-device"),
    ],
)
def test_a_run_that_goes_on_keeps_its_kernels_where_they_work(
    kept: str | None, device: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "latest_run", lambda _: {"kernels": kept})
    monkeypatch.setattr(kernel_choice, "default_kernels", lambda _: "torch-device")
    settings = evolve(AUTO, start=Start(checkpoint="run1"), execution=evolve(AUTO.execution, device=device))
    assert with_kernels(make_program(), settings, several=False).execution.kernels == wanted


def test_the_choice_is_said_and_kept_with_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, saved = str(tmp_path / "x.rtx"), str(tmp_path / "saved")
    write_program(make_program(view_dtype="f16"), path)
    data = tmp_path / "tokens.bin"
    data.write_bytes(bytes(each for number in range(640) for each in (number % 61, 0)))
    words = ["run", path, "--data", str(data), "--steps", "1", "--threads", "1"]
    assert main([*words, "--save", saved]) == 0
    assert "kernels: fast (this plan computes in f16)" in capsys.readouterr().out
    assert main([*words, "--kernels", "reference", "--save", saved + "2"]) == 0
    assert "kernels:" not in capsys.readouterr().out
    assert main([*words, "--resume", saved + "2", "--save", saved + "3"]) == 0
    assert "kernels: reference (the run it goes on from had them)" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "saved3" / "manifest.json").read_text())
    assert manifest["run"]["kernels"] == "reference"
