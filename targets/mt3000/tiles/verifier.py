"""Proof that a tile schedule computes its kernel within on-chip memory, whatever the speed of its transfers.

1. Structure: names, axes, loops and micro-kernels fit together; buffers lie within their memory and share no byte and
no channel. 2. Meaning: followed symbolically, each result is the kernel's formula; loops visit every element of a
result once. 3. Hazards: a core's program is followed event by event. A transfer goes into a copy that nothing still
reads or fills; a tile fits
   barrier after their arrival and the barrier before they are overwritten.
   its buffer; data has arrived before it is read, and it is the intended tile; contents of GSM are read by other cores
   between the barrier after their arrival and the barrier before they are overwritten.
   barrier after their arrival and the barrier before they are overwritten.

Example of a hazard: with one copy, `load a (0), use a, load a (1 ahead) ...` would overwrite the tile in use.

Of loops with many iterations only enough are followed to show every state of the copies that are used in turn, at both
ends where the causal mask makes iterations differ. Of cores whose pieces have equal lengths one is followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain, pairwise

from attrs import define, field

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.mt3000.tiles.hazards import check_hazards
from ratrain.targets.mt3000.tiles.meaning import check_meaning
from ratrain.targets.mt3000.tiles.micro_kernels import ADD_RUN, MICRO_KERNELS, PRODUCTS
from ratrain.targets.mt3000.tiles.tile_schedule import (
    COPY_ALIGNMENT,
    Axes,
    Claim,
    Compute,
    Loop,
    OnChipBuffer,
    OnChipMemory,
    Statement,
    TileLoad,
    TileSchedule,
    TileStore,
    UnsoundTilesError,
    Wait,
    flat,
    statements,
)

_MOST_CORES = 1024
_MOST_COPIES = 4
_MOST_CHANNELS = 1024
"""Bound of channel numbers, far above any machine's."""
_SUMS = {"zero": 1, **dict.fromkeys(PRODUCTS, 1), "start_softmax": 3, "softmax": 3}
"""Number of the buffers a micro-kernel writes, from the first on, that hold sums."""


@lru_cache(maxsize=4096)
def schedule_problem(schedule: TileSchedule) -> str | None:
    """Return why a tile schedule is not sound, or None."""
    try:
        _Structure(schedule).check()
        check_meaning(schedule)
        check_hazards(schedule)
    except UnsoundTilesError as problem:
        return str(problem)
    return None


def structure_problem(schedule: TileSchedule) -> str | None:
    """Return why the parts of a tile schedule do not fit together, or None; enough to list or time a sound file."""
    try:
        _Structure(schedule).check()
    except UnsoundTilesError as problem:
        return str(problem)
    return None


def operands_problem(schedule: TileSchedule, operands: Mapping[str, tuple[Dtype, tuple[int, ...]]]) -> str | None:
    """Return why a schedule is not one for operands of these types, or None."""
    for operand in schedule.operands:
        given = operands.get(operand.name)
        if given is None:
            return f"the kernel has no operand '{operand.name}'"
        if given != (operand.dtype, schedule.operand_shape(operand)):
            return f"'{operand.name}' is {given[0].value}{list(given[1])}; the tiles are for another type or shape"
    return None


