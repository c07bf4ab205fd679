"""Base class of all ops. Each kind is a final class with typed fields, in the file of its family.

The text of an op is derived from its class, so a new op adds no grammar rule:

    writes = updates += keyword fields (reads) using scratch

`writes` defines tensors that are not live, `updates` changes live ones in place, `scratch` is workspace that lives only
while the op runs. Fields print in declaration order, each by its codec.

The duration of an op may depend on all of its fields; a field can declare in its metadata (`TIME`) that only a part of
it, or nothing, counts. Ops that differ in a field that counts are timed separately (`ratrain.ratrain_ir.ops.likeness`).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import attrs
from attrs import define, field

from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.ops.op_fields import UNTIMED, block_field, enum_field, micro_batch_field, read_enum, slice_field
from ratrain.ratrain_ir.ops.tensor import Tensors

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.ops.operands import Candidates


class Engine(Enum):
    """Concurrent unit of a stage; each executes its ops in list order. `NONE` ops only mark a place in the list."""

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    COLLECTIVE = "collective"
    TENSOR = "tensor"
    STORE = "store"
    FETCH = "fetch"
    HOST = "host"
    NONE = "none"

    __hash__ = object.__hash__  # members are singletons; `Enum`'s own hash is several times slower


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
ENGINE_NUMBERS = {engine: number for number, engine in enumerate(ENGINES)}


class WorkGroup(Enum):
    """Work of a stage that an op belongs to: a pass of a micro-batch through a chunk, or the end of the step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    """weight half of a split backward; the whole backward if it is not split"""
    STEP_END = "step end"

    __hash__ = object.__hash__  # as for `Engine`


class Payload(Enum):
    """Content of a message between neighbouring stages."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class PeerTransfer(Enum):
    """Direction of a message that offloads activations to the DDR of a donor stage, or reloads them."""

    OFFLOAD = "offload"
    """to the donor stage, which lends the bytes"""
    RELOAD = "reload"
    """back to the stage that owns the activations"""

    __hash__ = object.__hash__  # as for `Engine`


class Part(Enum):
    """Part of a micro-batch's input."""

    TOKENS = "tokens"
    LABELS = "labels"
    DOCUMENTS = "documents"
    """for each row (token), the position in its sequence at which its document starts"""


class Group(Enum):
    """The members of a collective."""

    REPLICAS = "replicas"
    """the data-parallel replicas of this stage, with their context ranks"""
    SHARDS = "shards"
    """the replicas of this stage that together hold all shards of its state: all of them, or one shard group"""
    VIEWS = "views"
    """neighbouring members of a shard group that together hold one view, and gather it for each use"""
    PARTS = "parts"
    """members of a shard group that hold the same part of such a view; the part is made of all their shards"""
    ENDS = "ends"
    """first and last stage of each replica (tied embeddings); one member where they are the same stage"""
    TENSOR = "tensor"
    """the tensor-parallel ranks of one replica that share this stage's blocks"""
    CONTEXT = "context"
    """the context ranks of one replica that share its sequences"""
    EXPERTS = "experts"
    """neighbouring replicas of this stage that share out the experts of each layer"""
    COPIES = "copies"
    """the replicas of this stage that hold the same experts, one from each such run of neighbours"""
    ALL = "all"
    """all ranks of all stages"""


class Quantity(Enum):
    """Scalar that an `all_reduce_scalar` combines."""

    LOSS = "loss"
    FLAGS = "flags"
    NORM = "norm"
    COUNTS = "counts"


