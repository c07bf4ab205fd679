"""The supervisor of mpirun or torchrun: it passes signals on to the ranks, and reports on ranks that were lost.

Ranks write their positions and heartbeats to a folder. The supervisor reads it while the launcher runs:

    Ctrl-C -> supervisor -> every rank of this machine (the launcher would end them at once)
    a rank's process ends without a word -> 5 s for the launcher to end the others -> kill, report
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attrs import define, field

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Severity, fail
from ratrain.ratrainc.console.extras import check_installed
from ratrain.ratrainc.console.failures import (
    EXIT_DIAGNOSED,
    EXIT_HUNG_UP,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_SAVED,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from ratrain.ratrainc.console.safe_messages import show_safely
from ratrain.ratrainc.console.signals import ending_signals
from ratrain.targets.program.rtx import read_program
from ratrain.targets.runtime.watch.liveness import Departures, Liveness, liveness
from ratrain.targets.runtime.watch.positions import RankPhase, RankPosition, RunFolder, read_positions, steps_done
from ratrain.targets.runtime.watch.postmortem import Diagnosis, diagnose, only_gone
from ratrain.targets.runtime.watch.watchdog import getting_on, lost_ranks, report_of

if TYPE_CHECKING:
    from types import FrameType

_LOOK_SECONDS = 0.05
_END_SECONDS = 5.0
"""Seconds that the launcher has to end the other ranks after one is lost."""
_SAY_SECONDS = 20.0
_WATCH_SECONDS = 1.0
"""Seconds for which a run is watched, to see if it makes progress."""
_OTHER_LAUNCHER = "name the mpirun of an MPI with --mpirun"
_OWN_CODES = (
    0,
    EXIT_DIAGNOSED,
    EXIT_USAGE,
    EXIT_INTERNAL,
    EXIT_SAVED,
    EXIT_HUNG_UP,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
)
_FAILURES = (EXIT_DIAGNOSED, EXIT_USAGE, EXIT_INTERNAL)


def start_command(engine: str, ranks: int, launcher: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the words that start `ranks` processes of an engine, and environment variables for them.

    Raises `DiagnosticError` RT002 or RT093 if there is no launcher.
    """
    return torch_command(ranks) if engine == "torch" else mpi_command(ranks, launcher)


