"""What a pass may ask of a target: capacity, workspace, engines and costs. Each target implements this protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage, TargetInfo
    from ratrain.ratrain_ir.ops import Engine, Op


@frozen
class WorkspaceRequest:
    """Scratch one op needs. Ops with equal keys share one tensor: they never run at the same time on their engine."""

    key: str
    nbytes: int


class Target(Protocol):
    """A machine as passes see it."""

    @property
    def name(self) -> str:
        """Name of the machine."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """DDR bytes one stage may use."""
        ...

    @property
    def info(self) -> TargetInfo:
        """What a module that is made for this machine carries of it."""
        ...

    @property
    def update_engine(self) -> Engine:
        """Where `update` runs: compute or host."""
        ...

    def workspace(self, module: Module, op: Op) -> WorkspaceRequest | None:
        """The scratch an op's routine needs, or None."""
        ...

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        """Seconds the op takes on its engine when it runs alone: equal for ops of equal likeness (`ratrain.ratrain_ir.likeness`)."""
        ...

    def step_seconds(self, module: Module) -> float:
        """Seconds of a steady step of an allocated module, simulated."""
        ...
