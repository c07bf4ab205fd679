"""Bytes of an `all_reduce` over tensor-parallel ranks: only gradients of parameters that several peers hold move.

Every peer gives all others its elements and adds up, for each parameter, the parts of the peers that hold the same. The
shards of replicas hold different parameters, so replicas move different amounts: a norm that stands first in its block
is in the first shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.tensor_ranks import rank_model, share_of
from ratrain.ratrain_ir.model.blocks import block, flat_elements, trained_parameters
from ratrain.ratrain_ir.model.expert_ranks import expert_copies
from ratrain.ratrain_ir.model.sharded_blocks import shard_count
from ratrain.ratrain_ir.ops.base import Group

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block


@frozen
class SharedElements:
    """Elements of gradients that a tensor-parallel rank exchanges."""

    given: int
    """sent to every other peer; as many sums are written"""
    added: int
    """parts of sums, its own included"""

    def times(self, factor: int) -> SharedElements:
        """Return the elements of `factor` like blocks."""
        return SharedElements(self.given * factor, self.added * factor)


NONE_SHARED = SharedElements(0, 0)


def most_shared(model: ModelConfig, plan: Plan, blocks: Iterable[Block], group: str) -> SharedElements:
    """Return the most elements that the ranks of any group give for some blocks, and the most that they add.

    They are tensor-parallel ranks, or expert ranks.
    """
    total: dict[int, SharedElements] = {}
    counts = Counter((_first_alike(model, each), shard_count(model, plan, each)) for each in blocks)
    for (owner, shards), count in counts.items():
        for replica, shared in _shared_of_block(model, plan, owner, shards, group).items():
            before = total.get(replica, NONE_SHARED)
            total[replica] = SharedElements(before.given + count * shared.given, before.added + count * shared.added)
    given = max((shared.given for shared in total.values()), default=0)
    return SharedElements(given, max((shared.added for shared in total.values()), default=0))


def _first_alike(model: ModelConfig, owner: Block) -> Block:
    """Return the first block with the same parameters as a block."""
    return owner if owner.layer is None else block(owner.kind, model.first_alike(owner.kind, owner.layer))


@cache
def _shared_of_block(
    model: ModelConfig, plan: Plan, owner: Block, shards: int, group: str
) -> Mapping[int, SharedElements]:
    """Return the exchanged elements of a block's gradient, by shard that exchanges any."""
    shard = flat_elements(model, plan, owner) // shards
    found: dict[int, SharedElements] = {}
    for parameter in trained_parameters(rank_model(model, plan), owner):
        if group == Group.EXPERTS.value:
            copies = expert_copies(plan, parameter.weight)
        else:
            copies = share_of(model, plan.tp, parameter.weight).copies
        if copies == 1:
            continue
        low, high = parameter.offset, parameter.offset + parameter.elements
        # A parameter may reach over several shards: each of them exchanges its part.
        for holder in range(low // shard, -(-high // shard)):
            elements = min(high, (holder + 1) * shard) - max(low, holder * shard)
            before = found.get(holder, NONE_SHARED)
            found[holder] = SharedElements(before.given + elements, before.added + copies * elements)
    return found
