"""What is said of a plan that does not fit: plans that are named fit, and that nothing fits is said only where it is so."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_summary import state_text
from ratrain.ratrain_ir.config.plan_text import check_plan, plan_from_fields
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Note
from ratrain.ratrainc.choices.levers import CompileSetting, try_setting
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.memory import advice as advice_module
from ratrain.ratrainc.memory.advice import advice
from ratrain.ratrainc.planner.answer.no_plan import no_plan
from ratrain.ratrainc.planner.answer.planned import Planned
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task, evaluate
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import estimated, quick_answer
from ratrain.ratrainc.planner.search.rejected_plans import rejected_plans
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.planner.small_requests import MODEL, SLOW, every_candidate

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.answer import Answer

GIVEN = Plan(pp=2, dp=1, cuts=(1,), micro_batch_size=2, micro_batches=1, seq_len=32, zero=0, head_chunk=64)
NEEDS_MORE = re.compile(r"needs more\s+clusters|rule out all")
CAPACITIES = (2e5, 1.6e6, 2e6, 2.45e6)
"""From far too little for any plan, over too little that no bound proves, to enough for some; never enough for the given one."""


def request_of(capacity: float, name: str = "baseline-1f1b", **changes: object) -> PlanRequest:
    machine = with_constants(load_machine(None), {**SLOW, "ddr_capacity": capacity})
    request = PlanRequest(
        MODEL, machine, GIVEN.clusters, GIVEN.global_batch, GIVEN.seq_len, strategy(name), plan_template=GIVEN
    )
    return evolve(request, **changes)


def fitting(request: PlanRequest) -> bool:
    """Whether any plan of the space fits, by trying all of them."""
    return any(evaluate(task).step_seconds is not None for task in every_candidate(request))


@pytest.fixture(scope="module")
def truth() -> dict[float, bool]:
    return {capacity: fitting(request_of(capacity)) for capacity in CAPACITIES}


def peaks_of(setting: CompileSetting) -> tuple[int, ...]:
    """Most live bytes of each stage of a setting, which does not fit."""
    refused = try_setting(setting, "")
    assert refused is not None
    return refused.peak_bytes


def test_the_capacities_are_on_both_sides(truth: dict[float, bool]) -> None:
    assert not truth[CAPACITIES[0]]
    assert truth[CAPACITIES[-1]]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_advice_says_only_what_is_known(
    truth: dict[float, bool], monkeypatch: pytest.MonkeyPatch, capacity: float
) -> None:
    """Where no change of the plan is tried, or fits: the plan named fits with the peak named, or none exists."""
    monkeypatch.setattr(advice_module, "_fitting_changes", lambda *_: [])
    request = request_of(capacity)
    setting = CompileSetting(MODEL, GIVEN, request.strategy.passes, request.machine)
    refused = try_setting(setting, "")
    assert refused is not None
    assert not refused.fits
    notes = [
        note.message for note in advice(setting, request.strategy, peaks_of(setting), ("ratrainc plan ...", None)).notes
    ]
    said = "\n".join(notes)
    if NEEDS_MORE.search(said):
        assert not truth[capacity]
    if found := re.search(
        r"tokens fits: (.*): step (.*) \((simulated|estimated.*)\), highest peak (\S+) MiB; this is from a short search",
        said,
    ):
        plan = changed_plan(GIVEN, found[1])
        outcome = try_setting(evolve(setting, plan=plan), "")
        assert outcome is not None
        assert outcome.fits
        assert float(found[4]) == pytest.approx(max(outcome.peak_bytes) / 2**20, abs=0.006)
        assert (plan.clusters, plan.global_batch, plan.seq_len) <= (2, 2, 32)
    elif truth[capacity]:
        assert "not known" in said or "may fit" in said
    assert found or not truth[capacity] or capacity < CAPACITIES[-1], "with room enough a plan is named"


@pytest.mark.parametrize("whole", ["fits", "does not fit", "takes too long"])
def test_a_plan_is_placed_with_all_its_micro_batches_before_it_is_named(
    monkeypatch: pytest.MonkeyPatch, whole: str
) -> None:
    """A folded step that fits is not enough, unless placing the whole one takes too long: that is said."""
    tasks: list[Task] = []

    def placed(task: Task) -> PlanEvaluation:
        again = bool(tasks) and tasks[-1] == evolve(task, folded=True, with_tail=True, seconds=tasks[-1].seconds)
        tasks.append(task)
        if task.folded or (again and whole == "fits"):
            return PlanEvaluation(1.0, (1 << 20,), estimated=task.folded)
        stopped = again and whole == "takes too long"
        return PlanEvaluation(None, (1 << 20,), refusal="it does not fit", stopped=stopped)

    monkeypatch.setattr(advice_module, "_fitting_changes", lambda *_: [])
    monkeypatch.setattr(advice_module, "evaluate", placed)
    plan = evolve(GIVEN, micro_batch_size=4, micro_batches=40)
    request = request_of(8e6)
    setting = CompileSetting(MODEL, plan, request.strategy.passes, request.machine)
    found = advice(setting, request.strategy, (1, 1), ("ratrainc plan ...", "ratrainc plan ..."))
    said = "\n".join(note.message for note in found.notes)
    assert any(task.folded for task in tasks)
    assert any(not task.folded for task in tasks)
    if whole == "does not fit":
        assert found.suggestion is None
    else:
        assert found.suggestion is not None
        assert ("were not placed here" in said) == (whole == "takes too long")
        assert "a longer one may find a better plan: ratrainc plan ..." in said


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_what_both_searches_find_is_said_once(monkeypatch: pytest.MonkeyPatch, capacity: float) -> None:
    monkeypatch.setattr(advice_module, "_fitting_changes", lambda *_: [])
    monkeypatch.setattr(advice_module, "_first_placed", lambda *_: None)
    request = request_of(capacity, "ratrain")
    setting = CompileSetting(MODEL, GIVEN, request.strategy.passes, request.machine)
    found = advice(setting, request.strategy, (1,), ("ratrainc plan --strategy ratrain", "ratrainc plan"))
    said = [note.message.partition(": ratrainc plan")[0] for note in found.notes]
    assert len(said) == len(set(said))


def test_holders_of_few_bytes_are_never_none_of_a_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(example_path("tiny.json")), "--plan", str(example_path("tiny.toml")), "--no-advice"]
    assert main(["compile", *words, "--capacity", "4MiB"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"note: moment: [\d]+ bytes \(\d+\.\d\d MiB\)", said)
    assert "(0.00 " not in said


def changed_plan(plan: Plan, keys: str) -> Plan:
    """A plan with keys as a plan file has them."""
    values = tomllib.loads("\n".join(re.sub(r", (?=\w+ = )", "\n", keys).splitlines()))
    found = plan_from_fields(plan.to_fields() | {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    check_plan(found, MODEL)
    return found


def words_of(answer: Answer) -> str:
    with pytest.raises(DiagnosticError) as refused:
        no_plan(answer)
    return str(refused.value)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("level", ["quick", "no time", "time"])
def test_the_planner_says_that_nothing_fits_only_where_it_is_proved(
    truth: dict[float, bool], capacity: float, level: str
) -> None:
    seconds = {"quick": 1.0, "no time": 0.0, "time": math.inf}[level]
    request = request_of(capacity, seconds=seconds)
    answer = quick_answer(request) if level == "quick" else Search(request).run()
    if answer.best is None:
        said = words_of(answer)
        assert answer.proven_empty == ("note: proved" in said)
        assert answer.proven_empty == ("was found that fits" not in said)
        assert not (answer.proven_empty and truth[capacity])
    else:
        assert not answer.proven_empty
    assert answer.best is not None or level != "time" or not truth[capacity]


def test_an_empty_answer_that_left_plans_untried_is_no_proof() -> None:
    answer = Search(request_of(CAPACITIES[0], seconds=math.inf)).run()
    assert answer.proven_empty
    for change in ({"bound": (1.0, 1.0)}, {"refused": [object()]}):
        for key, value in change.items():
            before = getattr(answer, key)
            setattr(answer, key, value)
            assert not answer.proven_empty
            setattr(answer, key, before)


def test_words_about_idle_clusters_and_other_plans_are_those_of_what_was_proved() -> None:
    answer = estimated(request_of(CAPACITIES[-1]))
    answer.request = evolve(answer.request, clusters=5)
    assert not answer.proven
    planned = Planned(answer, False, None, "small.json", MachineChoice())
    lines = list(planned.certificate())
    answer.proven = True
    assert [line for line in planned.certificate() if "stay idle" in line] == [
        line.replace("no plan was found that uses more and is faster", "no plan that uses more is faster")
        for line in lines
        if "stay idle" in line
    ]
    assert any("stay idle" in line for line in lines)


def families_of(plan: Plan) -> tuple[str, str, str]:
    return f"P{plan.pp}", f"T{plan.tp}", f"P{plan.pp} {state_text(plan)}"


@pytest.mark.parametrize("peers", [(1,), pytest.param((1, 2), marks=pytest.mark.full)])
def test_why_not_says_does_not_fit_only_where_every_shape_lacks_bytes(peers: tuple[int, ...]) -> None:
    search = Search(request_of(CAPACITIES[-1], seconds=math.inf, peers=peers))
    best = search.run().best
    assert best is not None
    rows = rejected_plans(search.request, search.spaces, best, search.fitting, search.refused)
    found = {row.text: row.reason for row in rows}
    assert any("does not fit" in reason for reason in found.values()) == (peers == (1,))
    for text, reason in found.items():
        tasks = [t for t in every_candidate(search.request) if text in families_of(t.plan)]
        assert tasks
        assert "does not fit" not in reason or all(evaluate(task).step_seconds is None for task in tasks)


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
def test_the_command_that_is_named_finds_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands in the note, it is run; what it writes is compiled."""
    monkeypatch.setattr(advice_module, "_fitting_changes", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(ROOT / "examples" / "tiny.json")]
    entry = '{ value = 9e6, unit = "bytes", certainty = "assumed", source = "test" }'
    Path("small.toml").write_text(f'base = "mt3000"\nname = "small"\nddr_capacity = {entry}\n')
    plan = tmp_path / "given plan.toml"
    plan.write_text(
        (ROOT / "examples" / "tiny.toml").read_text().replace("micro_batch_size = 2", "micro_batch_size = 8")
    )
    assert main(["compile", *model, "--plan", str(plan), "--machine", "small.toml"]) == 1
    command = re.search(r"may find a better plan(?:, or none)?: ratrainc (.*)", capsys.readouterr().err)
    assert command is not None
    assert main([*shlex.split(command[1]), "--jobs", "1", "--seconds", "0"]) == 0
    assert main([*command_in("P.toml"), "-o", "best.rtx"]) == 0
    assert main(["verify", "best.rtx"]) == 0


