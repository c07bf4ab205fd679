"""Levers of `explain`: estimates beside whole steps, what time does not last for, and the schedule as it is, which is not compiled again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.trial.trial import at_own_addresses
from ratrain.ratrain_ir.process_pool import processes
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.levers import CompileSetting, LeverOutcome, changes, try_setting
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.timed_plan import TimedPlan, time_plan
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.commands import explain
from ratrain.ratrainc.console.parts import TextTable, text_of
from ratrain.ratrainc.memory import lever_prices
from ratrain.ratrainc.memory.lever_prices import QUICK_SECONDS, Prices, Pricing, pricing_of
from ratrain.ratrainc.report import byte_report
from ratrain.targets.codegen.emitter import without_reuse
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.simulator.figures import simulated
from ratrain.targets.target import target_of
from tests.end_to_end.tiny_runs import make_plan
from tests.end_to_end.toys import EXPERTS
from tests.mutation.subjects import SUBJECTS
from tests.ratrainc.commands.test_cli_tools import MODEL, PLAN, SOURCES

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrainc.report.byte_report import ByteReport

MICRO_BATCHES = 24
"""Of a plan of two stages, whose folded step has six."""


def setting_of(passes: str) -> tuple[CompileSetting, LeverOutcome]:
    model, plan = api.resolved(MODEL, PLAN)
    setting = CompileSetting(model, evolve(plan, micro_batches=MICRO_BATCHES), passes, load_machine(None))
    timed = time_plan(setting.model, setting.plan, passes, setting.machine)
    assert isinstance(timed, TimedPlan)
    return setting, LeverOutcome("unchanged", setting, timed.peak_bytes, timed.figures.step_seconds)


def priced(setting: CompileSetting, now: LeverOutcome, *, folded: bool) -> Prices:
    """The prices of all levers for the bytes of the first stage."""
    pricing = Pricing(setting, 0, 0.0, 1e9, folded=folded)
    return pricing.prices(now, list(map(pricing.found, pricing.tasks)))


@pytest.mark.parametrize("passes", ["joint-order,allocate-ddr", "place-1f1b,recompute{policy=full},allocate-ddr"])
@pytest.mark.sampled(2, first=1)
def test_estimates_agree_with_whole_steps(passes: str) -> None:
    """A step's steady part repeats: what is left out of it takes its pace, and holds no more, unless passes choose otherwise for fewer of them."""
    setting, now = setting_of(passes)
    whole, folded = (priced(setting, now, folded=each) for each in (False, True))
    names = [name for name, _ in changes(setting, 0)]
    for prices in (whole, folded):
        assert [each.name for each in prices.tried] == names
        assert not prices.left
    assert (whole.estimated, folded.estimated) == (False, True)
    alike = 0
    for one, other in zip(whole.tried, folded.tried, strict=True):
        assert one.fits == other.fits
        assert one.step_seconds is not None
        assert other.step_seconds == pytest.approx(one.step_seconds, rel=5e-3)
        if one.setting.plan.micro_batches == MICRO_BATCHES:
            alike += 1
            assert other.step_seconds == pytest.approx(one.step_seconds, rel=1e-9)
            assert max(one.peak_bytes) == max(other.peak_bytes)
            assert "full" not in passes or one.peak_bytes == other.peak_bytes
    assert alike >= 5


def test_exchanging_again_is_tried_where_ranks_exchange_and_frees_what_was_kept() -> None:
    """Rows of experts; another policy then has no choice about them."""
    plan = make_plan(EXPERTS, pp=1, cuts=(), dp=4, ep=2, zero=3, seq_len=64, reduce="each-micro-batch")
    passes = "place-1f1b,insert-prefetch,recompute{policy=auto},allocate-ddr"
    setting, name = CompileSetting(EXPERTS, plan, passes, load_machine(None)), "recompute{gathered=again}"
    found = dict(changes(setting, 0, together=2))
    alone = evolve(setting, plan=evolve(plan, ep=1))
    assert name not in dict(changes(alone, 0))
    kept, again = (try_setting(each, name) for each in (setting, found[name]))
    assert kept is not None
    assert again is not None
    assert again.peak_bytes[0] < kept.peak_bytes[0]
    full = dict(changes(found[name], 0))["recompute{policy=full}"]
    assert "gathered" not in full.pipeline
    assert try_setting(full, "full") is not None


def test_keys_instead_of_heads_are_tried_and_free_bytes() -> None:
    """With heads a rank keeps queries, keys, values and output whatever is recomputed; with keys, keys and values."""
    model, plan = api.resolved(MODEL, PLAN)
    passes = "place-1f1b,recompute{policy=full},allocate-ddr"
    heads = evolve(plan, dp=1, cp=2, context_exchange="heads", seq_len=2048)
    setting = CompileSetting(model, heads, passes, load_machine(None))
    name = 'context_exchange = "keys"'
    found = dict(changes(setting, 0))[name]
    peaks = {each.plan.context_exchange: max(outcome_of(each).peak_bytes) for each in (setting, found)}
    assert peaks["keys"] < peaks["heads"]
    assert name not in dict(changes(found, 0))
    with pytest.raises(DiagnosticError, match="RT053") as refused:
        api.compile(model, heads, machine=with_constants(load_machine(None), {"ddr_capacity": peaks["keys"] / 2}))
    assert f"{name} in the plan" in (refused.value.diagnostics[0].help or "")


