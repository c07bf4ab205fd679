"""Remembered proofs: of the same bytes and installation, left by proofs alone, never trusted where others can write."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.support import proof_cache
from ratrain.ratrain_ir.support.proof_cache import VARIABLE, entry_name, prove


class _Proof:
    """Counts how often it is asked, and fails where told."""

    def __init__(self, *, fails: bool = False) -> None:
        self.count, self.fails = 0, fails

    def __call__(self) -> None:
        self.count += 1
        if self.fails:
            raise ValueError("unsound")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(proof_cache, "installation", lambda: "this one")
    return tmp_path / "cache" / "proofs"


def _again(*content: bytes, kind: str = "program") -> bool:
    """Whether a proof is made."""
    proof = _Proof()
    prove(proof, kind, *content)
    return bool(proof.count)


def test_the_second_time_nothing_is_proved(cache):
    assert _again(b"some bytes")
    assert not _again(b"some bytes")


def test_anew_always_proves_and_leaves_an_entry(cache):
    for _ in range(2):
        proof = _Proof()
        prove(proof, "program", b"some bytes", anew=True)
        assert proof.count == 1
    assert not _again(b"some bytes")


def test_every_changed_byte_is_proved_anew(cache):
    content = bytes(range(64))
    assert _again(content)
    for place in range(len(content)):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        assert _again(changed)
    assert _again(content[:-1])
    assert _again(content + b"\0")
    assert not _again(content)


def test_kind_and_parts_count(cache):
    assert _again(b"ab", b"c")
    assert _again(b"a", b"bc")
    assert _again(b"ab", b"c", kind="schedule")


@given(st.lists(st.binary(max_size=4), max_size=3), st.lists(st.binary(max_size=4), max_size=3))
def test_names_are_equal_only_for_equal_content(one, other):
    assert (entry_name("i", "kind", one) == entry_name("i", "kind", other)) == (one == other)


def test_a_failed_proof_leaves_nothing(cache):
    with pytest.raises(ValueError, match="unsound"):
        prove(_Proof(fails=True), "program", b"some bytes")
    assert not list(cache.iterdir())
    with pytest.raises(ValueError, match="unsound"):
        prove(_Proof(fails=True), "program", b"some bytes")


def test_another_installation_proves_anew(cache, monkeypatch):
    assert _again(b"some bytes")
    monkeypatch.setattr(proof_cache, "installation", lambda: "another one")
    assert _again(b"some bytes")


def test_a_process_that_cannot_tell_what_it_runs_proves(cache, monkeypatch):
    assert _again(b"some bytes")
    monkeypatch.setattr(proof_cache, "installation", lambda: None)
    assert _again(b"some bytes")


def test_plugins_prove(cache, monkeypatch):
    assert _again(b"some bytes")
    monkeypatch.setenv("RATRAIN_PLUGINS", "mine")
    assert _again(b"some bytes")


@pytest.mark.parametrize("text", ["", "f" * 64, "\N{SNOWMAN}"])
def test_a_file_that_is_no_receipt_is_none(cache, text):
    assert _again(b"some bytes")
    (entry,) = cache.iterdir()
    entry.write_text(text, "utf-8")
    assert _again(b"some bytes")


def test_a_folder_that_others_can_write_to_is_not_trusted(cache):
    assert _again(b"some bytes")
    cache.chmod(0o777)
    assert _again(b"some bytes")
    cache.chmod(0o700)
    assert not _again(b"some bytes")


@pytest.mark.parametrize("folder", ["", "not/absolute", "/dev/null", "/proc/none"])
def test_without_a_place_every_proof_is_made(cache, monkeypatch, folder):
    monkeypatch.setenv(VARIABLE, folder)
    assert _again(b"some bytes")
    assert _again(b"some bytes")


def test_the_oldest_entries_go(cache, monkeypatch):
    monkeypatch.setattr(proof_cache, "_MOST", 3)
    for number in range(6):
        assert _again(bytes([number]))
    assert len(list(cache.iterdir())) == 3
    assert not _again(bytes([5]))


def digest_of_files(folder):
    return proof_cache._digest_of(proof_cache._files_below(folder))


def test_any_changed_name_or_byte_of_the_package_is_another_digest(tmp_path):
    folder = tmp_path / "package"
    (folder / "room").mkdir(parents=True)
    (folder / "room" / "a.py").write_text("x = 1\n")
    (folder / "b.toml").write_text("y = 2\n")
    seen = {digest_of_files(folder)}
    (folder / "room" / "__pycache__").mkdir()
    (folder / "room" / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    assert digest_of_files(folder) in seen
    (folder / "room" / "a.py").write_text("x = 2\n")
    seen.add(digest_of_files(folder))
    (folder / "b.toml").rename(folder / "c.toml")
    seen.add(digest_of_files(folder))
    (folder / "room" / "new.py").touch()
    seen.add(digest_of_files(folder))
    assert len(seen) == 4


def test_the_installation_is_told_by_its_files(monkeypatch):
    proof_cache.installation.cache_clear()
    told = proof_cache.installation()
    assert told is not None
    assert digest_of_files(proof_cache._PACKAGE) in told
    proof_cache.installation.cache_clear()
    monkeypatch.setattr(proof_cache, "_STARTED", 0.0)  # every file is newer than this process
    assert proof_cache.installation() is None
    proof_cache.installation.cache_clear()


def test_a_package_without_files_is_not_told(monkeypatch, tmp_path):
    proof_cache.installation.cache_clear()
    monkeypatch.setattr(proof_cache, "_PACKAGE", tmp_path)
    assert proof_cache.installation() is None
    proof_cache.installation.cache_clear()
