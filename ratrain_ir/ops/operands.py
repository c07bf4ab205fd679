"""Operands of ops by role: signatures, and the error of an op that does not fit its signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.types import StateKind, TensorType
    from ratrain.ratrain_ir.ops.tensor import Tensor


class Role(NamedTuple):
    """One operand: its role, the state kinds it may have, its type and, for a saved tensor, the name of its slot.

    It is a tuple because every operand of every op is compared with one, and unpacking a tuple is fast.
    """

    name: str
    kinds: frozenset[StateKind]
    type: TensorType
    optional: bool = False
    slot: str | None = None

    @property
    def kind(self) -> StateKind:
        """The state kind, of an operand that may have one alone."""
        (kind,) = self.kinds
        return kind


Roles = tuple[Role, ...]


@frozen
class Signature:
    """Roles of an op's operands, in the order in which the op lists them."""

    reads: Roles = ()
    writes: Roles = ()
    updates: Roles = ()


class SignatureError(ValueError):
    """Error of an operand that is missing, left over, or of the wrong kind or type.

    `tensor` is the one at fault, None if there is none.
    """

    def __init__(self, message: str, tensor: Tensor | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


Candidates = Sequence[tuple[bool, Signature]]
