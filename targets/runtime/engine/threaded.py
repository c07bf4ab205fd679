"""Local engine with one thread for each engine of each rank: what the waits allow to overlap does overlap.

    thread of (rank, engine):   lock: until my next instruction is ready: wait; begin it     (_claim)
                                no lock: execute it
                                lock: complete it, wake the ranks that it may concern        (_end)

One lock guards all counts, queues and sets that decide readiness; it is not held while an instruction runs. Each rank
has a condition of that lock, so that an end wakes only threads it may concern. A collective is run by the thread that
finds all its members ready, while the other members' threads wait. Results equal those of the ordered mode bit for bit:
instructions that touch the same bytes are ordered by their waits.

A hang is detected, not waited for: an engine that finds nothing ready is `stuck` until something that concerns it
completes. If all working engines are stuck and none is busy, no instruction will ever be ready.
"""

from __future__ import annotations

from collections import defaultdict
from threading import Condition, RLock, Thread
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.targets.runtime.engine.local import LocalEngine

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.data.data import Batches
    from ratrain.targets.runtime.engine.collectives import Member
    from ratrain.targets.runtime.engine.engine import StreamHead
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.kernels import KernelSet


_RankKey = tuple[int, int]
"""Rank as (stage, number among the ranks of the stage)."""
_Key = tuple[int, int, Engine]
"""Engine as (stage, number among the ranks of the stage, engine)."""


@define(eq=False)
class _Progress:
    """State that the threads of a step share, guarded by `lock`."""

    lock: RLock = field(factory=RLock)
    changed: defaultdict[_RankKey, Condition] = field(init=False)
    """condition that the threads of a rank wait on; all conditions share the one lock"""
    working: int = 0
    """threads whose streams have not ended"""
    busy: set[_Key] = field(factory=set)
    """engines whose instruction is being executed"""
    stuck: set[_Key] = field(factory=set)
    """engines that found nothing ready, and that no completion has concerned since"""
    failure: BaseException | None = None

    @changed.default
    def _one_condition_a_rank(self) -> defaultdict[_RankKey, Condition]:
        return defaultdict(lambda: Condition(self.lock))

    @property
    def is_stuck(self) -> bool:
        """True if nothing will ever be ready again."""
        return not self.busy and len(self.stuck) == self.working


class ThreadedEngine(LocalEngine):
    """Engine that runs a program's ranks in this process, with a thread for each of their engines."""

    concurrency = "threads"
    process_pool = True

    def __init__(self, program: Program, kernels: KernelSet, batches: Batches) -> None:
        self._progress = _Progress()
        super().__init__(program, kernels, batches)

    def capture_steps(self) -> None:
        """Refuse to record: threads start instructions in a varying order."""
        self.refuse_capture("its engines are threads")

    def run_until(self, limit: int) -> None:
        """Run until every engine has completed its stream `limit` times."""
        self._progress = progress = _Progress()
        heads = [head for head in self.heads if head.has_work(limit)]
        progress.working = len(heads)
        threads = [Thread(target=self._serve, args=(head, limit), name="engine", daemon=True) for head in heads]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # the user's second Ctrl-C: no thread may begin another instruction
            self._fail(error)
            raise
        if progress.failure is not None:
            raise progress.failure

    def _serve(self, head: StreamHead, limit: int) -> None:
        """Run a stream to its end."""
        try:
            with np.errstate(all="ignore"):  # as in `run_step`: the setting is per thread
                while members := self._claim(head, limit):
                    self.issue(members, head.engine, self.step_of(head))
                    self._end(head.engine, members)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that joins this one
            self._fail(error)

    def _claim(self, head: StreamHead, limit: int) -> list[Member]:
        """Wait until the head's instruction is ready and begin it; return its members.

        Return an empty list when the stream has ended or the step has failed.
        """
        progress, key = self._progress, _key(head.rank, head.engine)
        with progress.lock:
            while progress.failure is None and head.has_work(limit):
                # Busy although this thread is here: another member's thread is running this engine's collective.
                members = [] if key in progress.busy else self.ready(head, limit)
                if members:
                    for rank, instruction in members:
                        self.begin(rank, head.engine, instruction)
                    progress.busy |= {_key(rank, head.engine) for rank, _ in members}
                    return members
                # Test and wait are under one lock: no completion can fall between them and be missed.
                progress.stuck.add(key)
                if progress.is_stuck:
                    self.fail_as_hanging()
                progress.changed[key[:2]].wait()
            # A thread that leaves can make the rest stuck: `stuck` may equal `working` only from here on.
            progress.working -= 1
            progress.stuck.discard(key)
            if progress.failure is None and progress.working and progress.is_stuck:
                self.fail_as_hanging()
            return []

    def _end(self, engine: Engine, members: list[Member]) -> None:
        """Complete an instruction of all members and wake the ranks that it may concern."""
        progress = self._progress
        with progress.lock:
            for rank, instruction in members:
                self.complete(rank, engine, instruction)
            progress.busy -= {_key(rank, engine) for rank, _ in members}
            for concerned in self._concerned(members):
                progress.stuck -= {key for key in progress.stuck if key[:2] == concerned}
                progress.changed[concerned].notify_all()

    def _concerned(self, members: list[Member]) -> set[_RankKey]:
        """Return the ranks on which something may have become ready.

        These are the instruction's own ranks, the rank a message went to, and ranks that offload activations to one of
        them: their sends wait for its receive to be ready (`ready_to_meet`).
        """
        ranks = {(rank.stage_index, rank.lane) for rank, _ in members}
        rank, instruction = members[0]
        ends = instruction.ends(rank.stage_index)
        if ends is not None:
            ranks.add((ends[1], rank.lane))
        senders = {(stage, lane) for to, lane in ranks for stage in self.program.peer_memory_senders.get(to, ())}
        return ranks | senders

    def _fail(self, error: BaseException) -> None:
        """Record the first failure and wake all threads."""
        progress = self._progress
        with progress.lock:
            progress.failure = progress.failure or error
            for condition in progress.changed.values():
                condition.notify_all()


def _key(rank: RankExecutor, engine: Engine) -> _Key:
    return rank.stage_index, rank.lane, engine
