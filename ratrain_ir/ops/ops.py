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
from typing import Any, ClassVar, NamedTuple, TypeGuard, final, get_args

import attrs
from attrs import define, field

from ratrain.ratrain_ir.config.types import Home, StateKind, TensorType
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.ops.op_fields import (
    UNTIMED,
    FieldError,
    block_field,
    blocking_field,
    blocks_field,
    chunk_field,
    enum_field,
    micro_batch_field,
    peer_field,
    read_enum,
    slice_field,
)


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


@define(eq=False, weakref_slot=False, repr=False)
class Tensor:
    """A named piece of training state of one stage. Compared by identity.

    `carried` tensors live across the step's end. `offset` is bytes into the stage's part of the memory that is its home, once allocated.
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
        """The last part of the name: for saved tensors the slot of their block that they hold."""
        return self.name.rpartition(".")[2]

    @property
    def role(self) -> str | StateKind:
        """What of its name and kind the time of an op depends on: the slot of a saved tensor, else the kind."""
        return self.name.rpartition(".")[2] if self.kind is StateKind.SAVED else self.kind

    def __repr__(self) -> str:
        return f"%{self.name}"


Tensors = tuple[Tensor, ...]


def _phase_field() -> Any:
    codec = {"read": read_enum(Phase), "write": lambda member: member.value, "optional": True}
    return field(metadata=codec, default=None)


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Op:
    """What all ops have. `line` is the op's line in the text it came from, 0 where a pass made it."""

    keyword: ClassVar[str]
    default_engine: ClassVar[Engine]
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


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BlockPieceOp(Op):
    """What an op has that works on one block, for a micro-batch or a slice of one."""

    block: Block = block_field()
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BytesOfStageOp(BlockPieceOp):
    """What an op has that moves bytes of a block between the DDR of two stages: the other one."""

    peer: int = peer_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class LoadInput(Op):
    """Copies tokens, labels or starts of documents of one micro-batch from the host into the arena.

    Starts of documents, where attention keeps these apart: of each row the position in its sequence, from 0, at which its document starts.
    """

    keyword = "load_input"
    default_engine = Engine.HOST
    alike_on_all_stages = True
    part: Part = enum_field(Part)
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Forward(BlockPieceOp):
    """Forward of one block on one micro-batch; that of the head adds to the step's loss.

    It writes the saved slots that are kept for the backward; the others are recovered by a `recompute`.
    """

    keyword = "forward"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Recompute(BlockPieceOp):
    """Activation recovery: makes again what a block's forward did not keep for its backward.

    It reads the saved slots that were kept and writes the others. It may write the block's output too, as the recovery of an
    attention does for its mlp where nothing of the layer was kept.
    """

    keyword = "recompute"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Backward(BlockPieceOp):
    """Backward of one block on one micro-batch: the gradients of its input and of its parameters.

    The first contribution to the parameters' gradient writes it, later ones add to it.
    """

    keyword = "backward"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BackwardInput(BlockPieceOp):
    """The first half of a split backward: the gradient of the block's input.

    The stage before waits for nothing else. It leaves pending slots for the second half. Attention and mlp blocks have halves.
    """

    keyword = "backward_input"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BackwardWeight(BlockPieceOp):
    """The second half of a split backward: the gradient of the block's parameters.

    It may stand anywhere after the first.
    """

    keyword = "backward_weight"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AddBranch(BlockPieceOp):
    """Norms what tensor peers have summed of a block, and adds it to the stream.

    On the rows that a peer has, as the norm takes the whole sum. Of attention and mlp blocks whose model norms what they add.
    """

    keyword = "add_branch"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AddBranchBackward(BlockPieceOp):
    """The gradient of what `add_branch` norms and adds, from that of the stream.

    The gradients of the norm's weights (and biases), as f32 sums over the rows that a peer has, are left for the block's backward.
    """

    keyword = "add_branch_backward"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Project(BlockPieceOp):
    """Queries, keys and values of an attention, before norms that take sums over tensor peers.

    Of each row of queries and of keys it leaves the sum of squares of what the peer has; heads of keys that several peers have count once. The
    attention's forward goes on when these are summed.
    """

    keyword = "project"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BackwardHeads(BlockPieceOp):
    """Gradients of queries, keys and values, before norms over tensor peers.

    Of each row of queries and of keys it leaves the sum of products of what the norm's gradient needs, as far as the peer has them. The
    attention's backward, or the input half of it, goes on when these are summed.
    """

    keyword = "backward_heads"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Send(Op):
    """Sends an activation to the stage of the next chunk, or a gradient back."""

    keyword = "send"
    default_engine = Engine.SEND
    payload: Payload = enum_field(Payload)
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()
    chunk: int | None = chunk_field()
    peer: int = peer_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Recv(Op):
    """Receives an activation from the stage of the chunk before, or a gradient back."""

    keyword = "recv"
    default_engine = Engine.RECV
    payload: Payload = enum_field(Payload)
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()
    chunk: int | None = chunk_field()
    peer: int = peer_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ReduceScatter(Op):
    """GradSync into shards: the mean over replicas of each block's gradient.

    An overflow flag goes with each shard. With a micro-batch it reduces that micro-batch's contribution
    (`reduce = "each-micro-batch"`), without one the whole. If it is blocking, compute waits for it.
    """

    keyword = "reduce_scatter"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True
    blocks: tuple[Block, ...] = blocks_field()
    micro_batch: int | None = micro_batch_field(optional=True)
    blocking: bool = blocking_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AllReduce(Op):
    """GradSync in place: the mean over replicas, or the sum of tied or shared gradients.

    The overflow flags go with them. Tied gradients are those of the embedding and the head, summed over `ends`. Shared ones are those of
    parameters that several tensor peers have, summed over `tensor` after replicas have met. If it is blocking, compute waits for it.
    """

    keyword = "all_reduce"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True
    blocks: tuple[Block, ...] = blocks_field()
    group: Group = enum_field(Group, Group.REPLICAS)
    blocking: bool = blocking_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class GatherRows(Op):
    """Makes the input of a block, or the gradient of it, whole from the peers' rows.

    Of an activation it says which pass it serves; a gradient serves the backward of the block before.
    """

    keyword = "gather_rows"
    default_engine = Engine.TENSOR
    alike_on_all_stages = True
    payload: Payload = enum_field(Payload)
    block: Block = block_field()
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()
    phase: Phase | None = _phase_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ReduceRows(Op):
    """Sums what tensor peers have of the input of a block, or of its gradient.

    In f32 in rank order, rounded once. The residual stream is added once, where there is one: the input of the block before, or the gradient of its output. Each peer has
    the rows that are its own, or all of them where rows are not sharded. Where a model norms what blocks add, it sums what the block before adds.
    """

    keyword = "reduce_rows"
    default_engine = Engine.TENSOR
    alike_on_all_stages = True
    payload: Payload = enum_field(Payload)
    block: Block = block_field()
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class CombineLoss(BlockPieceOp):
    """The loss of a micro-batch from what tensor peers know of its rows' logits.

    The logits stay where they are. Every peer has the log of each row's sum of exponentials afterwards, and the loss.
    """

    keyword = "combine_loss"
    default_engine = Engine.TENSOR
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ReduceSums(Op):
    """Sums over tensor peers what norms of queries and keys take of each row.

    In f32 in rank order; every peer has all sums afterwards. Of an activation the squares of queries and keys, of a gradient their products with it.
    """

    keyword = "reduce_sums"
    default_engine = Engine.TENSOR
    alike_on_all_stages = True
    payload: Payload = enum_field(Payload)
    block: Block = block_field()
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Store(BlockPieceOp):
    """Copies what a block needs later of a piece into another memory: its bytes in DDR are free then."""

    keyword = "store"
    default_engine = Engine.STORE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Fetch(BlockPieceOp):
    """Copies what was stored of a block and a piece back into DDR."""

    keyword = "fetch"
    default_engine = Engine.FETCH
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Evict(BytesOfStageOp):
    """Sends what a block needs later of a piece to a stage that lends bytes: its own are free then.

    It starts and ends with the `accept` there.
    """

    keyword = "evict"
    default_engine = Engine.STORE


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Accept(BytesOfStageOp):
    """Takes in what another stage evicts: guests in this stage's DDR."""

    keyword = "accept"
    default_engine = Engine.FETCH


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class GiveBack(BytesOfStageOp):
    """Sends guests back to the stage that they belong to.

    It starts and ends with the `take_back` there.
    """

    keyword = "give_back"
    default_engine = Engine.STORE


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class TakeBack(BytesOfStageOp):
    """Receives what was evicted of a block and a piece back into DDR."""

    keyword = "take_back"
    default_engine = Engine.FETCH


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AllReduceScalar(Op):
    """Combines scalars of a group: the loss, overflow flags or the gradient's norm.

    The loss is summed and reported; of the flags any is enough. The norm names the blocks whose reduced gradients it reads, which
    are all of the stage; it is infinite when one of their flags is set anywhere.
    """

    keyword = "all_reduce_scalar"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True
    quantity: Quantity = enum_field(Quantity)
    group: Group = enum_field(Group)
    blocks: tuple[Block, ...] = blocks_field(optional=True)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Update(Op):
    """UpdateShard: AdamW on the master and moments of one block.

    Where nothing is sharded it writes the block's view too.
    """

    keyword = "update"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True
    block: Block = block_field()
    placement: Engine = enum_field(Engine, Engine.COMPUTE, among=(Engine.COMPUTE, Engine.HOST))

    @property
    def engine(self) -> Engine:
        """Compute or host, as the machine has it."""
        return self.placement


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AllGather(Op):
    """PrefetchW: makes parameter views whole from the replicas' master shards.

    At the step's end for the next step; with a micro-batch and a phase, within the step for one use (ZeRO 3). Where a group of replicas
    has views between them (`view_group`), it makes a replica's part of one at the step's end, and within the step the view from the
    group's parts. If it is blocking, compute waits for it.
    """

    keyword = "all_gather"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True
    blocks: tuple[Block, ...] = blocks_field()
    micro_batch: int | None = micro_batch_field(optional=True)
    slice: int | None = slice_field()
    phase: Phase | None = _phase_field()
    blocking: bool = blocking_field()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ScaleUpdate(Op):
    """Sets the next step's loss scale from this step's overflow flag.

    On the engine on which the flag arrives: the next step's inputs, which the host loads, do not wait for it.
    """

    keyword = "scale_update"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Release(Op):
    """Ends the lives of tensors; a mark in the list, not work."""

    keyword = "release"
    default_engine = Engine.NONE
    alike_on_all_stages = True


