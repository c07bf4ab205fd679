"""Progress of long work: the work calls a function, and a command draws a bar from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.passes.manager import BeforePass
    from ratrain.passes.pass_base import Pass


@frozen
class Progress:
    """The progress of some work."""

    done: float
    """finished part of `total`"""
    total: float | None
    """None if unknown"""
    text: str
    """the present step, or the last one that was finished"""


OnProgress = Callable[[Progress], None]
"""Called with the progress of work, in the thread of the work; an exception that it raises ends the work."""


def unheard(_: Progress) -> None:
    """Ignore a progress."""


class Tick(Protocol):
    """A function that is called with a text after each step of work."""

    def __call__(self, text: str = "") -> None: ...  # noqa: D102 - the class says it


def counting(progress: OnProgress | None, total: float | None = None) -> Tick:
    """Return a function to call after each of `total` steps of work; it reports the count and the step's text."""
    done = 0
    hear = progress or unheard

    def tick(text: str = "") -> None:
        nonlocal done
        done += 1
        hear(Progress(done, total, text))

    return tick


def telling(progress: OnProgress) -> BeforePass:
    """Return a function that reports each pass as it begins, with the passes after it."""
    done = 0

    def begin(item: Pass, left: Sequence[Pass]) -> None:
        nonlocal done
        then = f", then {', '.join(each.name for each in left)}" if left else ", the last pass"
        progress(Progress(done, done + 1 + len(left), f"{item.name}{then}"))
        done += 1

    return begin
