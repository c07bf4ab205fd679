"""Options of commands that train, which several of them have: fields of data, held-out data, trackers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ratrain.ratrainc.commands.words.options import FiniteRange, InputFile, TrackerName

F = TypeVar("F", bound=Callable[..., Any])


def _all_of(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds options in this order."""

    def decorated(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorated


def chat_template_option(parameter: str) -> Callable[[F], F]:
    """`--chat-template`."""
    return click.option(
        "--chat-template",
        parameter,
        type=InputFile("chat template"),
        metavar="FILE.jinja|chatml",
        help="What makes a text of a chat. Default: the template beside the tokenizer.",
    )


def key_options(group: str) -> Callable[[F], F]:
    """Options that name the fields of a line of JSONL, as fields of an option group."""
    return _all_of(
        click.option(
            "--text-key",
            f"{group}_text_key",
            metavar="KEY",
            help="The field of a JSONL line that is its text. Default: text.",
        ),
        click.option(
            "--prompt-key",
            f"{group}_prompt_key",
            metavar="KEY",
            help="The field of a line that is its prompt, where only completions or answers are in the loss. "
            "Default: prompt.",
        ),
        click.option(
            "--completion-key",
            f"{group}_completion_key",
            metavar="KEY",
            help="And the one that is its completion. Default: completion.",
        ),
        click.option(
            "--chat-key",
            f"{group}_chat_key",
            metavar="KEY",
            help="The field of a line that is its chat; it says that lines are chats. Default: messages, or "
            "conversations.",
        ),
        chat_template_option(f"{group}_chat_template"),
    )


def held_out_options(group: str, usual: str) -> Callable[[F], F]:
    """Options of held-out data, as fields of an option group; `usual` ends the help of `--eval-every`."""
    return _all_of(
        click.option(
            "--eval-every",
            f"{group}_every",
            type=click.IntRange(min=1),
            metavar="N",
            help=f"Evaluate the held-out loss after every N steps and at the end.{usual}",
        ),
        click.option(
            "--eval-data",
            f"{group}_paths",
            type=InputFile("data"),
            multiple=True,
            metavar="TEXT|DOCS.jsonl|TOKENS.bin|DIR",
            help="Held-out data; again for more. Default: the last part of --data.",
        ),
        click.option(
            "--eval-fraction",
            f"{group}_fraction",
            type=FiniteRange(0, 0.5, min_open=True),
            default=0.05,
            show_default=True,
            help="The part of --data that is held out and never trained on, where there is no --eval-data.",
        ),
        click.option(
            "--patience",
            f"{group}_patience",
            type=click.IntRange(min=1),
            metavar="N",
            help="End the run after N evaluations without a lower held-out loss.",
        ),
    )


def trackers_option(parameter: str) -> Callable[[F], F]:
    """`--log-to`."""
    return click.option(
        "--log-to",
        parameter,
        type=TrackerName(),
        multiple=True,
        metavar="tensorboard[:DIR]|wandb[:PROJECT]",
        help="Write the figures of each step to TensorBoard or Weights & Biases too (needs the extra of that name); "
        "again for both. Default of DIR: a new one in runs/. "
        "With --resume, go on where the run before did.",
    )
