"""The timed run: which op starts when, by events in the order of time. A run of n events takes about n log(streams).

Whenever an op ends, the streams it may have held up are looked at again. What is ready starts, its works are entered as events, and
rates are shared anew before time goes on. Small runs go as plain Python, by `interpreted_loop`, all others compiled.
"""

from __future__ import annotations

from ratrain.ratrain_ir.support.loops import part
from ratrain.ratrain_ir.support.native_loops import native
from ratrain.targets.simulator.event_heap import put, take_first
from ratrain.targets.simulator.flat_program import (
    ALONE,
    NEVER,
    SEND,
    STREAMS,
    TOGETHER,
    FlatProgram,
    Float64s,
    Int64s,
    Records,
)
from ratrain.targets.simulator.fluid import end_flow, share_anew, start_flow
from ratrain.targets.simulator.run_state import (
    AGENDA,
    CHANGED,
    DDR_FLOW,
    HEAP,
    LINK_FLOW,
    SLOTS,
    TIMER,
    RunState,
)


@native
def run(
    flat: FlatProgram, works: Records, state: RunState, steps: int, rendezvous: bool, starts: Float64s, ends: Float64s
) -> int:
    """Run `steps` steps; the number of events until no op could start or end any more.

    Fills `starts` and `ends`, [steps * ops], in seconds.
    """
    streams, slots, heap, resources, sizes = state.streams, state.slots, state.heap, state.resources, state.sizes
    for stream in range(len(streams)):
        look_at(streams, sizes, stream)
    now = 0.0
    events = 0
    while True:
        while sizes[AGENDA]:
            sizes[AGENDA] -= 1
            stream = streams[sizes[AGENDA]].agenda
            streams[stream].listed = 0
            if is_ready(flat.ops, flat.waits, streams, stream, steps):
                start_if_met(flat, works, state, stream, steps, rendezvous, now, starts)
        if sizes[CHANGED] and (sizes[HEAP] == 0 or heap[0].time > now):
            share_anew(slots, heap, resources, state.routes, state.users, sizes, now)
        if sizes[HEAP] == 0:
            return events
        now = heap[0].time
        slot = take_first(slots, heap, sizes)
        events += 1
        if slots[slot].active:
            end_flow(slots, resources, state.routes, sizes, slot)
        leader = streams[slots[slot].stream].leader
        streams[leader].works_left -= 1
        if streams[leader].works_left == 0:
            all_ended(flat, state, leader, rendezvous, now, ends)


@part
def look_at(streams: Records, sizes: Int64s, stream: int) -> None:
    """The next op of a stream may have become ready."""
    if not streams[stream].listed:
        streams[stream].listed = 1
        streams[sizes[AGENDA]].agenda = stream
        sizes[AGENDA] += 1


@part
def is_ready(ops: Records, waits: Records, streams: Records, stream: int, steps: int) -> bool:
    """Whether the next op of a stream has all it waits for on its own stage."""
    if streams[stream].running or streams[stream].step >= steps:
        return False
    if streams[streams[stream].awaited].done < streams[stream].until:
        return False
    op = streams[stream].op
    step = streams[stream].step
    for wait in range(ops[op].wait_first, ops[op].wait_stop):
        at = step - waits[wait].previous
        other = waits[wait].stream
        until = at * (streams[other].stop - streams[other].first) + waits[wait].count
        if at >= 0 and streams[other].done < until:
            streams[stream].awaited, streams[stream].until = other, until
            return False
    ready: bool = ops[op].mode != NEVER
    return ready


