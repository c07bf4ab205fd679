"""Commands on plans with tensor-parallel ranks: each works or refuses by name, and no rank is lost on the way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrainc.choices.plan_choices import PlanChoice
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.simulator.figures import one_core_step_seconds
from tests.ratrainc.commands.tiny_llama import CONFIG, facts, printed

PLAN = """
[parallel]
pp = 2
dp = {dp}
tp = {tp}
[batch]
micro_batches = 2
micro_batch_size = 1
seq_len = 8
[optimizer]
warmup_steps = 2
[state]
view_dtype = "f32"
grad_dtype = "f32"
loss_scale = 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, plans of 1, 2 and 4 tensor-parallel ranks, and their schedules and programs."""
    made = tmp_path_factory.mktemp("peers")
    (made / "m.json").write_text(json.dumps(CONFIG))
    (made / "tokens.bin").write_bytes(
        bytes(number * 7 % 61 if at == 0 else 0 for number in range(400) for at in (0, 1))
    )
    for tp in (1, 2, 4):
        plan = made / f"t{tp}.toml"
        plan.write_text(PLAN.format(tp=tp, dp=2 if tp == 2 else 1))
        for kind in ("rtir", "rtx"):
            words = ["compile", "--model", made / "m.json", "--plan", plan, "-o", made / f"t{tp}.{kind}"]
            assert main([str(word) for word in words]) == 0
    return made


def test_schedules_and_programs_are_proved_timed_explained_and_drawn(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "sound" in printed(capsys, "verify", folder / "t2.rtir")
    assert "sound" in printed(capsys, "verify", folder / "t2.rtx")
    figures = facts(capsys, "simulate", folder / "t2.rtx", "--json")
    assert {"gather_rows", "reduce_rows", "combine_loss"} <= figures["collectives"].keys()
    assert "gather_rows" in printed(capsys, "explain", folder / "t2.rtx", "--time")
    assert "free less than 0.01 MiB" in printed(capsys, "explain", folder / "t2.rtir", "--stage", 1, "--seconds", 3)
    assert "2 stages x 2 replicas x 2 tensor-parallel ranks" in printed(capsys, "disasm", folder / "t2.rtx")
    assert "reduce_rows" in printed(capsys, "diff", folder / "t1.rtir", folder / "t2.rtir")
    printed(capsys, "report", folder / "t2.rtx", "-o", folder / "r.html")
    page = (folder / "r.html").read_text()
    assert "2 stages x 2 replicas x 2 tensor-parallel ranks" in page
    assert "replicas and tensor-parallel ranks are alike" in page
    assert "0F0,0F1" in printed(capsys, "export", folder / "t2.rtir")


def test_one_core_takes_the_ops_of_all_peers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = api.load(str(folder / "t2.rtx"))
    machine = load_machine(None)
    alone = one_core_step_seconds(program, machine)
    monkeypatch.setattr(Machine, "engine_gap", machine.engine_gap + 1.0)
    gaps = one_core_step_seconds(program, machine) - alone
    assert gaps == pytest.approx(4 * sum(stage.instructions for stage in program.stages))


def test_a_profile_has_a_process_a_rank_and_tells_the_groups_apart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = folder / "profile.json"
    data = ("--data", folder / "tokens.bin", "--steps", 3)
    printed(capsys, "run", folder / "t2.rtx", *data, "--threads", 1, "--profile", profile)
    events = json.loads(profile.read_text())["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert len(set(names.values())) == len(names) == 8
    assert "stage @1 replica 1 tensor rank 1 (measured)" in names
    meetings = Counter(event["args"]["meeting"] for event in events if event["ph"] == "X" and event["args"]["meeting"])
    forward = {name: count for name, count in meetings.items() if name.startswith("activation from")}
    assert len(forward) == 4, "a channel of each replica and peer"
    tensor = {name for name in meetings if name.startswith("reduce_rows activation tensor 0")}
    assert len(tensor) == 4, "a group of each stage and replica"


def test_a_checkpoint_of_peers_resumes_with_others_generates_and_is_exported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", folder / "tokens.bin")
    printed(capsys, "run", folder / "t2.rtx", *data, "--steps", 2, "--save", folder / "saved")
    losses = {}
    for name in ("t2.rtx", "t4.rtx", "t1.rtx"):
        log = folder / f"{name}.jsonl"
        words = ["run", folder / name, *data, "--steps", 2, "--resume", folder / "saved", "--log", log]
        if name != "t2.rtx":
            words.append("--new-data")  # half as many replicas: steps of half the data
        printed(capsys, *words)
        losses[name] = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert losses["t1.rtx"] == pytest.approx(losses["t4.rtx"], rel=1e-6)
    printed(capsys, "generate", folder / "saved", "--prompt-tokens", "3,4,5", "--tokens", 4)
    printed(capsys, "export-weights", folder / "saved", "-o", folder / "weights")
    printed(capsys, "run", folder / "t2.rtx", *data, "--steps", 1, "--init", folder / "weights")


PLANNING = ("--clusters", 8, "--seq-len", 8, "--global-batch", 4)


@pytest.mark.parametrize(
    ("peers", "like", "numbers"), [(None, 1, {1, 2, 4}), ((2,), 1, {2}), (None, 2, {2}), ((1, 4), 2, {1, 4})]
)
def test_plans_have_the_peers_that_are_asked_for(
    peers: tuple[int, ...] | None, like: int, numbers: set[int], folder: Path
) -> None:
    """Else those of the plan to be like, where it has several, else all that share out the model."""
    choice = PlanChoice(peers=peers, like=str(folder / f"t{like}.toml"))
    request = planning_request(load_model(str(folder / "m.json")), 8, 4, 8, plans=choice)
    assert {shape.tp for shape in request.shapes()} == numbers
    assert all(shape.clusters <= 8 for shape in request.shapes())


def test_the_option_fixes_the_peers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "plan", "--model", folder / "m.json", *PLANNING, "--quick", "--tp", "2,4", "--json")
    assert {plan["tp"] for plan in json.loads(said)["plans"]} <= {2, 4}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tp", "3"), "3 tensor-parallel ranks do not share out 4 heads evenly"),
        (("--tp", "1,16"), "16 tensor-parallel ranks take more than the 8 clusters"),
        (("--tp", "1", "--strategy", "tp-heavy"), "the strategy 'tp-heavy' is about tensor-parallel ranks"),
    ],
)
def test_peers_that_no_plan_can_have_are_refused(
    words: tuple[str, ...], reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in printed(capsys, "plan", "--model", folder / "m.json", *PLANNING, "--quick", *words, code=1)


def test_the_plan_that_is_written_compiles_with_its_peers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the passes of its comments, or those that are usual: both hide what peers exchange."""
    search = ("--tp", "2", "--seconds", 0, "--jobs", 1, "-o", folder / "best.toml", "--json")
    found = facts(capsys, "plan", "--model", folder / "m.json", *PLANNING, *search)
    first, text = found["plans"][0], (folder / "best.toml").read_text()
    assert first["tp"] == 2
    assert "tp = 2  # tensor-parallel ranks" in text
    assert "overlap-tensor" in first["passes"]
    named = ("--passes", first["passes"]) if f'--passes "{first["passes"]}"' in text else ()
    assert any(loser["plan"].startswith("P") for loser in found["rejected"])
    words = ("--model", folder / "m.json", "--plan", folder / "best.toml", *named)
    stages = facts(capsys, "compile", *words, "-o", folder / "best.rtx", "--json")["stages"]
    assert max(stage["peak_live_bytes"] for stage in stages) == first["peak_bytes"]


