"""What every test shares: one BLAS thread, the hypothesis profiles, comparison with golden files."""

from __future__ import annotations

import difflib
import os
import zlib
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import settings

# Nothing has imported numpy yet, and each of these is read once, when the library loads. One thread makes BLAS sums
# reproducible and keeps the test processes of pytest-xdist from fighting for the cores. Subprocesses inherit them.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
    os.environ[_variable] = "1"

# Read when Triton is first imported: without a GPU its kernels are interpreted.
# The readline that pytest imports says them to its workers; output here is no terminal's, and has no width.
for _variable in ("COLUMNS", "LINES"):
    os.environ.pop(_variable, None)
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["RATRAIN_CACHE_DIR"] = ""  # no remembered proofs: every test proves what it reads

# `gate` tries the same examples every time; a search for new ones is `--hypothesis-profile dev`.
settings.register_profile("gate", derandomize=True, deadline=None, max_examples=14)
settings.register_profile("dev", deadline=None, max_examples=50)
settings.load_profile("gate")  # the option of the command line is applied after this and wins

DIFF_LINES = 200  # of a mismatch are shown; a schedule that changed everywhere has thousands


@frozen
class Golden:
    """Compares texts with the files of a folder that people have read and agreed to."""

    folder: Path
    update: bool

    def __call__(self, name: str, text: str) -> None:
        """Fail with a unified diff unless `text` is exactly the content of the file `name` (a path in the folder).

        With `--update-golden` the file is written instead, and the difference is for `git diff` to show.
        """
        path = self.folder / name
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            return
        hint = "If the new text is right: rerun this test with --update-golden, read `git diff`, commit the file."
        if not path.is_file():
            pytest.fail(f"There is no golden file {path}.\n{hint}", pytrace=False)
        expected = path.read_bytes().decode()
        if expected == text:
            return
        diff = list(
            difflib.unified_diff(
                expected.splitlines(keepends=True), text.splitlines(keepends=True), f"golden/{name}", "this run", n=2
            )
        )
        shown = "".join(
            line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n" for line in diff[:DIFF_LINES]
        )
        if len(diff) > DIFF_LINES:
            shown += f"... and {len(diff) - DIFF_LINES} more lines\n"
        pytest.fail(f"{name} differs from its golden file:\n{shown}{hint}", pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden` and `--shard`."""
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the texts that tests expect with what they produce"
    )
    parser.addoption(
        "--shard", type=_shard, metavar="K/N", help="run the K-th of N parts of the tests, as their ids fall"
    )


KINDS = frozenset({"family", "model", "scaling", "schedule", "home", "dtype"})
"""Parameters of tests that name a kind of thing: of each of their values the gate runs one at least, however thin the sample."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as full what `sampled` leaves out of the gate, and keep one shard: before marks choose what is run."""
    sampled: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("full") is None:
            kind = item.nodeid.partition("[")[0], item.get_closest_marker("parity") is not None
            sampled.setdefault(kind, []).append(item)
    for group in sampled.values():
        for item in _left_out(group):
            item.add_marker(pytest.mark.full)
    shard = config.getoption("--shard")
    if shard is not None:
        number, count = shard
        chosen = [item for item in items if shard_of(item, count) == number]
        config.hook.pytest_deselected(items=[item for item in items if shard_of(item, count) != number])
        items[:] = chosen


def _left_out(group: list[pytest.Item]) -> list[pytest.Item]:
    """Return what the gate leaves out of a sampled test: all but every n-th, and but the first of each kind that these do not show."""
    mark = group[0].get_closest_marker("sampled")
    assert mark is not None
    (every,), first = mark.args, mark.kwargs.get("first", 0)
    seen = {kind for item in group[first::every] for kind in _kinds(item)}
    left_out = []
    for position, item in enumerate(group):
        if position % every == first:
            continue
        if new := _kinds(item) - seen:
            seen |= new
        else:
            left_out.append(item)
    return left_out


def _kinds(item: pytest.Item) -> set[tuple[str, str]]:
    """Return which value of each axis of kinds a test has, as text: not all can be hashed."""
    callspec = getattr(item, "callspec", None)
    return {(axis, repr(callspec.params[axis])) for axis in KINDS & callspec.params.keys()} if callspec else set()


def shard_of(item: pytest.Item, count: int) -> int:
    """Return the number of a test's shard, from 1: equal in every checkout, and in all tests of an `xdist_group`."""
    group = item.get_closest_marker("xdist_group")
    # the id of a test may have a path in it, as of a file that it is about
    name = group.args[0] if group else item.nodeid.replace(str(item.config.rootpath), "")
    return zlib.crc32(name.encode()) % count + 1


def _shard(text: str) -> tuple[int, int]:
    """Read `k/n`: shard k of n, from 1. Raises ValueError or argparse's error where there is no such shard."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden("name.txt", text)`: the text is that of tests/golden/name.txt."""
    return Golden(Path(__file__).parent / "golden", request.config.getoption("--update-golden"))