def test_more_groups_of_heads_are_tried_and_free_bytes_where_the_output_is_kept() -> None:
    model, plan = api.resolved(MODEL, PLAN)
    passes = "place-1f1b,recompute{policy=none},allocate-ddr"
    model = evolve(model, kv_heads=4)
    plan = evolve(plan, pp=1, cuts=(), dp=1, cp=4, seq_len=8192, micro_batches=1, micro_batch_size=1)
    plan = evolve(plan, mlp_chunk=128, head_chunk=64)
    setting, name = CompileSetting(model, plan, passes, load_machine(None)), "twice the context_groups"
    peaks = [max(outcome_of(setting).peak_bytes)]
    for groups in (2, 4):
        setting = dict(changes(setting, 0))[name]
        assert setting.plan.context_groups == groups
        peaks.append(max(outcome_of(setting).peak_bytes))
    assert peaks[0] > peaks[1] > peaks[2]
    assert try_setting(dict(changes(setting, 0))[name], name) is None  # there are four heads of keys
    little = with_constants(load_machine(None), {"ddr_capacity": peaks[0] / 2})
    with pytest.raises(DiagnosticError, match="RT053") as refused:
        api.compile(model, plan, passes=passes, machine=little)
    assert "context_groups = 2 in the plan" in (refused.value.diagnostics[0].help or "")


def outcome_of(setting: CompileSetting) -> LeverOutcome:
    """Compile, place and simulate a setting, which must be allowed."""
    outcome = try_setting(setting, "x")
    assert outcome is not None
    return outcome


