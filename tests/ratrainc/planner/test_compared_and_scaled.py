"""`ratrainc compare --plan auto` and `ratrainc scale`: a plan searched for each strategy, and for each number of clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.training import WHOLE, Training
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.choices.plan_choices import PlanChoice, SearchEffort
from ratrain.ratrainc.cli import main
from tests.ratrainc.planner.small_requests import SMALL, TINY, TINY_PLAN

if TYPE_CHECKING:
    from ratrain.ratrainc.console.progress import Progress


def test_a_comparison_of_planned_strategies_leaves_out_those_without_a_shape(capsys):
    """On one cluster there are no two stages to have chunks."""
    words = ["compare", *TINY, "--plan", "auto", "--clusters", "1", "--global-batch", "1", "--seq-len", "64"]
    words += ["--seconds", "0", "--jobs", "1", "--json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    names = {row["name"] for row in json.loads(shown.out)["strategies"]}
    assert {"ratrain", "seq1f1b", "zb-h1"} <= names
    assert not names & {"interleaved", "zb-v", "v-half"}
    assert "left out: zb-v" in shown.err
    assert main([*words, "--strategies", "ratrain,zb-v"]) == 1
    assert "RT064" in capsys.readouterr().err


def test_compare_gives_each_strategy_its_best(capsys):
    words = ("compare", *SMALL, "--plan", "auto", "--strategies", "tuned-1f1b,baseline-1f1b,ratrain", "--json")
    assert main(list(words)) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    assert rows["tuned-1f1b"]["step_seconds"] == rows["baseline-1f1b"]["step_seconds"]
    assert rows["tuned-1f1b"]["speedup"] == 1.0
    assert rows["ratrain"]["speedup"] >= 1.0
    assert rows["ratrain"]["plan"]["pp"] >= 1


def test_a_stopped_comparison_goes_on_from_its_results(tmp_path, capsys):
    kept = tmp_path / "compared.jsonl"
    words = ["compare", *TINY, "--plan", TINY_PLAN, "--json", "--results", str(kept)]
    assert main([*words, "--strategies", "ratrain"]) == 0
    first = json.loads(capsys.readouterr().out)["strategies"][0]
    assert main([*words, "--strategies", "ratrain,full-save"]) == 0
    assert json.loads(capsys.readouterr().out)["strategies"][0] == first
    assert [json.loads(line)["id"] for line in kept.read_text().splitlines()] == ["ratrain", "full-save"]


def test_results_of_a_comparison_go_with_a_plan_and_are_nothing_else(tmp_path, capsys):
    kept = tmp_path / "compared.jsonl"
    kept.write_text("something else\n")
    assert main(["compare", *TINY, "--plan", TINY_PLAN, "--results", str(kept)]) == 1
    assert "RT002" in capsys.readouterr().err
    searched = ["--plan", "auto", "--clusters", "1", "--global-batch", "1"]
    assert main(["compare", *TINY, *searched, "--results", str(kept)]) == 2
    assert "--results" in capsys.readouterr().err


def test_compare_tells_each_strategy_as_soon_as_its_figures_are_there(capsys):
    """One line each, in order, before the next is begun; a progress that says how many there are, and JSON alone on stdout."""
    heard: list[Progress] = []
    found = api.compare(TINY[1], TINY_PLAN, progress=heard.append)
    lines = [now.text for now in heard if now.stays]
    assert [line.partition(":")[0] for line in lines] == [row["name"] for row in found.rows]
    assert {now.total for now in heard} == {len(found.rows)}
    assert [now.done for now in heard if now.stays] == list(range(1, len(found.rows) + 1))
    for line, row in zip(lines, found.rows, strict=True):
        assert ("a step, highest peak" in line) == row["fits"]
    assert main(["compare", *TINY, "--plan", TINY_PLAN, "--strategies", "ratrain,full-save", "--json"]) == 0
    shown = capsys.readouterr()
    assert [row["name"] for row in json.loads(shown.out)["strategies"]] == ["ratrain", "full-save"]
    assert [line.partition(":")[0] for line in shown.err.splitlines()] == ["ratrain", "full-save"]


def test_searches_of_compare_say_how_long_all_may_take_and_what_each_found():
    heard: list[Progress] = []
    names = ["tuned-1f1b", "baseline-1f1b", "ratrain"]
    effort = SearchEffort(seconds=1.5)
    api.compare_best(TINY[1], 2, 4, seq_len=32, strategies=names, effort=effort, progress=heard.append)
    first, *found = [now.text for now in heard if now.stays]
    # of the two with the same passes one is searched, and ratrain is searched once
    assert first == "2 searches of about 1.50 s at most each: 3.00 s in all"
    own, common = found[:3], found[3:]
    assert [line.partition(":")[0] for line in own] == ["ratrain", "tuned-1f1b", "baseline-1f1b"]
    assert [line.partition(":")[0].split(", ")[1] for line in common] == names
    assert {text.partition(",")[0] for now in heard if (text := now.text).startswith("search ")} == {
        "search 1 of 2",
        "search 2 of 2",
    }


def test_compare_has_all_on_one_plan_first(capsys):
    """Each as it is on a plan file of the same plan, with the speed-ups of the strategies alone."""
    words = ("compare", *SMALL, "--plan", "auto", "--strategies", "baseline-1f1b,zero3")
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    common = facts["on_one_plan"]
    assert common["best_for"] == "ratrain"
    assert [row["name"] for row in common["strategies"]] == ["baseline-1f1b", "zero3"]
    assert all("plan" not in row for row in common["strategies"])
    assert common["strategies"][0]["speedup"] == 1.0
    one, own = (rows[0]["step_seconds"] for rows in (common["strategies"], facts["strategies"]))
    assert own <= one * (1 + 1e-9), "its own best plan is no worse for it than another's"
    assert common["plan"]["pp"] >= 1
    assert main([*words]) == 0
    shown = capsys.readouterr().out
    assert shown.index("all on the best plan of ratrain, P") < shown.index("each on its best plan")


@pytest.mark.parametrize("training", [Training("lora", rank=4), Training(freeze="model.layers.*.mlp.*"), WHOLE])
def test_compare_gives_each_strategy_the_plan_that_a_search_for_it_alone_finds(training: Training) -> None:
    """With what trains as in the plan that they are like, its types too."""
    plan = parse_plan(Path(TINY_PLAN).read_text("utf-8"), file="P.toml", model=load_model(TINY[1]))
    like = evolve(plan, training=training)
    names, effort = ["baseline-1f1b", "ratrain", "zero3"], SearchEffort(exhaustive=True)
    found = api.compare_best(TINY[1], 2, 4, seq_len=32, strategies=names, like=like, effort=effort)
    assert found.common is not None
    assert [row["name"] for row in found.common["strategies"]] == names
    for name, row in zip(names, found.rows, strict=True):
        alone = api.plan(TINY[1], 2, 4, seq_len=32, plans=PlanChoice(strategy=name, like=like), effort=effort)
        best = alone.answer.best
        assert best is not None
        assert best.plan.training == training
        assert row["plan"] == best.to_json(2), name
        assert row["step_seconds"] == best.seconds


def test_compare_leaves_out_strategies_that_cannot_be_like_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of another schedule, with backwards in halves of what trains in part, with slices of held scores."""
    like = tmp_path / "like.toml"
    words = ["compare", *TINY, "--plan", "auto", "--clusters", "2", "--global-batch", "4", "--seq-len", "32"]
    words += ["--like", str(like), "--seconds", "0", "--jobs", "1", "--json"]
    text = Path(TINY_PLAN).read_text("utf-8")
    cases = {
        'schedule = "1f1b"\n': "zb-h1",
        'attention = "scores-kept"\n': "seq1f1b",
        '[train]\nmethod = "lora"\nrank = 4\n': "zb-h1",
    }
    for said, other in cases.items():
        section = {"schedule": "parallel", "attention": "compute"}.get(said.split()[0])
        head = f"[{section}]\n" if section else ""
        own = text.replace(head, head + said) if head in text and head else f"{text}\n{head}{said}"
        like.write_text(own, "utf-8")
        assert main(words) == 0, said
        shown = capsys.readouterr()
        names = {row["name"] for row in json.loads(shown.out)["strategies"]}
        assert "ratrain" in names
        assert other not in names
        assert other in shown.err
        assert main([*words, "--strategies", f"ratrain,{other}"]) == 1
        assert "RT064" in capsys.readouterr().err