@define(eq=False)
class _Structure:
    """Checks of names, places and memories."""

    schedule: TileSchedule
    buffers: dict[str, OnChipBuffer] = field(init=False)
    operands: dict[str, Axes] = field(init=False)
    dims: dict[str, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.buffers = {buffer.name: buffer for buffer in self.schedule.buffers}
        self.operands = {operand.name: operand.axes for operand in self.schedule.operands}
        self.dims = dict(self.schedule.dims)

    def check(self) -> None:
        for problem in chain(self.names(), self.places()):
            raise UnsoundTilesError(problem)
        for statement in statements(self.schedule.body):
            fault = self.statement(statement)
            if fault is not None:
                raise UnsoundTilesError(fault)
        self.sources()

    def names(self) -> Iterator[str]:
        schedule, memories = self.schedule, self.schedule.memories
        named = [*(o.name for o in schedule.operands), *(b.name for b in schedule.buffers)]
        for name, count in Counter([*named, *(f"dimension {dim}" for dim, _ in schedule.dims)]).items():
            if count > 1 or not name:
                yield f"'{name}' has {count} meanings"
        unused = self.dims.keys() - {dim for axes in self.operands.values() for dim in flat(axes)}
        if unused:
            yield f"no operand runs over its dimension '{min(unused)}'"
        for axes in (*self.operands.values(), *(buffer.axes for buffer in schedule.buffers)):
            named_dims = flat(axes)
            if len({*named_dims}) != len(named_dims) or not {*named_dims} <= self.dims.keys():
                yield f"axes {axes} do not run over its dimensions {', '.join(self.dims)}, each once"
        if not 1 <= memories.cores <= _MOST_CORES or min(self.dims.values(), default=0) < 1:
            yield f"it has {memories.cores} cores and dimensions of {list(self.dims.values())}"
        if schedule.window is not None and schedule.window < 1:
            yield "its window has no keys"

    def places(self) -> Iterator[str]:
        memories = self.schedule.memories
        for buffer in self.schedule.buffers:
            if len(buffer.shape) != len(buffer.axes) or min(buffer.shape, default=0) < 1:
                yield f"'{buffer.name}' of shape {list(buffer.shape)} has {len(buffer.axes)} axes"
            elif not 1 <= buffer.copies <= _MOST_COPIES or buffer.offset % COPY_ALIGNMENT:
                yield f"'{buffer.name}' has {buffer.copies} copies from byte {buffer.offset} on"
            elif buffer.end > memories.capacity(buffer.memory):
                room = memories.capacity(buffer.memory)
                yield f"'{buffer.name}' ends at byte {buffer.end} of the {room} of {buffer.memory.value}"
        for memory in OnChipMemory:
            # In the order of offsets an overlap shows between neighbours.
            spans = sorted((b.offset, b.end, b.name) for b in self.schedule.buffers if b.memory is memory)
            yield from (
                f"'{name}' and '{other}' share bytes of {memory.value}"
                for (_, end, name), (start, _, other) in pairwise(spans)
                if start < end
            )
        # A buffer that only computation uses has no channel.
        moved = {s.buffer for s in statements(self.schedule.body) if isinstance(s, TileLoad | TileStore)}
        channels = Counter(
            b.channel + copy for b in self.schedule.buffers if b.name in moved for copy in range(b.copies)
        )
        if max(channels, default=0) >= _MOST_CHANNELS:
            yield f"it uses DMA channel {max(channels)}: there are {_MOST_CHANNELS} at the most"
        yield from (f"DMA channel {channel} serves {count} copies" for channel, count in channels.items() if count > 1)

    def statement(self, statement: Statement) -> str | None:
        match statement:
            case Loop(dim, tile, _, cores, stride, sees):
                sound = dim in self.dims and tile >= 1 and cores >= 1 and stride >= 1
                # The mask relates queries and keys only. A masked loop is not dealt out: its pieces would depend on the
                # core's place.
                masked = sees == "" or ({dim, sees} == {"q", "k"} and cores == 1 and {"q", "k"} <= self.dims.keys())
                if not sound or not masked or cores * stride > self.schedule.memories.cores:
                    return f"a loop over '{dim}' by {tile} for {cores} cores that sees '{sees}' makes no sense"
            case TileLoad(name, source, ahead):
                return self.unknown(name) or self.load(self.buffers[name], source, ahead)
            case TileStore(name, target):
                return self.unknown(name) or self.store(self.buffers[name], target)
            case Claim(name) | Wait(name):
                return self.unknown(name)
            case Compute():
                return self.compute(statement)
        return None

    def unknown(self, name: str) -> str | None:
        return None if name in self.buffers else f"there is no buffer '{name}'"

    def load(self, buffer: OnChipBuffer, source: str, ahead: int) -> str | None:
        if ahead >= _MOST_COPIES:
            return f"'{buffer.name}' cannot be loaded {ahead} visits ahead"
        if source in self.operands:
            dtype = next(o.dtype for o in self.schedule.operands if o.name == source)
            return self.goes(buffer, source, self.operands[source], dtype)
        if source not in self.buffers:
            return f"there is no '{source}' to load '{buffer.name}' from"
        held = self.buffers[source]
        # DDR reaches every memory; GSM reaches AM and SM. Nothing goes between AM and SM, or from them to GSM.
        if held.memory is not OnChipMemory.GSM or buffer.memory is OnChipMemory.GSM:
            return (
                f"there is no transfer from {held.memory.value} to {buffer.memory.value}: '{source}' to '{buffer.name}'"
            )
        return self.goes(buffer, source, held.axes, held.dtype)

    def store(self, buffer: OnChipBuffer, target: str) -> str | None:
        if target not in self.operands or buffer.memory is not OnChipMemory.AM:
            return f"'{buffer.name}' cannot be stored in '{target}'"
        dtype = next(o.dtype for o in self.schedule.operands if o.name == target)
        return self.goes(buffer, target, self.operands[target], dtype)

    def goes(self, buffer: OnChipBuffer, other: str, axes: Axes, dtype: Dtype) -> str | None:
        """Return why elements at both ends of a transfer differ in order or type, or None."""
        # `in` consumes the iterator, so this asks for a subsequence: the buffer's dimensions in the order of the other
        # end's.
        wide = iter(flat(axes))
        if buffer.dtype is not dtype or not all(dim in wide for dim in flat(buffer.axes)):
            return f"'{buffer.name}' and '{other}' differ in type or in the order of their dimensions"
        return None

    def compute(self, compute: Compute) -> str | None:
        kernel = MICRO_KERNELS.get(compute.kernel)
        arguments = kernel and kernel.arguments(len(compute.writes), len(compute.reads))
        if not arguments:
            return f"'{compute.kernel}' is no micro-kernel of so many buffers"
        names = (*compute.writes, *compute.reads)
        for argument, name in zip(arguments, names, strict=True):
            if name not in self.buffers:
                return self.unknown(name)
            if self.buffers[name].memory not in argument.memories:
                return f"'{compute.kernel}' cannot take '{name}' from {self.buffers[name].memory.value}"
        if len({*names}) < len(names):
            return f"'{compute.kernel}' takes a buffer twice: {', '.join(names)}"
        for name in compute.writes[: _SUMS.get(compute.kernel, 0)]:
            if self.buffers[name].dtype not in (Dtype.F32, Dtype.F64):
                return f"'{compute.kernel}' sums in '{name}', which is {self.buffers[name].dtype.value}: sums are f32"
        if compute.kernel in PRODUCTS:
            return self.product(compute)
        return None if compute.micro == (0, 0) else f"'{compute.kernel}' has no register tile: {compute}"

    def product(self, compute: Compute) -> str | None:
        axes = [self.buffers[name].axes for name in (*compute.writes, *compute.reads)]
        if any(len(item) != 2 or len(flat(item)) != 2 for item in axes) or min(compute.micro) < 1:
            return f"'{compute.kernel}' multiplies matrices, with a register tile: {compute}"
        (row, column), scalars, vectors = (flat(item) for item in axes)
        inner, last = vectors  # vectors lie along the columns
        if last != column or {*scalars} != {row, inner} or len({row, column, inner}) < 3:
            return f"the dimensions of {', '.join((*compute.writes, *compute.reads))} make no product"
        types = {self.buffers[name].dtype for name in compute.reads}
        if compute.kernel == ADD_RUN and types != {Dtype.F16}:
            return f"'{ADD_RUN}' sums products of f16 in f16, not of {', '.join(sorted(item.value for item in types))}"
        return None

    def sources(self) -> None:
        """Raise `UnsoundTilesError` if a buffer is loaded at several places: tiles issued ahead must be used next."""
        loads = Counter(s.buffer for s in statements(self.schedule.body) if isinstance(s, TileLoad))
        for name, count in loads.items():
            if count > 1:
                raise UnsoundTilesError(f"'{name}' is loaded at {count} places")
