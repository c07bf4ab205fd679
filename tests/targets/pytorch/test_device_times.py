"""Kernel calls of the kernel set `torch-device`, timed by themselves."""

from __future__ import annotations

import pytest
from attrs import evolve

from ratrain.ratrainc.calibration.device_ops import run_programs
from ratrain.ratrainc.calibration.device_programs import UsualSize, compiled
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.runtime.arena.stopwatch import HostStopwatch
from ratrain.targets.runtime.engine.routine_times import RoutineTimer
from ratrain.targets.runtime.kernels import kernel_set

pytestmark = pytest.mark.parity
pytest.importorskip("torch")

from tests.targets.pytorch.recording import RecordingDevice, order  # noqa: E402


@pytest.mark.parametrize("preset", ["llama-2-7b", "gpt2"])
def test_every_kernel_call_can_be_timed_on_tensors(preset: str) -> None:
    size = UsualSize(preset, 64, 16, 2)
    program = compiled(evolve(size.model(), layers=1, vocab_size=32), size.plan("bf16"), load_machine("cpu"))
    kernels = kernel_set("torch-device", 1, "cpu")
    assert kernels.memory.device_facts() is None, "the CPU of PyTorch is the host"
    timer = RoutineTimer(program.routines, kernels)
    for number, routine in enumerate(program.routines):
        turns = [timer.turn(number) for _ in range(2)]
        assert [len(turn) for turn in turns] == [len(routine.steps)] * 2
        assert all(seconds > 0 for turn in turns for seconds in turn)


def test_steps_of_a_gpu_are_timed_as_a_graph_and_ops_by_marks_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    size = UsualSize("llama-2-7b", 64, 16, 2)
    program = compiled(evolve(size.model(), layers=1, vocab_size=32), size.plan("bf16"), load_machine("cpu"))
    kernels, device = kernel_set("torch-device", 1, "cpu"), RecordingDevice()
    monkeypatch.setattr(type(kernels.memory), "overlaps", True)
    monkeypatch.setattr(type(kernels.memory), "order", lambda _: order(device))
    monkeypatch.setattr(type(kernels.memory), "stopwatch", lambda _: HostStopwatch())
    (run,) = run_programs([program], kernels)
    (tape,) = device.tapes
    assert tape.replayed > 3
    assert run.issued_seconds is not None
    assert run.issued_seconds > 0 < run.step_seconds
    updates = [seconds for (key, _), seconds in run.ops.items() if "update" in key]
    assert updates
    assert 0 < sum(run.ops.values()) < run.issued_seconds
