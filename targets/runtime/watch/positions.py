"""Positions of ranks in small memory-mapped files that outlive the processes.

A run's folder has a file `rank-00003.position` for every rank, its program, and a note of the first rank that was lost.
A write is in the file's pages at once, so a rank that is killed has left its last position. Nothing is flushed, and a
write costs well under a microsecond for an instruction.

    0     magic, number, ranks, stage, replica, peer, pid, host
    128   phase, step, since            160  heartbeat            168  longest compute instruction
    192   for each engine, 32 bytes apart: completed, running, since

Fields are written one by one and readers take no lock: a position may mix two moments, and a verdict needs several
looks.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from attrs import frozen

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import help_for, made_directory, opened_regular, replacing
from ratrain.ratrain_ir.topology import Rank
from ratrain.targets.runtime.arena.locks import Lock, hold

PROGRAM_FILE = "program.rtx"
_LOST_FILE, _REPORT_FILE, _LOCK_FILE = "lost.json", "postmortem.txt", ".lock"
_MAGIC = b"RTPOS\0\0\2"
_IDENTITY = struct.Struct("<8sIIIIII64s")  # magic, number, ranks, stage, replica, peer, pid, host
_PHASE = struct.Struct("<Iqd")  # phase, step, since
_BEAT = struct.Struct("<d")
_LONGEST = struct.Struct("<d")
_ENGINE = struct.Struct("<QBd")  # completed, running, since
_PHASE_AT, _BEAT_AT, _LONGEST_AT, _ENGINES_AT = 128, 160, 168, 192
_ENGINE_BYTES = 32
_SIZE = _ENGINES_AT + _ENGINE_BYTES * len(ENGINES)
_MOST_SAID = 16 << 20
"""Most bytes of a note or report that are read."""


class RankPhase(IntEnum):
    """Phase of a rank as a whole."""

    STARTING = 0
    RUNNING = 1
    BETWEEN_STEPS = 2
    SAVING = 3
    ENDED = 4
    FAILED = 5


@frozen
class EnginePosition:
    """Progress of an engine. `since` is the time of its last change, in seconds of `time.time`."""

    completed: int
    """instructions, over all steps of this process"""
    running: bool
    """True if the next one has begun"""
    since: float


@frozen
class RankPosition:
    """Position of a rank."""

    number: int
    """number of its process, as the launcher counts; for ranks in one process, their number in rank order"""
    stage: int
    replica: int
    peer: int
    pid: int
    host: str
    phase: RankPhase
    step: int
    """step of the training in progress, or the last one finished"""
    since: float
    """time at which its phase last changed"""
    heartbeat: float
    longest_compute: float
    """seconds of its longest compute instruction after its first step; 0: unknown"""
    engines: Mapping[Engine, EnginePosition]

    @property
    def progress(self) -> tuple[Any, ...]:
        """Value that changes whenever the rank makes progress."""
        return (self.phase, self.step, *((engine.completed, engine.running) for engine in self.engines.values()))

    @property
    def place(self) -> Rank:
        """Point in the mesh."""
        return Rank(self.stage, self.replica, self.peer)


class PositionFile:
    """File of a rank's own position, or memory of this process alone if there is no folder.

    The rank is number `number` of `ranks`. `completed` has the instructions that each of its engines has completed,
    over all steps; it is the rank's own mapping and changes as the rank runs. Raises OSError where the file cannot be
    made.
    """

    def __init__(
        self, folder: Path | None, rank: Rank, number: int, *, ranks: int, completed: Mapping[Engine, int]
    ) -> None:
        if folder is None:
            self._data = mmap.mmap(-1, _SIZE)
        else:
            path = position_path(folder, number)
            with path.open("wb") as stream:
                stream.write(bytes(_SIZE))
            with path.open("r+b") as stream:
                self._data = mmap.mmap(stream.fileno(), _SIZE)
        host = socket.gethostname().encode()[:64]
        _IDENTITY.pack_into(self._data, 0, _MAGIC, number, ranks, *rank, os.getpid(), host)
        self.enter(RankPhase.STARTING, 0)
        self.beat()
        self._completed = completed
        self._places = {engine: _ENGINES_AT + _ENGINE_BYTES * index for index, engine in enumerate(ENGINES)}
        self._begun = 0.0
        self._longest = 0.0
        self._steps = 0

    def enter(self, phase: RankPhase, step: int) -> None:
        """Record the rank's new phase."""
        _PHASE.pack_into(self._data, _PHASE_AT, phase, step, time.time())
        if phase is RankPhase.BETWEEN_STEPS:
            self._steps += 1

    def beat(self) -> None:
        """Record that the process is alive."""
        _BEAT.pack_into(self._data, _BEAT_AT, time.time())

    def read(self) -> RankPosition:
        """Return the recorded position."""
        return _parse(Path(), self._data[:])

    def begin(self, engine: Engine) -> None:
        """Record that an engine's next instruction has begun."""
        now = time.time()
        if engine is Engine.COMPUTE:
            self._begun = now
        _ENGINE.pack_into(self._data, self._places[engine], self._completed[engine], 1, now)

    def complete(self, engine: Engine) -> None:
        """Record that the instruction has completed; `completed` already counts it."""
        now = time.time()
        _ENGINE.pack_into(self._data, self._places[engine], self._completed[engine], 0, now)
        # The first step is left out: it loads libraries and compiles loops.
        if engine is Engine.COMPUTE and self._steps and now - self._begun > self._longest:
            self._longest = now - self._begun
            _LONGEST.pack_into(self._data, _LONGEST_AT, self._longest)