@pytest.mark.parametrize(("tp", "passes"), [(1, "joint-order,"), (2, "overlap-tensor,joint-order,")])
def test_a_strategy_hides_what_peers_exchange(
    tp: int, passes: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`compile` and `compare` run the pipeline that the planner would; passes that are given are run as they are."""
    assert f'pipeline "place-1f1b,{passes}' in (folder / f"t{tp}.rtir").read_text()
    plan = ("--model", folder / "m.json", "--plan", folder / f"t{tp}.toml")
    rows = facts(capsys, "compare", *plan, "--strategies", "ratrain", "--json")
    step = facts(capsys, "simulate", folder / f"t{tp}.rtx", "--json")["step_seconds"]
    assert [row["step_seconds"] for row in rows["strategies"]] == [step]
    own = folder / "own.rtir"
    printed(capsys, "compile", *plan, "--passes", "joint-order,allocate-ddr", "-o", own)
    assert 'pipeline "place-1f1b,joint-order,' in own.read_text()


def test_a_lever_leaves_exchanges_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tp in (1, 2):
        told = facts(capsys, "explain", folder / f"t{tp}.rtir", "--json")
        names = [lever["name"] for lever in told["levers"]]
        assert ("without overlap-tensor" in names) == (tp == 2), names


def test_why_other_numbers_of_peers_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "plan", "--model", folder / "m.json", *PLANNING, "--seconds", 0, "--jobs", 1, "--json")
    found = json.loads(said)
    best = found["plans"][0]["tp"]
    reasons = {loser["plan"]: loser["reason"] for loser in found["rejected"] if loser["plan"].startswith("T")}
    assert reasons.keys() == {f"T{tp}" for tp in (1, 2, 4) if tp != best}
    assert all("exchanges" in reason for reason in reasons.values())


def test_advice_plans_for_the_same_number_of_peers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", folder / "m.json", "--plan", folder / "t2.toml", "--capacity")
    said = printed(capsys, "compile", *words, "20KB", code=1)
    assert "no single change and no pair of changes" in said
    assert "bounds on bytes rule out all of them" in said
