"""Tile schedules: one kernel's movement of blocks of its operands through on-chip memory, as a short loop nest.

All cores of a cluster execute the same nest. A dimension (`m`, `k`, ...) has a current range, at first all of it; a
loop cuts the range into pieces, or deals the pieces out to cores. A transfer moves the current ranges of the dimensions
its buffer has. DDR holds the operands; GSM is shared by the cores; AM and SM belong to a core. A buffer has one or more
copies, and each copy its own DMA channel, so that waiting for a copy is waiting for a channel. A load of a GSM buffer
is issued by core 0 for all. Example, a product whose C tiles stay in AM:

    loop m by 36, over 4 cores
      zero sum
      loop k by 64
        load a_strip (SM) from a, 1 ahead;  load b_tile (AM) from b, 1 ahead;  wait for both
        add_product sum <- a_strip, b_tile
      round_sum result <- sum;  store result in out

A load stands where its piece is needed and is issued `ahead` visits before: at its first visit it issues `ahead` + 1
transfers, then one each. It looks ahead as far as its source reaches: DDR is always there, contents of GSM only until
its next load.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from math import prod
from typing import Any, ClassVar, TypeAlias

from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.program.json_values import text, whole, word

Axes: TypeAlias = tuple[tuple[str, ...], ...]
"""Dimensions that each axis of an array runs over: (("b", "q"), ("h", "d")) has row b * |q| + q and column h * |d| +
d."""
Ranges: TypeAlias = dict[str, tuple[int, int]]
"""Current range of each dimension: first index and exclusive end."""


class UnsoundTilesError(Exception):
    """Reason for which a tile schedule is not sound."""


COPY_ALIGNMENT = 64
"""Bytes of which the start of each copy of a buffer is a multiple."""


class OnChipMemory(Enum):
    """On-chip memory that a buffer lies in."""

    GSM = "gsm"
    AM = "am"
    SM = "sm"


@frozen
class Memories:
    """On-chip memory a schedule may use: bytes of GSM of the cluster, of AM and SM of each core."""

    cores: int
    gsm_bytes: int
    am_bytes: int
    sm_bytes: int

    def capacity(self, memory: OnChipMemory) -> int:
        """Return the bytes of a memory: of the cluster for GSM, of one core elsewhere."""
        return {OnChipMemory.GSM: self.gsm_bytes, OnChipMemory.AM: self.am_bytes, OnChipMemory.SM: self.sm_bytes}[
            memory
        ]


@frozen
class TiledOperand:
    """Operand of the kernel, in DDR."""

    name: str
    dtype: Dtype
    axes: Axes


@frozen
class OnChipBuffer:
    """Buffer of `copies` arrays of `shape` that are used in turn.

    Copy i starts at `offset` + i * `copy_bytes`, on channel `channel` + i.
    """

    name: str
    memory: OnChipMemory
    dtype: Dtype
    axes: Axes
    shape: tuple[int, ...]
    copies: int
    offset: int
    channel: int

    @property
    def copy_bytes(self) -> int:
        """Bytes from one copy to the next."""
        return -(-prod(self.shape) * self.dtype.itemsize // COPY_ALIGNMENT) * COPY_ALIGNMENT

    @property
    def end(self) -> int:
        """First byte after the last copy."""
        return self.offset + self.copies * self.copy_bytes


@frozen
class TileLoad:
    """Transfer into `buffer` from an operand or another buffer."""

    buffer: str
    source: str
    ahead: int


@frozen
class TileStore:
    """Transfer from the current copy of `buffer` to an operand."""

    buffer: str
    target: str


@frozen
class Claim:
    """Step to the next copy of a buffer that computation fills."""

    buffer: str


@frozen
class Wait:
    """Wait for the channel of the current copy of a buffer; for a GSM buffer core 0 waits."""

    buffer: str


@frozen
class Barrier:
    """Wait until all cores have reached it."""


@frozen
class Compute:
    """Micro-kernel on the current copies of buffers: first those it writes, then those it reads.

    `micro` is its register tile, (rows of scalars, vectors of columns), or (0, 0) where a micro-kernel has none.
    """

    kernel: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    micro: tuple[int, int] = (0, 0)


@frozen
class Loop:
    """Loop that cuts the range of `dim` into pieces of `tile`.

    With `cores` > 1 the pieces are dealt out: core c plays as number (c // `stride`) % `cores`, in one order and then
    in reverse, so that long and short pieces even out. With `sees`, only pieces are visited that the causal mask lets
    meet the range of that dimension.
    """

    dim: str
    tile: int
    body: tuple[Statement, ...]
    cores: int = 1
    stride: int = 1
    sees: str = ""


Statement: TypeAlias = "TileLoad | TileStore | Claim | Wait | Barrier | Compute | Loop"


@frozen(cache_hash=True)  # a key of caches and of the container's table of schedules
class TileSchedule:
    """Tiles of one part of a kernel call: the on-chip schedules of the form `tiles`."""

    form: ClassVar[str] = "tiles"
    kernel: str
    """the nest computes gemm, attention_forward, attention_query_gradient or attention_key_gradient"""
    dims: tuple[tuple[str, int], ...]
    window: int | None
    """keys a query sees; None: all before it"""
    memories: Memories
    operands: tuple[TiledOperand, ...]
    buffers: tuple[OnChipBuffer, ...]
    body: tuple[Statement, ...]

    @property
    def ranges(self) -> Ranges:
        """Full range of every dimension."""
        return {name: (0, extent) for name, extent in self.dims}

    def extent(self, dim: str) -> int:
        """Return the extent of a dimension."""
        return dict(self.dims)[dim]

    def operand_shape(self, operand: TiledOperand) -> tuple[int, ...]:
        """Return the shape of an operand in DDR."""
        extents = dict(self.dims)
        return tuple(prod(extents[dim] for dim in axis) for axis in operand.axes)

    def to_json(self) -> list[Any]:
        """Return the schedule as plain data."""
        # Lists without keys: `tiles_from_json` unpacks them in this order.
        memories = self.memories
        return [
            self.kernel,
            [list(item) for item in self.dims],
            self.window,
            [memories.cores, memories.gsm_bytes, memories.am_bytes, memories.sm_bytes],
            [[o.name, o.dtype.value, o.axes] for o in self.operands],
            [
                [b.name, b.memory.value, b.dtype.value, b.axes, b.shape, b.copies, b.offset, b.channel]
                for b in self.buffers
            ],
            _nest_to_json(self.body),
        ]


def flat(axes: Axes) -> list[str]:
    """Return the dimensions of all axes, in order."""
    return [dim for axis in axes for dim in axis]


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Yield all statements of a nest, each before those inside it."""
    for statement in body:
        yield statement
        if isinstance(statement, Loop):
            yield from statements(statement.body)


def axis_range(axis: tuple[str, ...], ranges: Ranges, held: Ranges) -> tuple[int, int]:
    """Return the indices along an axis that `ranges` select, counted from the start of `held`.

    They are (first, exclusive end). Outer dimensions must be single indices where an inner one is not whole, so that
    the indices are contiguous.
    """
    start, stop = 0, 1
    for dim in axis:
        low, high = held[dim]
        first, last = ranges[dim] if stop - start == 1 else (low, high)
        # The usual flattening, index = index of the outer dimensions * extent + index of this one, for the first and
        # the last index.
        start, stop = start * (high - low) + first - low, (stop - 1) * (high - low) + last - low
    return start, stop


def is_contiguous(axis: tuple[str, ...], ranges: Ranges, held: Ranges) -> bool:
    """Return whether `axis_range` selects exactly `ranges`: no dimension is cut inside one that has several indices."""
    several = False
    for dim in axis:
        # Rows 2 to 3 with columns 0 to 4 of 8 each are two runs; row 2 alone with these columns is one.
        if several and ranges[dim] != held[dim]:
            return False
        several |= ranges[dim][1] - ranges[dim][0] > 1
    return True


def elements(axes: Axes, ranges: Ranges) -> int:
    """Return the elements that ranges select of an array with these axes."""
    return prod(ranges[dim][1] - ranges[dim][0] for axis in axes for dim in axis)


_DEPTH = 32
"""Most loops within loops that a file may have."""


def _nest_to_json(body: tuple[Statement, ...]) -> list[Any]:
    nest: list[Any] = []
    for item in body:
        match item:
            case Loop(dim, tile, inner, cores, stride, sees):
                nest.append(["loop", dim, tile, cores, stride, sees, _nest_to_json(inner)])
            case TileLoad(buffer, source, ahead):
                nest.append(["load", buffer, source, ahead])
            case TileStore(buffer, target):
                nest.append(["store", buffer, target])
            case Claim(buffer):
                nest.append(["claim", buffer])
            case Wait(buffer):
                nest.append(["wait", buffer])
            case Barrier():
                nest.append(["barrier"])
            case Compute(kernel, writes, reads, micro):
                nest.append(["compute", kernel, writes, reads, micro])
    return nest


def tiles_from_json(data: Any) -> TileSchedule:
    """Return the tile schedule of `TileSchedule.to_json`'s data.

    Raises KeyError, TypeError or ValueError where the data is not a tile schedule's.
    """
    kernel, dims, window, memories, operands, buffers, body = data
    return TileSchedule(
        word(kernel),
        tuple((word(name), whole(extent)) for name, extent in dims),
        None if window is None else whole(window),
        Memories(*(whole(value) for value in memories)),
        tuple(TiledOperand(word(name), Dtype(dtype), _axes(axes)) for name, dtype, axes in operands),
        tuple(_buffer(*item) for item in buffers),
        _nest(body, 0),
    )


def _buffer(
    name: Any, memory: Any, dtype: Any, axes: Any, shape: Any, copies: Any, offset: Any, channel: Any
) -> OnChipBuffer:
    extents = tuple(whole(extent) for extent in shape)
    places = whole(copies), whole(offset), whole(channel)
    return OnChipBuffer(word(name), OnChipMemory(memory), Dtype(dtype), _axes(axes), extents, *places)


def _axes(data: Any) -> Axes:
    return tuple(tuple(word(dim) for dim in axis) for axis in data)


def _names(data: Any) -> tuple[str, ...]:
    return tuple(word(name) for name in list(data))


def _nest(data: Any, depth: int) -> tuple[Statement, ...]:
    if depth > _DEPTH:
        raise ValueError(f"a tile schedule has more than {_DEPTH} loops within each other")
    nest: list[Statement] = []
    for keyword, *fields in data:
        # A statement with a wrong number of fields matches no case but the last.
        match keyword, fields:
            case "loop", [dim, tile, cores, stride, sees, inner]:
                counts = whole(cores), whole(stride)
                nest.append(Loop(word(dim), whole(tile), _nest(inner, depth + 1), *counts, text(sees)))
            case "load", [buffer, source, ahead]:
                nest.append(TileLoad(word(buffer), word(source), whole(ahead)))
            case "compute", [kernel, writes, reads, (rows, vectors)]:
                micro = whole(rows), whole(vectors)
                nest.append(Compute(word(kernel), _names(writes), _names(reads), micro))
            case "store", [buffer, target]:
                nest.append(TileStore(word(buffer), word(target)))
            case "claim", [buffer]:
                nest.append(Claim(word(buffer)))
            case "wait", [buffer]:
                nest.append(Wait(word(buffer)))
            case "barrier", []:
                nest.append(Barrier())
            case _:
                raise ValueError(f"'{keyword}' with {len(fields)} fields is no statement of a tile schedule")
    return tuple(nest)
