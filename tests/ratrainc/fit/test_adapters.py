"""Adapters and frozen weights: elements, stored bytes, targets, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.bridge.jobs.job import Adapter, Checkpointing, Sharding
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.fit.bands import HELD, band_of
from ratrain.ratrainc.fit.costs import slower
from ratrain.ratrainc.fit.holdings.adapters import adapted, frozen_bytes, layer_trained, linears, trained
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.functions.long_sequences import long_sequence_plans
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.fit.jobs import gpt, job_of, model_of

ALL = Adapter(16, 32.0, ("all-linear",))
LLAMA_3 = load_model("llama-3-8b")
GIB = 2**30
AXOLOTL = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "sequence_len": 2048,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "bf16": True,
    "flash_attention": True,
    "gradient_checkpointing": True,
    "learning_rate": 2e-4,
    "optimizer": "adamw_torch_fused",
}
LORA = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}


def lora(model=None, framework="transformers", adapter=ALL, **fields):
    return job_of(framework, model or model_of("llama"), adapter=adapter, method="lora", **fields)


def owners(job) -> dict[str, int]:
    return {each.name: each.bytes for each in holdings(job)[0].owners}


def peak(job) -> int:
    return max(each.peak_bytes for each in holdings(job))


@pytest.mark.parametrize(
    ("targets", "elements"),
    [(("all-linear",), 41_943_040), (("q_proj", "v_proj"), 6_815_744), (("o_proj",), 4_194_304)],
)
def test_elements_of_adapters_on_a_model_that_is_published(targets: tuple[str, ...], elements: int) -> None:
    part = Part(lora(LLAMA_3, adapter=evolve(ALL, targets=targets)), 0)
    assert trained(part) == elements == 32 * layer_trained(part)


@pytest.mark.parametrize(
    ("bits", "double", "each"),
    [(None, False, 2.0), (4, False, 0.5 + 4 / 64), (4, True, 0.5 + 1 / 64 + 4 / (64 * 256)), (8, False, 1.0)],
)
def test_bytes_of_a_frozen_weight(bits: int | None, double: bool, each: float) -> None:
    part = Part(lora(LLAMA_3, adapter=evolve(ALL, base_bits=bits, double_quantised=double)), 0)
    matrices = 32 * sum(linear.elements for linear in linears(part))
    rest = part.parameters - matrices
    rows = 4 * 32 * sum(linear.outputs for linear in linears(part)) if bits == 8 else 0
    assert frozen_bytes(part) == int(each * matrices) + rows + 2 * rest


def test_only_adapters_have_gradients_and_moments() -> None:
    job = lora(LLAMA_3, gradient_dtype="f32", autocast=True, checkpointing=Checkpointing.FULL)
    step = {each.name: each.bytes for each in holdings(job)[0].moments[-1].owners}
    assert step["adapters"] == step["gradients"] == step["optimizer"] // 2 == 4 * 41_943_040
    assert step["frozen weights"] == 2 * LLAMA_3.parameters
    assert "weights" not in step


def test_a_rank_of_everything_grows_and_dropout_keeps_masks() -> None:
    small = lora(adapter=evolve(ALL, rank=4))
    assert peak(small) < peak(lora(adapter=evolve(ALL, rank=8))) < peak(lora(adapter=evolve(ALL, rank=64)))
    assert peak(small) < peak(lora(adapter=evolve(ALL, rank=4, dropout=0.1)))


def test_shards_hold_less_and_scales_stay_whole() -> None:
    four = evolve(ALL, base_bits=4, double_quantised=True)
    one, two, many = (
        owners(lora(LLAMA_3, adapter=four, sharding=Sharding.FSDP2, devices=count))["frozen weights"]
        for count in (2, 4, 1 << 15)
    )
    assert one > two > many > 32 * sum(each.elements for each in linears(Part(lora(LLAMA_3), 0))) // 64
    away = lora(LLAMA_3, adapter=four, sharding=Sharding.FSDP2, devices=4, offload_parameters=True)
    assert owners(away)["frozen weights"] < two


@pytest.mark.parametrize("sharding", [Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3])
def test_buckets_are_of_what_trains(sharding: Sharding) -> None:
    engine = {} if sharding is Sharding.DDP else {"master_dtype": "f32"}
    job = lora(LLAMA_3, sharding=sharding, devices=4, sizes={"reduce_bucket_size": 1000}, **engine)
    full = evolve(job, adapter=None, method="full")
    assert peak(job) < peak(full)
    if sharding is Sharding.DDP:
        assert owners(job)["buffers of DDP: buckets"] == 2 * trained(Part(job, 0))


@pytest.mark.parametrize(
    ("family", "targets", "found"),
    [
        ("llama", ("self_attn.q_proj",), ["self_attn.q_proj"]),
        ("llama", (r".*\.(gate|up)_proj",), ["mlp.gate_proj", "mlp.up_proj"]),
        ("phi3", ("qkv_proj",), ["self_attn.qkv_proj"]),
        ("gpt_neox", ("query_key_value", "dense"), ["attention.query_key_value", "attention.dense"]),
    ],
)
def test_targets_are_ends_of_paths_or_expressions_of_whole_ones(family, targets, found) -> None:
    assert [
        each.path for each in adapted(Part(lora(model_of(family), adapter=evolve(ALL, targets=targets)), 0))
    ] == found


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"adapter": None}, "adapter: the settings do not say"),
        ({"framework": "nanotron"}, "adapter: adapters of nanotron were not read"),
        ({"adapter": evolve(ALL, kind="DoRA (use_dora)")}, "adapter: what DoRA (use_dora) keeps"),
        ({"adapter": evolve(ALL, targets=("proj",))}, "adapter: the target 'proj' names no linear"),
        ({"adapter": evolve(ALL, targets=("q_proj", "wq"))}, "adapter: the target 'wq' names no linear"),
        ({"adapter": evolve(ALL, targets=(r".*layers\.0\..*",))}, "adapter: the target '.*layers"),
        ({"adapter": evolve(ALL, targets=("(",))}, "adapter: the target '(' is no regular"),
        ({"adapter": evolve(ALL, rank=0)}, "adapter: its rank"),
        ({"adapter": evolve(ALL, base_bits=2)}, "adapter: frozen weights in 2 bits"),
        ({"optimizer": "adafactor"}, "optimizer: Adafactor's factors of adapters"),
        ({"model": model_of("internlm2")}, "adapter: names of the linears of internlm2"),
        ({"model": gpt(), "adapter": evolve(ALL, base_bits=4)}, "adapter: GPT-2's matrices"),
        (
            {"adapter": evolve(ALL, base_bits=8), "sharding": Sharding.FSDP2, "devices": 2},
            "adapter: weights in 8 bits do not share out",
        ),
        (
            {"adapter": evolve(ALL, base_bits=4), "sharding": Sharding.ZERO3, "devices": 2},
            "adapter: what ZeRO-3 gathers",
        ),
    ],
)
def test_adapters_without_a_formula_are_refused_by_name(fields, said) -> None:
    job = evolve(lora(), **fields)
    assert refusal(job).startswith(said)
    with pytest.raises(DiagnosticError, match="RT061"):
        holdings(job)


def test_a_step_on_frozen_weights_is_shorter_and_dequantisation_costs() -> None:
    machine = load_machine("a100-node")
    full = job_of("transformers", LLAMA_3, seq_len=2048)
    adapters = evolve(full, adapter=ALL, method="lora")
    four = evolve(adapters, adapter=evolve(ALL, base_bits=4))
    assert slower(full, adapters, machine) == pytest.approx(-1 / 3)
    assert slower(adapters, four, machine) > 0


def test_answers_on_adapters_have_the_error_of_adapters() -> None:
    assert band_of(lora()).error == HELD["adapters"][1]
    assert band_of(lora(sharding=Sharding.FSDP1, devices=2)).error == HELD["adapters with FSDP 1"][1]


# files


def fit(tmp_path: Path, settings: dict, memory: int = 23 * GIB, **more):
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(settings))
    return api.fit(file, devices=1, memory=memory, **more)


def test_a_file_with_an_adapter_has_an_answer(tmp_path: Path) -> None:
    found = fit(tmp_path, {**AXOLOTL, **LORA})
    names = {each.name for each in found.fullest.owners}
    assert {"frozen weights", "adapters", "optimizer"} <= names
    assert "weights" not in names
    text = "\n".join(map(str, found.parts()))
    assert "41,943,040 or 0.52 % train" in text
    assert "--exact searches, compiles and places it" in text
    assert found.to_json()["trained_parameters"] == 41_943_040
    assert found.to_json()["job"]["adapter"]["value"]["rank"] == 16


SMALL = {"base_model": "Qwen/Qwen2.5-0.5B", "sequence_len": 512}


def test_a_plan_of_ours_trains_the_adapter_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**AXOLOTL, **LORA, **SMALL, "lr_scheduler": "cosine", "optimizer": "adamw_bnb_8bit"}
    ours = fit(tmp_path, {**settings, "lora_r": 4}, exact=True).ours
    assert ours is not None
    assert "lora rank 4" in ours.plan
    first, second = ours.command.split(" && ")
    assert "--steps 1000 --f32-state" in first
    assert main(shlex.split(first)[1:]) == 0  # as a user follows it
    assert load_plan("P.toml", load_model("qwen2.5-0.5b")).training == Training(method="lora", rank=4, alpha=32.0)
    capsys.readouterr()
    assert main([*shlex.split(second)[1:], "-o", "found.toml"]) == 0
    found = load_plan("found.toml", load_model("qwen2.5-0.5b"))
    assert (found.training.rank, found.global_batch, found.summary) == (4, 4, ours.plan)


TUNE = """model:
  _component_: torchtune.models.llama3_2.qlora_llama3_2_1b
  lora_attn_modules: [q_proj, output_proj]
  lora_rank: 4
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: t, max_seq_len: 256}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 2e-5}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 1
epochs: 1
gradient_accumulation_steps: 1
dtype: bf16
"""


def test_a_command_names_a_model_as_commands_take_it(tmp_path: Path) -> None:
    (tmp_path / "tune.yaml").write_text(TUNE)
    ours = api.fit(tmp_path / "tune.yaml", memory=23 * GIB, exact=True).ours
    assert ours is not None
    assert "lora rank 4" in ours.plan
    assert "--model llama-3.2-1b" in ours.command  # qlora_llama3_2_1b is a name of torchtune's own
    assert "--f32-state" in ours.command


def test_a_model_that_the_file_does_not_name_goes_into_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As names of layers follow from it: without it `import-plan` refuses the file."""
    monkeypatch.chdir(tmp_path)
    settings = {**AXOLOTL, **LORA, **SMALL, "base_model": "org/unknown", "lora_exclude_modules": ["down_proj"]}
    found = fit(tmp_path, settings, exact=True, model="qwen2.5-0.5b")
    assert found.ours is not None
    assert "lora rank 16" in found.ours.plan
    first, _ = found.ours.command.split(" && ")
    assert main(shlex.split(first)[1:]) == 0
    targets = load_plan("P.toml", load_model("qwen2.5-0.5b")).training.targets
    assert targets == "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj"
    assert main([word for word in shlex.split(first)[1:] if word not in ("--model", "qwen2.5-0.5b")]) == 1


