"""Tiles of attention: scores and probabilities are computed and used in AM and never reach DDR.

Every product has its scalars in SM and its vectors in AM, and nothing can be moved from AM to SM. So the forward, and
the half of the backward that gives the gradient of queries, hold a block of queries transposed in AM and stream keys
and values through SM: scores are [keys, queries], softmax runs along vectors, and the output grows as [head_dim,
queries]. The other half holds a block of keys and values in AM and streams queries and output gradients:

    part              held in AM (vectors)      streamed through SM (scalars)    sums in AM
    forward           q                         k, v                             o
    query gradient    q, do                     k, v                             dq
    key gradient      k, v                      q, do                            dk, dv

Each half of the backward computes scores and their gradients again: seven products instead of five. In return there are
no partial sums between cores, and results do not depend on timing.

Streamed operands come by way of GSM, once for all cores: a whole sequence of some heads where that fits there
(`resident`), else chunks that are read again for each held block. Heads and blocks are dealt out to a grid of cores.
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
    """Causal attention of `batch` sequences, all tensors of one storage type."""

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    dtype: Dtype
    documents: bool = False
    """True if queries see no key before the start of their document; as starts are data, the causal mask is timed: an
    upper bound"""

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def dims(self) -> tuple[tuple[str, int], ...]:
        """Extents by dimension: b sequences, g key-value heads, h query heads of one, q queries, k keys, d elements."""
        extents = (self.batch, self.kv_heads, self.group, self.seq_len, self.seq_len, self.head_dim)
        return tuple(zip("bghqkd", extents, strict=True))

    @property
    def visible(self) -> int:
        """Pairs of a query and a key it sees, in one head of one sequence."""
        return visible_pairs(self.seq_len, self.window)


@frozen
class AttentionTiles:
    """Sizes: `heads` key-value heads at a time, each on `blocks` cores with `held` rows and strips of `strip`."""

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
    """One of the three schedules of attention: the held dimension ("q" or "k"), and the streamed one."""

    kernel: str
    held: str
    streamed: str
    streams: tuple[str, ...]
    """operands that stream through SM"""

    @property
    def groups_inside(self) -> bool:
        """True if held rows serve all query heads of a group: keys and values do."""
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
    """Return the schedule of a part of attention with these tiles, or None where they do not fit."""
    layout = BufferLayout(memories)
    builder = _Builder(part, shape, tiles, layout)
    # Building the nest adds its buffers to the layout; only then is it known whether they fit.
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
    """Buffers and loop nest of one part."""

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
        """Return the nest in which GSM holds whole sequences and each core goes through its blocks at its own pace."""
        tiles, part = self.tiles, self.part
        stream = Loop(part.streamed, tiles.strip, inside, sees=part.held)
        held: Statement
        # Keys and values serve all query heads of a group: the sums of their gradients stay in AM while `h` runs
        # inside. Queries belong to one head, so `h` is outside and each head starts its sums anew.
        if part.groups_inside:
            held = Loop(part.held, tiles.held, (*before, Loop("h", 1, (stream,)), *after), cores=tiles.blocks)
        else:
            blocks = Loop(part.held, tiles.held, (*before, stream, *after), cores=tiles.blocks)
            held = Loop("h", 1, (blocks,))
        return (*self.panels(), Loop("g", 1, (held,), cores=tiles.heads, stride=tiles.blocks))

    def in_chunks(
        self, before: tuple[Statement, ...], inside: tuple[Statement, ...], after: tuple[Statement, ...]
    ) -> tuple[Statement, ...]:
        """Return the nest in which all cores hold one block each and take chunks together."""
        tiles, part = self.tiles, self.part
        stream: Statement = Loop(part.streamed, tiles.strip, inside, sees=part.held)
        if part.groups_inside:
            stream = Loop("h", 1, (stream,))
        chunks = Loop(part.streamed, tiles.chunk, (*self.panels(), self.on_grid(stream)), sees=part.held)
        rows = Loop(part.held, tiles.held * tiles.blocks, (self.on_grid(*before), chunks, self.on_grid(*after)))
        return (rows,) if part.groups_inside else (Loop("h", 1, (rows,)),)

    def on_grid(self, *body: Statement) -> Loop:
        """Return a body on each core's own head and block."""
        block = Loop(self.part.held, self.tiles.held, body, cores=self.tiles.blocks)
        return Loop("g", 1, (block,), cores=self.tiles.heads, stride=self.tiles.blocks)

    def panels(self) -> tuple[Statement, ...]:
        """Add GSM buffers for the streamed operands to the layout; return the statements that load them.

        There are two copies of each where there is room, to overlap loading with use.
        """
        tiles, part, layout = self.tiles, self.part, self.layout
        heads: tuple[str, ...] = ("g", "h", "d") if part.groups_inside else ("g", "d")
        width = tiles.heads * self.shape.head_dim
        if part.groups_inside:
            width *= self.shape.group
        # Two operands of two copies each.
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
        # At the first barrier no core reads the copies that the loads fill. At the second one core 0 has waited for
        # them, so all cores may read.
        return (Barrier(), *loads, *(Wait(panel) for panel, _ in names), Barrier())

    def strips(self) -> tuple[Statement, ...]:
        """Load a strip of the streamed operands into SM."""
        axes: Axes = ((self.part.streamed,), ("d",))
        shape = (self.tiles.strip, self.shape.head_dim)
        names = [f"{operand}_strip" for operand in self.part.streams]
        for name in names:
            self.layout.add(name, OnChipMemory.SM, self.shape.dtype, axes, shape, copies=2)
        loads = (TileLoad(name, name.replace("strip", "panel"), 1) for name in names)
        return (*loads, *(Wait(name) for name in names))

    def hold(self, operand: str) -> tuple[Statement, ...]:
        """Load a block of a held operand and transpose it: `operand`_held is [head_dim, rows]."""
        rows, d, dtype = self.tiles.held, self.shape.head_dim, self.shape.dtype
        tile = self.layout.add(
            f"{operand}_tile", OnChipMemory.AM, dtype, ((self.part.held,), ("d",)), (rows, d), copies=2
        )
        # Products take their vectors along the held rows, hence the transposition.
        held = self.am(f"{operand}_held", dtype, "d", self.part.held)
        return (TileLoad(tile, operand, 1), Wait(tile), Compute("transpose", (held,), (tile,)))

    def am(self, name: str, dtype: Dtype, *dims: str) -> str:
        """Add a buffer in AM that only computation uses; return its name."""
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
        """Add a buffer for one number a row; return its name."""
        return self.layout.add(f"{operand}_row", memory, _dtype_of(operand, self.shape), ((dim,),), (size,), copies=2)

    def starts(
        self, size: int, memory: OnChipMemory = OnChipMemory.AM
    ) -> tuple[tuple[str, ...], tuple[Statement, ...]]:
        """Return the buffer of the starts of queries' documents, and its load; none if documents are not kept apart."""
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
        # delta = rowsum(do * o) is computed with the queries' blocks and stored: the key gradient reads it from DDR.
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
        # Scores are [queries, keys] here: numbers of a query go with the scalars, so they are in SM.
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
        """Compute probabilities and gradients of scores of a strip.

        `factors` are scalars and vectors of scores, then of their gradients; `rows` are the buffers with one number a
        query.
        """
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
    """Yield tiles worth timing."""
    width = lanes(shape.dtype)
    for heads in (h for h in range(1, memories.cores + 1) if memories.cores % h == 0 and h <= shape.kv_heads):
        blocks = memories.cores // heads
        for micro in (m for m in MICRO_TILES if registers(m, shape.dtype) <= 64):
            # Held rows are the vectors of all products: as wide as the register tile, or, if that has one vector, a
            # part of it.
            rows = (width // 4, width // 2, width) if micro[1] == 1 else (micro[1] * width,)
            strips = sorted({min(strip, shape.seq_len) for strip in _STRIPS})
            for held, strip in product(sorted({min(row, shape.seq_len) for row in rows}), strips):
                yield AttentionTiles(heads, blocks, held, strip, shape.seq_len, True, micro)
                for chunk in (c for c in _CHUNKS if strip < c < shape.seq_len):
                    yield AttentionTiles(heads, blocks, held, strip, chunk, False, micro)


def attention_bound_seconds(part: _Part, shape: AttentionShape, tiles: AttentionTiles, cluster: Cluster) -> float:
    """Estimate the time of a schedule without building it.

    It is the slower of its products on the masked tiles and its DDR traffic.
    """
    products = {FORWARD.kernel: 2, QUERY_GRADIENT.kernel: 3, KEY_GRADIENT.kernel: 4}[part.kernel]
    seq, d, size = shape.seq_len, shape.head_dim, shape.dtype.itemsize
    window = min(shape.window or seq, seq)
    block = tiles.held if tiles.resident else tiles.held * tiles.blocks
    starts = np.arange(0, seq, block)
    # Rows that each held block meets: keys up to its end, or queries from its start on, within the window.
    met = np.minimum(starts + block, seq) if part.held == "q" else seq - starts
    met = np.minimum(met, window + block)
    blocks, reached = len(starts), float(met.mean())
    turns = -(-shape.kv_heads // tiles.heads) * shape.batch * shape.group
    vectors = -(-tiles.held // lanes(shape.dtype))
    calls = -(-d // tiles.micro[0]) * -(-vectors // tiles.micro[1])
    cycles = calls * (
        step_cycles(tiles.micro) * cluster.sum_factor(shape.dtype, half_sums=False)
        + cluster.micro_kernel_start / tiles.strip
    )
    rows = _of_busiest(met, tiles.blocks) if tiles.resident else float(met.sum())
    arithmetic = turns * rows * products * cycles / cluster.clock
    streamed = 2 * shape.batch * d * size * (shape.heads if part.groups_inside else shape.kv_heads)
    # Rows of each head that come from DDR: once if they stay in GSM, else once for each held block that meets them, and
    # for each query head.
    reads = seq if tiles.resident else blocks * reached
    if not (tiles.resident or part.groups_inside):
        reads *= shape.group
    return max(arithmetic, streamed * reads / cluster.ddr_bandwidth)


def _of_busiest(met: NDArray[np.int64], players: int) -> float:
    """Return the most rows that one core gets if blocks are dealt out in one order and then in reverse."""
    turns = np.zeros((-(-len(met) // players), players))
    turns.reshape(-1)[: len(met)] = met
    turns[1::2] = turns[1::2, ::-1].copy()
    return float(turns.sum(axis=0).max())
