"""Tiles of attention: scores and probabilities are made and used in AM and never reach DDR.

Every product has its scalars in SM and its vectors in AM, and nothing can be moved from AM to SM. So the forward, and the half of the
backward that gives the gradient of queries, hold a block of queries transposed in AM and stream keys and values through SM: scores are
[keys, queries], softmax runs along vectors, and the output grows as [head_dim, queries]. The other half holds a block of keys and
values in AM and streams queries and output gradients. So each half computes scores and their gradients anew: seven products instead
of five, no partial sums between cores, and results that do not depend on timing.

What is streamed comes by way of GSM, once for all cores: for as long as a whole sequence of some heads fits there (`resident`), else
in chunks that are read again for each block of what is held. Heads and blocks are dealt out to a grid of cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.model_flops import visible_pairs
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.mt3000.tiles.calls import attention_operands
from ratrain.targets.mt3000.tiles.tile_schedule import (
    Axes,
    Barrier,
    Claim,
    Compute,
    Loop,
    Memories,
    OnChipMemory,
    Statement,
    TiledOperand,
    TileLoad,
    TileSchedule,
    TileStore,
    Wait,
)
from ratrain.targets.mt3000.tiling.buffer_layout import BufferLayout
from ratrain.targets.mt3000.tiling.core import MICRO_TILES, Cluster, lanes, registers, step_cycles


@frozen
class AttentionShape:
    """A causal attention of `batch` sequences, all tensors of one storage type."""

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    dtype: Dtype
    documents: bool = False
    """whether queries see no key before the start of their document; as starts are data, the causal mask is what is timed: an upper bound"""

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def dims(self) -> tuple[tuple[str, int], ...]:
        """Sequences, key-value heads, query heads of one, queries, keys, elements of a head."""
        extents = (self.batch, self.kv_heads, self.group, self.seq_len, self.seq_len, self.head_dim)
        return tuple(zip("bghqkd", extents, strict=True))

    @property
    def visible(self) -> int:
        """Pairs of a query and a key it sees, in one head of one sequence."""
        return visible_pairs(self.seq_len, self.window)


@frozen
class AttentionTiles:
    """Sizes: `heads` key-value heads at a time, each with `blocks` cores; a core holds `held` rows and takes strips of `strip`."""

    heads: int
    blocks: int
    held: int
    strip: int
    chunk: int
    """rows of a head that GSM holds"""
    resident: bool
    """a chunk is a whole sequence and stays while all blocks use it"""
    micro: tuple[int, int]


@frozen
class _Part:
    """One of the three schedules of attention, in terms of what is held ("q" or "k") and what streams past."""

    kernel: str
    held: str
    streamed: str
    streams: tuple[str, ...]
    """operands that stream through SM"""

    @property
    def groups_inside(self) -> bool:
        """Whether what is held serves all query heads of a group: keys and values do."""
        return self.held == "k"


FORWARD = _Part("attention_forward", "q", "k", ("k", "v"))
QUERY_GRADIENT = _Part("attention_query_gradient", "q", "k", ("k", "v"))
KEY_GRADIENT = _Part("attention_key_gradient", "k", "q", ("q", "do"))
PARTS = {part.kernel: part for part in (FORWARD, QUERY_GRADIENT, KEY_GRADIENT)}

_ROW_OPERANDS = ("lse", "delta")
_DOCUMENTS = "documents"


def attention_schedule(
    part: _Part, shape: AttentionShape, tiles: AttentionTiles, memories: Memories
) -> TileSchedule | None:
    """The schedule of a part of attention with these tiles, or None where they do not fit."""
    layout = BufferLayout(memories)
    builder = _Builder(part, shape, tiles, layout)
    body = builder.nest()
    if not layout.fits:
        return None
    operands = tuple(
        TiledOperand(name, _dtype_of(name, shape), axes)
        for name, axes in attention_operands(part.kernel, documents=shape.documents).items()
    )
    return TileSchedule(part.kernel, shape.dims, shape.window, memories, operands, tuple(layout.buffers), body)


def _dtype_of(operand: str, shape: AttentionShape) -> Dtype:
    if operand == _DOCUMENTS:
        return Dtype.I32
    return Dtype.F32 if operand in _ROW_OPERANDS else shape.dtype


@frozen
class _Builder:
    """Buffers and nest of one part."""

    part: _Part
    shape: AttentionShape
    tiles: AttentionTiles
    layout: BufferLayout

    def nest(self) -> tuple[Statement, ...]:
        before, inside, after = {
            "attention_forward": self.forward,
            "attention_query_gradient": self.query_gradient,
            "attention_key_gradient": self.key_gradient,
        }[self.part.kernel]()
        arrange = self.resident if self.tiles.resident else self.in_chunks
        heads = Loop("g", self.tiles.heads, arrange(before, inside, after))
        return (Loop("b", 1, (heads,)),)

    def resident(
        self, before: tuple[Statement, ...], inside: tuple[Statement, ...], after: tuple[Statement, ...]
    ) -> tuple[Statement, ...]:
        """GSM holds whole sequences; each core goes through its blocks at its own pace."""
        tiles, part = self.tiles, self.part
        stream = Loop(part.streamed, tiles.strip, inside, sees=part.held)
        held: Statement
        if part.groups_inside:
            held = Loop(part.held, tiles.held, (*before, Loop("h", 1, (stream,)), *after), cores=tiles.blocks)
        else:
            blocks = Loop(part.held, tiles.held, (*before, stream, *after), cores=tiles.blocks)
            held = Loop("h", 1, (blocks,))
        return (*self.panels(), Loop("g", 1, (held,), cores=tiles.heads, stride=tiles.blocks))

    def in_chunks(
        self, before: tuple[Statement, ...], inside: tuple[Statement, ...], after: tuple[Statement, ...]
    ) -> tuple[Statement, ...]:
        """All cores hold one block each and take chunks together."""
        tiles, part = self.tiles, self.part
        stream: Statement = Loop(part.streamed, tiles.strip, inside, sees=part.held)
        if part.groups_inside:
            stream = Loop("h", 1, (stream,))
        chunks = Loop(part.streamed, tiles.chunk, (*self.panels(), self.on_grid(stream)), sees=part.held)
        rows = Loop(part.held, tiles.held * tiles.blocks, (self.on_grid(*before), chunks, self.on_grid(*after)))
        return (rows,) if part.groups_inside else (Loop("h", 1, (rows,)),)

    def on_grid(self, *body: Statement) -> Loop:
        """Each core's own head and block."""
        block = Loop(self.part.held, self.tiles.held, body, cores=self.tiles.blocks)
        return Loop("g", 1, (block,), cores=self.tiles.heads, stride=self.tiles.blocks)

    def panels(self) -> tuple[Statement, ...]:
        """Load what streams into GSM, twice as much where there is room, so that the next part comes while this one is used."""
        tiles, part, layout = self.tiles, self.part, self.layout
        heads: tuple[str, ...] = ("g", "h", "d") if part.groups_inside else ("g", "d")
        width = tiles.heads * self.shape.head_dim
        if part.groups_inside:
            width *= self.shape.group
        nbytes = 4 * tiles.chunk * width * self.shape.dtype.itemsize
        copies = 2 if nbytes <= layout.memories.gsm_bytes else 1
        names = []
        for operand in part.streams:
            axes = ((part.streamed,), heads)
            layout.add(
                f"{operand}_panel", OnChipMemory.GSM, self.shape.dtype, axes, (tiles.chunk, width), copies=copies
            )
            names.append((f"{operand}_panel", operand))
        loads = (TileLoad(panel, operand, copies - 1) for panel, operand in names)
        return (Barrier(), *loads, *(Wait(panel) for panel, _ in names), Barrier())

    def strips(self) -> tuple[Statement, ...]:
        """Load a strip of what streams into SM."""
        axes: Axes = ((self.part.streamed,), ("d",))
        shape = (self.tiles.strip, self.shape.head_dim)
        names = [f"{operand}_strip" for operand in self.part.streams]
        for name in names:
            self.layout.add(name, OnChipMemory.SM, self.shape.dtype, axes, shape, copies=2)
        loads = (TileLoad(name, name.replace("strip", "panel"), 1) for name in names)
        return (*loads, *(Wait(name) for name in names))

    def hold(self, operand: str) -> tuple[Statement, ...]:
        """Load a block of what is held and transpose it: `operand`_held is [head_dim, rows]."""
        rows, d, dtype = self.tiles.held, self.shape.head_dim, self.shape.dtype
        tile = self.layout.add(
            f"{operand}_tile", OnChipMemory.AM, dtype, ((self.part.held,), ("d",)), (rows, d), copies=2
        )
        held = self.am(f"{operand}_held", dtype, "d", self.part.held)
        return (TileLoad(tile, operand, 1), Wait(tile), Compute("transpose", (held,), (tile,)))

    def am(self, name: str, dtype: Dtype, *dims: str) -> str:
        """A buffer in AM that only computation uses."""
        sizes = {"d": self.shape.head_dim, self.part.held: self.tiles.held, self.part.streamed: self.tiles.strip}
        axes = tuple((dim,) for dim in dims)
        return self.layout.add(name, OnChipMemory.AM, dtype, axes, tuple(sizes[dim] for dim in dims), transfers=False)

    def product(self, out: str, scalars: str, vectors: str, *, adds: bool = False) -> Compute:
        return Compute("add_product" if adds else "product", (out,), (scalars, vectors), self.tiles.micro)

    def result(self, operand: str, compute: str, *sources: str) -> tuple[Statement, ...]:
        """Round a sum [head_dim, rows], transposed back, and store it."""
        rows, d = self.tiles.held, self.shape.head_dim
        axes: Axes = ((self.part.held,), ("d",))
        tile = self.layout.add(f"{operand}_result", OnChipMemory.AM, self.shape.dtype, axes, (rows, d), copies=2)
        return (Claim(tile), Wait(tile), Compute(compute, (tile,), sources), TileStore(tile, operand))

    def row(self, operand: str, dim: str, size: int, memory: OnChipMemory = OnChipMemory.AM) -> str:
        """A buffer for one number a row."""
        return self.layout.add(f"{operand}_row", memory, _dtype_of(operand, self.shape), ((dim,),), (size,), copies=2)

    def starts(
        self, size: int, memory: OnChipMemory = OnChipMemory.AM
    ) -> tuple[tuple[str, ...], tuple[Statement, ...]]:
        """The buffer of where the documents of queries start, and what loads it; none where they are not kept apart."""
        if not self.shape.documents:
            return (), ()
        row = self.row(_DOCUMENTS, "q", size, memory)
        return (row,), (TileLoad(row, _DOCUMENTS, 1), Wait(row))

    def forward(self) -> tuple[tuple[Statement, ...], tuple[Statement, ...], tuple[Statement, ...]]:
        half, single, rows = self.shape.dtype, Dtype.F32, self.tiles.held
        before = self.hold("q")
        total, peak, out = (
            self.am("total", single, "q"),
            self.am("peak", single, "q"),
            self.am("o_sum", single, "d", "q"),
        )
        starts, loads = self.starts(rows)
        before = (*before, *loads, Compute("start_softmax", (total, peak, out), ()))
        score, weight = self.am("score", single, "k", "q"), self.am("weight", half, "k", "q")
        inside = (
            *self.strips(),
            self.product(score, "k_strip", "q_held"),
            Compute("softmax", (total, peak, out, weight), (score, *starts)),
            self.product(out, "v_strip", weight, adds=True),
        )
        lse = self.row("lse", "q", rows)
        after = (
            Claim(lse),
            Wait(lse),
            Compute("log_sum_exp", (lse,), (total, peak)),
            TileStore(lse, "lse"),
            *self.result("o", "divide_turned", out, total),
        )
        return before, inside, after

    def query_gradient(self) -> tuple[tuple[Statement, ...], tuple[Statement, ...], tuple[Statement, ...]]:
        half, single, rows, d = self.shape.dtype, Dtype.F32, self.tiles.held, self.shape.head_dim
        o_tile = self.layout.add("o_tile", OnChipMemory.AM, half, (("q",), ("d",)), (rows, d), copies=2)
        lse, delta = self.row("lse", "q", rows), self.row("delta", "q", rows)
        gradient = self.am("dq_sum", single, "d", "q")
        starts, loads = self.starts(rows)
        before = (
            *loads,
            *self.hold("q"),
            *self.hold("do"),
            *(TileLoad(o_tile, "o", 1), TileLoad(lse, "lse", 1), Wait(o_tile), Wait(lse)),
            *(Claim(delta), Wait(delta)),
            Compute("row_product", (delta,), ("do_tile", o_tile)),
            TileStore(delta, "delta"),
            Compute("zero", (gradient,), ()),
        )
        inside = (
            *self.strips(),
            *self.score_gradients(("k_strip", "q_held", "v_strip", "do_held"), (lse, delta, *starts), "k", "q"),
            self.product(gradient, "k_strip", "dscore", adds=True),
        )
        return before, inside, self.result("dq", "scale_turned", gradient)

    def key_gradient(self) -> tuple[tuple[Statement, ...], tuple[Statement, ...], tuple[Statement, ...]]:
        single = Dtype.F32
        dk, dv = self.am("dk_sum", single, "d", "k"), self.am("dv_sum", single, "d", "k")
        before = (
            *self.hold("k"),
            *self.hold("v"),
            *(Compute("zero", (dk,), ()), Compute("zero", (dv,), ())),
        )
        rows = [self.row(name, "q", self.tiles.strip, OnChipMemory.SM) for name in _ROW_OPERANDS]
        starts, loads = self.starts(self.tiles.strip, OnChipMemory.SM)
        inside = (
            *self.strips(),
            *loads,
            *(TileLoad(row, name, 1) for row, name in zip(rows, _ROW_OPERANDS, strict=True)),
            *(Wait(row) for row in rows),
            *self.score_gradients(("q_strip", "k_held", "do_strip", "v_held"), (*rows, *starts), "q", "k"),
            self.product(dv, "do_strip", "weight", adds=True),
            self.product(dk, "q_strip", "dscore", adds=True),
        )
        after = (*self.result("dk", "scale_turned", dk), *self.result("dv", "round_turned", dv))
        return before, inside, after

    def score_gradients(
        self, factors: tuple[str, str, str, str], rows: tuple[str, ...], *dims: str
    ) -> tuple[Statement, ...]:
        """Probabilities and the gradients of scores of a strip: of scores and of output gradients the scalars and vectors; what rows have."""
        scalars, vectors, out_scalars, out_vectors = factors
        half, single = self.shape.dtype, Dtype.F32
        score, dweight = self.am("score", single, *dims), self.am("dweight", single, *dims)
        weight, dscore = self.am("weight", half, *dims), self.am("dscore", half, *dims)
        return (
            self.product(score, scalars, vectors),
            self.product(dweight, out_scalars, out_vectors),
            Compute("score_gradient", (weight, dscore), (score, dweight, *rows)),
        )


