"""Tables for torchtune's configs: models of its builders, optimizers, losses, and settings that change no byte.

Read in pytorch/torchtune, commit bd2a0fc7 (2026-04-23).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrainc.bridge.jobs.job import Loss
from ratrain.ratrainc.bridge.jobs.job_common import dense
from ratrain.ratrainc.bridge.reasons import OF_LOGS, OF_PROCESS, OF_RATE, OF_VALIDATION

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

REPO = "pytorch/torchtune"
SINGLE = f"{REPO}: recipes/full_finetune_single_device.py, FullFinetuneRecipeSingleDevice"
SPREAD = f"{REPO}: recipes/full_finetune_distributed.py, FullFinetuneRecipeDistributed"

_BUILDERS = """
    llama2_7b llama 32000 32 4096 32 32 11008 10000 1e-05
    llama2_13b llama 32000 40 5120 40 40 13824 10000 1e-05
    llama2_70b llama 32000 80 8192 64 8 28672 10000 1e-05
    llama3_8b llama 128256 32 4096 32 8 14336 500000 1e-05
    llama3_70b llama 128256 80 8192 64 8 28672 500000 1e-05
    llama3_1_8b llama 128256 32 4096 32 8 14336 500000 1e-05 8
    llama3_1_70b llama 128256 80 8192 64 8 28672 500000 1e-05 8
    llama3_1_405b llama 128256 126 16384 128 8 53248 500000 1e-05 8
    llama3_2_1b llama 128256 16 2048 32 8 8192 500000 1e-05 32 tied
    llama3_2_3b llama 128256 28 3072 24 8 8192 500000 1e-05 32 tied
    mistral_7b mistral 32000 32 4096 32 8 14336 10000 1e-05
    phi3_mini phi3 32064 32 3072 32 32 8192 10000 1e-05
    phi4_14b phi3 100352 40 5120 40 10 17920 10000 1e-05
    qwen2_7b qwen2 152064 28 3584 28 4 18944 1e+06 1e-06
    qwen2_0_5b qwen2 151936 24 896 14 2 4864 1e+06 1e-06 tied
    qwen2_1_5b qwen2 151936 28 1536 12 2 8960 1e+06 1e-06 tied
    qwen2_5_0_5b qwen2 151936 24 896 14 2 4864 1e+06 1e-06 tied
    qwen2_5_1_5b_base qwen2 151936 28 1536 12 2 8960 1e+06 1e-06 tied
    qwen2_5_1_5b_instruct qwen2 151936 28 1536 12 2 8960 1e+06 1e-06 tied
    qwen2_5_3b qwen2 151936 36 2048 16 2 11008 1e+06 1e-06 tied
    qwen2_5_7b_base qwen2 152064 28 3584 28 4 18944 1e+06 1e-06
    qwen2_5_7b_instruct qwen2 152064 28 3584 28 4 18944 1e+06 1e-06
    qwen2_5_14b_base qwen2 152064 48 5120 40 8 13824 1e+06 1e-05
    qwen2_5_14b_instruct qwen2 152064 48 5120 40 8 13824 1e+06 1e-06
    qwen2_5_32b_base qwen2 152064 64 5120 40 8 27648 1e+06 1e-05
    qwen2_5_32b_instruct qwen2 152064 64 5120 40 8 27648 1e+06 1e-06
    qwen2_5_72b_base qwen2 152064 80 8192 64 8 29568 1e+06 1e-05
    qwen2_5_72b_instruct qwen2 152064 80 8192 64 8 29568 1e+06 1e-06
    qwen3_0_6b_base qwen3 151936 28 1024 16 8 3072 1e+06 1e-06 tied
    qwen3_0_6b_instruct qwen3 151936 28 1024 16 8 3072 1e+06 1e-06 tied
    qwen3_1_7b_base qwen3 151936 28 2048 16 8 6144 1e+06 1e-06 tied
    qwen3_1_7b_instruct qwen3 151936 28 2048 16 8 6144 1e+06 1e-06 tied
    qwen3_4b_base qwen3 151936 36 2560 32 8 9728 1e+06 1e-06 tied
    qwen3_4b_instruct qwen3 151936 36 2560 32 8 9728 1e+06 1e-06 tied
    qwen3_8b_base qwen3 151936 36 4096 32 8 12288 1e+06 1e-06
    qwen3_8b_instruct qwen3 151936 36 4096 32 8 12288 1e+06 1e-06
    qwen3_14b_base qwen3 151936 40 5120 40 8 17408 1e+06 1e-06
    qwen3_14b_instruct qwen3 151936 40 5120 40 8 17408 1e+06 1e-06
    qwen3_32b qwen3 151936 64 5120 64 8 25600 1e+06 1e-06
    llama3_3_70b llama 128256 80 8192 64 8 28672 500000 1e-05 8
    smollm2_135m llama 49152 30 576 9 3 1536 100000 1e-05 32 tied
    smollm2_360m llama 49152 32 960 15 5 2560 100000 1e-05 32 tied
    smollm2_1_7b llama 49152 24 2048 32 32 8192 130000 1e-05 32 tied
