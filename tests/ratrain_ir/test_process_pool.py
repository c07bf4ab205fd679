"""Independent work side by side: what comes of it is what one process would make of it, and no process outlives the one that asked."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from textwrap import dedent

import pytest

from ratrain.ratrain_ir import process_pool
from ratrain.ratrain_ir.config.types import Dtype, tensor_type
from ratrain.ratrain_ir.model.blocks import block
from ratrain.ratrain_ir.process_pool import each, meanwhile, processes
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Location, Note
from ratrain.ratrain_ir.support.time_limit import time_limit

TIMEOUT = 60


def each_of_two(function, items):
    """What two processes make of some items."""
    with processes(2, least_work=0):
        return each(function, items, work=0)


class Meeting:
    """Items 0 and 1 wait for each other: they are done only where two processes are at them."""

    def __init__(self) -> None:
        self.ends = [os.pipe(), os.pipe()]

    def come(self, item: int) -> None:
        """Be there, and wait for the other."""
        if item < 2:
            os.write(self.ends[item][1], b"!")
            os.read(self.ends[1 - item][0], 1)

    def close(self) -> None:
        """Give the pipes back."""
        for pair in self.ends:
            for end in pair:
                os.close(end)


@pytest.fixture
def meeting():
    made = Meeting()
    yield made
    made.close()


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 2, 3, 50])
def test_results_come_in_the_order_of_items(count, items):
    with processes(count, least_work=0):
        assert each(lambda item: item * item, range(items), work=0) == [item * item for item in range(items)]


def test_two_processes_are_at_two_items(meeting):
    def who(item: int) -> int:
        meeting.come(item)
        return os.getpid()

    found = each_of_two(who, range(2))
    assert len(set(found)) == 2
    assert os.getpid() in found


def test_what_a_process_has_its_children_have_and_what_they_change_is_lost(meeting):
    had = ["there before"]

    def look(item: int) -> tuple[str, ...]:
        meeting.come(item)
        found = tuple(had)
        if os.getpid() != parent:
            had.append("a child was here")
        return found

    parent = os.getpid()
    assert each_of_two(look, range(2)) == [("there before",)] * 2
    assert had == ["there before"]


def test_interned_objects_stay_what_they_are(meeting):
    def make(item: int) -> tuple[object, ...]:
        meeting.come(item)
        return tensor_type(Dtype.F16, (item, 7)), block("mlp", item), Dtype.F16

    for item, (type_, its_block, dtype) in enumerate(each_of_two(make, range(2))):
        assert type_ is tensor_type(Dtype.F16, (item, 7))
        assert its_block is block("mlp", item)
        assert dtype is Dtype.F16


@pytest.mark.parametrize("failing", [{0}, {3}, {5, 4}, {1, 19}, {19}, set(range(20))])
def test_the_first_item_that_fails_is_told(failing):
    def fail_for_some(item: int) -> int:
        if item in failing:
            raise ValueError(f"item {item}")
        return item

    with pytest.raises(ValueError, match=f"^item {min(failing)}$"):
        each_of_two(fail_for_some, range(20))


def test_a_diagnostic_is_as_one_process_would_raise_it(meeting):
    def refuse(item: int) -> int:
        meeting.come(item)
        found = Diagnostic(
            "RT050",
            f"stage {item}",
            Location("x.rtir", 7, 3),
            (Note("there", Location("x.rtir", 9)),),
            "move it",
            "text",
        )
        raise DiagnosticError([found])

    def refuse_alone(item: int) -> int:
        os.write(meeting.ends[1 - item][1], b"!")  # nobody waits any more
        return refuse(item)

    with pytest.raises(DiagnosticError) as two:
        each_of_two(refuse_alone, range(2))
    with pytest.raises(DiagnosticError) as one:
        refuse_alone(0)
    assert two.value.diagnostics == one.value.diagnostics
    assert two.value.diagnostics[0].notes[0].location == Location("x.rtir", 9)


def test_what_cannot_be_sent_is_made_here(meeting):
    def make(item: int) -> Callable[[], int]:
        if os.getpid() != parent or not done:
            meeting.come(item)
        done.append(item)
        return lambda: item

    parent, done = os.getpid(), []
    assert [made() for made in each_of_two(make, range(2))] == [0, 1]


def test_what_a_process_that_was_killed_did_not_send_is_made_here(meeting):
    def work(item: int) -> int:
        if not done:
            meeting.come(item)
        done.append(item)
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    parent, done = os.getpid(), []
    assert each_of_two(work, range(9)) == list(range(9))
    assert {0, 1} < set(done)


def test_no_process_forks_within_another(meeting):
    def inner(item: int) -> set[int]:
        meeting.come(item)
        return {os.getpid()} ^ set(each(slowly, range(8), work=0))

    def slowly(_: int) -> int:
        time.sleep(0.01)
        return os.getpid()

    assert each_of_two(inner, range(2)) == [set(), set()]


def here() -> bool:
    """Whether this process alone does what is asked for; two wait for each other a moment else."""

    def slowly(_: int) -> int:
        time.sleep(0.001)
        return os.getpid()

    return set(each(slowly, range(100), work=1000)) == {os.getpid()}


def test_it_runs_here_unless_there_is_reason_to_fork(monkeypatch):
    assert here()
    with processes(2):
        assert here()
    with processes(1, least_work=0):
        assert here()
    with processes(2, least_work=1001):
        assert here()
    with processes(2, least_work=1000):
        with time_limit(60):
            assert here()
        for name, value in (("sys.platform", "darwin"), ("parent_process", lambda: "somebody")):
            with monkeypatch.context() as patch:
                patch.setattr(f"{process_pool.__name__}.{name}", value)
                assert here()


def test_children_write_to_no_terminal(meeting, capfd):
    def say(item: int) -> None:
        meeting.come(item)
        if os.getpid() != parent:
            for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
                print("a child speaks", file=stream, flush=True)
                os.write(number, b"a child speaks")

    parent = os.getpid()
    each_of_two(say, range(2))
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""


SCRIPT = """
import atexit, os, signal, sys, time
from ratrain.ratrain_ir.process_pool import each, meanwhile, processes

