"""The target of machine files: workspace, engines and costs of ops, emission of programs, simulated step times."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import StateKind, aligned
from ratrain.ratrain_ir.model.sharded_blocks import gathered_bits
from ratrain.ratrain_ir.model.slice_plan import plan_of_piece
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, reduces_over_replicas
from ratrain.ratrain_ir.ops.compute import BlockOp, Update
from ratrain.ratrain_ir.ops.messages import MessageOp
from ratrain.ratrain_ir.ops.state_homes import LEAST_STAGING, STREAMS_OF_UPDATE, staged_state
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.target import WorkspaceRequest
from ratrain.targets.codegen.emitter import emit
from ratrain.targets.codegen.routines import routine_of
from ratrain.targets.machine.capacity import capacity_of
from ratrain.targets.machine.machine import Machine
from ratrain.targets.machine.record import machine_info
from ratrain.targets.machine.registry import TARGETS
from ratrain.targets.machine.timing import TimedOp, op_work, timed_op
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.lifting import group_name
from ratrain.targets.simulator.figures import simulated

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage, TargetInfo
    from ratrain.ratrain_ir.ops.base import Engine, Op
    from ratrain.ratrain_ir.target import Capacity
    from ratrain.targets.program.routine import Routine


@frozen
class MachineTarget:
    """Implementation of `ratrain.ratrain_ir.target.Target` for a machine file; other targets derive from it."""

    usual_dtype: ClassVar[str] = "f16"
    """type of views and gradients of plans for the machine where nothing says another"""

    machine: Machine

    @property
    def name(self) -> str:
        """Name of the machine file."""
        return self.machine.name

    def capacity(self, module: Module) -> Capacity:
        """Return the DDR bytes of a cluster and the bytes of them that are left for tensors.

        Raises `DiagnosticError` RT053 where nothing is left.
        """
        return capacity_of(self.machine, module.topology)

    def info(self, module: Module) -> TargetInfo:
        """Return the facts of the machine that modules and programs carry, with the bytes left for tensors as capacity.

        Raises `DiagnosticError` RT053 where no bytes are left for tensors.
        """
        return evolve(self._machine_info, capacity_bytes=self.capacity(module).left)

    @cached_property
    def _machine_info(self) -> TargetInfo:
        """Facts of the machine that every module carries, with the whole memory as capacity."""
        return machine_info(self.machine)

    @property
    def update_engine(self) -> Engine:
        """Engine that runs optimizer updates."""
        return self.machine.update_engine

    def routine(self, module: Module, op: BlockOp) -> Routine:
        """Return the routine (the kernels) of a block op."""
        return routine_of(op, module.model, module.plan)

    def workspace(self, module: Module, op: Op) -> WorkspaceRequest | None:
        """Return the scratch bytes that an op needs, and a key that is equal for equal needs; None if it needs none.

        A block op needs its routine's intermediates. A gradient reduction, and a gather that packs its part, need two
        staging chunks. State that streams from another memory needs two chunks a tensor.
        """
        if isinstance(op, BlockOp):
            routine = self.routine(module, op)
            return WorkspaceRequest(routine.key, routine.workspace_bytes)
        if reduces_over_replicas(op):
            return self._staging_chunks
        streamed = staged_state(op)
        if streamed and not self.machine.updates_in(streamed[0].home):
            kinds = STREAMS_OF_UPDATE if isinstance(op, Update) else 1
            most = 2 * kinds * self.machine.whole("collective_chunk")
            staging = max(LEAST_STAGING, min(most, aligned(sum(tensor.type.nbytes for tensor in streamed))))
            return WorkspaceRequest(f"state-{op.keyword}-{staging}", staging)
        if (
            isinstance(op, AllGather)
            and any(gathered_bits(module.model, module.plan, block) is not None for block in op.blocks)
            and any(read.kind is StateKind.MASTER for read in op.reads)
        ):
            return self._staging_chunks
        return None

    @property
    def _staging_chunks(self) -> WorkspaceRequest:
        """Workspace of a collective that works on data as it arrives: one chunk is received while the other is read.

        Its key is shared, because one such collective runs at a time.
        """
        return WorkspaceRequest("grad-sync", 2 * self.machine.whole("collective_chunk"))

    def step_seconds(self, module: Module) -> float:
        """Simulate an allocated module and return the seconds of a steady step.

        Raises `DiagnosticError` where the module cannot be emitted.
        """
        figures, _ = simulated(emit(module, self), self.machine)
        return figures.step_seconds

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        """Return the seconds of an op that shares no resource with others."""
        return op_work(self.timed(module, stage, op), module.plan, self.machine).seconds

    def timed(self, module: Module, stage: Stage, op: Op) -> TimedOp:
        """Return everything that the time of an op depends on."""
        routine = self.routine(module, op) if isinstance(op, BlockOp) else None
        accesses = ((op.reads, Access.READ), (op.writes, Access.WRITE), (op.updates, Access.UPDATE))
        operands = [(tensor, access) for tensors, access in accesses for tensor in tensors]
        operands += [(tensor, Access.SCRATCH) for tensor in op.scratch]
        ends = (stage.index, op.peer) if isinstance(op, MessageOp) else None
        blocks = op.blocks if isinstance(op, AllReduce) else ()
        fields = op.keyword, group_name(op), op.engine
        plan = plan_of_piece(module.plan, getattr(op, "slice", None))
        return timed_op(module.model, plan, *fields, routine, operands, ends, blocks)


def target_of(machine: Machine) -> MachineTarget:
    """Return the target that a machine file names, on that machine.

    Raises `DiagnosticError` RT072 where the registered object is no subclass of `MachineTarget`.
    """
    cls = TARGETS.load(machine.target)
    if not (isinstance(cls, type) and issubclass(cls, MachineTarget)):
        fail(
            "RT072",
            f"'{TARGETS.place(machine.target)}' is not a target: it is not a class derived from `MachineTarget` "
            "(ratrain.targets.target)",
        )
    return cls(machine)
