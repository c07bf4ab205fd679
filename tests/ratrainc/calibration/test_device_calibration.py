"""`ratrainc calibrate --device`: kernel calls timed by themselves, the table and the machine file they make, what a device says of itself."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.calibration import device_constants, from_device
from ratrain.ratrainc.calibration.device_programs import UsualSize, compiled
from ratrain.ratrainc.calibration.from_device import DeviceChoice, machine_of_device
from ratrain.ratrainc.cli import main
from ratrain.targets.machine.cost import roofline_work, routine_work
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.measured_kernels import kernel_key
from ratrain.targets.machine.op_table import MeasuredOp, OpTable
from ratrain.targets.runtime.arena.kernel_memory import HostMemory
from ratrain.targets.runtime.arena.stopwatch import DeviceFacts
from ratrain.targets.runtime.engine.routine_times import RoutineTimer, timer_bytes
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.kernels.reference.reference import ReferenceKernels

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

TINY = UsualSize("llama-2-7b", 64, 16, 2)
PRESETS = ("llama-2-7b", "gpt2", "baichuan2-13b", "qwen2.5-0.5b", "mistral-7b-v0.1")


def program_of(size: UsualSize = TINY, **changes: Any) -> Program:
    model = evolve(size.model(), layers=1, vocab_size=32)
    return compiled(model, evolve(size.plan("bf16"), **changes), load_machine("cpu"))


def calls_of(program: Program) -> list[tuple[Any, Any]]:
    return [(routine, step) for routine in program.routines for step in routine.steps]


# The table


def table_machine(ops: list[MeasuredOp]) -> Machine:
    return evolve(load_machine("cpu"), cost="table", table=OpTable(tuple(ops)))


def test_a_routine_takes_what_its_kernel_calls_took() -> None:
    """An independent sum: each call has a number of its own for its seconds."""
    program = program_of()
    seconds = {key: 1e-3 * (n + 1) for n, key in enumerate({kernel_key(*call): None for call in calls_of(program)})}
    machine = table_machine([MeasuredOp(key, 1.0, each) for key, each in seconds.items()])
    for routine in program.routines:
        expected = sum(seconds[kernel_key(routine, step)] for step in routine.steps)
        assert routine_work(routine, machine).seconds == pytest.approx(expected)
        assert routine_work(routine, machine).ddr_bytes == 0


def test_a_call_of_another_shape_goes_by_those_of_its_kind() -> None:
    """Twice as slow as the rates say where all of its kind are; as the rates say where none of its kind was timed."""
    known, other = program_of(), program_of(evolve(TINY, seq_len=32))
    cpu = load_machine("cpu")
    sizes = [(kernel_key(*call), roofline_work(*call, cpu).seconds) for call in calls_of(known)]
    machine = table_machine([MeasuredOp(key, size, 2 * size) for key, size in sizes])
    for call in calls_of(other):
        modelled = roofline_work(*call, cpu).seconds
        one = evolve(call[0], steps=(call[1],))
        assert routine_work(one, machine).seconds == pytest.approx(2 * modelled, rel=1e-6)
        assert routine_work(one, table_machine([MeasuredOp("update", 1.0, 1.0)])).seconds == pytest.approx(modelled)


def test_keys_know_kinds_and_shapes_and_no_values() -> None:
    keys = partial(kernel_key, program_of().routines[1])
    routine = program_of().routines[1]
    step = next(step for step in routine.steps if step.kernel == "rmsnorm_forward")
    assert keys(step) == keys(evolve(step, options=step.options | {"eps": 1e-3}))
    product = next(step for step in routine.steps if step.kernel == "gemm")
    added = evolve(product, options=product.options | {"accumulate": True})
    assert keys(product).partition("/")[0] != keys(added).partition("/")[0]
    longer = program_of(evolve(TINY, seq_len=32)).routines[1]
    again = next(step for step in longer.steps if step.kernel == "gemm")
    mine, its = keys(product).partition("/"), kernel_key(longer, again).partition("/")
    assert mine[0] == its[0]
    assert mine[2] != its[2]


def test_a_collective_of_one_says_nothing_of_those_that_meet_others() -> None:
    alone, met = OpTable((MeasuredOp("all_reduce*1", 8.0, 1.0),)), OpTable((MeasuredOp("all_reduce*4", 8.0, 1.0),))
    assert alone.seconds("all_reduce*1", 16.0) == 2.0
    assert alone.seconds("all_reduce*4", 8.0) is None
    assert met.seconds("all_reduce*1", 8.0) == 1.0
    assert met.seconds("reduce_scatter*8", 8.0) == 1.0


# Timing


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("attention", ["fused", "scores-kept"])
def test_every_kernel_call_can_be_timed_by_itself(preset: str, attention: str) -> None:
    program = program_of(UsualSize(preset, 64, 16, 2), attention=attention)
    timer = RoutineTimer(program.routines, kernel_set("reference"))
    for _ in range(2):
        for number, routine in enumerate(program.routines):
            turn = timer.turn(number)
            assert len(turn) == len(routine.steps)
            assert min(turn) >= 0


class Counting(HostMemory):
    """A memory that counts what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def allocate(self, count: int) -> Any:
        self.given += count
        return super().allocate(count)

    def scratch(self, capacity: int) -> Any:
        self.given += capacity
        return super().scratch(capacity)

    def staged(self, values: Any) -> Any:
        self.given += values.nbytes if values.dtype != np.int32 else 0
        return super().staged(values)


