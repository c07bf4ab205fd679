"""Where a checkpoint is saved: what stands there already, what failures and interrupted saves leave, modes of files."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from attrs import evolve

from ratrain.ratrain_ir.model.blocks import block, parameters
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.runtime.checkpoint import checkpoint, checkpoint_places
from ratrain.targets.runtime.checkpoint.checkpoint import (
    check_checkpoint_place,
    clear_leftovers,
    hold_checkpoint_place,
    load_checkpoint,
    save_checkpoint,
)
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_weights, load_latest
from ratrain.targets.runtime.engine.processes import Processes
from tests.targets.runtime.checkpoint.training_states import LLAMA, RUN, assert_equal, make_state, refusal, snapshot


class TestPlace:
    def test_a_checkpoint_is_replaced(self, saved):
        later = evolve(make_state(LLAMA, 1), step=99)
        save_checkpoint(str(saved), LLAMA, later, {"seed": 8})
        found, run = load_checkpoint(str(saved), LLAMA)
        assert_equal(found, later, LLAMA)
        assert run == {"seed": 8}
        assert list(saved.parent.iterdir()) == [saved]

    def test_an_empty_directory_is_taken(self, tmp_path):
        (tmp_path / "ck").mkdir()
        save_checkpoint(f"{tmp_path}/ck/", LLAMA, make_state(LLAMA), {})
        assert load_checkpoint(str(tmp_path / "ck"), LLAMA)[0].step == 41

    def test_a_link_keeps_pointing_there(self, saved):
        link = saved.parent / "link"
        link.symlink_to(saved)
        save_checkpoint(str(link), LLAMA, evolve(make_state(LLAMA), step=50), {})
        assert link.is_symlink()
        assert load_checkpoint(str(saved), LLAMA)[0].step == 50

    @pytest.mark.parametrize("others", [["notes.txt"], ["manifest.json", "state.safetensors", "notes.txt"], ["d/f"]])
    def test_a_directory_with_other_files_is_kept(self, tmp_path, others):
        for name in others:
            path = tmp_path / "ck" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("keep me")
        before = snapshot(tmp_path)
        for problems in (
            refusal(check_checkpoint_place, str(tmp_path / "ck")),
            refusal(save_checkpoint, str(tmp_path / "ck"), LLAMA, make_state(LLAMA), {}),
        ):
            assert problems[0].code == "RT092"
            assert problems[0].help
        assert snapshot(tmp_path) == before

    def test_a_file_is_kept(self, tmp_path):
        (tmp_path / "ck").write_text("keep me")
        assert refusal(save_checkpoint, str(tmp_path / "ck"), LLAMA, make_state(LLAMA), {})[0].code == "RT092"
        assert (tmp_path / "ck").read_text() == "keep me"

    def test_good_places_pass(self, saved):
        check_checkpoint_place(str(saved))
        check_checkpoint_place(str(saved.parent / "new"))

    @pytest.mark.parametrize("place", ["no/such/place", "nul\0byte"])
    def test_places_that_cannot_be(self, tmp_path, place):
        problems = refusal(save_checkpoint, str(tmp_path / place), LLAMA, make_state(LLAMA), {})
        assert problems[0].code == "RT002"
        assert not list(tmp_path.iterdir())

    def test_links_in_a_circle(self, tmp_path):
        (tmp_path / "a").symlink_to(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        assert refusal(save_checkpoint, str(tmp_path / "a"), LLAMA, make_state(LLAMA), {})[0].code in {"RT002", "RT092"}
        assert refusal(load_checkpoint, str(tmp_path / "a"), LLAMA)[0].code == "RT002"

    def test_others_may_read_as_the_umask_says(self, tmp_path):
        before = os.umask(0o027)
        try:
            save_checkpoint(str(tmp_path / "ck"), LLAMA, make_state(LLAMA), {})
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "ck").stat().st_mode) == 0o750
        assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ck").iterdir()} == {0o640}


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for its own."""


FAILURES = [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("bug"), Interrupted()]


def raises_after(monkeypatch, owner: object, name: str, calls: int, error: BaseException) -> None:
    """Let `owner.name` work `calls` times and then raise once."""
    original = getattr(owner, name)
    count = [0]

    def failing(*arguments, **options):
        count[0] += 1
        if count[0] == calls + 1:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


def names_written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


POINTS = [
    *(
        (owner, name, calls, old)
        for old in (False, True)
        for owner, name, calls in (
            (checkpoint, "write_tensors", 0),
            (checkpoint.HashingStream, "write", 0),
            (checkpoint.HashingStream, "write", 2),
            (checkpoint.HashingStream, "write", 20),
            (checkpoint.os, "fsync", 0),
            (checkpoint.os, "fsync", 1),
            (checkpoint.os, "fsync", 2),
            (checkpoint.json, "dumps", 0),
            (checkpoint, "move_into_place", 0),
        )
    ),
    (Path, "rename", 0, False),
    (checkpoint_places, "exchange", 0, True),
    (checkpoint.os, "fsync", 3, True),  # the new one has its place already
]
"""Where saving fails: at which call of what, and whether there is an old checkpoint."""
WITHOUT_EXCHANGE = [
    (Path, "rename", 0, True),
    (Path, "rename", 1, True),  # the old one is aside already
]


