"""Operands of ops by role: what a signature is, and what is wrong with an op that does not fit one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.types import StateKind, TensorType
    from ratrain.ratrain_ir.ops.tensor import Tensor


class Role(NamedTuple):
    """One operand: its role, the state kinds it may have, its type; saved slots are known by their name too.

    A tuple, because every operand of every op is held against one, and taking a tuple apart is quick.
    """

    name: str
    kinds: frozenset[StateKind]
    type: TensorType
    optional: bool = False
    slot: str | None = None


Roles = tuple[Role, ...]


@frozen
class Signature:
    """Operands of an op, in order."""

    reads: Roles = ()
    writes: Roles = ()
    updates: Roles = ()


class SignatureError(ValueError):
    """An operand is missing, too many, or of the wrong kind or type. `tensor` is the one at fault, if any."""

    def __init__(self, message: str, tensor: Tensor | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


Candidates = Sequence[tuple[bool, Signature]]
