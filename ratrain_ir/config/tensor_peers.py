"""Tensor peers: which part of a model's blocks each of them has.

The ranks of a stage and replica that share out its blocks are tensor peers (Shoeybi et al., "Megatron-LM", 2019). A peer has some heads
with their rows of the projections and their columns of the output matrix, some rows of the MLP and the columns that go with them, and some
rows of the vocabulary. So what a peer computes is a model of its own, with fewer heads, a narrower MLP and a smaller vocabulary, whose
blocks give sums of which each peer has a part. What is no matrix of a head, of the MLP or of the vocabulary (norms) every peer has whole;
of that, what is added to such a sum (biases of output projections, learned positions) the first peer adds.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def peer_model(model: ModelConfig, plan: Plan) -> ModelConfig:
    """What one of a plan's tensor peers computes, as a model; the model itself where there is one peer."""
    return model_of_peer(model, plan.tp)


@cache
def model_of_peer(model: ModelConfig, peers: int) -> ModelConfig:
    """What one of so many tensor peers computes, as a model; the model itself where there is one.

    Where an MLP or a vocabulary does not divide evenly, all peers have as much as the first, and the last one's has padding. With more peers
    than heads of keys and values several peers have a copy of the same one.
    """
    if peers == 1:
        return model
    return evolve(
        model,
        heads=model.heads // peers,
        kv_heads=max(1, model.kv_heads // peers),
        ffn_size=-(-model.ffn_size // peers),
        vocab_size=-(-model.vocab_size // peers),
    )


@frozen
class Share:
    """How a parameter is shared out to tensor peers."""

    axis: int | None
    """the axis that is cut, 0 (rows) or 1 (columns); None: every peer has all of it"""
    copies: int
    """peers, one after the other, that have the same part: their gradients are parts of one sum"""


def share_of(model: ModelConfig, peers: int, weight: str) -> Share:
    """How the parameter of a short name, as `blocks.Parameter` has it, is shared out."""
    name = weight.removesuffix("_proj").removesuffix("_bias")
    if weight in ("o_proj", "down_proj"):
        return Share(1, 1)
    if weight == "table" or (name in ("q", "gate", "up") and not weight.endswith("norm")):
        return Share(0, 1)
    if name in ("k", "v") or (weight == "k_norm" and model.qk_norm == "whole"):
        return Share(0, copies_of_keys(model, peers))
    if weight == "q_norm" and model.qk_norm == "whole":
        return Share(0, 1)
    return Share(None, peers)


def copies_of_keys(model: ModelConfig, peers: int) -> int:
    """How many of so many tensor peers, one after the other, have the same heads of keys and values."""
    return max(1, peers // model.kv_heads)


def norms_over_peers(model: ModelConfig, plan: Plan) -> bool:
    """Whether queries and keys are normed over all heads of a token, of which each tensor peer has some: what is summed over a row is exchanged.

    Families with such norms have no norms of a block's input, and none that scale by 1 + weight (`config/families.py`).
    """
    return plan.tp > 1 and model.qk_norm == "whole"


def adds_branches_apart(model: ModelConfig, plan: Plan) -> bool:
    """Whether what attention and mlp blocks give is added to the stream by an op of its own: a norm of it takes the sum of all peers."""
    return plan.tp > 1 and model.has_post_norm


ADDED_ONCE = frozenset({"o_bias", "down_bias", "positions"})
"""Parameters that are added to a sum of which each peer has a part. The first peer adds them and has their gradient; that of others is zero."""


def gradients_made_whole(plan: Plan) -> frozenset[str]:
    """Parameters whose whole gradient each peer has: the first peer's counts. With sharded rows each has that of its rows."""
    return ADDED_ONCE if plan.sequence_sharding else ADDED_ONCE | {"post_norm", "post_norm_bias"}


def peer_part(model: ModelConfig, peers: int, peer: int, weight: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """What of a whole parameter of that shape a peer has, as a slice of each axis; shorter than the peer's own, or empty, where that has padding."""
    share = share_of(model, peers, weight)
    if share.axis is None:
        return tuple(slice(0, length) for length in shape)
    parts = peers // share.copies
    length = -(-shape[share.axis] // parts)
    start = min(peer // share.copies * length, shape[share.axis])
    cut = slice(start, min(start + length, shape[share.axis]))
    return tuple(cut if axis == share.axis else slice(0, size) for axis, size in enumerate(shape))


def shares_heads(model: ModelConfig, peers: int) -> bool:
    """Whether so many peers share out a model's heads evenly, and those of keys and values or copies of them."""
    return not model.heads % peers and not (model.kv_heads % peers and peers % model.kv_heads)


def problems(model: ModelConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """Why a model is not shared out to a plan's tensor peers, each with a way out."""
    peers = plan.tp
    if peers == 1:
        return
    if model.heads % peers:
        fits = [number for number in range(2, model.heads + 1) if shares_heads(model, number)]
        yield f"{peers} tensor peers do not share out {model.heads} heads evenly", f"use tp = {_either(fits)}"
    elif not shares_heads(model, peers):
        yield (
            f"{peers} tensor peers neither share out {model.kv_heads} heads of keys and values evenly nor have copies of them evenly",
            f"use a tp that divides {model.kv_heads}, or that {model.kv_heads} divides",
        )
    for rows in {plan.micro_batch_size * length for length in (plan.slices or (plan.seq_len,))}:
        if plan.sequence_sharding and rows % peers:
            yield (
                f"{peers} tensor peers do not share out the {rows} rows of an activation evenly",
                "use another micro_batch_size, seq_len or slices, or sequence_sharding = false",
            )
    if model.has_post_norm and model.parallel_residual:
        what = "norms of what attention and MLP side by side add"
        yield f"{model.name} has {what}, which tensor peers do not share out in this version", "use tp = 1"


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers)) or "1"
