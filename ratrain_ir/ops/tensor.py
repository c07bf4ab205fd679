"""Tensors: named pieces of training state of one stage."""

from __future__ import annotations

from attrs import define, field

from ratrain.ratrain_ir.config.types import Home, StateKind, TensorType
from ratrain.ratrain_ir.ops.op_fields import UNTIMED


@define(eq=False, weakref_slot=False, repr=False)
class Tensor:
    """A named piece of training state of one stage, compared by identity.

    `carried` tensors live across the end of the step. `offset` is in bytes, from the start of the stage's part of the
    memory that is its `home`; None until it is allocated.
    """

    name: str = field(metadata=UNTIMED)
    kind: StateKind = field(metadata=UNTIMED)
    type: TensorType
    carried: bool = field(default=False, metadata=UNTIMED)
    offset: int | None = field(default=None, metadata=UNTIMED)
    line: int = field(default=0, metadata=UNTIMED)
    home: Home = Home.DDR

    @property
    def slot(self) -> str:
        """The last part of the name: for a saved tensor, the slot of its block."""
        return self.name.rpartition(".")[2]

    @property
    def role(self) -> str | StateKind:
        """The slot of a saved tensor, else the kind.

        The time of an op depends on a tensor's name and kind only through this.
        """
        return self.name.rpartition(".")[2] if self.kind is StateKind.SAVED else self.kind

    def __repr__(self) -> str:
        return f"%{self.name}"


Tensors = tuple[Tensor, ...]