@pytest.fixture
def no_exchange(monkeypatch):
    """A system that cannot exchange two directories."""
    monkeypatch.setattr(checkpoint_places, "_renameat2", lambda: None)


class TestAtomic:
    @pytest.mark.usefixtures("no_exchange")
    @pytest.mark.parametrize("error", FAILURES, ids=["disk full", "bug", "interrupt"])
    @pytest.mark.parametrize(("owner", "name", "calls", "old"), WITHOUT_EXCHANGE)
    def test_a_failing_rename_leaves_the_old_checkpoint(self, tmp_path, monkeypatch, old, error, owner, name, calls):
        self.test_a_failure_leaves_the_old_checkpoint(tmp_path, monkeypatch, old, error, owner, name, calls)

    @pytest.mark.parametrize("error", FAILURES, ids=["disk full", "bug", "interrupt"])
    @pytest.mark.parametrize(("owner", "name", "calls", "old"), POINTS)
    def test_a_failure_leaves_the_old_checkpoint(self, tmp_path, monkeypatch, old, error, owner, name, calls):
        place = tmp_path / "ck"
        if old:
            save_checkpoint(str(place), LLAMA, make_state(LLAMA), RUN)
        before = snapshot(tmp_path)
        with monkeypatch.context() as patched:
            raises_after(patched, owner, name, calls, error)
            with pytest.raises((DiagnosticError, type(error))) as caught:
                save_checkpoint(str(place), LLAMA, make_state(LLAMA, 1), RUN)
        if isinstance(error, OSError):
            assert caught.value.diagnostics[0].code == "RT002"
            assert "No space left" in caught.value.diagnostics[0].message
        assert snapshot(tmp_path) == before
        assert names_written(tmp_path) == ({"ck"} if old else set())
        if old:
            assert_equal(load_checkpoint(str(place), LLAMA)[0], make_state(LLAMA), LLAMA)

    @pytest.mark.parametrize("exchanging", [True, False])
    def test_at_every_moment_there_is_a_whole_checkpoint(self, tmp_path, monkeypatch, exchanging):
        """A machine that stops before any rename or removal leaves the old or the new one, if not at its place then beside."""
        place = tmp_path / "ck"
        save_checkpoint(str(place), LLAMA, make_state(LLAMA), RUN)
        later = evolve(make_state(LLAMA, 1), step=42)
        seen: list[dict[str, int]] = []
        if not exchanging:
            monkeypatch.setattr(checkpoint_places, "_renameat2", lambda: None)

        def look(original):
            def looking(*arguments, **options):
                steps = {}
                for path in tmp_path.glob("ck*"):
                    state, _ = load_checkpoint(str(path), LLAMA)
                    steps[re.sub("-.{8}", "", path.name)] = state.step
                seen.append(steps)
                return original(*arguments, **options)

            return looking

        monkeypatch.setattr(Path, "rename", look(Path.rename))
        monkeypatch.setattr(shutil, "rmtree", look(shutil.rmtree))
        save_checkpoint(str(place), LLAMA, later, RUN)
        if exchanging:
            assert seen == [{"ck": 42, "ck.tmp": 41}]
        else:
            assert seen == [{"ck": 41, "ck.tmp": 42}, {"ck.tmp.old": 41, "ck.tmp": 42}, {"ck": 42, "ck.tmp.old": 41}]

    def test_written_before_it_is_renamed(self, tmp_path, monkeypatch):
        """Both files and their directory are synced before the directory gets its name, and that name afterwards."""
        events: list[str] = []
        real_fsync, real_rename, real_exchange = os.fsync, Path.rename, checkpoint_places.exchange

        def fsync(handle: int) -> None:
            events.append(Path(f"/proc/self/fd/{handle}").readlink().name.partition(".tmp-")[0])
            real_fsync(handle)

        def rename(path: Path, target: Path) -> Path:
            events.append("rename")
            return real_rename(path, target)

        def exchange(one: Path, other: Path) -> bool:
            events.append("rename")
            return real_exchange(one, other)

        monkeypatch.setattr(checkpoint.os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", rename)
        monkeypatch.setattr(checkpoint_places, "exchange", exchange)
        for _ in range(2):
            events.clear()
            save_checkpoint(str(tmp_path / "ck"), LLAMA, make_state(LLAMA), {})
            assert events == ["state.safetensors", "manifest.json", "ck", "rename", tmp_path.name]

    def test_what_an_interrupted_save_left_is_named(self, saved):
        aside = saved.rename(saved.with_name("ck.old-ab12cd34"))
        (problem,) = refusal(load_checkpoint, str(saved), LLAMA)
        assert problem.code == "RT002"
        assert str(aside) in problem.help
        assert refusal(load_checkpoint, str(saved.with_name("other")), LLAMA)[0].help is None

    def test_an_old_one_that_cannot_be_removed_does_no_harm(self, saved, monkeypatch):
        monkeypatch.setattr(checkpoint.os, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError))
        save_checkpoint(str(saved), LLAMA, evolve(make_state(LLAMA), step=50), {})
        assert load_checkpoint(str(saved), LLAMA)[0].step == 50


