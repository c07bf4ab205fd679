"""A tiny Llama as its config.json has it, and both outputs of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.cli import main

if TYPE_CHECKING:
    import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 45,
    "rms_norm_eps": 1e-5,
}


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Both outputs of a command."""
    capsys.readouterr()
    found = main([str(word) for word in words])
    shown = capsys.readouterr()
    assert found == code, shown.out + shown.err
    return shown.out + shown.err
