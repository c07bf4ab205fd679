"""The engine of one rank: this process runs one rank of the job, and reaches the others through communicators.

    loop:  for each engine, communicating ones first:
               advance its requests, or start its next instruction if its waits are met
           nothing moved: sleep until a request is done

One thread makes all calls of the library. Communication starts as soon as its waits allow, as non-blocking requests
straight from and into the arena; requests are tested between two compute instructions. Each engine keeps its own order,
so any order of completion gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
from attrs import define
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import Dtype, StateKind
from ratrain.ratrain_ir.ops.base import Quantity
from ratrain.ratrain_ir.ops.collectives import STATE_OPS, TENSOR_OPS
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import LONE_OPS
from ratrain.ratrain_ir.ops.messages import DonorAccept, DonorReturn, PeerOffload, PeerReload, Recv, Send
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.program.instruction import Instruction
from ratrain.targets.runtime.arena.process_memory import Residence
from ratrain.targets.runtime.engine.engine import ProgramEngine, StepTotals, StreamHead
from ratrain.targets.runtime.engine.expert_loads import ExpertLoad
from ratrain.targets.runtime.engine.rank import shape_only
from ratrain.targets.runtime.ranks.collectives import GroupCollectives, Phases
from ratrain.targets.runtime.ranks.communicator import Request
from ratrain.targets.runtime.ranks.stragglers import Stragglers
from ratrain.targets.runtime.ranks.tensor_collectives import TensorCollectives
from ratrain.targets.runtime.ranks.waiting import VISITED, all_done, finish, wait_until

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Engine
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.data.data import Batches
    from ratrain.targets.runtime.kernels import KernelSet
    from ratrain.targets.runtime.ranks.communicator import Buffer
    from ratrain.targets.runtime.ranks.communicators import Communicators
    from ratrain.targets.runtime.ranks.rank_layout import Reduction


@define(eq=False)
class _UnderWay:
    """An instruction with requests that are not all done."""

    instruction: Instruction
    phases: Phases
    requests: Sequence[Request] = ()

    def is_complete(self) -> bool:
        """Advance through all phases whose requests are done; return True after the last."""
        while all_done(self.requests):
            try:
                self.requests = next(self.phases)
            except StopIteration:
                return True
        return False


class RankEngine(ProgramEngine):
    """The engine of this process's rank of a program; other ranks are reached through the communicators."""

    concurrency = "processes"

    def __init__(
        self,
        program: Program,
        kernels: KernelSet,
        batches: Batches,
        communicators: Communicators,
        *,
        reduction: Reduction = "ordered",
        library: str,
    ) -> None:
        self.communicators = communicators
        self.reduction = reduction
        self.library = library
        """Name of the library that moves the bytes, for messages."""
        if program.peer_memory_senders and not communicators.pipeline.tagged:
            text = (
                f"the program keeps activations with other stages, and messages over {library} have no tags "
                "to tell theirs apart"
            )
            fail("RT093", text, help="run it over MPI or gloo, or compile it without 'store=peer'")
        super().__init__(program, kernels, batches, [communicators.place])
        self.order = kernels.memory.order()
        (self.rank,) = self.ranks[communicators.place.stage]
        scalars, peers, contexts = self.updater.scalars, communicators.peers, communicators.contexts
        self.collectives = GroupCollectives(self.rank, communicators, kernels, scalars, self.scratch, reduction)
        self.exchanges = None
        experts = communicators.experts
        if peers is not None or contexts is not None or experts is not None:
            self.exchanges = TensorCollectives(self.rank, peers, contexts, experts, kernels, scalars, self.scratch)
        """With its tensor-parallel, context or expert ranks."""
        # the order in which `run_until` visits the engines: communication first
        self.heads.sort(key=lambda head: VISITED.index(head.engine))
        self.under_way: dict[Engine, _UnderWay] = {}
        self.stop_asked: Callable[[], int] = lambda: 0
        self.stop_agreed = 0
        """Number of the signal that asked any process to end before its last step ended, or 0: the same on all ranks.
        """
        self.stragglers = Stragglers(program.topology)

    def scratch_needed(self) -> int:
        """Return the scratch bytes, including float32 copies of gradients if the library sums them."""
        most = super().scratch_needed()
        if self.reduction == "ordered":
            return most
        for tensor in (tensor for stage in self.program.stages for tensor in stage.tensors):
            if tensor.kind is StateKind.GRAD:
                whole = shape_only(tensor.type.dtype, (tensor.type.elements,))
                copy = shape_only(Dtype.F32, whole.shape)
                most = max(most, self.kernels.scratch_bytes("cast", src=whole, dst=copy))
        return most

    @property
    def description(self) -> str:
        """Name of the place where the ranks run, for messages."""
        return f"{number_of(self.program.plan.clusters, 'rank')} over {self.library}; process 0 prints"

    @property
    def peak_transport_bytes(self) -> int:
        """Bytes of the buffers in which gradients and sums of other ranks arrive."""
        exchanges = 0 if self.exchanges is None else self.exchanges.staging.capacity
        return self.collectives.staging.capacity + self.collectives.squares.nbytes + exchanges

    def agreed_stop(self, asked: Callable[[], int]) -> Callable[[], int]:
        """Return the question that the run asks between steps: the signal that all ranks have agreed on, or 0.

        `asked` tells the signal that this process got. Ranks exchange it with the totals of a step, so all end after
        the same step.
        """
        self.stop_asked = asked
        return lambda: self.stop_agreed

    def run_until(self, limit: int) -> None:
        """Run until every engine of this process's rank has completed its stream `limit` times."""
        while any(head.has_work(limit) for head in self.heads):
            moved = False
            for head in self.heads:
                moved |= self._advance(head, limit)
            if moved:
                continue
            # nothing moved and no request is open, so nothing can ever change
            if not self.under_way:
                self._hang(limit)
            wait_until(self._any_goes_on)
        self.order.synchronize()

    def _advance(self, head: StreamHead, limit: int) -> bool:
        """Complete the engine's instruction under way, or start its next one; return whether anything happened."""
        under_way = self.under_way.get(head.engine)
        if under_way is not None:
            if not under_way.is_complete():
                return False
            del self.under_way[head.engine]
            self.complete(self.rank, head.engine, under_way.instruction)
            return True
        if not head.has_work(limit):
            return False
        instruction, step = head.next_instruction()
        # `is_ready` looks at this rank's engines only: what other ranks do is known through requests
        if not self.rank.is_ready(instruction, step):
            return False
        self.begin(self.rank, head.engine, instruction)
        if not self.is_executed(instruction):
            self.complete(self.rank, head.engine, instruction)
            return True
        phases = self.phases(instruction)
        if phases is not None:
            self.under_way[head.engine] = _UnderWay(instruction, phases)
            self._advance(head, limit)  # posts its first requests
            return True
        self.run_alone(self.rank, instruction, step + self.first_step)
        self.complete(self.rank, head.engine, instruction)
        return True

    def _any_goes_on(self) -> bool:
        """Return whether any instruction under way has all its requests done."""
        return any(all_done(each.requests) for each in self.under_way.values())

    def phases(self, instruction: Instruction) -> Phases | None:
        """Return the requests of an instruction that communicates; None for others."""
        start = _PHASES[instruction.keyword]
        return None if start is None else start(self, instruction)

    def send(self, instruction: Instruction) -> Phases:
        """Send a message from the arena."""
        return self._message(instruction, self.communicators.pipeline.isend)

    def receive(self, instruction: Instruction) -> Phases:
        """Receive a message into the arena."""
        return self._message(instruction, self.communicators.pipeline.irecv)

    def _message(self, instruction: Instruction, post: Callable[[Buffer, int, int], Request]) -> Phases:
        """Post one message for each part of the arena that it carries, with the channel's number as tag."""
        tag = self.program.topology.channel_number(self.hop(self.rank, instruction).channel)
        assert instruction.peer is not None
        yield [post(part, instruction.peer, tag) for part in self.rank.carried_by(instruction)]

    def meet(self, instruction: Instruction) -> Phases:
        """Take part in a collective of parameters, gradients or scalars."""
        if instruction.variant == Quantity.COUNTS.value:  # it moves biases
            self.has_whole_state = False
        return self.collectives.start(instruction)

    def exchange(self, instruction: Instruction) -> Phases:
        """Exchange rows or losses with the tensor-parallel group."""
        assert self.exchanges is not None  # only ranks with peers have the instruction
        return self.exchanges.start(instruction)

    def _hang(self, limit: int) -> None:
        heads = [head for head in self.heads if head.has_work(limit)]
        titles = [head.next_instruction()[0].title for head in heads]
        fail(
            "RT093",
            f"{self.rank.name} waits for itself, before {', '.join(map(repr, titles))}: the program is at fault",
        )

    def step_totals(self, step: int) -> StepTotals:
        """Return the totals of a step over all ranks.

        Its all-gather is the only point where all ranks meet without an instruction of the program.
        """
        topology, squares = self.program.topology, self.updater.squares_of(self.rank.stage_index, self.rank.lane)
        held = self.residence() or Residence(0, 0)
        computed = float(self.compute_times.seconds[self.rank.stage_index, self.rank.lane])
        load = self.expert_loads.summary() or ExpertLoad(0.0, 0)
        mine = [
            self._own_loss(),
            self.updater.log.skipped,
            self.stop_asked(),
            computed,
            squares,
            held.peak,
            held.planned,
            load.busiest,
            *(load.idle, load.dropped, load.rows),
        ]
        losses, skipped, stops, seconds, all_squares, peaks, planned, *loads = self._of_all_ranks(mine)
        self.stop_agreed = int(stops.max())
        seconds = seconds.reshape(topology.stages, topology.lanes)
        # every rank looks, so that their states agree; only one prints
        for warning in self.stragglers.look(step, seconds):
            if self.communicators.world.rank == 0:
                self.tell(warning)
        norm = self.collectives.norm
        # without an instruction for the norm (no clipping) it comes from the squares that updates have summed
        if norm is None:
            norm = sqrt(sum(all_squares.tolist()))
        experts = ExpertLoad.of_all(
            ExpertLoad(float(busiest), *map(int, numbers)) for busiest, *numbers in zip(*loads, strict=True) if busiest
        )
        return StepTotals(self._loss_of(losses), int(skipped.sum()), norm, _fullest(peaks, planned), seconds, experts)

    def evaluated_loss(self, step: int) -> float:
        """Return the loss of the last pass, from the ranks of the last stage."""
        del step
        return self._loss_of(self._of_all_ranks([self._own_loss()])[0])

    def _loss_of(self, losses: NDArray[np.float64]) -> float:
        """Pick the last stage's loss out of the losses of all ranks."""
        return float(losses[self.program.topology.last_stage * self.program.topology.lanes])

    def _own_loss(self) -> float:
        """Return the last step's loss over all its tokens on ranks of the last stage; 0 on others."""
        return self.collectives.loss or 0.0

    def _of_all_ranks(self, values: list[float]) -> NDArray[np.float64]:
        """Gather some values of every rank, shape [values, ranks], in rank order."""
        everyone = np.empty((self.program.plan.clusters, len(values)))
        finish(self.communicators.world.iallgather(everyone, np.array(values, np.float64)))
        return everyone.T


def _fullest(peaks: NDArray[np.float64], planned: NDArray[np.float64]) -> Residence | None:
    """Return the process whose peak is the largest share of its planned bytes; None if a plan's bytes are unknown."""
    if not planned.all():
        return None
    fullest = int((peaks / planned).argmax())
    return Residence(int(peaks[fullest]), int(planned[fullest]))


_PHASES: PerOp[Callable[[RankEngine, Instruction], Phases] | None] = PerOp(
    "execution by ranks",
    {
        **dict.fromkeys(LONE_OPS, None),
        Send: RankEngine.send,
        Recv: RankEngine.receive,
        **dict.fromkeys((PeerOffload, DonorReturn), RankEngine.send),
        **dict.fromkeys((DonorAccept, PeerReload), RankEngine.receive),
        **dict.fromkeys(STATE_OPS, RankEngine.meet),
        **dict.fromkeys(TENSOR_OPS, RankEngine.exchange),
    },
    never=(Release,),
)
"""Communication of each instruction; None for those that a rank runs alone."""
