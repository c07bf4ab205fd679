"""A step of ranks that are processes of one thread each: a rank does not communicate while it computes.

The thread of a rank visits its engines in turn, as `targets/runtime/ranks/engine.py` does. It runs a compute op to its
end. It posts a message or collective, and finds it complete only when it looks again: after the op it computed
meanwhile, or, if it had nothing to do, after a pause that grows with how long it has waited. Bytes of a message move
when the receiver looks.

    rank 0:  post send | compute .........  | look: complete
    rank 1:  post recv | pause | look | pause .. | look: complete

If every rank has a core, one lane of ranks stands for all: ranks of a stage do the same at the same time. If ranks
share cores, an op begins when the first core is free. The thread whose clock is furthest behind always goes first, so
that nothing happens before its cause. The cost is linear in the visits, times log(ranks).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.ops.base import ENGINES, Group
from ratrain.targets.program.program import Program
from ratrain.targets.runtime.ranks.waiting import LONGEST_PAUSE, PAUSE_SHARE, VISITED
from ratrain.targets.simulator.flat_program import NEVER, RECV, SEND, STREAMS, TOGETHER, FlatProgram, flatten

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction

_STEPS = 5
"""Steps that are run. The last but one is measured, so that waits for the step before and work of the step after are in
it."""


@frozen(eq=False)
class _Op:
    """An instruction of every step, on one rank."""

    seconds: float
    """of its rank's thread"""
    waits: tuple[tuple[int, int, int], ...]
    """(stream, number of its ops in a step, steps back) of each wait"""
    communicates: bool
    sender: int | None = None
    """of a receive: the op that sends"""
    receiver: int | None = None
    """of a send: the op that receives"""
    meets: tuple[int, ...] = ()
    """of a collective: the ops of all its members, itself included"""


@define(eq=False)
class _Thread:
    """The thread of one rank."""

    streams: list[int]
    clock: float = 0.0
    at: int = 0
    """place in `streams` of the stream it visits next"""
    idle: int = 0
    """visits since something happened"""
    parked: bool = False
    ended: list[float] = field(factory=list)
    """clock at the end of each step"""


