"""Calls of torch.distributed that are under way, with a backend that this file plays: PyTorch is not needed."""

from __future__ import annotations

import threading
import time

import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.pytorch.ranks import requests
from ratrain.targets.pytorch.ranks.requests import DONE, Calls, reason_of

READ_ERROR = (
    "[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:16793: Connection reset by peer. "
    "This is typically caused by a remote worker hanging."
)


class Work:
    """A call of a backend that ends when it is told to."""

    def __init__(self, *, says: bool) -> None:
        self.over = threading.Event()
        self.says = says
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.says and self.over.is_set()

    def wait(self) -> bool:
        self.over.wait()
        if self.error is not None:
            raise self.error
        return True


def until_done(request: requests.TorchRequest) -> None:
    deadline = time.monotonic() + 10
    while not request.test():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_call_of_which_the_backend_says_so_is_done_then_and_what_follows_it_is_done_once() -> None:
    calls, work, followed = Calls(), Work(says=True), []
    request = calls.polled(lambda: work, lambda: followed.append(1))
    assert not request.test()
    work.over.set()
    assert request.test()
    assert request.test()
    assert followed == [1]
    assert DONE.test()


def test_a_call_of_which_the_backend_says_so_only_to_who_waits_never_holds_up_the_asker() -> None:
    calls, works = Calls(), [Work(says=False) for _ in range(20)]
    pending = [calls.waited(lambda work=work: work) for work in works]
    assert not any(request.test() for request in pending)
    for work, request in zip(reversed(works), reversed(pending), strict=True):  # none waits for one before it
        work.over.set()
        until_done(request)
    calls.close()


@pytest.mark.parametrize("says", [True, False])
def test_a_failed_call_is_said_only_when_the_watchdogs_have_had_their_time(
    says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, work = Calls(), Work(says=says)
    request = (calls.polled if says else calls.waited)(lambda: work)
    work.error = RuntimeError(READ_ERROR)
    work.over.set()
    time.sleep(0.05)
    assert not request.test()
    monkeypatch.setattr(requests, "_GRACE_SECONDS", 0.0)
    with pytest.raises(DiagnosticError, match=r"RT093.*any more: Read error \[127.0.0.1\]:16793: Connection reset"):
        request.test()


def test_a_call_that_cannot_even_be_made_fails_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def post() -> Work:
        raise RuntimeError("closed")

    request = Calls().polled(post)
    assert not request.test()
    monkeypatch.setattr(requests, "_GRACE_SECONDS", -1.0)
    with pytest.raises(DiagnosticError, match="any more: closed"):
        request.test()


def test_reasons_leave_out_sources_and_advice() -> None:
    assert reason_of(RuntimeError(READ_ERROR)) == "Read error [127.0.0.1]:16793: Connection reset by peer"
    assert reason_of(RuntimeError("")) == "RuntimeError"