BlockOp = (
    Forward
    | Recompute
    | Backward
    | BackwardInput
    | BackwardWeight
    | AddBranch
    | AddBranchBackward
    | Project
    | BackwardHeads
)
BLOCK_OPS: tuple[type[Op], ...] = get_args(BlockOp)
"""What computes on one block of one micro-batch: the ops that run a routine."""

InputGradientOp = Backward | BackwardInput
"""What makes the gradient of a block's input."""

WeightGradientOp = Backward | BackwardWeight
"""What contributes to the gradient of a block's parameters."""


class Slice(NamedTuple):
    """A slice of a micro-batch: its run of rows along the sequence."""

    micro_batch: int
    number: int
    """in the order of the rows"""

    def __str__(self) -> str:
        return f"m{self.micro_batch} s{self.number}"


Piece = int | Slice
"""What passes through the blocks at a time: a micro-batch by its number, or a slice of one."""


PeerOp = GatherRows | ReduceRows | ReduceSums | CombineLoss

MemoryOp = Store | Fetch
"""What moves tensors between DDR and another memory."""


GuestOp = Evict | Accept | GiveBack | TakeBack
"""What moves tensors between the DDR of a stage and that of one that lends it bytes."""

MessageOp = Send | Recv | GuestOp


def piece_of(op: LoadInput | BlockOp | MessageOp | PeerOp | MemoryOp) -> Piece:
    """The piece that an op works on."""
    return op.micro_batch if op.slice is None else Slice(op.micro_batch, op.slice)


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


