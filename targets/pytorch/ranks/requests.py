"""Calls of torch.distributed that are under way, and their failure when a rank is gone."""

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
"""Function that makes a call, without waiting for it."""

_GRACE_SECONDS = 12.0
"""Time for the watchdogs to say which rank is gone: longer than a heartbeat from another machine may be old."""
_MOST_WAITING = 256
"""Most calls with waiting threads at a time: a rank has a few messages and a few reductions of blocks under way."""


def _nothing() -> None:
    """Do nothing after a call."""


@define(eq=False)
class Calls:
    """Calls of one process, polled or waited for by threads.

    The backend reports the end of most collectives when it is asked. Gloo reports that of a message only to a thread
    that waits, so each message under way has a thread. A call that fails, because the rank at the other end is gone,
    counts as not done until the watchdogs have had the time to name that rank and end the run; then `DiagnosticError`
    RT093 gives the backend's reason.
    """

    _threads: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(_MOST_WAITING, "torch-wait"))
    _failed_at: float | None = None

    def polled(self, post: Post, after: Callable[[], None] = _nothing) -> TorchRequest:
        """Make a call whose backend is asked for its end; `after` runs when it is done."""
        return self._made(post, lambda work: lambda: bool(work.is_completed()) and _is_over(work.wait()), after)

    def waited(self, post: Post) -> TorchRequest:
        """Make a call whose end a thread waits for."""

        def question(work: Work) -> Callable[[], bool]:
            waiting: Future[Any] = self._threads.submit(work.wait)
            return lambda: waiting.done() and _is_over(waiting.result())

        return self._made(post, question, _nothing)

    def _made(
        self, post: Post, question: Callable[[Work], Callable[[], bool]], after: Callable[[], None]
    ) -> TorchRequest:
        try:
            # A call may fail at once, if the other end is gone already: it is a request that fails when it is tested.
            is_over = question(post())
        except RuntimeError as error:
            failure = error  # the name is gone when the clause ends
            return TorchRequest(self, lambda: _failing(failure), after)
        return TorchRequest(self, is_over, after)

    def fail(self, error: RuntimeError) -> None:
        """Note that a call has failed; raise RT093 once nobody else has ended the run in time."""
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
        """End the threads; no call may be under way."""
        self._threads.shutdown()


@define(eq=False)
class TorchRequest:
    """A call that is under way, or done."""

    _calls: Calls
    _is_over: Callable[[], bool]
    """raises RuntimeError after a failure; keeps alive the memory that the call reads and writes"""
    _after: Callable[[], None]
    _is_done: bool = False

    def test(self) -> bool:
        """Return whether the call is done. Raises `DiagnosticError` RT093 if it failed some time ago."""
        if self._is_done:
            return True
        try:
            if not self._is_over():
                return False
        except RuntimeError as error:
            self._calls.fail(error)
            return False
        # `after` runs once, and lets go of the buffers with the question
        self._after()
        self._is_done, self._is_over, self._after = True, _always, _nothing
        return True


DONE = TorchRequest(Calls(), lambda: True, _nothing, is_done=True)
"""Request of a call that moves no bytes."""


def reason_of(error: RuntimeError) -> str:
    """Return a backend's message without its source position and its advice."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\]\s*", "", first).split(". ")[0].rstrip(".")


def _is_over(result: object) -> bool:
    """Return True: a call that has been waited for is over, whatever it returned."""
    del result
    return True


def _always() -> bool:
    return True


def _failing(error: RuntimeError) -> bool:
    raise error
