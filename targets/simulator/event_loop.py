"""The timed run: a discrete-event simulation that finds when each op of each stream starts and ends.

Streams run their ops in order. An op starts when its stream is free, its waits are met and its partners are ready. It
has up to 2 + n works: a timer, its DDR bytes, its n flows on links. Each is an event in a heap, and the op ends with
the last of them:

    while there are events:
        look at every stream on the agenda; start its next op if it is ready
        recompute the rates of flows that share a changed resource      (fluid.py)
        advance to the earliest event and end its work
        with the last work of an op: end the op, put the streams of its stage on the agenda

A run of n events takes about n log(streams), in addition to the sharing of bandwidth. Small runs go as plain Python
(`interpreted_loop`), all others compiled; both do the same operations in the same order.
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
from ratrain.targets.simulator.fluid import end_flow, recompute_rates, start_flow
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
    """Run `steps` steps until no op can start or end any more, and return the number of events.

    Fills `starts` and `ends` [steps * ops] in seconds. If the program hangs, entries of ops that did not run stay
    unchanged; `state.streams["done"]` tells.
    """
    streams, slots, heap, resources, sizes = state.streams, state.slots, state.heap, state.resources, state.sizes
    for stream in range(len(streams)):
        mark_runnable(streams, sizes, stream)
    now = 0.0
    events = 0
    while True:
        while sizes[AGENDA]:
            sizes[AGENDA] -= 1
            stream = streams[sizes[AGENDA]].agenda
            streams[stream].listed = 0
            if is_ready(flat.ops, flat.waits, streams, stream, steps):
                start_if_met(flat, works, state, stream, steps, rendezvous, now, starts)
        # Works often end at the same moment, for example on equal stages: rates are recomputed once, after the last of
        # these events. New flows have no event yet, so an empty heap does not mean that nothing is to come.
        if sizes[CHANGED] and (sizes[HEAP] == 0 or heap[0].time > now):
            recompute_rates(slots, heap, resources, state.routes, state.users, sizes, now)
        if sizes[HEAP] == 0:
            return events
        now = heap[0].time
        slot = take_first(slots, heap, sizes)
        events += 1
        if slots[slot].active:
            end_flow(slots, resources, state.routes, sizes, slot)
        leader = streams[slots[slot].stream].leader
        streams[leader].open_works -= 1
        if streams[leader].open_works == 0:
            all_ended(flat, state, leader, rendezvous, now, ends)


@part
def mark_runnable(streams: Records, sizes: Int64s, stream: int) -> None:
    """Put a stream on the agenda, unless it is there: its next op may have become ready."""
    if not streams[stream].listed:
        streams[stream].listed = 1
        streams[sizes[AGENDA]].agenda = stream
        sizes[AGENDA] += 1


@part
def is_ready(ops: Records, waits: Records, streams: Records, stream: int, steps: int) -> bool:
    """Return whether a stream is free and the waits of its next op, all on its own stage, are met."""
    if streams[stream].running or streams[stream].step >= steps:
        return False
    # The wait that failed last is tried first: most looks end here.
    if streams[streams[stream].awaited].done < streams[stream].until:
        return False
    op = streams[stream].op
    step = streams[stream].step
    for wait in range(ops[op].wait_first, ops[op].wait_stop):
        at = step - waits[wait].previous
        other = waits[wait].stream
        # `done` counts over all steps, so a wait of step `at` adds the ops of the steps before; waits before the first
        # step are met.
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
    """Start the next op of a stream, which is ready, and its partners; do nothing if a partner is not ready.

    The partner that becomes ready last is looked at too, so the op starts then.
    """
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
        mark_runnable(streams, state.sizes, flat.channels[channel].receiver)
    elif traffic[channel].sent_started > traffic[channel].recv_started:
        # Messages of a channel are received in the order they are sent, so counters tell which message this is.
        if traffic[channel].sent_ended == traffic[channel].recv_started:
            streams[stream].open_works += 1  # still under way: the arrival is one more work
        traffic[channel].recv_started += 1
        start(flat, works, state, stream, stream, now, starts)


@part
def start(
    flat: FlatProgram, works: Records, state: RunState, stream: int, leader: int, now: float, starts: Float64s
) -> None:
    """Start the next op of a stream: enter all its works. They count in the leader, with which the op ends."""
    streams, slots, resources, routes, sizes = state.streams, state.slots, state.resources, state.routes, state.sizes
    op = streams[stream].op
    starts[streams[stream].step * len(flat.ops) + op] = now
    streams[stream].running = 1
    streams[stream].leader = leader
    streams[leader].open_works += 1
    first_slot = stream * sizes[SLOTS]
    put(slots, state.heap, sizes, first_slot + TIMER, now + works[op].seconds)
    if works[op].ddr_bytes > 0:
        streams[leader].open_works += 1
        nbytes, route = works[op].ddr_bytes, stream // STREAMS
        start_flow(slots, resources, routes, sizes, first_slot + DDR_FLOW, nbytes, route, now)
    first_flow = state.op_flows[op].first
    for place in range(first_flow, state.op_flows[op].stop):
        streams[leader].open_works += 1
        nbytes, route, slot = state.flows[place].nbytes, state.flows[place].route, first_slot + LINK_FLOW
        start_flow(slots, resources, routes, sizes, slot + place - first_flow, nbytes, route, now)


@part
def all_ended(flat: FlatProgram, state: RunState, leader: int, rendezvous: bool, now: float, ends: Float64s) -> None:
    """End a leader's op, whose last work has ended, and all ops that end with it."""
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
        streams[receiver].open_works -= 1
        if streams[receiver].open_works == 0:
            end(streams, sizes, receiver, len(flat.ops), now, ends)


@part
def end(streams: Records, sizes: Int64s, stream: int, ops: int, now: float, ends: Float64s) -> None:
    """End the running op of a stream and put the idle streams of its stage on the agenda: only they can wait for it."""
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
            mark_runnable(streams, sizes, other)
