"""Writing: whole files or none, and devices are written to, never replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from ratrain_ir.diagnostics import DiagnosticError
from ratrain_ir.files import made_directory, read_text, replacing, write_lines


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_lines(str(target), ["one"])
    write_lines(str(target), ["two", "three"])
    assert target.read_text() == "two\nthree\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


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
        read_text(str(path), "text")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiagnosticError, match="RT002"):
        made_directory(str(tmp_path / "file"))
