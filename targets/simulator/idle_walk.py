"""Causes of idle time: a walk back from each idle interval along the ops that ended last. Compiled.

An op starts at the moment the last thing it needs has ended, so the chain of last things has no gap. Walked back over
an idle interval, it says for each moment which op was running that the engine waited for:

    @0 compute:  |  forward m1   |
    @0 send:                     |  send m1  |
    @1 compute:  |busy|         idle         |  forward m1
    cause:            |   stage  |   link    |

The cost is the length of the chain over each interval.
"""

from __future__ import annotations

from ratrain.ratrain_ir.support.loops import part
from ratrain.ratrain_ir.support.native_loops import native
from ratrain.targets.simulator.flat_program import RECV, SEND, STREAMS, TOGETHER, FlatProgram, Float64s, Int64s

FILL, DRAIN, STAGE, LINK, BYTE_REUSE, PEERS, CONTEXT, MEMORY, GRAD_SYNC, UPDATE, PREFETCH, BARRIER = range(12)
INPUT, QUEUE, COMPUTE = range(12, 15)
"""Causes of waiting by number. COMPUTE is the own stage's compute engine, STAGE anything on another stage. QUEUE: the
awaited op stood behind an op of another kind that it does not need."""
NOBODY = -1
INSIDE = -1
"""`boundary` of an idle interval that lies between two ops of a step."""


@part
def last_awaited(
    flat: FlatProgram, ends: Float64s, reuse: Int64s, event: int, rendezvous: bool, without_reuse: bool
) -> tuple[float, int]:
    """Return the end of the last thing that an event needed, and the event that it was.

    `without_reuse`: waits for bytes alone do not count.
    """
    ops = len(flat.ops)
    step, op = event // ops, event % ops
    mode, channel = flat.ops[op].mode, flat.ops[op].channel
    found = (-1.0, NOBODY)
    if mode == TOGETHER:
        meeting = flat.ops[op].meeting
        for place in range(flat.meetings[meeting].first, flat.meetings[meeting].stop):
            member = step * ops + flat.members[place]
            found = later(found, own_last_awaited(flat, ends, reuse, member, without_reuse))
        return found
    found = own_last_awaited(flat, ends, reuse, event, without_reuse)
    if mode == RECV or (mode == SEND and (rendezvous or flat.channels[channel].meets)):
        partner = other_end(flat, step, op, mode, channel)
        found = later(found, own_last_awaited(flat, ends, reuse, partner, without_reuse))
    return found


@part
def later(one: tuple[float, int], other: tuple[float, int]) -> tuple[float, int]:
    """Return the pair that ended later; the first of equal ones."""
    return other if other[0] > one[0] else one


