"""Refusal of a file too many: the option that takes such a file is named; click would only call the word unexpected."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from ratrain.ratrainc.commands.words.file_kinds import endings_of
from ratrain.ratrainc.commands.words.options import InputFile


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
