"""Published configurations against `transformers`: sizes of the whole models, and losses of tiny ones with one key changed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from tests.end_to_end.tiny_runs import start
from tests.parity.test_families import LLAMA3, LOSS, YARN, drawn, program_of, reference
from tests.published import CONFIGS, LONGROPE, NAMES, tiny

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [
    pytest.mark.parity,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the packages that transformers imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NOT_IN_TRANSFORMERS = ("internlm2-1.8b", "baichuan2-7b", "baichuan2-13b")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*NOT_IN_TRANSFORMERS, LONGROPE)])
def test_as_many_parameters_as_in_transformers(name: str) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    assert load_model(str(CONFIGS / f"{name}.json")).parameters == sum(each.numel() for each in network.parameters())


def losses(folder: Path, data: Mapping[str, Any]) -> tuple[float, float]:
    """Of the first step: here, and by `transformers`, with weights it drew and one configuration that both read."""
    import transformers

    (folder / "config.json").write_text(json.dumps(data), "utf-8")
    model = load_model(str(folder / "config.json"))
    network = drawn(transformers.AutoConfig.from_pretrained(folder)).eval()
    network.save_pretrained(folder / "weights")
    program = program_of(model)
    weights = str(folder / "weights" / "model.safetensors")
    (step,) = start(program, 1, init=weights, order="sequential", kernels="reference").steps()
    return step.report.loss, reference(network, program)[0]


@cache
def unchanged(name: str, folder: Path) -> float:
    """What `transformers` says of the tiny model; it is compared with ours too."""
    here, there = losses(folder, tiny(name, {}))
    assert here == pytest.approx(there, rel=LOSS)
    return there


LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
WINDOWS = ["sliding_attention", "full_attention"] * 2
REFUSED, DIFFERS, SAME = "refused", "differs", "same"

MUTATIONS: list[tuple[str, str, Any, str]] = [
    ("llama-3.1-8b", "rope_theta", 100.0, DIFFERS),
    ("llama-3.1-8b", "rms_norm_eps", 0.1, DIFFERS),
    ("llama-3.1-8b", "hidden_act", "gelu", DIFFERS),
    ("llama-3.1-8b", "hidden_act", "gelu_pytorch_tanh", DIFFERS),
    ("llama-3.1-8b", "hidden_act", "gelu_new", DIFFERS),
    ("llama-3.1-8b", "hidden_act", "swish", SAME),
    ("llama-3.1-8b", "hidden_act", "relu2", REFUSED),
    ("llama-3.1-8b", "hidden_act", "relu", REFUSED),
    ("llama-3.1-8b", "hidden_activation", "gelu", REFUSED),
    ("llama-3.1-8b", "attention_bias", True, DIFFERS),
    ("llama-3.1-8b", "mlp_bias", True, DIFFERS),
    ("llama-3.1-8b", "tie_word_embeddings", True, DIFFERS),
    ("llama-3.1-8b", "num_key_value_heads", 1, DIFFERS),
    ("llama-3.1-8b", "num_key_value_heads", None, DIFFERS),
    ("llama-3.1-8b", "num_attention_heads", 8, DIFFERS),
    ("llama-3.1-8b", "head_dim", 16, DIFFERS),
    ("llama-3.1-8b", "intermediate_size", 48, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", None, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", {**LLAMA3, "factor": 2.0}, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", {**LLAMA3, "low_freq_factor": 0.5}, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", {**LLAMA3, "high_freq_factor": 2.0}, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", {**LLAMA3, "original_max_position_embeddings": 32}, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", LINEAR, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", DYNAMIC, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", YARN, DIFFERS),
    ("llama-3.1-8b", "rope_scaling", LONG, REFUSED),
    ("llama-3.1-8b", "rope_scaling", {"type": "mrope", "mrope_section": [2, 1, 1]}, REFUSED),
    ("llama-3.1-8b", "rope_parameters", {"rope_type": "default"}, REFUSED),
    ("llama-3.1-8b", "rope_parameters", {"full_attention": {"rope_theta": 100.0}}, REFUSED),
    ("llama-3.1-8b", "partial_rotary_factor", 0.5, REFUSED),
    ("llama-3.1-8b", "partial_rotary_factor", 1.0, SAME),
    ("llama-3.1-8b", "attention_dropout", 0.1, REFUSED),
    ("llama-3.1-8b", "sliding_window", 5, REFUSED),
    ("llama-3.1-8b", "layer_types", WINDOWS, REFUSED),
    ("llama-3.1-8b", "layer_types", ["full_attention"] * 4, SAME),
    ("llama-3.1-8b", "max_position_embeddings", 32, SAME),
    ("llama-3.1-8b", "initializer_range", 0.2, DIFFERS),
    ("llama-3.1-8b", "pretraining_tp", 2, SAME),
    ("llama-3.1-8b", "use_cache", False, SAME),
    ("llama-3.1-8b", "bos_token_id", 5, SAME),
    ("llama-3.1-8b", "num_local_experts", 4, REFUSED),
    ("llama-3.2-1b", "head_dim", None, DIFFERS),
    ("llama-3.2-1b", "tie_word_embeddings", False, DIFFERS),
    ("mistral-7b-v0.3", "sliding_window", 5, DIFFERS),
    ("mistral-7b-v0.3", "sliding_window", 1000, SAME),
    ("mistral-7b-v0.3", "head_dim", 10, DIFFERS),
    ("mistral-7b-v0.3", "layer_types", WINDOWS, REFUSED),
    ("mistral-7b-v0.3", "max_window_layers", 2, REFUSED),
    ("mistral-7b-v0.3", "use_sliding_window", False, SAME),
    ("mistral-nemo-12b", "rope_scaling", LINEAR, DIFFERS),
    ("mistral-nemo-12b", "rms_norm_eps", 0.1, DIFFERS),
    ("qwen2.5-0.5b", "use_sliding_window", True, DIFFERS),
    ("qwen2.5-0.5b", "sliding_window", 3, SAME),
    ("qwen2.5-0.5b", "max_window_layers", 1, SAME),
    ("qwen2.5-0.5b", "layer_types", WINDOWS, REFUSED),
    ("qwen2.5-0.5b", "attention_bias", False, REFUSED),
    ("qwen2.5-0.5b", "use_mrope", True, REFUSED),
    ("qwen2.5-0.5b", "rope_scaling", YARN, DIFFERS),
    ("qwen2.5-0.5b", "rope_scaling", {**YARN, "beta_fast": 2.0}, DIFFERS),
    ("qwen2.5-0.5b", "rope_scaling", {**YARN, "beta_slow": 0.5, "truncate": False}, DIFFERS),
    ("qwen2.5-0.5b", "rope_scaling", {**YARN, "attention_factor": 1.5}, DIFFERS),
    ("qwen2.5-0.5b", "rope_scaling", {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}, DIFFERS),
    ("qwen2.5-0.5b", "head_dim", 12, DIFFERS),
    ("qwen2.5-7b", "hidden_act", "gelu", DIFFERS),
    ("qwen3-0.6b", "attention_bias", True, DIFFERS),
    ("qwen3-0.6b", "head_dim", 16, DIFFERS),
    ("qwen3-0.6b", "use_sliding_window", True, SAME),
    ("qwen3-0.6b", "sliding_window", 5, SAME),
    ("qwen3-0.6b", "rms_norm_eps", 0.1, DIFFERS),
    ("qwen3-0.6b", "rope_theta", 100, DIFFERS),
    ("qwen3-0.6b", "layer_types", WINDOWS, REFUSED),
    ("gemma-2-2b", "attn_logit_softcapping", None, DIFFERS),
    ("gemma-2-2b", "attn_logit_softcapping", 0.5, DIFFERS),
    ("gemma-2-2b", "final_logit_softcapping", None, DIFFERS),
    ("gemma-2-2b", "final_logit_softcapping", 0.5, DIFFERS),
    ("gemma-2-2b", "query_pre_attn_scalar", 4, DIFFERS),
    ("gemma-2-2b", "sliding_window", 3, DIFFERS),
    ("gemma-2-2b", "layer_types", WINDOWS[::-1], DIFFERS),
    ("gemma-2-2b", "layer_types", ["full_attention"] * 4, DIFFERS),
    ("gemma-2-2b", "hidden_activation", "gelu", DIFFERS),
    ("gemma-2-2b", "hidden_act", "gelu", SAME),
    ("gemma-2-2b", "head_dim", 16, DIFFERS),
    ("gemma-2-2b", "attention_bias", True, DIFFERS),
    ("gemma-2-2b", "tie_word_embeddings", False, DIFFERS),
    ("gemma-2-2b", "use_bidirectional_attention", True, REFUSED),
    ("gemma-2-2b", "cache_implementation", "static", SAME),
    ("gemma-2-2b", "rope_scaling", LINEAR, DIFFERS),
    ("gemma-3-1b", "sliding_window_pattern", 2, DIFFERS),
    ("gemma-3-1b", "rope_local_base_freq", 100, DIFFERS),
    ("gemma-3-1b", "rope_theta", 100, DIFFERS),
    ("gemma-3-1b", "rope_scaling", LINEAR, DIFFERS),
    ("gemma-3-1b", "rope_scaling", YARN, DIFFERS),
    ("gemma-3-1b", "rope_scaling", {**YARN, "truncate": False}, REFUSED),
    ("gemma-3-1b", "rope_scaling", {"full_attention": LINEAR}, REFUSED),
    ("gemma-3-1b", "rope_parameters", {"rope_type": "default", "rope_theta": 1000000}, REFUSED),
    ("gemma-3-1b", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 100.0}}, REFUSED),
    (
        "gemma-3-1b",
        "rope_parameters",
        {"full_attention": {**LINEAR}, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
        DIFFERS,
    ),
    ("gemma-3-1b", "attn_logit_softcapping", 0.5, REFUSED),
    ("gemma-3-1b", "final_logit_softcapping", 0.5, DIFFERS),
    ("gemma-3-1b", "query_pre_attn_scalar", 4, DIFFERS),
    ("gemma-3-270m", "layer_types", WINDOWS, DIFFERS),
    ("gemma-3-270m", "_sliding_window_pattern", 2, SAME),
    ("gemma-3-270m", "use_bidirectional_attention", True, REFUSED),
    ("phi-3-mini-4k", "sliding_window", 3, DIFFERS),
    ("phi-3-mini-4k", "partial_rotary_factor", 0.75, DIFFERS),
    ("phi-3-mini-4k", "rope_scaling", LINEAR, REFUSED),
    ("phi-3-mini-4k", "rope_scaling", YARN, REFUSED),
    ("phi-3-mini-4k", "rope_scaling", LONG, REFUSED),
    ("phi-3-mini-4k", "original_max_position_embeddings", 16, SAME),
    ("phi-3-mini-4k", "attention_bias", True, REFUSED),
    ("phi-3-mini-4k", "embd_pdrop", 0.1, REFUSED),
    ("olmo-2-1b", "attention_bias", True, DIFFERS),
    ("olmo-2-1b", "rms_norm_eps", 0.1, DIFFERS),
    ("olmo-2-1b", "num_key_value_heads", 4, DIFFERS),
    ("olmo-2-1b", "clip_qkv", 8.0, REFUSED),
    ("olmo-2-1b", "rope_scaling", LLAMA3, DIFFERS),
    ("granite-3.1-2b", "attention_multiplier", 2.0, DIFFERS),
    ("granite-3.1-2b", "embedding_multiplier", 3.0, DIFFERS),
    ("granite-3.1-2b", "residual_multiplier", 0.7, DIFFERS),
    ("granite-3.1-2b", "logits_scaling", 0.5, DIFFERS),
    ("granite-3.1-2b", "attention_bias", True, DIFFERS),
    ("granite-3.1-2b", "mlp_bias", True, DIFFERS),
    ("granite-3.1-2b", "attention_dropout", 0.5, SAME),
    ("smollm2-135m", "rope_interleaved", True, REFUSED),
    ("smollm2-135m", "is_llama_config", False, SAME),
    ("smollm3-3b", "no_rope_layers", [1, 0, 0, 1], DIFFERS),
    ("smollm3-3b", "no_rope_layers", None, SAME),
    ("smollm3-3b", "no_rope_layer_interval", 2, SAME),
    ("smollm3-3b", "use_sliding_window", True, SAME),
    ("smollm3-3b", "sliding_window", 5, SAME),
    ("smollm3-3b", "attention_bias", True, DIFFERS),
    ("smollm3-3b", "mlp_bias", True, DIFFERS),
    ("gpt2", "activation_function", "gelu", DIFFERS),
    ("gpt2", "activation_function", "gelu_pytorch_tanh", SAME),
    ("gpt2", "activation_function", "relu2", DIFFERS),
    ("gpt2", "activation_function", "relu", REFUSED),
    ("gpt2", "n_inner", 40, DIFFERS),
    ("gpt2", "n_head", 2, DIFFERS),
    ("gpt2", "n_positions", 40, REFUSED),
    ("gpt2", "layer_norm_epsilon", 0.1, DIFFERS),
    ("gpt2", "tie_word_embeddings", False, DIFFERS),
    ("gpt2", "resid_pdrop", 0.5, SAME),
    ("gpt2", "scale_attn_weights", False, REFUSED),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, REFUSED),
    ("gpt2", "add_cross_attention", True, REFUSED),
    ("pythia-160m", "use_parallel_residual", False, DIFFERS),
    ("pythia-160m", "rotary_pct", 0.25, DIFFERS),
    ("pythia-160m", "rotary_pct", 1.0, DIFFERS),
    ("pythia-160m", "rotary_emb_base", 50, DIFFERS),
    ("pythia-160m", "rope_theta", 50.0, REFUSED),
    ("pythia-160m", "partial_rotary_factor", 0.25, REFUSED),
    ("pythia-160m", "rope_scaling", LINEAR, DIFFERS),
    ("pythia-160m", "rope_scaling", DYNAMIC, SAME),
    ("pythia-160m", "rope_scaling", LLAMA3, DIFFERS),
    ("pythia-160m", "rope_scaling", LONG, REFUSED),
    ("pythia-160m", "layer_norm_eps", 0.1, DIFFERS),
    ("pythia-160m", "attention_bias", False, DIFFERS),
    ("pythia-160m", "attention_bias", True, SAME),
    ("pythia-160m", "hidden_act", "relu2", DIFFERS),
    ("pythia-160m", "hidden_act", "relu", REFUSED),
    ("pythia-160m", "tie_word_embeddings", True, DIFFERS),
    ("pythia-160m", "num_attention_heads", 2, DIFFERS),
    ("pythia-160m", "intermediate_size", 48, DIFFERS),
    ("pythia-160m", "hidden_dropout", 0.1, REFUSED),
    ("pythia-160m", "attention_dropout", 0.1, REFUSED),
    ("pythia-160m", "classifier_dropout", 0.5, SAME),
    ("gpt-neox-20b", "hidden_act", "gelu_new", SAME),
    ("mixtral-8x7b", "sliding_window", 3, DIFFERS),
    ("mixtral-8x7b", "use_sliding_window", False, SAME),
    ("mixtral-8x7b", "num_local_experts", 5, DIFFERS),
    ("mixtral-8x7b", "num_experts", 5, REFUSED),
    ("mixtral-8x7b", "num_experts", 4, SAME),
    ("mixtral-8x7b", "num_experts_per_tok", 1, DIFFERS),
    ("mixtral-8x7b", "intermediate_size", 12, DIFFERS),
    ("mixtral-8x7b", "head_dim", 10, DIFFERS),
    ("mixtral-8x7b", "rope_theta", 100.0, DIFFERS),
    ("mixtral-8x7b", "router_jitter_noise", 0.1, REFUSED),
    ("mixtral-8x7b", "router_aux_loss_coef", 0.5, SAME),
    ("mixtral-8x7b", "output_router_logits", True, REFUSED),
    ("mixtral-8x7b", "norm_topk_prob", False, REFUSED),
    ("mixtral-8x7b", "moe_intermediate_size", 12, REFUSED),
    ("mixtral-8x7b", "hidden_act", "gelu", REFUSED),
    ("mixtral-8x7b", "attention_bias", True, REFUSED),
    ("qwen3-30b-a3b", "norm_topk_prob", False, DIFFERS),
    ("qwen3-30b-a3b", "num_experts", 5, DIFFERS),
    ("qwen3-30b-a3b", "num_local_experts", 5, REFUSED),
    ("qwen3-30b-a3b", "num_experts_per_tok", 4, DIFFERS),
    ("qwen3-30b-a3b", "moe_intermediate_size", 12, DIFFERS),
    ("qwen3-30b-a3b", "intermediate_size", 48, SAME),
    ("qwen3-30b-a3b", "head_dim", 16, DIFFERS),
    ("qwen3-30b-a3b", "attention_bias", True, DIFFERS),
    ("qwen3-30b-a3b", "decoder_sparse_step", 2, DIFFERS),
    ("qwen3-30b-a3b", "mlp_only_layers", [1], DIFFERS),
    ("qwen3-30b-a3b", "use_sliding_window", True, REFUSED),
    ("qwen3-30b-a3b", "sliding_window", 3, SAME),
    ("qwen3-30b-a3b", "shared_expert_intermediate_size", 12, REFUSED),
    ("qwen3-30b-a3b", "rope_scaling", YARN, DIFFERS),
    ("qwen3-30b-a3b", "tie_word_embeddings", True, DIFFERS),
    ("qwen1.5-moe-a2.7b", "qkv_bias", False, DIFFERS),
    ("qwen1.5-moe-a2.7b", "qkv_bias", True, SAME),
    ("qwen1.5-moe-a2.7b", "attention_bias", True, REFUSED),
    ("qwen1.5-moe-a2.7b", "norm_topk_prob", True, DIFFERS),
    ("qwen1.5-moe-a2.7b", "shared_expert_intermediate_size", 12, DIFFERS),
    ("qwen1.5-moe-a2.7b", "num_local_experts", 5, REFUSED),
    ("qwen1.5-moe-a2.7b", "layer_types", WINDOWS, REFUSED),
    ("qwen1.5-moe-a2.7b", "max_window_layers", 1, SAME),
    ("qwen1.5-moe-a2.7b", "num_key_value_heads", 4, DIFFERS),
    ("olmoe-1b-7b", "clip_qkv", 1.0, REFUSED),
    ("olmoe-1b-7b", "norm_topk_prob", True, DIFFERS),
    ("olmoe-1b-7b", "num_key_value_heads", 4, DIFFERS),
    ("olmoe-1b-7b", "head_dim", 16, REFUSED),
    ("olmoe-1b-7b", "attention_bias", True, DIFFERS),
    ("olmoe-1b-7b", "rms_norm_eps", 0.1, DIFFERS),
    ("olmoe-1b-7b", "sliding_window", 3, REFUSED),
    ("granite-3.1-1b-a400m", "attention_multiplier", 2.0, DIFFERS),
    ("granite-3.1-1b-a400m", "embedding_multiplier", 3.0, DIFFERS),
    ("granite-3.1-1b-a400m", "residual_multiplier", 0.7, DIFFERS),
    ("granite-3.1-1b-a400m", "logits_scaling", 0.5, DIFFERS),
    ("granite-3.1-1b-a400m", "attention_dropout", 0.5, SAME),
    ("granite-3.1-1b-a400m", "num_experts", 5, REFUSED),
    ("granite-3.1-1b-a400m", "num_experts_per_tok", 3, DIFFERS),
    ("granite-3.1-1b-a400m", "mlp_bias", True, REFUSED),
    ("gpt-neox-20b", "hidden_dropout_prob", 0.1, REFUSED),
    ("gpt-neox-20b", "use_parallel_residual", True, SAME),
]
"""A configuration, one key with another value, and what becomes of it: it is refused here, or the loss of `transformers`
differs from that of the unchanged model, or is the same; where it is not refused, ours is that of `transformers`."""


@pytest.mark.parametrize(
    ("name", "key", "value", "outcome"), MUTATIONS, ids=[f"{each[0]}-{each[1]}-{n}" for n, each in enumerate(MUTATIONS)]
)
def test_a_changed_key_is_refused_or_changes_both_alike(
    name: str, key: str, value: Any, outcome: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = tiny(name, {key: value})
    if outcome == REFUSED:
        with pytest.raises(DiagnosticError, match=key):
            losses(tmp_path, data)
        return
    base = tmp_path_factory.getbasetemp() / "unchanged" / name
    base.mkdir(parents=True, exist_ok=True)
    before = unchanged(name, base)
    here, there = losses(tmp_path, data)
    assert here == pytest.approx(there, rel=LOSS)
    if outcome == SAME:
        assert there == pytest.approx(before, rel=1e-9)
    else:
        assert there != pytest.approx(before, rel=LOSS), "too small a difference to be seen here"
