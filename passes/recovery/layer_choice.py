"""Choices of what a layer keeps for its backward, by policy; where it waits, and from where the rest is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

from attrs import frozen

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.ops.base import Piece

KEPT_SLOTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "none": {"attention": (), "mlp": ()},
    "ops": {"attention": ("q", "v", "o", "lse"), "mlp": ("gate", "branch")},
    "lean": {
        "attention": ("q_in", "k_in", "q", "k", "v", "o", "lse", "branch"),
        "mlp": ("chosen", "weights", "gate", "up", "shared_gate", "shared_up", "shared_weights", "branch"),
    },
}
"""Slots that a block keeps, by the choice that keeps not all and by the block's kind.

`lean` keeps results of all products and of attention, `ops` of attention and of every second product in the order q, k,
v, o, gate, up, down, as torchtitan's per-op policy (distributed/activation_checkpoint.py), less the product that no
backward reads.
"""
NORM_SLOTS = ("xn", "mean", "rstd", "branch_mean", "branch_rstd", "q_rstd", "k_rstd")
"""Slots that `norms` drops, results of norms and statistics of their rows; it keeps all others."""


def keeps(kept: str, kind: str, slot: str) -> bool:
    """Tell whether a block of a kind keeps a slot under a choice: `none`, `ops`, `lean`, `norms` or `all`."""
    if kept in ("all", "norms"):
        return kept == "all" or slot not in NORM_SLOTS
    return slot in KEPT_SLOTS[kept][kind]


@frozen
class Donor:
    """Donor: another stage whose DDR may hold kept tensors."""

    stage: int

    @property
    def value(self) -> str:
        """Display name, for example `@3`."""
        return f"@{self.stage}"


KeptHome = Home | Donor
"""Place where kept tensors wait for their backward; `Home.DDR` is the stage's own."""


BLOCK, LAYER = CHECKPOINTS = ("block", "layer")
"""Units that are recomputed from their input under tensor parallelism, where nothing of a layer is kept."""
NEEDED, ALL = REPEATS = ("needed", "all")
"""Extent of a layer's recomputation: up to the last tensor that its backward reads, or its output too."""


@frozen(cache_hash=True)
class LayerChoice:
    """Choice of what a layer's attention and mlp keep: `none`, `ops`, `lean`, `norms` or `all`."""

    attention: str
    mlp: str
    home: KeptHome = Home.DDR
    """Place where kept tensors wait for the backward."""
    checkpoint: str = BLOCK
    """`LAYER`: under tensor parallelism too, a layer of which nothing is kept is recomputed from its input alone."""
    repeat: str = NEEDED
    """`ALL`: a layer that is recomputed as a whole makes its output again too, which nothing reads."""

    @property
    def keeps_nothing(self) -> bool:
        """True if the layer, or each of its blocks, is recomputed from its input alone."""
        return self.attention == self.mlp == "none"

    @property
    def is_of_layer(self) -> bool:
        """True if a layer is recovered as a whole: its attention makes the mlp's input again, if no exchange does."""
        return self.keeps_nothing or self.attention == self.mlp == "ops"

    def kept(self, kind: str) -> str:
        """Return what one of the layer's blocks keeps: `none`, `ops`, `lean`, `norms` or `all`."""
        return self.attention if kind == "attention" else self.mlp


NOTHING, EVERYTHING = LayerChoice("none", "none"), LayerChoice("all", "all")
ChoiceOf = Callable[[int, Piece], LayerChoice]
"""Function that returns the choice for a layer and a piece (a micro-batch, or a slice of one)."""

CHOICES = {
    "full": (NOTHING,),
    "none": (EVERYTHING,),
    "attention": (LayerChoice("none", "all"),),
    "mlp": (LayerChoice("all", "none"),),
    "ops": (LayerChoice("ops", "ops"),),
    "norms": (LayerChoice("norms", "norms"),),
    "auto": tuple(LayerChoice(attention, mlp) for attention, mlp in product(("none", "lean", "all"), repeat=2)),
}
"""Choices for a layer and micro-batch that each policy allows."""


@frozen
class _SameForAll:
    """Constant choice, as an object that can be pickled for another process."""

    choice: LayerChoice

    def __call__(self, _layer: int, _piece: Piece) -> LayerChoice:
        return self.choice


def same_for_all(choice: LayerChoice) -> ChoiceOf:
    """Return a function that gives every layer and piece the same choice."""
    return _SameForAll(choice)
