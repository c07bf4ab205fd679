"""Settings files of frameworks with their own trainer: each becomes the job that the framework would run, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.jobs.formats import FORMATS, format_named, recognised
from ratrain.ratrainc.bridge.jobs.hf_rules import OPTIMIZERS
from ratrain.ratrainc.bridge.jobs.job import Job
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, SettingsFormat

FOLDER = Path(__file__).parents[2] / "data" / "bridge" / "jobs"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
SHARED = next(
    (found for each in Path(__file__).resolve().parents if (found := each / "shared" / "settings").is_dir()), None
)
ASKED = {
    "ds_zero3.json": Asked(devices=8, beside=(FOLDER / "ds_zero3.args.json",)),
    "bridge_sft.yaml": Asked(devices=8),
    "bridge_pretrain.yaml": Asked(devices=32),
    "foundry_mpt.yaml": Asked(devices=8),
}
OF_HUGGING_FACE = {"axolotl", "llama-factory", "accelerate", "trl", "transformers"}
OWN = [each for each in FORMATS if each.name not in OF_HUGGING_FACE]
BY_NAME = {each.name: each for each in OWN}


def format_of(path: Path, text: str) -> SettingsFormat:
    (found,) = [each for each in OWN if each.recognises(path, text)]
    return found


def read(path: Path, asked: Asked | None = None) -> Job:
    text = path.read_text()
    return format_of(path, text).read(path, text, asked or Asked())


def read_text(name: str, text: str, **options: Any) -> Job:
    path = Path(name)
    return format_of(path, text).read(path, text, Asked(**options))


def refused(name: str, text: str, **options: Any) -> str:
    path = Path(name)
    with pytest.raises(DiagnosticError) as caught:
        format_of(path, text).read(path, text, Asked(**options))
    assert all(each.location is not None for each in caught.value.diagnostics)
    return "\n".join(each.render() for each in caught.value.diagnostics)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: words of enums, lists of tuples, parameters of a model."""
    if hasattr(value, "parameters"):
        return value.parameters
    if attrs.has(type(value)):
        return {name: plain(each) for name, each in attrs.asdict(value, recurse=False).items()}
    return [plain(each) for each in value] if isinstance(value, tuple) else getattr(value, "value", value)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_becomes_the_job_that_its_framework_would_run(name: str) -> None:
    case = EXPECTED[name]
    job = read(FOLDER / name, ASKED.get(name))
    assert job.framework == case["format"]
    fields = [each for each in attrs.fields(Job) if each.name not in ("framework", "training", "origins")]
    found = {
        each.name: plain(getattr(job, each.name)) for each in fields if each.name not in ("not_understood", "ignored")
    }
    if case["job"].get("model") == "hub":  # a table of names on the hub may have it
        found["model"] = "hub"
    usual = {each.name: plain(each.default) for each in fields}
    assert {key: value for key, value in found.items() if key in case["job"] or value not in (usual[key], {})} == case[
        "job"
    ]
    training = {key: plain(value) for key, value in attrs.asdict(job.training).items() if value is not None}
    assert training == case["training"]
    assert sorted(each.key for each in job.not_understood) == case["not_understood"]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_field_says_where_its_value_stands(name: str) -> None:
    job = read(FOLDER / name, ASKED.get(name))
    for field, origin in job.origins.items():
        assert origin.key, field
        if origin.default:
            assert ": " in origin.place or ", " in origin.place or "__init__" in origin.place, (field, origin)
        elif origin.place != "the command line":
            assert origin.place.startswith(str(FOLDER)), (field, origin)
    said = {each.key for each in (*job.not_understood, *job.ignored)}
    assert said.isdisjoint(
        {each.key for each in job.origins.values() if not each.default} - {"device", "tokens.sequence_length"}
    )


def test_no_sample_is_of_two_formats() -> None:
    files = [each for each in FOLDER.iterdir() if each.name in EXPECTED]
    files += [each for each in (SHARED.rglob("*") if SHARED else []) if each.is_file() and each.suffix != ".md"]
    for path in files:
        names = [each.name for each in OWN if each.recognises(path, path.read_text())]
        assert len(names) <= 1, (path, names)