def command_in(path: str) -> list[str]:
    """The words behind `ratrainc` of the command in a plan file's first lines, which may take two of them."""
    text = Path(path).read_text().replace("THIS", path.removesuffix(".toml"))
    command = re.search(r"^#   ratrainc (.*?)( \\\n#     (--passes .*))?$", text, re.MULTILINE)
    assert command is not None
    return shlex.split(f"{command[1]} {command[3] or ''}")


@pytest.mark.parametrize("passes", [(), ("--strategy", "baseline-1f1b")])
def test_the_plan_that_is_suggested_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passes: tuple[str, ...]
) -> None:
    """It is for the same clusters and step, and what its first lines say compiles it; what fits as it is leaves no file."""
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(ROOT / "examples" / "tiny.json")]
    plan = tmp_path / "given.toml"
    plan.write_text(
        (ROOT / "examples" / "tiny.toml").read_text().replace("micro_batch_size = 2", "micro_batch_size = 8")
    )
    words = ["compile", *model, "--plan", str(plan), *passes, "--suggest", "Q.toml"]
    assert main([*words, "--capacity", "9MB"]) == 1
    assert "wrote Q.toml" in " ".join(capsys.readouterr().err.split())
    assert main([*command_in("Q.toml"), "-o", "best.rtx"]) == 0
    Path("Q.toml").unlink()
    capsys.readouterr()
    assert main(words) == 0
    assert "given.toml fits: Q.toml is not written" in " ".join(capsys.readouterr().err.split())
    assert not Path("Q.toml").exists()
    assert main([*words, "--no-advice"]) == 2


