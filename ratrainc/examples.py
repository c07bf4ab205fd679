"""The example files the quickstart uses: inside the installed package, or in the checkout beside it."""

from __future__ import annotations

from pathlib import Path


def example_path(name: str) -> Path:
    """Path of an example file; a wheel carries the ones the quickstart needs."""
    package = Path(__file__).resolve().parent
    installed = package / "examples" / name
    return installed if installed.exists() else package.parent / "examples" / name
