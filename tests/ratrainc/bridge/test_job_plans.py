"""Plans of the settings files that `fit` reads: each setting becomes its key, or the file is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported
from ratrain.ratrainc.bridge.job_plans.importing_jobs import BY_JOBS
from ratrain.ratrainc.bridge.job_plans.job_notes import rule_of_ignored, rule_of_open
from ratrain.ratrainc.bridge.jobs.job import NOT_KNOWN, Note
from ratrain.ratrainc.bridge.reasons import OF_RATE
from ratrain.ratrainc.cli import commands, main
from tests.ratrainc.bridge.hf_files import ACCELERATE_DDP, ACCELERATE_FSDP1

JOBS = Path(__file__).parents[2] / "data" / "bridge" / "jobs"
EXAMPLES = Path(__file__).parents[3] / "examples"
SHARED = next(
    (found for each in Path(__file__).resolve().parents if (found := each / "shared" / "settings").is_dir()), None
)

SMALL = """base_model: org/unknown
datasets: [{path: a}]
sequence_len: 64
micro_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 2e-5
optimizer: adamw_torch_fused
lr_scheduler: constant
warmup_steps: 0
bf16: true
"""
FSDP = "fsdp_version: 1\nfsdp: [full_shard]\nfsdp_config: {transformer_layer_cls_to_wrap: A}\n"
MORE = {
    "FSDP 1": FSDP,
    "FSDP 1, offloaded": FSDP.replace("[full_shard]", "[full_shard, offload]"),
    "checkpointing": f"{FSDP}gradient_checkpointing: true\n",
    "activations on the host": f"{FSDP}gradient_checkpointing: true\nactivation_offloading: true\n",
    "packed": f"{FSDP}sample_packing: true\n",
    "kept for the backward": f"{FSDP}".replace("full_shard", "shard_grad_op"),
    "tensor-parallel": f"{FSDP}tensor_parallel_size: 2\n",
    "context-parallel": f"{FSDP}context_parallel_size: 2\n",
}


@pytest.mark.parametrize("name", MORE)
def test_a_plan_is_compiled_for_a_tiny_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(SMALL + MORE[name])
    made = api.import_plan("axolotl", tmp_path / "train.yaml", clusters=4)
    (tmp_path / "p.toml").write_text(made.text())
    words = ["compile", "--model", str(EXAMPLES / "tiny.json"), "--plan", str(tmp_path / "p.toml")]
    words += ["--machine", str(EXAMPLES / "mt3000-host.toml"), "-o", str(tmp_path / "x.rtir")]
    assert main([*words, "--passes", ",".join(made.passes)] if made.passes else words) == 0


TRAINER = "model_name_or_path: org/unknown\nmax_length: 64\ndataset_name: d\npacking: true\nmax_steps: 110\n"
TUNE = """model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: t, max_seq_len: 64}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 2e-5}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
epochs: 1
gradient_accumulation_steps: 4
dtype: fp32
enable_activation_checkpointing: false
"""
FOUNDRY = """max_seq_len: 64
model: {name: mpt_causal_lm, d_model: 128, n_heads: 4, n_layers: 4, vocab_size: 256, attn_config: {attn_impl: flash}}
train_loader: {name: text, dataset: {local: d, max_seq_len: 64}}
scheduler: {name: cosine_with_warmup, t_warmup: 5ba, alpha_f: 0.1}
optimizer: {name: decoupled_adamw, lr: 2.0e-4, weight_decay: 1.0e-5}
max_duration: 100ba
global_train_batch_size: 16
device_train_microbatch_size: 2
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: DEFAULT}
"""
ARGUMENTS = """{"output_dir": "o", "max_steps": 200, "per_device_train_batch_size": 1, "num_train_epochs": 1, %s}"""
HPZ = """{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "optimizer": {
  "type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9]}}}"""
BRIDGE = """# over llama31_8b_sft_2gpu_h100_bf16_config
train: {train_iters: 400, global_batch_size: 32}
ddp: {overlap_grad_reduce: true}
"""
BRIDGE_PRETRAIN = BRIDGE.replace("31_8b_sft_2gpu", "31_8b_pretrain_2gpu") + "model: {context_parallel_size: 1}\n"
KEYS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "whole gradients under FSDP 1": (SMALL + FSDP, "axolotl", {}, {"zero": 3, "reduce": "last", "grad_dtype": "bf16"}),
    "whole gradients under FSDP 2": (
        f"{SMALL}fsdp_version: 2\nfsdp_config: {{reshard_after_forward: true}}\n",
        "axolotl",
        {"f32_state": True},
        {"zero": 3, "reduce": "last", "grad_dtype": "bf16"},
    ),
    "reduced each time": (
        f"{SMALL}{FSDP}accelerator_config: {{gradient_accumulation_kwargs: {{sync_each_batch: true}}}}\n",
        "axolotl",
        {},
        {"zero": 3, "reduce": "each-micro-batch"},
    ),
    "reduced at once": (
        SMALL.replace("steps: 2", "steps: 1") + FSDP,
        "axolotl",
        {},
        {"reduce": "each-micro-batch", "grad_shard_dtype": "f32"},
    ),
    "a seed": (f"{SMALL}{FSDP}seed: 7\n", "axolotl", {}, {"seed": 7}),
    "a batch of the command line": (
        SMALL.replace("gradient_accumulation_steps: 2\n", "") + FSDP,
        "axolotl",
        {"global_batch": 32},
        {"micro_batches": 8},
    ),
    "a cosine with an end": (
        (SMALL + FSDP).replace("constant", "cosine") + "cosine_min_lr_ratio: 0.1\n",
        "axolotl",
        {"steps": 50},
        {"total_steps": 50, "min_lr": 2e-6, "warmup_steps": 0},
    ),
    "axolotl's own warm-up": (
        (SMALL + FSDP).replace("warmup_steps: 0\n", ""),
        "axolotl",
        {"steps": 1000},
        {"warmup_steps": 30},
    ),
    "two steps of one": (
        (SMALL + FSDP).replace("warmup_steps: 0", "warmup_steps: 1"),
        "axolotl",
        {},
        {"warmup_steps": 2},
    ),
    "one device under FSDP": (SMALL + FSDP, "axolotl", {"clusters": 1}, {"dp": 1, "zero": 3, "grad_dtype": "f32"}),
    "a group of replicas": (
        f"{SMALL}fsdp_version: 2\nfsdp_config: {{reshard_after_forward: false}}\ndp_shard_size: 2\n",
        "axolotl",
        {"f32_state": True},
        {"zero": 2, "shard_group": 2},
    ),
    "packed for flash attention": (
        f"{TRAINER}attn_implementation: flash_attention_2\n",
        "trl",
        {},
        {"attention_mask": "document"},
    ),
    "packed and wrapped": (
        f"{TRAINER}attn_implementation: flash_attention_2\npacking_strategy: wrapped\n",
        "trl",
        {},
        {"attention_mask": "causal"},
    ),
    "packed for other attention": (TRAINER, "trl", {}, {"attention_mask": "causal"}),
    "eager attention": (f"{TRAINER}attn_implementation: eager\n", "trl", {}, {"attention": "scores-kept"}),
    "a share of steps": (f"{TRAINER}warmup_ratio: 0.03\n", "trl", {}, {"warmup_steps": 4}),
    "no clipping": (f"{TRAINER}max_grad_norm: 0\n", "trl", {}, {"clip": "none"}),
    "torchtune": (
        TUNE,
        "torchtune",
        {"clusters": 1},
        {"dp": 1, "view_dtype": "f32", "attention_mask": "document", "weight_decay": 0.01},
    ),
    "torchtune on several devices": (TUNE, "torchtune", {}, {"dp": 4, "zero": 3, "reduce": "each-micro-batch"}),
    "accelerate alone": (
        ACCELERATE_FSDP1,
        "accelerate",
        {"clusters": 16, "seq_len": 64, "micro_batch_size": 2, "global_batch": 64, "lr": 1e-3},
        {"dp": 16, "micro_batches": 2, "zero": 2, "lr": 1e-3},
    ),
    "LLM Foundry": (
        FOUNDRY,
        "llm-foundry",
        {},
        {"weight_decay": 0.05, "warmup_steps": 5, "total_steps": 100, "min_lr": 2e-5, "reduce": "each-micro-batch"},
    ),
    "a share of LLM Foundry's run": (
        FOUNDRY.replace("5ba", "0.029dur"),
        "llm-foundry",
        {},
        {"warmup_steps": 2, "micro_batches": 2},
    ),
    "a fixed loss scale": (
        ARGUMENTS % '"fp16": true, "deepspeed": {"zero_optimization": {"stage": 1}, "fp16": {"loss_scale": 512}}',
        "transformers",
        {"seq_len": 64},
        {"zero": 1, "view_dtype": "f16", "loss_scale": 512.0, "reduce": "last"},
    ),
    "a recipe of fine-tuning": (
        BRIDGE,
        "megatron-bridge",
        {"clusters": 8},
        {
            "tp": 2,
            "dp": 4,
            "micro_batches": 8,
            "seq_len": 4096,
            "zero": 1,
            "reduce": "last",
            "grad_dtype": "f32",
            "lr": 5e-6,
            "min_lr": 0.0,
            "warmup_steps": 50,
            "total_steps": 400,
            "betas": (0.9, 0.98),
            "weight_decay": 0.033,
            "max_norm": 1.0,
            "attention_mask": "document",
        },
    ),
    "a recipe of pretraining": (
        f"{BRIDGE_PRETRAIN}optimizer: {{lr: 1e-4, adam_beta1: 0.8}}\nscheduler: {{lr_warmup_iters: 9, max_steps: 900}}\n",
        "megatron-bridge",
        {},
        {"dp": 4, "lr": 1e-4, "min_lr": 3e-5, "betas": (0.8, 0.95), "warmup_steps": 9, "total_steps": 900}
        | {"attention_mask": "causal"},
    ),
    "a warm-up that is longer than the run": (
        BRIDGE.replace("400", "20"),
        "megatron-bridge",
        {},
        {"warmup_steps": 20, "total_steps": 20},
    ),
    "a warm-up that is a share of a recipe's run": (
        f"{BRIDGE}scheduler: {{lr_warmup_iters: 0, lr_warmup_fraction: 0.1}}\nrng: {{seed: 9}}\n",
        "megatron-bridge",
        {},
        {"warmup_steps": 40, "seed": 9},
    ),
    "documents of a stream": (
        f"{BRIDGE_PRETRAIN}dataset: {{reset_attention_mask: true, reset_position_ids: true}}\n",
        "megatron-bridge",
        {},
        {"attention_mask": "document"},
    ),
    "samples that are not packed": (
        f"{BRIDGE}dataset: {{enable_offline_packing: false}}\n",
        "megatron-bridge",
        {},
        {"attention_mask": "causal"},
    ),
    "betas of a ds_config": (
        ARGUMENTS % f'"bf16": true, "deepspeed": {HPZ}',
        "transformers",
        {"seq_len": 64},
        {"zero": 3, "view_group": 2, "betas": (0.8, 0.9)},
    ),
}


def imported(folder: Path, text: str, framework: str | None, **options: Any) -> Imported:
    path = folder / ("a.json" if text.startswith("{") else "a.yaml")
    path.write_text(text)
    return api.import_plan(framework, path, **{"clusters": 4, **options})


@pytest.mark.parametrize("name", KEYS)
def test_a_setting_becomes_the_key_that_it_is(name: str, tmp_path: Path) -> None:
    text, framework, options, expected = KEYS[name]
    plan = imported(tmp_path, text, framework, **options).plan
    found = {key: getattr(plan, key, getattr(plan.optimizer, key, None)) for key in expected}
    assert found == expected


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "float8": (f"{SMALL}{FSDP}fp8: true\n", {}, "fp8: float8", "switch it off"),
    "another optimizer": (
        (SMALL + FSDP).replace("adamw_torch_fused", "lion_8bit"),
        {},
        "optimizer: a plan trains with AdamW, not with lion-8bit",
        "say AdamW",
    ),
    "weights in bf16": (SMALL, {}, "bf16: weights and moments are held in bf16", "--f32-state"),
    "moments in 8 bits": (
        (SMALL + FSDP).replace("adamw_torch_fused", "adamw_bnb_8bit"),
        {},
        "optimizer: moments are held in 8 bits",
        "--f32-state",
    ),
    "f32 that is there": (SMALL + FSDP, {"f32_state": True}, "--f32-state changes nothing", "leave it out"),
    "a length that is not needed": (SMALL + FSDP, {"steps": 9}, "--steps 9 changes nothing", "leave it out"),
    "no length": ((SMALL + FSDP).replace("constant", "cosine"), {}, "lr_scheduler cosine ends", "--steps N"),
    "no devices": (SMALL + FSDP, {"clusters": None}, "on how many devices", "--clusters N"),
    "a batch that is none": (SMALL + FSDP, {"global_batch": 6}, "--global-batch 6 is not a multiple", "multiple"),
    "two batches": (SMALL + FSDP, {"global_batch": 32}, "contradicts gradient_accumulation_steps 2", "leave it out"),
    "two rates": (SMALL + FSDP, {"lr": 1.0}, "--lr 1.0 contradicts learning_rate 2e-05", "leave the option out"),
    "two warm-ups": (
        (SMALL + FSDP).replace("constant", "cosine").replace("warmup_steps: 0", "warmup_ratio: 0.1"),
        {"steps": 100, "warmup_steps": 5},
        "--warmup-steps 5 contradicts warmup_ratio 0.1 of 100 steps: 10",
        "leave the option out",
    ),
    "an unknown name": (f"{SMALL}{FSDP}sequnce_len: 4\n", {}, "sequnce_len is not known here", "correct its name"),
    "label smoothing": (f"{SMALL}{FSDP}label_smoothing_factor: 0.1\n", {}, "label_smoothing_factor 0.1", "take it out"),
    "parts": (f"{SMALL}{FSDP}unfrozen_parameters: [a]\n", {}, "unfrozen_parameters: which parameters", "--model"),
    "a plugin": (f"{SMALL}{FSDP}plugins: [a.B]\n", {}, "plugins", "take it out"),
    "a batch that shrinks": (f"{SMALL}{FSDP}auto_find_batch_size: true\n", {}, "auto_find_batch_size", "take it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_trains_or_holds_is_refused_by_name(name: str, tmp_path: Path) -> None:
    text, options, message, way_out = REFUSED[name]
    with pytest.raises(DiagnosticError) as caught:
        imported(tmp_path, text, "axolotl", **options)
    found = [each for each in caught.value.diagnostics if message in each.message]
    assert found, [each.message for each in caught.value.diagnostics]
    assert way_out in (found[0].help or "")
    assert found[0].location is not None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("t_warmup: 5ba", "t_warmup: 100tok", "scheduler.t_warmup"),
        ("lr: 2.0e-4", "lr: 2.0e-4, param_groups: [{lr: 1}]", "optimizer.param_groups"),
        (
            "max_duration",
            "algorithms: {gradient_clipping: {clipping_type: value, clipping_threshold: 1}}\nmax_duration",
            "clipping_type",
        ),
        ("attn_impl: flash", "attn_impl: flash, attn_uses_sequence_id: true", "attn_uses_sequence_id"),
    ],
)
def test_what_llm_foundry_trains_otherwise_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match=message):
        imported(tmp_path, FOUNDRY.replace(old, new), "llm-foundry")


