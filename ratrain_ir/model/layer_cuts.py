"""Cuts of a model's layers into pipeline stages by work: the heaviest stage shall be as light as possible.

A layer's work is what a step computes in it, forward and backward. Of what does not train there are no weight
gradients, and below the lowest parameter that trains there is no backward. The last stage also has the head:

    10 layers, head as heavy as 2 layers, 4 stages:   | 3 layers | 3 layers | 3 layers | 1 layer + head |
                                                      cuts 3, 6, 9; heaviest stage 3

    the first 4 of 8 layers frozen, a third of the work each, no head, 2 stages:
                                                      | 1/3 1/3 1/3 1/3 1 | 1 1 1 |
                                                      cuts 5; heaviest stage 3

The least weight of the heaviest stage is bisected: stages are filled from the front up to a weight, and either suffice
or not. Then the cuts with the least sum of squares are found among those that keep it, stage by stage, from the best
way to reach each layer.

Cost: layers x layers of a stage. Guarantee: no other cuts have a lighter heaviest stage.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.blocks import block
from ratrain.ratrain_ir.model.trained_flops import block_flops
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.training import Training


def balance_cuts(model: ModelConfig, pp: int, seq_len: int, training: Training) -> tuple[int, ...]:
    """Return the layer index where each later stage starts, so that the heaviest stage is as light as possible.

    Every stage has at least one layer. Embedding lookups are free. Ties go to the least sum of squared stage costs,
    then to fewer layers next to the head, then to fewer layers in earlier stages, because these keep more micro-batches
    in flight.

    Raises RT064 if there are fewer layers than stages, or a count is not positive.
    """
    if pp < 1 or seq_len < 1:
        fail("RT064", f"{pp} stages of sequences of {seq_len} tokens: both must be at least 1")
    if pp > model.layers:
        fail("RT064", f"{model.layers} layers cannot fill {pp} stages", help=f"use pp = {model.layers} or fewer")
    return () if pp == 1 else _cut(layer_work(model, seq_len, training), pp)


def layer_work(model: ModelConfig, seq_len: int, training: Training) -> list[int]:
    """Return the operations of each layer in a step over one sequence, those of the head with the last one."""
    flops = block_flops(model, seq_len, training)
    work = [flops[block("attention", layer)] + flops[block("mlp", layer)] for layer in range(model.layers)]
    work[-1] += flops[block("head")]
    return work


def _cut(work: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the cuts of layers into stages; there are at least as many layers."""
    ends = list(accumulate(work, initial=0))
    heaviest = _least_heaviest(work, ends, stages)
    # of each layer: the least (squares, layers weighted by the stages behind them) before it, and the cuts there
    best: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {0: ((0, 0), ())}
    for behind in reversed(range(1, stages)):
        reached: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {}
        for start, ((squares, early), cuts) in best.items():
            most = min(bisect_right(ends, ends[start] + heaviest) - 1, len(work) - behind)
            for end in range(most, start, -1):
                if ends[-1] - ends[end] > behind * heaviest:
                    break
                costs = squares + (ends[end] - ends[start]) ** 2, early + behind * (end - start)
                if end not in reached or costs < reached[end][0]:
                    reached[end] = costs, (*cuts, end)
        best = reached
    found = (
        ((squares + (ends[-1] - ends[start]) ** 2, len(work) - start, early), cuts)
        for start, ((squares, early), cuts) in best.items()
    )
    return min(found)[1]


def _least_heaviest(work: Sequence[int], ends: Sequence[int], stages: int) -> int:
    """Return the least weight such that stages of no more hold all layers, filled from the front."""
    low, high = max(work), ends[-1]
    while low < high:
        tried, start = (low + high) // 2, 0
        for _ in range(stages):
            start = bisect_right(ends, ends[start] + tried) - 1
        low, high = (low, tried) if start == len(work) else (tried + 1, high)
    return low
