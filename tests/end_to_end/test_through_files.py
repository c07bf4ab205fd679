"""Tests that programs are read back from their files, whatever the model, the plan, the passes and the machine.

A draw that the compiler refuses with a diagnostic shows nothing; one that it compiles must be read back by every reader, verify, be timed
and train a step. Beside the draws stands one member of each kind, so that none is missing where the draws of the gate are few.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click
import pytest
from attrs import evolve
from hypothesis import given, settings

from ratrain import api
from ratrain.ratrain_ir.config.families import FAMILIES, FAMILY
from ratrain.ratrain_ir.config.plan import DTYPES
from ratrain.ratrain_ir.config.types import STORES
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.testing.strategies import SCALINGS
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.cli import commands, main
from ratrain.ratrainc.commands.words.options import InputFile
from tests.end_to_end.tiny_runs import MODEL, make_plan, train
from tests.mutation.subjects import WITH_STORES
from tests.program_files import through_its_file
from tests.published import LONGROPE, NAMES, tiny
from tests.whole_cases import MACHINES, WholeCase, whole_cases

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine


def trains_out_of_its_files(
    model: ModelConfig, plan: Plan, passes: str, machine: Machine | str | None = None, kernels: str = "reference"
) -> None:
    """Compile, then go by the text to the program, by its container to a simulated and a trained step."""
    module = api.compile(model, plan, passes=passes, machine=machine)
    again = parse_module(print_module(module), file="case.rtir")
    assert first_difference(module, again) is None
    api.verify(again)
    program = through_its_file(api.emit(again, machine=machine))
    assert api.simulate(program, machine=machine).step_seconds > 0
    (step,) = train(program, 1, kernels=kernels).done
    assert step.report.loss > 0


def compiles(case: WholeCase) -> bool:
    """Tell whether the compiler takes a case, which it may refuse with a diagnostic."""
    try:
        api.compile(case.model, case.plan, passes=case.passes, machine=MACHINES[case.machine])
    except DiagnosticError:
        return False
    return True


@given(case=whole_cases())
@settings(max_examples=15)
def test_whatever_compiles_is_read_timed_and_trained(case: WholeCase) -> None:
    if compiles(case):
        trains_out_of_its_files(case.model, case.plan, case.passes, MACHINES[case.machine])


@pytest.mark.full
@given(case=whole_cases())
@settings(max_examples=150)
def test_whatever_compiles_is_read_timed_and_trained_more_often(case: WholeCase) -> None:
    if compiles(case):
        trains_out_of_its_files(case.model, case.plan, case.passes, MACHINES[case.machine])


_SCALED = [
    (family, text)
    for family in FAMILIES
    if "rope_scaling" in FAMILY[family].free
    for text in SCALINGS
    if text.partition(" ")[0] in FAMILY[family].scalings
]
DEEP = evolve(MODEL, layers=4)


_EXPERTS = {"experts": 4, "experts_per_token": 2}
_GEMMA = {"attention_scale": 0.5, "embedding_scale": MODEL.hidden_size**0.5}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "granite": {"attention_scale": 0.5},
    "gpt2": {"learned_positions": 10, "rope_theta": 0.0},
    "mixtral": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "expert_size": 9, "shared_expert_size": 7, "router_normalised": False},
    "qwen3_moe": {**_EXPERTS, "expert_size": 9},
    "olmoe": {**_EXPERTS, "router_normalised": False},
    "granitemoe": {**_EXPERTS, "attention_scale": 0.5},
}
"""Fields that models of a family must set, by family."""


def model_of(family: str, **changes: Any) -> ModelConfig:
    """Return a model of a family, with as many key-value heads as it may have."""
    kv_heads = {"kv_heads": MODEL.heads} if FAMILY[family].equal_widths else {}
    return in_family(MODEL, family, **kv_heads, **OWN.get(family, {}) | changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    trains_out_of_its_files(model_of(family), make_plan(model_of(family), dp=1), "recompute{policy=mlp},allocate-ddr")


@pytest.mark.parametrize(("family", "scaling"), _SCALED)
@pytest.mark.sampled(len(_SCALED))
def test_every_scaling_of_rotary_embeddings(family: str, scaling: str) -> None:
    model = model_of(family, rope_scaling=scaling)
    trains_out_of_its_files(model, make_plan(model, dp=1, seq_len=8), "recompute{policy=full},allocate-ddr")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    known = SCHEDULES[schedule]
    slices = {"slices": (6, 4)} if known.chunks == 1 and schedule == "seq1f1b" else {}
    cuts = tuple(range(1, 2 * known.chunks))
    keys = {"schedule": schedule, "chunks": known.chunks, "layout": known.layout, "cuts": cuts, "micro_batches": 4}
    trains_out_of_its_files(DEEP, make_plan(DEEP, dp=1, **keys, **slices), "recompute{policy=none},allocate-ddr")


@pytest.mark.parametrize("home", [home.value for home in STORES])
def test_every_home(home: str) -> None:
    passes = f"offload-state{{home={home}}},insert-prefetch,recompute{{policy=none store={home}}},allocate-ddr"
    trains_out_of_its_files(MODEL, make_plan(), passes, WITH_STORES)


def test_activations_that_wait_on_another_stage() -> None:
    trains_out_of_its_files(MODEL, make_plan(dp=1), "recompute{policy=none store=peer},allocate-ddr")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_type_and_level(dtype: str, zero: int) -> None:
    each = {"reduce": "each-micro-batch"} if zero > 1 else {}
    trains_out_of_its_files(MODEL, make_plan(view_dtype=dtype, zero=zero, **each), "joint-order,allocate-ddr")


@pytest.mark.parametrize("slices", [(12, 1), (10, 3), (24, 9), (5, 7, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_mlp_chunks_of_slices_of_unequal_length(family: str, slices: tuple[int, ...]) -> None:
    """Chunks are those of a slice; a recovery of norms alone has no step for any of them."""
    model = model_of(family, **({"learned_positions": sum(slices)} if family == "gpt2" else {}))
    for chunk in (1, 4, 7):
        plan = make_plan(
            model, dp=1, micro_batch_size=3, micro_batches=2, seq_len=sum(slices), slices=slices, mlp_chunk=chunk
        )
        for policy in ("full", "mlp", "none"):
            module = api.compile(model, plan, passes=f"recompute{{policy={policy}}},allocate-ddr")
            through_its_file(api.emit(module))


READERS: dict[str, tuple[str, ...]] = {
    "verify": ("--json",),
    "simulate": ("--json",),
    "explain": ("--json", "--no-levers"),
    "disasm": (),
    "report": ("-o", "out.html"),
    "doctor": (),
    "launch": ("-n", "2", "--mpirun", "/bin/true"),
    "run": ("--data", "text.txt", "--steps", "1", "--kernels", "reference", "--json"),
}
"""The commands that read a program, and what each is given beside it."""
PLAN = """
[parallel]
pp = 2
dp = 1
[batch]
micro_batch_size = 1
micro_batches = 2
seq_len = 12
"""


def test_every_command_that_reads_a_program_is_here() -> None:
    context = click.Context(commands)
    named = {name: commands.get_command(context, name) for name in commands.list_commands(context)}
    reading = {
        name
        for name, command in named.items()
        if command is not None
        for parameter in command.params
        if isinstance(parameter.type, InputFile) and parameter.type.kind == "program" and parameter.name == "file"
    }
    assert reading == READERS.keys()


@pytest.mark.parametrize("config", [name for name in NAMES if name != LONGROPE])
@pytest.mark.sampled(4)
def test_published_configurations_through_every_reader(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny(config, {"vocab_size": 256})), "utf-8")
    (tmp_path / "plan.toml").write_text(PLAN, "utf-8")
    (tmp_path / "text.txt").write_text("to be read and to be written, " * 40, "utf-8")
    said = ("--model", "config.json", "--plan", "plan.toml")
    assert main(["compile", *said, "-o", "a.rtir"]) == 0
    assert main(["compile", *said, "-o", "a.rtx"]) == 0
    for command, words in READERS.items():
        if command == "launch" and find_spec("mpi4py") is None:
            continue  # it says so before it reads
        for file in ("a.rtx",) if command == "disasm" else ("a.rtx", "a.rtir"):
            assert main([command, *words, file]) == 0, (command, file, capsys.readouterr().err)
    assert main(["export", "a.rtir"]) == 0
    assert main(["opt", "a.rtir", "--passes", "lifetime"]) == 0
