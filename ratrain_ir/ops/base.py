# ruff: noqa: RUF009 - the defaults are attrs fields, made by the codec functions below
"""The ops: one final class per kind, with typed fields.

The text of an op is derived from its class, so a new op adds no grammar rule:

    writes = updates += keyword fields (reads) using scratch

`writes` defines tensors that are not live, `updates` changes live ones in place, `scratch` is workspace that lives only
while the op runs. Fields print in declaration order, each by its codec.

The seconds an op takes depend on all of its fields, unless the metadata of one say less (`TIME`): so ops are told apart that a target
may take different times for (`ratrain.ratrain_ir.ops.likeness`).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import attrs
from attrs import define, field

from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.ops.op_fields import UNTIMED, block_field, micro_batch_field, read_enum, slice_field
from ratrain.ratrain_ir.ops.tensor import Tensors

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.ops.operands import Candidates


class Engine(Enum):
    """The concurrent units of a stage; each takes its ops in list order. `NONE` ops only mark a place in the list."""

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    COLLECTIVE = "collective"
    TENSOR = "tensor"
    STORE = "store"
    FETCH = "fetch"
    HOST = "host"
    NONE = "none"

    __hash__ = object.__hash__  # members are single objects; what `Enum` has is several times slower


ENGINES = (
    Engine.COMPUTE,
    Engine.SEND,
    Engine.RECV,
    Engine.COLLECTIVE,
    Engine.TENSOR,
    Engine.STORE,
    Engine.FETCH,
    Engine.HOST,
)
"""The engines that execute something, in the order streams are stored."""


class Payload(Enum):
    """What a message between stages carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class GuestWay(Enum):
    """Which way a message goes that carries what a stage keeps in the DDR of another."""

    OUT = "guests"
    """to the stage that lends bytes"""
    BACK = "guests back"
    """to the stage that they belong to"""

    __hash__ = object.__hash__  # members are single objects; what `Enum` has is several times slower


class Part(Enum):
    """Which part of a micro-batch's input a stage loads."""

    TOKENS = "tokens"
    LABELS = "labels"
    DOCUMENTS = "documents"
    """of each row the position in its sequence at which its document starts"""


class Group(Enum):
    """The members of a collective."""

    REPLICAS = "replicas"
    """the data-parallel replicas of this stage"""
    SHARDS = "shards"
    """the replicas of this stage that have all shards of its state between them: all, or those of one shard group"""
    VIEWS = "views"
    """neighbours among these that have a view between them, which they gather for each use"""
    PARTS = "parts"
    """those of a shard group that have the same part of such a view, which is made of the shards of all of them"""
    ENDS = "ends"
    """first and last stage of each replica (tied embeddings); one member where they are the same stage"""
    TENSOR = "tensor"
    """the tensor peers that share out the blocks of this stage of a replica"""
    ALL = "all"
    """all ranks of all stages"""


class Quantity(Enum):
    """What an `all_reduce_scalar` combines."""

    LOSS = "loss"
    FLAGS = "flags"
    NORM = "norm"


class Phase(Enum):
    """Which use of a sharded view a gather within the step serves."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Direction(Enum):
    """Which way a message goes, seen from the stage whose op it is."""

    OUT = "out"
    IN = "in"


def _phase_field() -> Any:
    codec = {"read": read_enum(Phase), "write": lambda member: member.value, "optional": True}
    return field(metadata=codec, default=None)


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Op:
    """What all ops have. `line` is the op's line in the text it came from, 0 where a pass made it."""

    keyword: ClassVar[str]
    default_engine: ClassVar[Engine]
    direction: ClassVar[Direction | None] = None
    """Which way it goes, if it is a message."""
    alike_on_all_stages: ClassVar[bool] = False
    """Whether the op takes as long on one stage as on another; a message does not, whose link depends on where it is sent from."""

    reads: Tensors = ()
    writes: Tensors = ()
    updates: Tensors = ()
    scratch: Tensors = field(default=(), metadata=UNTIMED)
    line: int = field(default=0, metadata=UNTIMED)

    @property
    def engine(self) -> Engine:
        """The engine that runs this op."""
        return self.default_engine

    @property
    def operands(self) -> Tensors:
        """Every tensor the op touches."""
        return self.reads + self.writes + self.updates + self.scratch

    def __repr__(self) -> str:
        return " ".join([self.keyword, *field_texts(self)])

    def signatures(self, model: ModelConfig, plan: Plan) -> Candidates:
        """Return the operands that it may have: (whether its result adds to an earlier one, operands), the one that does not first."""
        raise NotImplementedError


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BlockPieceOp(Op):
    """What an op has that works on one block, for a micro-batch or a slice of one."""

    block: Block = block_field()
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()


class Slice(NamedTuple):
    """A slice of a micro-batch: its run of rows along the sequence."""

    micro_batch: int
    number: int
    """in the order of the rows"""

    def __str__(self) -> str:
        return f"m{self.micro_batch} s{self.number}"


Piece = int | Slice
"""What passes through the blocks at a time: a micro-batch by its number, or a slice of one."""


def piece_fields(piece: Piece) -> dict[str, Any]:
    """The fields of an op that works on a piece."""
    if isinstance(piece, int):
        return {"micro_batch": piece}
    return {"micro_batch": piece.micro_batch, "slice": piece.number}


def piece_text(piece: Piece) -> str:
    """A piece as the text of an op has it: `m0`, or `m0 s1`."""
    return f"m{piece}" if isinstance(piece, int) else str(piece)


def piece_name(piece: Piece) -> str:
    """A piece as names of tensors have it: `m0`, or `m0.s1`."""
    return f"m{piece}" if isinstance(piece, int) else f"m{piece.micro_batch}.s{piece.number}"


_BASE_FIELDS = {a.name for a in attrs.fields(Op)}


def own_fields(cls: type[Op]) -> tuple[attrs.Attribute[Any], ...]:
    """Return the fields of a kind of op that the text carries, in order."""
    return tuple(a for a in attrs.fields(cls) if a.name not in _BASE_FIELDS)


_WRITERS: dict[type[Op], tuple[tuple[str, Any, bool, Any], ...]] = {}


def _writers(cls: type[Op]) -> tuple[tuple[str, Any, bool, Any], ...]:
    """Return name, codec, whether the field may be left out, and its default, of each own field; remember them by kind."""
    found = _WRITERS.get(cls)
    if found is None:
        fields = own_fields(cls)
        found = _WRITERS[cls] = tuple(
            (a.name, a.metadata["write"], a.metadata.get("optional", False), a.default) for a in fields
        )
    return found


def field_texts(op: Op) -> list[str]:
    """The op's fields as the text writes them; optional fields with their default value are left out."""
    texts = []
    for name, write, optional, default in _writers(type(op)):
        value = getattr(op, name)
        if not (optional and value is default):
            texts.append(write(value))
    return texts
