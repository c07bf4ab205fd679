"""Models of torchtitan's flavors, and its settings that change no byte of a device (tag v0.2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.jobs.job_common import dense
from ratrain.ratrainc.bridge.reasons import OF_FILES, OF_OVERLAP, OF_PROCESS, OF_RATE, OF_VALIDATION

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

_LLAMA = {
    "debugmodel": (2048, 6, 256, 16, 16, None, 256),
    "8B": (128256, 32, 4096, 32, 8, 1.3, 1024),
    "70B": (128256, 80, 8192, 64, 8, 1.3, 4096),
    "405B": (128256, 126, 16384, 128, 8, 1.2, 4096),
}
"""Flavors of llama3 (torchtitan/models/llama3/__init__.py, llama3_args): vocabulary, layers, width, heads, heads of
keys and values, multiplier of the MLP's width, and the number that it is a multiple of."""
_QWEN = {
    "debugmodel": (2048, 8, 256, 16, 8, 3072, True),
    "0.6B": (151936, 28, 1024, 16, 8, 3072, True),
    "1.7B": (151936, 28, 2048, 16, 8, 6144, True),
    "4B": (151936, 36, 2560, 32, 8, 9728, True),
    "8B": (151936, 36, 4096, 32, 8, 12288, False),
    "14B": (151936, 40, 5120, 40, 8, 17408, False),
    "32B": (151936, 64, 5120, 64, 8, 25600, False),
}
"""Dense flavors of qwen3 (torchtitan/models/qwen3/__init__.py, qwen3_args): vocabulary, layers, width, heads, heads of
keys and values, width of the MLP, tied matrices."""
FUSED_FLAVORS = ("_flex_attn", "_flex", "_varlen_attn", "_varlen")
"""Endings of flavors that name another attention than SDPA; none keeps scores."""

_DATA = "of the data, whose batches are counted by local_batch_size and seq_len"
INERT = {
    r"job\..*|checkpoint\..*|metrics\..*|profiling\..*|training\.checkpoint_\w+|debug\..*": OF_FILES,
    r"comm\..*|fault_tolerance\..*|memory_estimation\..*|estimate\..*|experimental\.custom_\w+": OF_PROCESS,
    r"model\.(hf_assets_path|tokenizer_path|print_after_conversion|norm_type)": OF_FILES,
    r"training\.(dataset|dataset_path|dataloader.*|seed|deterministic|gc_\w+)": _DATA,
    r"validation\..*": OF_VALIDATION,
    r"lr_scheduler\..*|training\.warmup_pct": OF_RATE,
    r"(parallelism|experimental)\.(enable_async_tensor_parallel|context_parallel_rotate_method)": OF_OVERLAP,
    r"parallelism\.context_parallel_load_balancer|parallelism\.pipeline_parallel_schedule_csv": OF_OVERLAP,
    r"(parallelism|experimental)\.enable_compiled_autograd|compile\.backend": OF_PROCESS,
    r"(quantize|float8|mx)\..*|training\.\w*(fp8|float8)\w*": "of float8, which model.converters switches on",
    r"activation_checkpoint\.(early_stop|preserve_rng_state|determinism_check|debug|visualize\w+)": OF_PROCESS,
    r"parallelism\.(expert_tensor_parallel_degree|expert_parallel_comm_backend)": "of experts",
    r"parallelism\.pipeline_parallel_(expert_parallel_overlap|schedule_csv)": "of experts, or empty",
    r"experimental\.(torch_spmd|pipeline_parallel_split_mode)": OF_PROCESS,
}


def flavor_model(name: str, flavor: str) -> ModelConfig | None:
    """Return the model of a flavor such as llama3's `8B`; None if its shape is not known here."""
    if name == "llama3" and flavor in _LLAMA:
        vocabulary, layers, hidden, heads, kv_heads, multiplier, multiple = _LLAMA[flavor]
        ffn = int(2 * 4 * hidden / 3)
        ffn = int(multiplier * ffn) if multiplier is not None else ffn  # model/model.py, FeedForward.__init__
        return dense(
            f"{name} {flavor}",
            "llama",
            vocabulary=vocabulary,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=-(-ffn // multiple) * multiple,
            eps=1e-5,
            rope_theta=500000.0,
        )
    if name == "qwen3" and flavor in _QWEN:
        vocabulary, layers, hidden, heads, kv_heads, width, tied = _QWEN[flavor]
        return dense(
            f"{name} {flavor}",
            "qwen3",
            vocabulary=vocabulary,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=width,
            eps=1e-6,
            head_dim=128,
            rope_theta=1e6,
            tied_embeddings=tied,
        )
    return None
