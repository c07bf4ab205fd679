"""Packages that only some commands need: the extras of the installation."""

from __future__ import annotations

from importlib.util import find_spec

from ratrain.ratrain_ir.support.diagnostics import fail


def is_installed(package: str) -> bool:
    """Tell whether a package can be imported, without importing it.

    A plain folder of its name, such as the one `wandb` leaves in the working directory, does not count.
    """
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def check_installed(package: str, extra: str, purpose: str) -> None:
    """Raise `DiagnosticError` RT002 if a package is missing; name the extra that installs it and the `purpose`."""
    if not is_installed(package):
        fail("RT002", f"{purpose} needs {package}, which is not installed", help=f"pip install 'ratrain[{extra}]'")
