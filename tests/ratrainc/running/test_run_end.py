"""Tests of how runs end: whatever ends one, the steps before it are saved.

A step without labels is told before the first step. A run that trains nothing says so.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.training import run_training
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.checkpoint import checkpoint_series
from ratrain.targets.runtime.checkpoint.checkpoint_series import load_latest
from ratrain.targets.runtime.data.data import Batches, TokenStream
from ratrain.targets.runtime.data.documents import Documents
from ratrain.targets.runtime.engine.evaluation import HeldOut
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.kernels.host_scalars import HostScalars
from ratrain.targets.runtime.settings import Evaluation, RunSettings, Saving, Start
from tests.end_to_end.tiny_runs import MODEL, make_plan, make_program

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrainc.running.run_result import RunResult
    from ratrain.targets.program.program import Program

SMALL = evolve(MODEL, vocab_size=256)
PROGRAM = make_program(SMALL, pp=1, dp=1, micro_batches=1)
STEPS, ENDS = 6, 4
EVALUATED = Evaluation(every=1, batches=1)


def run(steps: int, *, program: Program = PROGRAM, each_step: Any = None, **groups: Any) -> RunResult:
    display = Display(quiet=True, each_step=each_step)
    return run_training(program, DataChoice(), RunSettings(steps, evaluation=EVALUATED, **groups), Outputs(), display)


def saved_state(place: Path) -> tuple[int, dict[str, bytes]]:
    """Steps done, and every block's weights and moments, of the newest checkpoint."""
    state = load_latest(str(place), SMALL, Processes()).state
    kinds = ("p", "m1", "m2")
    return state.step, {f"{b}.{k}": getattr(state.blocks[b], k).tobytes() for b in state.blocks for k in kinds}


def data_fails(patch: pytest.MonkeyPatch) -> None:
    """Reading the data of a step fails amid its instructions."""
    whole = Batches.fill

    def fill(self: Batches, step: int, *words: Any) -> None:
        if step == ENDS and self.order != "sequential":
            fail("RT090", "the disk with the data is gone")
        whole(self, step, *words)

    patch.setattr(Batches, "fill", fill)


def evaluation_fails(patch: pytest.MonkeyPatch) -> None:
    """The step is done, its evaluation is not."""
    losses = iter([1.0] * (ENDS - 1))
    patch.setattr(HeldOut, "loss", lambda *_: next(losses, None) or fail("RT090", "the held-out data are gone"))


