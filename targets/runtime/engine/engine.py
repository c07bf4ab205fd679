"""Base class of all engines that execute a program.

An engine runs the ranks of its process: it holds their arenas, binds routines to them, and steps through their streams
of instructions. Each engine of a rank (compute, send, collective, ...) goes through its stream in order; an instruction
may start once the counts that it waits for are reached:

    rank.completed[engine]   instructions completed over all steps; step and place in the stream follow by divmod
    wait (engine, count)     satisfied when completed[engine] >= step * stream length + count
                             (a wait for the step before: with step - 1, and satisfied in step 0)

Subclasses differ in who runs ready instructions: `LocalEngine` visits all heads in one thread, `ThreadedEngine` has a
thread for each engine, `ranks.engine` a process for each rank. They override methods of the marked section below: the
abstract ones always, the others if their default does not fit. In addition they may override `capture_steps`,
`declared_constants` and `expect_evaluation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import Dtype, Home, StateKind
from ratrain.ratrain_ir.ops.base import ENGINES, Engine, Part
from ratrain.ratrain_ir.ops.collectives import COLLECTIVE_OPS
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, LoadInput, Release, ScaleUpdate, Update
from ratrain.ratrain_ir.ops.memory import Fetch, Store
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, fail
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.process_memory import (
    MemoryUse,
    Residence,
    Traffic,
    peak_resident_bytes,
    resident_bytes,
)
from ratrain.targets.runtime.data.data import fail_without_labels
from ratrain.targets.runtime.engine.certificate import constants_of, scratch_bytes
from ratrain.targets.runtime.engine.compute_time import ComputeTimes, StageCompute
from ratrain.targets.runtime.engine.evaluation import serves_the_loss
from ratrain.targets.runtime.engine.expert_loads import ExpertLoad, ExpertLoads
from ratrain.targets.runtime.engine.first_use import compiles, first_use
from ratrain.targets.runtime.engine.memory_monitor import MemoryMonitor
from ratrain.targets.runtime.engine.one_pass_head import head_pairs, join_head
from ratrain.targets.runtime.engine.optimizer import Updater
from ratrain.targets.runtime.engine.profile import StepSpan
from ratrain.targets.runtime.engine.rank import BoundRoutine, RankExecutor, bind_routine, prepare_tables
from ratrain.targets.runtime.kernels.shared import number_within
from ratrain.targets.runtime.watch.positions import RankPhase

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.topology import Hop, Rank
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.arena.kernel_memory import Feed, Memory
    from ratrain.targets.runtime.data.data import Batches
    from ratrain.targets.runtime.engine.profile import Concurrency, Profile
    from ratrain.targets.runtime.kernels import KernelSet, Scratch


@frozen
class StepReport:
    """Result of one step."""

    step: int
    loss: float
    tokens: int
    loss_scale: float
    skipped_blocks: int
    gradient_norm: float | None
    """before clipping; infinite where a gradient overflowed"""
    loss_tokens: int | None = None
    """number of tokens that the loss is the mean of; None if all of the step's tokens count"""
    memory: Residence | None = field(default=None, eq=False)
    """None if the system does not say, or if the arenas are on a device"""
    compute: tuple[StageCompute, ...] | None = field(default=None, eq=False)
    """by stage; None on a device, where instructions are issued without waiting for their end"""
    experts: ExpertLoad | None = field(default=None, eq=False)
    """None for models without experts, and on a device"""


@frozen
class StepTotals:
    """Sums over all ranks of the job for one step: the losses of its tokens in nats, and fields as in `StepReport`."""

    loss: float
    skipped_blocks: int
    gradient_norm: float | None
    memory: Residence | None
    compute_seconds: NDArray[Any]
    """seconds of all ranks, shape [stages, ranks of a stage]"""
    experts: ExpertLoad | None


class StreamHead:
    """Next instruction of one engine of one rank, whose stream is not empty. Asked often, so lookups are cached."""

    def __init__(self, rank: RankExecutor, engine: Engine) -> None:
        self.rank = rank
        self.engine = engine
        self.stream = rank.stage.streams[engine]
        """Instructions of the engine in one step."""
        self._length = len(self.stream)

    def has_work(self, limit: int) -> bool:
        """Return True if the engine has completed its stream fewer than `limit` times."""
        return self.rank.completed[self.engine] < limit * self._length

    def next_instruction(self) -> tuple[Instruction, int]:
        """Return the next instruction and its step, counted from this engine's first step."""
        step, position = divmod(self.rank.completed[self.engine], self._length)
        return self.stream[position], step


