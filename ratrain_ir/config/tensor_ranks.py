"""Tensor-parallel ranks (tensor-parallel ranks): the part of a model's blocks that each of them has.

The ranks of a stage and replica that share out its blocks are tensor-parallel ranks (Shoeybi et al., "Megatron-LM",
2019). A peer has some heads (rows of the projections, columns of the output matrix), some rows of the MLP with their
columns of its last matrix, and some rows of the vocabulary. So a peer computes a model of its own, with fewer heads, a
narrower MLP and a smaller vocabulary. Its blocks give partial sums, which are added over the peers.

    q_proj  rows:    | peer 0 |        o_proj  columns:  | peer 0 | peer 1 |      y = part 0 + part 1
                     | peer 1 |

Of experts each peer has some rows and columns of every one, not some of them whole: so all peers compute as much,
whatever the router says, and each has its part of a row of every choice. The router is computed by every peer from the
whole input; its gradient on a peer is that of the peer's part of the sum.

Parameters that do not belong to a head, to MLP rows or to words (norms, routers) are whole on every peer. Those added
to a partial sum (biases of output projections, learned positions) are added by the first peer alone.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def rank_model(model: ModelConfig, plan: Plan) -> ModelConfig:
    """Return the part of a model that one of the plan's ranks computes, and what trains of it.

    With one tensor-parallel rank and one expert rank it is the whole model.
    """
    own = model_of_rank(trained_model(model, plan), plan.tp)
    return own if plan.ep == 1 else evolve(own, expert_ranks=plan.ep)


def trained_model(model: ModelConfig, plan: Plan) -> ModelConfig:
    """Return the model with what a plan trains of it: its adapters are then among its blocks' parameters."""
    return evolve(model, training=plan.training.in_family(model.family)) if plan.training else model


@cache
def model_of_rank(model: ModelConfig, peers: int) -> ModelConfig:
    """Return the part of a model that one of `peers` tensor-parallel ranks computes; the whole model for one rank.

    If an MLP or a vocabulary does not divide evenly, all peers have as much as the first; the last one's is padded. If
    there are more peers than key-value heads, several peers have copies of one head.
    """
    if peers == 1:
        return model
    if model.experts is not None:
        model = evolve(model, expert_size=-(-model.expert_width // peers))
    if model.shared_expert_size is not None:
        model = evolve(model, shared_expert_size=-(-model.shared_expert_size // peers))
    return evolve(
        model,
        heads=model.heads // peers,
        kv_heads=max(1, model.kv_heads // peers),
        ffn_size=-(-model.ffn_size // peers),
        vocab_size=-(-model.vocab_size // peers),
    )


@frozen
class Share:
    """Distribution of a parameter over tensor-parallel ranks."""

    axis: int | None
    """axis that is cut; None: every peer has the whole parameter"""
    copies: int
    """number of consecutive peers with the same part; their gradients are parts of one sum"""


def share_of(model: ModelConfig, peers: int, weight: str) -> Share:
    """Return how a parameter is distributed, by its short name (`blocks.Parameter.weight`).

    Of an adapter, the matrix on the cut side of its linear layer is cut alike. The other is whole on every peer, and
    its gradient there is a part of a sum: products with parts of an input, or of a gradient, add up.
    """
    stem, _, matrix = weight.rpartition("_lora_")
    if stem:
        stack = stem.endswith("_experts")
        linear = share_of(model, peers, stem if stack else f"{stem}_proj")
        return linear if (linear.axis == 1 + stack) is (matrix == "a") else Share(None, peers)
    if weight.endswith("_experts"):  # [experts, outputs, inputs]
        return Share(2 if weight == "down_experts" else 1, 1)
    weight = weight.removeprefix("shared_")
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
    """Return the number of consecutive peers that have the same key-value heads."""
    return max(1, peers // model.kv_heads)


def norms_over_ranks(model: ModelConfig, plan: Plan) -> bool:
    """Tell whether queries and keys are normed over all heads of a token, so that peers must exchange row sums.

    Families with such norms do not norm the input of blocks, and do not scale by 1 + weight (`config/families.py`).
    """
    return plan.tp > 1 and model.qk_norm == "whole"


def adds_branches_apart(model: ModelConfig, plan: Plan) -> bool:
    """Tell whether a separate op adds a block's output to the stream, because a norm needs the sum of all peers."""
    return plan.tp > 1 and model.has_post_norm


ADDED_ONCE = frozenset({"o_bias", "down_bias", "positions"})
"""Parameters added to a sum of which each peer has a part. The first peer adds them and has their gradient; on
others the gradient is zero."""


def gradients_made_whole(plan: Plan) -> frozenset[str]:
    """Return the parameters whose whole gradient each peer has, so that only the first peer's counts.

    With sharded rows a post-norm is not among them, as each peer has the gradient of its rows.
    """
    return ADDED_ONCE if plan.sequence_sharding else ADDED_ONCE | {"post_norm", "post_norm_bias"}


def rank_part(model: ModelConfig, peers: int, peer: int, weight: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return a peer's part of a whole parameter as a slice per axis.

    The part is shorter than the peer's own parameter, or empty, where that is padded.
    """
    share = share_of(model, peers, weight)
    if share.axis is None:
        return tuple(slice(0, length) for length in shape)
    parts = peers // share.copies
    length = -(-shape[share.axis] // parts)
    start = min(peer // share.copies * length, shape[share.axis])
    cut = slice(start, min(start + length, shape[share.axis]))
    return tuple(cut if axis == share.axis else slice(0, size) for axis, size in enumerate(shape))


def shares_heads(model: ModelConfig, peers: int) -> bool:
    """Tell whether peers share out a model's heads evenly, and its key-value heads or copies of them."""
    return not model.heads % peers and not (model.kv_heads % peers and peers % model.kv_heads)


def problems(model: ModelConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (problem, remedy) for each reason why a plan's tensor-parallel ranks cannot share out a model."""
    peers = plan.tp
    if peers == 1:
        return
    if model.heads % peers:
        fits = [number for number in range(2, model.heads + 1) if shares_heads(model, number)]
        yield f"{peers} tensor-parallel ranks do not share out {model.heads} heads evenly", f"use tp = {_either(fits)}"
    elif not shares_heads(model, peers):
        yield (
            (
                f"{peers} tensor-parallel ranks neither share {model.kv_heads} heads of keys and values evenly "
                "nor have copies of them evenly"
            ),
            f"use a tp that divides {model.kv_heads}, or that {model.kv_heads} divides",
        )
    if (words := -(-model.vocab_size // peers)) * (peers - 1) >= model.vocab_size:
        text = f"{peers} tensor-parallel ranks with {words} of {model.vocab_size} words each leave a rank without any"
        yield text, "use another tp"
    for rows in {plan.micro_batch_size * length // plan.cp for length in (plan.slices or (plan.seq_len,))}:
        if plan.sequence_sharding and rows % peers:
            yield (
                f"{peers} tensor-parallel ranks do not share out the {rows} rows of an activation evenly",
                "use another micro_batch_size, seq_len or slices, or sequence_sharding = false",
            )
    if model.qk_norm == "whole" and model.has_pre_norm:
        what = "norms of whole queries and keys behind a norm of the input"
        yield f"{model.name} has {what}, which tensor-parallel ranks do not share out in this version", "use tp = 1"
    if model.has_post_norm and model.parallel_residual:
        what = "norms of what attention and MLP side by side add"
        yield f"{model.name} has {what}, which tensor-parallel ranks do not share out in this version", "use tp = 1"


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers)) or "1"
