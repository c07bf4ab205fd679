"""Loops of expert blocks that are compiled ahead: kernels called afterwards compile none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.loops import compiled_anew
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.kernels.fast.ahead import run_experts
from tests.targets.runtime.kernels.expert_calls import expert_calls
from tests.targets.runtime.kernels.kernels_oracle import call

for dtype in (Dtype.F16, Dtype.F32):
    before = compiled_anew()
    run_experts(dtype)
    assert compiled_anew() > before
    before = compiled_anew()
    for kernel, arguments in expert_calls(20, 4, 2, hidden=16, width=8).items():
        halves = {name: x for name, x in arguments.items() if getattr(x, "dtype", None) == np.float16}
        arguments |= {name: x.astype(NUMPY_DTYPES[dtype]) for name, x in halves.items()}
        call("fast", kernel, **arguments)
        assert compiled_anew() == before, kernel
"""


@pytest.mark.full
def test_what_was_compiled_ahead_is_not_compiled_again(tmp_path: Path) -> None:
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).resolve().parents[4]
    subprocess.run([sys.executable, "-c", SCRIPT], env=variables, cwd=root, check=True)
