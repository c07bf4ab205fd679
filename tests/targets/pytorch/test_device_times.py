"""Kernel calls of the kernel set `torch-device`, timed by themselves."""

from __future__ import annotations

import pytest
from attrs import evolve

from ratrain.ratrainc.calibration.device_programs import UsualSize, compiled
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.runtime.engine.routine_times import RoutineTimer
from ratrain.targets.runtime.kernels import kernel_set

pytestmark = pytest.mark.parity
pytest.importorskip("torch")


@pytest.mark.parametrize("preset", ["llama-2-7b", "gpt2"])
def test_every_kernel_call_can_be_timed_on_tensors(preset: str) -> None:
    size = UsualSize(preset, 64, 16, 2)
    program = compiled(evolve(size.model(), layers=1, vocab_size=32), size.plan("bf16"), load_machine("cpu"))
    kernels = kernel_set("torch-device", 1, "cpu")
    assert kernels.memory.device_facts() is None, "the CPU of PyTorch is the host"
    timer = RoutineTimer(program.routines, kernels)
    for number, routine in enumerate(program.routines):
        turns = [timer.turn(number) for _ in range(2)]
        assert [len(turn.seconds) for turn in turns] == [len(routine.steps)] * 2
        assert all(seconds > 0 for turn in turns for seconds in turn.seconds)
