"""The ops in `docs/rtir.md`: every form can be read back, and no op, choice or operand of one is left out."""

from __future__ import annotations

import runpy
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import BLOCK_KINDS
from ratrain.ratrain_ir.model.slots import SPLIT_KINDS
from ratrain.ratrain_ir.ops.base import Engine, Group, Phase
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, AllReduceScalar, ReduceRows, ReduceScatter
from ratrain.ratrain_ir.ops.compute import (
    BLOCK_OPS,
    AddBranch,
    AddBranchBackward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    Project,
    Recompute,
    Release,
    Update,
)
from ratrain.ratrain_ir.ops.context_ranks import Attend, AttendBackward
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, ForwardExperts, Route
from ratrain.ratrain_ir.ops.kinds import FIELDS, OP_CLASSES
from ratrain.ratrain_ir.ops.operands import Candidates, SignatureError
from ratrain.ratrain_ir.ops.signatures import signatures
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

DOCS = Path(__file__).resolve().parents[2] / "docs"
OP_FORMS = runpy.run_path(str(DOCS / "op_forms.py"))
FORMS: dict[str, list[Any]] = OP_FORMS["forms"]()
ALL_FORMS = [form for forms in FORMS.values() for form in forms]

REFUSED = {
    (AllReduce, "group", Group.ALL),  # gradients are of replicas, or of the ends of tied embeddings
    (AllReduce, "group", Group.SHARDS),  # where views are gathered, no gradients meet
    (AllReduceScalar, "group", Group.SHARDS),
    *(
        (cls, "group", group)
        for cls in (AllReduce, AllReduceScalar)
        for group in (Group.VIEWS, Group.PARTS, Group.CONTEXT)
    ),
    *((AllReduceScalar, "group", group) for group in (Group.EXPERTS, Group.COPIES)),
    *(
        (cls, "group", group)
        for cls in (AllGather, ReduceScatter)
        for group in Group
        if group not in (Group.COPIES, Group.SHARDS if cls is AllGather else Group.REPLICAS)
    ),
    (AllReduceScalar, "group", Group.ENDS),  # what one end alone knows is nothing that a step needs
    (ReduceRows, "phase", Phase.FORWARD),  # a sum of the forward names no phase
    (AllReduceScalar, "group", Group.TENSOR),  # nor what the peers of one stage and replica know
    *((Update, "placement", engine) for engine in Engine if engine not in (Engine.COMPUTE, Engine.HOST)),
}
"""Words of a field that the verifier, or the field itself, refuses in this op."""
OF_LAYERS = {
    **dict.fromkeys((Recompute, BackwardInput, BackwardWeight, AddBranch, AddBranchBackward), SPLIT_KINDS),
    **dict.fromkeys((Project, BackwardHeads, Attend, AttendBackward), ("attention",)),
    **dict.fromkeys((Route, ForwardExperts, BackwardExperts), ("mlp",)),
}


OF_CUTS = ("slice", "chunk")
"""Fields that every op of a plan with slices, every message of one with chunks has beside its others: a section of their own."""


@pytest.mark.parametrize("form", ALL_FORMS, ids=lambda form: form.text)
def test_every_form_can_be_read_back(form: Any) -> None:
    step = print_module(lower(OP_FORMS["MODEL"], OP_FORMS["PLAN"]))
    head = step[: step.index("  stage @0 {")]
    lines = "".join(f"    {line}\n" for line in (*form.declarations, form.text))
    module = parse_module(f"{head}  stage @0 {{\n{lines}  }}\n  stage @1 {{\n  }}\n}}\n")
    (op,) = module.stages[0].ops
    assert type(op) is type(form.op)
    assert [tensor.kind for tensor in op.operands] == [tensor.kind for tensor in form.op.operands]
    assert f"\n    {form.text}\n" in print_module(module)


def test_every_op_has_its_forms_in_the_page() -> None:
    page = (DOCS / "rtir.md").read_text()
    for keyword in OP_CLASSES:
        assert FORMS[keyword], keyword
        assert f"| `{keyword}` |" in page
    for form in ALL_FORMS:
        assert f"\n    {form.text}\n" in page, form.text


