"""The option `--times`: given times of ops, in place of a machine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ratrain.ratrainc.commands.words.options import InputFile, refuse_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.targets.simulator.given_times import GivenTimes


class _Times(click.ParamType[Any]):
    """Four times, or the path of a file of them."""

    name = "times"

    def __init__(self) -> None:
        self.file = InputFile("times")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | GivenTimes:
        """Return the path of a file, or the times; raise a usage error if it is neither."""
        text = str(value)
        if text.endswith(".toml"):
            return self.file.convert(value, param, ctx)
        from ratrain.ratrainc.choices.times_text import textbook_times

        try:
            return textbook_times(text)
        except ValueError as error:
            self.fail(f"{error}; or name a .toml file", param, ctx)


def times_option(help_text: str) -> Callable[[Any], Any]:
    """Make the option `--times`; the command receives the path of a file, or the times, or None."""
    return click.option("--times", type=_Times(), metavar="T_F,T_B,T_W,T_comm|FILE.toml", help=help_text)


def loaded_times(times: str | GivenTimes | None) -> GivenTimes | None:
    """Load the times if they are given as a file; return others unchanged."""
    if not isinstance(times, str):
        return times
    from ratrain.ratrainc.choices.times_text import load_times

    return load_times(times)


def refuse_machine_of_given_times(file: str) -> None:
    """Refuse options on how a machine times a file, since given times replace the machine's."""
    refuse_idle("is for the times of a machine: --times gives them", "sharing")
    if not file.endswith(".rtir"):  # what of it is not placed yet is placed for a machine
        refuse_idle("would time the program, which --times does", "machine")
