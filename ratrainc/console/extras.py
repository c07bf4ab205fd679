"""Packages that only some commands need: the extras of the installation."""

from __future__ import annotations

from importlib.util import find_spec

from ratrain.ratrain_ir.support.diagnostics import fail


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported yet. A folder of its name, as `wandb` leaves one, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def check_installed(package: str, extra: str, purpose: str) -> None:
    """Raise `DiagnosticError` RT002 where a package is missing, with the extra that brings it; `purpose` is what needs it."""
    if not is_installed(package):
        fail("RT002", f"{purpose} needs {package}, which is not installed", help=f"pip install 'ratrain[{extra}]'")
