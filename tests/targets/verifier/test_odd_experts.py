"""Numbers of experts that no model and no plan can have, in texts and in programs: each is named, none falls over."""

from __future__ import annotations

import json
import re

import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.mutation.subjects import SUBJECTS
from tests.targets.verifier.test_broken_programs import container, header_of

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
