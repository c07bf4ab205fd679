"""A checkpoint that is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratrain.targets.runtime.checkpoint.checkpoint import save_checkpoint
from tests.targets.runtime.checkpoint.training_states import LLAMA, RUN, make_state


@pytest.fixture
def saved(tmp_path) -> Path:
    save_checkpoint(str(tmp_path / "ck"), LLAMA, make_state(LLAMA), RUN)
    return tmp_path / "ck"
