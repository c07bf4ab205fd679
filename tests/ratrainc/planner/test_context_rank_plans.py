"""Plans with context ranks: which are searched, what is said of them, and that files and other questions keep them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan_keys import CONTEXT_LAYOUTS, ZIGZAG
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.plan_choices import LONG_SEQUENCE
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.choices.timed_plan import time_plan
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds
from ratrain.ratrainc.planner.bounds.cuts import cuts_of
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.bounds.shape_columns import Columns
from ratrain.ratrainc.planner.search.plan_evaluation import evaluate
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import quick_answer
from ratrain.ratrainc.planner.space.search_setting import SearchSetting
from ratrain.ratrainc.planner.space.space import Shape, template
from ratrain.ratrainc.planner.space.units import LAYER
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.commands.tiny_llama import CONFIG, facts, printed
from tests.ratrainc.planner.small_requests import MODEL, every_candidate, small_request

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

PLAN = """
[parallel]
pp = 1
dp = 1
cp = 2
context_layout = "{layout}"
[batch]
micro_batches = 2
micro_batch_size = 1
seq_len = 16
[state]
view_dtype = "f32"
loss_scale = 1.0
"""
SIZE = ("--clusters", 4, "--seq-len", 16, "--global-batch", 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and plans of two context ranks, in each layout."""
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    for layout in CONTEXT_LAYOUTS:
        said = PLAN if layout != ZIGZAG else PLAN.replace('context_layout = "{layout}"\n', "")
        (tmp_path / f"{layout}.toml").write_text(said.format(layout=layout))
    return tmp_path


def of_contexts(request: PlanRequest) -> set[int]:
    """The numbers of context ranks of a request's shapes."""
    shapes = request.shapes()
    assert all(shape.clusters <= request.clusters for shape in shapes)
    return {shape.cp for shape in shapes}


def test_short_sequences_are_shared_out_only_where_that_is_asked_for() -> None:
    """The others take no longer to search; long ones are cut into each number of equal runs that divides the clusters."""
    request = small_request(clusters=6, batch=2)
    assert of_contexts(request) == {1}
    assert of_contexts(evolve(request, contexts=(1, 3, 4), seq_len=48, plan_template=template(48))) == {1, 3, 4}
    long = evolve(request, seq_len=LONG_SEQUENCE, plan_template=template(LONG_SEQUENCE))
    assert of_contexts(long) == {1, 2}, "3 and 6 ranks cut no power of two into equal runs"
    assert of_contexts(evolve(long, plan_template=template(LONG_SEQUENCE - 1), seq_len=LONG_SEQUENCE - 1)) == {1}
    assert of_contexts(evolve(long, contexts=(1,))) == {1}


def test_ranks_that_nobody_asked_for_have_many_tokens_each_and_one_sequence_in_a_micro_batch() -> None:
    request = evolve(small_request(clusters=16, batch=2), seq_len=LONG_SEQUENCE, plan_template=template(LONG_SEQUENCE))
    assert of_contexts(request) == {1, 2, 4, 8}
    assert {(shape.cp > 1, shape.micro_batch_size) for shape in request.shapes()} == {(False, 1), (False, 2), (True, 1)}
    asked = evolve(request, contexts=(16,))
    assert {(shape.cp, shape.micro_batch_size) for shape in asked.shapes()} == {(16, 1), (16, 2)}


