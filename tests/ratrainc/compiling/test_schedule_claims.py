"""The plan's key `schedule`: what it says is what is placed, whatever places it; and a header tells the truth about its ops."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.registry import PASSES
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from ratrain.ratrainc.choices.levers import CompileSetting, levers_of
from ratrain.ratrainc.choices.strategies import STRATEGIES, strategy
from ratrain.ratrainc.cli import main
from ratrain.targets.machine.cost import weight_bound_rows
from ratrain.targets.machine.machine import load_machine
from tests.end_to_end.tiny_runs import WITHOUT_PEERS, make_plan
from tests.end_to_end.toys import UNEVEN as MODEL

SHAPE = {"pp": 3, "dp": 1, "zero": 0, "micro_batches": 6, "micro_batch_size": 1, "seq_len": 4}
WHOLE = PipelineShape(SHAPE["pp"], SHAPE["micro_batches"])
ONE_CHUNK = [name for name in SCHEDULES if SCHEDULES[name].problem(WHOLE) is None]
SAID = (None, *ONE_CHUNK)


def text_of(schedule: str) -> str:
    """A placed schedule, in which no two of the built ones have a stage's order in common."""
    return print_module(api.compile(MODEL, make_plan(MODEL, **SHAPE), passes=placing(schedule)))


def placing(schedule: str) -> str:
    """The pass that places a schedule: its own if it has one."""
    own = f"place-{schedule}"
    return own if own in PASSES.places() else f"place-schedule{{kind={schedule}}}"


def claiming(text: str, claim: str | None) -> str:
    """The text with another schedule in its header."""
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("  plan {"))
    before, _, after = lines[at].partition("schedule = ")
    lines[at] = f"{before}schedule = {'none' if claim is None else json.dumps(claim)},{after.partition(',')[2]}"
    return "\n".join(lines)


@pytest.mark.parametrize("claim", SAID)
@pytest.mark.parametrize("placed", ONE_CHUNK)
def test_a_header_claims_the_order_of_its_ops_or_none(placed: str, claim: str | None) -> None:
    module = parse_module(claiming(text_of(placed), claim))
    assert module.plan.schedule == claim
    # backwards of ZB-H1 that are whole make 1F1B: a stage delays what its memory allows, which can be nothing
    if claim in (None, placed) or (placed, claim) == ("1f1b", "zb-h1"):
        check(module)
        return
    with pytest.raises(DiagnosticError) as caught:
        check(module)
    assert {item.code for item in caught.value.diagnostics} == {"RT044"}
    assert all("schedule = none" in (item.help or "") for item in caught.value.diagnostics)


def files(folder: Path, schedule: str | None) -> list[str]:
    """`--model` and `--plan` of a plan that says a schedule, or none."""
    plan = evolve(make_plan(**SHAPE | {"pp": 2, "cuts": (1,), "micro_batches": 4}), schedule=schedule)
    (folder / "plan.toml").write_text(plan_to_toml(plan))
    shape = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8}
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "model.json").write_text(json.dumps(shape | sizes))
    return ["--model", str(folder / "model.json"), "--plan", str(folder / "plan.toml")]