@pytest.mark.parametrize("text", ["", "{", "model:\n  a: [", "\0", "a: 1\n", "[training]\n", "--x\n", "{}\n"])
@pytest.mark.parametrize("name", ["x.yaml", "x.toml", "x.json", "x.sh", "x"])
def test_recognition_never_raises(name: str, text: str) -> None:
    for each in OWN:
        each.recognises(Path(name), text)


# samples of the steering repository


def shared(folder: str) -> tuple[Path, dict[str, Any]]:
    if SHARED is None or not (SHARED / folder).is_dir():
        pytest.skip("the shared samples are not there")
    case = json.loads((SHARED / folder / "expected.json").read_text())
    return SHARED / folder, case["expect"]


def check_training(job: Job, want: dict[str, Any]) -> None:
    optimizer = want["optimizer"]
    assert job.training.lr == pytest.approx(optimizer["lr"])
    assert list(job.training.betas or ()) == optimizer["betas"]
    if isinstance(optimizer["weight_decay"], float):
        assert job.training.weight_decay == pytest.approx(optimizer["weight_decay"])
    assert job.training.max_grad_norm == want["max_grad_norm"]


def test_torchtune_full_single_device() -> None:
    folder, want = shared("08-torchtune-full-single")
    job = read(folder / "full.yaml")
    check_training(job, want)
    assert (job.micro_batch_size, job.gradient_accumulation, job.seq_len) == (4, 1, want["seq_len"])
    assert (job.devices, job.sharding.value, job.optimizer) == (want["ranks"], "none", "adamw-8bit-paged")
    assert job.optimizer_in_backward
    assert (job.checkpointing.value, job.offload_activations) == ("full", want["activation_offload"])
    assert {job.weight_dtype, job.gradient_dtype, job.compute_dtype} == {"bf16"}
    assert job.master_dtype is None
    assert job.model is not None
    assert job.model.parameters == 3_085_938_688  # of Qwen2.5-3B's weights
    assert job.training.packing
    assert not job.not_understood


def test_nanotron_dense() -> None:
    folder, want = shared("10-nanotron-dense")
    job = read(folder / "dense.yaml")
    check_training(job, want)
    assert job.seq_len == want["seq_len"]["from_step_9001"]  # the longest stage must fit
    assert (job.micro_batch_size, job.gradient_accumulation) == (want["micro_batch_per_rank"], want["grad_accum"])
    sharding = want["sharding"]
    assert [job.dp, job.tp, job.pp, job.cp, job.ep] == [sharding[name] for name in ("dp", "tp", "pp", "cp", "ep")]
    assert (job.devices, job.sequence_sharding, job.sharding.value) == (want["ranks"], True, "zero1")
    assert (job.checkpointing.value, job.gradient_dtype, job.master_dtype) == ("full", "f32", "f32")
    model, shape = job.model, want["model"]
    assert model is not None
    assert [model.hidden_size, model.layers, model.heads, model.kv_heads, model.ffn_size, model.vocab_size] == [
        shape[name] for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
    ]
    assert model.tied_embeddings
    assert not job.not_understood


def test_torchtitan_current() -> None:
    folder, want = shared("12-torchtitan-toml-current")
    job = read(folder / "llama3_8b.toml")
    check_training(job, want)
    assert (job.micro_batch_size, job.gradient_accumulation, job.seq_len) == (2, want["grad_accum"], want["seq_len"])
    assert (job.devices, job.tp, job.dp, job.sharding.value) == (want["ranks"], 2, 8, want["sharding"]["kind"])
    assert (job.weight_dtype, job.compute_dtype, job.reduce_dtype, job.fp8) == ("f32", "bf16", "f32", True)
    assert (job.checkpointing.value, job.optimizer, job.compiled) == ("ops", "adamw-fused", True)
    assert job.model_name == want["model"]
    assert not job.not_understood