def mpi_command(ranks: int, launcher: str | None) -> tuple[list[str], dict[str, str]]:
    """Return words and variables for mpirun.

    Raises `DiagnosticError` RT093 if there is no mpirun, RT002 if mpi4py is missing: reported once here, not by each
    rank.
    """
    searched = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpirun = launcher or shutil.which("mpirun", path=searched)
    if mpirun is None or shutil.which(mpirun) is None:
        text = f"'{launcher}' cannot be executed" if launcher else "there is no mpirun on the PATH"
        fail("RT093", text, help="pip install 'ratrain[mpi]' brings one; --mpirun names another")
    said = _version_of(mpirun)
    check_installed("mpi4py", "mpi", "--engine mpi")
    variables: dict[str, str] = {}
    if "Open MPI" in said or "OpenRTE" in said:
        if os.geteuid() == 0:  # Open MPI refuses root without these, and more ranks than cores without the policy
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if ranks > (os.cpu_count() or 1):
            variables["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # from version 5 on
            variables["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # before
    return [mpirun, "-n", str(ranks)], variables


def torch_command(ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return words and variables for torchrun. Raises `DiagnosticError` RT002 if PyTorch is missing."""
    check_installed("torch", "torch", "--engine torch")
    # -P keeps files of the current directory from being imported in place of a library
    return [sys.executable, "-P", "-m", "ratrain.targets.pytorch.launcher", str(ranks)], {}


def _version_of(launcher: str) -> str:
    """Return the version text of a launcher. Raises `DiagnosticError` RT093 if it cannot be run, or does not end."""
    words = [launcher, "--version"]
    try:
        # S603: the launcher and the words that start ranks are the user's own; no shell reads them.
        said = subprocess.run(words, capture_output=True, timeout=_SAY_SECONDS, check=False)  # noqa: S603
    except (OSError, ValueError) as error:  # a ValueError: a word with a zero byte
        _cannot_start(launcher, error)
    except subprocess.TimeoutExpired:
        fail("RT093", f"'{launcher} --version' did not end within {_SAY_SECONDS:.0f} s", help=_OTHER_LAUNCHER)
    return said.stdout.decode(errors="replace")


def _cannot_start(launcher: str, error: OSError | ValueError) -> NoReturn:
    reason = getattr(error, "strerror", None) or error
    fail("RT093", f"'{launcher}' cannot be started: {reason}", help=_OTHER_LAUNCHER)


@define
class Supervisor:
    """A runner of a command that starts ranks, which leave their positions in a folder."""

    folder: RunFolder
    advice: Callable[[int], str] | None
    """help text for a run that was lost, by the number of its steps"""
    launcher: str | None = None
    """name of the launcher in messages; None: the command's first word"""
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _early_signal: int = field(init=False, default=0)
    """signal that came before there was a process to receive it"""

    def run(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run the command to its end; return the ranks' exit code, or 1 if they were lost or did not choose it.

        Raises `DiagnosticError` RT002 or RT093 if the command cannot be started, or another run has the folder.
        """
        with self.folder.hold():  # fails if another run has the folder; the ranks take the lock when they start
            self.folder.clear()
        with self._passing_on_signals():
            process = self._start(command, variables)
            try:
                lost = self._watch(process)
            finally:
                if process.poll() is None:
                    self._kill(process)
        code = process.returncode
        if lost or code not in _OWN_CODES:
            self._report(code)
        if code in _FAILURES or code not in _OWN_CODES:
            self._report_launcher(self.launcher or command[0], code)
        return EXIT_DIAGNOSED if lost or code not in _OWN_CODES else code

    def _start(self, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            # In a session of its own: Ctrl-C must come here and not to the launcher, which would end the ranks at once.
            process = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)  # noqa: S603
        except (OSError, ValueError) as error:  # a ValueError: a word with a zero byte
            _cannot_start(command[0], error)
        self._process = process
        if self._early_signal:
            process.send_signal(self._early_signal)
        return process

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end; return True if a rank was lost before it."""
        deadline = None
        departures, departed = Departures(), set[int]()
        while process.poll() is None:
            with suppress(DiagnosticError):
                # a position may be half-written or not there yet; the next look is soon
                positions = read_positions(self.folder.directory)
                departures.watch(positions)
                gone = lost_ranks(positions, departed, self.folder)
                if gone and deadline is None:
                    self.folder.note_lost(position.number for position in gone)
                    deadline = time.monotonic() + _END_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                self._kill(process)
            departed = departures.wait(_LOOK_SECONDS)
        departures.close()
        return deadline is not None

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End the launcher and the ranks of this machine, which need not be its children."""
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        self._tell_ranks(signal.SIGKILL, (Liveness.ALIVE, Liveness.STOPPED))

    def _tell_ranks(self, number: int, states: Collection[Liveness]) -> int:
        """Send a signal to the ranks of this machine in one of some states; return how many were reached."""
        told = 0
        with suppress(DiagnosticError):
            for position in read_positions(self.folder.directory):
                if liveness(position) in states:
                    with suppress(OSError):
                        os.kill(position.pid, number)
                        told += 1
        return told

    @contextmanager
    def _passing_on_signals(self) -> Iterator[None]:
        """Hand SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the ranks of this machine while the block runs.

        Ranks of other machines hear of an end from these ranks.
        """

        def pass_on(number: int, frame: FrameType | None) -> None:
            del frame
            if self._process is not None and self._tell_ranks(number, (Liveness.ALIVE,)):
                return
            # SIGUSR1 would end a launcher, and ranks that have no handler for it yet
            if number == signal.SIGUSR1:
                show_safely(Diagnostic("RT093", "where the run is: its ranks are starting", severity=Severity.WARNING))
            elif self._process is None:
                self._early_signal = number
            else:
                self._process.send_signal(number)

        numbers = (*ending_signals(), signal.SIGUSR1)
        before = {number: signal.signal(number, pass_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _report(self, code: int) -> None:
        """Report on the ranks, unless one of them has."""
        if self.folder.report():
            return
        with suppress(DiagnosticError):
            diagnosis = examine(self.folder)
            title = "a rank was lost" if self.folder.lost() else f"the ranks ended with code {code}"
            advice = None if self.advice is None else self.advice(steps_done(read_positions(self.folder.directory)))
            report = report_of(diagnosis, title, help_text=advice)
            show_safely(report)
            self.folder.keep_report(report.render())

    def _report_launcher(self, launcher: str, code: int) -> None:
        """Report that the launcher ended before any rank had a position: nothing else may have said why."""
        with suppress(DiagnosticError):
            if read_positions(self.folder.directory) or self.folder.report():
                return
            how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            text = f"'{launcher}' {how} before any rank had begun"
            show_safely(Diagnostic("RT093", text, help="the reason stands above, if the launcher or a rank gave one"))


def examine(folder: RunFolder) -> Diagnosis:
    """Diagnose a run from the positions in its folder.

    If any rank lives, the diagnosis is of the present; else of the moment when the first rank was lost. Raises
    `DiagnosticError` RT002 or RT092 if there are no positions, or they cannot be read.
    """
    positions = read_positions(folder.directory)
    if not positions:
        fail("RT002", f"'{folder.directory}' holds no positions of ranks", help="name the --run-dir, or the --save DIR")
    program = read_program(folder.program_path)
    now = time.time()
    state_of: Callable[[RankPosition], Liveness] = liveness
    if not any(liveness(position) in (Liveness.ALIVE, Liveness.STOPPED) for position in positions):
        now, state_of = _last_moment(folder, positions)
    return diagnose(program, positions, now, state_of)


def _last_moment(
    folder: RunFolder, positions: Sequence[RankPosition]
) -> tuple[float, Callable[[RankPosition], Liveness]]:
    """Return the time at which a finished run lost its first rank, and a function for the state of each rank then.

    If nobody saw the loss, it is the last heartbeat of the ranks that had not ended, and all of them were gone.
    """
    lost = folder.lost()
    if lost is not None:
        return lost[1], only_gone(lost[0])
    silent = [position for position in positions if position.phase is not RankPhase.ENDED]
    return max((position.heartbeat for position in silent), default=0.0), only_gone(
        [position.number for position in silent]
    )


def describe(folder: RunFolder) -> tuple[Diagnostic | str, bool]:
    """Describe the state of a run: a report, or the text from its end; and True if all is well with it."""
    positions = read_positions(folder.directory)
    if positions and all(position.phase is RankPhase.ENDED for position in positions):
        return f"the run ended well, after step {max(position.step for position in positions)}", True
    kept = folder.report()
    if kept:
        return kept, False
    if any(position.phase is RankPhase.FAILED for position in positions):
        return "the run ended with an error, or was interrupted twice, and said so where it was started", False
    if positions and _gets_on(folder, positions):
        return getting_on(examine(folder)), True
    diagnosis = examine(folder)
    alive = any(liveness(position) is Liveness.ALIVE for position in positions)
    title = "where the run is" if alive else "the run was lost"
    if not alive and folder.lost() is None:
        title += ", and no rank saw which went first ('ratrainc launch' would have)"
    return report_of(
        diagnosis, title, Severity.WARNING if alive else Severity.ERROR
    ), alive and not diagnosis.is_conclusive


def _gets_on(folder: RunFolder, positions: Sequence[RankPosition]) -> bool:
    """Return True if the positions of a live run change within a second."""
    deadline = time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < deadline and all(liveness(position) is not Liveness.GONE for position in positions):
        time.sleep(_LOOK_SECONDS)
        if [position.progress for position in read_positions(folder.directory)] != [
            position.progress for position in positions
        ]:
            return True
    return False
