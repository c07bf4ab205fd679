"""Steps of adapters beside stacks of experts: an A and a B for each expert, so no product is wider than their rank.

Row r of expert e, a choice of token t, has the thin product of its expert:

    gate[r] += scale * (x[t] A_e^T) B_e^T        y[t] += scale * sum over the rows r of t of (prod[r] A_e^T) B_e^T

Kernels of experts read the rows of tokens through the order of rows, or add rows to tokens. Products from rows to rows
are calls without an order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.adapters import FIRST, SECOND

if TYPE_CHECKING:
    from ratrain.targets.codegen.builder import Builder

GROUPS = {"order": "order", "bounds": "bounds"}
"""Operands of kernels that read tokens for rows, or add rows to tokens."""
_ROWS = {"bounds": "bounds"}
"""Operands of kernels from rows to rows."""
_DOWN = "down_experts"


def _rows_to_rows(
    builder: Builder, a: str, b: str, out: str, *, trans_b: bool = False, accumulate: bool = True
) -> None:
    """Set rows of `out` = [out +] rows of `a` times their experts' matrices."""
    operands = {"a": a, "b": b, **_ROWS, "out": out}
    builder.step("expert_rows", operands, trans_b=trans_b, accumulate=accumulate)


def add_input_adapter(builder: Builder, name: str, source: str, out: str) -> None:
    """Add the adapters of gate or up, by `name`, to their product; both share the rows of source A^T."""
    stem = f"{name}_experts"
    if stem not in builder.firsts:
        return
    low = builder.low(stem)
    if stem == builder.parts_of(stem)[0]:
        operands = {"a": source, "b": f"w.{builder.firsts[stem]}{FIRST}", **GROUPS, "out": low}
        builder.step("expert_rows", operands, trans_b=True)
        builder.scale_low(stem, low)
    _rows_to_rows(builder, low, f"w.{stem}{SECOND}", out, trans_b=True)


def add_down_low(builder: Builder) -> None:
    """Add the rows of scale * prod A^T, if the last matrices have adapters."""
    if _DOWN in builder.firsts:
        low = builder.low(_DOWN)
        _rows_to_rows(builder, "prod", f"w.{_DOWN}{FIRST}", low, trans_b=True, accumulate=False)
        builder.scale_low(_DOWN, low)


def add_down_adapter(builder: Builder, sums: str, out: str) -> None:
    """Add the products of the last matrices' adapters to the sum over a token's experts; after `add_down_low`."""
    if _DOWN in builder.firsts:
        operands = {"a": builder.low(_DOWN), "b": f"w.{_DOWN}{SECOND}", **GROUPS, "sums": sums, "out": out}
        builder.step("expert_sums", operands, trans_b=True, accumulate=True)


def down_adapter_gradients(builder: Builder, above: str) -> None:
    """Add the gradients of the last matrices' adapters, from the gradient `above` of the block's branch."""
    if _DOWN not in builder.firsts:
        return
    low, dlow = builder.low(_DOWN), builder.low_gradient(_DOWN)
    _gradients(builder, above, low, f"g.{_DOWN}{SECOND}", GROUPS, gathers_a=True)
    builder.step("expert_rows", {"a": above, "b": f"w.{_DOWN}{SECOND}", **GROUPS, "out": dlow})
    builder.scale_low(_DOWN, dlow)
    _gradients(builder, dlow, "prod", f"g.{_DOWN}{FIRST}", _ROWS, gathers_a=False)


def add_down_adapter_gradient(builder: Builder, dprod: str) -> None:
    """Add to the gradient of the last matrices' input the part through their adapters."""
    if _DOWN in builder.firsts:
        dlow = builder.low_gradient(_DOWN)
        _rows_to_rows(builder, dlow, f"w.{_DOWN}{FIRST}", dprod)


def input_adapter_gradients(builder: Builder, name: str, dy: str, source: str, sums: str, dxn: str) -> None:
    """Add the gradients of the adapters of gate or up, from that of their product, and their part of `dxn`.

    The rows dy B of both are summed in f32; the last one gives the gradients of the A they share, and of its input.
    """
    stem = f"{name}_experts"
    if stem not in builder.firsts:
        return
    low, dlow, parts = builder.low(stem), builder.low_gradient(stem), builder.parts_of(stem)
    _gradients(builder, dy, low, f"g.{stem}{SECOND}", _ROWS, gathers_a=False)
    _rows_to_rows(builder, dy, f"w.{stem}{SECOND}", dlow, accumulate=stem != parts[0])
    if stem == parts[-1]:
        first = builder.firsts[stem]
        builder.scale_low(stem, dlow)
        _gradients(builder, dlow, source, f"g.{first}{FIRST}", GROUPS, gathers_a=False)
        operands = {"a": dlow, "b": f"w.{first}{FIRST}", **GROUPS, "sums": sums, "out": dxn}
        builder.step("expert_sums", operands, accumulate=True)


def _gradients(builder: Builder, a: str, b: str, out: str, groups: dict[str, str], *, gathers_a: bool) -> None:
    operands = {"a": a, "b": b, **groups, "out": out}
    builder.step("expert_gradients", operands, gathers_a=gathers_a, accumulate=builder.accumulates)