_STRIPS = (6, 18, 36, 54, 126)
"""Mostly multiples of the rows of every micro-kernel."""
_CHUNKS = (64, 256, 512, 1024, 2048)


def attention_candidates(shape: AttentionShape, memories: Memories) -> Iterator[AttentionTiles]:
    """Tiles worth timing."""
    width = lanes(shape.dtype)
    for heads in (h for h in range(1, memories.cores + 1) if memories.cores % h == 0 and h <= shape.kv_heads):
        blocks = memories.cores // heads
        for micro in (m for m in MICRO_TILES if registers(m, shape.dtype) <= 64):
            rows = (width // 4, width // 2, width) if micro[1] == 1 else (micro[1] * width,)
            strips = sorted({min(strip, shape.seq_len) for strip in _STRIPS})
            for held, strip in product(sorted({min(row, shape.seq_len) for row in rows}), strips):
                yield AttentionTiles(heads, blocks, held, strip, shape.seq_len, True, micro)
                for chunk in (c for c in _CHUNKS if strip < c < shape.seq_len):
                    yield AttentionTiles(heads, blocks, held, strip, chunk, False, micro)


def attention_bound_seconds(part: _Part, shape: AttentionShape, tiles: AttentionTiles, cluster: Cluster) -> float:
    """About the time of a schedule, without building it: its products on the masked tiles, or its DDR traffic."""
    products = {FORWARD.kernel: 2, QUERY_GRADIENT.kernel: 3, KEY_GRADIENT.kernel: 4}[part.kernel]
    seq, d, size = shape.seq_len, shape.head_dim, shape.dtype.itemsize
    window = min(shape.window or seq, seq)
    block = tiles.held if tiles.resident else tiles.held * tiles.blocks
    starts = np.arange(0, seq, block)
    met = np.minimum(starts + block, seq) if part.held == "q" else seq - starts
    met = np.minimum(met, window + block)
    blocks, reached = len(starts), float(met.mean())
    turns = -(-shape.kv_heads // tiles.heads) * shape.batch * shape.group
    vectors = -(-tiles.held // lanes(shape.dtype))
    calls = -(-d // tiles.micro[0]) * -(-vectors // tiles.micro[1])
    cycles = calls * (step_cycles(tiles.micro) + cluster.micro_kernel_start / tiles.strip)
    rows = _of_busiest(met, tiles.blocks) if tiles.resident else float(met.sum())
    arithmetic = turns * rows * products * cycles / cluster.clock
    streamed = 2 * shape.batch * d * size * (shape.heads if part.groups_inside else shape.kv_heads)
    reads = seq if tiles.resident else blocks * reached
    if not (tiles.resident or part.groups_inside):
        reads *= shape.group
    return max(arithmetic, streamed * reads / cluster.ddr_bandwidth)


def _of_busiest(met: NDArray[np.int64], players: int) -> float:
    """The most that one player gets where pieces are dealt out there and back again."""
    turns = np.zeros((-(-len(met) // players), players))
    turns.reshape(-1)[: len(met)] = met
    turns[1::2] = turns[1::2, ::-1].copy()
    return float(turns.sum(axis=0).max())
