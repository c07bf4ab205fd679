"""A machine file as a target: workspace, engines and costs of ops, emission and simulated steps."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import StateKind, aligned
from ratrain.ratrain_ir.model.blocks import gathered_bits
from ratrain.ratrain_ir.ops.base import Engine, Group, Op
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, ReduceScatter
from ratrain.ratrain_ir.ops.compute import BlockOp, Update
from ratrain.ratrain_ir.ops.messages import MessageOp
from ratrain.ratrain_ir.ops.state_homes import LEAST_STAGING, STREAMS_OF_UPDATE, streamed_state
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.target import WorkspaceRequest
from ratrain.targets.codegen.emitter import emit
from ratrain.targets.codegen.routines import routine_of
from ratrain.targets.machine.capacity import capacity_of
from ratrain.targets.machine.machine import Machine
from ratrain.targets.machine.record import machine_info
from ratrain.targets.machine.registry import TARGETS
from ratrain.targets.machine.shared_gradients import most_shared
from ratrain.targets.machine.store_cost import Elsewhere
from ratrain.targets.machine.timing import TimedOp, message_seconds, op_work, timed_op
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.lifting import group_name
from ratrain.targets.simulator.figures import simulated

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage, TargetInfo
    from ratrain.ratrain_ir.target import Capacity
    from ratrain.targets.machine.link_groups import Link
    from ratrain.targets.program.routine import Routine


@frozen
class MachineTarget:
    """Implements `ratrain.ratrain_ir.target.Target` for a machine file. A target of its own overrides what it does differently."""

    machine: Machine

    @property
    def name(self) -> str:
        """Name of the machine file."""
        return self.machine.name

    def capacity(self, module: Module) -> Capacity:
        """The DDR of a cluster, and what is left of it for tensors.

        Raises `DiagnosticError` RT053 where that is nothing.
        """
        return capacity_of(self.machine, module.topology)

    def info(self, module: Module) -> TargetInfo:
        """What modules and programs carry of the machine.

        Raises `DiagnosticError` RT053 where it has no bytes left for tensors.
        """
        return evolve(self._machine_info, capacity_bytes=self.capacity(module).left)

    @cached_property
    def _machine_info(self) -> TargetInfo:
        """What every module carries of the machine, with all its memory."""
        return machine_info(self.machine)

    @property
    def update_engine(self) -> Engine:
        """Where updates run."""
        return self.machine.update_engine

    def routine(self, module: Module, op: BlockOp) -> Routine:
        """The routine of a block op."""
        return routine_of(op, module.model, module.plan)

    def workspace(self, module: Module, op: Op) -> WorkspaceRequest | None:
        """Intermediates of a routine; two staging chunks for a gradient reduction or a gather of what is packed, and for each tensor of state that streams."""
        if isinstance(op, BlockOp):
            routine = self.routine(module, op)
            return WorkspaceRequest(routine.key, routine.workspace_bytes)
        if isinstance(op, ReduceScatter) or (isinstance(op, AllReduce) and op.group is Group.REPLICAS):
            return self._staging_chunks
        streamed = streamed_state(op)
        if streamed and not self.machine.updates_in(streamed[0].home):
            kinds = STREAMS_OF_UPDATE if isinstance(op, Update) else 1
            most = 2 * kinds * self.machine.whole("collective_chunk")
            staging = max(LEAST_STAGING, min(most, aligned(sum(tensor.type.nbytes for tensor in streamed))))
            return WorkspaceRequest(f"state-{op.keyword}-{staging}", staging)
        if isinstance(op, AllGather) and any(
            gathered_bits(module.plan, block) is not None and read.kind is StateKind.MASTER
            for block, read in zip(op.blocks, op.reads, strict=True)
        ):
            return self._staging_chunks
        return None

    @property
    def _staging_chunks(self) -> WorkspaceRequest:
        """What a collective receives that has to be worked on arrives in one while the other is read; there is one at a time."""
        return WorkspaceRequest("grad-sync", 2 * self.machine.whole("collective_chunk"))

    def step_seconds(self, module: Module) -> float:
        """Seconds of a steady step of an allocated module, simulated.

        Raises `DiagnosticError` where the module cannot be emitted.
        """
        figures, _ = simulated(emit(module, self), self.machine)
        return figures.step_seconds

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        """Seconds of an op that runs alone."""
        return op_work(self.timed(module, stage, op), module.plan, self.machine).seconds

    def timed(self, module: Module, stage: Stage, op: Op) -> TimedOp:
        """What the time of an op depends on."""
        routine = self.routine(module, op) if isinstance(op, BlockOp) else None
        moved = [(t.kind, t.type, Access.READ) for t in op.reads]
        moved += [(t.kind, t.type, Access.WRITE) for t in op.writes]
        moved += [(t.kind, t.type, Access.UPDATE) for t in op.updates]
        hop = (stage.index, op.peer) if isinstance(op, MessageOp) else None
        elsewhere = Elsewhere.of((t.home, t.type) for t in op.operands)
        shared = None
        if isinstance(op, AllReduce) and op.group is Group.TENSOR:
            shared = most_shared(module.model, module.plan, op.blocks)
        return timed_op(op.keyword, group_name(op), op.engine, routine, moved, hop, elsewhere, shared)

    def message_seconds(self, nbytes: int, link: Link) -> float:
        """Seconds of a message between stages that has its link to itself."""
        return message_seconds(nbytes, link, self.machine)


def target_of(machine: Machine) -> MachineTarget:
    """The target that a machine file names, on that machine.

    Raises `DiagnosticError` RT072 where what is registered by its name is no target.
    """
    cls = TARGETS.load(machine.target)
    if not (isinstance(cls, type) and issubclass(cls, MachineTarget)):
        fail(
            "RT072",
            f"'{TARGETS.place(machine.target)}' is not a target: it is not a class derived from `MachineTarget` (ratrain.targets.target)",
        )
    return cls(machine)