@part
def other_end(flat: FlatProgram, step: int, op: int, mode: int, channel: int) -> int:
    """Return the event at the other end of a message."""
    ends = flat.channels[channel]
    sends, recvs = ends.send_stop - ends.send_first, ends.recv_stop - ends.recv_first
    place = flat.ops[op].place
    if mode == RECV:
        # Messages are matched by their number over all steps: the two ends of a channel may differ in messages a step.
        number = step * recvs + place
        return int(number // sends * len(flat.ops) + flat.sends[ends.send_first + number % sends])
    number = step * sends + place
    return int(number // recvs * len(flat.ops) + flat.recvs[ends.recv_first + number % recvs])


@part
def own_last_awaited(
    flat: FlatProgram, ends: Float64s, reuse: Int64s, event: int, without_reuse: bool
) -> tuple[float, int]:
    """Return `last_awaited` of the event's own stage: its waits and its predecessor in the stream."""
    ops = len(flat.ops)
    step, op = event // ops, event % ops
    found = (-1.0, NOBODY)
    for wait in range(flat.ops[op].wait_first, flat.ops[op].wait_stop):
        at = step - flat.waits[wait].previous
        if at >= 0 and not (without_reuse and reuse[wait]):
            awaited = at * ops + flat.streams[flat.waits[wait].stream].first + flat.waits[wait].count - 1
            found = later(found, (ends[awaited], awaited))
    stream = flat.ops[op].stream
    if op > flat.streams[stream].first:
        found = later(found, (ends[event - 1], event - 1))
    elif step > 0:
        before = (step - 1) * ops + flat.streams[stream].stop - 1
        found = later(found, (ends[before], before))
    return found


@native
def walk(
    flat: FlatProgram, starts: Float64s, ends: Float64s, reuse: Int64s, kinds: Int64s, apart: Int64s, rendezvous: bool,
    intervals: Int64s, bounds: Float64s, numbers: Int64s, times: Float64s,
) -> int:  # fmt: skip
    """Split idle intervals into pieces by cause, and return the number of pieces.

    Takes `intervals` [n, 4]: stream; the event that starts at the end, or -1; the event that ends there, used where
    none starts; `boundary`: the step that begins with the interval, or INSIDE. `bounds` [n, 2]: from, to. `kinds`: by
    op, the cause that waiting for it has. `apart`: by op, 1 if it needs nothing of its predecessor in its stream.

    Fills `numbers` [m, 3] with interval, cause, stage and `times` [m, 2] with from, to; the pieces of an interval come
    latest first. Returns NOBODY if there is no room for all pieces.
    """
    count = 0
    for number in range(len(intervals)):
        begin, to = bounds[number, 0], bounds[number, 1]
        event, awaited = intervals[number, 1], intervals[number, 2]
        own, boundary = intervals[number, 0] // STREAMS, intervals[number, 3]
        fresh = True
        while to > begin:
            cause, stage, since = COMPUTE, own, begin
            waiting = event
            if event >= 0:
                ended, awaited = last_awaited(flat, ends, reuse, event, rendezvous, False)
                # The event would have started at `sooner` if its tensors did not reuse bytes: from then on bytes alone
                # were missing.
                sooner, other = last_awaited(flat, ends, reuse, event, rendezvous, True)
                if sooner < ended:
                    cause, stage = BYTE_REUSE, flat.ops[event % len(flat.ops)].stream // STREAMS
                    since, awaited = max(begin, sooner), other
                event = -1
            if cause != BYTE_REUSE:
                op = awaited % len(flat.ops)
                stage = flat.ops[op].stream // STREAMS
                since = max(begin, starts[awaited])
                step = awaited // len(flat.ops)
                cause = cause_of(kinds[op], stage == own, boundary, step)
                if waiting >= 0 and cause == kinds[op] and is_queue(flat, kinds, apart, waiting % len(flat.ops), op):
                    cause = QUEUE
                event = awaited
            if since < to:
                # Neighbouring pieces of one cause and stage are one piece.
                same = not fresh and numbers[count - 1, 1] == cause and numbers[count - 1, 2] == stage
                if not same:
                    if count == len(times):
                        return NOBODY
                    numbers[count, 0], numbers[count, 1], numbers[count, 2] = number, cause, stage
                    times[count, 1] = to
                    count += 1
                times[count - 1, 0] = since
                fresh = False
            to = since
    return count


@native
def chain(
    flat: FlatProgram, starts: Float64s, ends: Float64s, reuse: Int64s, rendezvous: bool, event: int, begin: float,
    to: float, found: Int64s,
) -> int:  # fmt: skip
    """Follow an event back to the op it waited for last, and so on, while ends are after `begin`; return the number.

    Fills `found` with the events, latest first.
    """
    count = 0
    while event >= 0 and to > begin:
        found[count] = event
        count += 1
        to = max(begin, starts[event])
        _, event = last_awaited(flat, ends, reuse, event, rendezvous, False)
    return count


@native
def waited(
    flat: FlatProgram, starts: Float64s, ends: Float64s, reuse: Int64s, rendezvous: bool, intervals: Int64s,
    bounds: Float64s, seconds: Float64s, met: Int64s,
) -> int:  # fmt: skip
    """Add to `seconds` (by op of a step) how long the intervals of `walk` waited for its end.

    Fills `met` with the ops in the order they are met, and returns their number.
    """
    count = 0
    for number in range(len(intervals)):
        begin, until = bounds[number, 0], bounds[number, 1]
        awaited = intervals[number, 1]
        while until > begin and awaited >= 0:
            _, awaited = last_awaited(flat, ends, reuse, awaited, rendezvous, False)
            if awaited < 0:
                break
            since = max(begin, starts[awaited])
            if since < until:
                op = awaited % len(flat.ops)
                if seconds[op] == 0:
                    met[count] = op
                    count += 1
                seconds[op] += until - since
            until = since
    return count


@part
def is_queue(flat: FlatProgram, kinds: Int64s, apart: Int64s, waiting: int, awaited: int) -> bool:
    """Return whether an op, or one it meets, only stands behind the awaited op, of another kind, without needing it."""
    stream = flat.streams[flat.ops[awaited].stream]
    behind = awaited + 1 if awaited + 1 < stream.stop else stream.first
    meeting = flat.ops[waiting].meeting
    same = behind == waiting or (meeting >= 0 and flat.ops[behind].meeting == meeting)
    works = kinds[awaited] >= GRAD_SYNC and kinds[awaited] < COMPUTE and kinds[behind] >= GRAD_SYNC
    return bool(same and works and kinds[behind] != kinds[awaited] and apart[behind] == 1 and kinds[behind] < COMPUTE)


@part
def cause_of(kind: int, own: bool, boundary: int, step: int) -> int:
    """Return the cause of waiting for an op of a kind.

    STAGE for an op of another stage, unless it is a message. At the ends of a step both are FILL or DRAIN.
    """
    cause = kind if own or kind == LINK else STAGE
    if boundary != INSIDE and (cause == STAGE or cause == LINK):  # noqa: PLR1714, SIM109 - compiled: no tuple here
        return FILL if step >= boundary else DRAIN
    return cause
