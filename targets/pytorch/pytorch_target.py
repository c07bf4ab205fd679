"""Target for GPUs and hosts with PyTorch: a rank is a device.

Library kernels tile for themselves, so no tiles are scheduled.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from ratrain.targets.target import MachineTarget


@frozen
class PytorchTarget(MachineTarget):
    """Target of the machine files of this folder, which describe such a device completely."""

    usual_dtype: ClassVar[str] = "bf16"