class Phase(Enum):
    """Pass that uses parameters which are gathered, or fetched from another memory, within the step."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def work_group(self) -> WorkGroup:
        """The work of a stage that is this pass."""
        return WorkGroup.FORWARD if self is Phase.FORWARD else WorkGroup.BACKWARD


def phase_field() -> Any:
    """Declare a field for the pass that an op within a step serves; None if it is left out."""
    codec = {"read": read_enum(Phase), "write": lambda member: member.value, "optional": True}
    return field(metadata=codec, default=None)


class Direction(Enum):
    """Direction of a message, seen from the stage that has the op."""

    OUT = "out"
    IN = "in"


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Op:
    """Base of all ops. `line` is the op's line in the text that it was read from, 0 if a pass made it."""

    keyword: ClassVar[str]
    default_engine: ClassVar[Engine]
    direction: ClassVar[Direction | None] = None
    """None unless the op is a message"""
    default_members: ClassVar[Group | None] = None
    default_work_group: ClassVar[WorkGroup] = WorkGroup.STEP_END
    alike_on_all_stages: ClassVar[bool] = False
    """True if the op takes equal time on all stages; a message does not, as its link depends on the stage"""

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
    def members(self) -> Group | None:
        """The ranks that meet in this op, or None if it is no collective."""
        return self.default_members

    @property
    def work_group(self) -> WorkGroup:
        """The work of its stage that this op belongs to."""
        return self.default_work_group

    def served_blocks(self, model: ModelConfig) -> tuple[Block, ...]:
        """List the blocks of one chunk in whose pass this op takes part; empty if it serves the whole stage."""
        del model
        return ()

    def served_slice(self, model: ModelConfig, plan: Plan) -> int:
        """Return the slice in whose pass this op takes part: its own, or 0 if it has none.

        An op of all slices counts with slice 0: slices descend in backwards, so slice 0 contributes last.
        """
        del model, plan
        return getattr(self, "slice", None) or 0

    @property
    def operands(self) -> Tensors:
        """Every tensor the op touches."""
        return self.reads + self.writes + self.updates + self.scratch

    def __repr__(self) -> str:
        return " ".join([self.keyword, *field_texts(self)])

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have, as (accumulates, signature).

        An op accumulates if its result adds to an earlier one: a gradient after its first contribution, for example.
        Where a kind has both signatures, the one that does not accumulate comes first.
        """
        raise NotImplementedError


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BlockPieceOp(Op):
    """Base of ops on one block, for one micro-batch or one slice of it."""

    block: Block = block_field()
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()

    def served_blocks(self, model: ModelConfig) -> tuple[Block, ...]:
        """List the block that this op works on."""
        del model
        return (self.block,)


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class PayloadOp(Op):
    """Base of ops that carry an activation (in the forward) or a gradient (in the backward)."""

    payload: Payload = enum_field(Payload)

    @property
    def work_group(self) -> WorkGroup:
        """The forward for an activation, the backward for a gradient."""
        return WorkGroup.FORWARD if self.payload is Payload.ACTIVATION else WorkGroup.BACKWARD


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BlockPayloadOp(PayloadOp):
    """Base of exchanges of what one block reads or makes, for one micro-batch or one slice of it."""

    block_kinds: ClassVar[tuple[str, ...]]
    """kinds of blocks that this op may name"""
    block: Block = block_field()
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()

    def served_blocks(self, model: ModelConfig) -> tuple[Block, ...]:
        """List the block that is named."""
        del model
        return (self.block,)


class Slice(NamedTuple):
    """A slice of a micro-batch: a run of tokens of each of its sequences."""

    micro_batch: int
    number: int
    """counted from 0 along the sequence"""

    def __str__(self) -> str:
        return f"m{self.micro_batch} s{self.number}"


Piece = int | Slice
"""Unit of work of a pass: a micro-batch, by its number, or a slice of one."""


def piece_fields(piece: Piece) -> dict[str, Any]:
    """Return the keyword arguments (`micro_batch`, `slice`) of an op that works on a piece."""
    if isinstance(piece, int):
        return {"micro_batch": piece}
    return {"micro_batch": piece.micro_batch, "slice": piece.number}


def piece_text(piece: Piece) -> str:
    """Format a piece as the text of an op does: `m0`, or `m0 s1`."""
    return f"m{piece}" if isinstance(piece, int) else str(piece)


def piece_name(piece: Piece) -> str:
    """Format a piece as names of tensors do: `m0`, or `m0.s1`."""
    return f"m{piece}" if isinstance(piece, int) else f"m{piece.micro_batch}.s{piece.number}"


_BASE_FIELDS = {a.name for a in attrs.fields(Op)}


def own_fields(cls: type[Op]) -> tuple[attrs.Attribute[Any], ...]:
    """Return the fields of a kind of op that `Op` does not have, in declaration order; the text carries them."""
    return tuple(a for a in attrs.fields(cls) if a.name not in _BASE_FIELDS)


_WRITERS: dict[type[Op], tuple[tuple[str, Any, bool, Any], ...]] = {}


def _writers(cls: type[Op]) -> tuple[tuple[str, Any, bool, Any], ...]:
    """Return (name, writer, optional, default) of each own field; cached by kind."""
    found = _WRITERS.get(cls)
    if found is None:
        fields = own_fields(cls)
        found = _WRITERS[cls] = tuple(
            (a.name, a.metadata["write"], a.metadata.get("optional", False), a.default) for a in fields
        )
    return found


def field_texts(op: Op) -> list[str]:
    """Format the op's own fields as its text has them; omit optional fields that have their default."""
    texts = []
    for name, write, optional, default in _writers(type(op)):
        value = getattr(op, name)
        if not (optional and value is default):
            texts.append(write(value))
    return texts
