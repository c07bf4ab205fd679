"""Plans whose replicas share out experts: which are searched, what is said of them, and that other questions keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.choices.timed_plan import time_plan
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds
from ratrain.ratrainc.planner.bounds.cuts import cuts_of
from ratrain.ratrainc.planner.bounds.order_bounds import order_seconds
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.bounds.shape_columns import Columns
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import quick_answer
from ratrain.ratrainc.planner.space.search_setting import SearchSetting
from ratrain.ratrainc.planner.space.space import Shape, template, with_dtype
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.commands.tiny_llama import CONFIG, facts, printed
from tests.ratrainc.planner.small_requests import MODEL, SLOW, every_candidate, small_request

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

EXPERTS = in_family(MODEL, "mixtral", experts=4, experts_per_token=2, router_normalised=True)
PLAN = """
[parallel]
pp = 1
dp = 2
ep = 2
[batch]
micro_batches = 1
micro_batch_size = 1
seq_len = 16
[state]
view_dtype = "f32"
loss_scale = 1.0
"""
SIZE = ("--clusters", 4, "--seq-len", 16, "--global-batch", 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with experts and a plan of two expert ranks."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = CONFIG | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} | sizes
    (tmp_path / "m.json").write_text(json.dumps(config))
    (tmp_path / "like.toml").write_text(PLAN)
    return tmp_path


def of_experts(**changes: object) -> PlanRequest:
    """A small request for a model with four experts."""
    return evolve(small_request(name="baseline-1f1b", clusters=6, batch=12), **{"model": EXPERTS} | changes)


def test_replicas_share_out_experts_where_there_are_some() -> None:
    """Every number that divides them, as far as clusters go; ranks of a group are replicas that compute alone."""
    shapes = of_experts().shapes()
    assert {shape.ep for shape in shapes} == {1, 2, 4}
    assert all(shape.dp % shape.ep == 0 and shape.clusters <= 6 for shape in shapes)
    assert {(shape.tp, shape.cp, shape.slices) for shape in shapes if shape.ep > 1} == {(1, 1, 1)}
    assert {shape.tp for shape in shapes} >= {1, 2}
    assert {shape.ep for shape in of_experts(expert_ranks=(1, 4)).shapes()} == {1, 4}
    assert {shape.ep for shape in small_request(clusters=6, batch=12).shapes()} == {1}


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "seq1f1b"])
def test_schedules_with_halves_or_slices_have_none(name: str) -> None:
    request = of_experts(strategy=strategy(name), clusters=4, model=evolve(EXPERTS, layers=5))
    assert {shape.ep for shape in request.shapes()} == {1}
    request = evolve(request, expert_ranks=(2,))
    with pytest.raises(DiagnosticError, match=r"replicas share out"):
        request.shapes()
    assert request.left_out("1f1b") is request.left_out("interleaved") is None


@pytest.mark.parametrize(
    ("numbers", "changes", "text"),
    [
        ((8,), {}, "8 expert ranks take more than the 6 clusters"),
        ((3,), {}, "3 expert ranks do not share out 4 experts evenly"),
        ((2,), {"model": MODEL}, "ep = 2 shares out experts, which small has not"),
        ((2,), {"peers": (2,)}, "2 expert ranks do not go with tensor-parallel or context ranks"),
        ((2, 4), {"global_batch": 3}, "groups of 2 or 4 replicas that share out experts do not share out 3 sequences"),
        ((2,), {"plan_template": evolve(template(32), training=Training(freeze="*embed*"))}, "are not built"),
    ],
    ids=str,
)
def test_expert_ranks_that_no_plan_can_have_are_refused(numbers, changes, text) -> None:
    with pytest.raises(DiagnosticError, match=text):
        of_experts(expert_ranks=numbers, **changes).shapes()


@pytest.mark.parametrize("capacity", [16e6, 5.6e6])
def test_the_choice_is_that_of_brute_force(capacity: float) -> None:
    """Bounds with shared out experts rule out no plan that is better, and the answer says why others lost."""
    machine = with_constants(load_machine(None), SLOW | {"ddr_capacity": capacity})
    request = of_experts(clusters=2, global_batch=2, peers=(1,), machine=machine)
    answer = Search(request).run()
    every = [evaluate(task) for task in every_candidate(request)]
    assert answer.best is not None
    assert answer.best.seconds == min(found.step_seconds for found in every if found.step_seconds is not None)
    assert answer.proven
    assert quick_answer(request).bound <= answer.bound
    (reason,) = [row.reason for row in answer.rejected_plans if row.text == f"E{3 - answer.best.plan.ep}"]
    assert "slower" in reason or "does not fit" in reason


def test_few_tokens_go_to_experts_and_not_experts_to_tokens() -> None:
    """Rows of a short step are fewer bytes than what replicas gather and reduce of the experts."""
    request = of_experts(clusters=4, global_batch=4, peers=(1,))
    answer = Search(request).run()
    assert answer.best is not None
    assert answer.best.plan.ep == 4
    shown = {row.text: row.reason for row in answer.rejected_plans}
    assert "slower" in shown["E1"]
    assert "exchanges -" in shown["E1"]
    assert {text for text in shown if text.startswith("E")} == {"E1", "E2"}


def test_a_template_that_drops_rows_gives_its_capacity_to_plans_that_send_some() -> None:
    given = evolve(template(32), experts=ExpertDispatch("capacity", 1.5))
    setting = SearchSetting(EXPERTS, load_machine(None), given, strategy("ratrain").passes)
    for ranks in (1, 2):
        plan = Shape(1, 2, 1, 1, 0, "last", ep=ranks).plan(setting, ())
        check_plan(plan, EXPERTS)
        assert plan.experts == (given.experts if ranks > 1 else ExpertDispatch())
        assert setting.shaped(dp=ranks, ep=ranks).experts == plan.experts


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        *((name, ExpertDispatch()) for name in ("baseline-1f1b", "ratrain", "interleaved")),
        *(("ratrain", ExpertDispatch("capacity", factor)) for factor in (0.5, 2.0)),
    ],
)
def test_bounds_of_expert_ranks_are_near_what_is_found(name: str, experts: ExpertDispatch) -> None:
    """So is the engine that exchanges rows, for the forward and anew for the backward."""
    near = {"link_bandwidth": 1e8, "link_latency": 0.0, "launch": 0.0, "fp16_peak": 1e11, "collective_chunk": 4096.0}
    machine, named, model = with_constants(load_machine(None), near), strategy(name), evolve(EXPERTS, layers=4)
    chunks = 2 if name == "interleaved" else 1
    shape, layers = Shape(2, 4, 2, 16, 0, "last", chunks=chunks, ep=2), (2, 2)
    setting = SearchSetting(model, machine, evolve(template(64), head_chunk=8, experts=experts), named.passes)
    plan = shape.plan(setting, cuts_of(layers, shape))
    assert (plan.ep, plan.summary) == (2, shape.summary)
    timed = time_plan(model, plan, named.passes, machine)
    profiles = Profiles(setting)
    columns = Columns.of(profiles, [shape], schedule=named.schedule or "1f1b")
    engine = shape.micro_batches * model.layers * profiles.exchange(shape).engine[1]
    busy = sum(timed.timeline.busy_seconds(stage, Engine.TENSOR) for stage in range(2))
    assert 0.95 * busy < engine <= busy * (1 + 1e-9)  # all of it, but for passes that share the bandwidth of DDR
    bounds = plan_bounds(columns, np.array([layers], float))
    seconds = max(bounds.seconds[0], order_seconds(columns, np.array([layers], float))[0])
    assert (
        (0.75 if chunks == 1 else 0.7) * timed.figures.step_seconds < seconds <= timed.figures.step_seconds * (1 + 1e-9)
    )
    assert (bounds.peak_bytes[0] <= timed.peak_bytes).all()
    # rows are kept where bytes are left, which no bound counts
    again = time_plan(model, plan, keeping_nothing(named.passes), machine).peak_bytes
    assert (bounds.peak_bytes[0] <= again).all()
    assert (bounds.peak_bytes[0] > 0.8 * np.array(again)).all()


def keeping_nothing(passes: str) -> str:
    """Return a pipeline that exchanges rows again for every backward."""
    pipeline = parse_pipeline(passes)
    keepers = (JointOrderPass, RecomputePass)
    again = [
        evolve(each, gathered="again") if isinstance(each, keepers) and each.policy == "auto" else each
        for each in pipeline
    ]
    return pipeline_text(again)


def test_a_published_model_has_the_step_and_bytes_that_bounds_allow() -> None:
    """Qwen3-30B-A3B, 8 replicas to each set of experts: state of an eighth of these, and of all of the rest."""
    model, machine, named = load_model("qwen3-30b-a3b"), load_machine("h100-node"), strategy("ratrain")
    setting = SearchSetting(model, machine, with_dtype(template(4096), "bf16"), named.passes)
    shape = Shape(1, 16, 2, 1, 2, "each-micro-batch", ep=8)
    found = evaluate(Task(model, shape.plan(setting, ()), named.passes, machine))
    assert found.step_seconds is not None
    profiles = Profiles(setting)
    bounds = plan_bounds(Columns.of(profiles, [shape]), np.array([[model.layers]], float))
    assert 0.8 * found.step_seconds < bounds.seconds[0] <= found.step_seconds * (1 + 1e-9)
    again = evaluate(Task(model, shape.plan(setting, ()), keeping_nothing(named.passes), machine))
    assert 0.7 * again.peak_bytes[0] < bounds.peak_bytes[0][0] <= again.peak_bytes[0] < found.peak_bytes[0]
    assert model.experts is not None
    experts = 48 * 3 * 768 * 2048 * model.experts // 8
    state = profiles.state(shape).carried
    # an eighth of the experts: views whole, masters and moments by the two replicas that hold the same ones
    assert state @ (1, model.layers, 1) == pytest.approx(experts * (2 + 12 / 2) + 1.54e9 * (2 + 12 / 16), rel=0.02)


def test_a_plan_to_be_like_keeps_its_expert_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They may be asked for anew; what is written is read back and compiled as it stands."""
    model, best = folder / "m.json", folder / "best.toml"
    search = ("plan", "--model", model, *SIZE, "--quick", "--like", folder / "like.toml", "--json")
    found = facts(capsys, *search, "-o", best)["plans"]
    assert {plan["ep"] for plan in found} == {2}
    assert load_plan(best, load_model(str(model))).ep == 2
    assert "ep = 2  # replicas that share out the experts" in best.read_text()
    words = ("--model", model, "--plan", best)
    stages = facts(capsys, "compile", *words, "-o", folder / "best.rtx", "--json")["stages"]
    assert max(stage["peak_live_bytes"] for stage in stages) == found[0]["peak_bytes"]
    assert {plan["ep"] for plan in facts(capsys, *search, "--ep", "1,4")["plans"]} <= {1, 4}


