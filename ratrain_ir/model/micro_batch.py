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
