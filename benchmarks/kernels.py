"""Predicted kernels of the MT-3000 beside published measurements: `python benchmarks/kernels.py`.

The model is checked in two ways. With the tiles that the search chooses: what this project's kernels should reach. And on the
FT-M7032, on which most public measurements were made (the same core, 8 to a cluster, at 1.8 GHz), in the precision that was
measured. Nothing is fitted to a published time; each line gives the error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.mt3000.tiles.tile_schedule import Loop, TileSchedule, statements
from ratrain.targets.mt3000.tiling.attention import PARTS, AttentionShape
from ratrain.targets.mt3000.tiling.core import Cluster, cluster_of
from ratrain.targets.mt3000.tiling.gemm import GemmShape, GemmTiles, gemm_schedule
from ratrain.targets.mt3000.tiling.tile_search import attention_tiles, gemm_tiles
from ratrain.targets.mt3000.tiling.tile_timing import TileTime, tile_time

MT3000 = cluster_of(load_machine("mt3000"))
FASTER = cluster_of(load_machine("mt3000-1.2ghz"))
FT_M7032 = evolve(MT3000, memories=evolve(MT3000.memories, cores=8), clock=1.8e9, ddr_bandwidth=32.4e9)
"""8 cores; DDR as five memory-bound runs of the public library imply: 34.3, 35.9, 31.7, 30.6 and 29.5 GB/s, on average."""
F16, F32, F64 = Dtype.F16, Dtype.F32, Dtype.F64


@frozen
class Case:
    """A kernel; `published` is a fraction of the peak of its precision, `at_most` where only a limit is known."""

    name: str
    cluster: Cluster
    flops: float
    schedules: tuple[TileSchedule, ...]
    published: float | None = None
    at_most: bool = False


def peak(cluster: Cluster, dtype: Dtype) -> float:
    """Flop a second."""
    return cluster.cores * cluster.clock * 2 * 3 * 128 / dtype.itemsize


def product(
    name: str, cluster: Cluster, shape: GemmShape, published: float | None = None, *, at_most: bool = False
) -> Case:
    schedule = gemm_tiles(shape, cluster)
    return Case(name, cluster, 2.0 * shape.m * shape.n * shape.k, (schedule,), published, at_most)


def square(dtype: Dtype, **fields: object) -> GemmShape:
    return evolve(GemmShape(8192, 4096, 4096, dtype, dtype, dtype), **fields)


def public_tiles() -> Case:
    """The tiles of the public FP32 library, 576 x 512 panels and 12 x 512 strips, in FP16: a grid of one row of cores."""
    shape = square(F16)
    tiles = GemmTiles(1, 24, 576, 192, 512, 512, 12, 32, (6, 3))
    schedule = gemm_schedule(shape, tiles, MT3000.memories) or gemm_schedule(
        shape, evolve(tiles, k=256), MT3000.memories
    )
    assert schedule is not None
    return Case("NN 8192x4096x4096, panels of the public library", MT3000, 2.0 * 8192 * 4096 * 4096, (schedule,), 0.702)


def cases() -> Iterator[Case]:
    yield product("NN 8192x4096x4096", MT3000, square(F16), 0.702)
    yield public_tiles()
    yield product("NN 8192x4096x4096, FP32", MT3000, square(F32), 0.63)
    yield product("NN 8192x4096x4096 at 1.2 GHz", FASTER, square(F16))
    yield product("NT 8192x4096x4096", MT3000, square(F16, trans_b=True))
    yield product(
        "TN 4096x4096x8192, added", MT3000, GemmShape(4096, 4096, 8192, F16, F16, F16, True, False, (("out", F16),))
    )
    for m, n, k in ((2048, 4096, 4096), (2048, 11008, 4096), (2048, 4096, 11008)):
        yield product(f"NT {m}x{n}x{k}", MT3000, GemmShape(m, n, k, F16, F16, F16, trans_b=True))
    for n in (192, 96, 32):
        yield product(f"NN 8192x{n}x4096", MT3000, square(F16, n=n))
    yield product("NN 16x4096x4096", MT3000, square(F16, m=16))
    for name, shape in (
        ("7B", AttentionShape(1, 2048, 32, 32, 128, None, F16)),
        ("70B", AttentionShape(1, 2048, 64, 8, 128, None, F16)),
    ):
        pairs = 2.0 * shape.batch * shape.heads * shape.head_dim * shape.visible
        for part, products in zip(PARTS, (2, 3, 4), strict=True):
            yield Case(f"{part} {name}", MT3000, products * pairs, (attention_tiles(part, shape, MT3000),))
        both = tuple(attention_tiles(part, shape, MT3000) for part in tuple(PARTS)[1:])
        yield Case(f"attention_backward {name}, as 5 products", MT3000, 5 * pairs, both)
    yield product("FT-M7032 DGEMM 144x12288x4096", FT_M7032, GemmShape(144, 12288, 4096, F64, F64, F64), 0.81)
    yield product("FT-M7032 DGEMM 192x12288x4096", FT_M7032, GemmShape(192, 12288, 4096, F64, F64, F64), 0.914)
    yield product("FT-M7032 SGEMM 20480x96x20480", FT_M7032, GemmShape(20480, 96, 20480, F32, F32, F32), 0.57)
    yield product(
        "FT-M7032 SGEMM 20480x32x20480", FT_M7032, GemmShape(20480, 32, 20480, F32, F32, F32), 0.25, at_most=True
    )
    yield product("FT-M7032 SGEMM 20480x32x32", FT_M7032, GemmShape(20480, 32, 32, F32, F32, F32), 0.08, at_most=True)


def tile_text(schedule: TileSchedule) -> str:
    """Shapes of what a core works on."""
    shapes = {buffer.name: buffer.shape for buffer in schedule.buffers}
    names = [name for name in ("sum", "a_panel", "a_strip", "score", "k_panel", "q_panel") if name in shapes]
    (micro,) = {
        s.micro for s in statements(schedule.body) if not isinstance(s, Loop) and getattr(s, "micro", (0, 0))[0]
    }
    tiles = [f"{name} {'x'.join(map(str, shapes[name]))}" for name in names]
    return ", ".join([*tiles, f"micro {micro[0]}x{micro[1]}"])


def main() -> None:
    start = time.perf_counter()
    every_case = list(cases())
    seconds = time.perf_counter() - start
    table = Table(title="Predicted (alone on a cluster) and published", show_lines=False)
    for heading in ("kernel", "tiles", "ms", "bound by", "DDR MB", "flop/DDR B", "% of peak", "published", "error"):
        table.add_column(heading, overflow="fold")
    for case in every_case:
        times: list[TileTime] = [tile_time(schedule, case.cluster) for schedule in case.schedules]
        total, ddr = sum(t.seconds for t in times), sum(t.ddr_bytes for t in times)
        dtype = case.schedules[0].operands[0].dtype
        fraction = case.flops / total / peak(case.cluster, dtype)
        limit = "" if case.published is None else f"{'<= ' if case.at_most else ''}{100 * case.published:.1f}"
        error = "" if case.published is None else f"{100 * (fraction / case.published - 1):+.0f} %"
        if case.at_most and case.published is not None:
            error = "within" if fraction <= case.published else error
        table.add_row(
            case.name,
            "; ".join(tile_text(schedule) for schedule in case.schedules),
            f"{1e3 * total:.2f}",
            max(times, key=lambda t: t.seconds).bound,
            f"{ddr / 1e6:.0f}",
            f"{case.flops / ddr:.0f}",
            f"{100 * fraction:.1f}",
            limit,
            error,
        )
    Console(width=200).print(table)
    print(f"{len(every_case)} kernels searched in {seconds:.2f} s")


if __name__ == "__main__":
    main()
