"""Where each rank is, in small memory-mapped files that outlive the processes.

A run's folder has a file `rank-00003.position` for every rank, its program, and a note of the first rank that was lost. What is
written is in the file's pages at once, so a rank that is killed has still said where it was; nothing is flushed, and writing costs
well under a microsecond an instruction.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from attrs import frozen

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import made_directory, opened_regular, replacing
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
"""Bytes of a note or a report."""


class RankPhase(IntEnum):
    """What a rank is doing as a whole."""

    STARTING = 0
    RUNNING = 1
    BETWEEN_STEPS = 2
    SAVING = 3
    ENDED = 4
    FAILED = 5


@frozen
class EnginePosition:
    """How far an engine has come. `since` is when that last changed, in seconds of `time.time`."""

    completed: int
    """instructions, over all steps of this process"""
    running: bool
    """whether the next one has begun"""
    since: float


@frozen
class RankPosition:
    """Where a rank is."""

    number: int
    """of its process, as the launcher numbers them; of ranks in one process, in rank order"""
    stage: int
    replica: int
    peer: int
    pid: int
    host: str
    phase: RankPhase
    step: int
    """of the training, that it works on or ended last"""
    since: float
    """when its phase last changed"""
    heartbeat: float
    longest_compute: float
    """seconds of its longest compute instruction after its first step; 0: not known"""
    engines: Mapping[Engine, EnginePosition]

    @property
    def progress(self) -> tuple[Any, ...]:
        """Changes whenever the rank makes progress."""
        return (self.phase, self.step, *((engine.completed, engine.running) for engine in self.engines.values()))

    @property
    def place(self) -> Rank:
        """Its point in the mesh."""
        return Rank(self.stage, self.replica, self.peer)


class PositionFile:
    """A rank's own file, or memory of this process alone where there is no folder.

    The rank is number `number` of `ranks`; `completed` counts what each of its engines has done, over all steps, as it runs.
    Raises OSError where it cannot be made.
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
        """The rank as a whole does something else."""
        _PHASE.pack_into(self._data, _PHASE_AT, phase, step, time.time())
        if phase is RankPhase.BETWEEN_STEPS:
            self._steps += 1

    def beat(self) -> None:
        """The process is alive."""
        _BEAT.pack_into(self._data, _BEAT_AT, time.time())

    def read(self) -> RankPosition:
        """What it says."""
        return _parse(Path(), self._data[:])

    def begin(self, engine: Engine) -> None:
        """An engine's next instruction has begun."""
        now = time.time()
        if engine is Engine.COMPUTE:
            self._begun = now
        _ENGINE.pack_into(self._data, self._places[engine], self._completed[engine], 1, now)

    def complete(self, engine: Engine) -> None:
        """The instruction has completed, and is counted."""
        now = time.time()
        _ENGINE.pack_into(self._data, self._places[engine], self._completed[engine], 0, now)
        if engine is Engine.COMPUTE and self._steps and now - self._begun > self._longest:
            self._longest = now - self._begun
            _LONGEST.pack_into(self._data, _LONGEST_AT, self._longest)


def position_path(folder: Path, number: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{number:05d}.position"


def read_positions(folder: str) -> list[RankPosition]:
    """The ranks that have left a position in a folder, by number.

    Raises `DiagnosticError` RT002 where it cannot be read, RT092 where a file is no position.
    """
    try:
        paths = sorted(Path(folder).glob("rank-*.position"))
        contents = [(path, _read(path, _SIZE + 1)) for path in paths]
    except (OSError, ValueError) as error:
        fail("RT002", f"cannot read '{folder}': {getattr(error, 'strerror', None) or error}")
    return [_parse(path, data) for path, data in contents if not _is_blank(data)]


def _read(path: Path, most: int) -> bytes:
    """The first bytes of a regular file. Raises OSError where there is none."""
    with opened_regular(path) as stream:
        return stream.read(most)


def _is_blank(data: bytes) -> bool:
    """Whether a rank has made its file and not yet written to it."""
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
    """What the processes of a run leave for those who ask what became of it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.path = Path(directory)

    def hold(self) -> Lock:
        """Make the folder, and lock it for one run. Raises `DiagnosticError` RT002, and RT093 where another run has it."""
        made_directory(self.directory)
        return hold(self.path / _LOCK_FILE, "RT093", self.directory)

    def clear(self) -> None:
        """Make the folder, without what an earlier run left in it. Raises `DiagnosticError` RT002."""
        made_directory(self.directory)
        try:
            if Path(self.program_path).is_symlink():  # what it leads to is no part of the run, and stays as it is
                Path(self.program_path).unlink()
            for path in self.path.glob("rank-*.position"):
                path.unlink()
            for name in (_LOST_FILE, _REPORT_FILE):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            fail("RT002", f"cannot write '{self.directory}': {error.strerror}")

    @property
    def program_path(self) -> str:
        """The program that the ranks run."""
        return str(self.path / PROGRAM_FILE)

    def note_lost(self, numbers: Iterable[int]) -> None:
        """Keep which ranks were gone first; who knows it first is believed."""
        path = self.path / _LOST_FILE
        try:
            with path.open("x", encoding="utf-8") as stream:
                json.dump({"ranks": sorted(numbers), "time": time.time()}, stream)
        except OSError:  # it is noted already, or the disk is full: the report does without
            return

    def lost(self) -> tuple[list[int], float] | None:
        """Which ranks were gone first, and when; None where nobody saw it."""
        try:
            note = json.loads(_read(self.path / _LOST_FILE, _MOST_SAID))
            return [int(number) for number in note["ranks"]], float(note["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def claim_report(self) -> bool:
        """Whether the caller is the first who wants to report the end of the run."""
        try:
            (self.path / _REPORT_FILE).open("x").close()
        except FileExistsError:
            return False
        except OSError:
            return True  # better twice than not at all
        return True

    def keep_report(self, text: str) -> None:
        """Keep what was said about the end of the run."""
        with replacing(str(self.path / _REPORT_FILE)) as stream:
            stream.write(text.encode())

    def report(self) -> str:
        """What was said about the end of the run; empty where nothing was."""
        try:
            return _read(self.path / _REPORT_FILE, _MOST_SAID).decode()
        except (OSError, ValueError):
            return ""
