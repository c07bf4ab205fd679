"""Presets by the names of models on the Hugging Face Hub, as settings files of other tools have them."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import load_model


@frozen
class HubModel:
    """A model of the Hub."""

    preset: str
    """preset that has its shape"""
    dtype: str
    """type of the published weights (`torch_dtype` of its config.json): `bf16`, `f16` or `f32`"""


def hub_model(name: str) -> HubModel | None:
    """Return the model of a name such as `meta-llama/Llama-2-7b-hf`, in any case; None for an unknown name."""
    return _HUB.get(name.strip().strip("/").lower())


def model_of_hub_name(name: str) -> ModelConfig | None:
    """Return the configuration of a model of the Hub; None for an unknown name."""
    known = hub_model(name)
    return load_model(known.preset) if known else None


def _named(preset: str, dtype: str, *names: str) -> dict[str, HubModel]:
    return {name.lower(): HubModel(preset, dtype) for name in names}


_HUB: Mapping[str, HubModel] = {
    **_named("gpt2", "f32", "gpt2", "openai-community/gpt2"),
    **_named("llama-2-7b", "f16", "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    **_named("llama-2-7b", "f16", "NousResearch/Llama-2-7b-hf", "NousResearch/Llama-2-7b-chat-hf"),
    **_named("llama-2-13b", "f16", "meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-chat-hf"),
    **_named("llama-2-13b", "f16", "NousResearch/Llama-2-13b-hf", "NousResearch/Llama-2-13b-chat-hf"),
    **_named("llama-2-70b", "f16", "meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
    **_named("llama-2-70b", "f16", "NousResearch/Llama-2-70b-hf"),
    **_named("llama-3-8b", "bf16", "meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"),
    **_named("llama-3-8b", "bf16", "NousResearch/Meta-Llama-3-8B", "NousResearch/Meta-Llama-3-8B-Instruct"),
    **_named("mistral-7b-v0.1", "bf16", "mistralai/Mistral-7B-v0.1"),
    **_named("qwen2.5-0.5b", "bf16", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"),
    **_named("qwen2.5-32b", "bf16", "Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-32B-Instruct"),
    **_named("tinyllama-1.1b", "bf16", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    **_named("tinyllama-1.1b", "f32", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
    **_named("baichuan2-7b", "bf16", "baichuan-inc/Baichuan2-7B-Base", "baichuan-inc/Baichuan2-7B-Chat"),
    **_named("baichuan2-13b", "bf16", "baichuan-inc/Baichuan2-13B-Base", "baichuan-inc/Baichuan2-13B-Chat"),
}
"""Models of the Hub by their names in lower case."""
