"""Steps of norms: of a block's input, of queries and keys, of a block's branch; forward, backward, and in halves.

A block's branch is the term that it adds to the residual stream. The gradients of a norm's parameters are sums over
rows that its backward computes. They are added to the block's gradient, or, in an input half, left pending in f32, for
the weight half to add and round once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.config.tensor_ranks import copies_of_keys
from ratrain.ratrain_ir.model.slots import PRODUCTS, SQUARES, exchanged_type, norm_sums
from ratrain.targets.codegen.builder import INPUT, WEIGHT
from ratrain.targets.codegen.head_groups import side_by_side

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.codegen.builder import Builder


@frozen
class Norm:
    """One norm of a block: the names of its operands."""

    source: str
    result: str
    weight: str
    """its parameter"""
    statistics: str = ""
    """prefix of the names of its statistics"""


OF_BRANCH = Norm("branch", "normed_branch", "post_norm", "branch_")


def of_input(builder: Builder) -> Norm:
    """Return the norm of a block's input."""
    return Norm(builder.source, "xn", "norm")


def statistics(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the values that the forward of a norm keeps of each row."""
    return ("mean", "rstd") if model.has_layer_norm else ("rstd",)


def norm(builder: Builder) -> str:
    """Add the norm of a block's input, with slots for its results; return the operand that the block computes from.

    It is the input itself in models without such a norm.
    """
    if not builder.model.has_pre_norm:
        return builder.source
    for name in ("xn", *statistics(builder.model)):
        builder.slot(name)
    norm_steps(builder, of_input(builder))
    return "xn"


def block_source(builder: Builder) -> str:
    """Return the operand that the linear layers of a block read."""
    return "xn" if builder.model.has_pre_norm else builder.source


def norm_steps(builder: Builder, of: Norm) -> None:
    """Add a norm whose results the builder knows."""
    model = builder.model
    operands = {"x": of.source, "gamma": f"w.{of.weight}"}
    if model.has_layer_norm:
        operands["beta"] = f"w.{of.weight}_bias"
    operands["xn"] = of.result
    operands |= {name: f"{of.statistics}{name}" for name in statistics(model)}
    builder.step(f"{_kernel(model)}_forward", operands, eps=model.norm_eps, **unit_offset(model))


def unit_offset(model: ModelConfig) -> dict[str, bool]:
    """Return the option of norms that scale by 1 + weight."""
    return {"unit_offset": True} if model.norm_unit_offset else {}


def _norm_backward(builder: Builder, of: Norm, dxn: str, dx: str, residual: str | None) -> None:
    """Add the backward of a norm: from the gradient of its result to `dx`, and to the gradients of its parameters."""
    model = builder.model
    operands = {"dxn": dxn, "x": of.source, "gamma": f"w.{of.weight}"}
    operands |= {name: f"{of.statistics}{name}" for name in statistics(model)}
    operands["dx"] = dx
    sums = {"norm": "dgamma", "norm_bias": "dbeta"}
    for pending, parameter, _ in norm_sums(model, builder.block):
        if parameter in (of.weight, f"{of.weight}_bias"):
            operands[sums[parameter.removeprefix("post_")]] = _sum_of(builder, pending, parameter)
    if residual is not None:
        operands["residual"] = residual
    whole = WEIGHT in builder.halves
    builder.step(f"{_kernel(model)}_backward", operands, accumulate=whole and builder.accumulates, **unit_offset(model))


def _sum_of(builder: Builder, pending: str, parameter: str) -> str:
    """Return the operand that the gradient of a norm's parameter is summed in."""
    return f"g.{parameter}" if WEIGHT in builder.halves else builder.slot(pending)


def head_norm_backward(builder: Builder) -> None:
    """Add the backward of the norm before the head, from `dxn` to `dx`."""
    model = builder.model
    operands = {"dxn": "dxn", "x": "x", "gamma": "w.norm"} | {name: name for name in statistics(model)}
    operands |= {"dx": "dx", "dgamma": "g.norm"} | ({"dbeta": "g.norm_bias"} if model.has_layer_norm else {})
    builder.step(f"{_kernel(model)}_backward", operands, accumulate=builder.accumulates, **unit_offset(model))


def finish_backward(builder: Builder) -> None:
    """Add the end of a block's backward: `dx` from `dxn`; in a weight half the pending sums, added and rounded once.

    Without a norm of the input, `dxn` is the gradient of the input through the block, to which the stream's own
    gradient is added; tensor-parallel ranks add that where they sum.
    """
    if INPUT in builder.halves:
        around = builder.bypassing_gradient if builder.residual else None
        dx = builder.source_gradient
        if builder.model.has_pre_norm:
            _norm_backward(builder, of_input(builder), "dxn", dx, around)
        elif around is not None:
            builder.step("add", {"a": around, "b": "dxn", "out": dx})
        builder.pass_gradient_on()
    if WEIGHT in builder.halves:
        add_pending_sums(builder)


def source_gradient(builder: Builder) -> str:
    """Return the operand for the gradient of the linear layers' input.

    A block with a norm of its input, or with a `residual` operand, needs an intermediate, `dxn`. In any other block it
    is final: the operand is the builder's `source_gradient`, which is `dx`, or the upper half of it in a pair.
    """
    if builder.model.has_pre_norm or builder.residual:
        return builder.temporary("dxn", builder.rows, builder.model.hidden_size)
    return builder.source_gradient


def add_pending_sums(builder: Builder) -> None:
    """Add to the gradient the pending sums of other ops: the input half, and an op that norms the branch."""
    for pending, parameter, _ in norm_sums(builder.model, builder.block):
        if not builder.has(pending):
            continue
        operands = {"a": pending, "b": f"g.{parameter}", "out": f"g.{parameter}"}
        if builder.accumulates:
            builder.step("add", operands)
        else:
            builder.step("cast", {"src": pending, "dst": f"g.{parameter}"})


# the branch of a block, which is added to the stream


def has_plain_branch(builder: Builder) -> bool:
    """Return whether the block's last product writes its final output: nothing is normed or scaled in between.

    The product adds it to the stream, or gives it to an op of its own that norms and adds it.
    """
    return builder.adds_apart or (not builder.model.has_post_norm and builder.model.residual_scale == 1)


def add_branch_forward(builder: Builder) -> None:
    """Add steps for `sum` = `stream` + residual_scale * norm of `branch`, on the rows that a rank has."""
    normed = builder.temporary("normed_branch", *exchanged_type(builder.model, builder.plan).shape)
    norm_steps(builder, OF_BRANCH)
    builder.step("add", {"a": "stream", "b": normed, "out": "sum"}, **_scaled(builder.model))


def add_branch_backward(builder: Builder) -> None:
    """Add steps from `dsum` to `dbranch` and to the sums of the norm's parameters."""
    model, above = builder.model, "dsum"
    if model.residual_scale != 1:
        above = builder.temporary("dnormed", *exchanged_type(model, builder.plan).shape)
        builder.step("scale", {"a": "dsum", "out": above}, scale=model.residual_scale)
    _norm_backward(builder, OF_BRANCH, above, "dbranch", None)


def branch_of(builder: Builder) -> str:
    """Return the operand that a block's last product writes if it does not add to the stream itself."""
    if builder.model.has_post_norm:
        return builder.slot("branch")
    return builder.temporary("branch", builder.rows, builder.model.hidden_size)


def add_branch(builder: Builder) -> None:
    """Add steps for `y` = the stream + residual_scale * [norm of] the branch."""
    model, source = builder.model, "branch"
    if model.has_post_norm:
        for name in statistics(model):
            builder.slot(f"branch_{name}")
        if not builder.has("y"):
            builder.temporary("normed_branch", builder.rows, model.hidden_size)
            norm_steps(builder, OF_BRANCH)
            return
        source = builder.temporary("normed_branch", builder.rows, model.hidden_size)
        norm_steps(builder, OF_BRANCH)
    if builder.residual:
        builder.step("add", {"a": builder.stream, "b": source, "out": builder.total}, **_scaled(model))
    else:
        builder.step("scale", {"a": source, "out": builder.total}, scale=model.residual_scale)


def _scaled(model: ModelConfig) -> dict[str, float]:
    return {} if model.residual_scale == 1 else {"scale": model.residual_scale}


def branch_gradient(builder: Builder) -> str:
    """Add steps to the gradient of a block's last product, and return its operand.

    Where nothing is normed or scaled in between, it is the gradient of the sum.
    """
    model, above = builder.model, builder.total_gradient
    if has_plain_branch(builder):
        return above
    if not model.has_post_norm:
        scaled = builder.temporary("dbranch", builder.rows, model.hidden_size)
        builder.step("scale", {"a": above, "out": scaled}, scale=model.residual_scale)
        return scaled
    gradient = builder.slot("dbranch")
    if INPUT in builder.halves:
        if model.residual_scale != 1:
            above = builder.temporary("dnormed", builder.rows, model.hidden_size)
            builder.step("scale", {"a": builder.total_gradient, "out": above}, scale=model.residual_scale)
        _norm_backward(builder, OF_BRANCH, above, gradient, None)
    return gradient


# queries and keys


def qk_norms(builder: Builder) -> None:
    """Add the norms of queries and keys, from their projections."""
    if builder.norms_over_ranks:
        for of in _summed_norms(builder):
            operands = {"x": f"{of.name}_in", "gamma": f"w.{of.name}_norm", "squares": of.rows_of(SQUARES)}
            operands["xn"] = builder.slot(of.name)
            builder.step("summed_norm_forward", operands, width=of.width, eps=builder.model.norm_eps)
        return
    for name, heads in _normed_projections(builder.model):
        operands = {"x": f"{name}_in", "gamma": f"w.{name}_norm", "xn": side_by_side(builder, name)}
        operands["rstd"] = builder.slot(f"{name}_rstd")
        options = {**_heads(builder.model, name, heads), **unit_offset(builder.model)}
        builder.step("head_norm_forward", operands, **options, eps=builder.model.norm_eps)


def qk_norms_backward(builder: Builder) -> None:
    """Add the backward of these norms, in place on the gradients of normed queries and keys."""
    for name, heads in _normed_projections(builder.model):
        operands = {"dxn": f"d{name}", "x": f"{name}_in", "gamma": f"w.{name}_norm", "rstd": f"{name}_rstd"}
        operands |= {"dx": f"d{name}", "dgamma": _sum_of(builder, f"d{name}_gamma", f"{name}_norm")}
        options: dict[str, Any] = {**_heads(builder.model, name, heads), **unit_offset(builder.model)}
        accumulate = WEIGHT in builder.halves and builder.accumulates
        builder.step("head_norm_backward", operands, **options, accumulate=accumulate)


@frozen
class _SummedNorm:
    """Norm of queries or keys over all heads of a token, of which a tensor-parallel rank has some."""

    name: str
    width: int
    """elements of all peers"""
    copies: int
    """peers that have the same heads"""
    first: int
    """first row of its sums among the sums of all such norms"""
    rows: int

    def rows_of(self, sums: str) -> str:
        """Return its part of the sums over rows."""
        return f"{sums}[{self.first}:{self.first + self.rows}]"


def _summed_norms(builder: Builder) -> tuple[_SummedNorm, _SummedNorm]:
    whole, rows = builder.whole, builder.rows
    copies = copies_of_keys(whole, builder.plan.tp)
    return _SummedNorm("q", whole.q_size, 1, 0, rows), _SummedNorm("k", whole.kv_size, copies, rows, rows)


def sums_of_squares(builder: Builder) -> None:
    """Add the sums of squares of a rank's part of each row; heads that several ranks have are shared evenly."""
    for of in _summed_norms(builder):
        operands = {"x": f"{of.name}_in", "squares": of.rows_of(SQUARES)}
        builder.step("row_squares", operands, share=1 / of.copies)


def sums_of_products(builder: Builder) -> None:
    """Add the sums of products of a tensor-parallel rank's part of each row, for the gradient.

    Gradients of heads that several peers have are parts of one sum, so nothing is divided here.
    """
    for of in _summed_norms(builder):
        operands = {"dxn": f"d{of.name}", "x": f"{of.name}_in", "gamma": f"w.{of.name}_norm"}
        builder.step("row_products", operands | {"products": of.rows_of(PRODUCTS)})


def summed_norms_backward(builder: Builder) -> None:
    """Add the backward of norms over peers: from gradients of normed queries and keys to gradients of projections."""
    for of in _summed_norms(builder):
        operands = {"dxn": f"d{of.name}", "x": f"{of.name}_in", "gamma": f"w.{of.name}_norm"}
        operands |= {sums: of.rows_of(sums) for sums in (SQUARES, PRODUCTS)}
        operands |= {"dx": builder.slot(f"d{of.name}_in")}
        operands |= {"dgamma": _sum_of(builder, f"d{of.name}_gamma", f"{of.name}_norm")}
        options: dict[str, Any] = {"width": of.width, "eps": builder.model.norm_eps, "share": 1 / of.copies}
        accumulate = WEIGHT in builder.halves and builder.accumulates
        builder.step("summed_norm_backward", operands, **options, accumulate=accumulate)


def _normed_projections(model: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Return the projections that are normed, each with the number of heads that are normed separately."""
    if model.qk_norm == "none":
        return ()
    return (("q", model.heads), ("k", model.kv_heads)) if model.qk_norm == "head" else (("q", 1), ("k", 1))


def _heads(model: ModelConfig, name: str, heads: int) -> dict[str, int]:
    width = model.q_size if name == "q" else model.kv_size
    return {"heads": heads, "head_dim": width // heads}


def _kernel(model: ModelConfig) -> str:
    return "layernorm" if model.has_layer_norm else "rmsnorm"
