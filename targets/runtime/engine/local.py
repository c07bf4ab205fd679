"""Local engine: all ranks of a job in one process, one instruction at a time, deterministic.

In a loop it visits the heads of all (rank, engine) streams in a fixed order and runs each engine as far as it is ready:

    until all streams are done:
        for each head: while its instruction is ready: run it
        nothing ran and work is left: the program hangs, report who waits for whom

This ends for every program that verifies. With an interleaving seed it picks one ready head at random instead: every
order that the waits allow gives the same bytes. A send copies its message out of the arena into transport memory, and
its receive copies it in. A collective runs once for all members, when it is at the head of each one's engine. Cost:
O(heads) for a round that runs nothing.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeAlias

from attrs import define, frozen

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.ops.base import ENGINES, Direction, Engine, Group, Quantity
from ratrain.ratrain_ir.ops.collectives import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    CombineLoss,
    GatherRows,
    ReduceRows,
    ReduceScatter,
    ReduceSums,
)
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.context_ranks import GatherHeads, GatherKeys, ReduceKeys, ReturnHeads
from ratrain.ratrain_ir.ops.expert_ranks import Combine, Dispatch
from ratrain.ratrain_ir.ops.kinds import LONE_OPS, OP_CLASSES
from ratrain.ratrain_ir.ops.messages import DonorAccept, DonorReturn, PeerOffload, PeerReload, Recv, Send, engines_of
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.ratrain_ir.support.diagnostics import Note, fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.runtime.arena.streams import Graph, Order
from ratrain.targets.runtime.engine import collectives, expert_exchanges, tensor_collectives
from ratrain.targets.runtime.engine.certificate import certificate
from ratrain.targets.runtime.engine.channels import Channels
from ratrain.targets.runtime.engine.engine import ProgramEngine, StepTotals, StreamHead
from ratrain.targets.runtime.engine.optimizer import update_scratch_bytes
from ratrain.targets.runtime.engine.rank import RankExecutor
from ratrain.targets.runtime.watch.liveness import Liveness
from ratrain.targets.runtime.watch.positions import EnginePosition, RankPhase, RankPosition
from ratrain.targets.runtime.watch.postmortem import diagnose

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Rank
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.data.data import Batches
    from ratrain.targets.runtime.engine.collectives import Member
    from ratrain.targets.runtime.engine.profile import Concurrency
    from ratrain.targets.runtime.kernels import KernelSet, Scratch


class LocalEngine(ProgramEngine):
    """Engine that runs all of a program's ranks in this process, one instruction at a time."""

    concurrency: ClassVar[Concurrency] = "ordered"
    process_pool: ClassVar[bool] = False
    """True if each engine of each rank has a thread."""

    def __init__(
        self, program: Program, kernels: KernelSet, batches: Batches, *, interleave_seed: int | None = None
    ) -> None:
        self._scratches: dict[tuple[int, int, Engine], Scratch] = {}
        # Before the base constructor, which asks for `needed_bytes` before it allocates anything.
        self.certificate = certificate(program, kernels, process_pool=self.process_pool)
        super().__init__(program, kernels, batches, program.topology.ranks)
        if self.overlaps:
            for rank in (rank for ranks in self.ranks for rank in ranks):  # allocate all scratch before the first step
                self.scratch_of(rank, Engine.COLLECTIVE)
                self.scratch_of(rank, Engine.HOST)
                if program.plan.tp > 1 or program.plan.cp > 1:
                    self.scratch_of(rank, Engine.TENSOR)
        self.choice = random.Random(interleave_seed) if interleave_seed is not None else None  # noqa: S311
        self.channels = Channels(kernels.memory)
        self._reserve_messages()
        self.order = kernels.memory.order()
        self.repeated: RepeatedStep | None = None

    @property
    def overlaps(self) -> bool:
        """True if instructions of several engines may run at the same time, by threads or on an asynchronous device."""
        return self.process_pool or self.kernels.memory.overlaps

    def scratch_of(self, rank: RankExecutor, engine: Engine) -> Scratch:
        """Return the scratch for an engine's kernels; where engines overlap, each one has its own."""
        # The first rank's compute engine takes the scratch that the base constructor has made.
        if not self.overlaps or (engine is Engine.COMPUTE and rank is self.ranks[0][0]):
            return self.scratch
        key = rank.stage_index, rank.lane, engine
        if key not in self._scratches:
            made: Scratch = self.kernels.memory.scratch(self._scratch_capacity(engine))
            self._scratches[key] = made
        return self._scratches[key]

    def _scratch_capacity(self, engine: Engine) -> int:
        if engine is Engine.COMPUTE:
            return self.scratch.capacity
        needed = tensor_collectives.exchange_scratch_bytes if engine is Engine.TENSOR else update_scratch_bytes
        return needed(self.program, self.kernels)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch of the process."""
        return self.scratch.capacity + sum(scratch.capacity for scratch in self._scratches.values())

    @property
    def description(self) -> str:
        """Place where the ranks run, in words."""
        count = self.program.plan.clusters
        return f"{number_of(count, 'rank')} in this process"

    def needed_bytes(self, places: Sequence[Rank]) -> int:  # noqa: ARG002
        """Return the certificate's total."""
        return self.certificate.total_bytes

    def declared_constants(self) -> dict[str, int]:
        """Return the certificate's constants, by purpose."""
        return dict(self.certificate.constants)

    def expect_evaluation(self) -> None:
        """Reserve memory for the messages of evaluation passes too."""
        super().expect_evaluation()
        self.certificate = certificate(self.program, self.kernels, evaluates=True, process_pool=self.process_pool)
        self._reserve_messages()

    def _reserve_messages(self) -> None:
        """Allocate memory for all messages that can be in transit at once, before the first step."""
        most = self.certificate.messages
        for rank in (rank for ranks in self.ranks for rank in ranks):
            streams = rank.stage.streams
            sends = (item for stream in streams.values() for item in stream if item.direction is Direction.OUT)
            for instruction in sends:
                for operand in instruction.carried:
                    kind = rank.stage.tensors[operand.tensor].type
                    self.channels.reserve(rank.views[operand.tensor], most.get((kind.dtype, kind.shape), 0))

    @property
    def peak_transport_bytes(self) -> int:
        """Peak bytes of messages in transit."""
        return self.channels.peak_nbytes

    def step_totals(self, step: int) -> StepTotals:
        """Return the sums over the ranks for the step that has just ended."""
        skipped, norm = self.updater.log.skipped, self.updater.gradient_norm()
        seconds, experts = self.compute_times.seconds, self.expert_loads.summary()
        return StepTotals(self.evaluated_loss(step), skipped, norm, self.residence(), seconds, experts)

    def evaluated_loss(self, step: int) -> float:
        """Return the sum of losses of the pass that has just ended."""
        del step
        loss = self.updater.log.loss
        assert loss is not None  # every program sums it
        return loss

    def capture_steps(self) -> None:
        """Record one step on the device and replay it from then on. Raises `DiagnosticError` RT093 if impossible."""
        if not self.order.captures:
            self.refuse_capture(f"its arenas are on '{self.kernels.memory.place}', not on a device of CUDA")
        if any(stage.bytes_in(Home.FILE) for stage in self.program.stages):
            self.refuse_capture("its host reads and writes files meanwhile")
        if self.choice is not None:
            self.refuse_capture("an order that is drawn at random is another one in every step")
        if self.monitor is not None or self.profile is not None:
            self.refuse_capture("each instruction is watched, and none is started by itself in a step that is repeated")
        self.repeated = RepeatedStep(self.order)

    def run_until(self, limit: int) -> None:
        """Run until every engine has completed its stream `limit` times."""
        if self.repeated is None or self.evaluated is not None:
            self._issue_until(limit)
        elif self.repeated.graph is None:
            self.repeated.issue(lambda: self._issue_until(limit))
        else:
            self._repeat(self.repeated.graph)
        self.order.synchronize()

    def _repeat(self, graph: Graph) -> None:
        """Replay a step's graph: all engines begin it together, and complete it together."""
        # Updates are inside the graph: from here to the end of the replay, state is between two steps.
        self.has_whole_state = False
        for head in self.heads:
            if head.rank.position is not None:
                head.rank.position.begin(head.engine)
        graph.replay()
        self.order.synchronize()
        for head in self.heads:
            head.rank.completed[head.engine] += len(head.stream)
            if head.rank.position is not None:
                head.rank.position.complete(head.engine)

    def _issue_until(self, limit: int) -> None:
        """Issue all instructions until every engine has completed its stream `limit` times."""
        with self.order.joined():
            while True:
                ran, unfinished = (self._round if self.choice is None else self._random_pick)(limit)
                if not unfinished:
                    return
                # A whole round without progress: only a completed instruction can make another one ready, so none ever
                # will be.
                if not ran:
                    self.fail_as_hanging()

    def _round(self, limit: int) -> tuple[bool, bool]:
        """Visit every head once, running each engine as far as it goes; return (anything ran, work is left)."""
        ran = unfinished = False
        for head in self.heads:
            while self._try_run(head, limit):
                ran = True
            unfinished |= head.has_work(limit)
        return ran, unfinished

    def _random_pick(self, limit: int) -> tuple[bool, bool]:
        """Run one ready head, chosen at random; return (anything ran, work is left)."""
        assert self.choice is not None
        working = [head for head in self.heads if head.has_work(limit)]
        self.choice.shuffle(working)
        # `any` stops at the first head that ran.
        return any(self._try_run(head, limit) for head in working), bool(working)

    def _try_run(self, head: StreamHead, limit: int) -> bool:
        """Run the head's instruction if it is ready; return True if it ran."""
        members = self.ready(head, limit)
        if not members:
            return False
        step = self.step_of(head)
        for rank, instruction in members:
            self.begin(rank, head.engine, instruction)
        self.issue(members, head.engine, step)
        for rank, instruction in members:
            self.complete(rank, head.engine, instruction)
        return True

    def issue(self, members: list[Member], engine: Engine, step: int) -> None:
        """Issue an instruction, or a collective of all its members, that is ready."""
        (rank, instruction), *_ = members
        # An evaluation skips some messages: these have no bytes to order, and the receive may even come before the
        # send.
        is_message = instruction.ends(rank.stage_index) is not None and self.is_executed(instruction)
        hop = self.hop(rank, instruction) if is_message else None
        issues = [member.issue(engine, mine) for member, mine in members]
        with self.order.issuing(issues, hop, sends=instruction.direction is Direction.OUT):
            self.execute(members, step)

    def step_of(self, head: StreamHead) -> int:
        """Return the step, over the whole training, of a head's instruction."""
        _, step = head.next_instruction()
        return step + self.first_step

    def ready(self, head: StreamHead, limit: int) -> list[Member]:
        """Return the members that execute the head's instruction if it can run; otherwise an empty list.

        Members are the rank alone, or all ranks of a collective.
        """
        if not head.has_work(limit):
            return []
        instruction, step = head.next_instruction()
        if not head.rank.is_ready(instruction, step):
            return []
        return _EXECUTIONS[instruction.keyword].ready(self, head.rank, instruction, step)

    def ready_alone(self, rank: RankExecutor, instruction: Instruction, _step: int) -> list[Member]:
        """Return the rank alone: its instruction waits for no other rank."""
        return [(rank, instruction)]

    def ready_to_receive(self, rank: RankExecutor, instruction: Instruction, _step: int) -> list[Member]:
        """Return the rank alone if its message has arrived or is skipped; otherwise an empty list."""
        parts = len(instruction.carried)
        awaits_message = self.is_executed(instruction)
        if awaits_message and not self.channels.has_message(self.hop(rank, instruction), rank.lane, parts):
            return []
        return [(rank, instruction)]

    def ready_to_meet(self, rank: RankExecutor, instruction: Instruction, step: int) -> list[Member]:
        """Return the rank alone if the message's receive is at its engine's head and ready; else an empty list.

        Sent only when it can be received at once, a message of an activation offload occupies transport memory for a
        moment, and a channel never holds two.
        """
        if not self.is_executed(instruction):
            return [(rank, instruction)]
        hop = self.hop(rank, instruction)
        partner = self.ranks[hop.target][rank.lane]
        head = partner.head(engines_of(hop.channel.payload)[1])
        if head is None or head[1] != step or not partner.is_ready(*head):
            return []
        met = head[0].hop(hop.target, self.program.topology) == hop
        return [(rank, instruction)] if met and not self.channels.has_message(hop, rank.lane) else []

    def ready_members(self, rank: RankExecutor, instruction: Instruction, step: int) -> list[Member]:
        """Return all members of a collective in rank order if each has it at its head and ready; else an empty list."""
        members: list[Member] = []
        engine = OP_CLASSES[instruction.keyword].default_engine
        for place in self.program.topology.members(Group(instruction.group), rank.place):
            member = self.ranks[place.stage][self.program.topology.lane(place)]
            head = member.head(engine)
            # Members on other stages name other blocks: compare the rest.
            if head is None or head[0].title_without_blocks != instruction.title_without_blocks:
                return []
            # The same instruction of another step is another collective: a member may be a step behind.
            if head[1] != step or not member.is_ready(*head):
                return []
            members.append((member, head[0]))
        return members

    def execute(self, members: list[Member], step: int) -> None:
        """Run a ready instruction, or collective of its members; `step` is counted over the whole training."""
        instruction = members[0][1]
        if self.is_executed(instruction):
            _EXECUTIONS[instruction.keyword].run(self, members, step)

    def run_one(self, members: list[Member], step: int) -> None:
        """Run an instruction of one rank alone."""
        rank, instruction = members[0]
        self.run_alone(rank, instruction, step)

    def send(self, members: list[Member], _step: int) -> None:
        """Copy a message out of the arena."""
        rank, instruction = members[0]
        self.channels.send(self.hop(rank, instruction), rank.lane, rank.carried_by(instruction))

    def receive(self, members: list[Member], _step: int) -> None:
        """Copy a message that has arrived into the arena."""
        rank, instruction = members[0]
        self.channels.receive(self.hop(rank, instruction), rank.lane, rank.carried_by(instruction))

    def reduce_scatter(self, members: list[Member], _step: int) -> None:
        """Reduce gradients into the shards of all members."""
        scratch = self.scratch_of(members[0][0], Engine.COLLECTIVE)
        collectives.reduce_scatter(members, self.kernels, self.updater.scalars, scratch)

    def all_gather(self, members: list[Member], _step: int) -> None:
        """Gather the views of all members."""
        collectives.all_gather(members, self.kernels, self.scratch_of(members[0][0], Engine.COLLECTIVE))

    def all_reduce(self, members: list[Member], _step: int) -> None:
        """Sum gradients on all members: over replicas, over both ends, or over tensor-parallel ranks."""
        rank, instruction = members[0]
        reduce = _ALL_REDUCES[Group(instruction.group)]
        reduce(members, self.kernels, self.updater.scalars, self.scratch_of(rank, Engine.COLLECTIVE))

    def gather_rows(self, members: list[Member], _step: int) -> None:
        """Gather an activation on all tensor-parallel ranks."""
        tensor_collectives.gather_rows(members, self.kernels)

    def reduce_rows(self, members: list[Member], _step: int) -> None:
        """Sum the partial activations of tensor-parallel ranks."""
        scratch = self.scratch_of(members[0][0], Engine.TENSOR)
        tensor_collectives.reduce_rows(members, self.updater.scalars, scratch)

    def gather_keys(self, members: list[Member], _step: int) -> None:
        """Gather the keys and values of all context ranks."""
        tensor_collectives.gather_keys(members, self.kernels)

    def reduce_keys(self, members: list[Member], _step: int) -> None:
        """Sum the context ranks' parts of the gradients of keys and values."""
        scratch = self.scratch_of(members[0][0], Engine.TENSOR)
        tensor_collectives.reduce_keys(members, self.updater.scalars, scratch)

    def gather_heads(self, members: list[Member], _step: int) -> None:
        """Exchange the tokens of context ranks for shares of the heads."""
        tensor_collectives.gather_heads(members, self.kernels)

    def return_heads(self, members: list[Member], _step: int) -> None:
        """Exchange the context ranks' shares of the heads for tokens."""
        scratch = self.scratch_of(members[0][0], Engine.TENSOR)
        tensor_collectives.return_heads(members, self.kernels, self.updater.scalars, scratch)

    def dispatch(self, members: list[Member], _step: int) -> None:
        """Bring rows to the expert ranks that compute them."""
        expert_exchanges.dispatch(members)

    def combine(self, members: list[Member], _step: int) -> None:
        """Bring computed rows back from expert ranks."""
        scratch = self.scratch_of(members[0][0], Engine.TENSOR)
        expert_exchanges.combine(members, self.updater.scalars, scratch)

    def combine_loss(self, members: list[Member], _step: int) -> None:
        """Combine the tensor-parallel ranks' parts of a micro-batch's loss."""
        scratch = self.scratch_of(members[0][0], Engine.TENSOR)
        tensor_collectives.combine_loss(members, self.updater.scalars, scratch)

    def all_reduce_scalar(self, members: list[Member], _step: int) -> None:
        """Combine losses, norms, flags or counts of experts' tokens."""
        scalars, scratch = self.updater.scalars, self.scratch_of(members[0][0], Engine.COLLECTIVE)
        match Quantity(members[0][1].variant):
            case Quantity.LOSS if members[0][0].place.peer:
                pass  # tensor-parallel ranks all have it; the step's loss is one number, which the first of them writes
            case Quantity.LOSS:
                collectives.total_loss(members, scalars, scratch)
            case Quantity.NORM:
                collectives.gradient_norm(members, scalars, scratch)
            case Quantity.FLAGS:
                collectives.any_flag(members, scalars)
            case Quantity.COUNTS:
                self.has_whole_state = False
                collectives.move_biases(members, scalars, scratch)

    def positions(self) -> list[RankPosition]:
        """Return the positions of this process's ranks; none of their instructions may be running."""
        now = time.time()
        positions = []
        for number, rank in enumerate(rank for ranks in self.ranks for rank in ranks):
            engines = {engine: EnginePosition(rank.completed[engine], running=False, since=now) for engine in ENGINES}
            place = (number, *rank.place, os.getpid(), socket.gethostname())
            positions.append(RankPosition(*place, RankPhase.RUNNING, self.step, now, now, 0.0, engines))
        return positions

    def fail_as_hanging(self) -> NoReturn:
        """Raise `DiagnosticError` RT093 that says who waits for whom, because nothing will ever be ready."""
        # All ranks are in this process and nothing runs: positions are exact, and the program alone is at fault.
        diagnosis = diagnose(self.program, self.positions(), time.time(), lambda _: Liveness.ALIVE)
        text = f"the program hangs: {'; '.join(cause.text for cause in diagnosis.causes)}"
        fail("RT093", text, notes=[Note(line) for line in (*diagnosis.ranks, diagnosis.verdict)])


