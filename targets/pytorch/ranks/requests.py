"""Calls of torch.distributed that are under way, and what becomes of them when a rank is gone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define, field

from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from torch.distributed import Work

Post: TypeAlias = "Callable[[], Work]"
"""Makes a call, without waiting for it."""

_GRACE_SECONDS = 12.0
"""For the watchdogs to say which rank is gone: longer than the heartbeat of a rank on another machine may be old."""
_MOST_WAITING = 256
"""More calls of the kind that is waited for are never under way: messages are a few at a time, reductions a few blocks."""


def _nothing() -> None:
    """What follows most calls."""


@define(eq=False)
class Calls:
    """Makes the calls of one process.

    The backend says of most collectives whether they are done. Of messages gloo says so only to who waits, hence a thread for each of
    those that are under way. A call that fails, since the rank at the other end is gone, is not done until the watchdogs have had
    the time to name that rank and end the run; then `DiagnosticError` RT093 says what the backend knows.
    """

    _threads: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(_MOST_WAITING, "torch-wait"))
    _failed_at: float | None = None

    def polled(self, post: Post, after: Callable[[], None] = _nothing) -> TorchRequest:
        """A call that the backend is asked about; `after` is what follows it."""
        return self._made(post, lambda work: lambda: bool(work.is_completed()) and _is_over(work.wait()), after)

    def waited(self, post: Post) -> TorchRequest:
        """A call that a thread waits for."""

        def question(work: Work) -> Callable[[], bool]:
            waiting: Future[Any] = self._threads.submit(work.wait)
            return lambda: waiting.done() and _is_over(waiting.result())

        return self._made(post, question, _nothing)

    def _made(
        self, post: Post, question: Callable[[Work], Callable[[], bool]], after: Callable[[], None]
    ) -> TorchRequest:
        try:
            is_over = question(post())
        except RuntimeError as error:
            failure = error  # the name is gone when the clause ends
            return TorchRequest(self, lambda: _failing(failure), after)
        return TorchRequest(self, is_over, after)

    def fail(self, error: RuntimeError) -> None:
        """Take that a call has failed: raise for it once nobody else has ended the run."""
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
        if now > self._failed_at + _GRACE_SECONDS:
            fail(
                "RT093",
                f"ranks cannot reach one another any more: {reason_of(error)}",
                help="one of them has ended, or the network between them has failed; saved checkpoints are not lost",
            )

    def close(self) -> None:
        """Let the threads end, which have nothing to wait for."""
        self._threads.shutdown()


@define(eq=False)
class TorchRequest:
    """A call that is under way, or done."""

    _calls: Calls
    _is_over: Callable[[], bool]
    """raises a RuntimeError where it has failed; holds what the call reads and writes"""
    _after: Callable[[], None]
    _is_done: bool = False

    def test(self) -> bool:
        """Whether it is done. Raises `DiagnosticError` RT093 where it failed some time ago."""
        if self._is_done:
            return True
        try:
            if not self._is_over():
                return False
        except RuntimeError as error:
            self._calls.fail(error)
            return False
        self._after()
        self._is_done, self._is_over, self._after = True, _always, _nothing
        return True


DONE = TorchRequest(Calls(), lambda: True, _nothing, is_done=True)
"""A call that moves no bytes."""


def reason_of(error: RuntimeError) -> str:
    """What a backend says, without the place in its source and its advice."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\]\s*", "", first).split(". ")[0].rstrip(".")


def _is_over(result: object) -> bool:
    """A call that has been waited for is, whatever it gave."""
    del result
    return True


def _always() -> bool:
    return True


def _failing(error: RuntimeError) -> bool:
    raise error
