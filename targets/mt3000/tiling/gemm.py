"""Tiles of a matrix product: C tiles of all cores stay in AM over the whole inner dimension, A and B stream past them.

The cores form a grid of rows and columns, here 2 x 2:

            B columns 0   B columns 1
    A rows 0   core 0        core 1        panel of A in GSM -> strips to each core's SM -> broadcast elements
    A rows 1   core 2        core 3        tiles of B -> AM -> vectors

A panel of A, shared by all cores, is in GSM; strips of it go to each core's SM, from where a micro-kernel broadcasts
its elements. Tiles of B go to AM: from DDR where every core has its own, by way of GSM where the rows of the grid share
them. Sums are float32 and rounded once. A transposed B is transposed in AM, a transposed A only read in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.mt3000.tiles.micro_kernels import ADD_RUN
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
from ratrain.targets.mt3000.tiling.core import MICRO_TILES, Cluster, lanes, registers, run_end_cycles, step_cycles


@frozen
class GemmShape:
    """Matrix product [m, k] x [k, n].

    `added` are operands that join the sum, as (name, dtype); the old `out` may be one.
    """

    m: int
    n: int
    k: int
    a: Dtype
    b: Dtype
    out: Dtype
    trans_a: bool = False
    trans_b: bool = False
    added: tuple[tuple[str, Dtype], ...] = ()
    half_run: int | None = None
    """products that are summed in float16 at a time; None: sums are float32"""

    @property
    def arithmetic(self) -> Dtype:
        """Wider type of the two factors."""
        return max(self.a, self.b, key=lambda dtype: dtype.itemsize)

    @property
    def accumulator(self) -> Dtype:
        """Type of the sums: float32 at least."""
        return Dtype.F64 if self.arithmetic is Dtype.F64 else Dtype.F32

    @property
    def a_axes(self) -> Axes:
        """Axes of a in storage."""
        return (("k",), ("m",)) if self.trans_a else (("m",), ("k",))

    @property
    def b_axes(self) -> Axes:
        """Axes of b in storage."""
        return (("n",), ("k",)) if self.trans_b else (("k",), ("n",))


@frozen
class GemmTiles:
    """Sizes of all tiles: a grid of `rows` x `columns` cores, each with m x n of C and k rows of B at a time."""

    rows: int
    columns: int
    m: int
    n: int
    k: int
    panel_k: int
    strip_m: int
    result_m: int
    micro: tuple[int, int]


def gemm_schedule(shape: GemmShape, tiles: GemmTiles, memories: Memories) -> TileSchedule | None:
    """Return the schedule of a product with these tiles, or None where they do not fit."""
    layout = _layout(shape, tiles, memories)
    if not layout.fits:
        return None
    operands = [
        TiledOperand("a", shape.a, shape.a_axes),
        TiledOperand("b", shape.b, shape.b_axes),
        TiledOperand("out", shape.out, _C),
        *(TiledOperand(name, dtype, _BIAS if name == "bias" else _C) for name, dtype in shape.added if name != "out"),
    ]
    dims = (("m", shape.m), ("n", shape.n), ("k", shape.k))
    return TileSchedule("gemm", dims, None, memories, tuple(operands), tuple(layout.buffers), _nest(shape, tiles))


_C: Axes = (("m",), ("n",))
_BIAS: Axes = (("n",),)


def _layout(shape: GemmShape, tiles: GemmTiles, memories: Memories) -> BufferLayout:
    layout = BufferLayout(memories)
    panel, strip = (
        _sizes(shape.a_axes, m=m, k=k) for m, k in ((tiles.rows * tiles.m, tiles.panel_k), (tiles.strip_m, tiles.k))
    )
    layout.add("a_panel", OnChipMemory.GSM, shape.a, shape.a_axes, panel, copies=2)
    if tiles.rows > 1:
        b_panel = _sizes(shape.b_axes, k=tiles.panel_k, n=tiles.columns * tiles.n)
        layout.add("b_panel", OnChipMemory.GSM, shape.b, shape.b_axes, b_panel, copies=2)
    layout.add("a_strip", OnChipMemory.SM, shape.a, shape.a_axes, strip, copies=2)
    layout.add("b_tile", OnChipMemory.AM, shape.b, shape.b_axes, _sizes(shape.b_axes, k=tiles.k, n=tiles.n), copies=2)
    if shape.trans_b:
        layout.add("b_turned", OnChipMemory.AM, shape.b, (("k",), ("n",)), (tiles.k, tiles.n), transfers=False)
    layout.add("sum", OnChipMemory.AM, shape.accumulator, _C, (tiles.m, tiles.n), transfers=False)
    layout.add("result", OnChipMemory.AM, shape.out, _C, (tiles.result_m, tiles.n), copies=2)
    for name, dtype in shape.added:
        sizes = (tiles.n,) if name == "bias" else (tiles.result_m, tiles.n)
        layout.add(f"{name}_tile", OnChipMemory.AM, dtype, _BIAS if name == "bias" else _C, sizes, copies=2)
    return layout


def _sizes(axes: Axes, **extents: int) -> tuple[int, ...]:
    return tuple(prod(extents[dim] for dim in axis) for axis in axes)


def _nest(shape: GemmShape, tiles: GemmTiles) -> tuple[Statement, ...]:
    shares_b = tiles.rows > 1
    panels = ["a_panel", "b_panel"] if shares_b else ["a_panel"]
    sources = {"a_panel": "a", "b_panel": "b"}
    turned = "b_turned" if shape.trans_b else "b_tile"
    factors = Compute("add_product" if shape.half_run is None else ADD_RUN, ("sum",), ("a_strip", turned), tiles.micro)
    turn = (Compute("transpose", ("b_turned",), ("b_tile",)),) if shape.trans_b else ()
    stream = Loop(
        "k",
        tiles.k,
        (
            TileLoad("b_tile", "b_panel" if shares_b else "b", 1),
            Wait("b_tile"),
            *turn,
            Loop("m", tiles.strip_m, (TileLoad("a_strip", "a_panel", 1), Wait("a_strip"), factors)),
        ),
    )
    along_k = Loop(
        "k",
        tiles.panel_k,
        (
            Barrier(),
            *(TileLoad(panel, sources[panel], 1) for panel in panels),
            *(Wait(panel) for panel in panels),
            Barrier(),
            _on_grid(tiles, stream),
        ),
    )
    start = _on_grid(tiles, Compute("zero", ("sum",), ()))
    block = (start, along_k, _on_grid(tiles, *_results(shape, tiles)))
    return (Loop("m", tiles.rows * tiles.m, (Loop("n", tiles.columns * tiles.n, block),)),)


def _results(shape: GemmShape, tiles: GemmTiles) -> Iterator[Statement]:
    """Yield the statements that round finished sums and store them, a few rows at a time."""
    names = [name for name, _ in shape.added]
    if "bias" in names:
        yield from (TileLoad("bias_tile", "bias", 1), Wait("bias_tile"))
    rows = [name for name in names if name != "bias"]
    added = tuple(f"{name}_tile" for name in names)
    yield Loop(
        "m",
        tiles.result_m,
        (
            *(TileLoad(f"{name}_tile", name, 1) for name in rows),
            *(Wait(f"{name}_tile") for name in rows),
            Claim("result"),
            Wait("result"),
            Compute("round_sum", ("result",), ("sum", *added)),
            TileStore("result", "out"),
        ),
    )


def _on_grid(tiles: GemmTiles, *body: Statement) -> Loop:
    """Return a body on each core's own tile of C."""
    along_n = Loop("n", tiles.n, body, cores=tiles.columns)
    return Loop("m", tiles.m, (along_n,), cores=tiles.rows, stride=tiles.columns)