def position_path(folder: Path, number: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank-{number:05d}.position"


def read_positions(folder: str) -> list[RankPosition]:
    """Return the positions of the ranks in a folder, by number.

    Raises `DiagnosticError` RT002 where it cannot be read, RT092 where a file is no position.
    """
    try:
        paths = sorted(Path(folder).glob("rank-*.position"))
        contents = [(path, _read(path, _SIZE + 1)) for path in paths]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fail("RT002", f"cannot read '{folder}': {reason}", help=help_for(error))
    return [_parse(path, data) for path, data in contents if not _is_blank(data)]


def steps_done(positions: Sequence[RankPosition]) -> int:
    """Return the number of steps that a run has done by its ranks' positions: the one in progress does not count."""
    after = (RankPhase.BETWEEN_STEPS, RankPhase.SAVING, RankPhase.ENDED)
    return max((each.step + (each.phase in after) for each in positions), default=0)


def _read(path: Path, most: int) -> bytes:
    """Return the first bytes of a regular file. Raises OSError where there is none."""
    with opened_regular(path) as stream:
        return stream.read(most)


def _is_blank(data: bytes) -> bool:
    """Return True if a rank has created its file and not written to it yet."""
    return not any(data[: len(_MAGIC)])


def _parse(path: Path, data: bytes) -> RankPosition:
    if len(data) != _SIZE or not data.startswith(_MAGIC):
        fail("RT092", f"'{path}' is not a rank's position")
    _, number, _, stage, replica, peer, pid, host = _IDENTITY.unpack_from(data, 0)
    phase, step, since = _PHASE.unpack_from(data, _PHASE_AT)
    (heartbeat,), (longest,) = _BEAT.unpack_from(data, _BEAT_AT), _LONGEST.unpack_from(data, _LONGEST_AT)
    engines = {}
    for index, engine in enumerate(ENGINES):
        completed, running, changed = _ENGINE.unpack_from(data, _ENGINES_AT + _ENGINE_BYTES * index)
        engines[engine] = EnginePosition(completed, bool(running), changed)
    if phase not in set(RankPhase):
        fail("RT092", f"'{path}' is not a rank's position")
    name = host.rstrip(b"\0").decode(errors="replace")
    times = (since, heartbeat, longest)
    return RankPosition(number, stage, replica, peer, pid, name, RankPhase(phase), step, *times, engines)


class RunFolder:
    """Folder in which a run's processes leave files for those who ask what happened."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.path = Path(directory)

    def hold(self) -> Lock:
        """Make the folder and lock it for one run. Raises `DiagnosticError` RT002, and RT093 if another run has it."""
        made_directory(self.directory)
        return hold(self.path / _LOCK_FILE, "RT093", self.directory)

    def clear(self) -> None:
        """Make the folder and remove the files of an earlier run. Raises `DiagnosticError` RT002."""
        made_directory(self.directory)
        try:
            if Path(self.program_path).is_symlink():  # its target is no part of the run: do not write through the link
                Path(self.program_path).unlink()
            for path in self.path.glob("rank-*.position"):
                path.unlink()
            for name in (_LOST_FILE, _REPORT_FILE):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            fail("RT002", f"cannot write '{self.directory}': {error.strerror}")

    @property
    def program_path(self) -> str:
        """Path of the program that the ranks run."""
        return str(self.path / PROGRAM_FILE)

    def note_lost(self, numbers: Iterable[int]) -> None:
        """Record which ranks were gone first; the first note stands."""
        path = self.path / _LOST_FILE
        try:
            with path.open("x", encoding="utf-8") as stream:
                json.dump({"ranks": sorted(numbers), "time": time.time()}, stream)
        except OSError:  # noted already, or the disk is full: the report does without
            return

    def lost(self) -> tuple[list[int], float] | None:
        """Return the ranks that were gone first, and when; None if there is no note."""
        try:
            note = json.loads(_read(self.path / _LOST_FILE, _MOST_SAID))
            return [int(number) for number in note["ranks"]], float(note["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def claim_report(self) -> bool:
        """Return True if the caller is the first to report the end of the run, by creating the report file."""
        try:
            (self.path / _REPORT_FILE).open("x").close()
        except FileExistsError:
            return False
        except OSError:
            return True  # better twice than not at all
        return True

    def keep_report(self, text: str) -> None:
        """Write the report of the end of the run."""
        with replacing(str(self.path / _REPORT_FILE)) as stream:
            stream.write(text.encode())

    def report(self) -> str:
        """Return the report of the end of the run; empty if there is none."""
        try:
            return _read(self.path / _REPORT_FILE, _MOST_SAID).decode()
        except (OSError, ValueError):
            return ""
