"""Bytes of a layer that a recovery choice keeps from forward to backward, by the slots its blocks save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.recovery.layer_choice import LAYER, LayerChoice, keeps
from ratrain.ratrain_ir.config.tensor_ranks import adds_branches_apart
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.model.blocks import block
from ratrain.ratrain_ir.model.slots import activation_type, branch_slots, exchanged_type, kept_in_forward, saved_slots
from ratrain.ratrain_ir.model.tensor_blocks import is_parallel_mlp

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def recovers_whole_layer(plan: Plan, choice: LayerChoice) -> bool:
    """Tell whether a layer is recovered as a whole, and the input of its mlp is made again.

    With tensor parallelism it is so only with `checkpoint=layer`: results of exchanges within a layer are kept
    otherwise, because they are small and take collectives to make.
    """
    if plan.tp == 1:
        return choice.is_of_layer
    return choice.keeps_nothing and choice.checkpoint == LAYER


def mlp_input_bytes(model: ModelConfig, plan: Plan) -> int:
    """Return the bytes of an mlp's input.

    0 if the mlp runs in parallel with attention under tensor parallelism, because both read one input.
    """
    mlp = block("mlp", 0)
    return 0 if is_parallel_mlp(model, plan, mlp) else aligned(activation_type(model, plan, mlp).nbytes)


def kept_bytes(model: ModelConfig, plan: Plan, choice: LayerChoice, layer: int = 0) -> int:
    """Return the bytes that a layer keeps in addition to its checkpoint.

    Counted are the saved slots of the choice, the slots that are always kept, and the mlp's input unless the whole
    layer is recomputed.
    """
    nbytes = 0 if recovers_whole_layer(plan, choice) else mlp_input_bytes(model, plan)
    for unit in (block("attention", layer), block("mlp", layer)):
        kept = choice.kept(unit.kind)
        always = kept_in_forward(model, plan, unit)
        for slot in saved_slots(model, plan, unit):
            if slot.name in always or keeps(kept, unit.kind, slot.name):
                nbytes += aligned(slot.type.nbytes)
    return nbytes + branch_bytes(model, plan)


def branch_bytes(model: ModelConfig, plan: Plan) -> int:
    """Return the bytes of the two blocks' outputs that are summed over tensor-parallel ranks to be normed.

    They are always kept, because making them takes collectives. 0 for models without such norms.
    """
    slots = branch_slots(model, plan) if adds_branches_apart(model, plan) else ()
    return 2 * sum(aligned(slot.type.nbytes) for slot in slots)


def kept_with_checkpoint_bytes(model: ModelConfig, plan: Plan, choice: LayerChoice) -> int:
    """Return the most bytes that a layer keeps of a micro-batch: its checkpoint (its input) and what is kept."""
    alike = {model.first_alike("mlp", layer) for layer in range(model.layers)}
    return checkpoint_bytes(model, plan) + max(kept_bytes(model, plan, choice, layer) for layer in alike)


def checkpoint_bytes(model: ModelConfig, plan: Plan) -> int:
    """Return the bytes of a layer's input."""
    return aligned(exchanged_type(model, plan).nbytes)
