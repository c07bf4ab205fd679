"""Ways in which frameworks write a transformer block, as far as autograd saves different tensors for them.

Each row was read in the framework's own model code:

- `transformers`: models/llama/modeling_llama.py LlamaRMSNorm, LlamaMLP, eager_attention_forward;
  integrations/sdpa_attention.py use_gqa_in_sdpa. axolotl, llama-factory, trl and a bare DeepSpeed train these classes.
- `torchtune`: modules/rms_norm.py RMSNorm, modules/attention.py MultiHeadAttention (keys and values are expanded).
- `torchtitan`: models/common/nn_modules.py and attention.py (torch.nn.RMSNorm, fused since PyTorch 2.8; enable_gqa).
- `litgpt`: model.py RMSNorm, CausalSelfAttention (one projection, repeat_interleave), LLaMAMLP.
- `megatron-lm`: core/fusions/fused_bias_swiglu.py SwiGLUFunction, fused_bias_gelu.py GeLUFunction.
- `nanotron`: models/llama.py GLUActivation, nn/layer_norm.py TritonRMSNorm.
- `llm-foundry`: models/layers/attention.py (Wqkv; flash attention reads its parts in place), models/layers/norm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from attrs import frozen


class RmsForm(Enum):
    """Tensors that an RMSNorm keeps of an input of n elements and d elements a row, in bytes an element."""

    UPCAST = "upcast"
    """f32 copy of the input, and the normalised input in its own type: 4 + itemsize"""
    WHOLE = "whole"
    """f32 copy of the input, and the normalised input in f32: 4 + 4"""
    FUSED = "fused"
    """the input alone: itemsize"""


@frozen
class Style:
    """One framework's model code."""

    rms: RmsForm
    repeats_heads: bool
    """true if fused attention gets keys and values repeated to all query heads"""
    packed: bool
    """true if one projection makes query, key and value, so that a view of one keeps the storage of all"""
    fused_activation: bool = False
    """true if the MLP's activation (with its gate) is one kernel that keeps its inputs only"""
    residual_masks: bool = False
    """true if the results of both blocks go through dropout"""
    joined_rotation: bool = False
    """true if rotated queries are joined with `cat`, which lays them out by head: the output, laid out like them, is
    copied for the projection that follows (pytorch ATen/native/transformers/cuda/flash_attn/flash_api.cpp mha_fwd)"""
    gathered_input: bool = False
    """true if a sequence-sharded input of a projection is kept whole, after the gather"""


_TRANSFORMERS = Style(RmsForm.UPCAST, repeats_heads=False, packed=False)
_MEGATRON = Style(RmsForm.FUSED, repeats_heads=False, packed=False, fused_activation=True, residual_masks=True)

STYLES: Mapping[str, Style] = {
    **dict.fromkeys(
        ("transformers", "axolotl", "llama-factory", "trl", "deepspeed", "pytorch"),
        _TRANSFORMERS,
    ),
    "torchtune": Style(RmsForm.UPCAST, repeats_heads=True, packed=False),
    "torchtitan": Style(RmsForm.FUSED, repeats_heads=False, packed=False, gathered_input=True),
    "litgpt": Style(RmsForm.WHOLE, repeats_heads=True, packed=True, joined_rotation=True),
    "megatron-lm": _MEGATRON,
    "megatron-bridge": _MEGATRON,
    "nanotron": Style(RmsForm.FUSED, repeats_heads=False, packed=False),
    "llm-foundry": Style(RmsForm.FUSED, repeats_heads=False, packed=True),
}
"""The model code of each framework that a job can name."""

MEGATRON = frozenset({"megatron-lm", "megatron-bridge"})

RMS_OF_FAMILY: Mapping[str, RmsForm] = {
    # transformers models/gemma2/modeling_gemma2.py Gemma2RMSNorm, models/olmo2/modeling_olmo2.py Olmo2RMSNorm: the
    # product with the weights is in f32
    "gemma2": RmsForm.WHOLE,
    "gemma3_text": RmsForm.WHOLE,
    "olmo2": RmsForm.WHOLE,
}
"""Families whose RMSNorm under `transformers` is not LLaMA's."""

JOINED_FAMILIES = frozenset({"phi3", "gpt_neox"})
"""Families whose `transformers` code joins rotated and unrotated parts of queries with `cat`."""

TRANSFORMERS = frozenset(name for name, style in STYLES.items() if style is _TRANSFORMERS)
