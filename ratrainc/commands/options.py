"""Options that several commands share, written once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_MOST_JOBS = 256
_MOST_STEPS = 10**9
"""Beyond it, the time that is left could not be told as a date."""


class FiniteRange(click.FloatRange):
    """A `FloatRange` without nan, which no comparison finds outside of it, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error where it is none in the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def output_file(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """The callback of an option that names a file to write: a place where none can be written is refused before the work."""
    if path is not None:
        from ratrain_ir.files import check_writable

        check_writable(path)
    return path


def output_directory(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """The callback of an option that names a directory to write: one that cannot be written is refused before the work."""
    if path is not None:
        from ratrain_ir.files import check_directory_writable

        check_directory_writable(path)
    return path


def machine_option(function: F) -> F:
    """`--machine`."""
    text = "A machine file (TOML), or the name of a built-in machine. Default: what the input was compiled for, else mt3000."
    return click.option("--machine", metavar="FILE", help=text)(function)


def json_option(function: F) -> F:
    """`--json`."""
    text = "Print one JSON object on stdout and nothing else there."
    return click.option("--json", "as_json", is_flag=True, help=text)(function)


def model_option(*, required: bool) -> Callable[[F], F]:
    """`--model`."""
    text = "A preset (llama-2-7b, baichuan2-13b, qwen2.5-32b, llama-2-70b, ...) or a Hugging Face config.json."
    return click.option("--model", required=required, metavar="M", help=text)


def steps_option(default: int, text: str) -> Callable[[F], F]:
    """`--steps`: the length of a run."""
    return click.option("--steps", type=click.IntRange(1, _MOST_STEPS), default=default, show_default=True, help=text)


def seconds_option(default: float, text: str) -> Callable[[F], F]:
    """`--seconds`: the time for a search."""
    return click.option("--seconds", type=FiniteRange(min=0), default=default, show_default=True, help=text)


def jobs_option(text: str = "Processes.") -> Callable[[F], F]:
    """`--jobs`: processes of a search."""
    return click.option(
        "--jobs",
        type=click.IntRange(1, _MOST_JOBS),
        default=lambda: min(_MOST_JOBS, os.cpu_count() or 1),
        show_default="one a core",
        help=text,
    )


def choice_option(name: str, *choices: str, text: str) -> Callable[[F], F]:
    """An option that is one of a few words, the first where it is left out."""
    return click.option(name, type=click.Choice(choices), default=choices[0], show_default=True, help=text)


def rendezvous_option(function: F) -> F:
    """`--rendezvous`."""
    text = "Sends wait for their receives instead of being buffered."
    return click.option("--rendezvous", is_flag=True, help=text)(function)


def sharing_option(function: F) -> F:
    """`--sharing/--no-sharing`."""
    text = "Overlapping ops share DDR and link."
    return click.option("--sharing/--no-sharing", default=True, show_default=True, help=text)(function)


def plan_option(*, required: bool) -> Callable[[F], F]:
    """`--plan`."""
    return click.option("--plan", required=required, metavar="P.toml", help="The parallel plan, in TOML.")