class ProgramEngine(ABC):
    """Execution of a program's ranks that belong to this process (`places`, in stage and replica order).

    Raises `DiagnosticError` RT093 where this machine cannot hold their arenas.
    """

    concurrency: ClassVar[Concurrency]
    """Unit that runs at the same time as others: one instruction, threads or processes."""

    def __init__(self, program: Program, kernels: KernelSet, batches: Batches, places: Sequence[Rank]) -> None:
        self.program = program
        self.kernels = kernels
        self.batches = batches
        # The order matters: refuse before anything is allocated; load libraries before `constant_bytes` is measured, so
        # that they count as constant; allocate arenas last.
        _check_memory(program, places, self.needed_bytes(places), kernels.memory)
        _check_homes(program, kernels)
        load_kernels(program, kernels)
        self.compiles = compiles(program, kernels)
        """True if loops that the program runs are not on disk: they have been compiled, or will be."""
        self.constant_bytes = resident_bytes()
        """Resident bytes of this process before its arenas; None where the system does not say."""
        self.ranks: list[list[RankExecutor]] = [[] for _ in program.stages]
        """Ranks of this process, by stage."""
        for place in places:
            self.ranks[place.stage].append(
                RankExecutor(program, place.stage, place.replica, kernels.memory, place.peer)
            )
        self.has_whole_state = True
        """True while weights, moments and counts are as the last finished step left them: no later update has begun."""
        self.evaluates = False
        """True if there will be evaluation passes."""
        self.expected_steps = 0
        """Number of steps to come."""
        self.first_step = 0
        """Steps done before this engine was made (a resumed run)."""
        self.step = 0
        """Step in progress, or the last one finished."""
        self.tell: Callable[[Diagnostic], None] = lambda _: None
        """Receiver of warnings that stop nothing."""
        self.monitor: MemoryMonitor | None = None
        self.profile: Profile | None = None
        self.compute_times = ComputeTimes(program.topology)
        self.file_traffic = Traffic()
        """Bytes that the steps so far have read from files and written to them."""
        self.evaluated: tuple[Batches, int] | None = None
        """Data and batch number of an evaluation pass; None while training."""
        prepare_tables(program, kernels)
        self.updater = Updater(program, kernels)
        self.scratch: Scratch = kernels.memory.scratch(self.scratch_needed())
        self.expert_loads = ExpertLoads()
        self.bound: dict[_Key, BoundRoutine] = {}
        self.feeds: dict[_Key, tuple[RankExecutor, Instruction, Feed]] = {}
        """Feed of every instruction that loads an input."""
        self._bind()
        self.heads = [
            StreamHead(rank, e) for ranks in self.ranks for rank in ranks for e in ENGINES if rank.stage.streams[e]
        ]

    def _bind(self) -> None:
        """Bind routines and feeds to the ranks' views, once: addresses stay the same in every step."""
        for ranks in self.ranks:
            for rank in ranks:
                for instruction in rank.stage.streams[Engine.COMPUTE]:
                    if instruction.routine is not None:
                        scratch = self.scratch_of(rank, Engine.COMPUTE)
                        bound = bind_routine(rank, instruction, self.kernels, scratch)
                        self.bound[_key(rank, instruction)] = bound
                        if not self.kernels.memory.overlaps:
                            self.expert_loads.watch(rank, instruction, bound)
                for forward, backward in head_pairs(rank.stage):
                    join_head(self.bound[_key(rank, forward)], self.bound[_key(rank, backward)], self.kernels)
                for instruction in (each for stream in rank.stage.streams.values() for each in stream):
                    if instruction.keyword == LoadInput.keyword:
                        feed = rank.memory.feed(rank.by_role(instruction)["data"])
                        self.feeds[_key(rank, instruction)] = rank, instruction, feed

    # Methods that subclasses override

    @property
    @abstractmethod
    def description(self) -> str:
        """Place where the ranks run, in words."""

    @property
    @abstractmethod
    def peak_transport_bytes(self) -> int:
        """Peak bytes of messages and collectives outside the arenas in this process."""

    @abstractmethod
    def run_until(self, limit: int) -> None:
        """Run until every engine of this process's ranks has completed its stream `limit` times.

        For each instruction: call `begin`; if `is_executed`, run it by `run_alone` or together with its partners; call
        `complete`. Raises `DiagnosticError` RT093 if work is left and nothing will ever be ready.
        """

    @abstractmethod
    def step_totals(self, step: int) -> StepTotals:
        """Return the sums over all ranks of the job for the step that has just ended."""

    @abstractmethod
    def evaluated_loss(self, step: int) -> float:
        """Return the sum of the losses of all tokens, in nats, of the evaluation pass that has just ended."""

    def needed_bytes(self, places: Sequence[Rank]) -> int:
        """Return the bytes that these ranks need at least. Called before anything is allocated."""
        return sum(self.program.stages[place.stage].arena_bytes for place in places)

    def scratch_needed(self) -> int:
        """Return the bytes of scratch of the largest instruction. Called once, by the constructor."""
        return scratch_bytes(self.program, self.kernels)

    def scratch_of(self, rank: RankExecutor, engine: Engine) -> Scratch:  # noqa: ARG002
        """Return the scratch for an engine's kernels: one for all, because one instruction runs at a time.

        Called by the constructor, from the binding of routines on.
        """
        return self.scratch

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch of the process."""
        return self.scratch.capacity

    def agreed_stop(self, asked: Callable[[], int]) -> Callable[[], int]:
        """Return a function for the run to call between steps: the signal that asks the job to end, or 0.

        `asked` returns the signal that this process got. Engines of several processes make all of them agree.
        """
        return asked

    def begin(self, rank: RankExecutor, engine: Engine, instruction: Instruction) -> None:
        """Record that a rank's engine starts its next instruction."""
        # First, so that the position names this instruction if the monitor below stops the run.
        if rank.position is not None:
            rank.position.begin(engine)
        if self.monitor is not None:
            self.monitor.before(rank, instruction)
        if engine is Engine.COMPUTE:
            self.compute_times.begin(rank.place)
        if self.profile is not None and self.evaluated is None:
            self.profile.begin(rank.stage_index, rank.lane, engine)

    def complete(self, rank: RankExecutor, engine: Engine, instruction: Instruction) -> None:
        """Record that a rank's engine has completed its instruction: others that wait for it may be ready."""
        # Before `position.complete`, which writes this count.
        rank.completed[engine] += 1
        if engine is Engine.COMPUTE:
            self.compute_times.complete(rank.place)
        if self.profile is not None and self.evaluated is None:
            self.profile.complete(rank.stage_index, rank.lane, engine)
        if rank.position is not None:
            rank.position.complete(engine)
        if self.monitor is not None:
            self.monitor.after(rank, instruction)

    # Steps

    def run_step(self, step: int) -> StepReport:
        """Run one step to its end; steps are numbered from 0 over the whole training.

        Raises `DiagnosticError` RT093 if work is left but nothing is ready: the program would hang.
        """
        # Counts of completed instructions begin with this process, steps with the training.
        limit = step - self.first_step + 1
        self.step = step
        tokens = self.program.plan.tokens_per_step
        counted = self._counted(step)
        start = self.profile.clock() if self.profile is not None else 0.0
        self.enter(RankPhase.RUNNING, step)
        self.compute_times.begin_step()
        self.updater.begin_step(step, self.loss_scale[0])
        self.expert_loads.clear()
        before = self._file_traffic()
        with np.errstate(all="ignore"):  # overflow is expected: flags find it, and its blocks are not updated
            self._run_pass(limit, step)
        self.file_traffic += self._file_traffic() - before
        self.enter(RankPhase.BETWEEN_STEPS, step)
        totals = self.step_totals(step)
        mean = totals.loss / (tokens if counted is None else counted)
        scale, skipped = self.loss_scale[0], totals.skipped_blocks
        compute = (
            None
            if self.kernels.memory.overlaps
            else StageCompute.of_step(self.program.topology, totals.compute_seconds)
        )
        report = StepReport(
            *(step, mean, tokens, scale, skipped, totals.gradient_norm, counted, totals.memory, compute, totals.experts)
        )
        if self.profile is not None:
            self.profile.steps.append(StepSpan(limit - 1, start, self.profile.clock()))
        self.has_whole_state = True
        return report

    def _file_traffic(self) -> Traffic:
        return sum((rank.file_traffic for ranks in self.ranks for rank in ranks), Traffic())

    def _run_pass(self, limit: int, step: int) -> None:
        """Run until every engine has completed its stream `limit` times; `step` is the last pass's in the training."""
        # A device that runs asynchronously reads these buffers late: they must not change once the step has begun.
        for rank, instruction, feed in self.feeds.values():
            if feed.is_ahead:
                self._fill(rank, instruction, feed, step)
        self.run_until(limit)
        self.updater.end_step()

    def _counted(self, step: int) -> int | None:
        """Return the labels of a step that count in the loss, and divide gradients by them; None if all always count.

        Every rank derives the number from the data alone, so that the mean is over the global batch in any layout.
        Raises `DiagnosticError` RT090 if no label counts.
        """
        if self.batches.stream.counts_all:
            return None
        counted = self.batches.counted(step)
        if not counted:
            fail_without_labels(step, self.batches.stream, self.program.plan, self.first_step)
        for bound in self.bound.values():
            bound.count_labels(counted, self.program.plan.tokens_per_step)
        return counted

    def run_forward(self, batches: Batches, number: int) -> float:
        """Return the loss of batch `number` under the present weights: mean over its counted tokens, in nats.

        Call it between steps only. It runs a step of the program, but executes only what the loss needs (`evaluation`).
        The step is not counted, and every carried byte is the same afterwards.
        """
        done = min(head.rank.completed[head.engine] // len(head.stream) for head in self.heads)
        self.evaluated = batches, number
        try:
            with np.errstate(all="ignore"):
                self._run_pass(done + 1, done + self.first_step)
        finally:
            self.evaluated = None
        for head in self.heads:
            # Waits count instructions over all steps: take the pass back, as if it had not been.
            head.rank.completed[head.engine] -= len(head.stream)
        return self.evaluated_loss(done + self.first_step) / max(1, batches.counted(number))

    def enter(self, phase: RankPhase, step: int) -> None:
        """Record a phase for all ranks of this process."""
        for position in (rank.position for ranks in self.ranks for rank in ranks if rank.position is not None):
            position.enter(phase, step)

    # Instructions

    def is_executed(self, instruction: Instruction) -> bool:
        """Return True if an instruction does its work: always in training; in evaluation only if the loss needs it."""
        return self.evaluated is None or serves_the_loss(instruction)

    def run_alone(self, rank: RankExecutor, instruction: Instruction, step: int) -> None:
        """Run an instruction that needs no partner; `step` is counted over the whole training."""
        _ALONE[instruction.keyword](self, rank, instruction, step)

    def call_routine(self, rank: RankExecutor, instruction: Instruction, _step: int) -> None:
        """Run the routine of a block op, bound to its tensors; an evaluation goes forward alone."""
        self.bound[_key(rank, instruction)](alone=self.evaluated is not None)

    def load_input(self, rank: RankExecutor, instruction: Instruction, step: int) -> None:
        """Bring tokens, labels or document starts of a micro-batch into the arena."""
        _, _, feed = self.feeds[_key(rank, instruction)]
        if not feed.is_ahead:
            self._fill(rank, instruction, feed, step)
        feed.deliver()

    def _fill(self, rank: RankExecutor, instruction: Instruction, feed: Feed, step: int) -> None:
        """Write the values that an instruction of a step loads.

        For a tensor-parallel rank, tokens and labels become row numbers of its own part of the tables.
        """
        batches, number = self.evaluated or (self.batches, step)
        part = Part(instruction.variant)
        batches.fill(number, rank.replica, instruction.piece, part, feed.values)
        if rank.vocabulary is not None and part is not Part.DOCUMENTS:
            number_within(feed.values, rank.vocabulary)

    def store(self, rank: RankExecutor, instruction: Instruction, _step: int) -> None:
        """Copy tensors into another memory."""
        for source, target in rank.copies(instruction):
            held = rank.stage.tensors[target]
            rank.stores[held.home].put(held.offset, rank.views[source])

    def fetch(self, rank: RankExecutor, instruction: Instruction, _step: int) -> None:
        """Copy tensors from another memory."""
        for source, target in rank.copies(instruction):
            held = rank.stage.tensors[source]
            rank.stores[held.home].get(held.offset, rank.views[target])

    def update(self, rank: RankExecutor, instruction: Instruction, _step: int) -> None:
        """Update a block, with the host engine's scratch: some machines update on an engine next to compute."""
        # In evaluation an update only writes the view again, from unchanged masters.
        self.has_whole_state &= self.evaluated is not None
        update = self.updater.update if self.evaluated is None else self.updater.refresh_view
        update(rank, instruction, self.scratch_of(rank, Engine.HOST))

    def update_scale(self, rank: RankExecutor, instruction: Instruction, _step: int) -> None:
        """Set the next step's loss scale."""
        views = rank.by_role(instruction)
        scratch = self.scratch_of(rank, Engine.COLLECTIVE)
        self.updater.scalars.advance_scale(views["scale"], views["overflow"], scratch=scratch)

    def hop(self, rank: RankExecutor, instruction: Instruction) -> Hop:
        """Return the channel of a message."""
        hop = instruction.hop(rank.stage_index, self.program.topology)
        assert hop is not None  # the verifier refuses messages between stages that are no neighbours
        return hop

    # Queries and settings of the run

    def capture_steps(self) -> None:
        """Record one step on the device and replay it from then on. Raises `DiagnosticError` RT093 if impossible."""
        self.refuse_capture(f"{self.description}: instructions wait for what other processes or threads do")

    def refuse_capture(self, why: str) -> NoReturn:
        """Raise `DiagnosticError` RT093 for steps that cannot be recorded."""
        text = f"a step of this run cannot be captured: {why}"
        fail("RT093", text, help="leave --graph out, or run all ranks in one process, in a fixed order: --device cuda")

    def open_stores(self, folder: Path | None) -> None:
        """Create all other memories that the ranks store in, files in `folder`. Raises `DiagnosticError` RT093.

        Called before the first step.
        """
        for rank in (rank for ranks in self.ranks for rank in ranks):
            rank.store_folder = folder
            _ = rank.stores

    def watch_memory(self, *, poison: bool) -> None:
        """Check every access against the program's lifetimes from here on; with `poison`, fill freed bytes with NaN."""
        self.monitor = MemoryMonitor(self.ranks, poison=poison)

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas of the process."""
        return sum(rank.arena.nbytes for ranks in self.ranks for rank in ranks)

    def memory_use(self) -> MemoryUse:
        """Return the memory that this process holds, and its peak."""
        return MemoryUse(
            self.arena_bytes,
            self.scratch_bytes,
            self.peak_transport_bytes,
            self.constant_bytes,
            peak_resident_bytes(),
            self.declared_constants(),
            self.file_traffic,
            self._planned_traffic(),
            self.first_use(),
        )

    def expect_steps(self, count: int) -> None:
        """Set the number of steps to come: a run keeps figures of each, which take memory."""
        self.expected_steps = count

    def first_use(self) -> dict[str, int]:
        """Return the most bytes that libraries and compiled loops take at their first use, by what takes them."""
        engines = len(self.heads) if self.concurrency == "threads" else 0
        ranks = sum(map(len, self.ranks)) if engines else 1
        team = getattr(self.kernels, "team", None)
        return first_use(
            self.program,
            self.kernels,
            scratch_bytes=self.scratch_bytes,
            multiplying=ranks * (1 if team is None else team.threads),
            engines=engines,
            compiles=self.compiles,
            steps=self.expected_steps,
        )

    def residence(self) -> Residence | None:
        """Return peak and planned resident bytes of this process; None if the system does not say, or for a device."""
        if self.kernels.memory.overlaps:
            return None
        memory = self.memory_use()
        if memory.peak_resident_bytes is None or memory.planned_bytes is None:
            return None
        return Residence(memory.peak_resident_bytes, memory.planned_bytes)

    def _planned_traffic(self) -> Traffic:
        """Return the bytes that a step moves from and to files, by the program."""
        moved = [rank.stage.moved_bytes(Home.FILE) for ranks in self.ranks for rank in ranks]
        return Traffic(sum(read for read, _ in moved), sum(written for _, written in moved))

    def declared_constants(self) -> dict[str, int]:
        """Return the most bytes that this process holds besides arenas and scratch, by purpose."""
        return {**self._constants, "messages": self.peak_transport_bytes}

    @cached_property
    def _constants(self) -> dict[str, int]:
        """Constant bytes besides arenas, scratch and messages, by purpose."""
        places = [rank.place for ranks in self.ranks for rank in ranks]
        return constants_of(self.program, self.kernels, places, areas=len(places) + 1)

    def expect_evaluation(self) -> None:
        """Prepare for evaluation passes. Called once, before the first step, if there will be any."""
        self.evaluates = True

    @property
    def loss_scale(self) -> tuple[float, float]:
        """Loss scale and steps since it last changed; the same on every rank between steps."""
        return next(rank for ranks in self.ranks for rank in ranks).loss_scale


_Key: TypeAlias = "tuple[Rank, int]"
"""Rank and identity of one of its instructions."""
_Alone: TypeAlias = Callable[[ProgramEngine, RankExecutor, "Instruction", int], None]

_ALONE: PerOp[_Alone] = PerOp(
    "execution by one rank alone",
    {
        **dict.fromkeys(BLOCK_OPS, ProgramEngine.call_routine),
        LoadInput: ProgramEngine.load_input,
        Store: ProgramEngine.store,
        Fetch: ProgramEngine.fetch,
        Update: ProgramEngine.update,
        ScaleUpdate: ProgramEngine.update_scale,
    },
    never=(*MESSAGE_OPS, *COLLECTIVE_OPS, Release),
)


def _key(rank: RankExecutor, instruction: Instruction) -> _Key:
    """Return the key of an instruction of a rank."""
    # Replicas share the program's instruction objects, which live as long as it: `id` is unique within a rank.
    return rank.place, id(instruction)


def load_kernels(program: Program, kernels: KernelSet) -> None:
    """Run a kernel on one element, so that libraries loaded with a kernel set's first call are not part of a step."""
    one, other = np.zeros(1, np.float32), np.zeros(1, NUMPY_DTYPES[Dtype(program.plan.view_dtype)])
    scratch = kernels.memory.scratch(kernels.scratch_bytes("cast", src=one, dst=other))
    kernels.cast(kernels.memory.staged(one), kernels.memory.staged(other), scratch=scratch)


def _check_homes(program: Program, kernels: KernelSet) -> None:
    """Raise `DiagnosticError` RT004 if a device would have to compute in the host's memory, or exchange rows there."""
    if kernels.on_devices and program.plan.ep > 1:
        text = "rows of experts that replicas share out (ep) are exchanged by the host alone"
        fail("RT004", text, help="run it with --kernels fast or torch, or plan with ep = 1")
    state = (StateKind.MASTER, StateKind.MOMENT)
    tensors = (tensor for stage in program.stages for tensor in stage.tensors)
    if kernels.memory.overlaps and any(tensor.home is Home.HOST and tensor.kind in state for tensor in tensors):
        text = f"the device '{kernels.memory.place}' updates no state that is in the host's memory"
        help_text = (
            "compile with offload-state{home=file}, which brings it to the device in pieces, or run on this processor"
        )
        fail("RT004", text, help=help_text)


def _check_memory(program: Program, places: Sequence[Rank], needed: int, memory: Memory) -> None:
    """Refuse, with RT093, ranks that do not fit in memory, before the system kills the process for it."""
    present, words = memory.room()
    if needed > present:
        which = "all " if len(places) == program.plan.clusters else ""
        arenas = sum(program.stages[place.stage].arena_bytes for place in places)
        fail(
            "RT093",
            f"{which}{len(places)} ranks in one process need {needed} bytes, {arenas} of them arenas; {words}",
            help="'ratrainc simulate' times the program without executing it; a smaller model or plan can be run here",
        )
