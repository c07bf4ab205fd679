"""Help on eighty columns: nothing is wider but what cannot be broken, and what is broken is still the same command."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrainc.cli import _COMMANDS, _ROOMS, commands, main
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


def examples_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of ours in a help text, as a shell would take them."""
    for line in joined(text).splitlines():
        if re.match(r"\s+(\w+=\S+ )?(ratrainc|mpirun|torchrun|srun) ", line):
            shell = shlex.shlex(line, posix=True, punctuation_chars=True)
            shell.whitespace_split, shell.commenters = True, "#"
            taken: list[str] = []
            for word in [*shell, ";"]:
                if set(word) <= set(shell.punctuation_chars):
                    if "ratrainc" in taken:
                        yield taken[taken.index("ratrainc") + 1 :]
                    taken = []
                else:
                    taken.append(word)


def left_over(words: list[str]) -> list[str]:
    """Return the words that a command's own parser has no place for; raise `click.UsageError` for an unknown option."""
    if words[0] == "--plugin":
        words = words[2:]
    name, *rest = (word for place, word in enumerate(words) if "--plugin" not in words[max(0, place - 1) : place + 1])
    command = commands.get_command(click.Context(commands, info_name="ratrainc"), name)
    assert command is not None, name
    context = click.Context(command, info_name=name, **command.context_settings)
    _, left, _ = command.make_parser(context).parse_args(rest)
    return left if context.allow_interspersed_args else []  # of launch the rest is for run


@pytest.mark.parametrize("name", ["", *_COMMANDS])
def test_every_example_can_be_pasted(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell and the parser of the command itself take its words, remarks behind it included."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    found = list(examples_of(capsys.readouterr().out))
    assert found
    assert [words for words in found if left_over(words)] == []


def test_a_remark_that_is_no_comment_is_found() -> None:
    line = "  ratrainc export-weights run1 -o out --dtype bf16     half the bytes"
    (words,) = examples_of(line)
    assert left_over(words) == ["half", "the", "bytes"]
    (words,) = examples_of(fitted(line))
    assert left_over(words) == []


@given(st.lists(st.text("abc ", min_size=1, max_size=90), min_size=1, max_size=3), st.integers(3, 60))
def test_a_column_is_never_narrower_than_words(parts: list[str], gap: int) -> None:
    """The last column of a table begins where there is room for it, or stands below."""
    line = f"  x{(' ' * gap).join(parts)}"
    for each in fitted(line).splitlines():
        assert len(each.split()) == 0 or len(each) - len(each.lstrip()) <= HELP_WIDTH - 20


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
