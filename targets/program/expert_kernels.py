"""Declarations of the kernels of expert blocks: a router's choice, products of rows grouped by expert, their sum.

Each of T tokens goes to `k` of E experts, so there are exactly R = T * k rows, whatever the router says; only their
order depends on data. `group_rows` sorts them by expert. No row is moved for it: products read the rows of tokens, or
add to them, through that order. With T = 3, k = 2, E = 4:

    chosen = [[0, 2], [1, 2], [0, 2]]       experts of each token, ascending
    order  = [0, 4, 2, 1, 3, 5]             t * k + j of each row: two rows of expert 0, one of 1, three of 2
    bounds = [0, 2, 3, 6, 6]                expert e has the rows bounds[e] to bounds[e + 1]; expert 3 has none

Products begin with row bounds[0] and end before row bounds[E]; other rows neither count nor change. So two stacks of
experts share one table of bounds: the first takes its entries 0 to E, the second goes on from entry E.

The product of a row has the same bits whatever the other rows are, and however many, as long as it has the same place
in its block: sets multiply in blocks of a fixed number of rows. (Most libraries treat all places alike; OpenBLAS on
AVX2 does not.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.targets.program.kernel import Kernel, Types
from ratrain.targets.program.option_values import ADDS, COEFFICIENT, FLAG, UNLESS_GIVEN

if TYPE_CHECKING:
    from collections.abc import Mapping

ROW_BLOCK = 64
"""Rows of one expert that a product takes at a time. The last block of an expert is filled up with zeros in scratch."""


def _choice_rule(options: Mapping[str, Any], types: Types) -> str | None:
    """Return an error if more experts are chosen than there are, else None."""
    del options
    (_, experts), (_, chosen) = types["logits"][1], types["chosen"][1]
    return f"{chosen} of {experts} experts cannot be chosen" if chosen > experts else None


def _grouped(rows: int, tokens: int) -> bool:
    """Return whether a number of rows is a whole number of choices of each token."""
    return rows >= tokens and rows % tokens == 0


def _rows_rule(options: Mapping[str, Any], types: Types) -> str | None:
    (tokens, inner), (rows, columns) = types["a"][1], types["out"][1]
    if "order" not in types and rows != tokens:
        return f"products of experts without an order need as many rows as {tokens}, not {rows}"
    return _product_problem(options, types, tokens, rows, inner, columns)


def _sums_rule(options: Mapping[str, Any], types: Types) -> str | None:
    (rows, inner), (tokens, columns) = types["a"][1], types["out"][1]
    return _product_problem(options, types, tokens, rows, inner, columns)


def _product_problem(
    options: Mapping[str, Any], types: Types, tokens: int, rows: int, inner: int, columns: int
) -> str | None:
    _, depth, width = types["b"][1]
    if options.get("trans_b"):
        depth, width = width, depth
    if (depth, width) == (inner, columns) and _grouped(rows, tokens):
        return None
    return f"{rows} rows of experts for {tokens} tokens, [{inner}] to [{columns}], do not fit {list(types['b'][1])}"


def _gradients_rule(options: Mapping[str, Any], types: Types) -> str | None:
    tokens, rows = types["a"][1][0], types["b"][1][0]
    if not options["gathers_a"]:
        tokens, rows = rows, tokens
    if "order" not in types:
        return (
            None if rows == tokens else f"gradients of experts without an order need factors of as many rows as {rows}"
        )
    if rows == types["order"][1][0] and _grouped(rows, tokens):
        return None
    return f"gradients of experts need a factor with a row for each of {list(types['order'][1])}, and one of tokens"


def _choice_sums_rule(options: Mapping[str, Any], types: Types) -> str | None:
    del options
    rows, tokens = types["a"][1][0], types["out"][1][0]
    return None if _grouped(rows, tokens) else f"{rows} rows are not as many for each of {tokens} tokens"


def _weighted_rule(options: Mapping[str, Any], types: Types) -> str | None:
    del options
    rows, (tokens, choices) = types["gate"][1][0], types["weights"][1]
    if rows == tokens * choices and ("order" in types or choices == 1):
        return None
    return f"weights {[tokens, choices]} are not one for each of {rows} rows"


EXPERT_KERNELS = (
    Kernel(
        "route_forward",
        "chosen[t], ascending, are the experts with the k largest logits of row t: of equal ones those with lower "
        "numbers; a NaN is below all numbers. With `bias` they are those with the largest sums of the softmax over all "
        "experts, in float32, and bias[e]. weights[t, j] is the softmax of the row at chosen[t, j]: over all "
        "experts, or with `normalise` over the chosen ones.",
        "logits:f32[T,E] chosen:i32[T,k]= weights:f32[T,k]= bias:f32[E]?",
        {"normalise": FLAG},
        rule=_choice_rule,
    ),
    Kernel(
        "route_backward",
        "Gradient of `route_forward` with regard to the logits; the choice is constant. To it are added scale[0] times "
        "the gradients of two losses, with n_e rows of expert e and p the softmax over all experts: "
        "`balance` * E / (k T^2) * sum over e of n_e * (sum over t of p[t, e]), n constant; and "
        "`z` / T * sum over t of (log-sum-exp of the logits of t)^2.",
        "logits:f32[T,E] chosen:i32[T,k] weights:f32[T,k] dweights:f32[T,k] bounds:i32[E+1] dlogits:f32[T,E]= "
        "scale:f32[2]?",
        {"normalise": FLAG, "balance": COEFFICIENT, "z": COEFFICIENT},
        rule=_choice_rule,
    ),
    Kernel(
        "group_rows",
        "order lists t * k + j by expert chosen[t, j], then by t; expert e has the rows bounds[e] to bounds[e + 1]. "
        "Raises IndexError where a chosen number is no expert.",
        "chosen:i32[T,k] order:i32[T*k]= bounds:i32[E+1]=",
    ),
    Kernel("add_rows", "counts[e] += bounds[e + 1] - bounds[e].", "bounds:i32[E+1] counts:i32[E]~"),
    Kernel(
        "expert_rows",
        "out[r] = [out[r] +] a[order[r] // k] @ op(b[e]) for each row r of each expert e, in float32, rounded once; "
        "without `order` a[r] @ op(b[e]).",
        "a:*[T,K] b:*[E,I,J] bounds:i32[E+1] out:*[R,N]+ order:i32[R]?",
        {"trans_b": UNLESS_GIVEN, "accumulate": UNLESS_GIVEN},
        rule=_rows_rule,
    ),
    Kernel(
        "expert_sums",
        "out[t] = [out +] the sum of a[r] @ op(b[e]) over the rows r of token t, in ascending order of their experts "
        "e [+ residual], in float32, rounded once. `sums` is workspace.",
        "a:*[R,K] b:*[E,I,J] order:i32[R] bounds:i32[E+1] sums:f32[T,N]= out:*[T,N]+ residual:*[T,N]?",
        {"trans_b": UNLESS_GIVEN, "accumulate": UNLESS_GIVEN},
        in_place=(("out", "residual"),),
        rule=_sums_rule,
    ),
    Kernel(
        "choice_sums",
        "out[t] = [out[t] +] the sum of a[t * k + j] over j = 0 to k - 1, in ascending order [+ residual[t]], in "
        "float32, rounded once.",
        "a:*[R,N] out:*[T,N]+ residual:*[T,N]?",
        {"accumulate": UNLESS_GIVEN},
        in_place=(("out", "residual"),),
        rule=_choice_sums_rule,
    ),
    Kernel(
        "expert_gradients",
        "out[e] = [out[e] +] a_e^T @ b_e: a_e and b_e are the rows of expert e in their order, one factor as it lies, "
        "the other (`a` if `gathers_a`, else `b`) with row order[r] // k for r; without `order` both as they lie. "
        "Zeros for an expert without rows.",
        "a:*[A,M] b:*[B,N] bounds:i32[E+1] out:*[E,M,N]+ order:i32[R]?",
        {"gathers_a": FLAG, **ADDS},
        rule=_gradients_rule,
    ),
    Kernel(
        "weighted_swiglu_forward",
        "prod[r] = silu(gate[r]) * up[r] * weights[order[r]], the weights read as one list; without `order` "
        "weights[r]. With `bounds` only the rows bounds[0] to bounds[E] count; what becomes of others is not said.",
        "gate:s[R,f] up:s[R,f] weights:f32[T,k] prod:s[R,f]= order:i32[R]? bounds:i32[E+1]?",
        rule=_weighted_rule,
    ),
    Kernel(
        "weighted_swiglu_backward",
        "Gradients of `weighted_swiglu_forward`: dgate and dup as `swiglu_backward` of weight * dprod in float32; "
        "dweights[order[r]] is the sum of dprod * silu(gate) * up over the row. `bounds` as there.",
        "gate:s[R,f] up:s[R,f] weights:f32[T,k] dprod:s[R,f] dgate:s[R,f]= dup:s[R,f]= dweights:f32[T,k]= "
        "order:i32[R]? bounds:i32[E+1]?",
        in_place=tuple((out, source) for out in ("dgate", "dup") for source in ("gate", "up", "dprod")),
        rule=_weighted_rule,
    ),
    Kernel("sigmoid_forward", "y = 1 / (1 + exp(-x)).", "x:f32[...] y:f32[...]=", in_place=(("y", "x"),)),
    Kernel(
        "sigmoid_backward",
        "dx = dy * y * (1 - y): gradient of `sigmoid_forward`, from its result.",
        "y:f32[...] dy:f32[...] dx:f32[...]=",
        in_place=(("dx", "dy"),),
    ),
)
