"""Ranks over torch.distributed train what the local engine trains, bit for bit, and go on where ranks over MPI stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.checkpoint.checkpoint_series import saved_steps
from tests.end_to_end.tiny_runs import MODEL, make_program, start, state, train
from tests.targets.runtime.ranks.mpi_tools import ROOT, needs_mpi
from tests.targets.runtime.ranks.rank_jobs import (
    PEER_PLANS,
    PLANS,
    STEPS,
    chunked_programs,
    local_reports,
    trained_by_ranks,
)
from tests.targets.runtime.ranks.torch_tools import needs_torch, run_by_torchrun

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

ORDERS = ("pp-first", "dp-first")
IN_THE_GATE = (
    "2x2",
    "2x2-each-micro-batch",
    "2x2-views-gathered-for-each-use",
    "2x2-nothing-sharded-clipped",
    "2x2-tied-clipped",
    "2x2-overflow",
    "2x2-slices",
)
"""ZeRO 0 - 3, clipping, a tied table, an overflow, slices."""


def task_of(program: Program, order: str = "pp-first", reduction: str = "ordered", **settings: Any) -> dict[str, Any]:
    steps = settings.pop("steps", STEPS)
    return {"made": program, "order": order, "reduction": reduction, "steps": steps, "settings": settings}


def checkpoint_bytes(place: Path) -> dict[str, bytes]:
    """The files of the newest checkpoint that hold state; the manifest tells of the run."""
    newest = Path(saved_steps(str(place))[0][1])
    return {path.name: path.read_bytes() for path in newest.iterdir() if path.name != "manifest.json"}


@needs_torch
@pytest.mark.parity
def test_four_ranks_train_and_save_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    programs = {name: make_program(**PLANS[name]) for name in IN_THE_GATE}
    tasks = [
        task_of(program, ORDERS[number % 2], poison=number % 2 == 1, save=str(tmp_path / name), save_every=STEPS)
        for number, (name, program) in enumerate(programs.items())
    ]
    found = trained_by_ranks("torch", tmp_path, tasks)
    for (name, program), mine in zip(programs.items(), found, strict=True):
        assert mine["reports"] == local_reports(program), name
        alone = train(program, STEPS, save=str(tmp_path / f"{name}-alone"), save_every=STEPS)
        alone.close()
        saved = checkpoint_bytes(tmp_path / name)
        assert saved == checkpoint_bytes(tmp_path / f"{name}-alone"), name
        assert saved
    assert any(report["skipped_blocks"] for report in found[IN_THE_GATE.index("2x2-overflow")]["reports"])


@needs_torch
@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS)
def test_every_plan_trains_the_bits_of_the_local_engine(order: str, tmp_path: Path) -> None:
    programs = {name: make_program(**keys) for name, keys in PLANS.items()}
    found = trained_by_ranks("torch", tmp_path, [task_of(program, order) for program in programs.values()])
    for (name, program), mine in zip(programs.items(), found, strict=True):
        assert mine["reports"] == local_reports(program), name


@needs_torch
@pytest.mark.full
def test_two_ranks_of_several_chunks_train_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    """Two channels between the same two ranks are told apart."""
    programs = chunked_programs()
    found = trained_by_ranks("torch", tmp_path, [task_of(program) for program in programs.values()], ranks=2)
    for (name, program), mine in zip(programs.items(), found, strict=True):
        assert mine["reports"] == local_reports(program), name


@needs_torch
@pytest.mark.full
@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 1e-4), ("bf16", 1e-3), ("f32", 1e-4)])
def test_sums_in_the_order_that_gloo_likes_train_the_same_within_rounding(
    dtype: str, tolerance: float, tmp_path: Path
) -> None:
    """The bounds are those of sums by MPI: four float32 addends in another order, rounded once to the type."""
    program = make_program(pp=1, dp=4, view_dtype=dtype)
    (found,) = trained_by_ranks("torch", tmp_path, [task_of(program, reduction="fast", steps=8)])
    losses = [report["loss"] for report in found["reports"]]
    np.testing.assert_allclose(losses, [step.report.loss for step in train(program, 8).done], rtol=tolerance)


@needs_torch
@needs_mpi
@pytest.mark.full
@pytest.mark.parametrize("keys", [{}, {"zero": 0}], ids=["sharded", "whole"])
def test_ranks_go_on_from_checkpoints_of_ranks_over_mpi_and_back(keys: dict[str, Any], tmp_path: Path) -> None:
    """Two steps over MPI, two over torch.distributed, two over MPI: six steps that never stopped."""
    program = make_program(**keys)
    place = str(tmp_path / "run")
    found: list[float] = []
    for number, engine in enumerate(("mpi", "torch", "mpi")):
        settings = {"save": place, "save_every": 1} | ({"resume": place} if number else {})
        (part,) = trained_by_ranks(engine, tmp_path, [task_of(program, ORDERS[number % 2], steps=2, **settings)])
        found += [report["loss"] for report in part["reports"]]
    assert found == [step.report.loss for step in train(program, 6).done]


@needs_torch
@needs_mpi
@pytest.mark.full
def test_another_layout_over_torch_goes_on_from_a_checkpoint_of_mpi(tmp_path: Path) -> None:
    """Four stages of one replica load what two of two have saved; nothing is lost on the way."""
    model = evolve(MODEL, layers=4)
    before, after = make_program(model), make_program(model, pp=4, dp=1, micro_batches=6)
    place, moved = str(tmp_path / "run"), str(tmp_path / "moved")
    trained_by_ranks("mpi", tmp_path, [task_of(before, steps=2, save=place, save_every=1)])
    task = task_of(after, steps=1, resume=place, save=moved, save_every=1)
    (found,) = trained_by_ranks("torch", tmp_path, [task])
    alone = train(after, 1, resume=place)
    assert [report["loss"] for report in found["reports"]] == [step.report.loss for step in alone.done]
    back = state(start(after, 1, resume=moved))
    for name, array in state(alone).items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


@needs_torch
@pytest.mark.full
def test_clocks_of_other_machines_are_brought_to_that_of_process_0() -> None:
    result = run_by_torchrun(3, ROOT / "tests" / "targets" / "runtime" / "ranks" / "ranks_clocks.py", "torch")
    assert result.returncode == 0, result.stderr
    for process, (seconds, error) in enumerate(json.loads(result.stdout)):
        assert abs(seconds + 1000.0 * process) <= error + 1e-4


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "p.rtx"
    write_program(make_program(evolve(MODEL, vocab_size=256)), str(path))
    return str(path)


def launched(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`ratrainc launch --engine torch`."""
    command = [sys.executable, "-m", "ratrain", "launch", "-n", str(ranks), "--engine", "torch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@needs_torch
@pytest.mark.parity
@pytest.mark.full
def test_a_wrong_number_of_processes_is_refused_once(program: str) -> None:
    """By `launch` before it starts any, and by ranks that torchrun alone has started."""
    refused = launched(3, program, "--steps", "1")
    assert refused.returncode == 1
    assert "has 4 ranks, and -n 3 w" in " ".join(refused.stderr.split())
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "--", "ratrain", "run", program]
    command = [sys.executable, *words, "--steps", "1", "--engine", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "the plan has 2 stages x 2 replicas = 4 ranks, but torchrun started 3 processes" in said
    assert "torchrun --nproc-per-node 4 -m -- ratrain run" in said
    assert said.count("error[RT093]: the plan has") == 1
    assert "Traceback" not in refused.stderr


@needs_torch
@pytest.mark.full
def test_launch_passes_on_what_the_ranks_say_and_their_manifest_says_how_they_summed(
    program: str, tmp_path: Path
) -> None:
    """Also under plain torchrun, whose options begin as some of `run` do."""
    save, log = tmp_path / "run", tmp_path / "log.jsonl"
    done = launched(4, program, "--steps", "2", "--save", str(save), "--log", str(log), "--reduction", "fast")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "4 ranks over torch.distributed (gloo, torch" in done.stdout
    manifest = json.loads((Path(saved_steps(str(save))[0][1]) / "manifest.json").read_text())
    assert manifest["run"]["sums"] == "torch"
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "-m",
        "--",
        "ratrain",
        "run",
        program,
        "--steps",
        "2",
    ]
    again = subprocess.run(
        [sys.executable, *words, "--log", str(tmp_path / "again.jsonl"), "--engine", "torch"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "again.jsonl").read_text().splitlines()) == 2


