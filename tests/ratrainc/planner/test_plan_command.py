"""`ratrainc plan`: what it shows and writes, which questions it refuses, the fewest clusters and the fronts."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from attrs import evolve

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.choices.machine_changes import parse_changes, with_constants
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.facts.slices_note import slices_note
from ratrain.ratrainc.planner.answer import fewest_clusters as fewest
from ratrain.ratrainc.planner.search import quick
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, evaluate
from ratrain.ratrainc.planner.space.variants import leanest
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.planner.small_requests import QUICK, ROOT, SMALL, TINY, TINY_PLAN


def test_a_refusal_names_the_tensor_parallel_ranks_that_were_not_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = (
        "plan",
        *TINY,
        "--clusters",
        "3",
        "--global-batch",
        "4",
        "--seq-len",
        "64",
        "--capacity",
        "1MiB",
        "--quick",
    )
    assert main([*asked]) == 1
    said = " ".join(capsys.readouterr().err.split())
    advice = re.search(r"do not divide 3 clusters were not looked at: '(--tp \S+)' looks at them", said)
    assert advice is not None
    assert main([*asked, *advice[1].split()]) == 1, "they are asked for, and do not fit either"
    assert "were not looked at" not in capsys.readouterr().err


@pytest.mark.parametrize("keys", ["chunks = 2", "slices = 4"])
@pytest.mark.parametrize("name", ["ratrain", "interleaved", "seq1f1b"])
def test_the_shape_of_the_plan_to_be_like_agrees_with_the_strategy(name, keys, tmp_path, capsys):
    path = tmp_path / "P.toml"
    section = "[parallel]" if "chunks" in keys else "[batch]"
    path.write_text(Path(TINY_PLAN).read_text().replace(section, f"{section}\n{keys}"))
    code = main(["plan", *QUICK, "--quick", "--like", str(path), "--strategy", name, "--json"])
    shown = capsys.readouterr()
    agrees = (name, keys) in (("interleaved", "chunks = 2"), ("seq1f1b", "slices = 4"))
    assert code == (0 if agrees else 1), shown.err
    if agrees:
        first = json.loads(shown.out)["plans"][0]
        assert (first["chunks"] > 1, bool(first["slices"])) == (name == "interleaved", name == "seq1f1b")
    else:
        assert f"P.toml:{'5' if 'chunks' in keys else '10'}:1" in shown.err
        assert f"'{name}'" in shown.err


@pytest.mark.parametrize("key", ['[state]\nzero_blocks = "embed 3"', '[numerics]\ngather_quantised = "int8-block"'])
def test_a_plan_to_be_like_says_nothing_that_no_search_has(key, tmp_path, capsys):
    path = tmp_path / "P.toml"
    path.write_text(
        Path(TINY_PLAN).read_text().replace("[state]", key)
        if "[state]" in key
        else f"{Path(TINY_PLAN).read_text()}\n{key}\n"
    )
    assert main(["plan", *QUICK, "--quick", "--like", str(path)]) == 1
    assert f"it cannot keep {key.split()[1]} of this plan" in capsys.readouterr().err


def test_slices_that_are_bound_by_ddr_are_noted(tmp_path, capsys):
    """189 rows of f16 on an MT-3000; a slice of two sequences has twice its tokens."""
    machine = load_machine(None)
    plan = parse_plan(Path(TINY_PLAN).read_text(), file="P.toml", model=load_model(TINY[1]))
    assert "4 of 4 slices" in slices_note(evolve(plan, slices=(32,) * 4), machine)
    long = evolve(plan, seq_len=200, slices=(106, 94))
    assert "1 of 2 slices are bound by DDR" in slices_note(long, machine)
    assert "below 189 rows on mt3000; the shortest has 188" in slices_note(long, machine)
    assert slices_note(evolve(long, slices=(104, 96)), machine) == slices_note(plan, machine) == ""
    path, out = tmp_path / "P.toml", tmp_path / "x.rtir"
    path.write_text(Path(TINY_PLAN).read_text().replace("[batch]", "[batch]\nslices = 4"))
    assert main(["compile", *TINY, "--plan", str(path), "-o", str(out)]) == 0
    assert main(["explain", str(out), "--no-levers"]) == 0
    assert "4 of 4 slices are bound by DDR" in " ".join(capsys.readouterr().out.split())
    one = ("--clusters", "1", "--global-batch", "1", "--seq-len", "64")
    assert main(["plan", *TINY, *one, "--quick", "--strategy", "seq1f1b", "--json"]) == 0
    assert "bound by DDR" in json.loads(capsys.readouterr().out)["notes"][0]


def test_slices_are_not_planned_for_whole_scores(capsys):
    assert main(["plan", *QUICK, "--quick", "--strategy", "seq1f1b", "--attention", "scores-kept"]) == 1
    assert "--attention fused" in capsys.readouterr().err


def test_changes_of_a_machine():
    machine = load_machine(None)
    found = parse_changes("ddr=16GiB, link=7.4GB/s,latency=5us,peak=11.06Tflop/s", machine)
    expected = {"ddr_capacity": 16 * 2.0**30, "link_bandwidth": 7.4e9, "link_latency": 5e-6, "fp16_peak": 11.06e12}
    assert found == pytest.approx(expected)
    assert with_constants(machine, found)["link_bandwidth"] == pytest.approx(7.4e9)


@pytest.mark.parametrize("words", [("--capacity", "16"), ("--what-if", "ddr=16")])
def test_bytes_without_a_unit_that_no_memory_has_are_refused(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *QUICK, "--quick", *words]) in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"16 ?GB or 16 ?GiB", said)


@pytest.mark.parametrize(
    "text", ["ddr", "ddr=", "lnik=1GB/s", "link=-3GB/s", "link=7parsec", "link=7e999GB/s", "ddr=0", "host_store=2GB/s"]
)
def test_wrong_changes_are_refused(text):
    with pytest.raises(DiagnosticError) as caught:
        parse_changes(text, load_machine(None))
    assert [d.code for d in caught.value.diagnostics] == ["RT065"]


def test_plan_says_what_scripts_rely_on(capsys, tmp_path):
    out = tmp_path / "P.toml"
    words = ("plan", *SMALL, "--tokens", "1e9", "--robust", "--what-if", "link=37GB/s", "-o", str(out), "--json")
    assert main(list(words)) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["plans"][0]
    assert {"pp", "dp", "micro_batch_size", "micro_batches", "zero", "cuts"} <= first.keys()
    assert first["predicted_step_seconds"] >= found["bound_step_seconds"] >= found["relaxed_bound_step_seconds"] > 0
    assert found["relaxed_gap"] >= found["gap"] >= 0
    assert first["tokens_per_second"] == pytest.approx(16 * 64 / first["predicted_step_seconds"])
    assert first["days"] == pytest.approx(1e9 / first["tokens_per_second"] / 86400)
    assert first["cluster_hours"] == pytest.approx(first["days"] * 24 * 4)
    assert first["slow_stage_seconds"] > first["predicted_step_seconds"]
    # compiled anew, in an order of its own: by no more than chance slower than a step that waits for no link
    assert found["what_if"][0]["step_seconds_with_the_same_plan"] <= first["predicted_step_seconds"] * 1.01
    model = load_model(str(ROOT / "examples/tiny.json"))
    plan = parse_plan(out.read_text(), file="P.toml", model=model)
    assert (plan.pp, plan.dp, list(plan.cuts)) == (first["pp"], first["dp"], first["cuts"])


def test_plan_shows_tables(capsys):
    assert main(["plan", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "lower bound of every plan considered" in shown
    assert "why not" in shown


def test_plan_refuses_what_cannot_fit(capsys):
    assert (
        main(
            [
                "plan",
                "--model",
                "llama-2-70b",
                "--clusters",
                "8",
                "--global-batch",
                "8",
                "--seconds",
                "1",
                "--jobs",
                "1",
            ]
        )
        == 1
    )
    shown = capsys.readouterr().err
    assert "RT053" in shown
    assert "lacks at least" in shown


@pytest.mark.parametrize(
    "words",
    [
        ("plan", *TINY, "--clusters", "4"),
        ("plan", *TINY, "--clusters", "0", "--global-batch", "4"),
        ("plan", *TINY, "--clusters", "4", "--global-batch", "4", "--quick", "--exhaustive"),
        ("plan", *TINY, "--clusters", "4", "--global-batch", "4", "--zero", "4"),
        ("compare", *TINY, "--plan", "auto"),
        ("compare", *TINY, "--plan", TINY_PLAN, "--clusters", "4"),
        ("scale", *TINY, "--clusters", "4,x"),
        ("scale", *TINY, "--clusters", "0"),
        ("scale", *TINY, "--clusters", "4", "--zero", "4"),
        ("scale", *TINY, "--clusters", "4", "--zero", "1", "--strategy", "zero3"),
        ("scale", *TINY, "--clusters", "4", "--zero", "1", "--plan", TINY_PLAN),
        ("scale", *TINY, "--clusters", "4", "--exhaustive", "--seconds", "1"),
    ],
    ids=" ".join,
)
def test_usage_errors(words, capsys):
    assert main([*words]) == 2
    assert capsys.readouterr().err


def test_fewest_clusters(capsys, tmp_path):
    machine = tmp_path / "small.toml"
    text = (ROOT / "targets/mt3000/machines/mt3000.toml").read_text()
    machine.write_text(text.replace("20000000000", "12000000"))
    out = tmp_path / "P.toml"
    words = (
        "plan",
        *TINY,
        "--clusters",
        "8",
        "--seq-len",
        "64",
        "--smallest",
        "--machine",
        str(machine),
        "-o",
        str(out),
        "--json",
    )
    assert main([*words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 < found["clusters"] <= 8
    assert found["plan"]["peak_bytes"] <= 12000000
    assert (
        parse_plan(out.read_text(), file="P.toml", model=load_model(str(ROOT / "examples/tiny.json"))).clusters
        == found["clusters"]
    )
    fewer = [*words]
    fewer[words.index("8")] = str(found["clusters"] - 1)
    assert main(fewer) == 1
    assert "RT053" in capsys.readouterr().err


def test_the_leanest_pipeline_recovers_everything_in_place():
    for given, lean in {
        "joint-order,allocate-ddr": "recompute,allocate-ddr",
        "place-zb-h1,overlap-tensor,joint-order{placement=inline},allocate-ddr": "place-zb-h1,recompute,allocate-ddr",
        "joint-order{offload=host},allocate-ddr": "offload-state{home=host},recompute,allocate-ddr",
        "joint-order{policy=none},allocate-ddr": "joint-order{policy=none},allocate-ddr",
        "recompute,allocate-ddr": "recompute,allocate-ddr",
    }.items():
        assert leanest(given) == pipeline_text(parse_pipeline(lean))


def test_a_plan_that_fits_only_with_everything_recovered_is_an_answer(capsys, tmp_path, monkeypatch):
    """And the pipeline that it names compiles it; a shape that does not fit so is not compiled otherwise."""
    seen = []

    def evaluated(task):
        seen.append(task.pipeline)
        refused = task.pipeline != leanest(task.pipeline) or len(seen) == 1
        return PlanEvaluation(None, (), refusal="does not fit") if refused else evaluate(task)

    monkeypatch.setattr(fewest, "evaluate", evaluated)
    out = tmp_path / "P.toml"
    words = ("plan", *TINY, "--clusters", "8", "--seq-len", "64", "--smallest", "--capacity", "12MB", "-o", str(out))
    assert main([*words]) == 0
    advice = re.search(r"--passes '(.*?)'", capsys.readouterr().out)
    assert advice is not None
    assert advice[1] == leanest(advice[1])
    assert seen[0] == seen[1] == advice[1] != seen[-1]
    compiled = (*TINY, "--plan", str(out), "--capacity", "12MB", "--passes", advice[1], "-o", str(tmp_path / "p.rtx"))
    assert main(["compile", *compiled]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("name", ["ratrain", "baseline-1f1b"])
def test_passes_are_named_only_where_the_strategy_would_have_chosen_others(name, capsys):
    words = ("plan", *TINY, "--clusters", "8", "--seq-len", "64", "--smallest", "--strategy", name)
    assert main([*words]) == 0
    assert "--passes" not in capsys.readouterr().out


def test_the_advice_of_a_plan_that_does_not_fit_finds_the_fewest_clusters(capsys, tmp_path):
    machine = tmp_path / "small.toml"
    text = (ROOT / "targets/mt3000/machines/mt3000.toml").read_text()
    machine.write_text(text.replace("20000000000", "12000000"))
    of = ("--seq-len", "64", "--machine", str(machine))
    assert main(["plan", *TINY, "--clusters", "1", "--global-batch", "8", *of, "--quick"]) == 1
    advice = re.search(r"'(--clusters \d+ --smallest)'", " ".join(capsys.readouterr().err.split()))
    assert advice is not None
    assert main(["plan", *TINY, *advice[1].split(), *of]) == 0
    assert "clusters" in capsys.readouterr().out


# -- what -o and --json write is what is asked ---------------------------------------------------------------------------


def planned(capsys, *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("level", [(), ("--quick",)])
@pytest.mark.parametrize("change", [None, "ddr=9MB", "link=37GB/s,latency=1us"])
@pytest.mark.sampled(2)
def test_the_plan_that_is_written_is_that_of_the_machine_asked_about(capsys, tmp_path, monkeypatch, level, change):
    """It has the shape and the peak that `--json` tells, and compiles for the machine beside it as its comments say."""
    monkeypatch.chdir(tmp_path)
    asked = ("--what-if", change) if change else ()
    found = planned(capsys, *(QUICK if level else SMALL), *level, *asked, "--tokens", "1e9", "-o", "P.toml")
    told = found["what_if"][0]["plan"] if change else found["plans"][0]
    text = Path("P.toml").read_text()
    plan = parse_plan(text, file="P.toml", model=load_model(TINY[1]))
    keys = ("pp", "dp", "micro_batch_size", "micro_batches", "zero", "reduce")
    assert {key: getattr(plan, key) for key in keys} == {key: told[key] for key in keys}
    assert list(plan.cuts) == told["cuts"]
    assert told["days"] > 0
    assert found["output"] == "P.toml"
    beside = Path("P.machine.toml")
    assert beside.exists() == bool(change) == ("machine_output" in found)
    assert ('machine = "P.machine.toml"' in text) == bool(change)
    # a plan that was placed has a peak; one that was only estimated has a bound of it
    assert ("highest peak at least " in text) == (told["how"] == "estimate")
    assert f"({told['how']}), highest peak" in text
    if change:
        machine = load_machine(str(beside))
        given = load_machine(None)
        assert machine.name == "mt3000-what-if"
        changed = parse_changes(change, given)
        assert {key: c.value for key, c in machine.constants.items()} == {
            key: changed.get(key, c.value) for key, c in given.constants.items()
        }
    if not level:
        words = ["compile", *TINY, "--plan", "P.toml", "--passes", told["passes"], "-o", "best.rtx", "--json"]
        assert main(words) == 0, "the plan's file names its machine"
        stages = json.loads(capsys.readouterr().out)["stages"]
        assert max(stage["peak_live_bytes"] for stage in stages) == told["peak_bytes"]


@pytest.mark.parametrize(
    "words",
    [
        (*SMALL, "--what-if", "ddr=9MB", "--what-if", "ddr=8MB", "-o", "P.toml"),
        (*SMALL, "--quick", "--robust"),
        (*TINY, "--clusters", "4", "--smallest", "--global-batch", "16"),
        (*TINY, "--clusters", "4", "--smallest", "--tokens", "1e9"),
        (*TINY, "--clusters", "4", "--smallest", "--robust"),
        (*TINY, "--clusters", "4", "--smallest", "--what-if", "ddr=9MB"),
    ],
)
def test_questions_that_have_no_one_answer_are_refused(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    shown = capsys.readouterr()
    assert "Error:" in shown.err
    assert not shown.out
    assert not list(tmp_path.iterdir())


def test_a_changed_machine_for_which_nothing_fits_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *SMALL, "--what-if", "ddr=1MB", "-o", "P.toml"]) == 1
    assert "RT053" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_plans_are_kept_and_fronts_are_written(capsys, tmp_path):
    out, picture = tmp_path / "P.toml", tmp_path / "front.svg"
    assert main(["plan", *QUICK, "--quick", "--keep", "3", "--explain-rejected", "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [str(tmp_path / f"P-{number}.toml") for number in (1, 2, 3)]
    assert found["outputs"] == names
    assert not out.exists()
    model = load_model(str(ROOT / "examples/tiny.json"))
    plans = [parse_plan(Path(name).read_text(), file=name, model=model) for name in names]
    assert len(set(plans)) == 3
    assert any("bubble" in loser["seconds"] for loser in found["rejected"])
    words = ("--pareto", "clusters", "--quick", "--plot", str(picture), "-o", str(out), "--json")
    assert main(["plan", *QUICK, *words]) == 0
    front = json.loads(capsys.readouterr().out)
    points = front["points"]
    assert [p["limit"] for p in points] == [p["clusters"] for p in points]
    assert all(a["limit"] < b["limit"] for a, b in pairwise(points))
    assert all(a["predicted_step_seconds"] > b["predicted_step_seconds"] for a, b in pairwise(points))
    assert all(p["bound_step_seconds"] <= p["predicted_step_seconds"] for p in points)
    assert picture.read_text().startswith("<?xml")


def test_a_front_of_bytes_stays_within_them(capsys):
    words = ("--pareto", "memory", "--schedules", "1f1b", "--tp", "1", "--zero", "1", "--seconds", "0")
    assert main(["plan", *QUICK, *words, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert points
    assert all(p["peak_bytes"] <= p["limit"] for p in points if p["how"] != "estimate")
    assert all(p["bound_step_seconds"] <= p["predicted_step_seconds"] for p in points)


def test_a_front_of_bytes_ends_with_the_fastest_plan_of_all(capsys, tmp_path):
    """With all the bytes there are, though estimates of fewer are as short; a file of it compiles as it says."""
    words = ("plan", *QUICK, "--schedules", "1f1b", "--json")
    assert main([*words, "--pareto", "memory", "--seconds", "60", "-o", str(tmp_path / "front.toml")]) == 0
    last = json.loads(capsys.readouterr().out)["points"][-1]
    assert main([*words, "--quick"]) == 0
    assert last["predicted_step_seconds"] <= json.loads(capsys.readouterr().out)["plans"][0]["predicted_step_seconds"]


def test_a_front_without_time_writes_estimates_as_estimates_within_their_bytes(capsys, tmp_path):
    words = ("plan", *QUICK, "--pareto", "memory", "--schedules", "1f1b", "--quick", "--json")
    assert main([*words, "-o", str(tmp_path / "front.toml")]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    files = sorted(tmp_path.glob("front-*.toml"), key=lambda path: int(path.stem.rpartition("-")[2]))
    assert len(files) == len(points) > 1
    for path, point in zip(files, points, strict=True):
        text = path.read_text()
        assert "the fastest by its estimate, not compiled yet" in text
        assert f"budget={point['limit']:.0f}" in text


def test_a_front_lists_a_plan_again_only_where_more_bytes_make_it_faster(capsys):
    words = ("--pareto", "memory", "--schedules", "1f1b", "--tp", "1", "--quick")
    asked = ("plan", "--model", "gpt2", "--clusters", "4", "--global-batch", "16", "--seq-len", "1024", *words)
    assert main([*asked, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    plans = [(p["summary"], p["family"]) for p in points]
    again = [at for at, (a, b) in enumerate(pairwise(plans)) if a == b]
    assert again, "the case shows what is tested"
    for at in again:
        assert points[at + 1]["predicted_step_seconds"] < 0.99 * points[at]["predicted_step_seconds"]
    assert main([*asked]) == 0
    text = capsys.readouterr().out
    assert text.count(", more kept") == len(again)
    assert "all times estimates" in text


@pytest.mark.parametrize(
    "words",
    [
        ("--plot", "x.svg"),
        ("--pareto", "clusters", "--keep", "2"),
        ("--pareto", "clusters", "--objective", "memory"),
        ("--pareto", "clusters", "--quick", "--jobs", "1"),
        ("--pareto", "memory", "--jobs", "1"),
        ("--objective", "memory", "--robust-links"),
        ("--keep", "2", "--what-if", "ddr=16GiB"),
        ("--schedules", "zb-w"),
        ("--smallest", "--keep", "2"),
    ],
)
def test_questions_that_contradict_each_other_are_refused(words):
    assert main(["plan", *QUICK, *words]) == 2


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_front_of_clusters_tries_plans_in_as_many_processes_as_it_is_told(jobs, capsys, monkeypatch):
    asked = []
    usual = quick.processes
    monkeypatch.setattr(quick, "processes", lambda count, **more: asked.append(count) or usual(count, **more))
    words = ("--pareto", "clusters", "--schedules", "1f1b", "--tp", "1", "--seconds", "0")
    assert main(["plan", *QUICK, *words, "--jobs", str(jobs), "--json"]) == 0
    assert set(asked) == {jobs}
    assert json.loads(capsys.readouterr().out)["points"]


def test_a_strategy_that_places_goes_with_no_schedules(capsys):
    assert main(["plan", *QUICK, "--quick", "--strategy", "zb-v", "--schedules", "1f1b"]) == 1
    assert "places zb-v" in capsys.readouterr().err