def test_torchtitan_of_early_2025() -> None:
    folder, want = shared("13-torchtitan-toml-early2025")
    job = read(folder / "llama3_70b.toml")
    check_training(job, want)
    assert (job.micro_batch_size, job.gradient_accumulation, job.devices) == (4, want["grad_accum"], want["ranks"])
    assert (job.tp, job.cp, job.pp, job.checkpointing.value) == (8, 2, 1, "full")
    assert job.offload_parameters
    assert job.offload_optimizer
    assert job.fp8
    known = read(folder / "llama3_70b.toml", Asked(devices=64))
    assert (known.dp, known.shard_size) == (4, 4)
    assert job.origins["micro_batch_size"].key == "training.batch_size"


def test_megatron_under_slurm() -> None:
    folder, want = shared("15-megatron-slurm-dense")
    job = read(folder / "pretrain_8b.sbatch")
    check_training(job, want)
    sharding = want["sharding"]
    assert [job.dp, job.tp, job.pp, job.cp] == [sharding[name] for name in ("dp", "tp", "pp", "cp")]
    assert (job.devices, job.gradient_accumulation, job.seq_len) == (want["ranks"], want["grad_accum"], want["seq_len"])
    assert (job.virtual_stages, job.schedule, job.sharding.value) == (4, "interleaved", "distributed-optimizer")
    assert (job.checkpointing.value, job.checkpoint_every, job.sequence_sharding) == ("full", 1, True)
    assert (job.weight_dtype, job.master_dtype, job.gradient_dtype) == ("bf16", "f32", "f32")
    assert job.model is None  # its vocabulary is a tokenizer's
    assert {each.key for each in job.not_understood} == {"tokenizer-type", "$EXTRA_ARGS"}


def test_megatron_bridge_over_a_recipe() -> None:
    folder, want = shared("17-megatron-bridge-lora")
    job = read(folder / "override.yaml")
    check_training(
        job, want | {"optimizer": want["optimizer"] | {"weight_decay": want["optimizer"]["weight_decay"]["acting"]}}
    )
    assert (job.devices, job.gradient_accumulation, job.seq_len) == (None, None, want["seq_len"])
    assert (job.tp, job.sequence_sharding, job.sharding.value, job.gradient_dtype) == (2, True, "ddp", "f32")
    adapter, lora = job.adapter, want["lora"]
    assert adapter is not None
    assert [adapter.rank, adapter.alpha, list(adapter.targets)] == [lora["r"], lora["alpha"], lora["targets"]]
    for path, beside in (("override.yaml", "launch.sh"), ("launch.sh", None)):
        launched = read(folder / path, Asked(beside=() if beside is None else (folder / beside,)))
        assert (launched.devices, launched.dp, launched.gradient_accumulation) == (8, 4, 16)
        assert launched.training.lr == job.training.lr


def test_deepspeed_with_training_arguments() -> None:
    folder, want = shared("19-deepspeed-hjson-auto")
    job = read(folder / "ds_config.hjson", Asked(beside=(folder / "args.json",)))
    check_training(job, want)
    assert (job.micro_batch_size, job.gradient_accumulation, job.devices) == (4, 2, None)
    assert (job.weight_dtype, job.master_dtype, job.sharding.value) == ("bf16", "f32", "zero2")
    assert (job.checkpointing.value, job.offload_optimizer, job.offload_parameters) == ("full", True, False)
    assert job.sizes["allgather_bucket_size"] == want["sharding"]["allgather_bucket_size"]
    assert job.sizes["overlap_comm"] == want["sharding"]["overlap_comm"]
    alone = read(folder / "ds_config.hjson")
    assert (alone.micro_batch_size, alone.gradient_accumulation, alone.training.lr) == (None, None, None)
    assert "bf16.enabled" in {each.key for each in alone.not_understood}


