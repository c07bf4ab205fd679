"""The local engine: all ranks of a job in one process, deterministic.

`ordered` visits the heads of all (rank, engine) streams in a fixed round and runs those that are ready; it ends for every program
that verifies. With an interleaving seed it picks among the ready heads at random instead: any order the waits allow gives the
same bytes. A send copies its bytes out (transport memory outside the arenas); its receive copies them in.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir import ops
from ratrain.ratrain_ir.diagnostics import Diagnostic, Note, fail
from ratrain.ratrain_ir.ops import ENGINES, Engine, Group, Part, Payload, Quantity
from ratrain.ratrain_ir.per_op import PerOp
from ratrain.targets.runtime import collectives
from ratrain.targets.runtime.evaluation import serves_the_loss
from ratrain.targets.runtime.kernels import KernelSet, Scratch
from ratrain.targets.runtime.liveness import Liveness
from ratrain.targets.runtime.memory_monitor import MemoryMonitor
from ratrain.targets.runtime.optimizer import LossScale, Updater
from ratrain.targets.runtime.positions import EnginePosition, RankPhase, RankPosition
from ratrain.targets.runtime.postmortem import diagnose
from ratrain.targets.runtime.profile import Concurrency, StepSpan
from ratrain.targets.runtime.rank import Rank, bind_routine, prepare_tables, routine_scratch_bytes

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Hop
    from ratrain.targets.program.program import Instruction, Program
    from ratrain.targets.runtime.collectives import Member
    from ratrain.targets.runtime.data import Batches
    from ratrain.targets.runtime.profile import Profile


@frozen
class StepReport:
    """What one step did. `loss` is the mean over the step's tokens in nats, before the update.

    `loss_scale` is the next step's; `skipped_blocks` counts updates left out for an overflow, on all ranks.
    """

    step: int
    loss: float
    tokens: int
    loss_scale: float
    skipped_blocks: int
    gradient_norm: float | None
    """before clipping; infinite where a gradient overflowed"""


@define(eq=False)
class Head:
    """The next instruction of one engine of one rank."""

    rank: Rank
    engine: Engine

    @property
    def stream(self) -> list[Instruction]:
        """One step's instructions of the engine."""
        return self.rank.stage.streams[self.engine]


