"""A series of sharded checkpoints: any of them is the run that never stopped; what is damaged is said and passed over."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Severity
from ratrain.targets.runtime.arena.tensor_file import StoredTensor
from ratrain.targets.runtime.checkpoint import checkpoint, checkpoint_places, checkpoint_series
from ratrain.targets.runtime.checkpoint.checkpoint import MANIFEST_FILE
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_weights, load_latest, saved_steps, what_is_left
from ratrain.targets.runtime.checkpoint.checkpoint_shards import load_shards
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.weights.weights import named_parameters
from tests.end_to_end.tiny_runs import MODEL, losses, make_program, same_bits, start, train

LAYOUTS: dict[str, dict[str, Any]] = {
    "2-stages-2-replicas": {},
    "3-replicas-tied": {"model": evolve(MODEL, tied_embeddings=True), "dp": 3},
    "views-gathered-for-each-use": {"zero": 3, "reduce": "each-micro-batch"},
    "nothing-sharded": {"zero": 0},
}
F32: dict[str, Any] = {"view_dtype": "f32"}


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def test_a_loss_is_told_in_steps(place: str) -> None:
    assert what_is_left(place, 3) == "nothing was saved: 3 steps are lost; --save-every N saves after every N steps"
    train(make_program(), 5, save=place, save_every=2)
    shutil.rmtree(saved_steps(place)[0][1])
    assert (
        what_is_left(place, 7) == f"the state after 4 steps is saved, steps since and lost: 3; --resume {place} goes on"
    )


def names(place: str) -> list[str]:
    """What is in a directory of checkpoints, beside what the ranks say of themselves."""
    return sorted(path.name for path in Path(place).iterdir() if path.name != checkpoint_series.RUN_FOLDER)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(2)
def test_going_on_from_any_checkpoint_is_never_having_stopped(name: str, place: str) -> None:
    program = make_program(**LAYOUTS[name])
    whole = train(program, 5, save=place, save_every=1, keep_last=9)
    assert [step for step, _ in saved_steps(place)] == [5, 4, 3, 2, 1]
    for step, directory in saved_steps(place)[1:]:
        rest = train(program, 5 - step, resume=directory)
        assert not rest.warnings
        assert [timed.report for timed in rest.done] == [timed.report for timed in whole.done[step:]]
        same_bits(rest, whole)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"dp": 1, "micro_batches": 6}, id="one-replica", marks=pytest.mark.full),
        pytest.param({"pp": 3}, id="three-stages"),
        pytest.param({"pp": 1, "dp": 3, "micro_batches": 2}, id="one-stage-three-replicas"),
        pytest.param({"zero": 0}, id="nothing-sharded", marks=pytest.mark.full),
    ],
)
def test_another_plan_reads_the_same_state(keys: dict[str, Any], place: str) -> None:
    """The state is equal in every bit; only the sums of later steps are made in another order."""
    written = train(make_program(**F32), 3, save=place, save_every=3)
    rest = start(make_program(**F32, **keys), 3, resume=place)
    before, after = training_state(written.engine, 3), training_state(rest.engine, 3)
    for unit in block_chain(MODEL):
        for kind in ("p", "m1", "m2"):
            assert getattr(before.blocks[unit], kind).tobytes() == getattr(after.blocks[unit], kind).tobytes()
        assert before.blocks[unit].t == after.blocks[unit].t == 3
    list(rest.steps())
    np.testing.assert_allclose(losses(rest), losses(train(make_program(**F32), 6))[3:], rtol=1e-6)


def test_the_last_few_are_kept_and_the_end_is_saved_once(place: str) -> None:
    train(make_program(), 7, save=place, save_every=3, keep_last=2)
    assert names(place) == ["step-00000006", "step-00000007"]
    assert not list(Path(place).rglob(".*"))


def test_what_an_interrupted_save_left_is_removed(place: str) -> None:
    train(make_program(), 1, save=place, save_every=1)
    (Path(place) / ".writing-00000002").mkdir()
    (Path(place) / ".writing-00000002" / "stage-0-replica-0.safetensors").write_bytes(b"half")
    rest = train(make_program(), 1, save=place, save_every=1, resume=place)
    assert rest.first_step == 1
    assert names(place) == ["step-00000001", "step-00000002"]


def shard(folder: Path) -> Path:
    return folder / "stage-1-replica-0.safetensors"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Any] = {
    "a bit flipped": lambda folder: flip_a_bit(shard(folder)),
    "a bit flipped in the manifest": lambda folder: flip_a_bit(folder / MANIFEST_FILE),
    "a file cut short": lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:-100]),
    "a file missing": lambda folder: shard(folder).unlink(),
    "a file empty": lambda folder: shard(folder).write_bytes(b""),
    "no manifest": lambda folder: (folder / MANIFEST_FILE).unlink(),
    "half a manifest": lambda folder: (folder / MANIFEST_FILE).write_bytes((folder / MANIFEST_FILE).read_bytes()[:200]),
    "an empty directory": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.sampled(3)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(damage: str, place: str) -> None:
    program = make_program()
    whole = train(program, 4, save=place, save_every=1, keep_last=4)
    DAMAGE[damage](Path(place) / "step-00000004")
    DAMAGE[damage](Path(place) / "step-00000003")
    rest = train(program, 2, resume=place, save=place, save_every=1)
    assert rest.first_step == 2
    assert [warning.severity for warning in rest.warnings] == [Severity.WARNING] * 2
    assert "step-00000004" in rest.warnings[0].message
    assert "step-00000003" in (rest.warnings[0].help or "")
    assert "step-00000003" in rest.warnings[1].message
    assert losses(rest) == losses(whole)[2:]
    assert not train(program, 1, resume=place).warnings  # what was damaged has been replaced


def test_when_all_are_damaged_there_is_nothing_to_go_on_from(place: str) -> None:
    program = make_program()
    train(program, 2, save=place, save_every=1)
    for _, directory in saved_steps(place):
        flip_a_bit(shard(Path(directory)))
    with pytest.raises(DiagnosticError, match=r"RT092.*SHA-256"):
        start(program, 1, resume=place)


def edit_manifest(folder: Path, change: Any) -> None:
    """Change a manifest as a program would that writes the format, sealing it again."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    change(manifest)
    manifest["manifest_sha256"] = checkpoint.manifest_digest(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


def drop_a_piece(manifest: dict[str, Any]) -> None:
    manifest["files"]["stage-0-replica-1.safetensors"]["pieces"].pop()


def drop_a_file(manifest: dict[str, Any]) -> None:
    del manifest["files"]["stage-0-replica-1.safetensors"]


def repeat_a_piece(manifest: dict[str, Any]) -> None:
    pieces = manifest["files"]["stage-0-replica-1.safetensors"]["pieces"]
    pieces.append(pieces[0])


def lead_outside(manifest: dict[str, Any]) -> None:
    manifest["files"]["../secret"] = manifest["files"].pop("stage-0-replica-1.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        drop_a_piece,
        drop_a_file,
        repeat_a_piece,
        lead_outside,
        lambda manifest: manifest["files"]["stage-0-replica-1.safetensors"]["pieces"][0].__setitem__(1, "0"),
        lambda manifest: manifest["files"]["stage-0-replica-1.safetensors"]["pieces"][0].__setitem__(0, "nothing"),
        lambda manifest: manifest["files"]["stage-0-replica-1.safetensors"].__setitem__("pieces", 3),
        lambda manifest: manifest["files"].__setitem__("a\0b", manifest["files"].pop("stage-0-replica-1.safetensors")),
        lambda manifest: manifest.__setitem__("files", 3),
        lambda manifest: manifest["files"].__setitem__("stage-0-replica-1.safetensors", None),
        lambda manifest: manifest.__setitem__("step", -4),
        lambda manifest: manifest.__setitem__("run", []),
    ],
)
@pytest.mark.sampled(2)
def test_a_manifest_that_contradicts_itself_is_refused(change: Any, place: str) -> None:
    train(make_program(), 1, save=place, save_every=1)
    folder = Path(place) / "step-00000001"
    edit_manifest(folder, change)
    with pytest.raises(DiagnosticError, match="RT092"):
        load_shards(str(folder), MODEL)


