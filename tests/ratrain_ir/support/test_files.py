"""Writing: whole files or none, and devices are written to, never replaced."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ratrain.ratrain_ir.support import files
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.files import (
    MIB,
    MOST_BYTES,
    made_directory,
    read_bytes,
    read_text,
    replacing,
    write_lines,
)


def test_a_folder_where_a_file_is_meant_is_said(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as refused:
        read_text(str(tmp_path), "log")
    (item,) = refused.value.diagnostics
    assert (item.code, item.help) == ("RT002", "name a file in it")
    assert item.message.endswith("it is a directory")


@pytest.mark.parametrize(("kind", "ending"), [("schedule", ".rtir"), ("program", ".rtx")])
def test_what_a_command_makes_is_told_with_it(tmp_path: Path, kind: str, ending: str) -> None:
    """Of a model's folder with its configuration; of a path without a file under that name."""

    def way(path: Path) -> str | None:
        with pytest.raises(DiagnosticError) as refused:
            read_bytes(str(path), kind)
        return refused.value.diagnostics[0].help

    missing = tmp_path / f"missing{ending}"
    assert way(missing) == f"'ratrainc compile --model M --plan P.toml -o {missing}' makes one"
    assert way(tmp_path) == f"'ratrainc compile --model M --plan P.toml -o X{ending}' makes one"
    (tmp_path / "config.json").touch()
    assert way(tmp_path) == f"'ratrainc compile --model {tmp_path}/config.json --plan P.toml -o X{ending}' makes one"


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_lines(str(target), ["one"])
    write_lines(str(target), ["two", "three"])
    assert target.read_text() == "two\nthree\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def no_files_without_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "_HAS_FILES_WITHOUT_NAMES", False)


def no_names_for_them(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    patch.setattr(os, "link", refuse)


@pytest.mark.parametrize("system", [no_files_without_names, no_names_for_them])
def test_systems_without_nameless_files_write_the_same(
    system: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system(monkeypatch)
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    target.chmod(0o640)
    with replacing(str(target)) as stream:
        stream.write(b"x" * MIB)
    assert target.read_bytes() == b"x" * MIB
    assert stat.S_IMODE(target.stat().st_mode) == 0o640

    def fail_halfway() -> None:
        with replacing(str(target)) as stream:
            stream.write(b"new")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail_halfway()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]
    assert target.read_bytes() == b"x" * MIB


@pytest.mark.skipif(not files._HAS_FILES_WITHOUT_NAMES, reason="files have names from the start here")
def test_of_a_killed_write_nothing_is_left(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from ratrain.ratrain_ir.support.files import replacing\n"
        "with replacing(sys.argv[1]) as stream:\n"
        "    stream.write(b'half'); stream.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.bin")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail_halfway() -> None:
        with replacing(str(target)) as stream:
            stream.write(b"new")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail_halfway()
    assert target.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_pipe_is_written_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_lines(str(pipe), ["hello"])
    reader.join(timeout=10)
    assert received == [b"hello\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_keeps_pointing_to_what_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    write_lines(str(tmp_path / "link.txt"), ["new"])
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new\n"


def test_the_null_device_stays_a_device() -> None:
    write_lines("/dev/null", ["gone"])
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("path", ["", "missing/folder/file.txt", "bad\0name"])
def test_a_place_that_cannot_be_written_is_diagnosed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DiagnosticError, match="RT002"):
        write_lines(path, ["x"])


def test_a_directory_is_no_place_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match="RT002"):
        write_lines(str(tmp_path), ["x"])


def test_reading_names_the_first_bad_byte(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good\nba\xffd\n")
    with pytest.raises(DiagnosticError, match=r"bad\.txt:2:3"):
        read_text(str(path), "schedule")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiagnosticError, match="RT002"):
        made_directory(str(tmp_path / "file"))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_file_keeps_the_permissions_of_what_it_replaces(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "a.txt"
    write_lines(str(target), ["old"])
    target.chmod(mode)
    write_lines(str(target), ["new"])
    assert target.read_text() == "new\n"
    assert stat.S_IMODE(target.stat().st_mode) == mode


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "usual.txt").write_text("")
    write_lines(str(tmp_path / "a.txt"), ["new"])
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "usual.txt").stat().st_mode