"""
"""Builders (torchtune/models/*/_model_builders.py): name, family, vocabulary, layers, width, heads, heads of keys and
values, width of the MLP, rotary base, epsilon of norms, factor of the rotary scaling if any, and tied matrices."""
_HUB = {
    "gemma_2b": "google/gemma-2b",
    "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b",
    "gemma2_27b": "google/gemma-2-27b",
}
"""Builders whose model stands under a hub name."""
_SCALING = "llama3 {} 1 4 8192"
"""Rotary scaling of torchtune/models/llama3_1/_position_embeddings.py, Llama3ScaledRoPE; 3.2 says another factor."""
_OPEN = {
    "llama2.llama2": ("llama", 10000.0),
    "llama3.llama3": ("llama", 500000.0),
    "llama3_1.llama3_1": ("llama", 500000.0),
    "qwen2.qwen2": ("qwen2", 1000000.0),
    "mistral.mistral": ("mistral", 10000.0),
}
"""Builders that take all sizes (torchtune/models/*/_component_builders.py): family and default rotary base."""


def builder_model(name: str) -> ModelConfig | None:
    """Return the model of a builder such as `llama3_1_8b`; None if its shape is not known here."""
    row = next((line.split() for line in _BUILDERS.splitlines() if line.split()[:1] == [name]), None)
    if row is None:
        return None
    family, sizes, rest = row[1], [int(each) for each in row[2:8]], row[8:]
    vocabulary, layers, hidden, heads, kv_heads, ffn = sizes
    more: dict[str, Any] = {"rope_theta": float(rest[0]), "tied_embeddings": rest[-1] == "tied"}
    scaled = [each for each in rest[2:] if each != "tied"]
    if scaled:
        more["rope_scaling"] = _SCALING.format(scaled[0])
    if family == "qwen3":
        more["head_dim"] = 128
    eps = float(rest[1])
    return dense(
        name,
        family,
        vocabulary=vocabulary,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        eps=eps,
        **more,
    )


def hub_name(name: str) -> str | None:
    """Return the hub name of a builder's model, for builders without a shape here."""
    return _HUB.get(name)


def open_builder(component: str) -> tuple[str, float] | None:
    """Return the family and default rotary base of a builder that takes all sizes; None for others."""
    return _OPEN.get(component.removeprefix("torchtune.models."))


