"""What a newcomer types wrong: nothing is taken silently, nothing is refused only after the work, nothing is left behind."""

from __future__ import annotations

import pytest

from ratrainc.cli import main
from ratrainc.examples import example_path

MODEL, PLAN = str(example_path("tiny.json")), str(example_path("tiny.toml"))
SEARCH = ("--model", MODEL, "--clusters", "4")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("arguments") / "tiny.rtx")
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "-o", path]) == 0
    return path


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize(
    "words",
    [
        ("plan", *SEARCH, "--global-batch", "16", "--seconds"),
        ("plan", *SEARCH, "--global-batch", "16", "--tokens"),
        ("scale", *SEARCH, "--seconds"),
        ("compare", *SEARCH, "--plan", "auto", "--global-batch", "16", "--seconds"),
        ("explain", "a.rtir", "--seconds"),
        ("alloc", "a.csv", "--capacity", "1MiB", "--seconds"),
        ("run", "a.rtx", "--hang-timeout"),
        ("run", "a.rtx", "--eval-every", "1", "--eval-fraction"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], number: str
) -> None:
    assert main([*words, number]) == 2
    assert words[-1] in capsys.readouterr().err
