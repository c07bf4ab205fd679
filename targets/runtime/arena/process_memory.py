"""What this process has in memory, as the system counts it."""

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
    """Bytes that were read from a file, and written to it."""

    read: int = 0
    written: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.read - other.read, self.written - other.written)


@frozen
class MemoryUse:
    """What a process that runs ranks holds in memory: what it said before its first step, and what the system counted."""

    arena_bytes: int
    """of all its ranks"""
    scratch_bytes: int
    """of all its engines"""
    transport_bytes: int
    """most that messages and collectives have taken outside the arenas"""
    constant_bytes: int | None
    """interpreter, libraries, program: what was resident before the arenas were made; None where the system does not say"""
    peak_resident_bytes: int | None
    declared: Mapping[str, int] = field(factory=dict)
    """what is held at most beside arenas and scratch, by what it is"""
    files: Traffic = field(factory=Traffic)
    """what its steps have moved from and to files"""
    files_a_step: Traffic = field(factory=Traffic)
    """what each of them moves, by its program, where no update is skipped"""
    first_use: Mapping[str, int] = field(factory=dict)
    """what libraries and loops take at most as they are first used, by what it is: measured"""

    @property
    def certified_bytes(self) -> int:
        """What the run's memory gives out at most, said before anything was allocated."""
        return self.arena_bytes + self.scratch_bytes + sum(self.declared.values())

    @property
    def planned_bytes(self) -> int | None:
        """Return the most bytes resident: certified, constant and first use of libraries; None without the constant."""
        if self.constant_bytes is None:
            return None
        return self.certified_bytes + self.constant_bytes + sum(self.first_use.values())

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {**asdict(self), "certified_bytes": self.certified_bytes}


@frozen
class Residence:
    """Most bytes that a process has had in memory so far, and the most that it should have."""

    peak: int
    planned: int


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory now; None where the system does not say, as only Linux does."""
    return _field("VmRSS")


def peak_resident_bytes() -> int | None:
    """Most bytes that were in memory since this program began in the process; None where the system does not say.

    What `getrusage` says would count what the parent held that started it.
    """
    return _field("VmHWM")


def data_bytes() -> int | None:
    """Bytes that count towards RLIMIT_DATA; None where the system does not say."""
    return _field("VmData")


def room() -> tuple[int, str]:
    """Bytes that this process may take yet, of what the machine has and what limits leave, and a clause that says so."""
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
"""Limits of a process; what of `/proc/self/status` counts towards each."""


def _field(name: str) -> int | None:
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
