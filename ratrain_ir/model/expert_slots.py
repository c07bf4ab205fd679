"""Slots of an mlp whose experts replicas share out: what its routing saves, and what its ops leave for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.expert_ranks import shares_experts
from ratrain.ratrain_ir.model.slots import Slot, forward_slots

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.model.expert_ranks import Types


def routed_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the saved slots that `route` makes before expert ranks exchange rows: all but the shared expert's.

    Nothing for other blocks, and without expert ranks.
    """
    if not shares_experts(model, plan, block):
        return ()
    return tuple(slot for slot in forward_slots(model, plan, block) if not slot.name.startswith("shared_"))


def exchanged_slots(types: Types) -> tuple[Slot, ...]:
    """Return a slot for each tensor that ops of expert ranks leave for each other (`expert_ranks.py`)."""
    return tuple(Slot(name, type_) for name, type_ in types.items())
