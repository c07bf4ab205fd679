"""Small models and jobs for the tests of holdings."""

from __future__ import annotations

from attrs import evolve

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrainc.bridge.jobs.job import Attention, Job, Loss

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 176,
    "norm_eps": 1e-5,
}


def model_of(family: str, **sizes) -> ModelConfig:
    return ModelConfig(name=family, family=family, **{**SIZES, **FAMILY[family].implied, **sizes})


def gpt(hidden: int = 64, heads: int = 4, layers: int = 8, vocab: int = 128) -> ModelConfig:
    """The GPT of Korthikanti et al.: as many key heads as heads, an MLP four times as wide."""
    return model_of(
        "gpt2",
        vocab_size=vocab,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        layers=layers,
        learned_positions=4096,
    )


def job_of(framework: str, model: ModelConfig, **fields) -> Job:
    base = Job(framework, model.name, model, seq_len=32, micro_batch_size=2, gradient_accumulation=1, devices=1)
    typed = evolve(base, weight_dtype="bf16", compute_dtype="bf16", gradient_dtype="bf16", reduce_dtype="bf16")
    return evolve(typed, **fields)


def megatron(model: ModelConfig, **fields) -> Job:
    """Megatron-LM's mixed precision: bf16 weights, f32 gradients and masters."""
    usual = {
        "gradient_dtype": "f32",
        "reduce_dtype": "f32",
        "master_dtype": "f32",
        "loss": Loss.VOCAB_PARALLEL,
        "attention": Attention.EAGER,
    }
    devices = fields.get("tp", 1) * fields.get("pp", 1)
    return job_of("megatron-lm", model, **{"devices": devices, **usual, **fields})


def expert_model(family: str, **sizes) -> ModelConfig:
    """A model with 8 experts of 48, 2 a token; Qwen2's have a shared one of 80."""
    own = {"experts": 8, "experts_per_token": 2, "expert_size": 48, "ffn_size": 48}
    own |= {"shared_expert_size": 80, "qkv_bias": True} if family == "qwen2_moe" else {}
    return model_of(family, **{**own, **sizes})
