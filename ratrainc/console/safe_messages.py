"""Messages of a run that can fail without harm: on a full disk, a closed pipe or a lost terminal the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from attrs import define

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Severity
from ratrain.ratrainc.console.console import show_diagnostic


def show_safely(diagnostic: Diagnostic) -> None:
    """Print a diagnostic on stderr; ignore a closed or full stderr."""
    with suppress(OSError, ValueError):  # ValueError: the stream is closed, or cannot hold the characters
        show_diagnostic(diagnostic)


@define
class SafeMessages:
    """Output that may fail: after the first failure it warns once, and stays silent."""

    has_failed: bool = False

    def __call__(self, action: Callable[[], object]) -> None:
        """Run an action that prints or draws; do nothing after a failure."""
        if self.has_failed:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a picture of the run, the run is worth more
            self.has_failed = True
            text = f"the run cannot be shown ({type(error).__name__}: {error}): it continues without being shown"
            show_safely(Diagnostic("RT002", text, severity=Severity.WARNING))