@pytest.mark.parametrize(
    ("text", "message", "way_out"),
    [
        (BRIDGE.replace("llama31", "other"), 'recipe "other_8b_sft', "name a known recipe"),
        (BRIDGE.replace("llama31_8b_sft_2gpu_h100_bf16_config", "nothing"), "recipe is not", "name a known recipe"),
        (f"{BRIDGE}peft: {{dim: 8}}\n", "peft.dim: linear_qkv has one adapter for q_proj", "[linear_proj, linear_fc2]"),
        (f"{BRIDGE}dataset: {{reset_position_ids: true}}\n", "dataset.reset_position_ids", "take it out"),
        (
            f"{BRIDGE}scheduler: {{lr_warmup_fraction: 0.1}}\n",
            "lr_warmup_fraction 0.1 is refused there",
            "lr_warmup_iters: 0",
        ),
    ],
)
def test_what_no_plan_says_of_a_recipe_is_refused(text: str, message: str, way_out: str, tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        imported(tmp_path, text, "megatron-bridge")
    found = [each for each in caught.value.diagnostics if message in each.message]
    assert found, [each.message for each in caught.value.diagnostics]
    assert way_out in (found[0].help or "")


def test_a_launch_script_of_a_recipe_takes_variables(tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text(BRIDGE)
    script = (
        "torchrun --nproc_per_node=8 --nnodes=$NODES finetune_with_yaml.py --config-file o.yaml optimizer.lr=1e-5\n"
    )
    (tmp_path / "run.sh").write_text(script)
    made = api.import_plan(None, tmp_path / "run.sh", given={"NODES": "2"})
    assert (made.title, made.plan.dp, made.plan.optimizer.lr) == ("Megatron-Bridge", 8, 1e-5)
    other = api.import_plan(None, tmp_path / "o.yaml", beside=[tmp_path / "run.sh"], given={"NODES": "4"})
    assert other.plan.dp == 16
    assert other.defaults["warmup_steps"].source.startswith("NVIDIA-NeMo/Megatron-Bridge")


@pytest.mark.parametrize(
    ("each", "passes"), [(0, ["full"]), (1, ["full"]), (3, ["full every=3"]), (16, ["full every=16"]), (17, [])]
)
def test_torchtune_recomputes_each_nth_layer_and_so_does_the_plan(each: int, passes: list[str], tmp_path: Path) -> None:
    off = "enable_activation_checkpointing: false"
    made = imported(tmp_path, TUNE.replace(off, f"ac_mode: selective\nac_option: {each}"), "torchtune")
    assert list(made.passes) == [f"recompute{{policy={options}}}" for options in passes]
    assert "ac_option" not in {left.key for left in made.left}


def test_the_batch_of_all_devices_is_not_asked_for_before_these_are_known(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        imported(tmp_path, BRIDGE, None, clusters=None)
    assert ["--clusters" in (each.help or "") for each in caught.value.diagnostics] == [True]


def test_state_in_f32_is_a_way_out_that_is_named(tmp_path: Path) -> None:
    made = imported(tmp_path, SMALL.replace("torch_fused", "bnb_8bit"), "axolotl", f32_state=True)
    named = {each.key: each.why for each in made.left if each.trains}
    assert "without f32 masters" in named["bf16"]
    assert "8 bits" in named["optimizer"]


def test_what_is_left_out_says_if_training_differs(tmp_path: Path) -> None:
    text = (SMALL + FSDP).replace(
        "constant", "inverse_sqrt"
    ) + "lr_quadratic_warmup: true\nlogging_steps: 3\ntorch_compile: true\n"
    made = imported(tmp_path, text + "label_smoothing_factor: 0\n", "axolotl")
    trains = {each.key: each.trains for each in made.left}
    assert (trains["lr_scheduler"], trains["lr_quadratic_warmup"]) == (True, True)
    assert (trains["logging_steps"], trains["torch_compile"], trains["base_model"]) == (False, False, False)
    assert "label_smoothing_factor" not in trains  # it is off
    assert [each.trains for each in made.left] == sorted((each.trains for each in made.left), reverse=True)
    assert made.defaults["gradient_dtype"].source.startswith("accelerate ")


def test_keys_that_nobody_says_are_left_out_of_the_file(tmp_path: Path) -> None:
    options = {"seq_len": 64, "micro_batch_size": 1, "global_batch": 32, "clusters": 8}
    made = imported(tmp_path, ACCELERATE_DDP, "accelerate", **options)
    assert made.unsaid == {"lr", "betas", "eps", "weight_decay", "clip", "warmup_steps"}
    assert "\nlr = " not in made.text()
    told = "\n".join(made.told())
    assert "--lr" in told
    assert "--max-norm" in told


def test_nanotron_s_rate_stays_where_no_least_one_is_said() -> None:
    made = api.import_plan(None, JOBS / "nano_old_optimizer.yaml", f32_state=True)
    assert "optimizer.learning_rate_scheduler.lr_decay_style" not in {each.key for each in made.left}
    assert any(each.key.endswith("weight_decay") and each.trains for each in made.left)


def test_accelerate_may_be_given_first(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(TRAINER)
    (tmp_path / "acc.yaml").write_text(ACCELERATE_DDP)
    for first, beside in (("sft.yaml", "acc.yaml"), ("acc.yaml", "sft.yaml")):
        made = api.import_plan(None, tmp_path / first, beside=[tmp_path / beside])
        assert (made.title, made.plan.dp) == ("TRL", 8)


def test_a_file_of_another_framework_than_is_said_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TUNE)
    with pytest.raises(DiagnosticError, match="looks like settings of torchtune") as caught:
        api.import_plan("nanotron", tmp_path / "a.yaml")
    assert "--from torchtune" in (caught.value.diagnostics[0].help or "")


def test_files_of_no_framework_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("colour: red\n")
    with pytest.raises(DiagnosticError) as caught:
        api.import_plan(None, tmp_path / "a.yaml")
    assert all(name in (caught.value.diagnostics[0].help or "") for name in (*FRAMEWORKS, *BY_JOBS))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from", "axolotl", "--pp", "2"], "--pp is for --from deepspeed"),
        (["--from", "axolotl", "--set", "A=1"], "--set is for --from megatron"),
        (["--from", "deepspeed", "--f32-state"], "--f32-state is for files of trainers"),
    ],
)
def test_options_without_a_use_are_refused(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(SMALL + FSDP)
    assert main(["import-plan", str(tmp_path / "a.yaml"), *words]) == 2
    assert says in capsys.readouterr().err


def test_the_command_names_each_framework(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = commands.get_command(click.Context(commands), "import-plan")
    assert command is not None
    (option,) = (each for each in command.params if each.name == "framework")
    assert isinstance(option.type, click.Choice)
    assert set(option.type.choices) == {*FRAMEWORKS, *BY_JOBS}
    (tmp_path / "a.yaml").write_text(SMALL + FSDP + "activation_offloading: true\ngradient_checkpointing: true\n")
    assert main(["import-plan", str(tmp_path / "a.yaml"), "--devices", "4", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["passes"] == ["recompute{policy=full store=host}"]
    assert "--passes 'recompute{policy=full store=host}'" in shown.err


def test_a_setting_changes_what_is_trained_by_its_reason_and_not_by_words_in_it() -> None:
    of_rate = Note("lr_scheduler.num_cycles", 0.5, "x.yaml:1", OF_RATE)
    validated = Note("run_val_every_n_steps", 4, "x.yaml:2", "counted as smaller than a step of training")
    assert rule_of_ignored(of_rate).trains
    assert not rule_of_ignored(validated).trains
    typo = Note("sequence_length", 4, "x.yaml:3", f"{NOT_KNOWN} as a setting of axolotl")
    assert rule_of_open(typo, "axolotl").unknown
    assert not rule_of_open(Note("other", 4, "x.yaml:4", "its memory is not known here"), "axolotl").unknown


@pytest.mark.parametrize(
    ("old", "new", "message", "most"),
    [
        ("micro_batch_size: 1", "micro_batch_size: 99999999999", "micro_batch_size: 99999999999 sequences", 65536),
        ("sequence_len: 64", "sequence_len: 2097152", "sequence_len: 2097152 tokens", 1048576),
        ("steps: 2", "steps: 9999999", "gradient_accumulation_steps: 9999999 micro-batches", 1048576),
        ("bf16: true", "bf16: true\ntensor_parallel_size: 99999", "tensor_parallel_size: 99999 tensor", 65536),
        ("bf16: true", "bf16: true\nadapter: lora\nlora_r: 9999999", "adapter: 9999999 ranks", 1048576),
    ],
)
def test_a_count_out_of_range_is_refused_at_its_place(
    old: str, new: str, message: str, most: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text((SMALL + FSDP).replace(old, new))
    for made in (lambda: api.fit(path, model="llama-2-7b"), lambda: api.import_plan(None, path, clusters=4)):
        with pytest.raises(DiagnosticError) as caught:
            made()
        (first,) = caught.value.diagnostics
        assert message in first.message
        assert first.help == f"a whole number from 1 to {most} is expected"
        assert first.location is not None


def test_a_count_out_of_range_is_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DiagnosticError, match="--micro-batch-size: 65537 sequences"):
        api.fit(model="llama-2-7b", micro_batch_size=65537)
    for option in ("--micro-batch-size", "--devices", "--seq-len"):
        assert main(["fit", "--model", "llama-2-7b", option, "99999999999"]) == 2
        assert "is not in the range" in capsys.readouterr().err
