"""A step as ranks run it that are processes of one thread each: what a rank computes, it does not communicate meanwhile.

The thread of a rank visits its engines in turn, as `targets/runtime/ranks/engine.py` does. It runs what computes to its end, posts what
communicates, and finds that complete only when it looks again: after whatever it computed meanwhile, or, where it had nothing to do, after a
pause that grows with how long it has waited. Bytes of a message move when the receiver looks. Where every rank has a core, one lane of
ranks stands for all: those of a stage do the same at the same time. Where ranks share cores, an op begins when the first of them is
free, and the rank whose clock is furthest behind goes first.
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
"""Of which the last but one is measured: what waits for the step before does so then, and what goes on in the step after does that too."""


@frozen(eq=False)
class _Op:
    """An instruction of every step, on one rank."""

    seconds: float
    """that it takes of its thread"""
    waits: tuple[tuple[int, int, int], ...]
    """streams, ops of a step of them, and steps back"""
    communicates: bool
    sender: int | None = None
    """of a receive: the op that sends"""
    receiver: int | None = None
    """of a send: the op that receives"""
    meets: tuple[int, ...] = ()
    """the ops of other ranks that it is complete with"""


@define(eq=False)
class _Thread:
    """One rank's."""

    streams: list[int]
    clock: float = 0.0
    at: int = 0
    """the stream that it visits next, as a place in `streams`"""
    idle: int = 0
    """visits since something happened"""
    parked: bool = False
    ended: list[float] = field(factory=list)
    """when it had done each step"""


@define(eq=False)
class _Run:
    """Threads of ranks, and what they have posted."""

    ops: list[_Op]
    first: list[int]
    """of each stream, its first op"""
    length: list[int]
    threads: list[_Thread]
    cores: list[float]
    """when each is free, as a heap"""
    done: list[int] = field(init=False)
    """ops that each stream has completed"""
    under_way: dict[int, tuple[int, int]] = field(factory=dict)
    """by stream: the op that is posted, and its step"""
    there: dict[tuple[int, int], float] = field(factory=dict)
    """by op and step: since when others find it posted, or of a send: received"""

    def __attrs_post_init__(self) -> None:
        self.done = [0] * len(self.first)

    def run(self) -> None:
        """Run all steps: always the thread that is behind visits its next engine."""
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
            if not self.finished(thread) and (thread.idle < len(thread.streams) or self.waits(thread)):
                heapq.heappush(ready, (thread.clock, number))
            for other in woken:
                heapq.heappush(ready, (self.threads[other].clock, other))
        assert all(len(thread.ended) == _STEPS for thread in self.threads), "a verified program does not hang"

    def to_wake(self, number: int) -> list[int]:
        """Threads that had nothing to wait for and have it now."""
        parked = [other for other, thread in enumerate(self.threads) if thread.parked and other != number]
        return [other for other in parked if self.waits(self.threads[other])]

    def waits(self, thread: _Thread) -> bool:
        """Let a thread that has nothing to do wait for what will be there first; whether there is such a thing."""
        known = [self.since(*self.under_way[stream]) for stream in thread.streams if stream in self.under_way]
        first = min(known, default=inf)
        thread.parked = first == inf
        if thread.parked:
            return False
        waited = max(0.0, first - thread.clock)
        thread.clock += waited + min(LONGEST_PAUSE, waited * PAUSE_SHARE) / 2
        thread.idle = 0
        return True

    def finished(self, thread: _Thread) -> bool:
        """Whether a thread has done all steps; notes the end of each."""
        done = min(self.done[each] // self.length[each] for each in thread.streams)
        while len(thread.ended) < done:
            thread.ended.append(thread.clock)
        return done == _STEPS

    def visit(self, thread: _Thread, stream: int) -> bool:
        """Complete what a stream has under way, or begin its next op; whether anything happened."""
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
        """Take the time of an op on the core that is free first, and have it done."""
        thread.clock = max(thread.clock, self.cores[0]) + self.ops[op].seconds
        heapq.heapreplace(self.cores, thread.clock)
        self.done[stream] += 1
        if self.ops[op].sender is not None:
            self.there[op, step] = thread.clock

    def may_begin(self, op: int, step: int) -> bool:
        """Whether all that an op waits for on its own rank is done."""
        return all(
            step < back or self.done[stream] >= (step - back) * self.length[stream] + count
            for stream, count, back in self.ops[op].waits
        )

    def since(self, op: int, step: int) -> float:
        """When an op that is posted can be found complete; infinite while that is not known."""
        one = self.ops[op]
        others = (one.sender, one.receiver, *one.meets)
        return max((self.there.get((other, step), inf) for other in others if other is not None), default=-inf)


@frozen(eq=False)
class _Lanes:
    """The ops of a program on the ranks of some lanes, numbered lane by lane as the program numbers them."""

    program: Program
    flat: FlatProgram
    seconds: Sequence[float]
    lanes: int

    def ops(self) -> Iterator[_Op]:
        """The ops by number."""
        for lane in range(self.lanes):
            numbers = count()
            for index, stage in enumerate(self.program.stages):
                for engine in ENGINES:
                    for item in stage.streams[engine]:
                        yield self.op(lane, index, item, next(numbers))

    def op(self, lane: int, stage: int, item: Instruction, number: int) -> _Op:
        """An op of a lane, given its number in the program."""
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
        """The ops that one of a group meets in these lanes, its own among them."""
        mesh, flat = self.program.topology, self.flat
        record = flat.ops[number]
        meeting = flat.meetings[record["meeting"]] if record["mode"] == TOGETHER else None
        met = [number] if meeting is None else flat.members[meeting["first"] : meeting["stop"]].tolist()
        of_stage = {int(flat.ops[op]["stream"]) // STREAMS: op for op in met}
        for rank in mesh.members(Group(item.group), mesh.in_lane(stage, lane)):
            if (other := mesh.lane(rank)) < self.lanes and rank.stage in of_stage:
                yield other * len(flat.ops) + of_stage[rank.stage]


def threads_step_seconds(program: Program, seconds: Sequence[float], cores: int) -> float:
    """Seconds of a steady step of ranks with a thread each that share cores, given what each instruction takes of its thread, stream by stream."""
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
