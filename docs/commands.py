"""The page of commands: what `--help` of each says, in lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ratrain.ratrainc.cli import commands

_WIDTH = 96
_HEAD = """# Commands

All commands with their options, as `ratrainc COMMAND --help` prints them. [Keys and options](keys.md) says what every option changes,
and [the command line](command-line.md) what all commands have in common.

<!-- written by docs/generate.py -->
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    group = click.Context(commands, info_name="ratrainc", max_content_width=_WIDTH, terminal_width=_WIDTH)
    for name in commands.list_commands(group):
        command = commands.get_command(group, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=group, max_content_width=_WIDTH, terminal_width=_WIDTH)
        yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"