@pytest.mark.parametrize(
    ("capacity", "words"),
    [(1.6e6, "rule out all of them"), (1.7e6, "with other passes than these, 'ratrain'"), (2.2e6, "tokens fits: ")],
)
def test_more_clusters_are_needed_only_where_no_schedule_fits(
    monkeypatch: pytest.MonkeyPatch, capacity: float, words: str
) -> None:
    """A strategy that keeps everything, where nothing, only other strategies' plans, and its own plans have room by the bounds."""
    monkeypatch.setattr(advice_module, "_fitting_changes", lambda *_: [])
    request = request_of(capacity, "full-save")
    setting = CompileSetting(MODEL, GIVEN, request.strategy.passes, request.machine)
    found = advice(setting, request.strategy, peaks_of(setting), ("ratrainc plan ...",) * 2)
    said = "\n".join(note.message for note in found.notes)
    assert words in said
    assert ("needs more clusters" in said) == (capacity == 1.6e6)
    assert estimated(request).proven_empty == (capacity < 2e6)
    if found.suggestion is not None:
        outcome = try_setting(
            CompileSetting(MODEL, found.suggestion.plan, found.suggestion.pipeline, request.machine), ""
        )
        assert outcome is not None
        assert outcome.fits


def test_a_refusal_is_printed_once_and_before_anything_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def looking(*_: object) -> advice_module.Advice:
        seen.append(capsys.readouterr().err)
        return advice_module.Advice([Note("tried, and fits: something")])

    monkeypatch.setattr(advice_module, "advice", looking)
    tiny = ("--model", str(example_path("tiny.json")), "--plan", str(example_path("tiny.toml")))
    assert main(["compile", *tiny, "--capacity", "4MiB"]) == 1
    (early,) = seen
    late = capsys.readouterr().err
    assert early.count("error[RT053]: stage @") == 2, "one a stage, each once"
    assert "error[" not in late
    assert "note: tried, and fits: something" in late
