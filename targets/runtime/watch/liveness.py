"""State of a process of this machine, as the kernel reports it."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratrain.targets.runtime.watch.positions import RankPosition


class Liveness(Enum):
    """State of a process."""

    ALIVE = "alive"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    """on another machine, so nothing is known"""


def liveness(position: RankPosition) -> Liveness:
    """Return the state of a rank's process; a zombie counts as gone."""
    if position.host.encode()[:64] != socket.gethostname().encode()[:64]:
        return Liveness.UNKNOWN
    try:
        status = Path(f"/proc/{position.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _without_proc(position.pid)
    letter = status.rpartition(")")[2].split()[0]  # the process name before it may hold anything, also a ")"
    if letter in "ZXx":
        return Liveness.GONE
    return Liveness.STOPPED if letter in "Tt" else Liveness.ALIVE


def _without_proc(pid: int) -> Liveness:
    if Path("/proc/self/stat").exists():
        return Liveness.GONE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Liveness.GONE
    except PermissionError:
        pass
    return Liveness.ALIVE


class Departures:
    """Notification of processes that end, by their pidfds.

    A launcher ends all other ranks within milliseconds, and which one was first is then lost: polling would be too
    slow.
    """

    def __init__(self) -> None:
        self._handles: dict[int, int] = {}
        """pidfds, by the number of the rank."""
        self._seen: set[int] = set()

    def watch(self, positions: Sequence[RankPosition]) -> None:
        """Watch these ranks too, if they are other live processes of this machine."""
        if not hasattr(os, "pidfd_open"):  # only Linux has it; elsewhere the caller notices at its next look
            return
        for position in positions:
            if position.pid in self._seen or position.pid == os.getpid() or liveness(position) is not Liveness.ALIVE:
                continue
            self._seen.add(position.pid)
            with suppress(OSError):
                self._handles[position.number] = os.pidfd_open(position.pid)

    def wait(self, seconds: float, inbox: Sequence[int] = ()) -> set[int]:
        """Wait for the end of a process, input in `inbox`, or the timeout; return the ranks whose processes ended."""
        ready, _, _ = select.select([*inbox, *self._handles.values()], [], [], seconds)
        ended = {number for number, handle in self._handles.items() if handle in ready}
        for number in ended:
            os.close(self._handles.pop(number))
        return ended

    def close(self) -> None:
        """Close all handles."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles = {}
