"""Rows of the tensors between the layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan


def tokens_per_micro_batch(plan: Plan) -> int:
    """Return the rows of an activation: sequences of a micro-batch times tokens of a sequence (or of a slice).

    A context rank has its share of them.
    """
    return plan.micro_batch_size * plan.seq_len // plan.cp


def mlp_chunk_rows(plan: Plan) -> int:
    """Return the rows an mlp block computes at a time: `mlp_chunk`, or at most all of a micro-batch."""
    rows = tokens_per_micro_batch(plan)
    return min(plan.mlp_chunk or rows, rows)


def mlp_chunk_starts(plan: Plan) -> range:
    """Return the first row of each chunk of an mlp block."""
    return range(0, tokens_per_micro_batch(plan), mlp_chunk_rows(plan))