@needs_torch
@pytest.mark.full
def test_data_of_another_run_is_refused_once(program: str, tmp_path: Path) -> None:
    """All ranks meet the same contradiction; it is said, and the job ends."""
    texts = [tmp_path / name for name in ("one.txt", "other.txt")]
    for text in texts:
        text.write_text(f"{text.name}: the quick brown fox jumps over the lazy dog. " * 200)
    save = str(tmp_path / "run")
    assert launched(4, program, "--steps", "1", "--data", str(texts[0]), "--save", save).returncode == 0
    done = launched(4, program, "--steps", "1", "--data", str(texts[1]), "--resume", save)
    assert done.returncode == 1
    assert done.stderr.count("error[RT092]") == 1
    assert "a rank was lost" not in done.stderr
    assert "Traceback" not in done.stderr


@needs_torch
@pytest.mark.full
def test_every_fault_has_the_outcome_that_it_has_over_mpi() -> None:
    """A killed rank is named and the run ends with 1; SIGTERM saves and ends with 75; all go on from their checkpoints."""
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "faults.py", "--engine", "torch", "--kills", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    rows = json.loads(result.stdout)
    assert {row["fault"] for row in rows} >= {"kill", "stop", "hang", "lose", "SIGTERM", "nan", "slow", "delay"}
    assert not [row for row in rows if not row["passed"]]
    assert result.returncode == 0


