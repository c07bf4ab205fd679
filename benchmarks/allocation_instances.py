"""Allocation problems of the kind that pipeline training makes: one rank's buffers over one step.

A rank holds 8 transformer layers (hidden size 4096, feed-forward 11008, 4-way tensor parallel, bf16). Each layer's forward makes
14 saved tensors and 6 temporaries, its backward 18 temporaries; everything dies at its last consumer. Weights and gradients live
the whole step. A split backward computes the inputs' gradient first; the weights' half comes later and keeps what it needs.
"""

from __future__ import annotations

import random

from ratrain.passes.memory.allocation import AllocationProblem

STAGES = 8
LAYERS = 8
HIDDEN, FFN, HEADS, TENSOR_PARALLEL = 4096, 11008, 32, 4
TOKENS = 2048
SHORTEST = 512
ALIGNMENT = 512
BUFFERS_PER_LAYER = 38
WEIGHTS_PER_LAYER = 9

# Widths in bytes a token of the saved tensors, in order of birth; whether the weights' half of a backward needs them.
_H, _HT, _FT = 2 * HIDDEN, 2 * HIDDEN // TENSOR_PARALLEL, 2 * FFN // TENSOR_PARALLEL
_SAVED = (
    (_H, False), (4, False), (_H, True), (_HT, False), (_HT, False), (_HT, False), (4 * HEADS // TENSOR_PARALLEL, False),
    (_HT, True), (_H, False), (4, False), (_H, True), (_FT, False), (_FT, False), (_FT, True),
)  # fmt: skip
_FORWARD = (_H, 3 * _HT, _HT, _H, _FT, _H)
_BACKWARD = (_H, _FT, _FT, _FT, _H, _H, _H, _HT, _HT, _HT, _HT, 3 * _HT, _H, _H, _H, 4 * HEADS, _FT, _H)
_WEIGHT_HALF = (1, 5, 8, 13)
"""Backward temporaries that a delayed weights' half still reads."""


class _Clock:
    """Collects buffers while the ops of a schedule go by."""

    def __init__(self) -> None:
        self.now = 0
        self.sizes: list[int] = []
        self.intervals: list[tuple[tuple[int, int], ...]] = []

    def buffer(self, width: int, tokens: int, start: int) -> int:
        """A buffer born at `start`; returns its number."""
        self.sizes.append(-(-width * tokens // ALIGNMENT) * ALIGNMENT)
        self.intervals.append(((start, start + 1),))
        return len(self.sizes) - 1

    def until(self, index: int, stop: int) -> None:
        """The buffer lives until `stop`, not included."""
        self.intervals[index] = ((self.intervals[index][0][0], max(stop, self.intervals[index][0][1])),)


Saved = dict[int, list[int]]


def _forward(clock: _Clock, tokens: int) -> list[int]:
    saved = []
    for index, (width, _) in enumerate(_SAVED):
        saved.append(clock.buffer(width, tokens, clock.now))
        if index % 2 == 0 and index // 2 < len(_FORWARD):
            clock.until(clock.buffer(_FORWARD[index // 2], tokens, clock.now), clock.now + 1 + index % 3)
        clock.now += 1
    return saved


def _backward(clock: _Clock, tokens: int, saved: list[int], *, split: bool) -> list[int]:
    """One layer's backward; returns what its weights' half still needs."""
    kept = []
    for index, width in enumerate(_BACKWARD):
        made = clock.buffer(width, tokens, clock.now)
        clock.until(made, clock.now + 1 + (1, 2, 1, 3)[index % 4])
        if split and index in _WEIGHT_HALF:
            kept.append(made)
        consumed = len(_SAVED) - 1 - index * len(_SAVED) // len(_BACKWARD)
        clock.until(saved[consumed], clock.now + 1)
        clock.now += 1
    if split:
        kept += [saved[i] for i, (_, needed) in enumerate(_SAVED) if needed]
    return kept


def _weights(clock: _Clock, kept: list[int]) -> None:
    for index in kept:
        clock.until(index, clock.now + 1)
        clock.now += 1


def _order(micro_batches: int, stage: int, *, split: bool) -> list[tuple[str, int, int]]:
    """1F1B order of one stage: (op, micro-batch, chunk); with `split`, weights' halves lag `stage` micro-batches behind."""
    flight = min(STAGES - stage, micro_batches)
    done = [("F", j, 0) for j in range(flight)]
    lag = stage if split else 0
    for j in range(micro_batches):
        done.append(("B", j, 0))
        if split and j >= lag:
            done.append(("W", j - lag, 0))
        if j + flight < micro_batches:
            done.append(("F", j + flight, 0))
    if split:
        done += [("W", j, 0) for j in range(micro_batches - lag, micro_batches)]
    return done


def _interleaved_order(micro_batches: int, stage: int) -> list[tuple[str, int, int]]:
    """Interleaved 1F1B with two chunks a rank; `micro_batches` is a multiple of the number of stages."""
    total = 2 * micro_batches

    def place(step: int, op: str) -> tuple[str, int, int]:
        group, inside = divmod(step, 2 * STAGES)
        chunk = inside // STAGES
        return op, group * STAGES + inside % STAGES, chunk if op == "F" else 1 - chunk

    warm = min(total, (STAGES - stage - 1) * 2 + STAGES)
    done = [place(k, "F") for k in range(warm)]
    for k in range(total):
        if warm + k < total:
            done.append(place(warm + k, "F"))
        done.append(place(k, "B"))
    return done


def pipeline(
    buffers: int, stage: int, *, split: bool = False, interleaved: bool = False, varying: bool = False
) -> AllocationProblem:
    """A rank's problem with about `buffers` buffers."""
    micro_batches = max(1, round(buffers / (LAYERS * BUFFERS_PER_LAYER)))
    if interleaved:
        micro_batches = -(-micro_batches // STAGES) * STAGES
    order = _interleaved_order(micro_batches, stage) if interleaved else _order(micro_batches, stage, split=split)
    chance = random.Random(stage)
    lengths = [chance.randint(SHORTEST, TOKENS) if varying else TOKENS for _ in range(micro_batches)]
    clock = _Clock()
    layers = range(LAYERS // 2) if interleaved else range(LAYERS)
    saved: dict[tuple[int, int], list[list[int]]] = {}
    kept: dict[tuple[int, int], list[list[int]]] = {}
    for op, j, chunk in order:
        if op == "F":
            saved[j, chunk] = [_forward(clock, lengths[j]) for _ in layers]
        elif op == "B":
            tensors_of = saved.pop((j, chunk))
            kept[j, chunk] = [
                _backward(clock, lengths[j], tensors_of[layer], split=split) for layer in reversed(layers)
            ]
        else:
            for tensors in kept.pop((j, chunk)):
                _weights(clock, tensors)
    weight = HIDDEN * (4 * HIDDEN + 3 * FFN) // TENSOR_PARALLEL // (WEIGHTS_PER_LAYER - 2)
    for _ in range(LAYERS * WEIGHTS_PER_LAYER):
        for width in (2, 4):
            clock.until(clock.buffer(width, weight, 0), clock.now)
    return AllocationProblem(clock.sizes, clock.intervals, clock.now)


INSTANCES = {
    "1F1B stage 0": {"stage": 0},
    "1F1B stage 4": {"stage": 4},
    "interleaved stage 2": {"stage": 2, "interleaved": True},
    "zero-bubble stage 2": {"stage": 2, "split": True},
    "1F1B varying": {"stage": 0, "varying": True},
    "interleaved varying": {"stage": 2, "interleaved": True, "varying": True},
    "zero-bubble varying": {"stage": 2, "split": True, "varying": True},
}
