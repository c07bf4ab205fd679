"""A field of a plan is declared once: read, printed, refused when it is wrong, and never half declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import field, fields, frozen

from ratrain.ratrain_ir.config import plan as plan_module
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch, RouterLosses
from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.plan import KEYS, Optimizer, Plan
from ratrain.ratrain_ir.config.plan_keys import integer, integer_or_none, key, part, table_of
from ratrain.ratrain_ir.config.plan_text import plan_to_toml, plan_words
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.support.toml_text import parse_toml

BASE = """\
[parallel]
pp = 1
dp = 1
cuts = []

[batch]
micro_batch_size = 1
micro_batches = 8
seq_len = 32
"""


@frozen
class WiderPlan(Plan):
    """A plan with fields that there are not."""

    tensor_ranks: int = field(default=1, metadata=key("parallel", "ranks that share a product", integer(1, 8)))
    slices: int | None = field(
        default=None, metadata=key("slicing", "parts of a sequence", integer_or_none(1, 64), none_word="whole")
    )


def read(text: str) -> tuple[WiderPlan, list[str]]:
    """The plan of a TOML text, and what is wrong with it."""
    table, report = table_of(WiderPlan), Report()
    reader = FieldReader(table.flat(parse_toml(text), report), report, "RT063", table.labels)
    return table.read(reader), [item.message for item in report.diagnostics.errors]


def test_a_declared_field_is_read() -> None:
    plan, errors = read(BASE.replace("pp = 1", "tensor_ranks = 4\npp = 1") + '[slicing]\nslices = "whole"\n')
    assert not errors
    assert (plan.tensor_ranks, plan.slices) == (4, None)
    plan, errors = read(BASE + "[slicing]\nslices = 2\n")
    assert not errors
    assert (plan.tensor_ranks, plan.slices) == (1, 2)


def test_a_declared_field_is_printed() -> None:
    plan = WiderPlan(1, 1, (), 1, 8, 32, zero=0, tensor_ranks=2)
    text = plan_to_toml(plan)
    assert "[parallel]\npp = 1\ndp = 1\ncuts = []\ntensor_ranks = 2\n" in text
    assert '[slicing]\nslices = "whole"\n' in text
    assert read(text) == (plan, [])
    assert plan_words(plan)["tensor_ranks"] == "2"


def test_a_declared_field_stands_in_the_header() -> None:
    plan = WiderPlan(1, 1, (), 1, 8, 32, zero=0, tensor_ranks=2)
    header = plan.to_fields()
    assert (header["tensor_ranks"], header["slices"]) == (2, None)
    assert list(header).index("slices") < list(header).index("lr"), "the fields of parts come last"
    assert table_of(WiderPlan).read(FieldReader(header, Report(), "RT064")) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            BASE.replace("pp = 1", "tensor_ranks = 9\npp = 1"),
            "'parallel.tensor_ranks' is 9: a whole number from 1 to 8 is expected",
        ),
        (BASE + "tensor_ranks = 2\n", 'the key "tensor_ranks" is not known in [batch]'),
        (BASE + "[slicing]\nslice = 2\n", 'the key "slice" is not known in [slicing]'),
    ],
)
def test_a_declared_field_is_refused_when_it_is_wrong(text: str, message: str) -> None:
    assert read(text)[1] == [message]


def test_a_table_has_the_fields_of_its_class_and_no_more() -> None:
    own = {item.name for item in fields(Plan)} - {"optimizer", "router", "experts", "training"}
    parts = {item.name for part in (Optimizer, RouterLosses, ExpertDispatch, Training) for item in fields(part)}
    assert set(KEYS.own) == own
    assert set(KEYS.keys) == set(KEYS.labels) == own | parts
    assert list(KEYS.sections) == ["parallel", "batch", "state", "compute", "numerics", "optimizer", "experts", "train"]
    assert [name for names in KEYS.sections.values() for name in names] == list(KEYS.labels)


UNREADABLE = "which its reader refuses"


@pytest.mark.parametrize(
    ("metadata", "default", "what"),
    [
        ({}, 3, "declares neither a key of the plan nor a part of it"),
        (key("", "turns", integer(0, 9)), 3, "declares no section"),
        (key("batch", "", integer(0, 9)), 3, "declares no changes"),
        (key("batch", "turns", integer(0, 2)), 3, UNREADABLE),
        (key("batch", "turns", integer(0, 9)), None, UNREADABLE),
        (key("batch", "turns", integer_or_none(0, 9)), 3, UNREADABLE),
        (key("batch", "turns", integer(0, 9), text=lambda value: -value), 3, UNREADABLE),
    ],
)
def test_an_incomplete_declaration_is_refused_by_name(metadata: dict[str, Any], default: Any, what: str) -> None:
    @frozen
    class HalfDeclared(Plan):
        turns: Any = field(default=default, metadata=metadata)

    with pytest.raises(TypeError, match=rf"the field 'turns' of HalfDeclared .*{what}"):
        table_of(HalfDeclared)


def test_two_fields_of_one_name_are_refused() -> None:
    @frozen
    class Twice(Plan):
        second: Optimizer = field(default=Optimizer(), metadata=part(Optimizer))

    with pytest.raises(TypeError, match=r"'lr'.* of Twice.second are those of Twice too"):
        table_of(Twice)


def test_the_module_of_plans_cannot_be_imported_with_an_incomplete_declaration() -> None:
    text = Path(plan_module.__file__).read_text(encoding="utf-8")
    exec(compile(text, "plan.py", "exec"), {"__name__": "whole"})
    place = "    seed: int = field("
    assert text.count(place) == 1
    broken = text.replace(place, f"    turns: int = field(default=3)\n{place}")
    with pytest.raises(TypeError, match="the field 'turns' of Plan declares neither"):
        exec(compile(broken, "plan.py", "exec"), {"__name__": "broken"})
