"""A small model, its plan and a slow machine, and tables of measurements beside them."""

from __future__ import annotations

import json
from pathlib import Path

from ratrain.ratrainc.running.examples import example_path
from ratrain.ratrainc.validation.outcome import Validation, validate
from ratrain.ratrainc.validation.validation_rows import read_validation_table

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 256}
CONFIG = json.loads(example_path("tiny.json").read_text()) | SIZES
PLAN = """\
[parallel]
pp = 2
dp = 1
[batch]
micro_batch_size = 1
micro_batches = 4
seq_len = 16
"""
SLOW = """\
base = "mt3000"
name = "slow"
[ddr_bandwidth]
value = 1e9
unit = "bytes/s"
certainty = "assumed"
source = "test"
"""


def table(folder: Path, *lines: str, name: str = "t.csv") -> str:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def validated(folder: Path, *lines: str) -> Validation:
    return validate([read_validation_table(table(folder, *lines))])
