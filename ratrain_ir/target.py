"""Questions that a pass may ask of a target: capacity, workspace, engines, costs.

Each target implements this protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage, TargetInfo
    from ratrain.ratrain_ir.ops.base import Engine, Op


@frozen
class WorkspaceRequest:
    """Scratch memory that one op needs. Ops with equal keys share one tensor: they never run at the same time."""

    key: str
    nbytes: int


@frozen
class Capacity:
    """Memory of a rank in bytes, and the overheads that take part of it before any tensor."""

    installed: int
    overheads: tuple[tuple[str, int], ...] = ()
    """(name, bytes) of each overhead that is not 0"""

    @property
    def taken(self) -> int:
        """Sum of the overheads in bytes."""
        return sum(nbytes for _, nbytes in self.overheads)

    @property
    def left(self) -> int:
        """Bytes for tensors; 0 if overheads take all or more."""
        return max(0, self.installed - self.taken)

    @property
    def account(self) -> str | None:
        """Sentence that lists the overheads and the bytes left; None without overheads."""
        if not self.overheads:
            return None
        taken = ", ".join(f"{name} {nbytes}" for name, nbytes in self.overheads)
        return f"{self.left} of {self.installed} bytes are left for tensors: before them come {taken}"


class Target(Protocol):
    """Machine as passes see it."""

    @property
    def name(self) -> str:
        """Name of the machine."""
        ...

    def capacity(self, module: Module) -> Capacity:
        """Return the DDR of one rank and its overheads; equal for all stages of a module."""
        ...

    def info(self, module: Module) -> TargetInfo:
        """Return the facts about this machine that a module compiled for it carries."""
        ...

    @property
    def update_engine(self) -> Engine:
        """Engine that runs `update`: compute or host."""
        ...

    def workspace(self, module: Module, op: Op) -> WorkspaceRequest | None:
        """Return the scratch memory that an op's routine needs, or None.

        Equal for block ops of equal likeness, and for any two ops that differ in micro-batch only and whose operands
        have the same kinds, types, memories and saved slots.
        """
        ...

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        """Return the seconds that an op takes on its engine when it runs alone.

        Equal for ops of equal likeness (`ratrain.ratrain_ir.ops.likeness`).
        """
        ...

    def step_seconds(self, module: Module) -> float:
        """Simulate an allocated module and return the seconds of a steady step."""
        ...
