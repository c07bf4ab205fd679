"""The modules of the package `ratrain`, for tests that read all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"


def all_modules() -> Iterator[tuple[Path, str]]:
    """Every module of the package with its name; links are followed."""
    for folder, _, files in os.walk(SOURCE / "ratrain", followlinks=True):
        for name in sorted(files):
            path = Path(folder) / name
            parts = path.relative_to(SOURCE).with_suffix("").parts
            if path.suffix == ".py" and parts != ("ratrain", "__init__"):
                yield path, ".".join(parts[:-1] if path.stem == "__init__" else parts)