class LocalEngine:
    """Runs a program's ranks in this process."""

    concurrency: Concurrency = "ordered"

    def __init__(
        self, program: Program, kernels: KernelSet, batches: Batches, *, interleave_seed: int | None = None
    ) -> None:
        self.program = program
        self.kernels = kernels
        self.batches = batches
        places = self.places(program)
        _check_memory(program, places)
        self.ranks: list[list[Rank]] = [[] for _ in program.stages]
        """The ranks of this process, by stage."""
        for place in program.topology.ranks:
            if (place.stage, place.replica) in places:
                self.ranks[place.stage].append(Rank(program, place.stage, place.replica))
        self.choice = random.Random(interleave_seed) if interleave_seed is not None else None  # noqa: S311
        self.first_step = 0
        """Steps done before this engine was made (a resumed run)."""
        self.step = 0
        """The step it works on, or ended last."""
        self.tell: Callable[[Diagnostic], None] = lambda _: None
        """Who hears of what is worth a word and stops nothing."""
        self.monitor: MemoryMonitor | None = None
        self.profile: Profile | None = None
        self.channels: dict[tuple[Hop, int], deque[NDArray[Any]]] = {}
        self.transport_bytes = 0
        self._transport_lock = Lock()
        self._spare: defaultdict[tuple[tuple[int, ...], np.dtype[Any]], list[NDArray[Any]]] = defaultdict(list)
        """Messages that have arrived, for others of their shape: after the first steps none is allocated."""
        self.peak_transport_bytes = 0
        self.evaluated: tuple[Batches, int] | None = None
        """The data of a pass that evaluates, and which of its batches; None while training."""
        self.losses: dict[int, float] = {}
        self.norms: dict[int, float] = {}
        prepare_tables(program, kernels)
        self.updater = Updater(program, kernels)
        self.scratch = Scratch(self.scratch_needed())
        self.bound: dict[tuple[int, int, int], Callable[[], None]] = {}
        self._bind()
        self.heads = [Head(rank, e) for ranks in self.ranks for rank in ranks for e in ENGINES if rank.stage.streams[e]]

    def scratch_of(self, rank: Rank, engine: Engine) -> Scratch:  # noqa: ARG002
        """What an engine's kernels take temporaries from: one for all, as one instruction runs at a time."""
        return self.scratch

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch of the process."""
        return self.scratch.capacity

    def places(self, program: Program) -> frozenset[tuple[int, int]]:
        """(stage, replica) of the ranks that this process runs: all there are."""
        return frozenset((place.stage, place.replica) for place in program.topology.ranks)

    def scratch_needed(self) -> int:
        """Bytes of scratch that the largest instruction takes."""
        return scratch_bytes(self.program, self.kernels)

    def _bind(self) -> None:
        for ranks in self.ranks:
            for rank in ranks:
                for instruction in rank.stage.streams[Engine.COMPUTE]:
                    if instruction.routine is not None:
                        key = (rank.stage_index, rank.replica, id(instruction))
                        scratch = self.scratch_of(rank, Engine.COMPUTE)
                        self.bound[key] = bind_routine(rank, instruction, self.kernels, scratch)

    def watch_memory(self, *, poison: bool) -> None:
        """Hold every access against the program's lives from here on; with `poison`, freed bytes become NaNs."""
        self.monitor = MemoryMonitor(self.ranks, poison=poison)

    @property
    def description(self) -> str:
        """Where the ranks run, in words."""
        return f"{self.program.plan.clusters} ranks in this process"

    def agreed_stop(self, asked: Callable[[], int]) -> Callable[[], int]:
        """What to ask between steps, given the signal that asks this process to end, or 0."""
        return asked

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas of the process."""
        return sum(rank.arena.size for ranks in self.ranks for rank in ranks)

    @property
    def loss_scale(self) -> tuple[float, float]:
        """The loss scale and what its rule counts; the same on every rank between steps."""
        values = next(rank for ranks in self.ranks for rank in ranks).carried("scale")
        return float(values[0]), float(values[1])

    def run_step(self, step: int) -> StepReport:
        """Run one step to its end; steps are numbered from 0 over the whole training.

        Raises `DiagnosticError` RT093 when nothing is ready though work is left: the program would hang.
        """
        limit = step - self.first_step + 1
        self.step = step
        start = self.profile.clock() if self.profile is not None else 0.0
        self.enter(RankPhase.RUNNING, step)
        self.updater.begin_step(step)
        with np.errstate(all="ignore"):  # overflow is no accident here: flags find it, and its blocks are skipped
            self._run_until(limit)
        self.enter(RankPhase.BETWEEN_STEPS, step)
        report = self._report(step)
        if self.profile is not None:
            self.profile.steps.append(StepSpan(limit - 1, start, self.profile.clock()))
        return report

    def _report(self, step: int) -> StepReport:
        """What the step did."""
        tokens = self.program.plan.tokens_per_step
        norm = self.norms.pop(step, self.updater.gradient_norm())
        return StepReport(step, self.losses.pop(step) / tokens, tokens, self.loss_scale[0], self.updater.skipped, norm)

    def run_forward(self, batches: Batches, number: int) -> float:
        """The loss of batch `number` of `batches` with the weights as they are: mean over its tokens, in nats.

        Between steps only. It is a step of the program of which nothing is executed but what the loss needs (`evaluation`),
        and it is not counted: every carried byte is afterwards what it was before.
        """
        done = min(head.rank.completed[head.engine] // len(head.stream) for head in self.heads)
        self.evaluated = batches, number
        try:
            with np.errstate(all="ignore"):
                self._run_until(done + 1)
        finally:
            self.evaluated = None
        for head in self.heads:
            head.rank.completed[head.engine] -= len(head.stream)
        return self._evaluated_loss(done + self.first_step)

    def _evaluated_loss(self, step: int) -> float:
        """The mean loss of a pass that stood for a step."""
        return self.losses.pop(step) / self.program.plan.tokens_per_step

    def _is_executed(self, instruction: Instruction) -> bool:
        """Whether an instruction does anything: all do, but where the engine evaluates."""
        return self.evaluated is None or serves_the_loss(instruction)

    def _run_until(self, limit: int) -> None:
        """Run until every engine has completed its streams `limit` times."""
        while True:
            ran, unfinished = (self._round if self.choice is None else self._random_pick)(limit)
            if not unfinished:
                return
            if not ran:
                self._hang(limit)

    def _round(self, limit: int) -> tuple[bool, bool]:
        """Visit every head once, running each engine as far as it goes; (anything ran, work is left)."""
        ran = unfinished = False
        for head in self.heads:
            while self._try_run(head, limit):
                ran = True
            unfinished |= self._has_work(head, limit)
        return ran, unfinished

    def _random_pick(self, limit: int) -> tuple[bool, bool]:
        """Run one ready head, chosen at random."""
        assert self.choice is not None
        working = [head for head in self.heads if self._has_work(head, limit)]
        self.choice.shuffle(working)
        return any(self._try_run(head, limit) for head in working), bool(working)

    def _has_work(self, head: Head, limit: int) -> bool:
        return head.rank.completed[head.engine] < limit * len(head.stream)

    def _try_run(self, head: Head, limit: int) -> bool:
        """Run the head's instruction if it is ready; whether it ran."""
        members = self._ready(head, limit)
        if not members:
            return False
        step = self._step_of(head)
        for rank, instruction in members:
            self._begin(rank, head.engine, instruction)
        self._execute(members, step)
        for rank, instruction in members:
            self._complete(rank, head.engine, instruction)
        return True

    def _step_of(self, head: Head) -> int:
        """The step, over the whole training, of a head's instruction."""
        found = head.rank.head(head.engine)
        assert found is not None
        return found[1] + self.first_step

    def _ready(self, head: Head, limit: int) -> list[Member]:
        """The head's instruction, or all members' of a collective, if it can run now; nothing otherwise."""
        if not self._has_work(head, limit):
            return []
        found = head.rank.head(head.engine)
        assert found is not None
        instruction, step = found
        if not head.rank.is_ready(instruction, step):
            return []
        if instruction.group:
            return self._ready_members(head.rank, instruction, step)
        awaits_message = instruction.keyword == "recv" and self._is_executed(instruction)
        if awaits_message and not self._channel(head.rank, instruction):
            return []
        return [(head.rank, instruction)]

    def _execute(self, members: list[Member], step: int) -> None:
        rank, instruction = members[0]
        if not self._is_executed(instruction):
            return
        if instruction.group:
            self._run_collective(instruction, members, step)
        else:
            self._run_alone(rank, instruction, step)

    def _begin(self, rank: Rank, engine: Engine, instruction: Instruction) -> None:
        if rank.position is not None:
            rank.position.begin(engine)
        if self.monitor is not None:
            self.monitor.before(rank, instruction)
        if self.profile is not None and self.evaluated is None:
            self.profile.begin(rank.stage_index, rank.replica, engine)

    def _complete(self, rank: Rank, engine: Engine, instruction: Instruction) -> None:
        rank.completed[engine] += 1
        if self.profile is not None and self.evaluated is None:
            self.profile.complete(rank.stage_index, rank.replica, engine)
        if rank.position is not None:
            rank.position.complete(engine)
        if self.monitor is not None:
            self.monitor.after(rank, instruction)

    def _run_alone(self, rank: Rank, instruction: Instruction, step: int) -> None:
        """Run an instruction that needs no partner."""
        _ALONE[instruction.keyword](self, rank, instruction, step)

    def call_routine(self, rank: Rank, instruction: Instruction, _step: int) -> None:
        """Run the routine of a block op, bound to its tensors."""
        self.bound[rank.stage_index, rank.replica, id(instruction)]()

    def load_input(self, rank: Rank, instruction: Instruction, step: int) -> None:
        """Copy the tokens or labels of a micro-batch into the arena."""
        assert instruction.micro_batch is not None
        out = rank.by_role(instruction)["data"]
        batches, number = self.evaluated or (self.batches, step)
        batches.fill(number, rank.replica, instruction.micro_batch, Part(instruction.variant), out)

    def update(self, rank: Rank, instruction: Instruction, _step: int) -> None:
        """Update a block on the host's scratch: an engine of its own in a machine that updates beside its compute engine."""
        update = self.updater.update if self.evaluated is None else self.updater.refresh_view
        update(rank, instruction, self.scratch_of(rank, Engine.HOST))

    def update_scale(self, rank: Rank, instruction: Instruction, _step: int) -> None:
        """Set the next step's loss scale."""
        views = rank.by_role(instruction)
        LossScale(views["scale"]).advance(overflow=bool(views["overflow"][0]))

    def _channel(self, rank: Rank, instruction: Instruction) -> deque[NDArray[Any]]:
        """The messages of a replica on their way that a send of this rank joins, or a receive takes from."""
        return self.channels.setdefault((self._hop(rank, instruction), rank.replica), deque())

    def _hop(self, rank: Rank, instruction: Instruction) -> Hop:
        """The channel of a message."""
        ends = (rank.stage_index, instruction.peer)
        source, destination = ends if instruction.keyword == "send" else ends[::-1]
        hop = self.program.topology.hop(source, destination, Payload(instruction.variant))
        assert hop is not None  # the verifier has refused messages between stages that are no neighbours
        return hop

    def send(self, rank: Rank, instruction: Instruction, _step: int) -> None:
        """Copy a message out."""
        data = rank.by_role(instruction)["data"]
        self._count_transport(data.nbytes)
        with self._transport_lock:
            spare = self._spare[data.shape, data.dtype]
            message = spare.pop() if spare else np.empty_like(data)
        np.copyto(message, data)
        self._channel(rank, instruction).append(message)

    def receive(self, rank: Rank, instruction: Instruction, _step: int) -> None:
        """Copy a message in that has arrived."""
        data = self._channel(rank, instruction).popleft()
        np.copyto(rank.by_role(instruction)["data"], data)
        self._count_transport(-data.nbytes)
        with self._transport_lock:
            self._spare[data.shape, data.dtype].append(data)

    def _count_transport(self, change: int) -> None:
        with self._transport_lock:
            self.transport_bytes += change
            self.peak_transport_bytes = max(self.peak_transport_bytes, self.transport_bytes)

    def _members(self, rank: Rank, instruction: Instruction) -> list[Rank]:
        """The ranks of a collective's group, in rank order."""
        places = self.program.topology.members(Group(instruction.group), rank.place)
        return [self.ranks[place.stage][place.replica] for place in places]

    def _ready_members(self, rank: Rank, instruction: Instruction, step: int) -> list[Member]:
        """All members of a collective, when it is at the head of every one's engine and ready; nothing before."""
        members: list[Member] = []
        for member in self._members(rank, instruction):
            found = member.head(Engine.COLLECTIVE)
            if found is None or found[0].title_without_blocks != instruction.title_without_blocks:
                return []
            if found[1] != step or not member.is_ready(*found):
                return []
            members.append((member, found[0]))
        return members

    def _run_collective(self, instruction: Instruction, members: list[Member], step: int) -> None:
        _TOGETHER[instruction.keyword](self, instruction, members, step)

    def reduce_scatter(self, _instruction: Instruction, members: list[Member], _step: int) -> None:
        """Reduce gradients into the shards of all members."""
        collectives.reduce_scatter(members, self.kernels, self.scratch_of(members[0][0], Engine.COLLECTIVE))

    def all_gather(self, _instruction: Instruction, members: list[Member], _step: int) -> None:
        """Make the views of all members whole."""
        collectives.all_gather(members, self.kernels, self.scratch_of(members[0][0], Engine.COLLECTIVE))

    def all_reduce(self, instruction: Instruction, members: list[Member], _step: int) -> None:
        """Sum gradients on all members: of the replicas, or of both ends."""
        ends = Group(instruction.group) is Group.ENDS
        reduce = collectives.all_reduce_ends if ends else collectives.all_reduce_replicas
        reduce(members, self.kernels, self.scratch_of(members[0][0], Engine.COLLECTIVE))

    def all_reduce_scalar(self, instruction: Instruction, members: list[Member], step: int) -> None:
        """Combine losses, norms or flags."""
        match Quantity(instruction.variant):
            case Quantity.LOSS:
                self.losses[step] = collectives.total_loss(members)
            case Quantity.NORM:
                self.norms[step] = collectives.gradient_norm(members) / self.loss_scale[0]
            case Quantity.FLAGS:
                collectives.any_flag(members)

    def enter(self, phase: RankPhase, step: int) -> None:
        """Say for all ranks of this process what they do as a whole."""
        for position in (rank.position for ranks in self.ranks for rank in ranks if rank.position is not None):
            position.enter(phase, step)

    def positions(self) -> list[RankPosition]:
        """Where the ranks of this process are, while none of their instructions runs."""
        now = time.time()
        found = []
        for number, rank in enumerate(rank for ranks in self.ranks for rank in ranks):
            engines = {engine: EnginePosition(rank.completed[engine], running=False, since=now) for engine in ENGINES}
            place = (number, rank.stage_index, rank.replica, os.getpid(), socket.gethostname())
            found.append(RankPosition(*place, RankPhase.RUNNING, self.step, now, now, 0.0, engines))
        return found

    def _hang(self, limit: int) -> None:
        del limit
        found = diagnose(self.program, self.positions(), time.time(), lambda _: Liveness.ALIVE)
        text = f"the program hangs: {'; '.join(cause.text for cause in found.causes)}"
        fail("RT093", text, notes=[Note(line) for line in (*found.ranks, found.verdict)])


