"""Plans of adapters and frozen parameters: what is searched, what is left out, and the plan files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.choices.plan_choices import PlanChoice, SearchEffort
from ratrain.ratrainc.choices.timed_plan import TimedPlan, time_plan
from ratrain.ratrainc.functions.planning import compare, pareto, plan, smallest, what_if
from ratrain.ratrainc.planner.space.space import template
from ratrain.targets.machine.machine import load_machine

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrainc.planner.answer.planned import Planned

MODEL = ModelConfig(
    "small",
    "llama",
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden_size=64,
    ffn_size=160,
    vocab_size=500,
    norm_eps=1e-5,
)
ADAPTERS = Training(method="lora", rank=4, base="nf4")
EFFORT = SearchEffort(seconds=5.0)


@pytest.fixture
def like(tmp_path: Path) -> str:
    """A plan file that trains adapters beside a packed base."""
    return written(ADAPTERS, tmp_path)


def written(training: Training, folder: Path) -> str:
    place = folder / "like.toml"
    place.write_text(plan_to_toml(evolve(template(32), head_chunk=8, training=training)))
    return str(place)


def searched(
    like: str, model: ModelConfig = MODEL, *, clusters: int = 2, effort: SearchEffort = EFFORT, **choices: Any
) -> Planned:
    plans = PlanChoice(like=like, **choices)
    return plan(model, clusters, 8, seq_len=32, machine="mt3000", plans=plans, effort=effort)


def test_the_plan_of_a_search_trains_so_and_reads_back(like: str, tmp_path: Path) -> None:
    answer = searched(like)
    answer.save(str(tmp_path / "found.toml"))
    found = load_plan(str(tmp_path / "found.toml"), MODEL)
    assert found.training == ADAPTERS
    timed = time_plan(MODEL, found, answer.passes, load_machine("mt3000"))
    assert isinstance(timed, TimedPlan)
    assert timed.figures.step_seconds == pytest.approx(answer.best.seconds)
    assert answer.answer.bound_seconds <= answer.best.seconds
    assert answer.answer.relaxed_bound_seconds <= answer.best.seconds
    simulated = [each for each in answer.answer.best_plans if each.evaluation]
    assert len(simulated) > 1
    assert all(each.plan.training == ADAPTERS for each in simulated)


def test_schedules_with_halves_are_left_out_with_the_reason(like: str) -> None:
    left_out = searched(like).to_json()["left_out"]
    assert {*left_out} == {"zb-h1", "zb-v", "v-half", "v-min"}
    assert all("halves" in reason for reason in left_out.values())
    assert "left out: zb-h1" in repr(searched(like, clusters=1))
    with pytest.raises(DiagnosticError, match="backwards in halves"):
        searched(like, schedules=("zb-h1",))
    with pytest.raises(DiagnosticError, match="backwards in halves"):
        searched(like, strategy="zb-h1")


def test_embeddings_without_anything_to_train_have_no_level_of_their_own(like: str, tmp_path: Path) -> None:
    assert not any(each.shape.ends for each in searched(like).answer.candidates)
    whole = written(Training(freeze="*mlp*"), tmp_path)
    ample = SearchEffort(seconds=120.0)  # a short search of a busy machine does not come to all families
    assert any(each.shape.ends for each in searched(whole, effort=ample).answer.candidates)


def test_tensor_ranks_that_take_norms_together_are_left_out(like: str) -> None:
    olmo2 = in_family(MODEL, "olmo2")
    assert {each.shape.tp for each in searched(like, olmo2).answer.candidates} == {1}
    with pytest.raises(DiagnosticError, match="norms of queries and keys"):
        searched(like, olmo2, peers=(2,))
    assert searched(like, peers=(2,)).plan.tp == 2


@pytest.mark.parametrize(
    ("freeze", "text"),
    [("model.layers.0.*", "layers 0 and 1"), ("model.layers.*", "no parameter of a layer"), ("*", "left to train")],
)
def test_layers_that_do_not_train_alike_are_refused(freeze: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match=text):
        searched(written(Training(freeze=freeze), tmp_path))


def test_other_questions_are_answered_for_adapters_too(like: str) -> None:
    plans = PlanChoice(like=like)
    fewest = smallest(MODEL, 2, seq_len=32, machine="mt3000", plans=plans)
    assert (fewest.clusters, fewest.plan.training) == (1, ADAPTERS)
    front = pareto(MODEL, 2, 8, seq_len=32, machine="mt3000", plans=plans, quick=True)
    assert all(each.candidate.plan.training == ADAPTERS for each in front.points)
    answer = searched(like)
    changed = what_if(answer, "link=1GB/s")
    assert "link" in repr(changed)
    compared = compare(MODEL, answer.plan, strategies=("ratrain", "baseline-1f1b"), machine="mt3000")
    assert "baseline-1f1b" in repr(compared)