@define(eq=False)
class _Run:
    """All threads, and the ops they have posted."""

    ops: list[_Op]
    first: list[int]
    """the first op of each stream"""
    length: list[int]
    threads: list[_Thread]
    cores: list[float]
    """the time at which each is free, as a heap"""
    done: list[int] = field(init=False)
    """ops that each stream has completed, over all steps"""
    under_way: dict[int, tuple[int, int]] = field(factory=dict)
    """by stream: the posted op and its step"""
    there: dict[tuple[int, int], float] = field(factory=dict)
    """by op and step: the time from which others find it posted; of a receive: completed"""

    def __attrs_post_init__(self) -> None:
        self.done = [0] * len(self.first)

    def run(self) -> None:
        """Run all steps: the thread that is furthest behind visits its next engine."""
        ready = [(thread.clock, number) for number, thread in enumerate(self.threads)]
        while ready:
            _, number = heapq.heappop(ready)
            thread = self.threads[number]
            stream = thread.streams[thread.at]
            thread.at = (thread.at + 1) % len(thread.streams)
            woken = []
            if self.visit(thread, stream):
                thread.idle = 0
                woken = self.to_wake(number)
            else:
                thread.idle += 1
            # A thread that found nothing to do on all its engines waits for what completes first. If that is not known,
            # it is parked: it is not in the heap until a visit of another thread wakes it.
            if not self.finished(thread) and (thread.idle < len(thread.streams) or self.waits(thread)):
                heapq.heappush(ready, (thread.clock, number))
            for other in woken:
                heapq.heappush(ready, (self.threads[other].clock, other))
        assert all(len(thread.ended) == _STEPS for thread in self.threads), "a verified program does not hang"

    def to_wake(self, number: int) -> list[int]:
        """Return the parked threads, other than `number`, that now have something to wait for; advance their clocks."""
        parked = [other for other, thread in enumerate(self.threads) if thread.parked and other != number]
        return [other for other in parked if self.waits(self.threads[other])]

    def waits(self, thread: _Thread) -> bool:
        """Advance an idle thread's clock to the look that finds its first op complete; return False if none is known.

        Such a thread is parked.
        """
        known = [self.since(*self.under_way[stream]) for stream in thread.streams if stream in self.under_way]
        first = min(known, default=inf)
        thread.parked = first == inf
        if thread.parked:
            return False
        waited = max(0.0, first - thread.clock)
        # Looks are a pause apart, so completion is noticed half a pause late on average.
        # Looks are a pause apart, so completion is noticed half a pause late on average.
        thread.clock += waited + min(LONGEST_PAUSE, waited * PAUSE_SHARE) / 2
        thread.idle = 0
        return True

    def finished(self, thread: _Thread) -> bool:
        """Return whether a thread has done all steps; note the end of each."""
        done = min(self.done[each] // self.length[each] for each in thread.streams)
        while len(thread.ended) < done:
            thread.ended.append(thread.clock)
        return done == _STEPS

    def visit(self, thread: _Thread, stream: int) -> bool:
        """Complete the posted op of a stream, or begin its next op; return whether anything happened."""
        if stream in self.under_way:
            op, step = self.under_way[stream]
            if self.since(op, step) > thread.clock:
                return False
            del self.under_way[stream]
            self.complete(thread, stream, op, step)
            return True
        step, place = divmod(self.done[stream], self.length[stream])
        op = self.first[stream] + place
        if step == _STEPS or not self.may_begin(op, step):
            return False
        if not self.ops[op].communicates:
            self.complete(thread, stream, op, step)
            return True
        self.under_way[stream] = op, step
        if self.ops[op].sender is None:
            self.there[op, step] = thread.clock
        return True

    def complete(self, thread: _Thread, stream: int, op: int, step: int) -> None:
        """Complete an op: take its seconds on the core that is free first."""
        thread.clock = max(thread.clock, self.cores[0]) + self.ops[op].seconds
        heapq.heapreplace(self.cores, thread.clock)
        self.done[stream] += 1
        if self.ops[op].sender is not None:
            self.there[op, step] = thread.clock

    def may_begin(self, op: int, step: int) -> bool:
        """Return whether all that an op waits for on its own rank is done."""
        return all(
            step < back or self.done[stream] >= (step - back) * self.length[stream] + count
            for stream, count, back in self.ops[op].waits
        )

    def since(self, op: int, step: int) -> float:
        """Return the time from which a posted op can be found complete; infinite while it is unknown."""
        one = self.ops[op]
        others = (one.sender, one.receiver, *one.meets)
        return max((self.there.get((other, step), inf) for other in others if other is not None), default=-inf)


@frozen(eq=False)
class _Lanes:
    """Ops of a program on the ranks of `lanes` lanes, numbered lane by lane and in a lane as in the program."""

    program: Program
    flat: FlatProgram
    seconds: Sequence[float]
    lanes: int

    def ops(self) -> Iterator[_Op]:
        """Yield the ops by number."""
        for lane in range(self.lanes):
            numbers = count()
            for index, stage in enumerate(self.program.stages):
                for engine in ENGINES:
                    for item in stage.streams[engine]:
                        yield self.op(lane, index, item, next(numbers))

    def op(self, lane: int, stage: int, item: Instruction, number: int) -> _Op:
        """Return the op of a lane, given its number in the program."""
        flat, first, record = self.flat, lane * len(self.flat.ops), self.flat.ops[number]
        mode = record["mode"]
        assert mode != NEVER, "a verified program has both ends of everything"
        waits = flat.waits[record["wait_first"] : record["wait_stop"]].tolist()
        streams = lane * len(flat.streams)
        own = _Op(
            self.seconds[number],
            tuple((streams + stream, done, back) for stream, done, back in waits),
            bool(item.group) or item.peer is not None,
        )
        if mode in (SEND, RECV):
            channel = flat.channels[record["channel"]]
            ops, begin = (flat.recvs, "recv_first") if mode == SEND else (flat.sends, "send_first")
            end = first + int(ops[channel[begin] + record["place"]])
            return evolve(own, receiver=end) if mode == SEND else evolve(own, sender=end)
        return evolve(own, meets=tuple(self.met(lane, stage, item, number))) if item.group else own

    def met(self, lane: int, stage: int, item: Instruction, number: int) -> Iterator[int]:
        """Yield the ops of these lanes that meet in a collective, the given one among them."""
        mesh, flat = self.program.topology, self.flat
        record = flat.ops[number]
        meeting = flat.meetings[record["meeting"]] if record["mode"] == TOGETHER else None
        met = [number] if meeting is None else flat.members[meeting["first"] : meeting["stop"]].tolist()
        of_stage = {int(flat.ops[op]["stream"]) // STREAMS: op for op in met}
        for rank in mesh.members(Group(item.group), mesh.in_lane(stage, lane)):
            if (other := mesh.lane(rank)) < self.lanes and rank.stage in of_stage:
                yield other * len(flat.ops) + of_stage[rank.stage]


def threads_step_seconds(program: Program, seconds: Sequence[float], cores: int) -> float:
    """Return the seconds of a steady step of ranks with a thread each that share `cores` cores.

    `seconds` are those each instruction takes of its thread, stream by stream.
    """
    flat, mesh = flatten(program.columns(), program.topology), program.topology
    lanes = 1 if cores >= mesh.size else mesh.lanes
    length = (flat.streams["stop"] - flat.streams["first"]).tolist()
    threads = []
    for rank in range(lanes * mesh.stages):
        numbers = [rank * STREAMS + ENGINES.index(engine) for engine in VISITED]
        busy = [number for number in numbers if length[number % len(length)]]
        if busy:
            threads.append(_Thread(busy))
    ops = list(_Lanes(program, flat, seconds, lanes).ops())
    first = [lane * len(flat.ops) + each for lane in range(lanes) for each in flat.streams["first"].tolist()]
    run = _Run(ops, first, length * lanes, threads, [0.0] * min(cores, len(threads)))
    run.run()
    before, last = (max(thread.ended[step] for thread in threads) for step in (-3, -2))
    return last - before
