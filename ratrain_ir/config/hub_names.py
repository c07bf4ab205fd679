"""Presets by the names of models on the Hugging Face Hub, as settings files of other tools have them.

Presets have the values of the published config.json, read as copies or in tables that cite it: citsjtu2020/LLM-Prof
sglang/Model_Config.md (Llama 3.1 8B and 3.2 3B, Qwen 2.5 and 3), Lightning-AI/litgpt litgpt/config.py (Llama 3 and 3.1
70B, Qwen 2.5 1.5B, Qwen 3 1.7B, Mistral 0.3, Gemma 2), Liwink/gemma-jax models/README.md (Gemma 3 1B),
kevinstephano/thunder_model_blocks hf_llama/llama_config.py (Llama 3.2 1B), and the defaults of SmolLM3Config in
transformers. With experts: citsjtu2020/LLM-Prof (Qwen 3 30B), the published files themselves at huggingface.co of
allenai/OLMoE-1B-7B-0924 (whose norm epsilon is that of OlmoeConfig) and of ibm-granite/granite-3.1-1b-a400m-base,
copies with `_name_or_path` of mistralai/Mixtral-8x7B-v0.1 (YeungNLP/firefly-mixtral-8x7b) and of Qwen/Qwen1.5-MoE-A2.7B
(MaziyarPanahi/Qwen1.5-MoE-A2.7B-Wikihow).
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class HubModel:
    """A model of the Hub."""

    preset: str
    """preset that has its shape"""
    dtype: str
    """type of the published weights (`torch_dtype` of its config.json): `bf16`, `f16` or `f32`"""


def hub_model(name: str) -> HubModel | None:
    """Return the model of a name such as `meta-llama/Llama-2-7b-hf`, in any case; None for an unknown name."""
    return _IN_ANY_CASE.get(name.strip().strip("/").lower())


def hub_names(preset: str | None = None) -> list[str]:
    """Return the names on the Hub that stand for a preset; all known ones for None."""
    return [name for name, known in _HUB.items() if preset in (None, known.preset)]


def _named(preset: str, dtype: str, *names: str) -> dict[str, HubModel]:
    return {name: HubModel(preset, dtype) for name in names}


_CHAT_2 = ("-hf", "-chat-hf")
_INSTRUCT = ("", "-Instruct")


def _of(owners: str, model: str, endings: tuple[str, ...] = _INSTRUCT) -> tuple[str, ...]:
    """Return the names of a model and its tuned versions under several owners, who publish the same weights."""
    return tuple(f"{owner}/{model}{ending}" for owner in owners.split() for ending in endings)


_META, _MIRRORS = "meta-llama NousResearch unsloth", "NousResearch unsloth"
_HUB: Mapping[str, HubModel] = {
    **_named("gpt2", "f32", "gpt2", "openai-community/gpt2"),
    **_named("llama-2-7b", "f16", *_of(_META, "Llama-2-7b", _CHAT_2)),
    **_named("llama-2-13b", "f16", *_of(_META, "Llama-2-13b", _CHAT_2)),
    **_named("llama-2-70b", "f16", *_of(_META, "Llama-2-70b", _CHAT_2)),
    **_named("llama-3-8b", "bf16", *_of(_META, "Meta-Llama-3-8B"), *_of(_MIRRORS, "Llama-3-8B")),
    **_named("llama-3-70b", "bf16", *_of(_META, "Meta-Llama-3-70B"), *_of(_MIRRORS, "Llama-3-70B")),
    **_named("llama-3.1-8b", "bf16", *_of(_META, "Llama-3.1-8B"), *_of(_META, "Meta-Llama-3.1-8B")),
    **_named("llama-3.1-70b", "bf16", *_of(_META, "Llama-3.1-70B"), *_of(_META, "Meta-Llama-3.1-70B")),
    **_named("llama-3.1-70b", "bf16", *_of(_META, "Llama-3.3-70B", ("-Instruct",))),
    **_named("llama-3.2-1b", "bf16", *_of(_META, "Llama-3.2-1B")),
    **_named("llama-3.2-3b", "bf16", *_of(_META, "Llama-3.2-3B")),
    **_named("mistral-7b-v0.1", "bf16", "mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.1"),
    **_named("mistral-7b-v0.3", "bf16", "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    **_named("qwen2.5-0.5b", "bf16", *_of("Qwen unsloth", "Qwen2.5-0.5B")),
    **_named("qwen2.5-1.5b", "bf16", *_of("Qwen unsloth", "Qwen2.5-1.5B")),
    **_named("qwen2.5-3b", "bf16", *_of("Qwen unsloth", "Qwen2.5-3B")),
    **_named("qwen2.5-7b", "bf16", *_of("Qwen unsloth", "Qwen2.5-7B")),
    **_named("qwen2.5-14b", "bf16", *_of("Qwen unsloth", "Qwen2.5-14B")),
    **_named("qwen2.5-32b", "bf16", *_of("Qwen unsloth", "Qwen2.5-32B")),
    **_named("qwen3-0.6b", "bf16", *_of("Qwen", "Qwen3-0.6B", ("", "-Base"))),
    **_named("qwen3-1.7b", "bf16", *_of("Qwen", "Qwen3-1.7B", ("", "-Base"))),
    **_named("qwen3-4b", "bf16", *_of("Qwen", "Qwen3-4B", ("", "-Base"))),
    **_named("qwen3-8b", "bf16", *_of("Qwen", "Qwen3-8B", ("", "-Base"))),
    **_named("qwen3-14b", "bf16", *_of("Qwen", "Qwen3-14B", ("", "-Base"))),
    **_named("qwen3-32b", "bf16", "Qwen/Qwen3-32B"),
    **_named("gemma-2-9b", "f32", "google/gemma-2-9b"),
    **_named("gemma-2-9b", "bf16", "google/gemma-2-9b-it"),
    **_named("gemma-3-1b", "bf16", "google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
    **_named("phi-3-mini-4k", "bf16", "microsoft/Phi-3-mini-4k-instruct"),
    **_named("smollm3-3b", "bf16", "HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B-Base"),
    **_named("tinyllama-1.1b", "bf16", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    **_named("tinyllama-1.1b", "f32", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
    **_named("mixtral-8x7b", "bf16", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    **_named("qwen3-30b-a3b", "bf16", *_of("Qwen", "Qwen3-30B-A3B", ("", "-Base"))),
    **_named("qwen1.5-moe-a2.7b", "bf16", *_of("Qwen", "Qwen1.5-MoE-A2.7B", ("", "-Chat"))),
    **_named("olmoe-1b-7b", "bf16", *_of("allenai", "OLMoE-1B-7B-0924", ("", "-Instruct", "-SFT"))),
    **_named("granite-3.1-1b-a400m", "bf16", "ibm-granite/granite-3.1-1b-a400m-base"),
    **_named("baichuan2-7b", "bf16", "baichuan-inc/Baichuan2-7B-Base", "baichuan-inc/Baichuan2-7B-Chat"),
    **_named("baichuan2-13b", "bf16", "baichuan-inc/Baichuan2-13B-Base", "baichuan-inc/Baichuan2-13B-Chat"),
}
"""Models of the Hub by their names. Instruct versions share the base's shape. Types were read for Llama
2 7B, 3.1 and 3.2, Qwen 2.5 and 3, Gemma 3, Phi 3 and models with experts (their config.json or copies); the other
types are assumed."""
_IN_ANY_CASE = {name.lower(): known for name, known in _HUB.items()}
