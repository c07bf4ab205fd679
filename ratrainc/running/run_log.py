"""The log of a run: one JSON line a step, written at once, so that a crash loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from attrs import define, field

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Location, Severity, fail
from ratrain.ratrain_ir.support.files import check_writable, is_regular, is_there, read_text, write_lines
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.runtime.arena.locks import hold, lock_path

if TYPE_CHECKING:
    from ratrain.targets.runtime.training.training import TimedStep


@define(eq=False)
class RunLog:
    """An open log, to which steps are appended.

    If a write fails, its lines wait for the next step, so the log never has a gap between lines.
    """

    path: str
    handle: int
    tell: Callable[[Diagnostic], None]
    _waiting: bytearray = field(init=False, factory=bytearray)
    _reason: str = field(init=False, default="")
    """reason of the last failed write; empty after a good one"""
    _was_told: bool = field(init=False, default=False)

    def write(self, step: TimedStep) -> None:
        """Append a step and the lines that wait; the first failure is reported, and the run goes on."""
        self._waiting += json.dumps(step.to_json()).encode() + b"\n"
        try:
            while self._waiting:
                # a write may take only part of the bytes; the rest stays first in line
                del self._waiting[: os.write(self.handle, self._waiting)]
            self._reason = ""
        except OSError as error:
            self._reason = error.strerror or str(error)
            if not self._was_told:
                self._was_told = True
                text = f"cannot write the log '{self.path}': {self._reason}; training goes on, and the lines wait"
                self.tell(Diagnostic("RT002", text, severity=Severity.WARNING))

    @property
    def problem(self) -> Diagnostic | None:
        """The steps that the log lacks, as a diagnostic; None if it is complete."""
        if not self._waiting:
            return None
        lines = self._waiting.count(b"\n")
        return Diagnostic("RT002", f"the log '{self.path}' lacks its last {number_of(lines, 'step')}: {self._reason}")


@contextmanager
def run_log(
    path: str | None, first_step: int, tell: Callable[[Diagnostic], None] = lambda _: None
) -> Iterator[RunLog | None]:
    """Open the log of a run that begins with `first_step`; None without a path.

    Earlier steps in the file are kept, as a resumed run continues them; later ones are removed. The log is locked until
    the block ends. Raises `DiagnosticError` RT002 if it cannot be written, the file is not a log, or another run writes
    to it.
    """
    if path is None:
        yield None
        return
    with _held(path, tell):
        _cut(path, first_step, tell)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:  # a ValueError: no path has a zero byte
            _cannot_write(path, error)
        try:
            yield RunLog(path, handle, tell)
        finally:
            with suppress(OSError):  # a failure was reported at the last write
                os.close(handle)


def check_log(path: str) -> None:
    """Raise `DiagnosticError` RT002 if a log cannot be written; to be called before the run."""
    try:
        if is_regular(path):
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
    except (OSError, ValueError) as error:
        _cannot_write(path, error)
    check_writable(path)


def _cannot_write(path: str, error: OSError | ValueError) -> NoReturn:
    fail("RT002", f"cannot write the log '{path}': {getattr(error, 'strerror', None) or error}")


@contextmanager
def _held(path: str, tell: Callable[[Diagnostic], None]) -> Iterator[None]:
    """Lock a log that is a file, or will be one; pipes and devices are not locked."""
    with ExitStack() as locks:
        if not is_there(path) or is_regular(path):
            lock = locks.enter_context(hold(lock_path(path), "RT002", path))
            if lock.warning is not None:
                tell(lock.warning)
        yield


def _cut(path: str, first_step: int, tell: Callable[[Diagnostic], None]) -> None:
    """Remove the steps from `first_step` on, which are run again, and the half of a last line that a crash left.

    If the steps just before `first_step` are missing, a warning is reported.
    """
    if not is_regular(path):
        return
    text = read_text(path, "log")
    lines = text.splitlines()
    whole = len(lines) if text.endswith("\n") else len(lines) - 1
    steps = [_step_of(path, number, line, whole) for number, line in enumerate(lines, 1)]
    kept = [line for line, step in zip(lines, steps, strict=True) if step < first_step]
    last = max((step for step in steps if step < first_step), default=first_step - 1)
    if last < first_step - 1:
        text = (
            f"the log '{path}' ends with step {last}, and this run begins with step {first_step}: the steps "
            "between are missing from it"
        )
        tell(Diagnostic("RT002", text, severity=Severity.WARNING))
    # a last line without its newline is removed even if it reads well: the next step would be appended to it
    if min(len(kept), whole) < len(lines):
        write_lines(path, kept)


def _step_of(path: str, number: int, line: str, whole: int) -> float:
    """Return the step of a line; infinity for an incomplete last line, so that it is removed.

    `whole` is the number of lines that end with a newline. Raises `DiagnosticError` RT002 for a line that is not of a
    log.
    """
    with suppress(ValueError, LookupError, TypeError):
        step = json.loads(line)["step"]
        if isinstance(step, int):
            return step
    if number <= whole or not line.startswith("{"):
        fail(
            "RT002",
            "this is not a line of a run's log: a file that is not a log is not replaced by one",
            Location(path, number, 1),
            help="name another file with --log",
        )
    return float("inf")
