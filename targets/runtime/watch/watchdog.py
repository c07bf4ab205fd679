"""Watchdog thread of a run: reports when asked (SIGUSR1), when a rank is gone, and when nothing makes progress.

    every 0.2 s:  write own heartbeats; read the positions of all ranks
                  a rank is gone                                           -> report, end this process
                  nothing moved since the last look: quiet += elapsed      -> quiet long enough: diagnose (`postmortem`)
                      conclusive, quiet >= hang timeout                    -> report, end this process
                      not conclusive, quiet >= 10 x hang timeout           -> the same, unless ranks start or save
                      much slower than usual                               -> a warning
                  something moved: quiet = 0

It calls no communication library and takes no lock of the run, so it works while the main thread hangs in either. It
ends its own process by `os._exit`; the launcher then ends the others.
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
from ratrain.targets.runtime.watch.positions import PositionFile, RankPhase, RunFolder, read_positions, steps_done
from ratrain.targets.runtime.watch.postmortem import Diagnosis, Fault, diagnose, only_gone

if TYPE_CHECKING:
    from types import FrameType

    from ratrain.targets.runtime.watch.positions import RankPosition

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"
"""Type of a handler that `signal.signal` takes and returns."""

_LOOK_SECONDS = 0.2
_LONGEST_LOOK = 3 * _LOOK_SECONDS
"""Most seconds counted between two looks: a longer gap means that the process, and perhaps the whole job, was
suspended."""
_SLOW_SECONDS = 1.0
"""Seconds from which on an instruction or message that takes much longer than usual is reported."""
_SLOW_FACTOR = 5.0
_PATIENCE = 10
"""Multiple of the hang timeout after which a run is ended although no fault is proved."""
_TURN_SECONDS = 0.3
"""Seconds by which ranks report after one another, so that one speaks for all, and the next one if that is gone."""
_MOST_TURNS = 6
EXIT_LOST = 1


def report_of(
    diagnosis: Diagnosis, title: str, severity: Severity = Severity.ERROR, help_text: str | None = None
) -> Diagnostic:
    """Return a diagnosis as a diagnostic: its causes, then a line for each rank."""
    causes = "; ".join(cause.text for cause in diagnosis.causes) or "no rank waits"
    notes = [Note(line) for line in (*diagnosis.ranks, diagnosis.verdict)]
    return Diagnostic("RT093", f"{title}: {causes}", notes=notes, help=help_text, severity=severity)


def getting_on(diagnosis: Diagnosis) -> Diagnostic:
    """Return the positions of a run that makes progress, without causes: a momentary wait is no fault."""
    notes = [Note(line) for line in diagnosis.ranks]
    return Diagnostic("RT093", "where the run is: it makes progress", notes=notes, severity=Severity.WARNING)


def gone_ranks(positions: Sequence[RankPosition], departed: Collection[int]) -> list[RankPosition]:
    """Return this machine's ranks whose processes are gone without having ended.

    If some of them are in `departed`, the ranks that were first, only these.
    """
    ended = (RankPhase.ENDED, RankPhase.FAILED)
    gone = [position for position in positions if position.phase not in ended and liveness(position) is Liveness.GONE]
    return [position for position in gone if position.number in departed] or gone


def lost_ranks(positions: Sequence[RankPosition], departed: Collection[int], folder: RunFolder) -> list[RankPosition]:
    """Return the ranks that are gone, or none if another rank failed first.

    A rank that fails says why itself and ends the job with all others: these are not lost.
    """
    gone = gone_ranks(positions, departed)
    failed = any(position.phase is RankPhase.FAILED for position in positions)
    return [] if gone and failed and folder.lost() is None else gone


@frozen(eq=False)
class Watched:
    """Object of a watchdog, and the receiver of its reports."""

    program: Program
    folder: RunFolder | None
    """None: only this process's positions are known, and only SIGUSR1 is answered"""
    own: Sequence[PositionFile]
    number: int
    """number of this process"""
    hang_timeout: float
    """seconds without progress of any rank before a verdict; 0: only SIGUSR1 is answered"""
    tell: Callable[[Diagnostic], None]
    advice: Callable[[int], str] | None = None
    """advice for a run that was lost, by the number of its steps"""


