"""A plan in a few words, as tables show it, and the legend of these words.

`P2 D4 T2 b8 M16 V2 Z3 of 2 (embed 1, head 1) each` has 2 stages, 4 replicas, 2 tensor-parallel ranks and so on. Numbers
that are 1 or unset are left out, but for stages, replicas, sequences and micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.zero_levels import ZeroLevels


class Sizes(Protocol):
    """The fields of a plan, or of its shape, that a summary shows."""

    @property
    def pp(self) -> int: ...  # noqa: D102 - named in `Plan`
    @property
    def dp(self) -> int: ...  # noqa: D102
    @property
    def tp(self) -> int: ...  # noqa: D102
    @property
    def micro_batch_size(self) -> int: ...  # noqa: D102
    @property
    def micro_batches(self) -> int: ...  # noqa: D102
    @property
    def chunks(self) -> int: ...  # noqa: D102
    @property
    def zero(self) -> int: ...  # noqa: D102
    @property
    def reduce(self) -> str: ...  # noqa: D102
    @property
    def zero_blocks(self) -> ZeroLevels | None: ...  # noqa: D102
    @property
    def shard_group(self) -> int | None: ...  # noqa: D102
    @property
    def view_group(self) -> int | None: ...  # noqa: D102


def sizes_text(of: Sizes, slices: int) -> str:
    """Return the summary of a plan or a shape with this number of slices; 0 or 1 for whole sequences."""
    chunks = "" if of.chunks == 1 else f" V{of.chunks}"
    cut = "" if slices < 2 else f" k{slices}"
    ranks = "" if of.tp == 1 else f" T{of.tp}"
    return f"P{of.pp} D{of.dp}{ranks} b{of.micro_batch_size} M{of.micro_batches}{chunks}{cut} {state_text(of)}"


def state_text(of: Sizes) -> str:
    """Return the part of a summary about training state: ZeRO levels, groups, and when gradients are reduced."""
    each = " each" if of.reduce == "each-micro-batch" else ""
    group = "" if of.shard_group is None else f" of {of.shard_group}"
    group += "" if of.view_group is None else f" views of {of.view_group}"
    return f"Z{of.zero}{group}" + ("" if of.zero_blocks is None else f" ({of.zero_blocks})") + each


_MEANINGS = {
    r"\bP\d": "P stages",
    r"\bD\d": "D replicas",
    r"\bT\d": "T tensor-parallel ranks",
    r"\bb\d": "b sequences of a micro-batch",
    r"\bM\d": "M micro-batches",
    r"\bV\d": "V chunks of a stage",
    r"\bk\d": "k slices of a sequence",
    r"\bZ\d": "Z ZeRO level",
    r"\bZ\d of ": "of: replicas that share all shards",
    r"\bviews of ": "views of: replicas that share views",
    r"\((embed|head|layers|attention|mlp)\b": "(...): levels of these blocks",
    r"\beach\b": "each: gradients reduced after each micro-batch",
}


def legend(summaries: Iterable[str]) -> str:
    """Return what the letters and words mean that occur in some summaries; empty if there are none."""
    text = "\n".join(summaries)
    return ", ".join(meaning for pattern, meaning in _MEANINGS.items() if re.search(pattern, text))