def updates_fail(patch: pytest.MonkeyPatch) -> None:
    """Some of a step's updates are done when one fails: the state is that of no step."""
    whole, done = HostScalars.update, iter(range(ENDS * len(PROGRAM.topology.stage_blocks[0]) + 3))

    def update(self: HostScalars, *words: Any, **named: Any) -> None:
        if next(done, None) is None:
            fail("RT093", "the file of the moments is gone")
        whole(self, *words, **named)

    patch.setattr(HostScalars, "update", update)


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("breaks", [data_fails, evaluation_fails])
def test_what_ends_a_run_leaves_the_steps_before_it_saved(
    breaks: Any, every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a run of that many steps would have saved them; and the way out that is told goes on."""
    whole, place = tmp_path / "whole", tmp_path / "place"
    run(ENDS, saving=Saving(str(whole), every))
    with monkeypatch.context() as patch:
        breaks(patch)
        with pytest.raises(DiagnosticError, match="RT090"):
            run(STEPS, saving=Saving(str(place), every))
    assert saved_state(place) == saved_state(whole)
    said = " ".join(capfd.readouterr().err.split())
    saved = place / f"step-{ENDS:08d}" if every else place
    assert f"warning[RT093]: the run ends early: '{saved}' has the state after {ENDS} steps" in said
    assert f"go on with --resume {place}" in said
    run(STEPS - ENDS, saving=Saving(str(place), every), start=Start(checkpoint=str(place)))
    assert saved_state(place)[0] == STEPS


@pytest.mark.parametrize("every", [None, 3])
def test_an_end_amid_updates_saves_no_mixture(
    every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    updates_fail(monkeypatch)
    place = tmp_path / "place"
    with pytest.raises(DiagnosticError, match="the moments"):
        run(STEPS, saving=Saving(str(place), every))
    assert [path.name for path in place.glob("step-*")] == (["step-00000003"] if every else [])
    assert "ends early" not in capfd.readouterr().err


def test_a_fault_of_who_looks_at_steps_costs_none(tmp_path: Path) -> None:
    def look(timed: Any) -> None:
        if timed.report.step == ENDS - 1:
            raise LookupError("not RATrain's")

    with pytest.raises(LookupError):
        run(STEPS, each_step=look, saving=Saving(str(tmp_path / "place")))
    assert saved_state(tmp_path / "place")[0] == ENDS


def test_a_save_that_failed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(*words: Any) -> None:
        tried.append(0)
        fail("RT002", "the disk is full")

    place = tmp_path / "place"
    monkeypatch.setattr("ratrain.targets.runtime.checkpoint.checkpoint_series.seal_shards", refuse)
    with pytest.raises(DiagnosticError, match="the disk is full"):
        run(STEPS, saving=Saving(str(place), 3))
    assert len(tried) == 1


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_save_that_fails_says_what_there_is_to_go_on_from(
    good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, whole, before = tmp_path / "place", checkpoint_series.seal_shards, iter(range(good))

    def seal(*words: Any) -> None:
        if next(before, None) is None:
            raise OSError("no space")
        whole(*words)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_series, "seal_shards", seal)
        with pytest.raises(DiagnosticError) as caught:
            run(STEPS, saving=Saving(str(place), 2))
    (problem,) = caught.value.diagnostics
    assert problem.message.startswith(f"saving after step {2 * good + 1}: ")
    if not good:
        assert problem.help.endswith("nothing was saved before")
        return
    assert problem.help.endswith(f"the state after {2 * good} steps is whole: go on with --resume {place}")
    run(1, saving=Saving(str(place), 2), start=Start(checkpoint=str(place)))
    assert saved_state(place)[0] == 2 * good + 1


def test_a_resume_under_another_plan_names_the_keys_with_both_values(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "place")
    run(2, saving=Saving(place))
    other = make_program(SMALL, pp=1, dp=1, micro_batches=1, head_chunk=3, loss_scale=8.0)
    run(1, program=other, start=Start(checkpoint=place))
    said = " ".join(capfd.readouterr().err.split())
    assert "the checkpoint was written with another plan: head_chunk, loss_scale: not bit for bit the same" in said
    assert f"plan: head_chunk = {PROGRAM.plan.head_chunk} then, 3 now" in said
    assert "plan: loss_scale = dynamic then, 8.0 now" in said
    assert "plan_hash" not in said


# Steps without labels.


@st.composite
def streams(draw: st.DrawFn) -> TokenStream:
    """Documents of which most are prompts altogether."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=2, max_size=30))
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    whole = [draw(st.sampled_from([0, 1, 1, 1])) for _ in lengths]
    counted = np.array(
        [end if prompt else start for start, end, prompt in zip(bounds, bounds[1:], whole, strict=False)]
    )
    return TokenStream(
        "drawn", np.zeros(bounds[-1], np.uint16), "", documents=Documents.ending_in_answers(bounds, counted)
    )


@settings(max_examples=150, deadline=None)
@given(
    stream=streams(),
    order=st.sampled_from(["sequential", "shuffled", "documents"]),
    size=st.integers(1, 9),
    first=st.integers(0, 9),
    count=st.integers(1, 30),
)
def test_the_first_step_without_labels_is_found(
    stream: TokenStream, order: Any, size: int, first: int, count: int
) -> None:
    seq_len = min(4, len(stream.tokens) - 1)
    if seq_len < 1:
        return
    plan = make_plan(MODEL, pp=1, dp=1, micro_batches=1, micro_batch_size=size, seq_len=seq_len)
    batches = Batches(stream, plan, order, 1)
    lacking = [step for step in range(first, first + count) if not batches.counted(step)]
    if not lacking:
        batches.check_labels(first, first + count)
        return
    with pytest.raises(DiagnosticError) as caught:
        batches.check_labels(first, first + count)
    (problem,) = caught.value.diagnostics
    assert problem.code == "RT090"
    assert problem.message.startswith(f"step {lacking[0]} has no label in the loss")


def test_one_sequence_without_labels_may_stand_on_both_sides_of_a_pass() -> None:
    """Last of one and first of the next: then a step of two sequences has none."""
    stream = TokenStream(
        "made",
        np.zeros(13, np.uint16),
        "",
        documents=Documents.ending_in_answers(np.array([0, 5, 13]), np.array([5, 5])),
    )
    plan = make_plan(MODEL, pp=1, dp=1, micro_batches=1, micro_batch_size=2, seq_len=4)
    found = set()
    for seed in range(9):
        batches = Batches(stream, plan, "shuffled", seed)
        lacking = [step for step in range(20) if not batches.counted(step)]
        found.add(bool(lacking))
        if lacking:
            with pytest.raises(DiagnosticError, match=f"step {lacking[0]} has no label"):
                batches.check_labels(0, 20)
        else:
            batches.check_labels(0, 20)
    assert True in found


def test_a_step_without_labels_is_told_before_the_first_and_the_way_out_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program, data, place = tmp_path / "t.rtx", tmp_path / "chats.jsonl", tmp_path / "place"
    write_program(PROGRAM, str(program))
    lines = [{"prompt": "ab", "completion": "c" * 18}] * 6 + [{"prompt": "q" * 60, "completion": "a" * 20}] * 3
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["run", str(program), "--data", str(data), "--train-on", "completion", "--order", "sequential"]
    words += ["--save", str(place)]
    assert main([*words, "--steps", "12"]) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "error[RT090]: step 6 has no label in the loss" in said
    assert "the 6 steps before it can be run: --steps 6" in said
    assert not place.exists()
    assert main([*words, "--steps", "6"]) == 0
    assert saved_state(place)[0] == 6
    capfd.readouterr()
    assert main([*words[:-2], "--resume", str(place), "--steps", "2"]) == 1
    assert "can be run" not in capfd.readouterr().err


# Runs that train nothing.

F16 = {"pp": 1, "dp": 2, "micro_batches": 1}


@pytest.mark.parametrize("clip", ["none", "global"])
def test_a_fixed_scale_that_always_overflows_is_an_error(
    clip: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    optimizer = evolve(make_plan().optimizer, clip=clip)
    program, place = tmp_path / "t.rtx", tmp_path / "place"
    write_program(make_program(SMALL, loss_scale=2.0**30, optimizer=optimizer, **F16), str(program))
    words = ["run", str(program), "--steps", "3", "--save", str(place)]
    assert main(words) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert (
        "error[RT093]: nothing was trained: the gradients of 3 steps overflowed, and every update was left out" in said
    )
    assert 'loss_scale = "dynamic"' in said
    assert saved_state(place)[0] == 3
    assert main([*words, "--json"]) == 1
    (problem,) = json.loads(capfd.readouterr().out)["diagnostics"]
    assert problem["code"] == "RT093"


def test_a_dynamic_scale_that_still_falls_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ratrain.targets.runtime.arena.scalars.INITIAL_SCALE", 2.0**30)
    assert run(2, program=make_program(SMALL, **F16)).exit_code == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "warning[RT093]: nothing was trained: the gradients of 2 steps overflowed" in said
    assert "the loss scale has fallen to 2.68435e+08" in said
    assert "run more steps" in said


def test_updates_that_are_left_out_in_every_step_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of one block alone."""
    whole = HostScalars.update

    def update(self: HostScalars, given: Any, **named: Any) -> None:
        if given.block == "embed":
            given.views["flag"][0] = 1
        whole(self, given, **named)

    monkeypatch.setattr(HostScalars, "update", update)
    assert run(2, program=make_program(SMALL, loss_scale=8.0, **F16)).exit_code == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "warning[RT093]: gradients overflowed in 2 steps, and 4 of " in said


def test_a_run_that_trains_says_nothing_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    program = make_program(SMALL, loss_scale=8.0, **F16)
    assert run(2, program=program).exit_code == 0
    assert "RT093" not in capfd.readouterr().err
