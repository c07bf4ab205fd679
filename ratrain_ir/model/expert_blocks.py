"""Parameters and saved tensors of an mlp whose router sends each token to some of its experts.

Each of T tokens goes to k of E experts, so their products have T * k rows, whatever the router says: no size here
depends on data, and every tensor keeps its address. Order of the rows: `targets/program/expert_kernels.py`.

    xn [T, h] -> router -> chosen, weights [T, k] -> gate, up -> prod [T k, width] -> down, summed over k -> [T, h]

A shared expert takes all tokens and is weighted by a gate of its own (Qwen2-MoE). The model is a tensor-parallel rank's
(`tensor_ranks.py`), which has a part of the width of every expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Dtype, TensorType, tensor_type
from ratrain.ratrain_ir.model.micro_batch import tokens_per_micro_batch

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def mlp_shapes(model: ModelConfig, width: int) -> list[tuple[str, tuple[int, int]]]:
    """Return (name, [outputs, inputs]) of the matrices of an MLP of some inner width."""
    hidden = model.hidden_size
    return [(name, (hidden, width) if name == "down" else (width, hidden)) for name in model.mlp_matrices]


def expert_shapes(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return (short name, shape) of the router's matrix, of a rank's experts, and of the shared one with its gate."""
    experts, hidden = experts_of(model), model.hidden_size
    own = experts // model.expert_ranks
    stacks = [(f"{name}_experts", (own, *shape)) for name, shape in mlp_shapes(model, model.expert_width)]
    shapes: list[tuple[str, tuple[int, ...]]] = [("router_proj", (experts, hidden)), *stacks]
    if model.shared_expert_size is not None:
        shapes += [(f"shared_{name}_proj", shape) for name, shape in mlp_shapes(model, model.shared_expert_size)]
        shapes.append(("shared_router_proj", (1, hidden)))
    return shapes


def experts_of(model: ModelConfig) -> int:
    """Return the number of experts of a model that has some."""
    assert model.experts is not None
    return model.experts


def choice_bias_type(model: ModelConfig) -> TensorType:
    """Return the type of a layer's bias of its router's choice: a number for each expert."""
    return tensor_type(Dtype.F32, (experts_of(model),))


def load_type(model: ModelConfig) -> TensorType:
    """Return the type of the counts of tokens that a layer has sent to each expert."""
    return tensor_type(Dtype.I32, (experts_of(model),))


def choices_per_step(model: ModelConfig, plan: Plan) -> int:
    """Return how many rows the routers of a layer send in a step, on all replicas."""
    assert model.experts_per_token is not None
    return plan.tokens_per_step * model.experts_per_token


def expert_rows(model: ModelConfig, plan: Plan) -> int:
    """Return the rows of all experts' products of a micro-batch: one for each choice of each token."""
    assert model.experts_per_token is not None
    return tokens_per_micro_batch(plan) * model.experts_per_token


def expert_slots(model: ModelConfig, plan: Plan) -> list[tuple[str, TensorType]]:
    """Return (name, type) of what an mlp of experts saves: the choice and its weights, then inputs of products."""
    tokens, act = tokens_per_micro_batch(plan), Dtype(plan.view_dtype)
    choices = (tokens, expert_rows(model, plan) // tokens)
    slots = [("chosen", tensor_type(Dtype.I32, choices)), ("weights", tensor_type(Dtype.F32, choices))]
    own = tensor_type(act, (expert_rows(model, plan), model.expert_width))
    if plan.ep == 1:  # rows that ranks exchange are not saved, nor what is made of them
        slots += [(name, own) for name in ("gate", "up", "prod")]
    if model.shared_expert_size is not None:
        shared = tensor_type(act, (tokens, model.shared_expert_size))
        slots += [(f"shared_{name}", shared) for name in ("gate", "up", "prod")]
        slots.append(("shared_weights", tensor_type(Dtype.F32, (tokens, 1))))
    return slots


def pending_expert_slots(model: ModelConfig, plan: Plan) -> list[tuple[str, TensorType]]:
    """Return (name, type) of the gradients of the outputs of products: of experts, router and shared expert."""
    tokens, act = tokens_per_micro_batch(plan), Dtype(plan.view_dtype)
    own = tensor_type(act, (expert_rows(model, plan), model.expert_width))
    slots = [("dgate", own), ("dup", own), ("dlogits", tensor_type(Dtype.F32, (tokens, experts_of(model))))]
    if model.shared_expert_size is not None:
        shared = tensor_type(act, (tokens, model.shared_expert_size))
        slots += [("dshared_gate", shared), ("dshared_up", shared)]
        slots.append(("dshared_logits", tensor_type(Dtype.F32, (tokens, 1))))
    return slots
