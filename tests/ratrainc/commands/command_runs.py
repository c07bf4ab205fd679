"""A tiny model and its plan, and commands run in this process where their files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from ratrain.ratrainc.cli import main

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PLAN = """\
[parallel]
pp = 2
dp = 2
[batch]
micro_batch_size = 1
micro_batches = 3
seq_len = 16
[optimizer]
lr = 5e-3
"""


@frozen
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout; fails where there is anything else."""
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        found = json.loads(self.out, parse_constant=_no_constant)
        assert isinstance(found, dict)
        return found


def _no_constant(word: str) -> None:
    pytest.fail(f"{word} is no JSON")


@frozen
class Cli:
    """Runs commands in this process, in a folder with a model, a plan, a schedule and a program."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> Result:
        self.capture.readouterr()
        code = main(list(words))
        captured = self.capture.readouterr()
        assert "Traceback" not in captured.err
        return Result(code, captured.out, captured.err)

    def good(self, *words: str) -> Result:
        """A command that must end well."""
        found = self(*words)
        assert found.code == 0, found.err
        return found