class Watchdog:
    """Watchdog thread, which runs from `start` to `stop`; the main thread calls both."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._ending = threading.Event()
        self._inbox, self._outbox = os.pipe2(os.O_NONBLOCK)
        self._before: tuple[int, _Handler] | None = None
        self._progress: object = None
        self._looked = time.monotonic()
        self._quiet = 0.0
        """Seconds without progress during which the watchdog was awake."""
        self._next_verdict = _SLOW_SECONDS
        self._is_excused = False
        """True once a warning has named a rank whose work takes no usual time."""
        self._departures = Departures()
        self._departed: set[int] = set()

    def start(self) -> None:
        """Start watching; from here on SIGUSR1 asks for a report."""
        # Python runs signal handlers only in the main thread, between its instructions, and it may be deep in a
        # kernel. The wakeup file gets the signal's number at once, which wakes the watchdog.
        old_file = signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
        self._before = (old_file, signal.signal(signal.SIGUSR1, _nothing))
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and restore the signal handlers."""
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
        """Report where the run is; with causes only if it makes no progress."""
        diagnosis = self._diagnosis(positions)
        if self._quiet < _SLOW_SECONDS:
            self.watched.tell(getting_on(diagnosis))
        else:
            self._tell(diagnosis, "where the run is", Severity.WARNING)

    def _signals(self) -> bytes:
        """Wait for the next look, a signal or the end of another rank; return the signals since the last look."""
        self._departed = self._departures.wait(_LOOK_SECONDS, [self._inbox])
        try:
            return os.read(self._inbox, 64)
        except BlockingIOError:
            return b""

    def _diagnosis(self, positions: Sequence[RankPosition]) -> Diagnosis:
        return diagnose(self.watched.program, positions, time.time(), liveness)

    def _look(self, positions: Sequence[RankPosition], folder: RunFolder) -> None:
        """End the run if a rank is lost; judge it if it has been quiet long enough."""
        gone = lost_ranks(positions, self._departed, folder)
        if gone:
            # The first note wins: all ranks then report the same ranks as lost first, also those that look later.
            folder.note_lost(position.number for position in gone)
            lost = folder.lost() or ([position.number for position in gone], 0.0)
            diagnosis = diagnose(self.watched.program, positions, time.time(), only_gone(lost[0]))
            self._end(diagnosis, "a rank was lost", folder)
        if self._is_quiet(positions) and self._quiet >= self._next_verdict:
            self._judge(positions, folder)
            # Verdicts come at 1, 2, 4, ... seconds of quiet and at the timeout, later every second.
            self._next_verdict = min(2 * self._quiet, max(self.watched.hang_timeout, self._quiet + 1.0))

    def _is_quiet(self, positions: Sequence[RankPosition]) -> bool:
        """Return True if nothing has moved since the last look; add the elapsed time to the quiet seconds."""
        now = time.monotonic()
        self._quiet += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        progress = [(position.number, *position.progress) for position in positions]
        if progress == self._progress:
            return True
        self._progress, self._quiet, self._next_verdict, self._is_excused = progress, 0.0, _SLOW_SECONDS, False
        return False

    def _judge(self, positions: Sequence[RankPosition], folder: RunFolder) -> None:
        """End a run that cannot continue or takes far too long; warn of slow ranks."""
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
        """Report, unless another rank has, and end this process, because the run cannot continue."""
        time.sleep(_TURN_SECONDS * min(self.watched.number, _MOST_TURNS))
        if folder.claim_report():
            advise = self.watched.advice
            advice = None if advise is None else advise(steps_done(read_positions(folder.directory)))
            report = report_of(diagnosis, title, help_text=advice)
            self.watched.tell(report)
            with contextlib.suppress(DiagnosticError):
                folder.keep_report(report.render())
        else:
            time.sleep(_TURN_SECONDS)  # let the other rank finish its report: this exit ends the job
        for position in self.watched.own:
            position.enter(RankPhase.FAILED, 0)
        os._exit(EXIT_LOST)  # the main thread may never return from where it hangs


def _is_slow(diagnosis: Diagnosis, positions: Sequence[RankPosition]) -> bool:
    """Return True if the common wait is unusually long; usual times are known after the first step."""
    usual = [position.longest_compute for position in positions]
    if not usual or not all(usual):
        return False
    late = [cause for cause in diagnosis.causes if cause.fault is not Fault.OTHER_WORK]
    return any(cause.seconds > max(_SLOW_SECONDS, _SLOW_FACTOR * max(usual)) for cause in late)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: with a handler, the signal does not end the process."""
    del number, frame
