"""Steps of norms: LLaMA's RMSNorm and GPT-2's layer norm, forward, backward, and the two halves of a backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.targets.codegen.builder import INPUT, WEIGHT

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.targets.codegen.builder import Builder


def statistics(model: ModelConfig) -> tuple[str, ...]:
    """What the forward of a norm keeps of each row."""
    return ("mean", "rstd") if model.is_gpt2 else ("rstd",)


def norm(builder: Builder) -> None:
    """The norm of a block, whose results are slots."""
    for name in ("xn", *statistics(builder.model)):
        builder.slot(name)
    norm_steps(builder)


def norm_steps(builder: Builder) -> None:
    """The norm of `x`, whose results the builder knows."""
    operands = {"x": "x", "gamma": "w.norm"}
    if builder.model.is_gpt2:
        operands["beta"] = "w.norm_bias"
    operands |= {name: name for name in ("xn", *statistics(builder.model))}
    builder.step(f"{_kernel(builder)}_forward", operands, eps=builder.model.norm_eps)


def norm_backward(builder: Builder, *, residual: bool) -> None:
    """From `dxn` to `dx`, and the gradients of the norm's parameters: added up, or, in an input half, left pending."""
    operands = {"dxn": "dxn", "x": "x", "gamma": "w.norm"}
    operands |= {name: name for name in statistics(builder.model)}
    operands["dx"] = "dx"
    whole = WEIGHT in builder.halves
    operands |= {sums: parameter if whole else sums for sums, parameter in _sums(builder)}
    if residual:
        operands["residual"] = "dy"
    builder.step(f"{_kernel(builder)}_backward", operands, accumulate=whole and builder.accumulates)


def norm_or_its_weights(builder: Builder) -> None:
    """The end of a block's backward; in a weight half, what the input half has summed, added to the gradient and rounded once."""
    if INPUT in builder.halves:
        norm_backward(builder, residual=True)
        return
    for sums, parameter in _sums(builder):
        if builder.accumulates:
            builder.step("add", {"a": sums, "b": parameter, "out": parameter})
        else:
            builder.step("cast", {"src": sums, "dst": parameter})


def _kernel(builder: Builder) -> str:
    return "layernorm" if builder.model.is_gpt2 else "rmsnorm"


def _sums(builder: Builder) -> tuple[tuple[str, str], ...]:
    """Gradients of the norm's parameters: as the kernel calls them, and in the block's gradient."""
    weights = (("dgamma", "g.norm"),)
    return (*weights, ("dbeta", "g.norm_bias")) if builder.model.is_gpt2 else weights
