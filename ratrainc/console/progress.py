"""How long work says how far it is: a callback hears it, which a command makes a bar of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.passes.manager import BeforePass
    from ratrain.passes.pass_base import Pass


@frozen
class Progress:
    """How far some work is."""

    done: float
    """of `total`"""
    total: float | None
    """None where nobody knows"""
    text: str
    """what is at work, or was done last"""


OnProgress = Callable[[Progress], None]
"""Hears of work while it goes on, in its thread; what it raises ends the work."""


def unheard(_: Progress) -> None:
    """Hear nothing."""


class Tick(Protocol):
    """Is called after each step of work, with what it was."""

    def __call__(self, text: str = "") -> None: ...  # noqa: D102 - the class says it


def counting(progress: OnProgress | None, total: float | None = None) -> Tick:
    """Something to call after each step of work that is one of `total`, with what it was."""
    done = 0
    hear = progress or unheard

    def tick(text: str = "") -> None:
        nonlocal done
        done += 1
        hear(Progress(done, total, text))

    return tick


def telling(progress: OnProgress) -> BeforePass:
    """Tells which pass begins, and which are left."""
    done = 0

    def begin(item: Pass, left: Sequence[Pass]) -> None:
        nonlocal done
        then = f", then {', '.join(each.name for each in left)}" if left else ", the last pass"
        progress(Progress(done, done + 1 + len(left), f"{item.name}{then}"))
        done += 1

    return begin