class TestLeftovers:
    """What interrupted saves have left is said and cleared; what is not proved to be theirs stays."""

    def test_only_what_saves_write_is_cleared(self, saved):
        copy = shutil.copytree
        gone = [copy(saved, saved.with_name(name)) for name in ("ck.tmp-ab12cd34", "ck.tmp-ab12cd34.old")]
        half = saved.with_name("ck.tmp-half_way")
        half.mkdir()
        (half / "state.safetensors").write_bytes(b"half")
        mine = [
            saved.with_name(name) for name in ("ck.tmp-notes", "ck.tmp-ab12cd34.olds", "ck.old", "ck2.tmp-ab12cd34")
        ]
        foreign = saved.with_name("ck.tmp-ff12cd34")
        for path in [*mine, foreign]:
            copy(saved, path)
        (foreign / "notes.txt").write_text("keep me")
        earlier = copy(saved, saved.with_name("ck.old-20260101"))
        with hold_checkpoint_place(str(saved)) as lock:
            said = clear_leftovers(str(saved), lock)
        assert sorted(saved.parent.iterdir()) == sorted([saved, *mine, foreign, earlier])
        assert [str(path) in text.message for path, text in zip([*gone, half, earlier], said, strict=True)] == [
            True
        ] * 4
        assert "removed" in said[0].message
        assert "if you do not want it" in said[-1].message

    def test_nothing_is_cleared_before_a_checkpoint_stands(self, saved):
        aside = saved.rename(saved.with_name("ck.tmp-ab12cd34.old"))
        with hold_checkpoint_place(str(saved)) as lock:
            (said,) = clear_leftovers(str(saved), lock)
        assert "kept" in said.message
        assert aside.exists()
        save_checkpoint(str(saved), LLAMA, evolve(make_state(LLAMA), step=50), {})
        assert list(saved.parent.iterdir()) == [saved]

    def test_half_of_one_is_cleared_before_a_checkpoint_stands(self, saved):
        """It would fill the disk for ever; what may be whole, also of a later version, stays."""
        whole, later, half, torn = (saved.with_name(f"ck.tmp-ab12cd3{number}") for number in range(4))
        for path in (whole, later, half, torn):
            shutil.copytree(saved, path)
        (later / "manifest.json").write_text('{"version": 99}')
        (half / "manifest.json").unlink()
        (torn / "manifest.json").write_text('{"version": 1, ')
        shutil.rmtree(saved)
        with hold_checkpoint_place(str(saved)) as lock:
            said = clear_leftovers(str(saved), lock)
        assert sorted(saved.parent.iterdir()) == sorted([whole, later])
        assert [("kept" in text.message, "removed" in text.message) for text in said] == [(True, False)] * 2 + [
            (False, True)
        ] * 2

    def test_the_newest_whole_one_is_used_and_said(self, saved):
        old = saved.rename(saved.with_name("ck.old-ab12cd34"))
        (saved.with_name("ck.tmp-00000000")).mkdir()
        found = load_latest(str(saved), LLAMA, Processes())
        assert (found.state.step, found.directory) == (41, str(old))
        newer = saved.with_name("ck.tmp-ab12cd34")
        save_checkpoint(str(newer), LLAMA, evolve(make_state(LLAMA, 1), step=42), RUN)
        found = load_latest(str(saved), LLAMA, Processes())
        assert (found.state.step, found.directory) == (42, str(newer))
        assert "is not there" in found.warnings[0].message
        assert str(newer) in found.warnings[0].message
        model, weights = latest_weights(str(saved))
        assert (
            weights(parameters(model, block("embed"))[0].name).tobytes()
            == found.state.blocks[block("embed")].p[: parameters(model, block("embed"))[0].elements].tobytes()
        )
        state = newer / "state.safetensors"
        state.write_bytes(state.read_bytes()[:-1])
        assert load_latest(str(saved), LLAMA, Processes()).directory == str(old)


class TestModes:
    @pytest.mark.parametrize("exchanging", [True, False])
    def test_those_of_what_is_replaced_are_kept(self, saved, monkeypatch, exchanging):
        if not exchanging:
            monkeypatch.setattr(checkpoint_places, "_renameat2", lambda: None)
        saved.chmod(0o700)
        (saved / "state.safetensors").chmod(0o600)
        (saved / "manifest.json").chmod(0o640)
        save_checkpoint(str(saved), LLAMA, evolve(make_state(LLAMA), step=50), {})
        assert load_checkpoint(str(saved), LLAMA)[0].step == 50
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (saved, *saved.iterdir())}
        assert modes == {"ck": 0o700, "state.safetensors": 0o600, "manifest.json": 0o640}
