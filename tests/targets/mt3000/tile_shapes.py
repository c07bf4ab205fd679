"""Clusters and kernel shapes for the tests of tile schedules."""

from __future__ import annotations

from hypothesis import strategies as st

from ratrain.ratrain_ir.config.types import STORAGE_DTYPES
from ratrain.targets.mt3000.tiles.tile_schedule import Memories
from ratrain.targets.mt3000.tiling.attention import AttentionShape
from ratrain.targets.mt3000.tiling.core import Cluster
from ratrain.targets.mt3000.tiling.gemm import GemmShape

MT3000 = Cluster(Memories(24, 6 << 20, 768 << 10, 64 << 10), 8.1e12 / 9216, 30e9, 300e9, 512, 62, 26, 16, 10)
SMALL = Cluster(Memories(6, 20 << 10, 24 << 10, 2 << 10), 1e9, 30e9, 300e9, 512, 62, 26, 16, 10)
"""So little memory that small shapes have several panels, strips, turns and chunks."""

DTYPE = st.sampled_from(STORAGE_DTYPES)


@st.composite
def gemm_shapes(draw: st.DrawFn) -> GemmShape:
    """Products of all transpositions, types and added operands."""
    m, n, k = (draw(st.integers(1, 300)) for _ in range(3))
    added = tuple((name, draw(DTYPE)) for name in ("bias", "residual") if draw(st.booleans()))
    out = draw(DTYPE)
    if draw(st.booleans()):
        added += (("out", out),)
    return GemmShape(m, n, k, draw(DTYPE), draw(DTYPE), out, draw(st.booleans()), draw(st.booleans()), added)


@st.composite
def attention_shapes(draw: st.DrawFn) -> AttentionShape:
    """Grouped and windowed attention of a few heads, of packed documents or not."""
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    seq_len = draw(st.integers(1, 150))
    window = draw(st.none() | st.integers(1, 160))
    head_dim = draw(st.integers(1, 12))
    batch, dtype, documents = draw(st.integers(1, 2)), draw(DTYPE), draw(st.booleans())
    return AttentionShape(batch, seq_len, kv_heads * group, kv_heads, head_dim, window, dtype, documents)
