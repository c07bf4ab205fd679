"""A thread beside the run that says what it waits for: when asked (SIGUSR1), when a rank is gone, when nothing makes progress.

It makes no call of the library that moves bytes and takes no lock of the run; it reads the positions of all ranks and, where the run cannot go on, reports and
ends the process, on which the launcher ends the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Note, Severity
from ratrain.targets.program.program import Program
from ratrain.targets.runtime.watch.liveness import Departures, Liveness, liveness
from ratrain.targets.runtime.watch.positions import PositionFile, RankPhase, RunFolder, read_positions
from ratrain.targets.runtime.watch.postmortem import Diagnosis, Fault, diagnose, only_gone

if TYPE_CHECKING:
    from types import FrameType

    from ratrain.targets.runtime.watch.positions import RankPosition

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"
"""What `signal.signal` takes and gives back."""

_LOOK_SECONDS = 0.2
_LONGEST_LOOK = 3 * _LOOK_SECONDS
"""Of the time between two looks no more counts: a longer one means that the process was suspended, and with it perhaps the whole job."""
_SLOW_SECONDS = 1.0
"""A single instruction or message that takes longer, and much longer than before, is worth a word."""
_SLOW_FACTOR = 5.0
_PATIENCE = 10
"""What is slow and not proved dead ends the run after so many times the hang timeout."""
_TURN_SECONDS = 0.3
"""Ranks report in turn, so that one speaks for all, and the next if that one is gone."""
_MOST_TURNS = 6
EXIT_LOST = 1


def report_of(
    diagnosis: Diagnosis, title: str, severity: Severity = Severity.ERROR, help_text: str | None = None
) -> Diagnostic:
    """A diagnosis as a diagnostic: its causes, then where every rank is."""
    causes = "; ".join(cause.text for cause in diagnosis.causes) or "no rank waits"
    notes = [Note(line) for line in (*diagnosis.ranks, diagnosis.verdict)]
    return Diagnostic("RT093", f"{title}: {causes}", notes=notes, help=help_text, severity=severity)


def getting_on(diagnosis: Diagnosis) -> Diagnostic:
    """Where the ranks of a run are that makes progress: what one waits for at a moment is no fault of anything."""
    notes = [Note(line) for line in diagnosis.ranks]
    return Diagnostic("RT093", "where the run is: it makes progress", notes=notes, severity=Severity.WARNING)


def gone_ranks(positions: Sequence[RankPosition], departed: Collection[int]) -> list[RankPosition]:
    """Ranks of this machine whose processes are gone although they had not ended: those that departed first, if any did."""
    ended = (RankPhase.ENDED, RankPhase.FAILED)
    gone = [position for position in positions if position.phase not in ended and liveness(position) is Liveness.GONE]
    return [position for position in gone if position.number in departed] or gone


def lost_ranks(positions: Sequence[RankPosition], departed: Collection[int], folder: RunFolder) -> list[RankPosition]:
    """Those that are gone, unless another has failed before any was lost: it says why, and ends the job with all others."""
    gone = gone_ranks(positions, departed)
    failed = any(position.phase is RankPhase.FAILED for position in positions)
    return [] if gone and failed and folder.lost() is None else gone


@frozen(eq=False)
class Watched:
    """What a watchdog looks at, and whom it tells."""

    program: Program
    folder: RunFolder | None
    """None: only the positions of this process are known, and only SIGUSR1 is answered"""
    own: Sequence[PositionFile]
    number: int
    """of this process"""
    hang_timeout: float
    """seconds without progress of any rank; 0: only SIGUSR1 is answered"""
    tell: Callable[[Diagnostic], None]
    advice: str | None = None
    """the way out of a run that was lost"""


class Watchdog:
    """Watches from `start` to `stop`, both called by the main thread."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._ending = threading.Event()
        self._inbox, self._outbox = os.pipe2(os.O_NONBLOCK)
        self._before: tuple[int, _Handler] | None = None
        self._progress: object = None
        self._looked = time.monotonic()
        self._quiet = 0.0
        """Seconds without progress that the watchdog was awake for."""
        self._next_verdict = _SLOW_SECONDS
        self._is_excused = False
        """Whether it was said that a rank takes long over what has no usual time."""
        self._departures = Departures()
        self._departed: set[int] = set()

    def start(self) -> None:
        """Watch from here on; SIGUSR1 asks for a report."""
        # Python runs signal handlers between instructions of the main thread, which may be deep in a kernel; the number of a
        # signal is written to this pipe at once.
        old_file = signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
        self._before = (old_file, signal.signal(signal.SIGUSR1, _nothing))
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._ending.set()
        with contextlib.suppress(OSError):
            os.write(self._outbox, b"\0")
        self._thread.join()
        if self._before is not None:
            old_file, handler = self._before
            signal.set_wakeup_fd(old_file)
            signal.signal(signal.SIGUSR1, handler)
        self._departures.close()
        os.close(self._inbox)
        os.close(self._outbox)

    def _run(self) -> None:
        while not self._ending.is_set():
            asked = signal.SIGUSR1 in self._signals()
            for position in self.watched.own:
                position.beat()
            try:
                positions = self._positions()
            except DiagnosticError:
                continue  # somebody removed the folder: nothing to say without it
            self._departures.watch(positions)
            if self.watched.folder is not None and self.watched.hang_timeout:
                self._look(positions, self.watched.folder)
            else:
                self._is_quiet(positions)
            if asked:
                self._say_where(positions)

    def _positions(self) -> list[RankPosition]:
        if self.watched.folder is None:
            return [position.read() for position in self.watched.own]
        return read_positions(self.watched.folder.directory)

    def _say_where(self, positions: Sequence[RankPosition]) -> None:
        """Answer who asks; nothing is to blame while the run makes progress."""
        diagnosis = self._diagnosis(positions)
        if self._quiet < _SLOW_SECONDS:
            self.watched.tell(getting_on(diagnosis))
        else:
            self._tell(diagnosis, "where the run is", Severity.WARNING)

    def _signals(self) -> bytes:
        """Wait for the next look, a signal, or the end of another rank; signals since the last look."""
        self._departed = self._departures.wait(_LOOK_SECONDS, [self._inbox])
        try:
            return os.read(self._inbox, 64)
        except BlockingIOError:
            return b""

    def _diagnosis(self, positions: Sequence[RankPosition]) -> Diagnosis:
        return diagnose(self.watched.program, positions, time.time(), liveness)

    def _look(self, positions: Sequence[RankPosition], folder: RunFolder) -> None:
        gone = lost_ranks(positions, self._departed, folder)
        if gone:
            folder.note_lost(position.number for position in gone)
            lost = folder.lost() or ([position.number for position in gone], 0.0)
            diagnosis = diagnose(self.watched.program, positions, time.time(), only_gone(lost[0]))
            self._end(diagnosis, "a rank was lost", folder)
        if self._is_quiet(positions) and self._quiet >= self._next_verdict:
            self._judge(positions, folder)
            self._next_verdict = min(2 * self._quiet, max(self.watched.hang_timeout, self._quiet + 1.0))

    def _is_quiet(self, positions: Sequence[RankPosition]) -> bool:
        """Whether nothing has moved since the last look; counts the time."""
        now = time.monotonic()
        self._quiet += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        progress = [(position.number, *position.progress) for position in positions]
        if progress == self._progress:
            return True
        self._progress, self._quiet, self._next_verdict, self._is_excused = progress, 0.0, _SLOW_SECONDS, False
        return False

    def _judge(self, positions: Sequence[RankPosition], folder: RunFolder) -> None:
        """End a run that cannot go on, or is too slow to believe in; say what is slow."""
        diagnosis = self._diagnosis(positions)
        timeout = self.watched.hang_timeout
        title = f"the run has made no progress for {self._quiet:.1f} s"
        if self._quiet >= timeout and diagnosis.is_conclusive:
            self._end(diagnosis, title, folder)
        elif self._quiet >= _PATIENCE * timeout and not diagnosis.is_other_work:
            self._end(diagnosis, f"{title}, ten times --hang-timeout", folder)
        elif self.watched.number == 0 and self._quiet >= _PATIENCE * timeout and not self._is_excused:
            self._is_excused = True
            self._tell(diagnosis, title, Severity.WARNING)
        elif self.watched.number == 0 and _is_slow(diagnosis, positions):
            self._tell(diagnosis, "straggler", Severity.WARNING)

    def _tell(self, diagnosis: Diagnosis, title: str, severity: Severity) -> None:
        self.watched.tell(report_of(diagnosis, title, severity))

    def _end(self, diagnosis: Diagnosis, title: str, folder: RunFolder) -> None:
        """Report, unless another rank has, and end this process: the run cannot go on."""
        time.sleep(_TURN_SECONDS * min(self.watched.number, _MOST_TURNS))
        if folder.claim_report():
            report = report_of(diagnosis, title, help_text=self.watched.advice)
            self.watched.tell(report)
            with contextlib.suppress(DiagnosticError):
                folder.keep_report(report.render())
        else:
            time.sleep(_TURN_SECONDS)  # for the rank that reports
        for position in self.watched.own:
            position.enter(RankPhase.FAILED, 0)
        os._exit(EXIT_LOST)  # the main thread may never come back from where it is


def _is_slow(diagnosis: Diagnosis, positions: Sequence[RankPosition]) -> bool:
    """Whether what all wait for is unusual: ranks know how long instructions take after their first step."""
    usual = [position.longest_compute for position in positions]
    if not usual or not all(usual):
        return False
    late = [cause for cause in diagnosis.causes if cause.fault is not Fault.OTHER_WORK]
    return any(cause.seconds > max(_SLOW_SECONDS, _SLOW_FACTOR * max(usual)) for cause in late)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler, so that the signal does not end the process."""
    del number, frame
