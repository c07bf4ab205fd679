"""Whatever value is written as TOML is read back as the same value, of every key of a plan over all that it may hold."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.accumulation import ACCUMULATIONS
from ratrain.ratrain_ir.config.expert_keys import DISPATCHES
from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.optimizer import CLIPS, DECAYS
from ratrain.ratrain_ir.config.plan import (
    ATTENTION_MASKS,
    ATTENTIONS,
    CONTEXT_EXCHANGES,
    CONTEXT_LAYOUTS,
    DTYPES,
    KEYS,
    LOGITS,
    REDUCTIONS,
    Plan,
)
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.config.quantised import FORMATS, FROZEN_FORMATS
from ratrain.ratrain_ir.config.rank_mapping import RankMapping
from ratrain.ratrain_ir.config.training import ALL_LINEAR, AS_VIEWS, METHODS
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.module_patterns import ModuleNumbers
from ratrain.ratrain_ir.support.toml_text import toml_comment, toml_key, toml_value
from ratrain.ratrain_ir.text.plan_file import checked_plan_text

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
@example('"quoted" \\ back\nslash\r\t\x00\x1f\x7f\x85\u2028\ufeff\U0001f600')
@example([True, 1, 1.0, 1e-8, 5e-324, 1.7976931348623157e308, -0.0, 10**30])
def test_every_value_reads_back(value: Any) -> None:
    text = toml_value(value)
    assert len(text.splitlines()) == 1
    back = tomllib.loads(f"key = {text}\n")["key"]
    assert back == value
    assert repr(back) == repr(value)  # True is no 1, and 1.0 no 1 either


@given(TEXTS, VALUES)
def test_every_key_reads_back(key: str, value: Any) -> None:
    assert tomllib.loads(f"{toml_key(key)} = {toml_value(value)}\n") == {key: value}


@given(st.text(max_size=40))
def test_a_comment_is_one_line_of_no_data(text: str) -> None:
    line = toml_comment(text)
    assert tomllib.loads(f"{line}\nkey = 1\n") == {"key": 1}
    assert len(line.splitlines()) == 1
    line.encode()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, None, {1.5}, [math.inf], {"a": None}, b"x"], ids=repr)
def test_what_toml_cannot_say_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="TOML has no word for"):
        toml_value(value)


def test_half_a_character_becomes_a_question_mark() -> None:
    assert toml_value("a\udc80") == '"a?"'


MANY, RATES = st.integers(1, 1 << 16), st.floats(0, 1000)


def parsed_numbers(text: str) -> ModuleNumbers | None:
    """Numbers of modules of any size."""
    return ModuleNumbers.parse(text, lambda _: True)


PLAN_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "pp": MANY,
    "dp": MANY,
    "tp": MANY,
    "cp": MANY,
    "context_layout": st.sampled_from(CONTEXT_LAYOUTS),
    "context_exchange": st.sampled_from(CONTEXT_EXCHANGES),
    "context_groups": MANY,
    "ep": MANY,
    "cuts": st.lists(st.integers(), max_size=6).map(tuple),
    "micro_batch_size": MANY,
    "micro_batches": st.integers(1, 1 << 20),
    "seq_len": st.integers(1, 1 << 20),
    "head_chunk": st.integers(1, 1 << 20),
    "mlp_chunk": st.none() | st.integers(1, 1 << 36),
    "zero": st.integers(0, 3),
    "reduce": st.sampled_from(REDUCTIONS),
    **dict.fromkeys(("view_dtype", "grad_dtype", "grad_shard_dtype"), st.sampled_from(DTYPES)),
    "loss_scale": st.none() | st.floats(2.0**-32, 2.0**32),
    "schedule": st.none() | st.sampled_from(sorted(SCHEDULES)),
    "seed": st.integers(0, (1 << 63) - 1),
    "lr": RATES,
    "betas": st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    "eps": st.floats(1e-30, 1),
    "weight_decay": RATES,
    "warmup_steps": st.integers(0, 1 << 40),
    "total_steps": st.none() | st.integers(1, 1 << 40),
    "min_lr": RATES,
    "decay": st.sampled_from(DECAYS),
    "decay_steps": st.none() | st.integers(1, 1 << 40),
    "clip": st.sampled_from(CLIPS),
    "max_norm": st.floats(0, 1e30, exclude_min=True),
    "mapping": st.none() | st.sampled_from(("chip 1x4, node 2x8", "a 1x1")).map(RankMapping.parse),
    "attention": st.sampled_from(ATTENTIONS),
    "method": st.sampled_from(METHODS),
    "rank": st.integers(1, 1 << 16),
    "alpha": st.floats(0, 1e6, exclude_min=True),
    "rslora": st.booleans(),
    "base": st.sampled_from((AS_VIEWS, *FROZEN_FORMATS)),
    "targets": st.sampled_from((ALL_LINEAR, "q_proj", "q_proj, mlp.down_proj", r"re:.*\.(q|v)_pro[j\"'],?")),
    "rank_pattern": st.none()
    | st.sampled_from(("q_proj 4, mlp.down_proj 32", r".*\.[0-3]\.(q|v)_proj{1,2} 1")).map(parsed_numbers),
    "alpha_pattern": st.none()
    | st.sampled_from((r"^.*\"up.* 1e-07, q 0.1, v 1000000", "k_proj 3")).map(parsed_numbers),
    "modules_to_save": st.sampled_from(("", "lm_head, embed_tokens")),
    "freeze": st.sampled_from(("", "model.embed_tokens.*, *.mlp.*")),
    "attention_mask": st.sampled_from(ATTENTION_MASKS),
    "logits": st.sampled_from(LOGITS),
    "chunks": st.integers(1, 256),
    "layout": st.sampled_from(LAYOUTS),
    "slices": st.lists(st.integers(1, 1 << 20), max_size=5).map(tuple),
    "sequence_sharding": st.booleans(),
    "zero_blocks": st.none() | st.sampled_from(("embed 3, mlp.* 2, attention.0-3 1", "head 0")).map(ZeroLevels.parse),
    "shard_group": st.none() | st.integers(2, 1 << 16),
    "view_group": st.none() | st.integers(2, 1 << 16),
    "gather_quantised": st.none() | st.sampled_from(tuple(FORMATS)),
    "reduce_quantised": st.none() | st.just("int8-block"),
    "accumulate": st.sampled_from(ACCUMULATIONS),
    "balance_loss": RATES,
    "z_loss": RATES,
    "dispatch": st.sampled_from(DISPATCHES),
    "capacity_factor": st.none() | st.floats(1e-3, 100),
    "bias_update": st.floats(0, 1),
}
"""Values that each key of a plan may hold."""


def test_all_keys_of_a_plan_are_tried() -> None:
    assert PLAN_VALUES.keys() == KEYS.keys.keys()


@given(st.data())
@pytest.mark.parametrize("name", PLAN_VALUES)
def test_every_value_of_a_key_is_read_back_from_its_word(name: str, data: st.DataObject) -> None:
    value, key = data.draw(PLAN_VALUES[name]), KEYS.keys[name]
    plan = Plan(pp=2, dp=2, cuts=(1,), micro_batch_size=1, micro_batches=4, seq_len=8)
    part = next(
        (part for part in ("optimizer", "router", "experts", "training") if hasattr(getattr(plan, part), name)), None
    )
    changed = evolve(plan if part is None else getattr(plan, part), **{name: value})
    words = KEYS.words(changed if part is None else evolve(plan, **{part: changed}))
    if name not in words:
        assert value in (None, ()) or key.not_in_file(changed)
        return
    back = tomllib.loads(f"{name} = {words[name]}\n")
    report = Report()
    values = KEYS.without_words(back)
    read = key.read(FieldReader(values, report, "RT063"), name, None)
    report.check()
    assert (read, type(read)) == (value, type(value))


PLAN = Plan(pp=2, dp=2, cuts=(1,), micro_batch_size=1, micro_batches=4, seq_len=8, tp=2, sequence_sharding=False)


def test_a_plan_text_is_read_back_before_it_is_given_out() -> None:
    text = plan_to_toml(PLAN)
    assert checked_plan_text(text, PLAN) == text
    assert checked_plan_text(text.replace("cuts = [1]", 'cuts = "auto"'), PLAN)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("sequence_sharding = false", "sequence_sharding = False", "sequence_sharding = False"),
        ("sequence_sharding = false\n", "", "'parallel.sequence_sharding' is read back as None, not as false"),
        ("seq_len = 8", "seq_len = 9", "'batch.seq_len' is read back as 9, not as 8"),
        ("eps = 1e-08", "eps = inf", "'optimizer.eps'"),
        ("[parallel]", "# a comment\rof two lines\n[parallel]", "# a comment"),
    ],
)
def test_a_plan_text_that_says_something_else_is_never_given_out(old: str, new: str, named: str) -> None:
    text = plan_to_toml(PLAN)
    assert old in text
    with pytest.raises(DiagnosticError, match="RT011") as caught:
        checked_plan_text(text.replace(old, new), PLAN)
    assert named in str(caught.value)
    assert "nothing was written" in str(caught.value)