OF_TENSORS = (
    "2x2-views-gathered-for-each-use",
    "2x2-nothing-sharded-clipped",
    "2x2-bf16-tied-clipped",
    "2x2-overflow",
    "2x2-slices",
    "1x2x2-each-micro-batch",
    "1x1x4-copied-heads",
    "2x1x2-norms-over-heads",
    "2x1x2-documents",
    "2x2-packed",
    "1x4-packed-groups",
)
UNTAGGED = (
    "2x2",
    "2x2-slices",
    "2x2-tied-clipped",
    "2x2-bf16-tied-clipped",
    "2x2-documents-slices-gpt2",
    "4x1-tied",
    "1x4-tied",
)


@needs_torch
@pytest.mark.full
def test_messages_need_no_tags(tmp_path: Path) -> None:
    """As over NCCL: all messages of a group are matched in the order in which they are posted."""
    programs = {name: make_program(**PLANS[name]) for name in UNTAGGED}
    tasks = [task_of(program, ORDERS[number % 2]) for number, program in enumerate(programs.values())]
    found = trained_by_ranks("torch-untagged", tmp_path, tasks)
    for (name, program), mine in zip(programs.items(), found, strict=True):
        assert mine["reports"] == local_reports(program), name


@needs_torch
@pytest.mark.full
def test_messages_of_several_chunks_need_no_tags(tmp_path: Path) -> None:
    programs = chunked_programs()
    found = trained_by_ranks("torch-untagged", tmp_path, [task_of(program) for program in programs.values()], ranks=2)
    for (name, program), mine in zip(programs.items(), found, strict=True):
        assert mine["reports"] == local_reports(program), name


@needs_torch
@pytest.mark.full
@pytest.mark.parametrize("engine", ["torch", "torch-untagged"])
def test_ranks_whose_arenas_are_tensors_train_the_bits_of_one_process(engine: str, tmp_path: Path) -> None:
    """Sums in rank order by the kernels of tensors; checkpoints too."""
    programs = {name: make_program(**{**PLANS, **PEER_PLANS}[name]) for name in OF_TENSORS}
    settings = {"kernels": "torch-device", "save_every": STEPS}
    tasks = [task_of(program, save=str(tmp_path / name), **settings) for name, program in programs.items()]
    found = trained_by_ranks(engine, tmp_path, tasks)
    for (name, program), mine in zip(programs.items(), found, strict=True):
        assert mine["reports"] == local_reports(program, kernels="torch-device"), name
        train(program, STEPS, save=str(tmp_path / f"{name}-alone"), **settings).close()
        assert checkpoint_bytes(tmp_path / name) == checkpoint_bytes(tmp_path / f"{name}-alone"), name


@needs_torch
@pytest.mark.full
def test_the_library_sums_tensors_too(tmp_path: Path) -> None:
    program = make_program(pp=1, dp=4, view_dtype="bf16")
    task = task_of(program, reduction="fast", steps=8, kernels="torch-device")
    (found,) = trained_by_ranks("torch", tmp_path, [task])
    losses = [report["loss"] for report in found["reports"]]
    alone = train(program, 8, kernels="torch-device")
    np.testing.assert_allclose(losses, [step.report.loss for step in alone.done], rtol=1e-3)


@needs_torch
@pytest.mark.full
def test_a_process_without_a_gpu_says_what_is_missing() -> None:
    """Before it meets the others: of --device cuda on this machine."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
    from ratrain.targets.pytorch.place import TorchrunPlace
    from ratrain.targets.pytorch.ranks.transport import TorchTransport

    place = TorchrunPlace(0, 1, "localhost", 1, "0", launcher_has_store=True)
    with pytest.raises(DiagnosticError, match=r"RT093.*--device cuda: PyTorch .* (without CUDA|no GPU)"):
        TorchTransport(place, gpus=True)