def test_compare_is_like_a_plan_only_where_it_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *TINY, "--plan", TINY_PLAN, "--like", TINY_PLAN]) == 2
    assert "--like goes with --plan auto" in " ".join(capsys.readouterr().err.split())


def test_compare_says_what_a_strategy_lacks(capsys):
    words = (
        "compare",
        "--model",
        "llama-2-70b",
        "--plan",
        "auto",
        "--clusters",
        "8",
        "--global-batch",
        "8",
        "--seconds",
        "1",
    )
    assert main([*words, "--jobs", "1", "--strategies", "ratrain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["on_one_plan"] is None
    row = found["strategies"][0]
    assert not row["fits"]
    assert row["speedup"] is None
    assert row["peak_bytes"] > found["capacity_bytes"]


def test_tuned_is_the_baseline_on_a_given_plan(capsys):
    words = ("compare", *TINY, "--plan", TINY_PLAN, "--strategies", "baseline-1f1b,tuned-1f1b")
    assert main(list(words)) == 0
    assert "on a given plan tuned-1f1b is baseline-1f1b" in capsys.readouterr().out


@pytest.mark.parametrize("fixed", [False, True])
def test_scale(capsys, fixed):
    words = [
        "scale",
        *TINY,
        "--clusters",
        "2,4",
        "--sequences-per-cluster",
        "4",
        "--json",
    ]
    searched = ["--seq-len", "128", "--seconds", "1", "--jobs", "1"]
    assert main([*words, *(["--plan", TINY_PLAN] if fixed else searched)]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [p["clusters"] for p in points] == [2, 4]
    assert points[0]["efficiency"] == 1.0
    assert all(p["tokens_per_second"] == pytest.approx(4 * p["clusters"] * 128 / p["step_seconds"]) for p in points)
    assert points[1]["efficiency"] == pytest.approx(points[1]["tokens_per_second"] / 2 / points[0]["tokens_per_second"])


@pytest.mark.parametrize(("strategy", "level"), [("ratrain", 2), ("zero3", 3)])
def test_scale_keeps_the_plan_but_for_what_the_strategy_sets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str, level: int
) -> None:
    """Its ZeRO level, where there is more than one replica; one alone shards nothing, and has nobody to reduce with."""
    plan = tmp_path / "p.toml"
    text = Path(TINY_PLAN).read_text("utf-8")
    plan.write_text(
        text.replace("zero = 1", "zero = 2").replace('reduce = "last"', 'reduce = "each-micro-batch"'), "utf-8"
    )
    words = ("scale", *TINY, "--clusters", "2,4", "--sequences-per-cluster", "4", "--plan", str(plan))
    assert main([*words, "--strategy", strategy, "--json"]) == 0
    plans = [point["plan"] for point in json.loads(capsys.readouterr().out)["points"]]
    assert [each["dp"] for each in plans] == [1, 2]
    assert [each["zero"] for each in plans] == [0, level]
    assert [each["reduce"] for each in plans] == ["last", "each-micro-batch"]


def scaled(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    usual = ("scale", *TINY, "--clusters", "2,4", "--sequences-per-cluster", "2", "--seq-len", "64", "--jobs", "1")
    assert main([*usual, *words, "--json"]) == 0
    points: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return points


@pytest.mark.parametrize("levels", [{0}, {3}, {1, 2}])
def test_scale_searches_among_the_zero_levels_it_is_given(capsys: pytest.CaptureFixture[str], levels: set[int]) -> None:
    points = scaled(capsys, "--seconds", "0", "--zero", ",".join(map(str, levels)))
    for point in points:
        plan = point["plan"]
        assert plan["zero"] in (levels if plan["dp"] > 1 else {0, *levels})
    assert any(point["plan"]["dp"] > 1 for point in points)


def test_scale_goes_on_until_nothing_is_left_to_gain_if_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    for point in scaled(capsys, "--exhaustive", "--zero", "1"):
        assert point["bound_step_seconds"] == pytest.approx(point["step_seconds"])


def test_scale_takes_the_dtypes_of_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wide = tmp_path / "wide.toml"
    state = '[state]\nview_dtype = "f32"\nloss_scale = 1.0\n'
    wide.write_text(
        f"[parallel]\npp = 1\ndp = 2\n[batch]\nmicro_batch_size = 1\nmicro_batches = 2\nseq_len = 64\n{state}"
    )
    words = ("--seconds", "0", "--zero", "1")
    usual, like = scaled(capsys, *words), scaled(capsys, *words, "--like", str(wide))
    assert all(b["step_seconds"] > a["step_seconds"] for a, b in zip(usual, like, strict=True))


def test_scale_gives_each_cluster_as_much_as_the_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    plan = parse_plan(Path(TINY_PLAN).read_text(), file="P.toml", model=load_model(TINY[1]))
    own = plan.global_batch / plan.clusters
    words = ("scale", *TINY, "--clusters", f"{plan.clusters},{2 * plan.clusters}", "--plan", TINY_PLAN)
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences_per_cluster"] == own
    assert [point["global_batch"] for point in found["points"]] == [plan.global_batch, 2 * plan.global_batch]
    assert main([*words]) == 0
    assert f"weak scaling, {own:g} sequences a cluster" in capsys.readouterr().out


def test_scale_counts_tensor_parallel_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "P.toml"
    plan.write_text(Path(TINY_PLAN).read_text().replace("[parallel]", "[parallel]\ntp = 2"), "utf-8")
    assert main(["scale", *TINY, "--clusters", "8", "--plan", str(plan), "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["plan"]["pp"] * point["plan"]["dp"] * point["plan"]["tp"] == 8
    assert main(["scale", *TINY, "--clusters", "2", "--plan", str(plan)]) == 1
    assert "a multiple of 4 clusters" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_scale_draws(tmp_path, kind):
    out = tmp_path / f"curve.{kind}"
    words = ["scale", *TINY, "--clusters", "2,4", "--plan", TINY_PLAN, "--plot", str(out)]
    assert main(words) == 0
    assert out.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_scale_refuses_stages_that_do_not_go_round(capsys):
    assert main(["scale", *TINY, "--clusters", "3", "--plan", TINY_PLAN]) == 1
    assert "do not divide evenly" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["curve.pdf", "curve"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_search(name, capsys):
    assert main(["scale", "--model", "missing", "--clusters", "2,4", "--plot", name]) == 1
    assert ".png or .svg" in capsys.readouterr().err