def test_a_checkpoint_of_another_model_is_refused(place: str) -> None:
    train(make_program(), 1, save=place, save_every=1)
    with pytest.raises(DiagnosticError, match=r"RT092.*layers"):
        load_latest(place, evolve(MODEL, layers=4), Processes())


def test_processes_check_their_share_of_the_files(place: str) -> None:
    train(make_program(), 1, save=place, save_every=1)
    folder = Path(place) / "step-00000001"
    flip_a_bit(shard(folder))
    found = []
    for number in range(4):
        try:
            load_shards(str(folder), MODEL, share=(number, 4))
            found.append(True)
        except DiagnosticError:
            found.append(False)
    assert sorted(found) == [False, True, True, True]


@pytest.mark.parametrize("call", range(9))
@pytest.mark.sampled(2)
def test_a_full_disk_leaves_the_checkpoints_before(call: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = make_program()
    run = start(program, 3, save=place, save_every=1)
    steps = run.steps()
    next(steps)
    next(steps)  # the checkpoint of step 1 has been written
    original, count = checkpoint.os.fsync, [0]

    def failing(handle: int) -> None:
        count[0] += 1
        if count[0] == call + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.os, "fsync", failing)
        if call < 7:  # 4 files, manifest, its folder, the folder of the series
            with pytest.raises(DiagnosticError) as caught:
                next(steps)
            (problem,) = caught.value.diagnostics
            assert problem.code == "RT002"
            assert "saving after step 1" in problem.message
            assert "No space left on device" in problem.message
            if call < 4:
                assert f"stage @{call // 2} replica {call % 2}" in problem.message
        else:
            next(steps)
            assert count[0] == 7
    assert "step-00000001" in names(place)
    assert not [name for name in names(place) if name.startswith(".")]
    rest = train(program, 1, resume=place)
    assert rest.first_step in (1, 2)
    assert losses(rest) == losses(train(program, 3))[rest.first_step : rest.first_step + 1]