@part
def start_if_met(
    flat: FlatProgram, works: Records, state: RunState, stream: int, steps: int, rendezvous: bool, now: float,
    starts: Float64s,
) -> None:  # fmt: skip
    """Start the next op of a stream, which is ready, and those that start with it, if they are ready too."""
    streams, traffic = state.streams, state.traffic
    op = streams[stream].op
    mode, channel = flat.ops[op].mode, flat.ops[op].channel
    if mode == ALONE:
        start(flat, works, state, stream, stream, now, starts)
    elif mode == TOGETHER:
        meeting = flat.ops[op].meeting
        for place in range(flat.meetings[meeting].first, flat.meetings[meeting].stop):
            other = flat.ops[flat.members[place]].stream
            if not is_ready(flat.ops, flat.waits, streams, other, steps):
                return
            if streams[other].op != flat.members[place]:
                return
        for place in range(flat.meetings[meeting].first, flat.meetings[meeting].stop):
            start(flat, works, state, flat.ops[flat.members[place]].stream, stream, now, starts)
    elif rendezvous or flat.channels[channel].meets:
        sender, receiver = flat.channels[channel].sender, flat.channels[channel].receiver
        other = receiver if mode == SEND else sender
        if not is_ready(flat.ops, flat.waits, streams, other, steps):
            return
        if flat.ops[streams[other].op].channel == channel:
            start(flat, works, state, sender, sender, now, starts)
            start(flat, works, state, receiver, sender, now, starts)
    elif mode == SEND:
        start(flat, works, state, stream, stream, now, starts)
        traffic[channel].sent_started += 1
        look_at(streams, state.sizes, flat.channels[channel].receiver)
    elif traffic[channel].sent_started > traffic[channel].recv_started:
        if traffic[channel].sent_ended == traffic[channel].recv_started:
            streams[stream].works_left += 1  # the message is on its way: to arrive is one more work
        traffic[channel].recv_started += 1
        start(flat, works, state, stream, stream, now, starts)


@part
def start(
    flat: FlatProgram, works: Records, state: RunState, stream: int, leader: int, now: float, starts: Float64s
) -> None:
    """Start the next op of a stream: all its works begin."""
    streams, slots, resources, routes, sizes = state.streams, state.slots, state.resources, state.routes, state.sizes
    op = streams[stream].op
    starts[streams[stream].step * len(flat.ops) + op] = now
    streams[stream].running = 1
    streams[stream].leader = leader
    streams[leader].works_left += 1
    first_slot = stream * sizes[SLOTS]
    put(slots, state.heap, sizes, first_slot + TIMER, now + works[op].seconds)
    if works[op].ddr_bytes > 0:
        streams[leader].works_left += 1
        nbytes, route = works[op].ddr_bytes, stream // STREAMS
        start_flow(slots, resources, routes, sizes, first_slot + DDR_FLOW, nbytes, route, now)
    first_flow = state.op_flows[op].first
    for place in range(first_flow, state.op_flows[op].stop):
        streams[leader].works_left += 1
        nbytes, route, slot = state.flows[place].nbytes, state.flows[place].route, first_slot + LINK_FLOW
        start_flow(slots, resources, routes, sizes, slot + place - first_flow, nbytes, route, now)


@part
def all_ended(flat: FlatProgram, state: RunState, leader: int, rendezvous: bool, now: float, ends: Float64s) -> None:
    """The last work of a leader's op has ended: the op ends, and all that end with it."""
    streams, traffic, sizes = state.streams, state.traffic, state.sizes
    op = streams[leader].op
    mode, channel = flat.ops[op].mode, flat.ops[op].channel
    if mode == TOGETHER:
        meeting = flat.ops[op].meeting
        for place in range(flat.meetings[meeting].first, flat.meetings[meeting].stop):
            end(streams, sizes, flat.ops[flat.members[place]].stream, len(flat.ops), now, ends)
        return
    end(streams, sizes, leader, len(flat.ops), now, ends)
    if mode != SEND:
        return
    receiver = flat.channels[channel].receiver
    if rendezvous or flat.channels[channel].meets:
        end(streams, sizes, receiver, len(flat.ops), now, ends)
        return
    traffic[channel].sent_ended += 1
    if traffic[channel].recv_started >= traffic[channel].sent_ended:  # it is being received
        streams[receiver].works_left -= 1
        if streams[receiver].works_left == 0:
            end(streams, sizes, receiver, len(flat.ops), now, ends)


@part
def end(streams: Records, sizes: Int64s, stream: int, ops: int, now: float, ends: Float64s) -> None:
    """End the running op of a stream; what waits for it is on its stage."""
    ends[streams[stream].step * ops + streams[stream].op] = now
    streams[stream].running = 0
    streams[stream].done += 1
    streams[stream].op += 1
    if streams[stream].op == streams[stream].stop:
        streams[stream].op = streams[stream].first
        streams[stream].step += 1
    first = stream - stream % STREAMS
    for other in range(first, first + STREAMS):
        if not streams[other].running:
            look_at(streams, sizes, other)
