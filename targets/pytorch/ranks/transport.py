"""torch.distributed as a transport of ranks, in a job that torchrun (or whoever sets its variables) has started."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar, NoReturn

import torch
import torch.distributed as dist

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.pytorch.place import TorchrunPlace, start_command
from ratrain.targets.pytorch.ranks.communicator import BOTH_BACKENDS, HOST_BACKEND, TIMEOUT, TorchCommunicator
from ratrain.targets.pytorch.ranks.requests import Calls, reason_of
from ratrain.targets.runtime.ranks.waiting import finish

_MEETING_TIMEOUT = timedelta(minutes=5)
"""Longest wait of the first processes for the last, which load the same libraries."""
_END_KEY, _NORMAL_END = "end", "closed"
_LOOK = timedelta(days=1)
"""Longest wait for the store's key at a time: a store cannot wait much longer."""
_LEAD_SECONDS, _LAST_SECONDS = 0.1, 0.4
"""Delays when a job is ended: process 0 ends first, then the others, last the one that ended it.

A watchdog could take the end of another process for a loss. Process 0's is the only one that speaks without waiting a
turn.
"""


class TorchTransport:
    """The job that torchrun has started, which this process is part of."""

    engine: ClassVar[str] = "torch"
    launcher = "torchrun"

    def __init__(self, place: TorchrunPlace, *, gpus: bool = False, tagged: bool | None = None) -> None:
        """Meet the job's store; with `gpus`, select this process's GPU.

        `tagged` None: messages have tags if the backend's do.

        Raises `DiagnosticError` RT093 if the store cannot be reached, or there is no such GPU.
        """
        if gpus:
            take_gpu(place)
        self.number, self.count = place.number, place.count
        self._backend = BOTH_BACKENDS if gpus else HOST_BACKEND
        self._tagged = not gpus if tagged is None else tagged
        self._store = _store_of(place, "groups")
        self._end = _End(place)
        self._calls = Calls()
        self._world: TorchCommunicator | None = None
        self._worlds = 0

    @property
    def description(self) -> str:
        """Backend and PyTorch's version."""
        return f"torch.distributed ({self._backend}, torch {torch.__version__})"

    def start_command(self, processes: int) -> str:
        """Return the command of torchrun."""
        return start_command(str(processes))

    def world(self, rank: int) -> TorchCommunicator:
        """Return the communicator of all processes, with this one as number `rank`; all of them call it.

        The one that an earlier call returned ends. Raises `DiagnosticError` RT093 if they cannot reach one another.
        """
        self._leave_world()
        self._worlds += 1
        # a prefix for each world: keys of an earlier one are still in the store
        store = dist.PrefixStore(f"world/{self._worlds}", self._store)
        try:
            dist.init_process_group(self._backend, store=store, rank=rank, world_size=self.count, timeout=TIMEOUT)
        except RuntimeError as error:
            text = f"process {self.number} cannot reach all others: {reason_of(error)}"
            fail(
                "RT093",
                text,
                help="GLOO_SOCKET_IFNAME names the network interface to use, as in GLOO_SOCKET_IFNAME=eth0",
            )
        group = dist.group.WORLD
        assert group is not None
        members = range(self.count)
        self._world = TorchCommunicator(group, members, rank, self._calls, self._backend, self._tagged)
        return self._world

    def abort(self, code: int) -> NoReturn:
        """End all processes directly: torchrun would ask the others politely, while they wait for this one."""
        self._end.of_all(code)

    def close(self) -> None:
        """Wait for all others, then leave the group.

        torchrun ends the others when a process exits with a code other than 0, so none may still have something to
        print.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave_world()
        self._end.close()
        self._calls.close()

    def _leave_world(self) -> None:
        """Leave the group once all are ready to: a process that is still in a call would take it for a loss."""
        if self._world is not None:
            finish(self._world.ibarrier())
            dist.destroy_process_group()
            self._world = None


def take_gpu(place: TorchrunPlace) -> None:
    """Make the GPU with this process's number on its machine the one that 'cuda' means.

    Raises `DiagnosticError` RT093 if PyTorch finds none, has no NCCL, or the machine has fewer GPUs than processes.
    """
    torch_there = f"PyTorch {torch.__version__}"
    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "finds no GPU of NVIDIA, or no driver"
        fail("RT093", f"--device cuda: {torch_there} {why}", help="leave --device out to run on this processor")
    if not dist.is_nccl_available():
        fail(
            "RT093", f"{torch_there} was built without NCCL, which moves bytes between GPUs", help="use --engine local"
        )
    found = torch.cuda.device_count()
    if place.local_number >= found:
        fail(
            "RT093",
            f"process {place.number} is number {place.local_number} on its machine, where {torch_there} finds {found} "
            f"GPU{'s' if found > 1 else ''}",
            help="start at most one process for each GPU, or list more of them in CUDA_VISIBLE_DEVICES",
        )
    torch.cuda.set_device(place.local_number)


class _End:
    """The end of the job: one process announces it in the store, a thread of every other one waits for that."""

    def __init__(self, place: TorchrunPlace) -> None:
        self._place = place
        self._store = _store_of(place, "end")
        self._listening = _store_of(place, "end")  # a connection of its own: the thread's wait blocks it
        self._thread = threading.Thread(target=self._listen, name="torch-end", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._listening.wait([_END_KEY], _LOOK)
                said = self._listening.get(_END_KEY).decode()
            except RuntimeError:
                # nothing was announced in time: wait again
                if time.monotonic() - began >= _LOOK.total_seconds():
                    continue
                # The store is gone, so the launcher is, or process 0, which the watchdogs report.
                if self._place.launcher_has_store:
                    os._exit(1)
                return
            if said in (_NORMAL_END, str(self._place.number)):
                return
            # process 0 ends first, see _LEAD_SECONDS
            if self._place.number:
                time.sleep(_LEAD_SECONDS)
            # Exit code 0: after a failure torchrun would send signals to the others. `_exit`, since the main thread may
            # never return from its call.
            os._exit(0)

    def of_all(self, code: int) -> NoReturn:
        """End all processes with a code, this one after the others."""
        with suppress(RuntimeError):  # without a store, the launcher ends the others
            self._store.set(_END_KEY, str(self._place.number))
        time.sleep(_LAST_SECONDS)
        os._exit(code)

    def close(self) -> None:
        """Stop listening: all processes have done their work."""
        with suppress(RuntimeError):
            self._store.set(_END_KEY, _NORMAL_END)
        self._thread.join()


def _store_of(place: TorchrunPlace, purpose: str) -> dist.Store:
    """Connect to the job's store; process 0 hosts it if the launcher does not.

    Raises `DiagnosticError` RT093 if it cannot be reached.
    """
    is_master = not place.launcher_has_store and not place.number and purpose == "groups"
    try:
        store = dist.TCPStore(place.host, place.port, None, is_master, _MEETING_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        fail(
            "RT093",
            f"process {place.number} cannot meet the others at {place.host}:{place.port}: {reason_of(error)}",
            help="MASTER_ADDR and MASTER_PORT name a place that all processes can reach",
        )
    return dist.PrefixStore(f"ratrain/{place.attempt}/{purpose}", store)
