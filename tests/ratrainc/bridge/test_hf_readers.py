"""Readers of the Hugging Face family: each small file is a job with the fields that its framework makes of it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.hub_names import hub_model, hub_names
from ratrain.ratrain_ir.config.model_files import load_model, model_of_hub_name, preset_names
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.jobs.formats import FORMATS, read_job, recognised
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_reader import Asked
from tests.ratrainc.bridge.hf_files import (
    ACCELERATE_DDP,
    ACCELERATE_FILE,
    ACCELERATE_FSDP1,
    ACCELERATE_FSDP2,
    ACCELERATE_ZERO3,
    ARGUMENTS,
    ARGUMENTS_FSDP,
    AXOLOTL_FSDP1,
    AXOLOTL_HYBRID,
    AXOLOTL_PLAIN,
    AXOLOTL_QLORA,
    AXOLOTL_ZERO3,
    CASES,
    FACTORY_FULL,
    FACTORY_LORA,
    FACTORY_PLAIN,
    TRL_FULL,
    TRL_SMALL,
    ZERO2,
    ZERO3,
    job_of,
    written,
)

FULL, NONE = Checkpointing.FULL, Checkpointing.NONE
FIELDS: dict[str, dict[str, Any]] = {
    "axolotl, FSDP 1": {
        "framework": "axolotl",
        "sharding": Sharding.FSDP1,
        "reshard_after_forward": True,
        "offload_parameters": True,
        "offload_optimizer": True,
        "weight_dtype": "f32",
        "compute_dtype": "bf16",
        "reduce_dtype": "bf16",
        "gradient_dtype": "f32",
        "autocast": False,
        "loss": Loss.FUSED,
        "compiled": True,
        "attention": Attention.FLASH,
        "checkpointing": FULL,
        "micro_batch_size": 2,
        "gradient_accumulation": 4,
        "seq_len": 4096,
        "optimizer": "adamw-fused",
    },
    "axolotl, QLoRA": {
        "method": "lora",
        "weight_dtype": "bf16",
        "gradient_dtype": "f32",
        "autocast": True,
        "checkpointing": NONE,  # the offloader takes its place for adapters
        "offload_activations": True,
        "optimizer": "adamw-8bit-paged",
        "attention": Attention.FLASH,
    },
    "axolotl, hybrid": {
        "sharding": Sharding.FSDP2,
        "devices": 16,
        "tp": 2,
        "shard_size": 4,
        "loss": Loss.FUSED,
        "checkpointing": FULL,
        "offload_parameters": False,
    },
    "axolotl, ZeRO 3": {
        "sharding": Sharding.ZERO3,
        "offload_parameters": True,
        "offload_optimizer": True,
        "master_dtype": "f32",
        "gradient_dtype": "bf16",
        "checkpointing": FULL,
        "offload_activations": True,
        "loss": Loss.CHUNKED,
        "loss_chunks": 8,
    },
    "axolotl, one device": {
        "weight_dtype": "f16",
        "compute_dtype": "f16",
        "gradient_dtype": "f16",
        "autocast": True,
        "optimizer": "adamw-8bit",
        "attention": Attention.SDPA,
        "checkpointing": NONE,
        "gradient_accumulation": 1,
    },
    "LLaMA-Factory, full": {
        "framework": "llama-factory",
        "method": "full",
        "sharding": Sharding.ZERO3,
        "checkpointing": FULL,
        "seq_len": 2048,
        "weight_dtype": "bf16",
        "loss": Loss.UPCAST,
        "attention": Attention.SDPA,
    },
    "LLaMA-Factory, QLoRA": {
        "method": "lora",
        "weight_dtype": "bf16",
        "gradient_dtype": "f32",
        "loss": Loss.FUSED,
        "attention": Attention.FLASH,
        "checkpointing": FULL,
    },
    "LLaMA-Factory, pure": {
        "weight_dtype": "bf16",
        "compute_dtype": "bf16",
        "autocast": False,
        "gradient_dtype": "bf16",
        "checkpointing": NONE,
    },
    "LLaMA-Factory, FSDP 1": {
        "sharding": Sharding.FSDP1,
        "reshard_after_forward": False,
        "devices": 16,
        "weight_dtype": "f32",
        "compute_dtype": "bf16",
    },
    "TRL, small": {
        "framework": "trl",
        "micro_batch_size": 8,
        "seq_len": 1024,
        "checkpointing": FULL,
        "weight_dtype": "f32",
        "compute_dtype": "bf16",
        "autocast": True,
        "loss": Loss.FUSED,
        "method": "full",
    },
    "TRL, DDP": {
        "sharding": Sharding.DDP,
        "devices": 8,
        "weight_dtype": "bf16",
        "gradient_dtype": "bf16",
        "reduce_dtype": "bf16",
        "autocast": True,
        "optimizer": "adamw-8bit",
        "loss": Loss.UPCAST,
        "attention": Attention.FLASH,
    },
    "TRL, FSDP 1": {"sharding": Sharding.FSDP1, "devices": 16, "reshard_after_forward": False, "weight_dtype": "f32"},
    "TRL, FSDP 2": {
        "sharding": Sharding.FSDP2,
        "shard_size": 2,
        "reshard_after_forward": False,
        "offload_parameters": True,
        "checkpointing": FULL,
    },
    "TRL, ZeRO 3": {
        "sharding": Sharding.ZERO3,
        "devices": 8,
        "offload_optimizer": True,
        "offload_parameters": False,
        "master_dtype": "f32",
    },
    "TRL, ZeRO 2 by a file": {"sharding": Sharding.ZERO2, "devices": 2},
    "arguments": {
        "framework": "transformers",
        "optimizer": "adafactor",
        "loss": Loss.FUSED,
        "compiled": True,
        "seq_len": None,
        "model": None,
        "checkpointing": FULL,
    },
    "arguments, FSDP 2": {
        "sharding": Sharding.FSDP2,
        "offload_parameters": True,
        "reshard_after_forward": True,
        "checkpointing": NONE,
    },
    "arguments, ZeRO 2": {"sharding": Sharding.ZERO2, "weight_dtype": "bf16", "master_dtype": "f32"},
    "accelerate alone": {"framework": "accelerate", "micro_batch_size": None, "model": None, "devices": 16},
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_job_that_its_framework_trains(name: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, CASES[name])
    assert {key: getattr(job, key) for key in FIELDS[name]} == FIELDS[name]
    assert all(each.key and each.place for each in job.origins.values())
    unsaid = {"dtype", "torch_dtype", "weights", "base_model"}  # what a file leaves to its model
    assert {each.key for each in job.not_understood} <= unsaid, job.not_understood


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_of_one_format(name: str, tmp_path: Path) -> None:
    first, others = written(tmp_path, CASES[name])
    for path in (first, *others):
        found = [each.name for each in FORMATS if each.recognises(path, path.read_text())]
        assert len(found) <= 1, path
        assert found or "zero_optimization" in path.read_text(), path


def test_a_job_names_settings_in_the_words_of_their_own_file(tmp_path: Path) -> None:
    job = job_of(tmp_path, CASES["TRL, ZeRO 2 by a file"])
    origin = job.origins["sharding"]
    assert (origin.key, origin.default) == ("zero_optimization.stage", False)
    assert origin.place == f"{tmp_path}/zero2.json:1"
    assert job.origins["devices"].place == f"{tmp_path}/a.yaml:5"
    assert job.origins["weight_dtype"].default
    assert job.origins["loss"] == job.origins["loss"]
    assert "sft.yaml:12" in job.origins["loss"].place


def test_auto_is_filled_as_transformers_fills_it(tmp_path: Path) -> None:
    job = job_of(tmp_path, CASES["LLaMA-Factory, full"])
    width = load_model("qwen3-4b").hidden_size
    assert job.sizes["reduce_bucket_size"] == width * width
    assert job.sizes["stage3_prefetch_bucket_size"] == int(0.9 * width * width)
    assert job.sizes["stage3_param_persistence_threshold"] == 10 * width
    assert (job.sizes["sub_group_size"], job.sizes["overlap_comm"]) == (10**9, 1)
    unknown = FACTORY_FULL.replace("Qwen/Qwen3-4B", "somebody/unheard-of")
    job = job_of(tmp_path, {"train.yaml": unknown, "ds_z3_config.json": ZERO3})
    assert (job.model, job.model_name) == (None, "somebody/unheard-of")
    assert "reduce_bucket_size" not in job.sizes
    assert "zero_optimization.reduce_bucket_size" in {each.key for each in job.not_understood}


def test_options_fill_what_a_file_leaves_open(tmp_path: Path) -> None:
    model = load_model("gpt2")
    job = job_of(tmp_path, {"a.json": ARGUMENTS}, devices=4, seq_len=256, model=model)
    assert (job.devices, job.seq_len, job.model, job.sharding) == (4, 256, model, Sharding.DDP)
    assert job.origins["devices"].key == "--devices"
    assert job_of(tmp_path, TRL_SMALL, seq_len=4096, micro_batch_size=2).seq_len == 4096
    one = job_of(tmp_path, TRL_SMALL, devices=1)
    assert one.sharding is Sharding.NONE


def test_accelerate_may_be_given_first(tmp_path: Path) -> None:
    first = job_of(tmp_path, {"a.yaml": ACCELERATE_DDP, "sft.yaml": TRL_FULL})
    assert (first.framework, first.devices) == ("trl", 8)


def test_a_ds_config_says_the_type_where_nothing_else_does(tmp_path: Path) -> None:
    files = {
        "a.yaml": ACCELERATE_FILE,
        "zero2.json": ZERO2.replace('"bf16": {"enabled": "auto"}', '"fp16": {"enabled": true}'),
    }
    job = job_of(tmp_path, files)
    assert (job.weight_dtype, job.master_dtype, job.sharding) == ("f16", "f32", Sharding.ZERO2)


def test_a_batch_of_a_ds_config_says_the_devices(tmp_path: Path) -> None:
    text = ZERO2.replace('"zero_opt', '"train_batch_size": 64, "zero_opt', 1)
    assert job_of(tmp_path, {"args.json": ARGUMENTS, "ds.json": text}).devices == 8


def test_models_are_loaded_from_folders(tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "data" / "models" / "gpt2.json"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(config.read_text())
    job = job_of(tmp_path, TRL_SMALL.replace("Qwen/Qwen2.5-0.5B", "./mine"))
    assert job.model is not None
    assert (job.model.hidden_size, job.dropout) == (768, 0.1)


def test_every_name_of_the_hub_has_a_preset() -> None:
    for preset in preset_names():
        for name in hub_names(preset):
            known = hub_model(name.upper())
            assert known is not None
            assert known.preset == preset
            assert known.dtype in ("bf16", "f16", "f32")
    assert model_of_hub_name("nousresearch/meta-llama-3.1-8b") == load_model("llama-3.1-8b")
    assert model_of_hub_name("nobody/nothing") is None


EACH = "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "accelerate decides the type": (
        ARGUMENTS_FSDP.replace('"bf16": true', '"fp16": false'),
        {"compute_dtype": "bf16", "weight_dtype": "bf16"},
    ),
    "words of truth": (AXOLOTL_PLAIN + "gradient_checkpointing: 'yes'\n", {"checkpointing": FULL}),
    "numbers as texts": (TRL_FULL.replace("size: 2", "size: '2'"), {"micro_batch_size": 2}),
    "the newer name of checkpointing": (TRL_FULL + "activation_checkpointing: false\n", {"checkpointing": NONE}),
    "every second layer": (
        TRL_FULL + "gradient_checkpointing_kwargs: {every_n_layers: 2, offload: true}\n",
        {"checkpoint_layers": 18, "offload_activations": True},
    ),
    "no length": (TRL_FULL.replace("max_length: 8192", "max_length: null"), {"seq_len": None}),
    "sgd with momentum": (
        TRL_FULL.replace("adamw_bnb_8bit", "sgd") + "optim_args: momentum=0.9\n",
        {"optimizer": "sgd-momentum"},
    ),
    "no clipping": (TRL_FULL + "max_grad_norm: 0\n", {}),
    "an older whole batch": (AXOLOTL_PLAIN + "batch_size: 8\n", {"gradient_accumulation": 4}),
    "an older word of attention": (AXOLOTL_PLAIN.replace("sdp_", "eager_"), {"attention": Attention.EAGER}),
    "hidden states on the host": (
        AXOLOTL_QLORA.replace("offload\n", "true\nactivation_offloading: hidden_states\n"),
        {"checkpointing": FULL, "offload_activations": True},
    ),
    "float32": (AXOLOTL_PLAIN.replace("fp16: true\n", ""), {"weight_dtype": "f16"}),
    "frozen layers": (FACTORY_PLAIN.replace("type: full", "type: freeze"), {"method": "frozen"}),
    "LoRA by default": (FACTORY_PLAIN.replace("finetuning_type: full\n", "lora_rank: 4\n"), {"method": "lora"}),
    "muon": (FACTORY_PLAIN + "use_muon: true\n", {"optimizer": "muon"}),
    "GaLore": (FACTORY_PLAIN + "use_galore: true\n", {"optimizer": "galore"}),
    "8 bits": (FACTORY_LORA.replace("bit: 4", "bit: 8"), {"method": "lora"}),
    "reduced after each micro-batch": (AXOLOTL_FSDP1 + EACH, {"reduces_each": True, "sums_whole": False}),
    "gradients that wait": (AXOLOTL_FSDP1, {"reduces_each": False, "sums_whole": True}),
    "reductions of DDP": (AXOLOTL_PLAIN + EACH, {"reduces_each": False, "sums_whole": False}),
    "reductions in a text": (
        AXOLOTL_FSDP1 + 'accelerator_config: \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\'\n',
        {"reduces_each": True},
    ),
    "no Liger": (
        AXOLOTL_FSDP1.replace("plugins:\n  - axolotl.integrations.liger.LigerPlugin\n", ""),
        {"loss": Loss.UPCAST},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_way_to_say_it(name: str, tmp_path: Path) -> None:
    text, expected = OTHERS[name]
    if name == "float32":
        expected = {"weight_dtype": "f32", "compute_dtype": "f32"}
        text = text.replace("bf16: false", "bf16: false\nfp16: false")
    files = {"args.json": text, "a.yaml": ACCELERATE_DDP} if text.startswith("{") else {"train.yaml": text}
    if text.startswith("{"):
        files["args.json"] = text.replace('"fsdp": "full_shard offload auto_wrap", ', "")
    job = job_of(tmp_path, files)
    assert {key: getattr(job, key) for key in expected} == expected
    if name == "no clipping":
        assert job.training.max_grad_norm is None


NOTED = {
    "a plugin": (AXOLOTL_PLAIN + "plugins: [axolotl.integrations.kd.KDPlugin]\n", "plugins"),
    "an unknown setting": (AXOLOTL_PLAIN + "extra_layers: 3\n", "extra_layers"),
    "a fused kernel": (AXOLOTL_QLORA + "lora_mlp_kernel: true\n", "lora_mlp_kernel"),
    "an optimizer": (TRL_FULL.replace("adamw_bnb_8bit", "galore_adamw"), "optim"),
    "attention": (TRL_FULL.replace("kernels-community/flash-attn2", "flex_attention"), "attn_implementation"),
    "a switch": (FACTORY_PLAIN + "use_unsloth: true\n", "use_unsloth"),
    "an unknown argument": (TRL_FULL + "sparkle: true\n", "sparkle"),
    "published weights": (FACTORY_PLAIN.replace("Qwen/Qwen2.5-1.5B", "a/b"), "torch_dtype"),
    "an unknown setting of a table": (
        AXOLOTL_FSDP1.replace("  fsdp_sharding", "  fsdp_sparkle: 1\n  fsdp_sharding"),
        "fsdp_config.fsdp_sparkle",
    ),
    "gathers without a limit": (
        AXOLOTL_FSDP1.replace("limit_all_gathers: true", "limit_all_gathers: false"),
        "fsdp_config.fsdp_limit_all_gathers",
    ),
    "accumulation by another word": (
        AXOLOTL_FSDP1 + EACH.replace("sync_each_batch: true", "num_steps: 4"),
        "accelerator_config.gradient_accumulation_kwargs.num_steps",
    ),
    "a part that is offloaded": (
        AXOLOTL_PLAIN + "deepspeed: {zero_optimization: {stage: 3, offload_optimizer: {device: cpu, ratio: 0.3}}}\n",
        "deepspeed.zero_optimization.offload_optimizer.ratio",
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_is_not_counted_is_named(name: str, tmp_path: Path) -> None:
    text, key = NOTED[name]
    job = job_of(tmp_path, text)
    assert key in {each.key for each in job.not_understood}
    assert all(each.why and each.place for each in (*job.not_understood, *job.ignored))


REFUSED = {
    "a size": (AXOLOTL_PLAIN.replace("size: 2", "size: none"), "micro_batch_size is"),
    "a size of 0": (TRL_FULL.replace("size: 2", "size: 0"), "at least 1 is expected"),
    "an optimizer": (TRL_FULL.replace("adamw_bnb_8bit", "adamw_hf"), "no optimizer"),
    "a truth value": (TRL_FULL + "bf16: maybe\n", "true or false"),
    "both types": (TRL_FULL + "bf16: true\nfp16: true\n", "exclude one another"),
    "attention": (TRL_FULL.replace("kernels-community/flash-attn2", "flash"), "no attention implementation"),
    "attention of a format": (FACTORY_LORA.replace("fa2", "fa9"), "LLaMA-Factory does not have"),
    "a type": (TRL_FULL.replace("bfloat16", "bfloat17"), "no type of weights"),
    "a loss": (TRL_FULL.replace("loss_type: nll", "loss_type: mse"), "no loss of SFT"),
    "two losses": (TRL_FULL.replace("nll", "chunked_nll") + "use_liger_kernel: true\n", "exclude one another"),
    "an old name": (TRL_FULL + "max_seq_length: 512\n", "older versions"),
    "another trainer": (TRL_FULL + "beta: 0.1\n", "another trainer"),
    "a missing file": (FACTORY_FULL, "deepspeed names"),
    "another stage": (FACTORY_PLAIN.replace("stage: pt", "stage: dpo"), "more than one model"),
    "preferences": (AXOLOTL_PLAIN + "rl: dpo\n", "rl: dpo"),
    "an adapter": (AXOLOTL_PLAIN + "adapter: llama-adapter\n", "adapter is"),
    "bits without an adapter": (AXOLOTL_PLAIN + "load_in_4bit: true\n", "adapter alone"),
    "bits": (FACTORY_LORA.replace("bit: 4", "bit: 3"), "has 4 and 8"),
    "two mechanisms": (AXOLOTL_FSDP1 + "deepspeed: x.json\n", "exclude one another"),
    "offload alone": (AXOLOTL_PLAIN + "activation_offloading: true\n", "needs gradient_checkpointing"),
    "a version": (AXOLOTL_HYBRID.replace("version: 2", "version: 3"), "versions 1 and 2"),
    "a word of attention twice": (AXOLOTL_PLAIN + "attn_implementation: sdpa\n", "older word"),
    "no YAML": ("base_model: [\nsequence_len: 3\n", "not usable YAML"),
    "a key twice": (AXOLOTL_PLAIN + "fp16: false\n", "said twice"),
    "a Megatron run": (FACTORY_PLAIN + "tensor_model_parallel_size: 2\n", "Megatron"),
    "no strategy": (ACCELERATE_FSDP1.replace("SHARD_GRAD_OP", "HALF"), "no strategy"),
    "another launcher": (ACCELERATE_DDP.replace("MULTI_GPU", "MEGATRON_LM"), "is not read"),
    "another precision": (ACCELERATE_DDP.replace("'bf16'", "int8"), "accelerate does not have"),
    "a stage": (ACCELERATE_ZERO3.replace("zero_stage: 3", "zero_stage: 4"), "0 to 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_value_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    text, words = REFUSED[name]
    with pytest.raises(DiagnosticError) as caught:
        job_of(tmp_path, text)
    assert words in str(caught.value)
    assert all(each.location is not None for each in caught.value.diagnostics)


MISMATCHED = {
    "micro-batch": (ZERO2.replace('"bf16"', '"train_micro_batch_size_per_gpu": 3, "bf16"'), "contradicts"),
    "type": (ZERO2.replace('"auto"}', "false}"), "contradicts"),
    "whole batch": (ZERO2.replace('"bf16"', '"train_batch_size": 12, "bf16"'), "number of devices"),
    "no table": ('{"train_batch_size": "auto"}', "no zero_optimization"),
    "a device": (ZERO3.replace('"device": "cpu", ', '"device": "gpu", '), "none, cpu or nvme"),
    "a stage": (ZERO2.replace('"stage": 2', '"stage": 5'), "0 to 3"),
}


@pytest.mark.parametrize("name", MISMATCHED)
def test_a_ds_config_that_contradicts_is_refused(name: str, tmp_path: Path) -> None:
    text, words = MISMATCHED[name]
    with pytest.raises(DiagnosticError) as caught:
        job_of(tmp_path, {"args.json": ARGUMENTS, "ds.json": text})
    assert words in str(caught.value)


def test_checkpointing_twice_is_refused(tmp_path: Path) -> None:
    for text in (TRL_FULL, TRL_FULL.replace("gradient_checkpointing: true\n", "")):  # TRL's default is on
        with pytest.raises(DiagnosticError, match="both on"):
            job_of(tmp_path, {"sft.yaml": text, "a.yaml": ACCELERATE_FSDP2})


def test_options_that_contradict_are_refused(tmp_path: Path) -> None:
    for options in ({"seq_len": 7}, {"micro_batch_size": 7}):
        with pytest.raises(DiagnosticError, match="contradicts"):
            job_of(tmp_path, AXOLOTL_PLAIN, **options)
    with pytest.raises(DiagnosticError, match="contradicts"):
        job_of(tmp_path, AXOLOTL_HYBRID, devices=5)
    with pytest.raises(DiagnosticError, match="neither"):
        job_of(tmp_path, {"a.yaml": TRL_FULL, "notes.txt": "hello"})


def test_a_model_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    job_of(tmp_path, AXOLOTL_HYBRID, model=load_model("llama-3-8b"))
    with pytest.raises(DiagnosticError, match="has layers 28, and meta-llama"):
        job_of(tmp_path, AXOLOTL_HYBRID, model=load_model("qwen2.5-7b"))


@pytest.mark.parametrize(
    ("degrees", "devices", "shards"),
    [
        ("", 8, None),
        ("dp_shard_size: 4", 8, 4),
        ("dp_replicate_size: 2", 8, 4),
        ("{dp_replicate_size: 1, dp_shard_size: 1}", 8, None),
        ("{dp_replicate_size: 4, tensor_parallel_size: 2}", 16, 2),
    ],
)
def test_one_degree_leaves_other_ranks_to_the_other_one(
    degrees: str, devices: int, shards: int | None, tmp_path: Path
) -> None:
    lines = [line for line in AXOLOTL_HYBRID.splitlines() if not line.startswith(("dp_", "tensor_"))]
    text = "\n".join([*lines, degrees.strip("{}").replace(", ", "\n"), ""])
    assert job_of(tmp_path, text, devices=devices).shard_size == shards
    if "dp_shard_size: 4" in degrees:
        with pytest.raises(DiagnosticError, match="does not divide 6 data-parallel ranks"):
            job_of(tmp_path, text, devices=6)


def test_axolotls_own_fsdp_2_casts_no_weight(tmp_path: Path) -> None:
    """Read f32 state only where accelerate prepares FSDP 2, and not axolotl's own file."""
    own = job_of(tmp_path, AXOLOTL_PLAIN + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n", devices=8)
    assert (own.weight_dtype, own.gradient_dtype) == ("f16", "f16")
    launch = {"train.yml": AXOLOTL_PLAIN, "fsdp2.yaml": ACCELERATE_FSDP2}
    assert job_of(tmp_path, launch).weight_dtype == "f32"


def test_files_of_other_kinds_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text, words in (
        ('{"model_type": "llama", "hidden_size": 3}', "ratrainc model"),
        ('{"zero_optimization": {"stage": 1}}', "import-plan --from deepspeed"),
        ("[training]\nseq_len = 3\n", "import-plan --from torchtitan"),
        ("hello: world\n", "formats are"),
    ):
        path.write_text(text)
        if recognised(path, text) is not None:
            continue  # a reader of that framework's own settings
        with pytest.raises(DiagnosticError) as caught:
            read_job(path, Asked())
        assert words in str(caught.value)
    with pytest.raises(DiagnosticError, match="no settings format"):
        read_job(path, Asked(), "axolot")


def test_a_format_may_be_named(tmp_path: Path) -> None:
    (path := tmp_path / "x.yaml").write_text(AXOLOTL_ZERO3.replace("deepspeed:", "wandb_name:"))
    assert read_job(path, Asked(), "axolotl").framework == "axolotl"


ODD: tuple[Any, ...] = (None, "", "x", "-3", 0, -1, 1e30, True, ["x", 1], {"x": {"y": 1}}, '{"a": 1}')


@pytest.mark.parametrize("name", CASES)
def test_any_value_is_read_or_refused(name: str, tmp_path: Path) -> None:
    files = CASES[name]
    for file, text in files.items():
        whole = hjson.loads(text) if file.endswith("json") else yaml.safe_load(text)
        for key, inner in whole.items():
            for value in ODD:
                for changed in (
                    {**whole, key: value},
                    {**whole, key: {**inner, next(iter(inner)): value}} if isinstance(inner, dict) else whole,
                ):
                    with suppress(DiagnosticError):
                        job_of(tmp_path, {**files, file: json.dumps(changed)})


@given(st.text(max_size=80), st.sampled_from(sorted(CASES)))
def test_any_text_is_read_or_refused(text: str, name: str) -> None:
    with TemporaryDirectory() as folder:
        files = CASES[name]
        first = next(iter(files))
        for broken in (text, files[first] + text, files[first].replace("true", text)):
            with suppress(DiagnosticError, UnicodeEncodeError):
                job_of(Path(folder), {**files, first: broken})
