"""Numbers of experts that no model and no plan can have, in texts and in programs: each is named, none falls over."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import make_plan
from tests.end_to_end.toys import SOME_EXPERTS
from tests.mutation.subjects import SUBJECTS
from tests.targets.verifier.test_broken_programs import container, header_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.program.program import Program

SUBJECT = SUBJECTS["p2-d1-zb-h1-shared-expert"]
MODEL_FIELDS = ("experts", "experts_per_token", "expert_size", "shared_expert_size")
PLAN_FIELDS = ("balance_loss", "z_loss")
NUMBERS = ("-1", "1000000000", "1" + "0" * 400, "1e30", "nan", '"3"', "true", "[3]")
"""No number of experts, no factor of a loss."""
OTHERS = dict.fromkeys(MODEL_FIELDS, (*NUMBERS, "0", "2.5", "none", "7.0", "6")) | dict.fromkeys(
    PLAN_FIELDS, (*NUMBERS, "none")
)
CASES = [(field, value) for field, values in OTHERS.items() for value in values]


@pytest.mark.parametrize(("field", "value"), CASES, ids=lambda each: each[:12])
@pytest.mark.sampled(9)
def test_an_odd_number_in_a_text_is_refused_by_name(field: str, value: str) -> None:
    """A number that another model could have contradicts the tensors of this one."""
    text, count = re.subn(rf"\b{field} = [^,}}\s]+", f"{field} = {value}", print_module(SUBJECT.module()), count=1)
    assert count == 1
    with pytest.raises(DiagnosticError) as raised:
        check(parse_module(text, file="odd.rtir"))
    named = f"'{field}'", f"a token cannot go to {value} of", "%w.mlp.0 is f16"
    assert any(words in raised.value.diagnostics[0].message for words in named)


@pytest.mark.parametrize("field", MODEL_FIELDS)
def test_a_field_of_experts_that_is_left_out_of_a_text_is_asked_for(field: str) -> None:
    text = re.sub(rf", {field} = \d+", "", print_module(SUBJECT.module()), count=1)
    with pytest.raises(DiagnosticError, match=f"'{field}' is missing"):
        parse_module(text, file="odd.rtir")


@pytest.mark.parametrize(("field", "value"), [*CASES, ("router_normalised", "false"), ("balance_loss", "0.2")])
@pytest.mark.sampled(9)
def test_an_odd_number_in_a_program_is_refused_by_name(field: str, value: str) -> None:
    head, columns = header_of(program_bytes(SUBJECT.program()))
    words = {"nan": "NaN", "none": "null"}
    head["plan" if field in PLAN_FIELDS else "model"][field] = json.loads(words.get(value, value))
    with pytest.raises(DiagnosticError) as raised:
        check_program(parse_program(container(head, columns), "odd.rtx"))
    named = f"'{field}'", f"a token cannot go to {value} of", "%w.mlp.0 is f16", "is not the one of this op"
    assert any(words in raised.value.diagnostics[0].message for words in named)


def test_options_of_a_router_that_are_none_are_refused() -> None:
    data = program_bytes(SUBJECT.program())
    for option in ("balance", "z", "denominator", "normalise"):
        for value in (-1, 10**400, 1e30, "3", [3], None, {}, 0.0):
            head, columns = header_of(data)
            steps = [step for routine in head["routines"] for step in routine["steps"]]
            next(step for step in steps if step["kernel"] == "route_backward")["options"][option] = value
            with pytest.raises(DiagnosticError, match="RT080"):
                check_program(parse_program(container(head, columns), "odd.rtx"))


ODD_KINDS = ("", "eee", "ddd", "ed", "deee", "edw", "edd", None, 3, ["e", "d", "e"])
"""Kinds of layers that the module has not, or that no model has."""


@pytest.mark.parametrize("kinds", ODD_KINDS, ids=str)
def test_odd_kinds_of_layers_in_a_program_are_refused_by_name(kinds: object) -> None:
    head, columns = header_of(program_bytes(some_layers()))
    assert head["model"]["mlp_kinds"] == "dee"
    head["model"]["mlp_kinds"] = kinds
    with pytest.raises(DiagnosticError) as raised:
        check_program(parse_program(container(head, columns), "odd.rtx"))
    named = "'mlp_kinds'", "%w.mlp.", "%p.mlp."
    assert any(words in raised.value.diagnostics[0].message for words in named)


@pytest.mark.parametrize("name", ["mlp.0", "mlp.1", "mlp.2", "attention.1"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_layer_that_a_model_of_both_kinds_has_not_is_refused(name: str, everywhere: bool) -> None:
    """In a text and in a program: nothing asks such a layer for its kind before."""
    other, text = f"{name.partition('.')[0]}.9", print_module(some_layers_module())
    changed = re.sub(rf"\b{re.escape(name)}\b", other, text, count=0 if everywhere else 1)
    with pytest.raises(DiagnosticError):
        check(parse_module(changed, file="odd.rtir"))
    head, columns = header_of(program_bytes(some_layers()))
    words = json.dumps(head)
    changed = words.replace(name, other) if everywhere else words.replace(f'"{name}"', f'"{other}"')
    assert changed != words
    with pytest.raises(DiagnosticError):
        check_program(parse_program(container(json.loads(changed), columns), "odd.rtx"))


@cache
def some_layers_module() -> Module:
    return api.compile(SOME_EXPERTS, make_plan(SOME_EXPERTS, pp=1, cuts=(), dp=4, ep=2, zero=3, micro_batches=2))


@cache
def some_layers() -> Program:
    return api.emit(some_layers_module())
