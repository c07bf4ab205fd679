"""All kinds of ops by keyword, and the fields that their text carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.ops.base import Direction, Op, Piece, Slice, own_fields
from ratrain.ratrain_ir.ops.collectives import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    CombineLoss,
    GatherRows,
    PeerOp,
    ReduceRows,
    ReduceScatter,
    ReduceSums,
)
from ratrain.ratrain_ir.ops.compute import (
    BLOCK_OPS,
    AddBranch,
    AddBranchBackward,
    Backward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    BlockOp,
    Forward,
    LoadInput,
    Project,
    Recompute,
    Release,
    ScaleUpdate,
    Update,
)
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS, Fetch, MemoryOp, Store
from ratrain.ratrain_ir.ops.messages import Accept, Evict, GiveBack, MessageOp, Recv, Send, TakeBack
from ratrain.ratrain_ir.ops.op_fields import FieldError

if TYPE_CHECKING:
    import attrs


def piece_of(op: LoadInput | BlockOp | MessageOp | PeerOp | MemoryOp) -> Piece:
    """Return the piece that an op works on."""
    return op.micro_batch if op.slice is None else Slice(op.micro_batch, op.slice)


LONE_OPS: tuple[type[Op], ...] = (LoadInput, *BLOCK_OPS, *MEMORY_OPS, Update, ScaleUpdate)
"""Kinds of ops that one rank does by itself. They are named: a new kind is not among them unless somebody says so."""


OP_CLASSES: dict[str, type[Op]] = {
    cls.keyword: cls
    for cls in (
        LoadInput,
        Forward,
        Recompute,
        Backward,
        BackwardInput,
        BackwardWeight,
        AddBranch,
        AddBranchBackward,
        Project,
        BackwardHeads,
        Send,
        Recv,
        ReduceScatter,
        AllReduce,
        AllReduceScalar,
        Update,
        AllGather,
        GatherRows,
        ReduceRows,
        ReduceSums,
        CombineLoss,
        Store,
        Fetch,
        Evict,
        Accept,
        GiveBack,
        TakeBack,
        ScaleUpdate,
        Release,
    )
}


FIELDS: dict[type[Op], tuple[attrs.Attribute[Any], ...]] = {cls: own_fields(cls) for cls in OP_CLASSES.values()}
"""The fields of each op kind that the text carries, in order."""


def read_fields(cls: type[Op], texts: list[str]) -> dict[str, Any]:
    """Read the field values of an op from its words.

    Raises `FieldError` naming the field that is missing, wrong or too many.
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
"""Direction of each kind by its keyword; None for one that is no message"""
