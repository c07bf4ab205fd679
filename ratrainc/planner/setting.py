"""What the plans of one search have in common."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.frontend.model_config import ModelConfig
from ratrain.ratrain_ir.frontend.plan import Plan
from ratrain.ratrain_ir.ops import Engine
from ratrain.targets.machine.machine import Machine


@frozen
class Setting:
    """What a profile is made for."""

    model: ModelConfig
    machine: Machine
    template: Plan
    """dtypes, chunks and the optimizer of every plan; its shape does not matter"""
    policy: str
    """of `recompute`"""

    @property
    def updates_compute(self) -> bool:
        """Whether updates run on the compute engine."""
        return self.machine.update_engine is Engine.COMPUTE

    def shaped(self, **shape: Any) -> Plan:
        """The template with another shape."""
        return evolve(self.template, **shape)