def work(item):
    if item < 2:
        os.write(int(sys.argv[1]), b"!")
    {work}

atexit.register(lambda: os.write(int(sys.argv[1]), b"."))
with processes(2, least_work=0):
    try:
        each(work, range(4), work=0)
    except KeyboardInterrupt:
        os.write(int(sys.argv[1]), b"^")
"""


def started(work: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process with a child, both at work, and a pipe that ends when both are gone."""
    read, write = os.pipe()
    command = [sys.executable, "-c", dedent(SCRIPT).format(work=work), str(write)]
    process = subprocess.Popen(command, pass_fds=(write,), start_new_session=True)
    os.close(write)
    return process, read


def told(read: int, count: int) -> bytes:
    """So many bytes of a pipe, or what there is until its end; none may take long."""
    found = b""
    while len(found) < count:
        assert select.select([read], [], [], TIMEOUT)[0], f"nothing more after {found!r}"
        more = os.read(read, 1)
        if not more:
            break
        found += more
    return found


@pytest.mark.parametrize(
    ("number", "whole_group", "last_words"),
    [
        (signal.SIGINT, True, b"^."),
        (signal.SIGINT, False, b"^."),
        (signal.SIGTERM, False, b""),
        (signal.SIGKILL, False, b""),
    ],
)
def test_children_are_gone_when_their_parent_was_stopped(number, whole_group, last_words):
    process, read = started("time.sleep(600)")
    assert told(read, 2) == b"!!"
    (os.killpg if whole_group else os.kill)(process.pid, number)
    assert told(read, 99) == last_words
    process.wait(TIMEOUT)
    os.close(read)


def test_what_ends_a_process_is_for_the_parent_alone():
    process, read = started("pass")
    assert told(read, 99) == b"!!."
    assert process.wait(TIMEOUT) == 0
    os.close(read)


def test_functions_are_called_beside_a_block_and_end_with_it(tmp_path, monkeypatch):
    """By processes of their own, whatever comes of them; the one that never ends is gone after the block."""
    monkeypatch.setattr(process_pool, "usable_cores", lambda: {0, 1})
    ends = os.pipe()

    def tell():
        (tmp_path / "teller").write_text(str(os.getpid()))
        os.write(ends[1], b"!")

    def fail():
        os.write(ends[1], b"!")
        raise ValueError

    def stay():
        (tmp_path / "stayer").write_text(str(os.getpid()))
        os.write(ends[1], b"!")
        signal.pause()

    with meanwhile(tell, fail, stay):
        told = b""
        while len(told) < 3:
            assert select.select([ends[0]], [], [], TIMEOUT)[0]
            told += os.read(ends[0], 3)
    for name in ("teller", "stayer"):
        number = int((tmp_path / name).read_text())
        assert number != os.getpid()
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
    for end in ends:
        os.close(end)


def test_nothing_is_called_beside_a_block_with_a_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(process_pool, "usable_cores", lambda: {0, 1})
    with time_limit(TIMEOUT), meanwhile(lambda: (tmp_path / "called").write_text("")):
        time.sleep(0.2)
    assert not list(tmp_path.iterdir())
