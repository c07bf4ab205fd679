"""Steps of the mlp blocks: LLaMA's with its gate, and GPT-2's, both computed in chunks of rows where the plan says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.targets.codegen.builder import INPUT
from ratrain.targets.codegen.norms import norm, norm_or_its_weights

if TYPE_CHECKING:
    from ratrain.targets.codegen.builder import Builder, Chunk


def mlp_forward(builder: Builder) -> None:
    """The forward, and all that it saves."""
    norm(builder)
    chunk_forward = _gelu_forward if builder.model.is_gpt2 else _swiglu_forward
    for chunk in builder.chunks():
        chunk_forward(builder, chunk)


def mlp_backward(builder: Builder) -> None:
    """The backward, or the half of it that the builder is for."""
    builder.temporary("dxn", builder.rows, builder.model.hidden_size)
    if builder.model.is_gpt2:
        builder.bias_gradient("dy", "down_bias")
    chunk_backward = _gelu_backward if builder.model.is_gpt2 else _swiglu_backward
    for chunk in builder.chunks():
        chunk_backward(builder, chunk)
    norm_or_its_weights(builder)


def _swiglu_forward(builder: Builder, chunk: Chunk) -> None:
    gate, up, prod = (builder.chunk_slot(name, chunk) for name in ("gate", "up", "prod"))
    for name, out in (("gate", gate), ("up", up)):
        builder.step("gemm", {"a": chunk.of("xn"), "b": f"w.{name}_proj", "out": out}, trans_b=True)
    builder.step("swiglu_forward", {"gate": gate, "up": up, "prod": prod})
    if builder.has("y"):
        operands = {"a": prod, "b": "w.down_proj", "out": chunk.of("y"), "residual": chunk.of("x")}
        builder.step("gemm", operands, trans_b=True)


def _swiglu_backward(builder: Builder, chunk: Chunk) -> None:
    dy, xn, dxn = (chunk.of(name) for name in ("dy", "xn", "dxn"))
    first = chunk.start == 0
    builder.linear_gradients(dy, chunk.of("prod"), "down_proj", first=first)
    dprod = builder.chunk_temporary("dprod", chunk, builder.model.ffn_size)
    builder.step_of(INPUT, "gemm", {"a": dy, "b": "w.down_proj", "out": dprod})
    dgate, dup = (builder.chunk_slot(name, chunk) for name in ("dgate", "dup"))
    operands = {"gate": chunk.of("gate"), "up": chunk.of("up"), "dprod": dprod, "dgate": dgate, "dup": dup}
    builder.step_of(INPUT, "swiglu_backward", operands)
    for index, (name, gradient) in enumerate((("gate", dgate), ("up", dup))):
        builder.linear_gradients(gradient, xn, f"{name}_proj", first=first)
        operands = {"a": gradient, "b": f"w.{name}_proj", "out": dxn}
        builder.step_of(INPUT, "gemm", operands, accumulate=index > 0)


def _gelu_forward(builder: Builder, chunk: Chunk) -> None:
    up, act = (builder.chunk_slot(name, chunk) for name in ("up", "act"))
    builder.step("gemm", {"a": chunk.of("xn"), "b": "w.up_proj", "out": up, "bias": "w.up_bias"}, trans_b=True)
    builder.step("gelu_forward", {"up": up, "act": act})
    if builder.has("y"):
        operands = {
            "a": act,
            "b": "w.down_proj",
            "out": chunk.of("y"),
            "bias": "w.down_bias",
            "residual": chunk.of("x"),
        }
        builder.step("gemm", operands, trans_b=True)


def _gelu_backward(builder: Builder, chunk: Chunk) -> None:
    dy, first = chunk.of("dy"), chunk.start == 0
    builder.linear_gradients(dy, chunk.of("act"), "down_proj", first=first)
    dact = builder.chunk_temporary("dact", chunk, builder.model.ffn_size)
    builder.step_of(INPUT, "gemm", {"a": dy, "b": "w.down_proj", "out": dact})
    dup = builder.chunk_slot("dup", chunk)
    builder.step_of(INPUT, "gelu_backward", {"up": chunk.of("up"), "dact": dact, "dup": dup})
    builder.linear_gradients(dup, chunk.of("xn"), "up_proj", first=first)
    builder.bias_gradient(dup, "up_bias", first=first)
    builder.step_of(INPUT, "gemm", {"a": dup, "b": "w.up_proj", "out": chunk.of("dxn")}, accumulate=False)
