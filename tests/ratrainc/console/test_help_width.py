"""Help pages keep the width of a terminal, and examples that were broken are still those commands."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from ratrain.ratrainc.cli import commands, main
from ratrain.ratrainc.console.help_text import fitted

NAMES = commands.list_commands(click.Context(commands))
CHOICES = re.compile(r"\s+--[a-z-]+ \[\S+\]$")
"""An option's list of choices, which is one word."""
WIDTH = 80


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([name, "--help"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_wider_than_a_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    wide = [line for line in shown(name, capsys) if len(line) > WIDTH and not CHOICES.fullmatch(line)]
    # a row of a table in a file, or a command in quotes, has no place to break
    assert all(max(map(len, re.split(r"\s(?=\S)", line))) > 40 for line in wide), wide


def test_a_broken_example_is_the_same_command() -> None:
    command = "ratrainc run a.rtx --steps 100 --resume run1 --passes 'a b' --save run1 --save-every 20"
    text = fitted(f"\b\nExamples:\n  {command}    and a remark\n  ratrainc run a.rtx", 44)
    lines = text.split("\n")
    assert all(len(line) <= 44 for line in lines)
    assert lines[:2] == ["\b", "Examples:"]
    assert lines[-2:] == ["      (and a remark)", "  ratrainc run a.rtx"]
    assert shlex.split(" ".join(lines[2:-2]).replace("\\ ", "")) == shlex.split(command)


def test_lines_of_prose_become_one_paragraph_and_tables_stay() -> None:
    prose = "one two three four five six\nseven eight nine ten eleven"
    table = "  a = 1        a remark\n  b = 2        another, which is longer\n" + " " * 22 + "than the rest"
    assert fitted(f"\b\n{prose}\n{table}", 24).split("\n") == [
        *("\b", "one two three four five", "six seven eight nine ten", "eleven"),
        *("  a = 1        a remark", "  b = 2", "      another, which is", "      longer than the", "      rest"),
    ]
    assert fitted(f"\b\n{prose}\n{table}", 80) == f"\b\n{prose}\n{table}"
    assert fitted(prose, 10) == prose
