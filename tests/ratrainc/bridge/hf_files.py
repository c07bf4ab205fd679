"""Small settings files of the Hugging Face family, in the structure of public ones, and a way to write and change them.

Sources, rewritten in small: axolotl examples/llama-3/fft-8b-liger-fsdp.yaml, examples/llama-2/qlora-fsdp.yml,
examples/distributed-parallel/llama-3_1-8b-hsdp-tp.yaml, examples/llama-3/3b-fp8-fsdp2.yaml, examples/mistral/lora.yml,
deepspeed_configs/zero3_bf16_cpuoffload_all.json; LLaMA-Factory examples/train_full/qwen3_full_sft.yaml,
examples/train_lora/qwen3_lora_sft_ds3.yaml, examples/train_qlora/qwen3_lora_sft_otfq.yaml,
examples/accelerate/fsdp_config.yaml; TRL examples/cli_configs/example_config.yaml and
examples/accelerate_configs/{multi_gpu,fsdp1,fsdp2,deepspeed_zero3}.yaml; transformers docs/source/en/deepspeed.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hjson
import yaml

from ratrain.ratrainc.bridge.jobs.formats import read_job
from ratrain.ratrainc.bridge.jobs.job_reader import Asked

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job

ZERO3 = """{
  "bf16": {"enabled": "auto"},
  "zero_optimization": {
    "stage": 3, "overlap_comm": true,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu"},
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": true
  },
  "gradient_clipping": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}
"""
ZERO2 = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}\n'
AXOLOTL_FSDP1 = """base_model: NousResearch/Meta-Llama-3.1-8B
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
datasets:
  - path: data/chat.jsonl
    type: chat_template
val_set_size: 0.02
output_dir: ./outputs/out
sequence_len: 4096
sample_packing: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
attn_implementation: flash_attention_2
warmup_ratio: 0.1
weight_decay: 0.0
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_offload_params: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sharding_strategy: FULL_SHARD
special_tokens:
  pad_token: <|end|>
"""
AXOLOTL_QLORA = """base_model: NousResearch/Llama-2-7b-hf
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: true
adapter: qlora
lora_model_dir:
datasets: [{path: data/a.jsonl, type: alpaca}]
sequence_len: 512
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 4
num_epochs: 4
optimizer: paged_adamw_8bit
learning_rate: 0.00001
bf16: auto
gradient_checkpointing: offload
flash_attention: true
"""
AXOLOTL_HYBRID = """base_model: meta-llama/Llama-3.1-8B
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config:
  offload_params: false
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  reshard_after_forward: true
  activation_checkpointing: true
sequence_len: 2048
micro_batch_size: 1
learning_rate: 2e-6
bf16: true
attn_implementation: flash_attention_2
"""
AXOLOTL_ZERO3 = """base_model: Qwen/Qwen3-8B
sequence_len: 8192
micro_batch_size: 1
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
activation_offloading: true
chunked_cross_entropy: true
deepspeed: deepspeed_configs/zero3.json
"""
AXOLOTL_PLAIN = """base_model: mistralai/Mistral-7B-v0.3
sequence_len: 8192
micro_batch_size: 2
learning_rate: 0.0002
datasets: [{path: a, type: b}]
optimizer: adamw_bnb_8bit
fp16: true
bf16: false
sdp_attention: true
"""
FACTORY_FULL = """### model
model_name_or_path: Qwen/Qwen3-4B
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds_z3_config.json

### dataset
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048

### train
output_dir: saves/full
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
FACTORY_LORA = """model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
quantization_bit: 4
dataset: a, b
template: llama3
cutoff_len: 1024
neat_packing: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1e-4
bf16: true
flash_attn: fa2
enable_liger_kernel: true
"""
FACTORY_PLAIN = """model_name_or_path: Qwen/Qwen2.5-1.5B
stage: pt
finetuning_type: full
pure_bf16: true
disable_gradient_checkpointing: true
template: qwen
cutoff_len: 4096
per_device_train_batch_size: 2
"""
TRL_SMALL = """model_name_or_path:
  Qwen/Qwen2.5-0.5B
dataset_name:
  stanfordnlp/imdb
report_to:
  none
learning_rate:
  0.0001
lr_scheduler_type:
  cosine
"""
TRL_FULL = """model_name_or_path: Qwen/Qwen3-8B
dtype: bfloat16
attn_implementation: kernels-community/flash-attn2
dataset_name: data/chat
max_length: 8192
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
learning_rate: 2e-5
optim: adamw_bnb_8bit
loss_type: nll
warmup_steps: 0.03
output_dir: out
"""
ACCELERATE_DDP = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'bf16'
num_machines: 1
num_processes: 8
machine_rank: 0
"""
ACCELERATE_FSDP1 = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
ACCELERATE_FSDP2 = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_version: 2
mixed_precision: bf16
num_processes: 4
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
"""
ACCELERATE_ZERO3 = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
ACCELERATE_FILE = """distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: zero2.json
  zero3_init_flag: false
num_processes: 2
"""
ARGUMENTS = """{
  "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-05,
  "bf16": true, "gradient_checkpointing": true, "optim": "adafactor", "num_train_epochs": 1, "use_liger_kernel": true
}
"""
ARGUMENTS_FSDP = """{
  "output_dir": "out", "per_device_train_batch_size": 4, "num_train_epochs": 1, "bf16": true,
  "fsdp": "full_shard offload auto_wrap", "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["A"]}
}
"""