@pytest.mark.parametrize("may_chown", [True, False])
def test_a_group_that_cannot_be_kept_gives_no_other_one_its_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_chown: bool
) -> None:
    """Owner and group are asked for first, while the new file is still private."""
    target = tmp_path / "a.txt"
    target.write_text("old")
    target.chmod(0o640)
    asked: list[tuple[int, int, int]] = []
    status = os.stat
    theirs = target.stat().st_gid if may_chown else target.stat().st_gid + 1

    def stat_of(path: str | Path, **more: bool) -> os.stat_result:
        found = status(path, **more)
        if str(path) != str(target):
            return found
        return os.stat_result([*found[:5], theirs, *found[6:]])

    def chown(path: str, owner: int, group: int) -> None:
        asked.append((stat.S_IMODE(status(path).st_mode), owner, group))
        if not may_chown:
            raise PermissionError

    monkeypatch.setattr(files.os, "stat", stat_of)
    monkeypatch.setattr(files.os, "chown", chown)
    write_lines(str(target), ["new"])
    assert {mode for mode, _, _ in asked} == {0o600}
    assert (-1, theirs) in [(owner, group) for _, owner, group in asked]
    assert stat.S_IMODE(status(target).st_mode) == (0o640 if may_chown else 0o600)


def test_a_name_as_long_as_the_file_system_allows_can_be_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "\u00e9" * 127):
        write_lines(str(tmp_path / name), ["x"])
        assert (tmp_path / name).read_text() == "x\n"


@pytest.mark.parametrize("kind", MOST_BYTES)
def test_what_never_ends_is_refused_for_its_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that yields bytes for ever, as the file of each kind; the diagnostic says how much is read."""
    monkeypatch.setitem(MOST_BYTES, kind, 2 * MIB)
    with pytest.raises(DiagnosticError, match=f"the {kind} '/dev/zero': it has more than 2 MiB"):
        read_bytes("/dev/zero", kind)


def test_a_file_as_long_as_allowed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST_BYTES, "log", 1000)
    (tmp_path / "log").write_bytes(b"x" * 1000)
    assert len(read_bytes(str(tmp_path / "log"), "log")) == 1000
    (tmp_path / "log").write_bytes(b"x" * 1001)
    with pytest.raises(DiagnosticError, match="RT002"):
        read_bytes(str(tmp_path / "log"), "log")


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read in (read_bytes, read_text):
        with pytest.raises(DiagnosticError, match=r"RT002.*pipe': it is a named pipe"):
            read(str(pipe), "schedule")


@pytest.mark.parametrize("place", ["/dev/fd", "/proc/self/fd"])
def test_a_pipe_of_the_shell_is_read_to_its_end(place: str) -> None:
    reading, writing = os.pipe()
    late = threading.Timer(0.1, lambda: (os.write(writing, b"text"), os.close(writing)))
    late.start()
    try:
        assert read_text(f"{place}/{reading}", "schedule") == "text"
    finally:
        late.join()
        os.close(reading)


@pytest.mark.parametrize(
    ("path", "help_text"),
    [
        ("tinny.toml", "did you mean 'tiny.toml'?"),
        ("sub/boook.txt", "did you mean 'sub/book.txt'?"),
        ("subb/book.txt", "did you mean 'sub'?"),
        ("nothing.rtir", "there is x.rtir"),
        ("run2", "did you mean 'run1'?"),
        ("zzz.safetensors", None),
        ("zzz", None),
    ],
)
def test_a_path_that_leads_nowhere_names_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, help_text: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("run1").mkdir()
    for name in ("tiny.toml", "tiny.json", "x.rtir", "sub/book.txt", ".tinny.toml"):
        Path(name).touch()
    with pytest.raises(DiagnosticError) as refused:
        read_bytes(path, "machine file")
    assert refused.value.diagnostics[0].help == help_text