GUEST_OPS: tuple[type[Op], ...] = get_args(GuestOp)

MESSAGE_OPS: tuple[type[Op], ...] = (Send, Recv, *GUEST_OPS)
"""What one rank does with a partner on another stage."""

MEMORY_OPS: tuple[type[Op], ...] = get_args(MemoryOp)

LONE_OPS: tuple[type[Op], ...] = (LoadInput, *BLOCK_OPS, *MEMORY_OPS, Update, ScaleUpdate)
"""What one rank does by itself. Named one by one: a new kind of op is not among them unless somebody says so."""

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

PEER_OPS: tuple[type[Op], ...] = get_args(PeerOp)
"""What tensor peers do together within the passes of a micro-batch."""

STATE_OPS: tuple[type[Op], ...] = (ReduceScatter, AllReduce, AllReduceScalar, AllGather)
"""What the members of a group do together about gradients, views and numbers of a step."""

COLLECTIVE_OPS: tuple[type[Op], ...] = (*STATE_OPS, *PEER_OPS)
"""What the members of a group do together."""

TensorCollective = ReduceScatter | AllReduce | AllGather
"""What combines or moves whole tensors of a group, and may be blocking."""


def reduces_over_replicas(op: Op) -> TypeGuard[ReduceScatter | AllReduce]:
    """Whether an op sums gradients over the replicas of its stage."""
    return isinstance(op, ReduceScatter) or (isinstance(op, AllReduce) and op.group is Group.REPLICAS)


def is_blocking(op: Op) -> bool:
    """Whether compute waits for an op: it starts when the compute ops before it in the list are done, and those after it wait for it."""
    return isinstance(op, TensorCollective) and op.blocking


_BASE_FIELDS = {a.name for a in attrs.fields(Op)}

FIELDS: dict[type[Op], tuple[attrs.Attribute[Any], ...]] = {
    cls: tuple(a for a in attrs.fields(cls) if a.name not in _BASE_FIELDS) for cls in OP_CLASSES.values()
}
"""The fields of each op kind that the text carries, in order."""

_WRITERS = {
    cls: tuple((a.name, a.metadata["write"], a.metadata.get("optional", False), a.default) for a in fields)
    for cls, fields in FIELDS.items()
}
"""The same as name, codec, whether the field may be left out, and its default."""


def field_texts(op: Op) -> list[str]:
    """The op's fields as the text writes them; optional fields with their default value are left out."""
    texts = []
    for name, write, optional, default in _WRITERS[type(op)]:
        value = getattr(op, name)
        if not (optional and value is default):
            texts.append(write(value))
    return texts


def read_fields(cls: type[Op], texts: list[str]) -> dict[str, Any]:
    """Field values of an op from its words.

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