def test_other_questions_are_answered_for_expert_ranks_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, like = folder / "m.json", ("--like", folder / "like.toml")
    search = ("plan", "--model", model, "--seq-len", 16)
    assert facts(capsys, *search, "--clusters", 4, "--smallest", *like, "--json")["clusters"] == 2
    front = facts(
        capsys, *search, "--clusters", 4, "--global-batch", 4, "--quick", *like, "--pareto", "clusters", "--json"
    )
    assert {each["ep"] for each in front["points"]} == {2}
    scale = ("scale", "--model", model, "--clusters", "2,4", "--sequences-per-cluster", 2)
    scaled = facts(capsys, *scale, "--seq-len", 16, "--seconds", 0, *like, "--json")
    assert {point["plan"]["ep"] for point in scaled["points"]} == {2}
    fixed = facts(capsys, *scale, "--plan", folder / "like.toml", "--json")
    assert [point["plan"]["dp"] for point in fixed["points"]] == [2, 4]
    said = printed(capsys, "scale", "--model", model, "--clusters", 3, "--plan", folder / "like.toml", code=1)
    assert "use a multiple of 2 clusters" in said


def test_the_option_says_what_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--model", folder / "m.json", *SIZE, "--quick")
    assert "'x' is not a list of numbers of expert ranks like 1,2,4" in printed(capsys, *words, "--ep", "x", code=2)
    assert "E replicas that share out experts" in printed(capsys, *words, "--ep", "2")
    fixed = ("scale", "--model", folder / "m.json", "--clusters", 2, "--plan", folder / "like.toml")
    assert "is for a search: with --plan there is none" in printed(capsys, *fixed, "--ep", "2", code=2)


def test_a_search_of_families_names_those_that_cannot_have_them() -> None:
    machine = with_constants(load_machine(None), SLOW)
    request = planning_request(EXPERTS, 4, 4, 32, machine=machine, whole=True)
    request = evolve(request, expert_ranks=(2,))
    assert set(request.families_left_out) == {"zb-h1", "zb-v", "v-half", "v-min", "seq1f1b"}
    answer = quick_answer(request)
    assert answer.best is not None
    assert answer.best.plan.ep == 2


def test_advice_keeps_expert_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compile", "--model", folder / "m.json", "--plan", folder / "like.toml", "--capacity", "20KB")
    assert "bounds on bytes rule out all of them" in printed(capsys, *words, code=1)


def test_a_plan_that_does_not_fit_is_not_told_of_ranks_that_do_not_go_with_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", "--model", folder / "m.json", *SIZE, "--quick", "--capacity", "20KB")
    assert "--cp 1,2,4" in printed(capsys, *words, code=1)
    assert "were not looked at" not in printed(capsys, *words, "--ep", "2", code=1)