EXCLUDED: dict[str, tuple[object, tuple[str, ...], bool]] = {
    "a name": (["down_proj"], ("gate_proj", "up_proj"), False),
    "a path": (["mlp.down_proj", "self_attn.v_proj"], ("gate_proj", "up_proj"), False),
    "an expression": (r".*\.mlp\..*", ("q_proj",), True),
    "one layer's": (["layers.0.mlp.up_proj"], ("down_proj", "gate_proj", "up_proj"), True),
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_what_is_excluded_takes_no_adapter(tmp_path: Path, name: str) -> None:
    excluded, same, less = EXCLUDED[name]
    targets = {"lora_target_linear": False, "lora_target_modules": ["gate_proj", "up_proj", "down_proj"]}
    targets["lora_target_modules"] += ["q_proj"] if name == "an expression" else []
    found = fit(tmp_path, {**AXOLOTL, **LORA, **targets, "lora_exclude_modules": excluded})
    named = fit(tmp_path, {**AXOLOTL, **LORA, **targets, "lora_target_modules": list(same)})
    assert found.peak == named.peak
    assert any(note.key == "lora_exclude_modules" and note.less for note in found.job.ignored) is less


def test_an_adapter_on_nothing_is_refused(tmp_path: Path) -> None:
    targets = {"lora_target_linear": False, "lora_target_modules": ["q_proj"], "lora_exclude_modules": ["q_proj"]}
    with pytest.raises(DiagnosticError, match="no linear is left"):
        fit(tmp_path, {**AXOLOTL, **LORA, **targets})


def test_why_no_plan_of_ours_has_the_adapter_is_said(tmp_path: Path) -> None:
    found = fit(tmp_path, {**AXOLOTL, **LORA, **SMALL, "lora_dropout": 0.1}, exact=True)
    assert found.ours is not None
    assert not found.ours.plan
    text = "\n".join(map(str, found.parts()))
    assert "none, as 'import-plan' refuses the file: lora_dropout: adapters drop 0.1 of their inputs" in text
    assert "ratrainc import-plan" in found.ours.command


def test_long_sequences_have_the_adapter_too() -> None:
    job = job_of("axolotl", evolve(LLAMA_3, layers=4), seq_len=4096, devices=4, cp=2, gradient_accumulation=1)
    machine = load_machine("h100-node")
    whole = long_sequence_plans(job, machine)
    adapted = long_sequence_plans(job, machine, Training(method="lora"))
    assert all(each.plan for each in (*whole, *adapted))
    assert all(less.peak_bytes < more.peak_bytes for less, more in zip(adapted, whole, strict=True))


@pytest.mark.parametrize(
    ("settings", "words", "alters"),
    [
        (LORA, "adapter: qlora; load_in_4bit: true; load_in_8bit: false", "frozen weights in 4 bits"),
        ({}, "adapter: lora", "another training"),
        ({**LORA, "lora_r": 512}, "lora_r: 16", "adapters of rank 16"),
    ],
)
def test_ways_out_are_in_the_words_of_the_file(tmp_path: Path, settings: dict, words: str, alters: str) -> None:
    ways = fit(tmp_path, {**AXOLOTL, **settings}).ways
    found = [way for way in ways if words.replace("; ", ", ") in way.text and len(way.changes) == 1]
    assert found
    assert any(alters in text for text in found[0].alters)


def test_what_is_proposed_is_said_in_one_line_with_whole_numbers(tmp_path: Path) -> None:
    found = fit(tmp_path, AXOLOTL)
    assert any("lora_r: 16, lora_alpha: 32, lora_target_linear: true" in way.text for way in found.ways)
    said = [line for part in map(str, found.parts()) for line in part.splitlines() if "devices or more with" in line]
    assert len(said) == 1
    assert "sync_each_batch: true}}, perhaps 4; no sequence is short enough" in said[0]


def test_a_low_rank_is_not_proposed_where_it_does_not_count(tmp_path: Path) -> None:
    assert not any("lora_r" in way.text for way in fit(tmp_path, {**AXOLOTL, **LORA, "lora_r": 18}).ways)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"peft_use_dora": True}, "DoRA"), ({"peft": {"loftq_config": {"loftq_bits": 4}}}, "LoftQ")],
)
def test_other_kinds_of_adapters_are_refused_by_their_setting(tmp_path: Path, change: dict, said: str) -> None:
    with pytest.raises(DiagnosticError, match=f"adapter: what {said}") as caught:
        fit(tmp_path, {**AXOLOTL, **LORA, **change})
    assert caught.value.diagnostics[0].help
