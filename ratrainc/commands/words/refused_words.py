"""Refusal of words that click would take or call unexpected: options given twice differently, and files too many."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ratrain.ratrainc.commands.words.file_kinds import endings_of
from ratrain.ratrainc.commands.words.options import InputFile


def refuse_said_twice(command: click.Command, words: Sequence[str], name: str, parent: click.Context | None) -> None:
    """Raise `click.UsageError` if the words of a command give an option twice with different values.

    Words that cannot be parsed are left to the command, which reports them.
    """
    context = command.context_class(command, info_name=name, parent=parent, **command.context_settings)
    with context.scope(cleanup=False):
        options = {option.name: option for option in command.params if _takes_one(option)}
        # without an option for help: where somebody asks for that, no other word counts
        collecting = click.Command(name, params=[_collecting(each) for each in command.params], add_help_option=False)
        try:
            said, _, _ = collecting.make_parser(context).parse_args(list(words))
        except click.UsageError:
            return
        for parameter, option in options.items():
            values = _different(option, said.get(parameter, ()), context)
            if len(values) > 1:
                raise click.UsageError(_refusal(option, values), context)


def refuse_extra_words(command: click.Command, words: Sequence[str], name: str, parent: click.Context | None) -> None:
    """Raise `click.UsageError` for a word that no argument takes, if an option takes files with its ending.

    Words that cannot be parsed, and extra ones that no option takes, are left to the command, which reports them.
    """
    context = command.context_class(command, info_name=name, parent=parent, **command.context_settings)
    if context.allow_extra_args or not context.allow_interspersed_args:
        return
    with context.scope(cleanup=False):
        try:
            said, extra, _ = command.make_parser(context).parse_args(list(words))
        except click.UsageError:
            return
        ending = Path(extra[0]).suffix.lower() if extra else ""
        options = [
            option.opts[0]
            for option in command.params
            if isinstance(option, click.Option)
            and isinstance(option.type, InputFile)
            and ending
            and (ending in (option.metavar or "").lower() or ending in endings_of(option.type.kind))
        ]
        if options and not said.get("help"):
            given = " or ".join(f"{option} {shlex.quote(extra[0])}" for option in options)
            raise click.UsageError(f"'{extra[0]}' is one file too many: give it as {given}", context)


def _takes_one(parameter: click.Parameter) -> bool:
    """Tell whether a parameter is an option that takes one value, or a flag."""
    return isinstance(parameter, click.Option) and not parameter.multiple and not parameter.count


def _collecting(parameter: click.Parameter) -> click.Parameter:
    """Return a copy of a parameter that keeps every given value instead of the last."""
    if not _takes_one(parameter):
        return parameter
    every = copy.copy(parameter)
    every.multiple = True
    return every


def _different(option: click.Parameter, values: Sequence[Any], context: click.Context) -> list[Any]:
    """Return the values without those that read the same as an earlier one: `1e-3` and `0.001`."""
    different: list[Any] = []
    for value in values:
        if not any(value == other or _is_read_as(option, value, other, context) for other in different):
            different.append(value)
    return different


def _is_read_as(option: click.Parameter, value: Any, other: Any, context: click.Context) -> bool:
    if not isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
        return False
    try:
        return bool(option.type_cast_value(context, value) == option.type_cast_value(context, other))
    except click.UsageError:
        return False


def _refusal(option: click.Parameter, values: Sequence[Any]) -> str:
    if isinstance(option, click.Option) and option.is_flag:
        yes, no = (max(names, key=len) for names in (option.opts, option.secondary_opts))
        return f"{yes} and {no} exclude each other: leave one of them out"
    *others, last = [f"'{' '.join(value) if isinstance(value, tuple) else value}'" for value in values]
    name, *others_of_it = [each for each in option.opts if each.startswith("--")] or option.opts
    title = name + "".join(f" ({each})" for each in others_of_it)
    return f"{title} takes one value, and {', '.join(others)} and {last} are given: leave all but one out"
