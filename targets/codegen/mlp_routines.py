"""Steps of mlp blocks, with a gate and without, computed in chunks of rows where the plan says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.targets.codegen.builder import INPUT
from ratrain.targets.codegen.norms import (
    add_branch,
    block_source,
    branch_gradient,
    branch_of,
    finish_backward,
    has_plain_branch,
    norm,
    source_gradient,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.codegen.builder import Builder, Chunk

_KERNELS = {
    ("silu", True): ("swiglu", {}),
    ("gelu", True): ("geglu", {"exact": True}),
    ("gelu-tanh", True): ("geglu", {}),
    ("gelu", False): ("gelu", {"exact": True}),
    ("gelu-tanh", False): ("gelu", {}),
    ("relu2", False): ("relu2", {}),
}
"""Kernel between an MLP's products, and its options, by activation and presence of a gate."""


def mlp_forward(builder: Builder) -> None:
    """Add the steps of the forward, with all slots that it saves."""
    model, source = builder.model, norm(builder)
    plain = has_plain_branch(builder)
    adds = builder.has("y") or builder.norms_branch
    branch = builder.total if plain else branch_of(builder) if adds else ""
    for chunk in builder.chunks():
        product = _activated(builder, chunk, source)
        if adds:
            operands = {"a": product, "b": "w.down_proj", "out": chunk.of(branch), **_bias(model, "down")}
            around = {name: chunk.of(stream) for name, stream in builder.residual.items()} if plain else {}
            builder.step("gemm", operands | around, trans_b=True)
            builder.add_adapter("down", product, chunk.of(branch), chunk)
        else:
            builder.add_low("down", product, chunk)
    if adds and not plain:
        add_branch(builder)


def _activated(builder: Builder, chunk: Chunk, source: str) -> str:
    """Add the steps of a chunk of rows up to the activation; return the operand that the last product reads."""
    model = builder.model
    slots = {name: builder.chunk_slot(name, chunk) for name in _slots(model)}
    for name in model.mlp_matrices[:-1]:
        operands = {"a": chunk.of(source), "b": f"w.{name}_proj", "out": slots[name], **_bias(model, name)}
        builder.step("gemm", operands, trans_b=True)
        builder.add_adapter(name, chunk.of(source), slots[name], chunk)
    kernel, options = _KERNELS[model.activation, model.gated_mlp]
    builder.step(f"{kernel}_forward", slots, **options)
    return slots[_slots(model)[-1]]


def _slots(model: ModelConfig) -> tuple[str, ...]:
    """Return the operands of the kernel between the products, forward."""
    return ("gate", "up", "prod") if model.gated_mlp else ("up", "act")


def _bias(model: ModelConfig, name: str) -> dict[str, str]:
    return {"bias": f"w.{name}_bias"} if model.mlp_bias else {}


def mlp_backward(builder: Builder) -> None:
    """Add the steps of the backward, or of the half of it that the builder is for."""
    dxn = source_gradient(builder)
    above = branch_gradient(builder)
    if builder.model.mlp_bias:
        builder.bias_gradient(above, "down_bias")
    for chunk in builder.chunks():
        _chunk_backward(builder, chunk, above, dxn)
    finish_backward(builder)


def _chunk_backward(builder: Builder, chunk: Chunk, above: str, whole_dxn: str) -> None:
    model, first = builder.model, chunk.start == 0
    dy, source, dxn = (chunk.of(name) for name in (above, block_source(builder), whole_dxn))
    *inputs, product = _slots(model)
    builder.linear_gradients(dy, chunk.of(product), "down_proj", chunk)
    dproduct = builder.chunk_temporary(f"d{product}", chunk, model.ffn_size)
    builder.step_of(INPUT, "gemm", {"a": dy, "b": "w.down_proj", "out": dproduct})
    builder.add_adapter_gradient("down", dproduct, chunk)
    gradients = {name: builder.chunk_slot(f"d{name}", chunk) for name in inputs}
    operands = {name: chunk.of(name) for name in inputs} | {f"d{product}": dproduct}
    kernel, options = _KERNELS[model.activation, model.gated_mlp]
    operands |= {f"d{name}": gradient for name, gradient in gradients.items()}
    builder.step_of(INPUT, f"{kernel}_backward", operands, **options)
    for index, (name, gradient) in enumerate(gradients.items()):
        builder.linear_gradients(gradient, source, f"{name}_proj", chunk)
        if model.mlp_bias:
            builder.bias_gradient(gradient, f"{name}_bias", first=first)
        operands = {"a": gradient, "b": f"w.{name}_proj", "out": dxn}
        builder.step_of(INPUT, "gemm", operands, accumulate=index > 0)
        builder.add_adapter_gradient(name, dxn, chunk)
