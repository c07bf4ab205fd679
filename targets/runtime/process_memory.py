"""What this process has in memory, as the system counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

_STATUS = Path("/proc/self/status")


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

    @property
    def planned_bytes(self) -> int | None:
        """What should be resident at most: all but the peak together."""
        if self.constant_bytes is None:
            return None
        return self.arena_bytes + self.scratch_bytes + self.transport_bytes + self.constant_bytes

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory now; None where the system does not say, as only Linux does."""
    return _field("VmRSS")


def peak_resident_bytes() -> int | None:
    """Most bytes that were in memory since this program began in the process; None where the system does not say.

    What `getrusage` says would count what the parent held that started it.
    """
    return _field("VmHWM")


def _field(name: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text("ascii").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.removesuffix("kB")) * 1024
    return None
