"""The folder that tables of measurements stand in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ratrainc.validation.small_tables import CONFIG, PLAN, SLOW


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, a plan and a machine, beside which tables stand."""
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    (tmp_path / "p.toml").write_text(PLAN)
    (tmp_path / "slow.toml").write_text(SLOW)
    return tmp_path
