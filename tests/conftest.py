"""What every test shares: one BLAS thread, the hypothesis profiles, comparison with golden files."""

from __future__ import annotations

import difflib
import os
from collections import Counter
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
os.environ["RATRAIN_CACHE_DIR"] = ""  # no receipts: every test proves what it reads

# `gate` tries the same examples every time; a search for new ones is `--hypothesis-profile dev`.
settings.register_profile("gate", derandomize=True, deadline=None, max_examples=20)
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
    """Add `--update-golden`."""
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the texts that tests expect with what they produce"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as full what `sampled` leaves out of the gate: the same ones every time, before marks choose what is run."""
    seen: Counter[tuple[str, bool]] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None or item.get_closest_marker("full") is not None:
            continue
        (every,), first = mark.args, mark.kwargs.get("first", 0)
        kind = item.nodeid.partition("[")[0], item.get_closest_marker("parity") is not None
        if seen[kind] % every != first:
            item.add_marker(pytest.mark.full)
        seen[kind] += 1


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden("name.txt", text)`: the text is that of tests/golden/name.txt."""
    return Golden(Path(__file__).parent / "golden", request.config.getoption("--update-golden"))