def test_llm_foundry_pretraining() -> None:
    folder, want = shared("21-llmfoundry-mpt-pretrain")
    job = read(folder / "mpt.yaml")
    check_training(job, want)
    assert (job.micro_batch_size, job.gradient_accumulation, job.seq_len) == (None, None, want["seq_len"])
    assert (job.sharding.value, job.checkpointing.value) == ("fsdp1", "full")
    assert (job.weight_dtype, job.compute_dtype, job.reduce_dtype) == ("f32", "bf16", "f32")
    model, shape = job.model, want["model"]
    assert model is not None
    assert [model.hidden_size, model.layers, model.heads, model.kv_heads, model.vocab_size] == [
        shape[name] for name in ("d_model", "layers", "heads", "kv_heads", "vocab")
    ]
    asked = read(folder / "mpt.yaml", Asked(devices=8, micro_batch_size=4))
    assert asked.gradient_accumulation == 512 // 32


# what is refused


def changed(name: str, change: str | tuple[str, str]) -> str:
    """Return a file with a text replaced, or with lines at its end."""
    text = (FOLDER / name).read_text()
    if isinstance(change, str):
        return f"{text}{change}\n"
    assert change[0] in text
    return text.replace(*change)


MORE = [
    ("ds_zero3.json", '{"device": "none"}', '{"device": "cpu", "ratio": 0.3}', "ratio"),
    ("foundry_lora.yaml", "model:\n", "model:\n  config_overrides: {num_hidden_layers: 2}\n", "num_hidden_layers"),
    ("foundry_lora.yaml", "model:\n", "model:\n  config_overrides: {attn_config: {attn_impl: torch}}\n", "attn_impl"),
]
"""Settings that raise memory over what is counted."""