_Ready: TypeAlias = Callable[[LocalEngine, RankExecutor, "Instruction", int], "list[Member]"]
"""Function (engine, rank, instruction, step) -> members that execute an instruction whose waits are over, or none
yet. The step is counted from the engine's first."""
_Run: TypeAlias = Callable[[LocalEngine, "list[Member]", int], None]


@frozen
class _Execution:
    """Readiness and execution of a kind of op among the ranks of one process."""

    ready: _Ready
    run: _Run


_ALL_REDUCES = {
    Group.REPLICAS: collectives.all_reduce_replicas,
    Group.ENDS: collectives.all_reduce_ends,
    **dict.fromkeys((Group.TENSOR, Group.EXPERTS), tensor_collectives.all_reduce_shared),
    Group.COPIES: collectives.all_reduce_replicas,
}

_EXECUTIONS: PerOp[_Execution] = PerOp(
    "execution in one process",
    {
        **dict.fromkeys(LONE_OPS, _Execution(LocalEngine.ready_alone, LocalEngine.run_one)),
        Send: _Execution(LocalEngine.ready_alone, LocalEngine.send),
        Recv: _Execution(LocalEngine.ready_to_receive, LocalEngine.receive),
        **dict.fromkeys((PeerOffload, DonorReturn), _Execution(LocalEngine.ready_to_meet, LocalEngine.send)),
        **dict.fromkeys((DonorAccept, PeerReload), _Execution(LocalEngine.ready_to_receive, LocalEngine.receive)),
        ReduceScatter: _Execution(LocalEngine.ready_members, LocalEngine.reduce_scatter),
        AllReduce: _Execution(LocalEngine.ready_members, LocalEngine.all_reduce),
        AllGather: _Execution(LocalEngine.ready_members, LocalEngine.all_gather),
        AllReduceScalar: _Execution(LocalEngine.ready_members, LocalEngine.all_reduce_scalar),
        GatherRows: _Execution(LocalEngine.ready_members, LocalEngine.gather_rows),
        GatherKeys: _Execution(LocalEngine.ready_members, LocalEngine.gather_keys),
        ReduceKeys: _Execution(LocalEngine.ready_members, LocalEngine.reduce_keys),
        GatherHeads: _Execution(LocalEngine.ready_members, LocalEngine.gather_heads),
        ReturnHeads: _Execution(LocalEngine.ready_members, LocalEngine.return_heads),
        Dispatch: _Execution(LocalEngine.ready_members, LocalEngine.dispatch),
        Combine: _Execution(LocalEngine.ready_members, LocalEngine.combine),
        **dict.fromkeys((ReduceRows, ReduceSums), _Execution(LocalEngine.ready_members, LocalEngine.reduce_rows)),
        CombineLoss: _Execution(LocalEngine.ready_members, LocalEngine.combine_loss),
    },
    never=(Release,),
)


WARM_UP_STEPS = 3
"""Steps before the recorded one, in which libraries load and allocate: as many as
`torch.cuda.make_graphed_callables` takes."""


@define(eq=False)
class RepeatedStep:
    """Recorder of a step: runs some steps, records the next one, and keeps its graph."""

    order: Order
    issued: int = 0
    graph: Graph | None = None

    def issue(self, issue: Callable[[], None]) -> None:
        """Run a step whose instructions `issue` issues: directly, or by recording and replaying it."""
        if self.issued < WARM_UP_STEPS:
            self.issued += 1
            issue()
            return
        self.graph = self.order.graph(issue)
        self.graph.replay()