_DEPTHS = (16, 32, 64, 128, 256, 512)
_PANEL_FACTORS = (1, 4)
_RESULT_SHARE = 48
"""Divisor of AM for one copy of a strip of results: many rows in a transfer, little taken from the room of the sums."""
_COLUMN_ROUNDS = 4


def gemm_candidates(shape: GemmShape, memories: Memories) -> Iterator[GemmTiles]:
    """Yield tiles worth timing: for every grid, width, depth and micro-kernel the tallest C tile that fits."""
    width = lanes(shape.arithmetic)
    half_sums = shape.half_run is not None
    micros = [micro for micro in MICRO_TILES if registers(micro, shape.arithmetic, half_sums=half_sums) <= 64]
    # a micro-kernel takes one run at a time
    depths = _DEPTHS if shape.half_run is None else (shape.half_run,)
    for columns in (c for c in range(1, memories.cores + 1) if memories.cores % c == 0):
        # Widths that spread the columns evenly over one to four rounds, in whole vectors.
        even = {_up(-(-shape.n // (columns * rounds)), width) for rounds in range(1, _COLUMN_ROUNDS + 1)}
        widths = {min(n, shape.n) for n in even}
        for n in sorted(widths):
            for depth in sorted({min(depth, shape.k) for depth in depths}):
                for micro in micros:
                    yield from _tallest(shape, memories, columns, n, depth, micro)


def _tallest(
    shape: GemmShape, memories: Memories, columns: int, n: int, depth: int, micro: tuple[int, int]
) -> Iterator[GemmTiles]:
    rows = memories.cores // columns
    result_m = max(1, min(shape.m, memories.am_bytes // (_RESULT_SHARE * n * shape.accumulator.itemsize)))
    b_copies = 3 if shape.trans_b else 2
    # AM holds the tiles of B (two copies, and the transposed one), two strips of results with everything added to them,
    # and some alignment. The sums get the rest.
    taken = n * depth * shape.b.itemsize * b_copies
    taken += 2 * n * result_m * (shape.out.itemsize + sum(dtype.itemsize for _, dtype in shape.added)) + 1024
    most = (memories.am_bytes - taken) // (n * shape.accumulator.itemsize)
    strip_m = memories.sm_bytes // (2 * depth * shape.a.itemsize)
    for panel_k in sorted({min(_up(shape.k, depth), depth * factor) for factor in _PANEL_FACTORS}):
        gsm = memories.gsm_bytes // 2
        if rows > 1:
            gsm -= panel_k * columns * n * shape.b.itemsize
        m = min(most, gsm // (panel_k * rows * shape.a.itemsize))
        if m < 1:
            continue
        # The height is evened out over the rounds it takes anyway, so that the last round is no short one.
        rounds = -(-shape.m // (m * rows))
        m = min(m, _up(-(-shape.m // (rounds * rows)), micro[0]))
        strip = _down(min(strip_m, m), micro[0])
        yield GemmTiles(rows, columns, m, n, depth, panel_k, strip, min(result_m, m), micro)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _down(value: int, multiple: int) -> int:
    """Round down to a multiple, but to no less than 1; values smaller than a multiple stay."""
    return max(1, value // multiple * multiple) if value >= multiple else max(1, value)


def gemm_bound_seconds(shape: GemmShape, tiles: GemmTiles, cluster: Cluster) -> float:
    """Estimate the time of a schedule without building it: the slowest of arithmetic, DDR and GSM."""
    row_blocks = -(-shape.m // (tiles.rows * tiles.m))
    column_blocks = -(-shape.n // (tiles.columns * tiles.n))
    height, width = min(tiles.m, -(-shape.m // tiles.rows)), min(tiles.n, -(-shape.n // tiles.columns))
    vectors = -(-width // lanes(shape.arithmetic))
    depths = -(-shape.k // tiles.k)
    strips = -(-height // tiles.strip_m)
    blocks = strips * -(-min(height, tiles.strip_m) // tiles.micro[0]) * -(-vectors // tiles.micro[1])
    half_sums = shape.half_run is not None
    start = cluster.micro_kernel_start + (run_end_cycles(tiles.micro) if half_sums else 0)
    step = step_cycles(tiles.micro) * cluster.sum_factor(shape.arithmetic, half_sums=half_sums)
    cycles = blocks * (shape.k * step + depths * start)
    cycles += depths * (strips + 1) * cluster.dma_start
    if shape.trans_b:
        cycles += shape.k * width / cluster.transpose_rate
    a, b = shape.m * shape.k * shape.a.itemsize, shape.k * shape.n * shape.b.itemsize
    c = shape.m * shape.n * (shape.out.itemsize + sum(dtype.itemsize for name, dtype in shape.added if name != "bias"))
    # A panel is written to GSM once and read by every column of cores; likewise B by every row. Results are not
    # overlapped.
    gsm = a * column_blocks * (1 + tiles.columns)
    if tiles.rows > 1:
        gsm += b * row_blocks * (1 + tiles.rows)
    arithmetic = row_blocks * column_blocks * cycles / cluster.clock
    ddr = (a * column_blocks + b * row_blocks) / cluster.ddr_bandwidth
    return max(arithmetic, ddr, gsm / cluster.gsm_bandwidth) + c / cluster.ddr_bandwidth
