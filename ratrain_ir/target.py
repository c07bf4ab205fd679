"""What a pass may ask of a target: capacity, workspace, engines and costs. Each target implements this protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage, TargetInfo
    from ratrain.ratrain_ir.ops.base import Engine, Op


@frozen
class WorkspaceRequest:
    """Scratch one op needs. Ops with equal keys share one tensor: they never run at the same time on their engine."""

    key: str
    nbytes: int


@frozen
class Capacity:
    """The memory of a rank in bytes, and what takes some of it before any tensor has a place."""

    installed: int
    overheads: tuple[tuple[str, int], ...] = ()
    """by name; what takes nothing is not there"""

    @property
    def taken(self) -> int:
        """Bytes of overheads."""
        return sum(nbytes for _, nbytes in self.overheads)

    @property
    def left(self) -> int:
        """Bytes for tensors; nothing, where overheads take all or more."""
        return max(0, self.installed - self.taken)

    @property
    def account(self) -> str | None:
        """In words, what is taken of how much; None where nothing is."""
        if not self.overheads:
            return None
        taken = ", ".join(f"{name} {nbytes}" for name, nbytes in self.overheads)
        return f"{self.left} of {self.installed} bytes are left for tensors: before them come {taken}"


class Target(Protocol):
    """A machine as passes see it."""

    @property
    def name(self) -> str:
        """Name of the machine."""
        ...

    def capacity(self, module: Module) -> Capacity:
        """The DDR of a rank of any stage of a module, and what is left of it for tensors."""
        ...

    def info(self, module: Module) -> TargetInfo:
        """What a module that is made for this machine carries of it."""
        ...

    @property
    def update_engine(self) -> Engine:
        """Where `update` runs: compute or host."""
        ...

    def workspace(self, module: Module, op: Op) -> WorkspaceRequest | None:
        """The scratch an op's routine needs, or None; equal for block ops of equal likeness.

        Of any op it is equal for all that differ in micro-batch alone and whose operands have the same kinds, types, memories and saved slots.
        """
        ...

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        """Seconds the op takes on its engine when it runs alone: equal for ops of equal likeness (`ratrain.ratrain_ir.ops.likeness`)."""
        ...

    def step_seconds(self, module: Module) -> float:
        """Seconds of a steady step of an allocated module, simulated."""
        ...