@pytest.mark.parametrize(
    ("contexts", "changes", "text"),
    [
        ((8,), {}, "8 context ranks take more than the 6 clusters"),
        ((3,), {}, "3 context ranks cut a sequence of 32 tokens into 6 equal runs"),
        (
            (2,),
            {
                "strategy": strategy("seq1f1b"),
                "plan_template": evolve(template(32), cp=2, context_exchange="heads"),
            },
            "cuts sequences into slices, over which context ranks do not exchange heads",
        ),
        (
            (2,),
            {"strategy": strategy("seq1f1b"), "plan_template": evolve(template(32), cp=2, context_groups=2)},
            "cuts sequences into slices, over which context ranks do not gather keys in groups",
        ),
        (
            (2,),
            {"plan_template": evolve(template(32), cp=2, context_groups=2), "peers": (2,)},
            "context_groups = 2 of the plan to be like shares out the heads of no rank that is asked for",
        ),
        (
            (2,),
            {"plan_template": evolve(template(32), cp=2, context_exchange="heads"), "peers": (4,), "clusters": 8},
            'context_exchange = "heads" of the plan to be like shares out the heads of no rank that is asked for',
        ),
        ((2,), {"plan_template": evolve(template(32), attention="scores-kept")}, "holds the scores of whole sequences"),
        ((4,), {"peers": (2,)}, "2 tensor-parallel x 4 context ranks take 8 of 6 clusters"),
        ((2,), {"model": in_family(MODEL, "olmo2"), "peers": (2,)}, "so they do not go with context ranks"),
    ],
    ids=str,
)
def test_context_ranks_that_no_plan_can_have_are_refused(contexts, changes, text) -> None:
    request = evolve(small_request(clusters=6, batch=2), contexts=contexts, **changes)
    with pytest.raises(DiagnosticError, match=text):
        request.shapes()


def test_context_ranks_exchange_heads_where_these_can_be_shared_out_and_sequences_are_whole() -> None:
    request = evolve(small_request(name="seq1f1b", clusters=8, batch=2), contexts=(1, 2, 4), peers=(1, 2))
    sliced = {(shape.cp > 1, shape.slices > 1, shape.exchange) for shape in request.shapes()}
    assert sliced == {(False, True, "keys"), (True, True, "keys")}
    request = evolve(request, strategy=strategy("baseline-1f1b"))
    found = {(shape.tp, shape.cp, shape.exchange) for shape in request.shapes()}
    assert {(tp, cp) for tp, cp, exchange in found if exchange == "heads"} == {
        (tp, cp) for tp in (1, 2) for cp in (2, 4) if not MODEL.heads // tp % cp
    }
    asked = evolve(request, plan_template=evolve(template(32), cp=2, context_exchange="heads"))
    assert {shape.exchange for shape in asked.shapes() if shape.cp > 1} == {"heads"}
    alibi = evolve(request, model=evolve(MODEL, position="alibi"))
    assert {shape.exchange for shape in alibi.shapes()} == {"keys"}


def test_keys_are_gathered_in_groups_where_these_divide_them_and_sequences_are_whole() -> None:
    """One group, the fewest, and one a head; no search has others, slices, or slopes of single heads."""
    model = evolve(MODEL, heads=8, kv_heads=8, head_dim=8)
    request = evolve(small_request(name="seq1f1b", clusters=8, batch=2), contexts=(1, 2), peers=(1, 2, 8), model=model)
    assert {shape.groups for shape in request.shapes()} == {1}
    request = evolve(request, strategy=strategy("baseline-1f1b"))
    found = {(shape.tp, shape.cp, shape.exchange, shape.groups) for shape in request.shapes()}
    assert {(tp, groups) for tp, cp, exchange, groups in found if (cp, exchange) == (2, "keys")} == {
        *((1, groups) for groups in (1, 2, 8)),
        *((2, groups) for groups in (1, 2, 4)),
    }
    assert {groups for _, cp, exchange, groups in found if cp == 1 or exchange == "heads"} == {1}
    asked = evolve(request, plan_template=evolve(template(32), cp=2, context_groups=4))
    assert {(shape.exchange, shape.groups) for shape in asked.shapes() if shape.cp > 1} == {("keys", 4)}
    alibi = evolve(request, model=evolve(model, position="alibi"))
    assert {shape.groups for shape in alibi.shapes()} == {1}
    six = evolve(request, model=evolve(model, heads=6, kv_heads=6), peers=(1, 2))
    assert {(s.tp, s.groups) for s in six.shapes()} == {(1, 1), (1, 2), (1, 6), (2, 1), (2, 3)}


