"""Cuts of a model into pipeline stages such that the heaviest stage is as light as possible.

All layers cost the same; the last stage also has the head. So a partition is the number of layers of the last stage and
an even spread of the others. All such numbers are tried:

    10 layers, head as heavy as 2 layers, 4 stages:   | 3 layers | 3 layers | 3 layers | 1 layer + head |
                                                      cuts 3, 6, 9; heaviest stage 3

Cost: one try per layer. Guarantee: no other cuts have a lighter heaviest stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.model_flops import visible_pairs_of_layers
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def layer_flops(model: ModelConfig, seq_len: int) -> int:
    """Return the floating-point operations of one layer's forward over one sequence; a multiply-add counts as two.

    Attention counts visible pairs only: keys up to the query, inside a sliding window. If layers differ in that, the
    result is their mean, rounded down.
    """
    pairs = sum(visible_pairs_of_layers(model, seq_len))
    return 2 * model.matrix_elements_per_layer * seq_len + 4 * model.q_size * pairs // model.layers


def head_flops(model: ModelConfig, seq_len: int) -> int:
    """Return the floating-point operations of the head's forward over one sequence: its product with the table."""
    return 2 * model.hidden_size * model.vocab_size * seq_len


def balance_cuts(model: ModelConfig, pp: int, seq_len: int) -> tuple[int, ...]:
    """Return the layer index where each later stage starts, so that the heaviest stage is as light as possible.

    Every stage has at least one layer. Embedding lookups are free. A backward costs the same multiple of the forward
    everywhere, so forward costs decide. Ties go to the least sum of squared stage costs. If layers do not divide
    evenly, the later stages get one more, because earlier ones keep more micro-batches in flight.

    Raises RT064 if there are fewer layers than stages, or a count is not positive.
    """
    if pp < 1 or seq_len < 1:
        fail("RT064", f"{pp} stages of sequences of {seq_len} tokens: both must be at least 1")
    if pp > model.layers:
        fail("RT064", f"{model.layers} layers cannot fill {pp} stages", help=f"use pp = {model.layers} or fewer")
    if pp == 1:
        return ()
    layer, head = layer_flops(model, seq_len), head_flops(model, seq_len)
    best: tuple[int, int, int] | None = None
    for last in range(1, model.layers - pp + 2):
        low, more = divmod(model.layers - last, pp - 1)
        tail = last * layer + head
        heaviest = max((low + bool(more)) * layer, tail)
        squares = tail**2 + (more * (low + 1) ** 2 + (pp - 1 - more) * low**2) * layer**2
        # lexicographic: the heaviest stage, then the spread, then the fewer layers next to the head
        best = min(best or (heaviest, squares, last), (heaviest, squares, last))
    assert best is not None, "a last stage of one layer is always possible"
    low, more = divmod(model.layers - best[2], pp - 1)
    sizes = [low] * (pp - 1 - more) + [low + 1] * more
    return tuple(sum(sizes[: stage + 1]) for stage in range(pp - 1))