def reference_in(memory: HostMemory) -> ReferenceKernels:
    kernels = ReferenceKernels()
    kernels.memory = memory
    return kernels


def test_a_timer_takes_the_bytes_that_are_said() -> None:
    routines, memory = program_of().routines, Counting()
    kernels = reference_in(memory)
    RoutineTimer(routines, kernels)
    assert memory.given == timer_bytes(routines, kernels)


# Machine files


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual programs are tiny here, and little is copied."""
    monkeypatch.setattr(from_device, "usual_programs", lambda *_, **__: [program_of()])
    monkeypatch.setattr(device_constants, "_COPIED", 1 << 16)


def test_the_file_of_a_processor_is_read_and_used_by_other_commands(tmp_path: Path, capfd: Any) -> None:
    out, program = tmp_path / "here.toml", tmp_path / "tiny.rtx"
    (tmp_path / "m.json").write_text(json.dumps(TINY_CONFIG))
    plan = '[parallel]\npp = 1\ndp = 1\n[batch]\nmicro_batch_size = 1\nmicro_batches = 2\nseq_len = 8\n[state]\nview_dtype = "bf16"\n'
    (tmp_path / "p.toml").write_text(plan)
    given = ["--model", str(tmp_path / "m.json"), "--plan", str(tmp_path / "p.toml")]
    words = ["calibrate", "--device", "cpu", "--kernels", "reference", "--seconds", "0", "--name", "mine", "--json"]
    assert main([*words, *given, "-o", str(out)]) == 0
    said = json.loads(capfd.readouterr().out)
    machine = load_machine(str(out))
    assert (machine.name, machine.cost, machine.target, machine.unsaid) == ("mine", "table", "pytorch", ())
    assert said["ops"] == len(machine.table.ops)
    assert said["turns"] == 3
    assert said["constants"]["ddr_capacity"]["certainty"] == "measured"
    assert [step["program"] for step in said["steps"]] == ["llama-64"]
    assert machine["ddr_capacity"] > machine["runtime_overhead"] > 0
    assert main(["compile", *given, "--machine", str(out), "-o", str(program)]) == 0
    timed = {op.key for op in machine.table.ops}
    from ratrain import api

    assert {kernel_key(*call) for call in calls_of(api.load(str(program)))} <= timed
    assert main(["simulate", str(program), "--one-core"]) == 0
    search = ["--clusters", "1", "--global-batch", "2", "--seq-len", "8", "--seconds", "0", "--jobs", "1"]
    assert main(["plan", *given[:2], *search, "--machine", str(out), "-o", str(tmp_path / "found.toml")]) == 0


TINY_CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_links_are_those_of_a_named_machine_and_stay_as_sure_as_there() -> None:
    choice = DeviceChoice("cpu", "reference", seconds=0.0, links="h100-node")
    timed = machine_of_device(choice, "here")
    source = load_machine("h100-node")
    assert timed.links == "h100-node"
    assert [group.link for group in timed.machine.link_groups] == [group.link for group in source.link_groups]
    for name, constant in timed.machine.constants.items():
        if "." in name:
            assert constant.certainty == source.constants[name].certainty
            assert constant.source == f"machine 'h100-node': {source.constants[name].source}"
    measured = {"ddr_capacity", "runtime_overhead", "fp16_peak", "engine_gap"}
    found = {name for name, each in timed.machine.constants.items() if each.certainty == "measured"}
    assert found == measured
    assert not {"dispatch", "host_bandwidth"} & timed.machine.constants.keys()


class Device(HostMemory):
    """A memory that says it is a GPU's: everything but its streams and events is what CUDA's does."""

    overlaps = True
    place = "cuda"

    def __init__(self, name: str = "NVIDIA H100 80GB HBM3", total: int = 85 << 30, taken: int = 1 << 29) -> None:
        super().__init__()
        self.facts = DeviceFacts(name, total, taken)

    def device_facts(self) -> Any:
        return self.facts


def timed_on(device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(from_device, "kernel_set", lambda *_: reference_in(device))
    return machine_of_device(DeviceChoice("cuda", seconds=0.0), "here")


def test_a_gpu_says_its_memory_and_what_is_taken_and_has_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = timed_on(Device(), monkeypatch)
    machine = timed.machine
    assert timed.links == "h100-node"
    assert (machine["ddr_capacity"], machine["runtime_overhead"]) == (85 << 30, 1 << 29)
    assert machine.capacity(0).left == (85 << 30) - (1 << 29)
    assert {machine.constants[name].certainty for name in ("host_bandwidth", "host_handover")} == {"measured"}
    assert not {"engine_gap", "dispatch"} & machine.constants.keys()


def test_a_gpu_of_no_known_links_is_refused_unless_links_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiagnosticError, match=r"RT004.*Imaginary") as refused:
        timed_on(Device("Imaginary 1"), monkeypatch)
    assert "--links" in str(refused.value.diagnostics[0].help)


def test_kernels_that_do_not_fit_the_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiagnosticError, match="RT093"):
        timed_on(Device(total=1 << 20, taken=(1 << 20) - (1 << 12)), monkeypatch)


@pytest.mark.parametrize(
    "words",
    [
        "--device cpu --profile p.json",
        "--device cpu --rows r.csv --fit launch",
        "--device cpu --model m.json",
        "--device cpu --plan p.toml",
        "--device tpu",
        "--device cpu --fit launch",
        "",
    ],
)
def test_what_contradicts_is_a_usage_error(words: str, capfd: Any) -> None:
    assert main(["calibrate", *words.split()]) == 2
    assert "Error:" in capfd.readouterr().err


def test_a_plan_that_does_not_go_with_the_model_is_refused(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "m.json").write_text(json.dumps(TINY_CONFIG))
    (tmp_path / "p.toml").write_text("[parallel]\npp = 9\n")
    given = ["--model", str(tmp_path / "m.json"), "--plan", str(tmp_path / "p.toml")]
    assert main(["calibrate", "--device", "cpu", "--kernels", "reference", *given]) == 1
    assert "RT0" in capfd.readouterr().err


def test_usual_sizes_are_models_and_plans() -> None:
    for size in (*from_sizes(), TINY):
        model, plan = size.model(), size.plan("f16")
        assert model.hidden_size == model.heads * model.head_dim
        assert isinstance(plan, Plan)
        assert plan.view_dtype == plan.grad_dtype == "f16"
        assert model.family == load_model(size.preset).family


def from_sizes() -> tuple[UsualSize, ...]:
    from ratrain.ratrainc.calibration import device_programs

    return (*device_programs._OF_A_HOST, *device_programs._OF_A_GPU)