def mlp_width(hidden: int) -> int:
    """Return the MLP's width without `intermediate_dim`: torchtune/models/llama2/_model_utils.py."""
    whole = 4 * int(2 * hidden / 3)
    return -(-whole // 256) * 256


OPTIMIZERS: dict[str, tuple[str, tuple[float, float], float, float]] = {
    "torch.optim.AdamW": ("adamw", (0.9, 0.999), 1e-8, 0.01),
    "torch.optim.Adam": ("adamw", (0.9, 0.999), 1e-8, 0.0),
    "bitsandbytes.optim.AdamW": ("adamw", (0.9, 0.999), 1e-8, 0.01),
    "bitsandbytes.optim.AdamW8bit": ("adamw-8bit", (0.9, 0.999), 1e-8, 0.01),
    "bitsandbytes.optim.PagedAdamW": ("adamw-paged", (0.9, 0.999), 1e-8, 0.01),
    "bitsandbytes.optim.PagedAdamW8bit": ("adamw-8bit-paged", (0.9, 0.999), 1e-8, 0.01),
    "torchao.optim.AdamW8bit": ("adamw-8bit", (0.9, 0.999), 1e-8, 0.01),
    "torchao.optim.AdamW4bit": ("adamw-4bit", (0.9, 0.999), 1e-8, 0.01),
    "torchao.prototype.low_bit_optim.AdamW8bit": ("adamw-8bit", (0.9, 0.999), 1e-8, 0.01),
    "torchao.prototype.low_bit_optim.AdamW4bit": ("adamw-4bit", (0.9, 0.999), 1e-8, 0.01),
}
"""Optimizers with Adam's moments: kind, and defaults of betas, epsilon and weight decay.

torch/optim/adamw.py, AdamW.__init__; torch/optim/adam.py, Adam.__init__; bitsandbytes/optim/adamw.py;
pytorch/ao: torchao/optim/adam.py.
"""
OTHER_OPTIMIZERS = {"torch.optim.SGD": "sgd", "torch.optim.Adafactor": "adafactor"}
LOSSES: dict[str, Loss] = {
    "torchtune.modules.loss.LinearCrossEntropyLoss": Loss.CHUNKED,
    "torchtune.modules.loss.CEWithChunkedOutputLoss": Loss.CHUNKED,
    "torch.nn.CrossEntropyLoss": Loss.UPCAST,
}
"""Losses: both chunked ones keep what backward needs of each chunk, so all chunks' results together."""
CHUNKED = "torchtune.modules.loss.LinearCrossEntropyLoss"
CHUNKS_SOURCE = f"{REPO}: torchtune/modules/loss/cross_entropy_loss.py, LinearCrossEntropyLoss.__init__"
UPCAST_SOURCE = f"{REPO}: torchtune/modules/transformer.py, TransformerDecoder.unembed"
LORA_NAMES = {"output_proj": "o_proj"}
"""Names of torchtune's linears that differ from those of a Hugging Face model."""
LORA_MLP = ("gate_proj", "up_proj", "down_proj")
"""Linears of `apply_lora_to_mlp`: torchtune/models/llama3/_component_builders.py, lora_llama3_mlp."""

_FILES = "of files: no byte of a device"
_DATA = "of the data, whose batches are counted by batch_size and max_seq_len"
INERT: dict[str, str] = {
    r"output_dir|(\w+_)?checkpointer\..*|resume_from_checkpoint|save_\w+": _FILES,
    r"enable_async_checkpointing|keep_last_n.*": _FILES,
    r"metric_logger(\..*)?|log_\w+|profiler(\..*)?|debug_\w+": OF_LOGS,
    r"tokenizer\..*|dataset(_val)?\..*|dataset(_val)?|collate_fn|shuffle|dataloader(\..*)?": _DATA,
    r"lr_scheduler(\..*)?|optimizer\.(lr|eps|betas|weight_decay|amsgrad|maximize)": OF_RATE,
    r"batch_size_val|run_val_every_n_steps": OF_VALIDATION,
    r"seed|cudnn_deterministic_mode|low_cpu_ram|device": OF_PROCESS,
    r"model\.(lora_alpha|max_seq_len|attn_dropout|norm_eps|rope_base|old_context_len)": "changes no size of the model",
    r"loss\.(ignore_index|mask_ignored_tokens)|context_parallel_rotate_method|fp8_recipe_name": "changes no size",
    r"quantizer(\..*)?|tasks|limit|max_seq_length|enable_kv_cache|prompt(\..*)?|temperature|top_k": "of other recipes",
}
"""Settings that change no byte of a device, as regular expressions, with the reason."""