def schedule_in(path: Path) -> str | None:
    """What a written schedule's header says; it was verified."""
    return parse_module(path.read_text()).plan.schedule


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("item", WITHOUT_PEERS, ids=lambda item: item.name)
@pytest.mark.sampled(4)
def test_compile_places_what_the_plan_says_or_refuses(
    item, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.rtir"
    code = main(["compile", *files(tmp_path, said), "--strategy", item.name, "--no-advice", "-o", str(out)])
    if said is not None and item.schedule not in (None, said):
        assert code == 1
        error = capsys.readouterr().err
        assert "RT064" in error
        assert all(word in error for word in (f'schedule = "{said}"', f"'{item.name}'", f"places {item.schedule}"))
        assert "plan.toml:5:1" in error, "the place in the plan is named"
        assert not out.exists()
        return
    assert code == 0
    assert schedule_in(out) == (item.schedule or said or "1f1b")
    check(parse_module(out.read_text()))


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("placed", ONE_CHUNK)
def test_a_placement_among_the_passes_agrees_with_the_plan(
    placed: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.rtir"
    code = main(["compile", *files(tmp_path, said), "--passes", f"{placing(placed)},allocate-ddr", "-o", str(out)])
    if said in (None, placed):
        assert (code, schedule_in(out)) == (0, placed)
    else:
        error = capsys.readouterr().err
        assert code == 1
        assert f"'{placing(placed)}' in --passes" in error
        assert "plan.toml:5:1" in error
    if said not in (None, placed):
        with pytest.raises(DiagnosticError, match=re.escape(placing(placed))):
            api.compile(MODEL, make_plan(MODEL, **SHAPE, schedule=said), passes=placing(placed))


@pytest.mark.parametrize("said", ONE_CHUNK)
def test_an_order_in_a_file_may_be_replaced(said: str, tmp_path: Path) -> None:
    path, out = tmp_path / "a.rtir", tmp_path / "b.rtir"
    path.write_text(text_of("1f1b"))
    assert main(["opt", str(path), "--passes", placing(said), "-o", str(out)]) == 0
    assert schedule_in(out) == said
    check(parse_module(out.read_text()))


def compared(options: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    """Exit code, names and step times of a comparison, and what it says beside."""
    code = main(["compare", *options, "--json"])
    shown = capsys.readouterr()
    return code, [row["name"] for row in json.loads(shown.out)["strategies"]] if code == 0 else [], shown.err


@pytest.mark.parametrize("said", SAID)
@pytest.mark.sampled(4)
def test_compare_has_the_strategies_that_go_with_the_plan(
    said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = files(tmp_path, said)
    code, names, words = compared(options, capsys)
    others = [item.name for item in WITHOUT_PEERS if said is not None and item.schedule not in (None, said)]
    assert code == 0
    assert sorted([*names, *others]) == sorted(item.name for item in WITHOUT_PEERS)
    assert all(name in words for name in others)
    for name in others:
        code, _, words = compared([*options, "--strategies", f"ratrain,{name}"], capsys)
        assert code == 1
        assert f"the strategy '{name}' places" in words


@pytest.mark.parametrize("command", ["scale", "plan"])
@pytest.mark.parametrize("name", ["ratrain", "zb-h1"])
@pytest.mark.parametrize("said", SAID)
def test_planning_from_a_plan_agrees_with_its_schedule(
    command: str, name: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model, _, plan = files(tmp_path, said)
    sizes = ["--clusters", "2", "--strategy", name, "--json"]
    one = ["--sequences-per-cluster", "2", "--plan", plan] if command == "scale" else ["--global-batch", "4"]
    like = ["--seq-len", "4", "--like", plan, "--quick"] if command == "plan" else []
    code = main([command, "--model", model, *sizes, *one, *like])
    error = capsys.readouterr().err
    places = next(item for item in STRATEGIES if item.name == name).schedule
    makes = places or "1f1b"  # the planner's bounds are of what a strategy places where the plan says nothing
    agrees = said in (None, makes) or (command == "scale" and places is None)
    assert code == (0 if agrees else 1), error
    if not agrees:
        assert "plan.toml:5:1" in error
        assert name in error


@pytest.mark.parametrize("name", ["ratrain", "zb-h1", "tuned-1f1b"])
def test_a_planned_plan_compiles_into_what_was_planned(name: str, tmp_path: Path) -> None:
    _, model, _, _ = files(tmp_path, None)
    out, schedule = tmp_path / "best.toml", tmp_path / "x.rtir"
    sizes = ["--clusters", "2", "--global-batch", "4", "--seq-len", "4"]
    assert main(["plan", "--model", model, *sizes, "--strategy", name, "--quick", "-o", str(out)]) == 0
    wanted = next(item for item in STRATEGIES if item.name == name).schedule
    assert parse_plan(out.read_text(), file="best.toml", model=load_model(model)).schedule == wanted
    assert main(["compile", "--model", model, "--plan", str(out), "--strategy", name, "-o", str(schedule)]) == 0
    assert schedule_in(schedule) == (wanted or "1f1b")


@pytest.mark.parametrize("said", ONE_CHUNK)
def test_levers_of_a_placed_schedule_keep_its_order(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, placed = tmp_path / "x.rtir", tmp_path / "y.rtir"
    assert main(["compile", *files(tmp_path, said), "-o", str(path), "--passes", "joint-order"]) == 0
    assert main(["opt", str(path), "--passes", "place-gpipe,allocate-ddr", "-o", str(placed)]) == 0
    capsys.readouterr()
    assert main(["explain", str(placed), "--seconds", "0", "--json"]) == 0
    levers = json.loads(capsys.readouterr().out)["levers"]
    assert levers[0]["fits"], "the schedule itself is compiled again as it was"


SHAPED = {"interleaved": (2, "loop", 1), "zb-v": (2, "vee", 1), "v-half": (2, "vee", 1), "seq1f1b": (1, "loop", 2)}
"""Chunks, layout and slices of the strategies that give a plan some."""


@pytest.mark.parametrize("name", SHAPED)
def test_a_strategy_gives_the_plan_the_shape_that_its_schedule_has(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.rtir"
    assert main(["compile", *files(tmp_path, None), "--strategy", name, "-o", str(out)]) == 0
    plan = parse_module(out.read_text()).plan
    chunks, layout, slices = SHAPED[name]
    assert (plan.chunks, plan.layout, plan.shape.slices) == (chunks, layout, slices)
    assert plan.cuts == ((1,) if chunks == 1 else (1, 2, 3))
    assert f"the strategy '{name}' gives the plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "keys", "why"),
    [
        ("zb-v", {"chunks": 2, "layout": "loop", "cuts": (1, 2, 3)}, "in a vee, not in a loop"),
        ("v-half", {"slices": (1, 3)}, "two chunks a stage, not 1"),
        ("seq1f1b", {"chunks": 2, "layout": "vee", "cuts": (1, 2, 3)}, "in a loop, not in a vee"),
        ("baseline-1f1b", {"slices": (1, 3)}, "whole micro-batches, not 2 slices"),
        ("interleaved", {"pp": 3, "cuts": (1, 2)}, "3 stages of 2 chunks need at least 6 layers"),
        ("zb-v", {"pp": 1, "cuts": ()}, "changes nothing on one stage"),
        ("seq1f1b", {"seq_len": 1}, "two slices of a micro-batch or more"),
        ("seq1f1b", {"attention": "scores-kept"}, "which slices do not have"),
    ],
)
def test_a_plan_that_a_strategy_cannot_have_is_refused(name: str, keys: dict[str, Any], why: str) -> None:
    model = evolve(MODEL, layers=4)
    plan = make_plan(model, **SHAPE | {"pp": 2, "cuts": (1,)} | keys)
    with pytest.raises(DiagnosticError) as caught:
        strategy(name).adapted(plan, model, load_machine(None))
    (found,) = caught.value.diagnostics
    assert (found.code, f"the strategy '{name}'" in found.message, why in found.message) == ("RT064", True, True)
    assert found.help


def test_what_a_plan_says_of_its_shape_stays() -> None:
    model = evolve(MODEL, layers=8)
    four = make_plan(model, **SHAPE | {"pp": 2, "chunks": 4, "cuts": tuple(range(1, 8))})
    sliced = make_plan(model, **SHAPE | {"pp": 2, "cuts": (3,), "slices": (1, 3)})
    for name, plan in (("interleaved", four), ("seq1f1b", sliced), ("ratrain", four), ("ratrain", sliced)):
        assert strategy(name).adapted(plan, model, load_machine(None)) is plan
    both = strategy("seq1f1b").adapted(four, model, load_machine(None))
    assert (both.chunks, both.cuts, len(both.slices)) == (4, four.cuts, 2)


@pytest.mark.parametrize(
    ("sequences", "seq_len", "count"), [(1, 2048, 8), (1, 1024, 5), (2, 512, 5), (1, 300, 2), (1, 64, 2), (4, 64, 2)]
)
def test_slices_are_as_many_as_make_up_for_their_weights(sequences: int, seq_len: int, count: int) -> None:
    """On an MT-3000 189 rows: 5.67e12 operations a second, two a weight of two bytes, over 30e9 bytes a second. Two at least, eight at most."""
    machine = load_machine(None)
    assert weight_bound_rows(machine, 2) == pytest.approx(189)
    plan = make_plan(**SHAPE | {"seq_len": seq_len, "micro_batch_size": sequences})
    lengths = strategy("seq1f1b").adapted(plan, MODEL, machine).slices
    assert (len(lengths), sum(lengths)) == (count, seq_len)
    assert list(lengths) == sorted(lengths, reverse=True), "later slices attend to more keys"


def test_slices_reduce_once_where_each_micro_batch_would_need_shards_beside_the_whole_gradient() -> None:
    machine = load_machine(None)
    for state, reduce in (
        ({"zero": 2, "reduce": "each-micro-batch"}, "last"),
        ({"zero": 3, "reduce": "each-micro-batch"}, "each-micro-batch"),
        ({"zero": 1}, "last"),
    ):
        plan = make_plan(**SHAPE | {"dp": 2, **state})
        assert strategy("seq1f1b").adapted(plan, MODEL, machine).reduce == reduce
    assert strategy("ratrain").adapted(plan, MODEL, machine).reduce == plan.reduce


@pytest.mark.parametrize(("said", "agrees"), [("zb-v", True), ("v-half", False)])
def test_a_placement_with_an_option_agrees_with_the_plan(
    said: str, agrees: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *options, path = files(tmp_path, None)
    text = Path(path).read_text().replace("cuts = [1]", f'schedule = "{said}"')
    Path(path).write_text(text)
    code = main(["compile", *options, path, "--passes", "place-schedule{kind=zb-v},allocate-ddr"])
    assert code == (0 if agrees else 1)
    assert agrees or "'place-schedule{kind=zb-v}' in --passes places zb-v" in capsys.readouterr().err


def test_levers_of_an_inserted_placement_keep_the_schedule_that_the_plan_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its chunks alone would be interleaved."""
    *options, path = files(tmp_path, None)
    Path(path).write_text(Path(path).read_text().replace("cuts = [1]", 'schedule = "breadth-first"'))
    out = tmp_path / "x.rtir"
    assert main(["compile", *options, path, "-o", str(out)]) == 0
    capsys.readouterr()
    assert main(["simulate", str(out), "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)["step_seconds"]
    assert main(["explain", str(out), "--seconds", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["levers"][0]["step_seconds"] == wanted


def test_a_lever_moves_a_layer_between_neighbouring_chunks() -> None:
    model = evolve(MODEL, layers=8)
    plan = make_plan(model, **SHAPE | {"pp": 2, "chunks": 2, "layout": "vee", "cuts": (2, 4, 6), "zero": 0})
    setting = CompileSetting(model, plan, "joint-order,allocate-ddr", load_machine(None))
    moved = {lever.name: lever.apply(setting) for lever in levers_of(0) if "one layer" in lever.name}
    there = moved["one layer from the heaviest stage to the next"]
    assert there is not None
    assert there.plan.cuts == (1, 4, 6)
    assert moved["one layer from the heaviest stage to the one before"] is None


def test_scaling_a_plan_under_a_strategy_takes_what_the_strategy_gives_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model, _, plan = files(tmp_path, None)
    steps = {}
    for name in ("ratrain", "zb-v"):
        sizes = ["--clusters", "2", "--sequences-per-cluster", "2", "--strategy", name, "--json"]
        assert main(["scale", "--model", model, "--plan", plan, *sizes]) == 0
        steps[name] = json.loads(capsys.readouterr().out)["points"][0]["step_seconds"]
    assert steps["zb-v"] != steps["ratrain"]