def test_a_single_checkpoint_is_no_place_for_a_series(place: str) -> None:
    train(make_program(), 1, save=place)
    with pytest.raises(DiagnosticError, match=r"RT092.*single checkpoint"):
        start(make_program(), 1, save=place, save_every=1)


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(place: str) -> None:
    Path(place).write_bytes(b"a file")
    with pytest.raises(DiagnosticError, match="RT002"):
        start(make_program(), 1, save=place, save_every=1)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_a_single_checkpoint(tied: bool, place: str, tmp_path: Path) -> None:
    model = evolve(MODEL, tied_embeddings=tied)
    train(make_program(model, dp=3), 2, save=place, save_every=1)
    train(make_program(model, dp=3), 2, save=str(tmp_path / "single"))
    found, source = latest_weights(place)
    same, expected = latest_weights(str(tmp_path / "single"))
    assert evolve(found, name="") == evolve(same, name="") == evolve(model, name="")
    for name in named_parameters(model):
        assert source(name).tobytes() == expected(name).tobytes()
        assert source(name).shape == expected(name).shape


def test_weights_are_read_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each parameter of a block, and without the moments."""
    train(make_program(dp=3), 1, save=place, save_every=1)
    model, source = latest_weights(place)
    original, read = StoredTensor.values, [0]

    def counted(tensor: StoredTensor, start: int, stop: int) -> Any:
        read[0] += stop - start
        return original(tensor, start, stop)

    monkeypatch.setattr(StoredTensor, "values", counted)
    for name in named_parameters(model):
        source(name)
    assert read[0] == model.parameters


def test_a_series_is_no_place_for_a_single_checkpoint(place: str) -> None:
    train(make_program(), 1, save=place, save_every=1)
    with pytest.raises(DiagnosticError) as caught:
        start(make_program(), 1, save=place, resume=place)
    (problem,) = caught.value.diagnostics
    assert problem.code == "RT092"
    assert "--save-every" in (problem.help or "")


def test_a_moved_checkpoint_is_the_same(place: str, tmp_path: Path) -> None:
    whole = train(make_program(), 3, save=place, save_every=2)
    shutil.move(str(Path(place) / "step-00000002"), str(tmp_path / "elsewhere"))
    rest = train(make_program(), 1, resume=str(tmp_path / "elsewhere"))
    assert losses(rest) == losses(whole)[2:]


def test_the_manifest_lists_every_file_with_its_hash(place: str) -> None:
    train(make_program(), 1, save=place, save_every=1)
    folder = Path(place) / "step-00000001"
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    assert sorted(manifest["files"]) == sorted(path.name for path in folder.iterdir() if path.name != MANIFEST_FILE)
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_names_that_are_no_steps_are_left_alone(place: str) -> None:
    train(make_program(), 1, save=place, save_every=1)
    (Path(place) / "notes.txt").write_text("mine")
    (Path(place) / "step-last").mkdir()
    train(make_program(), 2, save=place, save_every=1, resume=place, keep_last=1)
    assert names(place) == ["notes.txt", "step-00000003", "step-last"]
    assert checkpoint_series.saved_steps(place)[0][0] == 3


def test_what_was_just_saved_is_kept_whatever_later_steps_are_there(place: str) -> None:
    """A later checkpoint that was damaged is no reason to remove the only sound ones."""
    program = make_program()
    whole = train(program, 4, save=place, save_every=1, keep_last=4)
    flip_a_bit(shard(Path(place) / "step-00000004"))
    shutil.rmtree(Path(place) / "step-00000003")
    rest = train(program, 1, resume=place, save=place, save_every=1, keep_last=1)
    assert names(place) == ["step-00000003", "step-00000004"]
    again = train(program, 1, resume=place)
    assert losses(rest) + losses(again) == losses(whole)[2:]


@pytest.mark.parametrize("resumed", [None, "step-00000001"])
def test_a_series_that_has_gone_further_is_refused(resumed: str | None, place: str) -> None:
    """Its later checkpoints would be taken for those of the new run."""
    train(make_program(), 3, save=place, save_every=1, keep_last=9)
    before = names(place)
    with pytest.raises(DiagnosticError) as caught:
        start(make_program(), 1, save=place, save_every=1, resume=resumed and str(Path(place) / resumed))
    (problem,) = caught.value.diagnostics
    assert problem.code == "RT092"
    assert "step-00000003" in problem.message
    assert f"--resume {place}" in (problem.help or "")
    assert names(place) == before


def test_a_loss_that_is_no_number_is_not_saved(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights before that step were bad already: keeping them would take the place of a checkpoint that is worth something."""
    run = start(make_program(), 5, save=place, save_every=1, keep_last=1)
    steps = run.steps()
    next(steps)
    next(steps)
    original = run.engine.run_step
    monkeypatch.setattr(run.engine, "run_step", lambda step: evolve(original(step), loss=float("nan")))
    with pytest.raises(DiagnosticError, match=r"RT093.*diverged"):
        list(steps)
    assert names(place) == ["step-00000002"]
    assert [step.report.step for step in run.done] == [0, 1, 2]


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that cannot exchange two directories."""
    monkeypatch.setattr(checkpoint_places, "_renameat2", lambda: None)


def left_by_a_crash(place: str, renamed: str) -> list[str]:
    """What a machine leaves that stops after the old checkpoint of a step went aside, before the new one had its name."""
    train(make_program(), 2, save=place, save_every=1, keep_last=1)
    folder = Path(place) / "step-00000002"
    shutil.copytree(folder, Path(place) / ".writing-00000002")
    folder.rename(Path(place) / renamed)
    return names(place)


def test_the_old_checkpoint_of_a_step_survives_a_crash_while_it_is_replaced(place: str) -> None:
    left_by_a_crash(place, ".replaced-step-00000002")
    rest = train(make_program(), 1, save=place, save_every=2, resume=place)
    assert rest.first_step == 2
    assert losses(rest) == losses(train(make_program(), 3))[2:]


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.usefixtures("no_exchange")
def test_an_old_checkpoint_is_put_back_when_the_new_one_cannot_have_its_name(
    call: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_program(), 2, save=place, save_every=1, keep_last=1)
    run = start(make_program(), 1, resume=place, save=place, save_every=1)
    original, count = Path.rename, [0]

    def failing(path: Path, target: Path) -> Path:
        count[0] += 1
        if count[0] == call + 1:
            raise OSError(errno.EIO, "Input/output error")
        return original(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", failing)
        with pytest.raises(DiagnosticError, match="RT002"):
            run.save()
    assert names(place) == ["step-00000002"]
    assert start(make_program(), 1, resume=place).first_step == 2
