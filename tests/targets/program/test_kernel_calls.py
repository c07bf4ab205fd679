"""Steps of routines held against the declarations of their kernels: attention in slices, positions that start later, any shape."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.program.attention_spec import AttentionBlockSpec, AttentionSpec
from ratrain.targets.program.kernel_calls import step_problem
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.routine import Step

if TYPE_CHECKING:
    from ratrain.targets.program.kernel import Types

F16, BF16, F32 = Dtype.F16, Dtype.BF16, Dtype.F32
BLOCK: dict[str, Any] = {
    "batch": 2,
    "queries": 5,
    "keys": 3,
    "first_query": 3,
    "first_key": 0,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "window": None,
    "alibi": False,
}
Q, KV, LINE = (10, 24), (6, 12), (4, 10)
READ = {"q": (F16, Q), "k": (F16, KV), "v": (F16, KV)}
STATE = {"acc": (F32, Q), "peak": (F32, LINE), "total": (F32, LINE)}
WIDTH = {"heads": 4, "head_dim": 6}
CALLS: dict[str, tuple[Types, dict[str, Any]]] = {
    "attention_partial_forward": ({**READ, **STATE}, {**BLOCK, "accumulate": False}),
    "attention_partial_finish": ({**STATE, "o": (F16, Q), "lse": (F32, LINE)}, WIDTH),
    "attention_delta": ({"o": (F16, Q), "do": (F16, Q), "delta": (F32, LINE)}, WIDTH),
    "attention_partial_backward": (
        {
            **READ,
            "lse": (F32, LINE),
            "do": (F16, Q),
            "delta": (F32, LINE),
            "dq": (F32, Q),
            "dk": (F32, KV),
            "dv": (F32, KV),
        },
        {**BLOCK, "accumulate": True},
    ),
    "rope": ({"x": (F32, (12, 24))}, {**WIDTH, "seq_len": 6, "theta": 1e4, "inverse": True, "first_position": 30}),
    "position_forward": ({"positions": (F16, (20, 8)), "y": (F16, (12, 8))}, {"seq_len": 6, "first_position": 14}),
    "position_backward": (
        {"dy": (F16, (12, 8)), "dpositions": (F32, (20, 8))},
        {"seq_len": 6, "accumulate": True, "first_position": 14},
    ),
    "zero": ({"a": (F32, Q)}, {}),
    "cast": ({"src": (F32, Q), "dst": (F16, Q)}, {}),
    "group_columns": ({"src": (F16, (10, 12)), "dst": (F16, (30, 4))}, {"groups": 3, "inverse": False}),
    "add": ({"a": (F32, (7,)), "b": (F16, (7,)), "out": (F32, (7,))}, {}),
}


def problem(kernel: str, types: Types, options: dict[str, Any]) -> str | None:
    return step_problem(Step(kernel, {name: name for name in types}, options), types)


@pytest.mark.parametrize("kernel", CALLS)
def test_calls_are_accepted(kernel: str) -> None:
    assert problem(kernel, *CALLS[kernel]) is None


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("kernel", CALLS)
def test_storage_is_of_any_type_that_operands_agree_on(kernel: str, dtype: Dtype) -> None:
    types, options = CALLS[kernel]
    stored = {name: (dtype if given is F16 else given, shape) for name, (given, shape) in types.items()}
    assert problem(kernel, stored, options) is None


@pytest.mark.parametrize("kernel", ["rope", "position_forward", "position_backward"])
def test_positions_start_at_0_where_nothing_is_said(kernel: str) -> None:
    types, options = CALLS[kernel]
    assert problem(kernel, types, {name: value for name, value in options.items() if name != "first_position"}) is None


@pytest.mark.parametrize(
    ("kernel", "types", "options", "said"),
    [
        ("attention_partial_forward", {"acc": (F16, Q)}, {}, "'acc' of .* is f16"),
        ("attention_partial_forward", {"acc": (F32, KV)}, {}, "'acc' of .* does not fit"),
        ("attention_partial_forward", {"k": (F16, (10, 12))}, {}, "'k' of .* does not fit"),
        ("attention_partial_forward", {"peak": (F32, (10, 4))}, {}, "'peak' of .* does not fit"),
        (
            "attention_partial_forward",
            {"q": (F16, (10, 16)), "acc": (F32, (10, 16))},
            {"kv_heads": 3, "head_dim": 4},
            "4 query heads cannot share 3 key-value heads",
        ),
        ("attention_partial_forward", {}, {"first_query": -1}, "'first_query' of .* cannot be -1"),
        ("attention_partial_forward", {}, {"first_key": 1 << 24}, "'first_key' of .* cannot be"),
        ("attention_partial_forward", {}, {"queries": 0}, "'queries' of .* cannot be 0"),
        ("attention_partial_backward", {"dk": (F16, KV)}, {}, "'dk' of .* is f16"),
        ("attention_partial_backward", {"dq": (F32, KV)}, {}, "'dq' of .* does not fit"),
        ("attention_partial_finish", {"o": (F16, KV)}, {}, "'o' of .* does not fit"),
        ("attention_delta", {"delta": (F32, (2, 10))}, {}, "'delta' of .* does not fit"),
        ("rope", {}, {"first_position": -1}, "'first_position' of .* cannot be -1"),
        ("rope", {}, {"first_position": 1 << 24}, "'first_position' of .* cannot be"),
        ("position_forward", {}, {"first_position": 15}, "6 tokens from position 15 on need .* a table as long"),
        ("position_backward", {}, {"first_position": 15}, "6 tokens from position 15 on need .* a table as long"),
        ("position_forward", {}, {"seq_len": 5}, "need whole sequences"),
        ("cast", {"dst": (F16, (24, 10))}, {}, "'dst' of .* does not have the shape of the other operands"),
        ("group_columns", {}, {"groups": 2}, "2 runs of the columns of .* are not the rows of"),
        ("group_columns", {}, {"inverse": True}, "3 runs of the columns of .* are not the rows of"),
        ("add", {"b": (F32, (1,))}, {}, "'b' of .* does not have the shape of the other operands"),
        ("attention_delta", {"do": (BF16, Q)}, {}, "'do' of .* is bf16.*it does not go with the other operands"),
        ("zero", {"a": (Dtype.I32, (3,))}, {}, "'a' of .* is i32"),
    ],
)
def test_what_does_not_go_is_refused(kernel: str, types: Types, options: dict[str, Any], said: str) -> None:
    known, given = CALLS[kernel]
    found = problem(kernel, {**known, **types}, {**given, **options})
    assert re.search(said, str(found)), found


def test_whether_it_begins_is_said() -> None:
    types, options = CALLS["attention_partial_forward"]
    assert "it got" in str(problem("attention_partial_forward", types, BLOCK))
    read = {
        accumulate: [
            each.name
            for each in KERNELS["attention_partial_backward"].operands
            if each.is_written and each.is_read({**options, "accumulate": accumulate})
        ]
        for accumulate in (False, True)
    }
    assert read == {False: ["dq"], True: ["dq", "dk", "dv"]}


def test_a_spec_takes_the_options_that_are_its_fields() -> None:
    kernel = KERNELS["attention_partial_forward"]
    assert kernel.arguments({**BLOCK, "accumulate": True}) == {"spec": AttentionBlockSpec(**BLOCK), "accumulate": True}
    assert list(kernel.parameters)[-2:] == ["spec", "accumulate"]


def test_whole_sequences_are_one_block() -> None:
    spec = AttentionSpec(batch=2, seq_len=9, heads=4, kv_heads=2, head_dim=6, window=3, alibi=True)
    block = AttentionBlockSpec(2, 9, 9, 0, 0, 4, 2, 6, 3, True)
    assert spec.block == block
    assert [each.first_seen(5) for each in (spec, block, evolve(block, window=None))] == [3, 3, 0]
    assert spec.group == block.group == 2
