"""Memory use of this process as the system counts it (`/proc/self/status`)."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

_STATUS = Path("/proc/self/status")
_MOST_STATUS = 1 << 13


@frozen
class Traffic:
    """Bytes read from a file and bytes written to it."""

    read: int = 0
    written: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.read - other.read, self.written - other.written)


@frozen
class MemoryUse:
    """Memory of a process that runs ranks: bytes announced before its first step, and bytes the system measured."""

    arena_bytes: int
    """arenas of all its ranks"""
    scratch_bytes: int
    """scratch of all its engines"""
    transport_bytes: int
    """peak of messages and collectives outside the arenas"""
    constant_bytes: int | None
    """interpreter, libraries and program: resident before the arenas were made; None where the system does not say"""
    peak_resident_bytes: int | None
    declared: Mapping[str, int] = field(factory=dict)
    """most bytes held besides arenas and scratch, by purpose"""
    files: Traffic = field(factory=Traffic)
    """bytes that its steps have moved from and to files"""
    files_a_step: Traffic = field(factory=Traffic)
    """bytes that each step moves by its program, if no update is skipped"""
    first_use: Mapping[str, int] = field(factory=dict)
    """most bytes that libraries and compiled loops take on first use, by name: measured"""

    @property
    def certified_bytes(self) -> int:
        """Upper bound of the bytes the run allocates, announced before anything was allocated."""
        return self.arena_bytes + self.scratch_bytes + sum(self.declared.values())

    @property
    def planned_bytes(self) -> int | None:
        """Upper bound of resident bytes: certified, constant and first use of libraries; None without the constant."""
        if self.constant_bytes is None:
            return None
        return self.certified_bytes + self.constant_bytes + sum(self.first_use.values())

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {**asdict(self), "certified_bytes": self.certified_bytes}


@frozen
class Residence:
    """Peak bytes of a process so far, and the bytes it should stay below."""

    peak: int
    planned: int


def resident_bytes() -> int | None:
    """Return the bytes of this process in memory; None where the system does not say (only Linux does)."""
    return _field("VmRSS")


def peak_resident_bytes() -> int | None:
    """Return the peak of resident bytes since this program began in the process; None where the system does not say.

    `getrusage` is no substitute: its peak includes that of the parent before `exec`.
    """
    return _field("VmHWM")


def room() -> tuple[int, str]:
    """Return the bytes this process may take (the machine's memory, or less by a limit) and a clause that says why.

    The machine's whole memory counts, also the part that is in use; of a limit, only the part that is left.
    """
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [(present, f"this machine has {present}")]
    for limit, counted, words in _LIMITS:
        most, used = resource.getrlimit(limit)[0], _field(counted)
        if most != resource.RLIM_INFINITY and used is not None:
            left = max(0, most - used)
            found.append((left, f"the limit on this process's {words} leaves {left}"))
    return min(found)


_LIMITS = (
    (resource.RLIMIT_AS, "VmSize", "address space (ulimit -v)"),
    (resource.RLIMIT_DATA, "VmData", "data (ulimit -d)"),
)
"""Limits of a process, the line of `/proc/self/status` that counts towards each, and its name for messages."""


def _field(name: str) -> int | None:
    """Return a line of `/proc/self/status` in bytes; None where there is none."""
    with suppress(OSError, ValueError):
        handle = os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC)  # asked in every step: no buffers are made for it
        try:
            told = os.read(handle, _MOST_STATUS)
        finally:
            os.close(handle)
        for line in told.splitlines():
            key, _, value = line.partition(b":")
            if key == name.encode():
                return int(value.removesuffix(b"kB")) * 1024
    return None
