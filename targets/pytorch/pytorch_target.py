"""GPUs and hosts that PyTorch runs on: a rank is a device. Kernels of its libraries tile by themselves, so that nothing on chip is scheduled."""

from __future__ import annotations

from attrs import frozen

from ratrain.targets.target import MachineTarget


@frozen
class PytorchTarget(MachineTarget):
    """The machine files of this folder: what any machine file says is all there is to know of such a device."""
