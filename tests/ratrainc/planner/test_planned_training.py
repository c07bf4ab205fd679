"""Plans of adapters and frozen parameters: what is searched, what is left out, and the plan files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.module_patterns import ModuleNumbers
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.choices.plan_choices import PlanChoice, SearchEffort
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.choices.timed_plan import TimedPlan, time_plan
from ratrain.ratrainc.functions.planning import compare, pareto, plan, smallest, what_if
from ratrain.ratrainc.planner.bounds.cuts import best_cuts, cuts_of
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.bounds.shape_columns import Columns
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate
from ratrain.ratrainc.planner.space.search_setting import SearchSetting
from ratrain.ratrainc.planner.space.space import Shape, template
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


def test_a_plan_in_which_nothing_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match="left to train"):
        searched(written(Training(freeze="*"), tmp_path))


UNLIKE = {
    "upper half": Training(freeze="model.embed_tokens.*, model.layers.[0-2].*"),
    "first layer frozen": Training(freeze="model.layers.0.*"),
    "ends alone": Training(freeze="model.layers.*"),
    "adapters of the last layer": Training(method="lora", rank=4, targets=r"re:.*\.layers\.5\..*_proj", base="nf4"),
    "adapters of other ranks": Training(
        method="lora", rank=4, rank_pattern=ModuleNumbers(((r"layers\.[01]\..*", 64),))
    ),
}


@pytest.mark.parametrize("training", UNLIKE)
@pytest.mark.sampled(2)
def test_layers_that_do_not_train_alike_are_planned(training: str, tmp_path: Path) -> None:
    """The plan has the simulated time and peak that it says, no bound is above it, and its cuts fit what trains."""
    model = evolve(MODEL, layers=6)
    answer = searched(written(UNLIKE[training], tmp_path), model)
    answer.save(str(tmp_path / "found.toml"))
    found = load_plan(str(tmp_path / "found.toml"), model)
    assert found.training == UNLIKE[training]
    timed = time_plan(model, found, answer.passes, load_machine("mt3000"))
    assert isinstance(timed, TimedPlan)
    assert timed.figures.step_seconds == pytest.approx(answer.best.seconds)
    assert answer.answer.bound_seconds <= answer.best.seconds
    assert answer.answer.relaxed_bound_seconds <= answer.best.seconds


def test_cuts_give_stages_that_only_go_forward_more_layers() -> None:
    """Of 8 layers 4 only go forward: best cuts of two stages are those of the work, and the bound is near the step."""
    model, machine = evolve(MODEL, layers=8, hidden_size=256, ffn_size=704, head_dim=64), load_machine("mt3000")
    training = Training(freeze="model.embed_tokens.*, model.layers.[0-3].*")
    named = strategy("ratrain")
    setting = SearchSetting(model, machine, evolve(template(32), head_chunk=8, training=training), named.passes)
    shape = Shape(2, 1, 1, 8, 0, "last")
    best = best_cuts(Columns.of(Profiles(setting), [shape]))
    assert best.layers == (5, 3)
    steps = {
        layers: evaluate(Task(model, shape.plan(setting, cuts_of(layers, shape)), named.passes, machine)).step_seconds
        for layers in [(3, 5), (4, 4), (5, 3), (6, 2)]
    }
    assert min(steps, key=steps.__getitem__) == best.layers
    assert 0.9 * steps[best.layers] < best.seconds <= steps[best.layers]


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
