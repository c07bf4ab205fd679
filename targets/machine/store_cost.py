"""Costs of moving bytes between DDR and a rank's other memories, over each memory's own paths."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.targets.machine.cost import copy_seconds
from ratrain.targets.machine.resource_work import Flow, ResourceWork, StorePath

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrain_ir.config.types import TensorType
    from ratrain.targets.machine.machine import Machine


@frozen
class Elsewhere:
    """Operands of an op in another memory than DDR."""

    home: Home
    """that memory; DDR where there are none"""
    nbytes: int
    frozen_bytes: int = 0
    """those of frozen parameters among them"""

    @classmethod
    def of(cls, operands: Iterable[tuple[Home, StateKind, TensorType]]) -> Elsewhere:
        """Return the operands outside DDR, given the memory, kind and type of each; all are in one memory."""
        found = [(home, kind, type_.nbytes) for home, kind, type_ in operands if home is not Home.DDR]
        if not found:
            return NOTHING_ELSEWHERE
        frozen_bytes = sum(nbytes for _, kind, nbytes in found if kind is StateKind.FROZEN)
        return cls(found[0][0], sum(nbytes for *_, nbytes in found), frozen_bytes)


NOTHING_ELSEWHERE = Elsewhere(Home.DDR, 0)


@frozen
class StreamedBytes:
    """Bytes that an op itself moves from and to another memory, piece by piece."""

    home: Home
    fetched: float = 0.0
    stored: float = 0.0


def store_paths(machine: Machine) -> dict[StorePath, float]:
    """Return the bytes per second of the paths to and from the memories that a rank has in addition to DDR."""
    paths = [StorePath(home, fetches) for home, _ in machine.stores for fetches in (False, True)]
    return {path: machine.store_bandwidth(path.home, fetches=path.fetches) for path in paths}


def transfer_work(nbytes: float, home: Home, machine: Machine, *, fetches: bool) -> ResourceWork:
    """Return the work of moving bytes between DDR and another memory, over that memory's path and through DDR once."""
    bandwidth = machine.store_bandwidth(home, fetches=fetches)
    seconds = machine.store_latency(home) + max(nbytes / bandwidth, copy_seconds(nbytes, machine))
    return ResourceWork(seconds, nbytes, flows=(Flow(nbytes, None, path=StorePath(home, fetches)),))


def streamed_work(work: ResourceWork, streams: StreamedBytes, machine: Machine) -> ResourceWork:
    """Return the work of an op whose bytes come from and go to another memory while it works.

    It takes the longest of computing, fetching and storing, and a piece on its way before and after. Pieces are of a
    `collective_chunk`; each takes the memory's latency.
    """
    piece, flows, longest, ends = machine["collective_chunk"], list(work.flows), work.seconds, 0.0
    for nbytes, fetches in ((streams.fetched, True), (streams.stored, False)):
        if nbytes:
            bandwidth = machine.store_bandwidth(streams.home, fetches=fetches)
            latency = machine.store_latency(streams.home)
            longest = max(longest, latency * ceil(nbytes / piece) + nbytes / bandwidth)
            ends += latency + min(piece, nbytes) / bandwidth
            flows.append(Flow(nbytes, None, path=StorePath(streams.home, fetches)))
    moved = streams.fetched + streams.stored
    return evolve(work, seconds=longest + ends, ddr_bytes=work.ddr_bytes + moved, flows=tuple(flows))
