"""Attention of one slice of a micro-batch: its queries against the keys and values of this and earlier slices.

Keys are taken slice after slice. Forward carries the state of the softmax from one slice of keys to the next. Backward
has probabilities from the log-sum-exp that forward left, so each slice of keys stands alone. Contributions of this
slice to the gradients of earlier keys and values are added to f32 sums; the backward of those slices, which runs later
because slices descend there, takes them up.

    forward s2:   keys s0 -> keys s1 -> keys s2        backward s2:  sums of s0 +=, sums of s1 +=, own dk dv
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.slice_plan import SlicePlan, slice_plan
from ratrain.ratrain_ir.model.slots import KEY_SLOTS, SUM_SLOTS, begins_key_gradients, seen_slices
from ratrain.ratrain_ir.ops.roles import of_slice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.targets.codegen.builder import Builder


@frozen
class _Keys:
    """Keys and values of one slice, as a routine of a slice that sees them names them."""

    plan: SlicePlan
    """plan of the slice they belong to"""
    key: str
    value: str


def _earlier_keys(builder: Builder, plan: SlicePlan) -> list[_Keys]:
    """Return the keys of the earlier slices that this one sees, ascending."""
    found = []
    for number in seen_slices(builder.whole, plan):
        other = slice_plan(plan.parent, number)
        assert isinstance(other, SlicePlan)
        key, value = (of_slice(name, number) for name in KEY_SLOTS)
        found.append(_Keys(other, key, value))
    return found


def _options(plan: SlicePlan, keys: SlicePlan, attention: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "batch": plan.micro_batch_size,
        "queries": plan.seq_len,
        "keys": keys.seq_len,
        "first_query": plan.first_position,
        "first_key": keys.first_position,
        **attention,
    }


def sliced_forward(builder: Builder, plan: SlicePlan, attention: Mapping[str, Any]) -> None:
    """Add the steps from queries, keys and values to the output of the heads.

    `attention` are the options of attention kernels that come from the model and the layer.
    """
    model, rows = builder.model, builder.rows
    state = {
        "acc": builder.temporary("acc", rows, model.heads * model.head_dim, dtype=Dtype.F32),
        "peak": builder.temporary("peak", model.heads, rows, dtype=Dtype.F32),
        "total": builder.temporary("total", model.heads, rows, dtype=Dtype.F32),
    }
    for position, keys in enumerate([*_earlier_keys(builder, plan), _Keys(plan, *KEY_SLOTS)]):
        operands = {"q": "q", "k": keys.key, "v": keys.value, **state, **builder.documents}
        options = _options(plan, keys.plan, attention)
        builder.step("attention_partial_forward", operands, **options, accumulate=position > 0)
    outputs = {"o": builder.slot("o"), "lse": builder.slot("lse")}
    builder.step("attention_partial_finish", {**state, **outputs}, heads=model.heads, head_dim=model.head_dim)


def sliced_backward(builder: Builder, plan: SlicePlan, attention: Mapping[str, Any]) -> None:
    """Add the steps from the gradient `do` of the heads' output to the gradients of queries, keys and values.

    Also adds to the sums of earlier slices.
    """
    model, rows = builder.model, builder.rows
    delta = builder.temporary("delta", model.heads, rows, dtype=Dtype.F32)
    builder.step("attention_delta", {"o": "o", "do": "do", "delta": delta}, heads=model.heads, head_dim=model.head_dim)
    queries = builder.temporary("dq_sum", rows, model.heads * model.head_dim, dtype=Dtype.F32)
    builder.step("zero", {"a": queries})
    own = tuple(
        builder.temporary(f"own_{name}", rows, model.kv_heads * model.head_dim, dtype=Dtype.F32) for name in SUM_SLOTS
    )
    common = {name: name for name in ("q", "lse", "do")} | {"delta": delta, "dq": queries} | builder.documents

    def step(keys: _Keys, sums: tuple[str, ...], *, accumulate: bool) -> None:
        operands = {**common, "k": keys.key, "v": keys.value, "dk": sums[0], "dv": sums[1]}
        options = _options(plan, keys.plan, attention)
        builder.step("attention_partial_backward", operands, **options, accumulate=accumulate)

    for keys in _earlier_keys(builder, plan):
        sums = tuple(of_slice(name, keys.plan.index) for name in SUM_SLOTS)
        # The last slice that sees these keys is the first to run backward: it begins the sums, the others add.
        step(keys, sums, accumulate=not begins_key_gradients(model, plan, keys.plan))
    step(_Keys(plan, *KEY_SLOTS), own, accumulate=False)
    builder.step("cast", {"src": queries, "dst": "dq"})
    for name, mine, later in zip(("dk", "dv"), own, SUM_SLOTS, strict=True):
        if builder.has(later):
            builder.step("add", {"a": later, "b": mine, "out": name})
        else:
            builder.step("cast", {"src": mine, "dst": name})
