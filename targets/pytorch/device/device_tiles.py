"""Tiles of an attention on tensors: some queries against some keys, of some heads of one sequence.

Tiles are contiguous in scratch. The heads of a tile are neighbours that share keys and values. Products are batches
over the key-value heads, each with the queries of all query heads of its group:

    2 key-value heads, groups of 3, 256 queries, 512 keys:   [2, 3 * 256, d] @ [2, d, 512]

One matrix for all heads of a tile says which keys a query sees, and how far they are for ALiBi.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from ratrain.targets.program.attention_spec import AttentionBlockSpec
from ratrain.targets.pytorch.device import device_common
from ratrain.targets.pytorch.device.device_common import row_steps, shaped
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, I32, Array
    from ratrain.targets.runtime.arena.scratch import Plan

QUERIES, KEYS = 256, 512
"""Most queries and keys of a tile."""


@frozen
class TileShape:
    """Sizes of the tiles of an attention."""

    queries: int
    keys: int
    shared_heads: int
    """Key-value heads that are worked on at a time."""

    @classmethod
    def of(cls, spec: AttentionBlockSpec, queries: int | None = None, keys: int | None = None) -> TileShape:
        """Choose the sizes: `QUERIES` and `KEYS` unless given, and as many heads as fit a chunk.

        Neither the scores of a tile nor all keys of its heads exceed a chunk (or one head's).
        """
        queries, keys = min(queries or QUERIES, spec.queries), min(keys or KEYS, spec.keys)
        largest = max(spec.group * queries * keys, spec.keys * spec.head_dim)
        return cls(queries, keys, max(1, min(spec.kv_heads, device_common.CHUNK_ELEMENTS // largest)))

    def of_queries(self, spec: AttentionBlockSpec) -> Buffer:
        """Return the buffer of a tile of queries."""
        return Buffer((self.shared_heads * spec.group * self.queries * spec.head_dim,))

    def of_keys(self, spec: AttentionBlockSpec) -> Buffer:
        """Return the buffer of a tile of keys."""
        return Buffer((self.shared_heads * self.keys * spec.head_dim,))

    def line(self, spec: AttentionBlockSpec) -> Buffer:
        """Return a buffer with a number for each query of a tile."""
        return Buffer((self.shared_heads * spec.group * self.queries,))

    def scores(self, spec: AttentionBlockSpec) -> Buffer:
        """Return the buffer of a tile of scores."""
        return Buffer((self.shared_heads * spec.group * self.queries * self.keys,))


@frozen
class Heads:
    """Some neighbouring heads of one sequence, and their place in the operands."""

    spec: AttentionBlockSpec
    sequence: int
    shared: slice

    @property
    def count(self) -> int:
        """Number of query heads."""
        return int(self.shared.stop - self.shared.start) * self.spec.group

    @property
    def own(self) -> slice:
        """The query heads, as a slice."""
        return slice(self.shared.start * self.spec.group, self.shared.stop * self.spec.group)

    def of_queries(self, x: Array, rows: slice) -> Array:
        """View the part [heads, rows, head_dim] of x[batch * queries, heads * head_dim]."""
        spec = self.spec
        whole = x.view(spec.batch, spec.queries, spec.heads, spec.head_dim)
        return whole[self.sequence, rows, self.own].transpose(0, 1)

    def of_keys(self, x: Array, rows: slice) -> Array:
        """View the part [shared heads, rows, head_dim] of x[batch * keys, kv_heads * head_dim]."""
        spec = self.spec
        whole = x.view(spec.batch, spec.keys, spec.kv_heads, spec.head_dim)
        return whole[self.sequence, rows, self.shared].transpose(0, 1)

    def line(self, x: F32, rows: slice) -> F32:
        """View the part [heads, rows, 1] of x[heads, batch * queries]."""
        return x.view(self.spec.heads, self.spec.batch, self.spec.queries)[self.own, self.sequence, rows, None]

    def by_shared(self, x: F32) -> F32:
        """View [heads, rows, n] as [shared heads, heads of a group * rows, n], the form in which heads multiply."""
        return x.view(-1, self.spec.group * x.shape[1], x.shape[2])


def all_heads(spec: AttentionBlockSpec, shape: TileShape) -> Iterator[Heads]:
    """Yield the heads of each sequence, `shape.shared_heads` key-value heads at a time."""
    for sequence in range(spec.batch):
        for shared in row_steps(spec.kv_heads, shape.shared_heads):
            yield Heads(spec, sequence, shared)


def mask_plan(spec: AttentionBlockSpec, shape: TileShape) -> Plan:
    """Plan slopes of all heads, twice; positions of queries, keys, starts; distances; hidden keys, a part of them."""
    tile = (shape.queries * shape.keys,)
    heads = spec.all_heads or spec.heads
    return [
        Buffer((heads,), np.float64),
        Buffer((heads,)),
        Buffer((shape.queries,)),
        Buffer((shape.keys,)),
        Buffer((shape.queries,)),
        Buffer(tile),
        Buffer(tile, np.bool_),
        Buffer(tile, np.bool_),
    ]


MASK_BUFFERS = 8
"""Number of buffers of `mask_plan`."""


def put_slopes(heads: int, spare: Array, out: F32) -> None:
    """Set out = `alibi_slopes(heads)`: powers of two with exact exponents, so they are rounded once."""
    below = 1 << (heads.bit_length() - 1)
    # exponents -8 i / below, and -4 i / below for odd i, are exact in float64
    torch.arange(1, below + 1, out=spare[:below]).mul_(-8 / below)
    if heads > below:
        torch.arange(1, 2 * (heads - below), 2, out=spare[below:]).mul_(-4 / below)
    out.copy_(spare.exp2_())


class Mask:
    """Mask and ALiBi bias of tiles of scores, by the positions of their queries and keys."""

    def __init__(self, spec: AttentionBlockSpec, buffers: list[Array], documents: I32 | None) -> None:
        double, slopes, self.rows, self.columns, self.starts, self.distances, self.hides, self.part = buffers
        self.spec, self.documents = spec, documents
        self.slopes = slopes[spec.first_head or 0 :][: spec.heads]
        """slopes of these heads, which may be some of all"""
        if spec.alibi:
            put_slopes(spec.all_heads or spec.heads, double, slopes)

    def sees(self, queries: slice, keys: slice) -> bool:
        """Return whether any of the queries may see any of the keys; documents are not considered."""
        first, last = self.spec.first_query + queries.start, self.spec.first_query + queries.stop
        start, stop = self.spec.first_key + keys.start, self.spec.first_key + keys.stop
        return bool(start < last and stop > self.spec.first_seen(first))

    def _sees_all(self, queries: slice, keys: slice) -> bool:
        """Return whether each of the queries is certain to see each of the keys."""
        # starts of documents are on the device, and nothing here waits for it
        if self.documents is not None:
            return False
        first, last = self.spec.first_query + queries.start, self.spec.first_query + queries.stop - 1
        start, stop = self.spec.first_key + keys.start, self.spec.first_key + keys.stop
        return bool(stop <= first + 1 and start >= self.spec.first_seen(last))

    def key_tiles(self, queries: slice, keys: int) -> list[slice]:
        """Return the tiles with a key that one of the queries may see, ascending."""
        return [tile for tile in row_steps(self.spec.keys, keys) if self.sees(queries, tile)]

    def hidden(self, sequence: int, queries: slice, keys: slice) -> Array | None:
        """Return a mask [queries, keys] of the keys that a query does not see; None if all see all.

        It also fills the `distance` of the tile, except if it returns None without ALiBi.
        """
        spec = self.spec
        if self._sees_all(queries, keys) and not spec.alibi:
            return None
        rows, columns = self.rows[: queries.stop - queries.start], self.columns[: keys.stop - keys.start]
        torch.arange(spec.first_query + queries.start, spec.first_query + queries.stop, out=rows)
        torch.arange(spec.first_key + keys.start, spec.first_key + keys.stop, out=columns)
        distance = self.distance(queries, keys)
        torch.sub(columns, rows[:, None], out=distance)
        if self._sees_all(queries, keys):
            return None
        # distance = key - query: hidden are later keys, and those at or beyond the window's end
        hides = torch.gt(distance, 0, out=shaped(self.hides, distance.shape))
        if spec.window is not None:
            # a window of w shows the keys at distance 0 to -(w - 1)
            far = torch.le(distance, -spec.window, out=shaped(self.part, distance.shape))
            hides.logical_or_(far)
        if self.documents is not None:
            starts = self.documents.view(spec.batch, spec.queries)[sequence, queries]
            before = self.starts[: len(rows)].copy_(starts)[:, None]
            hides.logical_or_(torch.lt(columns, before, out=shaped(self.part, distance.shape)))
        return hides

    def distance(self, queries: slice, keys: slice) -> F32:
        """Return key position minus query position [queries, keys], as the last call of `hidden` left it."""
        return shaped(self.distances, (queries.stop - queries.start, keys.stop - keys.start))

    def apply(self, score: F32, heads: Heads, queries: slice, keys: slice, unit: float = 1.0) -> None:
        """Mask scores [heads, queries, keys] with -inf, after adding ALiBi's bias times `unit`."""
        hides = self.hidden(heads.sequence, queries, keys)
        if self.spec.alibi:
            slopes = self.slopes[heads.own, None, None]
            # bias = slope * (key - query), which is at most 0
            torch.addcmul(score, slopes, self.distance(queries, keys), value=unit, out=score)
        if hides is not None:
            score.masked_fill_(hides, float("-inf"))
