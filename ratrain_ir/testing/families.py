"""Models of other families, derived from a given one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.config.families import FAMILY

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def in_family(model: ModelConfig, family: str, **changes: Any) -> ModelConfig:
    """Return the model with the fields that a family implies, then with `changes`."""
    implied: dict[str, Any] = {**FAMILY[family].implied}
    return evolve(model, **{**implied, "family": family, **changes})