_Alone: TypeAlias = Callable[[LocalEngine, Rank, "Instruction", int], None]
_Together: TypeAlias = Callable[[LocalEngine, "Instruction", "list[Member]", int], None]

_ALONE: PerOp[_Alone] = PerOp(
    "execution by one rank",
    {
        **dict.fromkeys(ops.BLOCK_OPS, LocalEngine.call_routine),
        ops.LoadInput: LocalEngine.load_input,
        ops.Send: LocalEngine.send,
        ops.Recv: LocalEngine.receive,
        ops.Update: LocalEngine.update,
        ops.ScaleUpdate: LocalEngine.update_scale,
    },
    never=(*ops.COLLECTIVE_OPS, ops.Release),
)

_TOGETHER: PerOp[_Together] = PerOp(
    "execution by the members of a group",
    {
        ops.ReduceScatter: LocalEngine.reduce_scatter,
        ops.AllReduce: LocalEngine.all_reduce,
        ops.AllGather: LocalEngine.all_gather,
        ops.AllReduceScalar: LocalEngine.all_reduce_scalar,
    },
    never=ops.LONE_OPS,
)


def scratch_bytes(program: Program, kernels: KernelSet) -> int:
    """Scratch that a kernel set needs for the largest step of a program."""
    routines = max((routine_scratch_bytes(routine, kernels) for routine in program.routines), default=0)
    return max(routines, Updater(program, kernels).scratch_bytes())


def _check_memory(program: Program, places: frozenset[tuple[int, int]]) -> None:
    """Refuse arenas that this machine cannot hold, before the system kills the process for it."""
    needed = sum(program.stages[stage].arena_bytes for stage, _ in places)
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        which = "all " if len(places) == program.plan.clusters else ""
        fail(
            "RT093",
            f"{which}{len(places)} ranks in one process need arenas of {needed} bytes; this machine has {present}",
            help="'ratrainc simulate' times the program without executing it; a smaller model or plan can be run here",
        )
