"""A `ModelConfig` written as a Hugging Face `config.json`: the inverse of `hf_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.frontend.families import FAMILY
from ratrain.ratrain_ir.frontend.hf_keys import keys_of
from ratrain.ratrain_ir.types import Dtype

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig


TORCH_DTYPES = {Dtype.F32: "float32", Dtype.BF16: "bfloat16"}
"""The types in which weights can be written, and what PyTorch calls them."""


def hugging_face_config(model: ModelConfig, dtype: Dtype = Dtype.F32) -> dict[str, Any]:
    """The keys of the `config.json` that describes a model with weights of one of `TORCH_DTYPES`, as `transformers` and `load_model` read it.

    What does not follow from the model (lengths, token numbers, ...) is what the model came with; nothing is made up.

    Baichuan's own class knows no `position_embedding` and no `normalised_head`; they are written because a model of another
    size than the published ones cannot be told without them.
    """
    fields, known = model.to_fields(), keys_of(model.family)
    implied = {"kv_heads", "head_dim"} if model.family == "gpt2" else set()  # which `GPT2Config` has no keys for
    activation, name_of_activation = known.activation
    config: dict[str, Any] = {
        "architectures": [FAMILY[model.family].architectures[0]],
        "model_type": model.family,
        **{keys[0]: fields[name] for name, keys in known.renamed.items() if name not in implied},
        activation: name_of_activation,
        **model.inert,
        "torch_dtype": TORCH_DTYPES[dtype],
    }
    if model.position == "rope":
        config["rope_theta"] = model.rope_theta
    if model.family == "baichuan":
        config |= {"position_embedding": model.position, "normalised_head": model.normalised_head}
    if model.family == "mistral":
        config["sliding_window"] = model.sliding_window
    if model.family == "qwen2" and model.sliding_window is not None:
        config |= {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}
    return config
