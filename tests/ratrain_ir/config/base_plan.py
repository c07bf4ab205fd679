"""A plan that is right, its model, how it is read and changed, and how a refusal is caught."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import parse_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan

MODEL = ModelConfig("test", "llama", 256, 64, 8, 4, 2, 16, 176, 1e-5)
BASE = """\
[parallel]
pp = 4
dp = 2

[batch]
micro_batch_size = 1
micro_batches = 8
seq_len = 32
"""


def parse(text: str, model: ModelConfig = MODEL) -> Plan:
    return parse_plan(text, file="plan.toml", model=model)


def refusal(action, *arguments, **options) -> list:
    with pytest.raises(DiagnosticError) as caught:
        action(*arguments, **options)
    assert caught.value.diagnostics
    return caught.value.diagnostics


def changed(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new)
