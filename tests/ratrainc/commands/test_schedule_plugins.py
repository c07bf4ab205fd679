"""Schedules of others: known wherever a schedule has a name, checked before they are placed, refused in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.passes.registry import PASSES
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.named import SCHEDULES, Schedule
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import example_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.ratrain_ir.schedules.shape import PipelineShape

ROOT = Path(__file__).resolve().parents[3]
TINY = str(example_path("tiny.json"))
PLAN = Path(example_path("tiny.toml")).read_text("utf-8")


def block_of_the_page() -> str:
    """The module that docs/plugins.md shows."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/plugins.md").read_text("utf-8"), re.DOTALL)
    return next(block for block in blocks if "SCHEDULES.register" in block)


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule of the page, known in this process for the test."""
    monkeypatch.setattr(SCHEDULES, "_added", {})
    exec(compile(block_of_the_page(), "eager.py", "exec"), {})


def with_schedule(folder: Path, name: str) -> str:
    path = folder / "P.toml"
    path.write_text(PLAN.replace("[parallel]", f'[parallel]\nschedule = "{name}"'), "utf-8")
    return str(path)


@pytest.mark.usefixtures("_eager")
def test_it_is_known_wherever_a_schedule_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = with_schedule(tmp_path, "eager-1f1b")
    assert main(["compile", "--model", TINY, "--plan", plan, "-o", "a.rtir"]) == 0
    usual = str(example_path("tiny.toml"))
    assert main(["compile", "--model", TINY, "--plan", usual, "--strategy", "eager-1f1b", "-o", "b.rtir"]) == 0
    first, second = api.load_schedule("a.rtir"), api.load_schedule("b.rtir")
    assert first.plan.schedule == second.plan.schedule == "eager-1f1b"
    assert [list(map(repr, stage.ops)) for stage in first.stages] == [list(map(repr, s.ops)) for s in second.stages]
    assert main(["verify", "a.rtir"]) == 0
    assert main(["schedule", "--kind", "eager-1f1b", "--stages", "2", "--micro-batches", "4", "-o", "e.csv"]) == 0
    assert Path("e.csv").read_text() == "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n"
    assert main(["schedule", "--kind", "1f1b", "--stages", "2", "--micro-batches", "4", "-o", "u.csv"]) == 0
    assert Path("e.csv").read_text() != Path("u.csv").read_text(), "the page says that it differs"
    assert main(["lint", "e.csv"]) == 0
    capsys.readouterr()
    words = ["compare", "--model", TINY, "--plan", usual, "--strategies", "1f1b,eager-1f1b,e.csv", "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert [row["name"] for row in rows] == ["1f1b", "eager-1f1b", "e.csv"]
    assert rows[1]["step_seconds"] == rows[2]["step_seconds"], "the table is its order"
    words = ["plan", "--model", TINY, "--clusters", "4", "--global-batch", "16", "--seq-len", "64", "--quick"]
    assert main([*words, "--schedules", "eager-1f1b", "-o", "Q.toml"]) == 0
    assert 'schedule = "eager-1f1b"' in Path("Q.toml").read_text() or "pp = 1" in Path("Q.toml").read_text()


def test_without_its_plugin_a_plan_says_how_to_give_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--model", TINY, "--plan", with_schedule(tmp_path, "eager-1f1b")]) == 1
    said = capsys.readouterr().err
    assert "this version does not build the schedule" in said
    assert "--plugin FILE.py" in said


F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def raising(_shape: PipelineShape, _stage: int) -> list[Action]:
    return [{}["missing"]]  # type: ignore[list-item]


def texts(_shape: PipelineShape, _stage: int) -> list[Action]:
    return ["0F0"]  # type: ignore[list-item]


def half_of_it(shape: PipelineShape, stage: int) -> list[Action]:
    return [Action(F, m, stage) for m in range(shape.micro_batches)]


def backwards_first(shape: PipelineShape, stage: int) -> list[Action]:
    return [Action(kind, m, stage) for m in range(shape.micro_batches) for kind in (B, F)]


def nothing(_shape: PipelineShape, _stage: int) -> list[Action]:
    return None  # type: ignore[return-value]


def numbers(_shape: PipelineShape, _stage: int) -> list[Action]:
    return [1, 2]  # type: ignore[list-item]


@pytest.mark.parametrize("order", [raising, texts, nothing, numbers])
def test_a_schedule_that_gives_no_order_is_told_by_every_command(
    order: Callable[[PipelineShape, int], list[Action]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(SCHEDULES, "_added", {})
    SCHEDULES.register("odd", Schedule("odd", order))
    for words in (
        ["schedule", "--kind", "odd", "--stages", "2", "--micro-batches", "4"],
        ["compile", "--model", TINY, "--plan", str(example_path("tiny.toml")), "--strategy", "odd"],
    ):
        assert main(words) == 1
        assert "error[RT072]: the schedule 'odd'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("order", ["half_of_it", "backwards_first"])
def test_a_wrong_table_is_written_with_a_warning(
    order: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(SCHEDULES, "_added", {})
    monkeypatch.chdir(tmp_path)
    SCHEDULES.register("odd", Schedule("odd", globals()[order]))
    words = ["schedule", "--kind", "odd", "--stages", "2", "--micro-batches", "4"]
    assert main([*words, "-o", "F.csv"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: this table is wrong" in said
    assert "'ratrainc lint F.csv' shows each cell" in said
    assert main(["lint", "F.csv"]) == 1
    assert main(["schedule", "--kind", "1f1b", "--stages", "2", "--micro-batches", "4"]) == 0
    assert "warning" not in capsys.readouterr().err.replace("warnings", "")


def test_a_schedule_that_is_1f1b_on_one_stage_is_not_listed_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SCHEDULES, "_added", {})
    SCHEDULES.register("same", Schedule("same", SCHEDULES["1f1b"].actions))
    words = ["plan", "--model", TINY, "--clusters", "2", "--global-batch", "8", "--seq-len", "64", "--quick", "--json"]
    assert main([*words, "--schedules", "1f1b,same", "--tp", "1"]) == 0
    plans = [each for each in json.loads(capsys.readouterr().out)["plans"] if each["pp"] == 1]
    assert {each["family"] for each in plans} == {"1f1b"}


@pytest.mark.parametrize("name", ["none", "all", "gpipe"])
def test_a_name_that_no_schedule_can_have_is_refused_with_its_file(name: str) -> None:
    with pytest.raises(DiagnosticError, match=rf"RT072.*{name}.*test_schedule_plugins\.py:\d+"):
        SCHEDULES.register(name, Schedule("odd", half_of_it))
    if name != "gpipe":
        with pytest.raises(DiagnosticError, match=f"'{name}' is a reserved word and cannot name a schedule"):
            SCHEDULES.register(name, Schedule("odd", half_of_it))


def test_a_bad_pass_of_others_hides_no_other_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {row["name"] for row in api.passes().to_json()["passes"]}
    names = [*PASSES.names(), "broken"]
    monkeypatch.setattr(PASSES, "names", lambda: names)
    rows = {row["name"]: row["summary"] for row in api.passes().to_json()["passes"]}
    assert rows.keys() == {*before, "broken"}
    assert rows["broken"].startswith("It cannot be used: ")


def hanging(shape: PipelineShape, stage: int) -> list[Action]:
    """Each stage has all its forwards before any backward, but the last one, which begins with a later one."""
    numbers = range(shape.micro_batches)
    forwards = [Action(F, m, stage) for m in (numbers if stage else reversed(numbers))]
    return [*forwards, *(Action(B, m, stage) for m in numbers)]


def elsewhere(shape: PipelineShape, stage: int) -> list[Action]:
    return [Action(kind, m, stage + 1) for m in range(shape.micro_batches) for kind in (F, B)]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (raising, "failed: KeyError"),
        (texts, "which is no Action"),
        (half_of_it, "is wrong for"),
        (backwards_first, "is wrong for"),
        (hanging, "is wrong for"),
        (elsewhere, "is wrong for"),
    ],
)
def test_a_wrong_order_is_told_as_the_fault_of_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], order: object, reason: str
) -> None:
    monkeypatch.setattr(SCHEDULES, "_added", {})
    SCHEDULES.register("mine", Schedule("mine", order))  # type: ignore[arg-type]
    assert main(["compile", "--model", TINY, "--plan", with_schedule(tmp_path, "mine")]) == 1
    said = capsys.readouterr().err
    assert "error[RT072]: the schedule 'mine'" in said
    assert reason in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("1f1b", Schedule("x", half_of_it)),
        ("all", Schedule("x", half_of_it)),
        ("none", Schedule("x", half_of_it)),
        ("Mine", Schedule("x", half_of_it)),
        ("a+host", Schedule("x", half_of_it)),
        ("mine", half_of_it),
    ],
)
def test_what_cannot_be_a_schedule_is_not_registered(name: str, schedule: object) -> None:
    with pytest.raises(DiagnosticError, match="RT072"):
        SCHEDULES.register(name, schedule)  # type: ignore[arg-type]
    assert name == "1f1b" or name not in SCHEDULES


@pytest.mark.usefixtures("_eager")
@given(st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_example_is_sound_for_every_shape(stages: int, micro_batches: int) -> None:
    table = api.schedule("eager-1f1b", stages, micro_batches)
    assert len(list(table.rows())) == stages


def test_the_table_of_schedules_is_one_mapping() -> None:
    assert len(SCHEDULES) == len(list(SCHEDULES)) == len(dict(SCHEDULES))
    assert all(SCHEDULES.is_own(name) for name in SCHEDULES)
    assert "nobodys" not in SCHEDULES
    assert SCHEDULES.get("nobodys") is None


def test_two_plugins_do_not_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULES, "_added", {})
    SCHEDULES.register("mine", Schedule("mine", half_of_it))
    SCHEDULES.register("mine", Schedule("mine", half_of_it))  # loaded again: the same function
    with pytest.raises(DiagnosticError, match=r"half_of_it.*rename|has the name of .*half_of_it"):
        SCHEDULES.register("mine", Schedule("other", backwards_first))