@pytest.mark.parametrize(("name", "old", "new", "key"), MORE)
def test_what_raises_memory_is_never_without_effect(name: str, old: str, new: str, key: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text()
    assert old in text
    job = next(each for each in FORMATS if each.recognises(tmp_path / name, text)).read(
        tmp_path / name, text.replace(old, new, 1), Asked(devices=4)
    )
    assert key in {each.key.rpartition(".")[2] for each in job.not_understood}
    assert key not in {each.key.rpartition(".")[2] for each in job.ignored}


def test_what_lowers_memory_uncounted_is_told_apart() -> None:
    path = FOLDER / "mlm_dense.sh"
    flags = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --bf16"
    job = format_named("megatron-lm").read(path, path.read_text().replace("--bf16", flags, 1), Asked())
    less = {each.key for each in job.ignored if each.less}
    assert less >= {"optimizer-offload-fraction", "use-precision-aware-optimizer"}


def test_preference_training_of_torchtune_is_refused(tmp_path: Path) -> None:
    path = FOLDER / "tune_full_spread.yaml"
    text = path.read_text() + "\nref_checkpointer:\n  checkpoint_dir: /tmp/a\n"
    with pytest.raises(DiagnosticError, match="reference model"):
        format_named("torchtune").read(path, text, Asked())


REFUSED: list[tuple[str, str | tuple[str, str], str]] = [
    ("tune_qlora.yaml", ("batch_size: 4", "batch_size: four"), "a whole number is expected"),
    ("tune_qlora.yaml", ("batch_size: 4", "batch_size: 0"), "at least 1"),
    ("tune_qlora.yaml", ("dtype: bf16", "dtype: fp16"), "bf16 or fp32"),
    ("tune_qlora.yaml", ("${length}", "${lenght}"), "names no setting"),
    ("tune_qlora.yaml", ("length: 1024", "length: ${tokenizer.max_seq_len}"), "stands for itself"),
    ("tune_qlora.yaml", ("torch.optim.AdamW", "torch.optim.Rprop"), "not known here"),
    ("tune_qlora.yaml", "optimizer_in_bwd: true", "excludes gradient_accumulation_steps"),
    (
        "tune_qlora.yaml",
        ("checkpointing: True", "checkpointing: False\nenable_activation_offloading: True"),
        "goes with",
    ),
    ("tune_full_spread.yaml", ("replicate_dim: 1", "replicate_dim: 3"), "64"),
    ("nano_llama.yaml", ("learning_rate: 0.0003", "learning_rate: 3e-4"), "write it as a number: 3.0e-4"),
    ("nano_llama.yaml", ("tp_mode: REDUCE_SCATTER", "tp_mode: scatter"), "all_reduce or reduce_scatter"),
    ("nano_llama.yaml", ("dtype: bfloat16", "dtype: int8"), "one of bfloat16"),
    ("nano_llama.yaml", ("num_key_value_heads: 4", "num_key_value_heads: 5"), "must divide"),
    ("nano_llama.yaml", ("  zero_stage: 0", "  zero_stag: 0"), "zero_stage is missing"),
    ("nano_old_optimizer.yaml", (", vocab_size: 32000", ""), "no dataset says"),
    ("titan_hybrid.toml", ('"Interleaved1F1B"', '"1F2B"'), "no schedule"),
    ("titan_hybrid.toml", ("local_batch_size = 8", "local_batch_size = 7"), "no multiple"),
    ("titan_hybrid.toml", ("global_batch_size = 128", "global_batch_size = 100"), "not a multiple"),
    ("titan_hybrid.toml", ('selective_ac_option = "2"', 'selective_ac_option = "ops"'), "'op' or a whole number"),
    ("titan_alone.toml", ('mode = "none"', 'mode = "some"'), "one of none"),
    ("titan_alone.toml", ('dtype = "float32"', 'dtype = "f32"'), "one of"),
    ("titan_alone.toml", ("shard_degree = 1", "shard_degree = 0"), "at least 1"),
    ("titan_2024.toml", ("batch_size = 2", 'batch_size = "2"'), "expects a number"),
    ("mlm_dense.sh", ("--micro-batch-size 2", "--micro-batch-size two"), "a whole number"),
    ("mlm_dense.sh", ("--global-batch-size 64", "--global-batch-size 60"), "not a multiple"),
    ("mlm_dense.sh", ("--bf16", "--bf16 --fp16"), "exclude"),
    ("mlm_dense.sh", ("--bf16", "--bf17"), "no argument --bf17"),
    ("mlm_dense.sh", ("--bf16", "--bf16 --recompute-granularity full"), "goes with recompute-method"),
    ("mlm_dense.sh", ("--bf16", "--bf16 --optimizer-cpu-offload"), "goes with use-precision-aware-optimizer"),
    ("mlm_dense.sh", ("GPUS=8", "GPUS=7"), "not a multiple"),
    ("bridge_sft.yaml", ("size: 4", "size: many"), "a whole number"),
    ("bridge_sft.yaml", ("granularity: full", "granularity: some"), "full or selective"),
    ("bridge_pretrain.yaml", ("bf16_with_mxfp8_mixed", "int8_mixed"), "one of bf16_mixed"),
    ("bridge_pretrain.yaml", "peft: {dim: 0, alpha: 2}", "at least 1"),
    ("ds_alone.json", ('"stage": 1', '"stage": 4'), "0 to 3"),
    ("ds_alone.json", ('"AdamW"', '"Lamb"'), "not known here"),
    ("ds_alone.json", ('"fp32"', '"fp64"'), "one of fp32"),
    ("ds_alone.json", ('"train_batch_size": 64', '"train_batch_size": 63'), "63"),
    ("foundry_mpt.yaml", ("precision: amp_bf16", "precision: bf16"), "one of fp32"),
    ("foundry_mpt.yaml", ("decoupled_lionw", "sgd"), "not known here"),
    ("foundry_mpt.yaml", ("SHARD_GRAD_OP", "SHARD"), "one of FULL_SHARD"),
    ("foundry_mpt.yaml", ("activation_cpu_offload: false", "cpu_offload: true"), "refuses"),
    ("foundry_mpt.yaml", ("n_heads: 16", "n_heads: 15"), "do not divide"),
    ("foundry_mpt.yaml", ("local: /data", 'local: "${oc.env:DATA}"'), "environment"),
]


@pytest.mark.parametrize(("name", "change", "says"), REFUSED)
def test_a_value_that_the_framework_refuses_is_refused_with_its_place(
    name: str, change: str | tuple[str, str], says: str
) -> None:
    options: dict[str, Any] = {"devices": 64} if says in ("64", "63") else {}
    if name.startswith("bridge_pre"):
        options = {"devices": 32}
    assert says in refused(name, changed(name, change), **options)


@pytest.mark.parametrize("name", EXPECTED)
def test_options_that_contradict_a_file_are_refused(name: str) -> None:
    job = read(FOLDER / name, ASKED.get(name))
    if job.seq_len is None:
        return
    asked = attrs.evolve(ASKED.get(name, Asked()), seq_len=job.seq_len + 1)
    with pytest.raises(DiagnosticError, match=r"contradicts"):
        read(FOLDER / name, asked)


def test_a_model_of_the_command_line_goes_before_the_file_s() -> None:
    model = read(FOLDER / "titan_alone.toml").model
    for name in ("mlm_dense.sh", "foundry_lora.yaml", "tune_qlora.yaml", "nano_llama.yaml", "bridge_sft.yaml"):
        job = read(FOLDER / name, attrs.evolve(ASKED.get(name, Asked()), model=model))
        assert job.model == model
        assert job.origins["model"].key == "--model"


def test_a_width_fills_the_sizes_that_follow_from_it() -> None:
    model = read(FOLDER / "titan_alone.toml").model
    job = read(FOLDER / "ds_zero3.json", attrs.evolve(ASKED["ds_zero3.json"], model=model))
    assert job.sizes["reduce_bucket_size"] == 2048 * 2048
    assert job.sizes["stage3_param_persistence_threshold"] == 20480
    assert not job.not_understood


def test_deepspeed_refuses_what_its_trainer_says_otherwise(tmp_path: Path) -> None:
    arguments = tmp_path / "args.json"
    arguments.write_text(json.dumps({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}))
    text = (FOLDER / "ds_alone.json").read_text()
    assert "transformers stops there" in refused("ds_alone.json", text, beside=(arguments,))


def test_a_recipe_that_is_not_named_leaves_its_settings_unknown() -> None:
    text = "\n".join(line for line in (FOLDER / "bridge_sft.yaml").read_text().splitlines() if not line.startswith("#"))
    job = read_text("bridge_sft.yaml", text)
    assert [each.key for each in job.not_understood] == ["recipe"]
    assert (job.model_name, job.micro_batch_size, job.optimizer_in_backward) == (None, 2, False)
    assert "weight_dtype" not in job.origins


def test_sizes_say_how_layers_and_vocabulary_are_shared_out() -> None:
    more = "--bf16 --decoder-last-pipeline-num-layers 5 --make-vocab-size-divisible-by 8"
    job = read_text("mlm_dense.sh", changed("mlm_dense.sh", ("--bf16", more)))
    assert job.sizes == {"decoder_last_pipeline_num_layers": 5, "make_vocab_size_divisible_by": 8}
    assert job.model is not None
    assert job.model.vocab_size == 50000
    split = "--fp16 --account-for-loss-in-pipeline-split"
    assert read_text("mlm_gpt3.sh", changed("mlm_gpt3.sh", ("--fp16", split))).sizes == {
        "account_for_loss_in_pipeline_split": 1
    }
    text = changed("titan_alone.toml", '\n[compile]\nenable = true\ncomponents = ["model"]')
    job = read_text("titan_alone.toml", text)
    assert (job.compiled, job.sizes) == (True, {"compile_loss": 0})


def test_a_format_is_recognised_by_its_text() -> None:
    for name, case in EXPECTED.items():
        if not name.endswith((".sh", ".yaml")) or name.startswith("bridge"):
            continue  # scripts and overrides of a recipe are told apart by the file's ending
        assert format_of(Path("settings"), (FOLDER / name).read_text()).name == case["format"]


@pytest.mark.parametrize(
    "text",
    [
        '{"zero_optimization": {"stage": 2}}',
        '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
        '{"bf16": {"enabled": true}, "train_batch_size": "auto"}',
        "// notes: {\n{ # [\n  zero_optimization: {\n stage: 2 } }",
        '{"note": "it\'s {", "zero_optimization": {"stage": 2',  # cut short
    ],
)
def test_a_ds_config_is_known_by_a_key_at_its_top(text: str) -> None:
    assert format_of(Path("x.json"), text).name == "deepspeed"


@pytest.mark.parametrize("gap", [" ", "\n"])
def test_a_ds_config_in_training_arguments_is_none_of_its_own(gap: str) -> None:
    text = f'{{"output_dir": "o", "num_train_epochs": 1, "deepspeed": {{{gap}"zero_optimization": {{"stage": 1}}}}}}'
    found = recognised(Path("args.json"), text)
    assert found is not None
    assert found.name == "transformers"


LAUNCH = "torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b_pretrain_2gpu_h100_bf16_config --mode pretrain"


def test_options_of_a_runner_stand_for_fields_of_a_recipe() -> None:
    text = f"{LAUNCH} -sl 4096 -mb 2 --tensor_model_parallel_size 4 -gb 64 train.global_batch_size=32 --strange 3\n"
    job = read_text("launch.sh", text)
    assert (job.seq_len, job.micro_batch_size, job.tp, job.cp, job.devices) == (4096, 2, 4, 2, 8)
    assert job.gradient_accumulation == 16  # the words go before the options
    assert [each.key for each in job.not_understood] == ["--strange"]


def test_two_trainings_of_one_script_are_refused() -> None:
    assert "more than one training" in refused("launch.sh", f"{LAUNCH} -mb 1\n{LAUNCH} -mb 2\n")
    assert read_text("launch.sh", f"{LAUNCH} -mb 1\n{LAUNCH} -mb 1\n").micro_batch_size == 1


def test_a_variable_that_a_script_lacks_is_given_by_the_command() -> None:
    text = changed("mlm_dense.sh", ("--bf16", "$MORE"))
    assert [each.key for each in read_text("mlm_dense.sh", text).not_understood] == ["$MORE"]
    job = read_text("mlm_dense.sh", text, given={"MORE": "--bf16 --recompute-activations"})
    assert (job.weight_dtype, job.checkpointing.value) == ("bf16", "attention")


def test_a_tables_interpolation_copies_the_table() -> None:
    text = changed(
        "tune_qlora.yaml", ("loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}", "loss: ${own}")
    )
    text += "own: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss, num_output_chunks: 4}\n"
    job = read_text("tune_qlora.yaml", text)
    assert (job.loss.value, job.loss_chunks) == ("chunked", 4)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_unknown_setting_is_named(name: str) -> None:
    path = FOLDER / name
    if path.suffix == ".sh":
        return  # argparse refuses unknown arguments, as above
    if path.suffix == ".toml":
        text = changed(name, "\n[training.quux]\nnever = 1")
    elif path.suffix == ".json":
        text = json.dumps({**json.loads(path.read_text()), "quux": {"never": 1}})
    elif name.startswith("bridge"):
        text = changed(name, "rng: {seed: 1}").replace("train:", "train:\n  quux: {never: 1}")
    else:
        text = changed(name, "quux: {never: 1}")
    asked = ASKED.get(name, Asked())
    job = format_of(path, text).read(path, text, asked)
    assert any("quux" in each.key for each in job.not_understood)


@pytest.mark.parametrize("word", [*OPTIMIZERS, "adamw_hf"])
def test_a_trainer_beside_deepspeed_has_the_optimizers_of_a_trainer_alone(word: str, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text((FOLDER / "ds_zero3.args.json").read_text().replace("adamw_bnb_8bit", word))
    asked = attrs.evolve(ASKED["ds_zero3.json"], beside=(tmp_path / "args.json",))
    assert read(FOLDER / "ds_zero3.json", asked).optimizer == OPTIMIZERS.get(word, "adamw")
