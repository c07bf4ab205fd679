"""Options that are said twice: with two values they are refused, for every option of every command; with one they are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrainc.cli import commands, main
from ratrain.ratrainc.commands.training.run import command as run_command
from ratrain.ratrainc.commands.words.refused_words import refuse_said_twice


def single_options() -> Iterator[tuple[str, click.Option]]:
    """Every option of every command that takes one value, or one of two."""
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and not option.multiple:
                yield name, option


SINGLE = [pytest.param(name, option, id=f"{name} {option.opts[-1]}") for name, option in single_options()]

TWO_WAYS = [each for each in SINGLE if not each.values[1].is_flag or each.values[1].secondary_opts]
"""Options that can be said in two ways; a flag without a second name cannot."""


def two_ways(option: click.Option) -> tuple[list[str], list[str]]:
    """Two different ways to say an option, in words of the command line."""
    title = option.opts[-1]
    if option.is_flag:
        return [title], [option.secondary_opts[-1]]
    return [title, *["0.25"] * option.nargs], [title, *["0.5"] * option.nargs]


@pytest.mark.parametrize(("name", "option"), TWO_WAYS)
def test_two_values_are_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, option: click.Option, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a command that takes the words writes where they say
    first, second = two_ways(option)
    assert main([name, *first, *second]) == 2
    shown = capsys.readouterr()
    assert option.opts[-1] in shown.err
    assert "leave" in shown.err
    assert not shown.out


@pytest.mark.parametrize(("name", "option"), SINGLE)
def test_one_value_said_twice_is_taken(name: str, option: click.Option) -> None:
    words = two_ways(option)[0] if not option.is_flag else [option.opts[-1]]
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    refuse_said_twice(command, [*words, *words], name, None)


def test_options_that_are_meant_to_be_said_again_are_taken() -> None:
    refuse_said_twice(run_command, ["x.rtx", "--data", "a.txt", "--data", "b.txt", "--log-to", "wandb"], "run", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("x.rtx --lr 1e-3 --lr 0.001", None),
        ("x.rtx --steps 3 --steps 03", None),
        ("x.rtx --steps 3 --steps 4 --steps 5", "'3', '4' and '5'"),
        ("x.rtx --betas 0.9 0.95 --betas 0.9 0.99", "'0.9 0.95' and '0.9 0.99'"),
        ("x.rtx --save=a --save b", "'a' and 'b'"),
        ("x.rtx --steps 3 -- --steps 4", None),
        ("x.rtx --nosuch 3 --nosuch 4", None),
    ],
)
def test_values_are_compared_as_they_are_read(words: str, said: str | None) -> None:
    if said is None:
        refuse_said_twice(run_command, words.split(), "run", None)
        return
    with pytest.raises(click.UsageError) as caught:
        refuse_said_twice(run_command, words.split(), "run", None)
    assert said in caught.value.message


def test_two_names_of_one_option_are_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "-o", "a.rtir", "--output", "b.rtir"]) == 2
    assert "'a.rtir' and 'b.rtir'" in capsys.readouterr().err


def test_what_is_for_run_is_looked_at_before_ranks_are_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "-n", "2", "a.rtx", "--steps", "3", "--steps", "4"]) == 2
    assert "--steps takes one value" in capsys.readouterr().err


@given(st.lists(st.sampled_from(["--steps", "--lr", "3", "-1", "x", "--", "--live", "--data", "=", ""]), max_size=8))
def test_no_words_make_the_look_itself_fail(words: list[str]) -> None:
    with suppress(click.UsageError):
        refuse_said_twice(run_command, words, "run", None)
