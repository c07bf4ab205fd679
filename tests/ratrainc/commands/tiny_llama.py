"""A tiny Llama as its config.json has it, and what a command prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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
    return "".join(_outputs(capsys, words, code))


def facts(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """The JSON that a command prints on stdout; a long one may tell its progress on stderr."""
    return json.loads(_outputs(capsys, words, 0)[0])


def _outputs(capsys: pytest.CaptureFixture[str], words: tuple[object, ...], code: int) -> tuple[str, str]:
    capsys.readouterr()
    found = main([str(word) for word in words])
    shown = capsys.readouterr()
    assert found == code, shown.out + shown.err
    return shown.out, shown.err
