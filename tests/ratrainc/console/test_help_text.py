"""Help on eighty columns: nothing is wider but what cannot be broken, and what is broken is still the same command."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from ratrain.ratrainc.cli import _COMMANDS, _ROOMS, main
from ratrain.ratrainc.console.help_text import HELP_WIDTH, fitted
from ratrain.ratrainc.running.examples import copy_examples
from tests.project.test_site import lines_of_commands

ONE_WORD = r"""\s*(-\S+ )?("[^"]*"|\S+)"""
"""What cannot be broken: an option with its value, in quotes or not."""


@pytest.mark.parametrize("name", ["", *_COMMANDS])
def test_no_line_of_help_is_wider_than_a_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    wide = [line for line in text.splitlines() if len(line) > HELP_WIDTH + 2]
    assert [line for line in wide if not re.fullmatch(ONE_WORD, line)] == []


def commands_in(text: str) -> list[str]:
    """Commands without the remarks behind them."""
    lines = [line.strip() for line in text.splitlines()]
    return [re.split(r"\s{2,}", line)[0] for line in lines if line.startswith("ratrainc ")]


def joined(text: str) -> str:
    """A text with the lines of a command that goes on put together."""
    return re.sub(r" \\\n\s*", " ", text)


@pytest.mark.parametrize("name", _COMMANDS)
def test_a_broken_example_is_the_command_that_it_was(name: str) -> None:
    room = f"commands.{_ROOMS[name]}" if name in _ROOMS else "commands"
    epilog = importlib.import_module(f"ratrain.ratrainc.{room}.{name.replace('-', '_')}")._EPILOG
    assert commands_in(joined(fitted(epilog))) == commands_in(joined(epilog))


def test_remarks_stand_above_and_prose_and_tables_are_wrapped() -> None:
    command = f"  ratrainc run x.rtx --data {'a' * 36} --steps 20"
    assert fitted(f"{command}      what for").splitlines() == ["  # what for", command]
    assert fitted(f"{command} --save d").splitlines() == [f"{command} \\", "      --save d"]
    row = f"  kind      {'word ' * 20}"
    assert [line[:12] for line in fitted(row).splitlines()] == ["  kind      ", " " * 12]
    assert fitted(f"  {'word ' * 10}\n  {'long ' * 20}".rstrip()).splitlines() == [
        f"  {'word ' * 10}{'long ' * 5}".rstrip(),
        f"  {'long ' * 15}".rstrip(),
    ]


TAKEN_APART = ("diff", "opt", "passes", "strategies", "completion", "disasm", "schedule", "examples")
"""Commands whose examples need nothing but the bundled examples, and run in seconds."""
GIVEN = {"before.rtir after.rtir", "--plugin mine.py"}
"""Words of examples that take files of a reader's own."""


@pytest.mark.parametrize("name", TAKEN_APART)
def test_the_examples_of_help_run_one_after_the_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    copy_examples("examples")
    assert main(["compile", "--model", "examples/tiny.json", "--plan", "examples/tiny.toml", "-o", "tiny.rtx"]) == 0
    assert main([name, "--help"]) == 0
    for line in lines_of_commands(capsys.readouterr().out):
        if not any(words in line for words in GIVEN):
            assert main(shlex.split(line)[1:]) == 0, line
