"""Snapshots of memory that PyTorch's memory viewer opens: what tensors lay where and when, predicted.

The viewer (pytorch.org/memory_viz, or `python -m torch.cuda._memory_viz`) reads a pickle of dictionaries:

    segments       ranges of the device that the allocator holds, cut into blocks that are allocated at the end, or free
    device_traces  by device, the allocations and frees in their order: address, size, time, frames

Each tensor of ours is a block of one segment a device. A frame has three texts, which the viewer shows as
`file:line:name`: the tensor, the position and the op that makes it. Format: pytorch torch/csrc/cuda/memory_snapshot.cpp
and torch/cuda/_memory_viz.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import is_regular, opened_regular, path_errors, replacing
from ratrain.targets.simulator.live_curve import OUTSIDE, live_intervals

if TYPE_CHECKING:
    from ratrain.targets.simulator.timeline import Timeline

BASE = 1 << 40
"""Address of the first byte of a device; any but 0, which stands for no memory."""

_MAKER = ("made_by", "ratrain")
"""First entry of a snapshot of ours; the viewers read the entries that they know."""
_PROTOCOL = 4
_START = pickle.dumps(dict((_MAKER,)), _PROTOCOL)
_MARK = _START[_START.index(_MAKER[0].encode()) : _START.index(_MAKER[1].encode()) + len(_MAKER[1])]
"""Bytes of that entry in a file, so that an unknown pickle need not be loaded, which could run anything."""
_MOST_BEFORE = 64
"""Bytes at a file's start among which the mark is: the header of the pickle and of its first frame take 15."""


@frozen
class Lived:
    """One life of a tensor at an address."""

    tensor: str
    maker: str
    """op that made it"""
    position: int
    """number of that op in its step"""
    address: int
    """in its device's memory, from 0 on"""
    nbytes: int
    start: float
    """seconds"""
    stop: float | None
    """seconds; None if it is live at the end"""


@frozen
class DeviceMemory:
    """Lives of the tensors of one device, no two of which share a byte at a time."""

    nbytes: int
    """size of the memory that they lie in"""
    lives: Sequence[Lived]


def write_snapshot(devices: Sequence[DeviceMemory], path: str) -> int:
    """Write a snapshot; return its bytes.

    Raises `DiagnosticError` RT002 if it cannot be written, or would replace a file that is no snapshot of ours.
    """
    refuse_other_file(path)
    with replacing(path) as stream:
        return stream.write(pickle.dumps(snapshot(devices), _PROTOCOL))


def refuse_other_file(path: str) -> None:
    """Raise `DiagnosticError` RT002 if a file is there that no snapshot of ours may replace.

    A .pickle may be anybody's data, or a snapshot that PyTorch measured. An empty file is replaced; devices and pipes
    lose nothing.
    """
    if not is_regular(path):
        return
    with path_errors(f"cannot read '{path}'"), opened_regular(path) as stream:
        start = stream.read(_MOST_BEFORE)
    if start and _MARK not in start:
        text = f"'{path}' is there and is no memory snapshot of ratrain: it is not replaced"
        fail("RT002", text, help="name another file, or move that one away")


def snapshot(devices: Sequence[DeviceMemory]) -> dict[str, Any]:
    """Return the dictionaries of a snapshot, by PyTorch's names."""
    return {
        _MAKER[0]: _MAKER[1],
        "segments": [_segment(number, device) for number, device in enumerate(devices) if device.nbytes],
        "device_traces": [_trace(device) for device in devices],
        "allocator_settings": {"expandable_segments": False},
    }


def _frames(life: Lived) -> list[dict[str, Any]]:
    return [{"filename": life.tensor, "line": life.position, "name": life.maker}]


def _segment(number: int, device: DeviceMemory) -> dict[str, Any]:
    """Return a device's memory as one segment, with the blocks that are live at the end and the gaps between them."""
    last = sorted((life for life in device.lives if life.stop is None), key=lambda life: life.address)
    blocks: list[dict[str, Any]] = []
    end = 0
    for life in last:
        blocks += _free(end, life.address)
        block = {"size": life.nbytes, "requested_size": life.nbytes, "address": BASE + life.address}
        blocks.append(block | {"state": "active_allocated", "frames": _frames(life)})
        end = life.address + life.nbytes
    blocks += _free(end, device.nbytes)
    taken = sum(life.nbytes for life in last)
    return {
        "device": number,
        "address": BASE,
        "total_size": device.nbytes,
        "allocated_size": taken,
        "active_size": taken,
        "requested_size": taken,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _free(start: int, stop: int) -> list[dict[str, Any]]:
    """Return the free block between two addresses; none if they are equal."""
    if start >= stop:
        return []
    return [{"size": stop - start, "requested_size": 0, "address": BASE + start, "state": "inactive", "frames": []}]


def _trace(device: DeviceMemory) -> list[dict[str, Any]]:
    """Return allocations and frees in the order of time; what ends at a time is freed before what begins then."""
    events: list[tuple[float, int, int, dict[str, Any]]] = []
    for number, life in enumerate(device.lives):
        entry = {"addr": BASE + life.address, "size": life.nbytes, "stream": 0, "frames": _frames(life)}
        events.append((life.start, 1, number, entry | {"action": "alloc", "time_us": round(1e6 * life.start)}))
        if life.stop is not None:
            entry["time_us"] = round(1e6 * life.stop)
            # a tensor without duration is freed after it was allocated
            order = 0 if life.stop > life.start else 2
            events.append((life.stop, order, number, entry | {"action": "free_requested"}))
            events.append((life.stop, order, number, entry | {"action": "free_completed"}))
    events.sort(key=lambda event: event[:3])
    return [entry for *_, entry in events]


def memories_of(timeline: Timeline) -> list[DeviceMemory]:
    """Return the DDR of each stage of a simulated program over all timed steps: one replica's, stage by stage."""
    return [_stage_memory(timeline, stage) for stage in range(timeline.columns.stages)]


def _stage_memory(timeline: Timeline, stage: int) -> DeviceMemory:
    columns = timeline.columns
    own = columns.tensors_of(stage)
    names, offsets = columns.names[own], columns.offsets[own].tolist()
    sizes = columns.form_bytes[columns.tensor_forms[own]].tolist()
    intervals = live_intervals(timeline, stage)
    titles: dict[int, str] = {}
    lives = []
    last = timeline.ends.max(initial=0.0)
    for tensor, first, start, stop in zip(
        intervals.tensors.tolist(),
        intervals.first_events.tolist(),
        intervals.starts.tolist(),
        intervals.ends.tolist(),
        strict=True,
    ):
        op = first % timeline.ops if first != OUTSIDE else OUTSIDE
        if op not in titles:
            titles[op] = "carried from the step before" if op == OUTSIDE else columns.instruction(op).title
        maker = titles[op]
        stays = None if stop >= last else stop
        lives.append(Lived(f"%{names[tensor]}", maker, max(op, 0), offsets[tensor], sizes[tensor], start, stays))
    return DeviceMemory(max((life.address + life.nbytes for life in lives), default=0), lives)
