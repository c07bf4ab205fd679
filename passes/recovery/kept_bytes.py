"""The bytes that a choice of recovery keeps of a layer, by the slots its blocks save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.recovery.rewriting import LEAN_SLOTS, LayerChoice
from ratrain.ratrain_ir.config.tensor_peers import adds_branches_apart
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.model.blocks import (
    activation_type,
    block,
    branch_slots,
    exchanged_type,
    kept_in_forward,
    saved_slots,
)
from ratrain.ratrain_ir.model.peer_blocks import stands_beside

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def recovers_whole_layer(plan: Plan, choice: LayerChoice) -> bool:
    """Whether a layer is recovered from its input alone. What tensor peers exchange within it is kept, as it is small, and takes collectives to make."""
    return choice.keeps_nothing and plan.tp == 1


def mlp_input_bytes(model: ModelConfig, plan: Plan) -> int:
    """Bytes of the input of an mlp, which is none of its own beside an attention of tensor peers."""
    mlp = block("mlp", 0)
    return 0 if stands_beside(model, plan, mlp) else aligned(activation_type(model, plan, mlp).nbytes)


def kept_bytes(model: ModelConfig, plan: Plan, choice: LayerChoice) -> int:
    """Bytes a layer keeps beyond its checkpoint: the saved slots of the choice, what is always kept, and the mlp's input unless nothing is kept."""
    nbytes = 0 if recovers_whole_layer(plan, choice) else mlp_input_bytes(model, plan)
    for unit in (block("attention", 0), block("mlp", 0)):
        kept = choice.kept(unit.kind)
        always = kept_in_forward(model, plan, unit)
        for slot in saved_slots(model, plan, unit):
            if kept == "all" or slot.name in always or (kept == "lean" and slot.name in LEAN_SLOTS[unit.kind]):
                nbytes += aligned(slot.type.nbytes)
    return nbytes + branch_bytes(model, plan)


def branch_bytes(model: ModelConfig, plan: Plan) -> int:
    """Bytes of what the blocks of a layer add, which tensor peers have summed to norm it: as it takes collectives to make, it is always kept."""
    slots = branch_slots(model, plan) if adds_branches_apart(model, plan) else ()
    return 2 * sum(aligned(slot.type.nbytes) for slot in slots)


def kept_with_checkpoint_bytes(model: ModelConfig, plan: Plan, choice: LayerChoice) -> int:
    """All that a layer keeps of a micro-batch from its forward to its backward: its checkpoint, which is its input, and what the choice keeps."""
    return checkpoint_bytes(model, plan) + kept_bytes(model, plan, choice)


def checkpoint_bytes(model: ModelConfig, plan: Plan) -> int:
    """Bytes of a layer's input."""
    return aligned(exchanged_type(model, plan).nbytes)
