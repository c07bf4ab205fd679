"""Options that several commands share, written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


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


def plan_option(*, required: bool) -> Callable[[F], F]:
    """`--plan`."""
    return click.option("--plan", required=required, metavar="P.toml", help="The parallel plan, in TOML.")
