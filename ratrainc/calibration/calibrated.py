"""The base of calibration results: a machine and its machine file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrainc.console.parts import Shown
from ratrain.targets.machine.writer import write_machine

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine


class Calibrated(Shown):
    """A calibrated machine, with figures of its accuracy."""

    __slots__ = ()
    machine: Machine

    def save(self, path: str) -> None:
        """Write the machine file.

        Raises `DiagnosticError` RT002 if it cannot be written.
        """
        write_machine(self.machine, path)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        raise NotImplementedError
