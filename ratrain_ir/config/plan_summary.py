"""A plan in a few words, as tables show it, and the legend of these words.

`P2 D4 T2 b8 M16 V2 Z3 of 2 (embed 1, head 1) each` has 2 stages, 4 replicas, 2 tensor-parallel ranks and so on. Numbers
that are 1 or unset are left out, but for stages, replicas, sequences and micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ratrain.ratrain_ir.config.accumulation import F32_SUMS
from ratrain.ratrain_ir.config.plan_keys import OF_HEADS, OF_KEYS


def summary_text(plan: Any) -> str:
    """Return the summary of a plan: its sizes, and numerics that are not usual."""
    packing = (("gather", plan.gather_quantised), ("reduce", plan.reduce_quantised))
    packed = "".join(f" {what} {name}" for what, name in packing if name is not None)
    sums = "" if plan.accumulate == F32_SUMS else f" sums {plan.accumulate}"
    sizes = sizes_text(plan, len(plan.slices), plan.cp, plan.context_exchange, plan.context_groups, plan.ep)
    return f"{sizes}{packed}{sums}{plan.training.summary}"


def sizes_text(
    of: Any, slices: int, contexts: int = 1, exchange: str = OF_KEYS, groups: int = 1, expert_ranks: int = 1
) -> str:
    """Return the summary of a plan, or of a planner's shape, which has the same fields but for those given apart.

    `slices` is their number, 0 or 1 for whole sequences; `contexts` that of context ranks, `exchange` what these
    exchange; `groups` is the number of groups of key heads that they gather one after the other; `expert_ranks` that of
    replicas that share out experts.
    """
    context = "Ch" if exchange == OF_HEADS else "C"
    several = f"{contexts}g{groups}" if groups > 1 else contexts
    chunks = "" if of.chunks == 1 else f" V{of.chunks}"
    cut = "" if slices < 2 else f" k{slices}"
    sizes = ((context, contexts, several), ("T", of.tp, of.tp), ("E", expert_ranks, expert_ranks))
    ranks = "".join(f" {letter}{text}" for letter, size, text in sizes if size > 1)
    return f"P{of.pp} D{of.dp}{ranks} b{of.micro_batch_size} M{of.micro_batches}{chunks}{cut} {state_text(of)}"


def state_text(of: Any) -> str:
    """Return the part of a plan's or shape's summary about training state: ZeRO levels, groups, time of reduction."""
    each = " each" if of.reduce == "each-micro-batch" else ""
    group = "" if of.shard_group is None else f" of {of.shard_group}"
    group += "" if of.view_group is None else f" views of {of.view_group}"
    return f"Z{of.zero}{group}" + ("" if of.zero_blocks is None else f" ({of.zero_blocks})") + each


_MEANINGS = {
    r"\bP\d": "P stages",
    r"\bD\d": "D replicas",
    r"\bC\d": "C context ranks",
    r"\bC\d+g\d": "g groups of key heads",
    r"\bCh\d": "Ch context ranks that exchange heads",
    r"\bT\d": "T tensor-parallel ranks",
    r"\bE\d": "E replicas that share out experts",
    r"\bb\d": "b sequences of a micro-batch",
    r"\bM\d": "M micro-batches",
    r"\bV\d": "V chunks of a stage",
    r"\bk\d": "k slices of a sequence",
    r"\bZ\d": "Z ZeRO level",
    r"\bZ\d of ": "of: replicas that share all shards",
    r"\bviews of ": "views of: replicas that share views",
    r"\((embed|head|layers|attention|mlp)\b": "(...): levels of these blocks",
    r"\bsums f16-runs\b": "sums f16-runs: products with weights summed in f16, run by run",
    r"\beach\b": "each: gradients reduced after each micro-batch",
}


def legend(summaries: Iterable[str]) -> str:
    """Return what the letters and words mean that occur in some summaries; empty if there are none."""
    text = "\n".join(summaries)
    return ", ".join(meaning for pattern, meaning in _MEANINGS.items() if re.search(pattern, text))
