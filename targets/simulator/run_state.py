"""State of a timed run, which the event loop reads and writes: arrays of records, so that the loop can be compiled.

The agenda, the list of changed resources and the list of reached flows each live in one field of an array whose records
have nothing else to do with them: entry i of the list is that field of record i. This saves arguments of the compiled
loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.simulator.flat_program import STREAMS, FlatProgram, Float64s, Int64s, Records
from ratrain.targets.simulator.routes import own_resources

if TYPE_CHECKING:
    from ratrain.targets.simulator.routes import Routes

TIMER, DDR_FLOW, LINK_FLOW = range(3)
"""Works of a running op, by their slot. A stream runs one op at a time, so each stream owns one slot for the timer, one
for its DDR bytes and the rest for its flows on links."""
AGENDA, HEAP, CHANGED, SLOTS = range(4)
"""Places in `RunState.sizes`."""
_HOST = ENGINES.index(Engine.HOST)

_STREAM = np.dtype(
    [
        ("first", np.int64),  # its ops are [first, stop)
        ("stop", np.int64),
        ("done", np.int64),  # ops that have ended, over all steps
        ("op", np.int64),  # the op it is at, which may be running, and the step of that op
        ("step", np.int64),
        ("awaited", np.int64),  # the stream whose wait was found unmet last
        ("until", np.int64),  # `done` of that stream which meets the wait
        ("running", np.int64),
        ("leader", np.int64),  # the stream that counts the works of the running op: ops that end together share one
        ("open_works", np.int64),  # of a leader: works that have not ended, over all ops that it leads
        ("agenda", np.int64),  # entry of the list of streams whose next op may have become ready
        ("listed", np.int64),  # 1: the stream is in that list, or has no ops and never enters it
    ]
)
_TRAFFIC = np.dtype([("sent_started", np.int64), ("sent_ended", np.int64), ("recv_started", np.int64)])
_SLOT = np.dtype(
    [
        ("time", np.float64),  # of the end of its work
        ("heap_place", np.int64),  # its place in the heap, -1: not there
        ("stream", np.int64),  # its owner
        ("active", np.int64),  # 1: bytes are flowing
        ("remaining", np.float64),  # bytes left at `since`, and bytes a second from then on
        ("rate", np.float64),
        ("since", np.float64),
        ("limit", np.float64),  # the highest rate, however much bandwidth is free
        ("route", np.int64),  # the resources its bytes flow through, as a row of `RunState.routes`
        ("reached", np.int64),  # entry of the list of flows whose rates are recomputed
    ]
)
_EVENT = np.dtype([("time", np.float64), ("slot", np.int64)])
_RESOURCE = np.dtype(
    [
        ("capacity", np.float64),  # bytes a second
        ("moved", np.float64),  # bytes that have flowed through it
        ("user_first", np.int64),  # the slots that may use it, as a range of `RunState.users`
        ("user_stop", np.int64),
        ("changed", np.int64),  # entry of the list of resources that have gained or lost a flow
        ("changed_place", np.int64),  # the place of this resource in that list, -1: not there
        ("left", np.float64),  # while rates are computed: bytes a second not given away, flows without a rate
        ("flows", np.int64),
    ]
)


class RunState(NamedTuple):
    """Streams, messages under way, coming events, and the flows of bytes that share resources."""

    streams: Records
    traffic: Records
    """messages sent and received so far, by channel"""
    slots: Records
    heap: Records
    """coming events (slots and their times) as a binary heap, the earliest first"""
    resources: Records
    users: Int64s
    routes: Int64s
    """[routes, resources]: the resources that bytes flow through, -1 for none"""
    flows: Records
    """bytes on links and their routes, by op"""
    op_flows: Records
    """the flows of each op, as a range of `flows`"""
    sizes: Int64s
    """used lengths of the agenda, the heap and the list of changed resources, and the number of slots of a stream"""


def new_state(flat: FlatProgram, routes: Routes, host_bandwidth: float) -> RunState:
    """Return the state before the first step.

    The host engine takes at most `host_bandwidth` bytes a second of the DDR.
    """
    count = len(flat.streams)
    streams = np.zeros(count, _STREAM)
    streams["first"], streams["stop"] = flat.streams["first"], flat.streams["stop"]
    streams["op"] = flat.streams["first"]
    streams["listed"] = flat.streams["first"] == flat.streams["stop"]
    of_stream = LINK_FLOW + routes.most_flows
    slots = np.zeros(count * of_stream, _SLOT)
    slots["heap_place"] = -1
    slots["stream"] = np.repeat(np.arange(count), of_stream)
    slots["limit"] = np.inf
    slots["limit"][_HOST * of_stream + DDR_FLOW :: STREAMS * of_stream] = host_bandwidth
    resources = np.zeros(len(routes.capacities), _RESOURCE)
    resources["changed_place"] = -1
    resources["capacity"] = routes.capacities
    users = routes.users(flat, of_stream, DDR_FLOW, LINK_FLOW)
    resources["user_stop"] = np.cumsum([len(each) for each in users])
    resources["user_first"] = resources["user_stop"] - [len(each) for each in users]
    flat_users = np.array([slot for each in users for slot in each], np.int64)
    traffic = np.zeros(len(flat.channels), _TRAFFIC)
    sizes = np.array([0, 0, 0, of_stream], np.int64)
    heap = np.zeros(len(slots), _EVENT)
    return RunState(
        streams, traffic, slots, heap, resources, flat_users, routes.rows, routes.flows, routes.of_ops, sizes
    )


def moved_bytes(state: RunState, stages: int, levels: int) -> Float64s:
    """Return the bytes that have flowed, [stages, DDR | link outwards | link inwards of each level]."""
    own = own_resources(levels)
    moved: Float64s = state.resources["moved"][: stages * own].reshape(stages, own)
    return moved
