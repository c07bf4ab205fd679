"""Progress of long work: the work calls a function, and a command draws a bar from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import define, frozen

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
    stays: bool = False
    """True if the text is a line that stays, such as a result of its own"""


OnProgress = Callable[[Progress], None]
"""Called with the progress of work, in the thread of the work; an exception that it raises ends the work."""


def unheard(_: Progress) -> None:
    """Ignore a progress."""


@define
class Steps:
    """Progress of work in steps, told when a step begins and when it is finished.

    Example: `steps.begin("zb-v")`, work, `steps("zb-v: 4.12 s")` is heard as 0 done, then 1 done.
    """

    hear: OnProgress = unheard
    total: float | None = None
    """number of steps; None if unknown"""
    done: int = 0
    prefix: str = ""
    """words before each text, such as the search that steps belong to"""

    def begin(self, text: str) -> None:
        """Tell what is worked at from now on."""
        self.hear(Progress(self.done, self.total, f"{self.prefix}{text}"))

    def __call__(self, text: str = "") -> None:
        """Count a finished step."""
        self.done += 1
        self.begin(text)

    def found(self, text: str) -> None:
        """Count a finished step that has a result of its own, and tell it."""
        self.done += 1
        self.tell(text)

    def tell(self, text: str) -> None:
        """Tell a line that stays: a result, or what is going to be done."""
        self.hear(Progress(self.done, self.total, f"{self.prefix}{text}", stays=True))


def with_lines(progress: OnProgress, say: Callable[[str], None]) -> OnProgress:
    """Return a function that passes progress on, and calls `say` with each text that stays."""

    def hear(now: Progress) -> None:
        progress(now)
        if now.stays:
            say(now.text)

    return hear


def counting(progress: OnProgress | None, total: float | None = None) -> Steps:
    """Return the steps of some work; `progress` hears of them."""
    return Steps(progress or unheard, total)


def telling(progress: OnProgress) -> BeforePass:
    """Return a function that reports each pass as it begins, with the passes after it."""
    done = 0

    def begin(item: Pass, left: Sequence[Pass]) -> None:
        nonlocal done
        then = f", then {', '.join(each.name for each in left)}" if left else ", the last pass"
        progress(Progress(done, done + 1 + len(left), f"{item.name}{then}"))
        done += 1

    return begin