def test_keys_are_gathered_in_groups_where_only_these_fit() -> None:
    """The keys of long sequences are what a rank holds; the answer says what the other ways lack."""
    model = evolve(MODEL, layers=1, kv_heads=MODEL.heads, vocab_size=64)
    request = small_request(name="baseline-1f1b", clusters=3, batch=1)
    chunked = evolve(template(1536), head_chunk=8, mlp_chunk=8)
    # three ranks do not share out four heads
    request = evolve(request, contexts=(3,), peers=(1,), model=model, seq_len=1536, plan_template=chunked)
    least = {
        groups: min(
            max(found.peak_bytes)
            for task in every_candidate(request)
            if task.plan.context_groups == groups and (found := evaluate(task))
        )
        for groups in (1, 4)
    }
    capacity = float((least[1] + least[4]) // 2)
    answer = Search(evolve(request, machine=with_constants(request.machine, {"ddr_capacity": capacity}))).run()
    assert answer.best is not None
    assert answer.best.plan.context_groups > 1
    assert f"C3g{answer.best.plan.context_groups}" in answer.best.shape.summary
    shown = {row.text: row.reason for row in answer.rejected_plans}
    assert re.search("lacks at least|not placed|slower", shown["C3 with keys"])
    assert "C3 with keys in 4 groups" in shown or answer.best.plan.context_groups == 4


def test_heads_are_exchanged_where_that_moves_fewer_bytes() -> None:
    """Keys have as many heads as queries: of four ranks each moves half the bytes, and links are slow."""
    model = evolve(MODEL, kv_heads=MODEL.heads)
    request = evolve(small_request(name="baseline-1f1b", clusters=4, batch=1), contexts=(4,), peers=(1,), model=model)
    answer = Search(evolve(request, machine=with_constants(request.machine, NEAR))).run()
    assert answer.best is not None
    assert answer.best.plan.context_exchange == "heads"
    (reason,) = [row.reason for row in answer.rejected_plans if row.text == "C4 with keys"]
    assert "slower" in reason


def test_ranks_that_norm_together_have_context_ranks_alone() -> None:
    request = evolve(small_request(clusters=4, batch=2), contexts=(1, 2), model=in_family(MODEL, "olmo2"))
    ranks = {(shape.tp, shape.cp) for shape in request.shapes()}
    assert ranks >= {(1, 1), (1, 2), (2, 1)}
    assert (2, 2) not in ranks


@pytest.mark.parametrize("capacity", [8e6, 2.6e6])
def test_the_choice_is_that_of_brute_force(capacity: float) -> None:
    """Bounds with keys, exchanges and replicas of context ranks rule out no plan that is better."""
    request = small_request(name="baseline-1f1b", clusters=2, batch=2, capacity=capacity)
    request = evolve(request, contexts=(1, 2), peers=(1,))
    answer = Search(request).run()
    every = [evaluate(task) for task in every_candidate(request)]
    assert answer.best is not None
    assert answer.best.seconds == min(found.step_seconds for found in every if found.step_seconds is not None)
    assert answer.proven
    assert quick_answer(request).bound <= answer.bound
    shown = {row.text for row in answer.rejected_plans}
    assert f"C{3 - answer.best.shape.cp}" in shown


def test_a_step_of_one_sequence_is_shared_out_by_its_tokens() -> None:
    """Replicas have nothing to do, and stages wait for one another: context ranks win, and the answer says by what."""
    request = evolve(small_request(name="baseline-1f1b", clusters=4, batch=1), contexts=(1, 2, 4), peers=(1,))
    slow = with_constants(request.machine, {"fp16_peak": 1e8})
    answer = Search(evolve(request, machine=slow)).run()
    assert answer.best is not None
    assert answer.best.plan.cp == 4
    (reason,) = [row.reason for row in answer.rejected_plans if row.text == "C1"]
    assert "slower" in reason
    assert "exchanges" in reason


NEAR = {"link_bandwidth": 1e8, "link_latency": 0.0, "launch": 0.0, "fp16_peak": 1e11, "collective_chunk": 4096.0}
"""Constants under which exchanges take as long as compute."""


@pytest.mark.parametrize("layout", CONTEXT_LAYOUTS)
@pytest.mark.parametrize("name", ["baseline-1f1b", "ratrain"])
def test_bounds_of_context_ranks_are_near_what_is_found(name: str, layout: str) -> None:
    """No more of exchanges is counted than the engine has, and hardly less; gathers for the backward may be saved."""
    machine, named, model = with_constants(load_machine(None), NEAR), strategy(name), evolve(MODEL, layers=4)
    shape, layers = Shape(2, 1, 2, 16, 0, "last", cp=4), (2, 2)
    setting = SearchSetting(model, machine, evolve(template(64), context_layout=layout, head_chunk=8), named.passes)
    plan = shape.plan(setting, cuts_of(layers))
    assert (plan.cp, plan.context_layout, plan.replicas) == (4, layout, 4)
    timed = time_plan(model, plan, named.passes, machine)
    profiles = Profiles(setting)
    columns = Columns.of(profiles, [shape])
    engine = shape.micro_batches * model.layers * profiles.exchange(shape).engine[LAYER]
    busy = sum(timed.timeline.busy_seconds(stage, Engine.TENSOR) for stage in range(2))
    assert (0.95 if name == "baseline-1f1b" else 0.6) * busy < engine <= busy * (1 + 1e-9)
    bound = plan_bounds(columns, np.array([layers], float)).seconds[0]
    assert 0.75 * timed.figures.step_seconds < bound <= timed.figures.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("name", ["baseline-1f1b", "zb-h1"])
def test_bounds_on_bytes_have_the_keys_of_all_context_ranks(name: str, micro_batches: int, groups: int) -> None:
    """Keys of a layer and the parts of their gradients, while its scores go back; a rank's own keys of every layer.

    Of keys in groups those of one, and what the heads made.
    """
    machine, named = with_constants(load_machine(None), {"collective_chunk": 4096.0}), strategy(name)
    model = evolve(MODEL, layers=4, kv_heads=4, vocab_size=64)
    shape, layers = Shape(2, 1, 1, micro_batches, 1, "last", cp=4, groups=groups), (2, 2)
    setting = SearchSetting(model, machine, evolve(template(1024), head_chunk=8, mlp_chunk=8), named.passes)
    timed = time_plan(model, shape.plan(setting, cuts_of(layers)), named.passes, machine)
    columns = Columns.of(Profiles(setting), [shape], schedule=named.schedule or "1f1b")
    rows, width = 1024, model.heads * model.head_dim
    whole = 2 * rows * width * (2 + 4) // groups  # keys and values in f16, and in f32 the parts of their gradients
    assert columns.attention_scores[0] > whole
    keys, inputs = 2 * rows // 4 * width * 2, rows // 4 * model.hidden_size * 2
    if groups > 1:  # the heads' output, and the log-sum-exp of each query
        keys += rows // 4 * (width * 2 + model.heads * 4)
    assert columns.held.ravel().tolist() == [0, inputs + keys, 0]
    without = evolve(
        columns, attention_scores=0 * columns.attention_scores, held=columns.held * inputs / (inputs + keys)
    )
    peaks = [plan_bounds(each, np.array([layers], float)).peak_bytes[0] for each in (without, columns)]
    assert peaks[0][0] + 0.75 * whole < peaks[1][0]
    assert (peaks[0] <= peaks[1]).all()
    assert (peaks[1] <= timed.peak_bytes).all()
    assert named.schedule == "zb-h1" or (peaks[1] > 0.7 * np.array(timed.peak_bytes)).all()


@pytest.mark.parametrize("layout", CONTEXT_LAYOUTS)
def test_a_plan_to_be_like_keeps_its_context_ranks(
    layout: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be asked for anew; what is written is read back, compiled as it stands, and scaled."""
    model, like, best = folder / "m.json", folder / f"{layout}.toml", folder / "best.toml"
    search = ("plan", "--model", model, *SIZE, "--quick", "--like", like, "--json")
    found = facts(capsys, *search, "-o", best)["plans"]
    assert {plan["cp"] for plan in found} == {2}
    read = load_plan(best, load_model(str(model)))
    assert (read.cp, read.context_layout) == (2, layout)
    assert "cp = 2  # context ranks" in best.read_text()
    words = ("--model", model, "--plan", best)
    stages = facts(capsys, "compile", *words, "-o", folder / "best.rtx", "--json")["stages"]
    assert max(stage["peak_live_bytes"] for stage in stages) == found[0]["peak_bytes"]
    for asked, numbers in (("1", {1}), ("4", {4}), ("1,4", {1, 4})):
        chosen = {plan["cp"] for plan in facts(capsys, *search, "--cp", asked)["plans"]}
        assert chosen
        assert chosen <= numbers


def test_a_plan_to_be_like_keeps_its_groups_of_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under other numbers of context ranks too; tensor-parallel ranks with fewer key heads have none."""
    like, best = folder / "groups.toml", folder / "best.toml"
    like.write_text((folder / f"{ZIGZAG}.toml").read_text().replace("cp = 2", "cp = 2\ncontext_groups = 2"))
    search = ("plan", "--model", folder / "m.json", *SIZE, "--quick", "--like", like)
    for asked, numbers in (((), {2}), (("--cp", 4), {4})):
        found = facts(capsys, *search, *asked, "--json", "-o", best)["plans"]
        assert {(plan["cp"], plan["context_groups"]) for plan in found} == {(number, 2) for number in numbers}
    assert load_plan(best, load_model(str(folder / "m.json"))).context_groups == 2
    assert "g groups of key heads" in printed(capsys, *search)


def test_other_questions_are_answered_for_context_ranks_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, like = folder / "m.json", ("--like", folder / f"{ZIGZAG}.toml")
    search = ("plan", "--model", model, "--seq-len", 16)
    assert "C2" in printed(capsys, *search, "--clusters", 4, "--smallest", *like)
    assert facts(capsys, *search, "--clusters", 4, "--smallest", *like, "--json")["clusters"] == 2
    few = ("--clusters", 4, "--global-batch", 2, "--quick")
    front = facts(capsys, *search, *few, *like, "--pareto", "clusters", "--json")
    assert {each["cp"] for each in front["points"]} == {2}
    scaled = facts(
        capsys,
        "scale",
        "--model",
        model,
        "--clusters",
        "2,4",
        "--seq-len",
        16,
        "--sequences-per-cluster",
        2,
        "--seconds",
        0,
        *like,
        "--json",
    )
    assert {point["plan"]["cp"] for point in scaled["points"]} == {2}


def test_the_option_says_what_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--model", folder / "m.json", *SIZE, "--quick")
    assert "'x' is not a list of numbers of context ranks like 1,2,4" in printed(capsys, *words, "--cp", "x", code=2)
    text = printed(capsys, *words, "--cp", "2")
    assert "context ranks, b sequences" in text or "context ranks that exchange heads, b sequences" in text
    fixed = ("scale", "--model", folder / "m.json", "--clusters", 2, "--plan", folder / f"{ZIGZAG}.toml")
    assert "is for a search: with --plan there is none" in printed(capsys, *fixed, "--cp", "2", code=2)


def test_a_plan_that_does_not_fit_without_them_says_that_they_were_not_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", "--model", folder / "m.json", *SIZE, "--quick", "--capacity", "20KB")
    said = printed(capsys, *words, code=1)
    assert "2 or 4 context ranks, which share the tokens of a sequence, were not looked at" in said
    assert "--cp 1,2,4" in said
    assert "were not looked at" not in printed(capsys, *words, "--cp", "1,2,4", code=1)


def test_advice_keeps_context_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compile", "--model", folder / "m.json", "--plan", folder / f"{ZIGZAG}.toml", "--capacity", "20KB")
    said = printed(capsys, *words, code=1)
    assert "bounds on bytes rule out all of them" in said
    assert "2 clusters fits" in " ".join(said.split())
