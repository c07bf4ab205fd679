"""Micro-kernels of tile schedules in numpy: on tiles of on-chip buffers, float32 inside, rounded where they are stored.

Each takes a `TilePosition` and its tiles by the names of `ratrain.targets.mt3000.tiles.micro_kernels`, cut to the
current ranges. Scores and arrays of their shape are [keys, queries], or [queries, keys] where the position says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.targets.runtime.kernels.reference.reference_common import add_half_runs, f32, put

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, I32, Array


@frozen
class TilePosition:
    """Position of a micro-kernel in the whole attention: queries and keys, and constants of the head."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    scale: np.float32
    slope: np.float32
    """of ALiBi's bias; 0: none"""
    window: int | None
    keys_first: bool

    def scores(self, score: F32, documents: I32 | None) -> F32:
        """Return scaled, biased and masked scores; a key that is not seen has minus infinity.

        `documents` are the starts of the queries' documents.
        """
        i, j = np.arange(*self.queries, dtype=np.int32), np.arange(*self.keys, dtype=np.int32)
        distance = j[:, None] - i[None, :] if self.keys_first else j[None, :] - i[:, None]
        scores: F32 = score * self.scale
        if self.slope:
            scores += self.slope * distance.astype(np.float32)
        seen = distance <= 0
        if self.window is not None:
            seen &= distance > -self.window
        if documents is not None:
            seen &= (j[:, None] if self.keys_first else j[None, :]) >= self.along_queries(documents)
        scores[~seen] = -np.inf
        return scores

    def along_queries(self, row: Array) -> Array:
        """Return one number a query in a shape that broadcasts over scores."""
        return row[None, :] if self.keys_first else row[:, None]


def zero(place: TilePosition, out: Array) -> None:
    """Set out = 0."""
    del place
    out[...] = 0


def product(place: TilePosition, out: Array, scalars: Array, vectors: Array) -> None:
    """Set out = scalars @ vectors."""
    del place
    out[...] = f32(scalars) @ f32(vectors)


def add_product(place: TilePosition, out: Array, scalars: Array, vectors: Array) -> None:
    """Add scalars @ vectors to out."""
    del place
    out += f32(scalars) @ f32(vectors)


def add_run(place: TilePosition, out: F32, scalars: Array, vectors: Array) -> None:
    """Add scalars @ vectors to out, summed in float16 first."""
    del place
    add_half_runs(scalars, vectors, out, scalars.shape[1])


def transpose(place: TilePosition, out: Array, source: Array) -> None:
    """Set out = source, transposed."""
    del place
    out[...] = source.T


def round_sum(place: TilePosition, out: Array, total: F32, *added: Array) -> None:
    """Set out = total + everything added, rounded once."""
    del place
    result = total.copy()
    for term in added:
        result += f32(term)
    put(out, result)


def start_softmax(place: TilePosition, total: F32, peak: F32, out: F32) -> None:
    """Begin a softmax that has seen no key."""
    del place
    total[...] = 0
    peak[...] = -np.inf
    out[...] = 0


def softmax(
    place: TilePosition, total: F32, peak: F32, out: F32, weight: Array, score: F32, documents: I32 | None = None
) -> None:
    """Take a strip of keys into a running softmax over [keys, queries]; `weight` gets the exponentials."""
    scores = place.scores(score, documents)
    # Online softmax (Milakov and Gimelshein, 2018): when the peak rises, the sums so far are scaled down to the new
    # peak.
    new_peak = np.maximum(peak, scores.max(axis=0))
    # a query that has seen no key yet has no peak: 0 keeps its weights at exp(-inf) = 0
    base = np.where(np.isneginf(new_peak), np.float32(0), new_peak)
    exponentials, shrink = np.exp(scores - base), np.exp(peak - base)
    total[...] = total * shrink + exponentials.sum(axis=0)
    out *= shrink
    peak[...] = new_peak
    put(weight, exponentials)


def log_sum_exp(place: TilePosition, lse: F32, total: F32, peak: F32) -> None:
    """Set lse = peak + log(total)."""
    del place
    lse[...] = peak + np.log(total)


def divide_turned(place: TilePosition, result: Array, out: F32, total: F32) -> None:
    """Set result = out / total, transposed and rounded."""
    del place
    put(result, (out / total).T)


def row_product(place: TilePosition, delta: F32, left: Array, right: Array) -> None:
    """Set delta[r] = the product of row r of both."""
    del place
    delta[...] = (f32(left) * f32(right)).sum(axis=1)


def score_gradient(
    place: TilePosition,
    weight: Array,
    dscore: Array,
    score: F32,
    dweight: F32,
    lse: F32,
    delta: F32,
    documents: I32 | None = None,
) -> None:
    """Set weight to the probabilities of a strip, and dscore to the gradient of its scores."""
    scores = place.scores(score, documents)
    seen = ~np.isneginf(scores)
    prob = np.where(seen, np.exp(scores - place.along_queries(lse)), np.float32(0))
    put(weight, prob)
    put(dscore, np.where(seen, prob * (dweight - place.along_queries(delta)), np.float32(0)))


def scale_turned(place: TilePosition, result: Array, out: F32) -> None:
    """Set result = out times the scale of scores, transposed and rounded."""
    put(result, (out * place.scale).T)


def round_turned(place: TilePosition, result: Array, out: F32) -> None:
    """Set result = out, transposed and rounded."""
    del place
    put(result, out.T)