Files = Mapping[str, str]
"""Texts of the files of a run by their names; the first is the one that is read, others without a mention lie beside."""

CASES: Mapping[str, Files] = {
    "axolotl, FSDP 1": {"train.yml": AXOLOTL_FSDP1},
    "axolotl, QLoRA": {"train.yml": AXOLOTL_QLORA},
    "axolotl, hybrid": {"train.yml": AXOLOTL_HYBRID},
    "axolotl, ZeRO 3": {"train.yml": AXOLOTL_ZERO3, "deepspeed_configs/zero3.json": ZERO3},
    "axolotl, one device": {"train.yml": AXOLOTL_PLAIN},
    "LLaMA-Factory, full": {"train.yaml": FACTORY_FULL, "ds_z3_config.json": ZERO3},
    "LLaMA-Factory, QLoRA": {"train.yaml": FACTORY_LORA},
    "LLaMA-Factory, pure": {"train.yaml": FACTORY_PLAIN},
    "LLaMA-Factory, FSDP 1": {"train.yaml": FACTORY_PLAIN.replace("pure_bf16", "bf16"), "fsdp.yaml": ACCELERATE_FSDP1},
    "TRL, small": {"sft.yaml": TRL_SMALL},
    "TRL, DDP": {"sft.yaml": TRL_FULL, "ddp.yaml": ACCELERATE_DDP},
    "TRL, FSDP 1": {"sft.yaml": TRL_FULL, "fsdp1.yaml": ACCELERATE_FSDP1},
    "TRL, FSDP 2": {
        "sft.yaml": TRL_FULL.replace("checkpointing: true", "checkpointing: false"),
        "f.yaml": ACCELERATE_FSDP2,
    },
    "TRL, ZeRO 3": {"sft.yaml": TRL_FULL, "zero3.yaml": ACCELERATE_ZERO3},
    "TRL, ZeRO 2 by a file": {"sft.yaml": TRL_FULL, "a.yaml": ACCELERATE_FILE, "zero2.json": ZERO2},
    "arguments": {"args.json": ARGUMENTS},
    "arguments, FSDP 2": {"args.json": ARGUMENTS_FSDP},
    "arguments, ZeRO 2": {"args.json": ARGUMENTS, "zero2.json": ZERO2},
    "accelerate alone": {"fsdp1.yaml": ACCELERATE_FSDP1},
}


def written(folder: Path, files: Files) -> tuple[Path, tuple[Path, ...]]:
    """Write the files of a run; return the first one, and the others."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    first, *others = (folder / name for name in files)
    return first, tuple(others)


def job_of(folder: Path, files: Files | str, **asked: Any) -> Job:
    """Read the files of a run; a text alone is a YAML file."""
    first, others = written(folder, {"train.yaml": files} if isinstance(files, str) else files)
    return read_job(first, Asked(beside=others, **asked))


def changed(files: Files, phrase: str) -> Files:
    """Put a phrase into the file that it names, table into table; into the first file without a name."""
    body, _, named = phrase.partition("  # in ")
    name = next((each for each in files if Path(each).name == named), next(iter(files)))
    is_json = name.endswith("json")
    piece = json.loads(f"{{{body}}}") if is_json else yaml.safe_load(body)
    whole = hjson.loads(files[name]) if is_json else yaml.safe_load(files[name])
    merged = _merged(whole, piece)
    return {**files, name: json.dumps(merged) if is_json else yaml.safe_dump(merged, sort_keys=False)}


def _merged(into: Any, piece: Any) -> Any:
    if not isinstance(into, Mapping) or not isinstance(piece, Mapping):
        return piece
    return {**into, **{key: _merged(into.get(key), value) for key, value in piece.items()}}
