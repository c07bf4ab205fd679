"""Tables of all kinds of ops by keyword, and of the fields that their text carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.ops.base import Direction, Op, Piece, Slice, own_fields
from ratrain.ratrain_ir.ops.collectives import COLLECTIVE_OPS, AllGather, TensorOp
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, BlockOp, LoadInput, Release, ScaleUpdate, Update
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS, Fetch, MemoryOp
from ratrain.ratrain_ir.ops.messages import (
    MESSAGE_OPS,
    DonorAccept,
    DonorReturn,
    MessageOp,
    PeerOffload,
    PeerReload,
)
from ratrain.ratrain_ir.ops.op_fields import FieldError

if TYPE_CHECKING:
    import attrs


def piece_of(op: LoadInput | BlockOp | MessageOp | TensorOp | MemoryOp) -> Piece:
    """Return the piece that an op works on: a micro-batch's number, or a `Slice` if the op names one."""
    return op.micro_batch if op.slice is None else Slice(op.micro_batch, op.slice)


def brings_parameters(op: Op) -> TypeGuard[AllGather | Fetch]:
    """Tell whether an op gathers or fetches parameters within the step, for the passes of a micro-batch."""
    return isinstance(op, AllGather | Fetch) and op.phase is not None


LONE_OPS: tuple[type[Op], ...] = (LoadInput, *BLOCK_OPS, *MEMORY_OPS, Update, ScaleUpdate)
"""Kinds of ops that one rank executes without another one.

They are listed by name, so that a new kind is not included by accident.
"""


_ALL: tuple[type[Op], ...] = (*LONE_OPS, *MESSAGE_OPS, *COLLECTIVE_OPS, Release)
OP_CLASSES: dict[str, type[Op]] = {kind.keyword: kind for kind in _ALL}
"""All kinds of ops by keyword; a kind enters through the tuple of its family."""


RENAMED = {
    "evict": PeerOffload.keyword,
    "accept": DonorAccept.keyword,
    "give_back": DonorReturn.keyword,
    "take_back": PeerReload.keyword,
    "guest": StateKind.REMOTE.value,
}
"""Keywords and state kinds in files before `.rtir` 2 and `.rtx` 7, with their names since."""


FIELDS: dict[type[Op], tuple[attrs.Attribute[Any], ...]] = {cls: own_fields(cls) for cls in OP_CLASSES.values()}
"""The fields of each op kind that the text carries, in order."""


def read_fields(cls: type[Op], texts: list[str]) -> dict[str, Any]:
    """Parse the field values of an op from the words of its text; return them by field name.

    An optional field that does not read the next word is skipped. Raises `FieldError` naming the field that is missing
    or wrong, or the word that is left over.
    """
    attributes = FIELDS[cls]
    values: dict[str, Any] = {}
    remaining = list(texts)
    for attribute in attributes:
        name = attribute.name.replace("_", "-")
        if not remaining:
            if attribute.metadata.get("optional"):
                continue
            raise FieldError(f"'{cls.keyword}' needs a {name}")
        try:
            values[attribute.name] = attribute.metadata["read"](remaining[0])
        except FieldError as error:
            if attribute.metadata.get("optional"):
                continue
            raise FieldError(f"{name} of '{cls.keyword}': {error}") from None
        remaining.pop(0)
    if remaining:
        raise FieldError(f"'{cls.keyword}' does not take '{remaining[0]}'")
    return values


DIRECTIONS: dict[str, Direction | None] = {keyword: cls.direction for keyword, cls in OP_CLASSES.items()}
"""Direction of each kind by keyword; None unless the kind is a message"""