def test_what_time_does_not_last_for_is_named_with_the_option_that_brings_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "x.rtir")
    assert main(["compile", *SOURCES, "-o", path]) == 0
    capsys.readouterr()
    assert main(["explain", path, "--seconds", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (now,) = facts["levers"]
    assert (now["name"], now["freed_bytes"], now["fits"]) == ("unchanged", 0, True)
    assert "recompute{policy=full}" in facts["levers_left"]
    assert facts["levers_seconds"] > 0
    assert main(["explain", path, "--seconds", "0"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "not tried, for want of time: " in shown
    assert "half the head_chunk" in shown
    assert "--seconds " in shown


def test_estimates_are_called_so() -> None:
    facts = {
        "name": "a",
        "freed_bytes": 1 << 20,
        "peak_bytes": 1 << 20,
        "step_seconds": 2.0,
        "estimated": True,
        "fits": True,
    }
    for estimated in (True, False):
        table = byte_report._levers_table([facts | {"estimated": False}, facts | {"estimated": estimated}])
        assert ("about 1.00 MiB" in text_of([table])) == estimated
        assert ("estimated from fewer micro-batches" in text_of([table])) == estimated


def test_changes_that_free_nothing_are_named_apart() -> None:
    """One that frees less than is shown, one that moves the peak to another stage, and one that costs bytes."""
    mib = 1 << 20

    def lever(name: str, freed: int | None, peak: int) -> dict[str, Any]:
        return {"name": name, "freed_bytes": freed, "peak_bytes": peak, "step_seconds": 1.0, "estimated": False}

    tried = [
        lever("unchanged", 0, 8 * mib),
        lever("frees", mib, 7 * mib),
        lever("rounds to nothing", 4096, 8 * mib - 4096),
        lever("moves the peak", mib, 9 * mib),
        lever("costs", -mib, 9 * mib),
        lever("fewer stages", None, 9 * mib),
        lever("more stages", None, 6 * mib),
    ]
    table, rest = byte_report._levers(tried)
    assert isinstance(table, TextTable)
    assert [row[0] for row in table.rows] == ["unchanged", "frees", "more stages"]
    assert (
        rest == "tried, and free less than 0.01 MiB of the peak: rounds to nothing; moves the peak; costs; fewer stages"
    )
    assert not list(byte_report._levers(tried[:1]))
    assert len(list(byte_report._levers(tried[:2]))) == 1


def test_the_schedule_itself_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "x.rtir")
    assert main(["compile", *SOURCES, "-o", path]) == 0
    wanted = api.simulate(api.load(path)).step_seconds

    def never(*_: object) -> None:
        raise AssertionError("it is there already")

    monkeypatch.setattr("ratrain.ratrainc.choices.timed_plan.lower", never)
    levers = api.explain(path, seconds=0).to_json()["levers"]
    assert [lever["step_seconds"] for lever in levers] == [wanted]


@pytest.mark.parametrize("name", list(SUBJECTS))
@pytest.mark.sampled(3)
def test_waits_without_reuse_are_those_of_tensors_at_addresses_of_their_own(name: str) -> None:
    subject = SUBJECTS[name]
    module = subject.module()
    machine = subject.machine
    apart, _ = simulated(without_reuse(api.emit(module, machine=machine), module), machine)
    assert apart.step_seconds == target_of(machine).step_seconds(at_own_addresses(module))


@pytest.mark.parametrize(
    ("ops", "seconds", "folded", "given"),
    [
        (1_000, None, False, 120.0),
        (30_000, None, True, 120.0),
        (10_000_000, None, True, 8.0),
        (1_000, 0.1, True, 0.1),
        (30_000, 1e9, False, 1e9),
    ],
)
def test_the_time_that_levers_have(ops: int, seconds: float | None, folded: bool, given: float) -> None:
    """All of it where levers are few seconds, an answer soon where they are many; whole steps where these are expected to end."""
    setting, _ = setting_of("joint-order,allocate-ddr")
    pricing = pricing_of(setting, 0, ops, seconds)
    assert (pricing.folded, pricing.seconds) == (folded, given)


def test_steps_are_not_folded_where_that_leaves_out_little() -> None:
    setting, _ = setting_of("joint-order,allocate-ddr")
    few = evolve(setting, plan=evolve(setting.plan, micro_batches=8))
    assert pricing_of(setting, 0, 30_000, 0).folded
    assert not pricing_of(few, 0, 30_000, 0).folded


@pytest.mark.parametrize("passes", ["place-1f1b,recompute{policy=full}", "joint-order,allocate-ddr"])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.sampled(4)
def test_processes_side_by_side_find_what_one_finds(monkeypatch: pytest.MonkeyPatch, passes: str, folded: bool) -> None:
    """Schedules with addresses and without, levers whole and folded."""

    def of(setting: CompileSetting, stage: int, _ops: int, seconds: float) -> Pricing:
        return Pricing(setting, stage, 0.0, seconds, folded=folded)

    monkeypatch.setattr(byte_report, "pricing_of", of)
    model, plan = api.resolved(MODEL, PLAN)
    module = api.compile(model, evolve(plan, micro_batches=MICRO_BATCHES), passes=passes)
    found = []
    for count in (1, 2):
        with processes(count, least_work=0):
            found.append(api.explain(module, seconds=1e9).to_json() | {"levers_seconds": None})
    assert found[0] == found[1]
    assert len(found[0]["levers"]) > 5
    assert any(lever["estimated"] for lever in found[0]["levers"]) == folded


def test_the_peak_is_told_before_changes_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who interrupts the trying keeps what is known; progress counts, and names the option that spares it."""
    path = str(tmp_path / "x.rtir")
    assert main(["compile", *SOURCES, "-o", path]) == 0
    told: list[str] = []
    early: list[dict[str, Any]] = []

    def at_peak(report: ByteReport) -> None:
        early.append(report.to_json())
        told.clear()

    whole = api.explain(path, seconds=1e9, progress=lambda now: told.append(now.text), at_peak=at_peak).to_json()
    assert early[0] | {key: whole[key] for key in ("levers", "levers_left", "levers_seconds")} == whole
    assert told == [f"trying change {n} of {len(told)}" for n in range(1, len(told) + 1)]
    assert len(told) > 5

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Pricing, "found", interrupted)
    capsys.readouterr()
    assert main(["explain", path]) == 130
    assert "live at the peak, by owner" in capsys.readouterr().out


def test_the_help_of_explain_has_one_rule_for_the_time_and_it_is_the_one_that_holds() -> None:
    """`--seconds` says the time there is, the text the time above which steps are estimated; both by their constants."""
    said = {each.name: " ".join((getattr(each, "help", "") or "").split()) for each in explain.command.params}
    text = " ".join((explain.command.help or "").split())
    assert lever_prices._EXPECTED_AT_MOST == 60
    assert f"expected to take a minute or less, marked estimates among them, else {QUICK_SECONDS:g}." in said["seconds"]
    assert f"expected to take more than {QUICK_SECONDS:g} s (more than --seconds, if given)" in text
    assert text.count(f"{QUICK_SECONDS:g} s") == 1
    assert not any("does not depend on the number" in each for each in said.values())


def test_more_expert_ranks_are_tried_and_free_bytes() -> None:
    model = evolve(EXPERTS, ffn_size=512)
    plan = make_plan(model, pp=1, cuts=(), dp=4, zero=1)
    setting = CompileSetting(model, plan, "place-1f1b,recompute{policy=full},allocate-ddr", load_machine(None))
    name, peaks = "twice the ep", [max(outcome_of(setting).peak_bytes)]
    for ranks in (2, 4):
        setting = dict(changes(setting, 0))[name]
        assert setting.plan.ep == ranks
        peaks.append(max(outcome_of(setting).peak_bytes))
    assert peaks[0] > peaks[1] > peaks[2]
    assert try_setting(dict(changes(setting, 0))[name], name) is None  # there are four replicas
    little = with_constants(load_machine(None), {"ddr_capacity": peaks[2] / 2})
    with pytest.raises(DiagnosticError, match="RT053") as refused:
        api.compile(model, plan, machine=little)
    assert "ep = 2 in the plan" in (refused.value.diagnostics[0].help or "")