def test_every_word_a_field_may_have_is_in_a_form() -> None:
    for keyword, cls in OP_CLASSES.items():
        for attribute in FIELDS[cls]:
            if attribute.name in OF_CUTS:
                continue
            values = [getattr(form.op, attribute.name) for form in FORMS[keyword]]
            if attribute.metadata.get("optional"):
                assert attribute.default in values, f"{keyword} without {attribute.name}"
                assert {*values} != {attribute.default}, f"{keyword} with {attribute.name}"
            kinds = [type(value) for value in values if isinstance(value, Enum)]
            missing = {member for kind in kinds for member in kind} - {*values}
            assert all((cls, attribute.name, member) in REFUSED for member in missing), (keyword, missing)


def test_every_kind_of_block_is_in_the_forms_of_what_computes_on_blocks() -> None:
    for cls in BLOCK_OPS:
        kinds = {form.op.block.kind for form in FORMS[cls.keyword]}
        assert kinds == {*OF_LAYERS.get(cls, BLOCK_KINDS)}, cls.keyword


def candidates(form: Any, model: ModelConfig, plan: Plan) -> Candidates:
    """The signatures of a form's op under a plan; none where the op has no meaning under it."""
    try:
        return signatures(form.op, model, plan)
    except SignatureError:
        return ()


def test_every_candidate_of_a_signature_is_in_a_form() -> None:
    """A result that may be written or added to has a form for each."""
    plans = [(model, plan) for _, model, plan in OP_FORMS["plans"]()]
    shape = OP_FORMS["_fields"]
    for form in ALL_FORMS:
        if isinstance(form.op, Release) or (isinstance(form.op, ReduceScatter) and form.op.micro_batch is None):
            continue  # what is reduced once is never added to
        alike = {other.accumulates for other in FORMS[form.op.keyword] if shape(other.op) == shape(form.op)}
        for model, plan in plans:
            assert {accumulates for accumulates, _ in candidates(form, model, plan)} <= alike, form.text


def test_every_optional_operand_is_in_a_form() -> None:
    """Those that are there under some plans only, and the saved slots that may be kept or not."""
    for keyword, forms in FORMS.items():
        shown = {tensor.slot for form in forms for tensor in form.op.operands}
        for form in forms if keyword != Release.keyword else ():
            for _, model, plan in OP_FORMS["plans"]():
                for _, signature in candidates(form, model, plan):
                    roles = (*signature.reads, *signature.writes)
                    optional = {role.name for role in roles if role.optional}
                    assert optional <= shown, (form.text, optional - shown)


def test_what_the_table_by_hand_left_out_is_there() -> None:
    texts = {form.text.partition(" (")[0].rpartition("= ")[2] for form in ALL_FORMS}
    assert "all_reduce_scalar norm all embed+attention.0" in texts
    assert {"all_gather embed m0 forward", "all_gather mlp.0 m0 backward"} <= texts
    recoveries = [form.op for form in FORMS["recompute"]]
    assert any("q" in {tensor.slot for tensor in op.reads} for op in recoveries)


def test_what_chunks_and_slices_add_is_as_a_lowered_step_has_it() -> None:
    """The lines of the section are those of a step that is cut both ways."""
    text = (DOCS / "rtir.md").read_text().partition("\n## Chunks and slices\n")[2].partition("\n## ")[0]
    whole = text.replace("\n        ", " ")
    lines = [line.strip() for line in whole.splitlines() if line.startswith("    ")]
    model = evolve(OP_FORMS["MODEL"], layers=4)
    plan = evolve(OP_FORMS["PLAN"], cuts=(1, 2, 3), chunks=2, slices=(5, 3), zero=1)
    step = print_module(lower(model, plan))
    assert lines
    assert all(f"    {line}\n" in step for line in lines), [line for line in lines if f"    {line}\n" not in step]
    keywords = {line.partition(" (")[0].rpartition("= ")[2].split()[0] for line in lines}
    assert {"send", "recv", "forward", "backward"} <= keywords
