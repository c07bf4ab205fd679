"""Attention with whole score matrices, and a head with whole logits: programs that verify, hold what they say, and train alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.plan_text import check_plan, plan_to_toml
from ratrain.ratrain_ir.model.blocks import block
from ratrain.ratrain_ir.model.slots import saved_slots, scores_type
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.choices.levers import CompileSetting, levers_of
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.plan_choices import PlanChoice
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.ratrainc.planner.search.quick import estimated
from ratrain.targets.codegen.routines import RoutineForm, derived_routine
from ratrain.targets.machine.cost import routine_work
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan, make_program, same_bits, state, train
from tests.end_to_end.toys import UNEVEN

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program

STRATEGIES = ("ratrain", "full-save", "zb-h1", "zero3")
UNFUSED = ("scores-kept", "scores-recomputed")
GROUPED = evolve(UNEVEN, family="mistral", sliding_window=4)
F32 = {"view_dtype": "f32"}


def test_models_have_grouped_heads_and_a_window() -> None:
    assert GROUPED.heads > GROUPED.kv_heads
    assert GROUPED.sliding_window == 4


@pytest.mark.parametrize("attention", UNFUSED)
@pytest.mark.parametrize("kernels", [pytest.param("fast", marks=pytest.mark.full), "reference"])
def test_training_is_that_of_fused_attention_but_for_rounding(kernels: str, attention: str) -> None:
    for dtype, tolerance in (("f32", 1e-6), ("f16", 1e-4)):
        keys: dict[str, Any] = {"model": GROUPED, "view_dtype": dtype}
        fused = losses(train(make_program(**keys), 4, kernels=kernels))
        whole = losses(train(make_program(**keys, attention=attention), 4, kernels=kernels))
        np.testing.assert_allclose(whole, fused, rtol=tolerance)
        assert whole != fused, "other kernels round in other places"


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_whole_logits_are_one_chunk_of_all_rows_bit_for_bit(kernels: str) -> None:
    whole = train(make_program(logits="whole"), 4, kernels=kernels)
    chunk = train(make_program(head_chunk=20), 4, kernels=kernels)
    assert losses(whole) == losses(chunk)
    same_bits(whole, chunk)


@pytest.mark.parametrize(
    ("attention", "name"),
    [
        pytest.param(attention, name, marks=[pytest.mark.full] * ((i + j) % 2))
        for i, attention in enumerate(UNFUSED)
        for j, name in enumerate(STRATEGIES)
    ],
)
def test_strategies_train_the_same_bits_under_one_plan(attention: str, name: str) -> None:
    expected = outcome("full-save", attention)
    assert outcome(name, attention) == expected


def outcome(name: str, attention: str) -> tuple[list[float], dict[str, bytes]]:
    """Losses, and the master weights that every rank ends with."""
    run = train(make_program(GROUPED, name, zero=3, attention=attention, logits="whole"), 3)
    masters = {key: array.tobytes() for key, array in state(run).items() if ".p." in key}
    assert masters
    return losses(run), masters


def bytes_held(model: ModelConfig, keys: dict[str, Any]) -> list[int]:
    """The highest live bytes of each stage, where everything is saved and reductions need little."""
    machine = with_constants(load_machine(None), {"collective_chunk": 64})
    module = api.compile(model, make_plan(model, **keys), machine=machine, passes=strategy("full-save").passes)
    program = api.emit(module, machine=machine)
    check_program(program, machine)
    return [stage.peak_live_bytes for stage in program.stages]


def test_kept_matrices_are_held_from_forward_to_backward() -> None:
    keys: dict[str, Any] = {"seq_len": 40, "dp": 1, "zero": 0, "micro_batches": 4}
    plan = make_plan(**keys)
    matrix = scores_type(MODEL, plan).nbytes
    logits = 4 * 80 * MODEL.vocab_size
    fused, kept, again, whole = (
        bytes_held(MODEL, keys | changed)
        for changed in ({}, {"attention": "scores-kept"}, {"attention": "scores-recomputed"}, {"logits": "whole"})
    )
    assert (plan.cuts, MODEL.layers) == ((1,), 3)
    in_flight, layers = (2, 1), (1, 2)
    for stage in range(2):
        held = in_flight[stage] * layers[stage] * matrix
        assert kept[stage] - fused[stage] >= held - matrix  # the last one's backward may have been below the peak
        assert kept[stage] > again[stage] or held == matrix
    assert again[0] >= fused[0]
    assert whole[0] == fused[0]
    assert whole[1] - fused[1] >= logits


@pytest.mark.parametrize("policy", ["full", "attention", "mlp", "auto"])
def test_recovery_makes_the_probabilities_again(policy: str) -> None:
    passes = f"place-1f1b,recompute{{policy={policy}}},allocate-ddr"
    module = api.compile(GROUPED, make_plan(GROUPED, attention="scores-kept"), passes=passes)
    program = api.emit(module)
    assert losses(train(program, 2)) == losses(train(make_program(GROUPED, attention="scores-kept"), 2))
    saved = {t.slot for stage in module.stages for op in stage.ops if op.keyword == "forward" for t in op.writes}
    assert ("probs" in saved) == (policy in ("mlp", "auto"))


def steps(keyword: str, kind: str, **keys: Any) -> list[str]:
    """The kernels of a routine."""
    plan = make_plan(**keys)
    slots = tuple(slot.name for slot in saved_slots(MODEL, plan, block(kind, 0)))
    roles = ("dy", "x", *slots, "w", "dx", "g") if keyword == "backward" else ("x", "w", "y", *slots)
    form = RoutineForm(keyword, block(kind, 0), roles, (), accumulates=False)
    return [step.kernel for step in derived_routine(form, MODEL, plan).steps]


def test_the_backward_makes_scores_again_only_where_they_are_not_kept() -> None:
    assert "attention_scores_forward" not in steps("backward", "attention", attention="scores-kept")
    assert "attention_scores_forward" in steps("backward", "attention", attention="scores-recomputed")
    for attention in UNFUSED:
        assert "attention_forward" not in steps("forward", "attention", attention=attention)


def test_scores_cost_their_way_through_memory_and_whole_products() -> None:
    machine = load_machine(None)
    program = make_program(attention="scores-kept", seq_len=40)
    routine = next(each for each in program.routines if each.key == "attention.forward")
    fused = next(each for each in make_program(seq_len=40).routines if each.key == "attention.forward")
    matrix = scores_type(MODEL, program.plan).nbytes
    lse = 4 * MODEL.heads * 80
    by_scores, at_once = routine_work(routine, machine), routine_work(fused, machine)
    # written, read and written by the softmax, read by the second product, which reads v and writes o as the fused kernel does
    assert by_scores.ddr_bytes - at_once.ddr_bytes == pytest.approx(4 * matrix - lse)
    assert by_scores.seconds > at_once.seconds


def test_what_whole_matrices_take_can_be_freed() -> None:
    plan = make_plan(attention="scores-kept", logits="whole")
    changed = {lever.name: lever.apply(CompileSetting(MODEL, plan, "", load_machine(None))) for lever in levers_of(0)}
    plans = {name: setting.plan for name, setting in changed.items() if setting is not None}
    assert plans['attention = "scores-recomputed"'] == evolve(plan, attention="scores-recomputed")
    assert plans['attention = "fused"'] == evolve(plan, attention="fused")
    assert plans['logits = "chunked"'] == evolve(plan, logits="chunked")
    assert "half the head_chunk" not in plans
    usual = [
        lever.name for lever in levers_of(0) if lever.apply(CompileSetting(MODEL, make_plan(), "", load_machine(None)))
    ]
    assert not [name for name in usual if name.startswith(("attention", "logits"))]
    small = with_constants(load_machine(None), {"ddr_capacity": 1e5})
    with pytest.raises(DiagnosticError, match=r'attention = "fused" in the plan; logits = "chunked" in the plan'):
        api.compile(MODEL, plan, machine=small)


def test_the_planner_plans_with_them(tmp_path: Path) -> None:
    like = tmp_path / "p.toml"
    like.write_text(plan_to_toml(make_plan(head_chunk=8, attention="scores-kept", mlp_chunk=6)))
    sizes = (4, 8, 10)
    given = planning_request(MODEL, *sizes, plans=PlanChoice(like=str(like)))
    changed = planning_request(MODEL, *sizes, plans=PlanChoice(like=str(like), logits="whole"))
    alone = planning_request(MODEL, *sizes, plans=PlanChoice(attention="scores-recomputed"))
    keys = [
        (plan.attention, plan.logits, plan.head_chunk, plan.mlp_chunk)
        for plan in (request.setting.template for request in (given, changed, alone))
    ]
    assert keys == [
        ("scores-kept", "chunked", 8, 6),
        ("scores-kept", "whole", 256, 6),
        ("scores-recomputed", "chunked", 256, None),
    ]
    best = estimated(changed).best
    assert best is not None
    check_plan(best.plan, MODEL)
    assert (best.plan.attention, best.plan.logits) == ("scores-kept", "whole")


def test_keys_stand_in_headers_and_files_only_as_they_must() -> None:
    usual, other = make_plan(), make_plan(attention="scores-kept", logits="whole")
    assert not {"attention", "logits"} & usual.to_fields().keys(), "texts from before stay as they are"
    assert (other.to_fields()["attention"], other.to_fields()["logits"]) == ("scores-kept", "whole")
    text = plan_to_toml(other)
    assert '[compute]\nattention = "scores-kept"\nattention_mask = "causal"\nlogits = "whole"\n' in text
    assert "head_chunk" not in text
    assert parse_plan(text, file="p.toml", model=MODEL) == other


def test_a_chunk_beside_whole_logits_is_refused() -> None:
    with pytest.raises(DiagnosticError, match=r"RT064.*head_chunk 8 changes nothing with logits = \"whole\""):
        make_plan(logits="whole", head_chunk=8)


@pytest.mark.parametrize("keys", [{"attention": "whole"}, {"logits": "kept"}, {"attention": 1}], ids=str)
def test_other_words_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(DiagnosticError, match="RT064"):
        make_plan(**keys)


def test_the_tiled_kernels_refuse_whole_scores_before_the_first_step() -> None:
    program: Program = make_program(attention="scores-kept", machine="mt3000-tiles")
    with pytest.raises(DiagnosticError, match="RT093"):
        train(program, 1, kernels="tiled")
