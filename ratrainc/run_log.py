"""The log of a run: a JSON line a step, written at once, so that a crash loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from attrs import frozen

from ratrain_ir.diagnostics import Location, fail
from ratrain_ir.files import read_text, write_lines

if TYPE_CHECKING:
    from targets.runtime.training import TimedStep


@frozen
class RunLog:
    """An open log, to which steps are appended."""

    stream: IO[str]

    def write(self, step: TimedStep) -> None:
        """Append a step.

        Raises `DiagnosticError` RT002 when it cannot be written.
        """
        try:
            self.stream.write(json.dumps(step.to_json()) + "\n")
            self.stream.flush()
        except OSError as error:
            fail("RT002", f"cannot write the log '{self.stream.name}': {error.strerror}")


@contextmanager
def run_log(path: str | None, first_step: int) -> Iterator[RunLog | None]:
    """The log of a run that begins with this step: of what is there already the steps before, which a resumed run goes on with.

    Raises `DiagnosticError` RT002 when it cannot be written, or what is there is no log.
    """
    if path is None:
        yield None
        return
    _cut(path, first_step)
    try:
        stream = open(path, "a", encoding="utf-8")  # noqa: PTH123, SIM115 - closed below, opened here for its error
    except (OSError, ValueError) as error:  # a ValueError: no path has a zero byte
        fail("RT002", f"cannot write the log '{path}': {getattr(error, 'strerror', None) or error}")
    try:
        yield RunLog(stream)
    finally:
        with suppress(OSError):  # every line was flushed when it was written, and a failure reported then
            stream.close()


def _cut(path: str, first_step: int) -> None:
    """Leave in a log only the steps before this one: the others come again, and the last line may be half of one."""
    try:
        if not Path(path).is_file():
            return
    except ValueError:
        return  # opening it tells why
    text = read_text(path, "log")
    lines = text.splitlines()
    whole = len(lines) if text.endswith("\n") else len(lines) - 1
    kept = [line for number, line in enumerate(lines, 1) if _step_of(path, number, line, whole) < first_step]
    if min(len(kept), whole) < len(lines):  # a last line without its end would be gone on with
        write_lines(path, kept)


def _step_of(path: str, number: int, line: str, whole: int) -> float:
    """The step a line tells of; infinite for the half of one that a crash leaves at the end, after so many whole ones."""
    with suppress(ValueError, LookupError, TypeError):
        step = json.loads(line)["step"]
        if isinstance(step, int):
            return step
    if number <= whole or not line.startswith("{"):
        fail(
            "RT002",
            "this is no line of a run's log: what is no log is not replaced by one",
            Location(path, number, 1),
            help="name another file with --log",
        )
    return float("inf")
