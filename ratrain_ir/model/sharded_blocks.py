"""Shares of replicas in each block's state: ZeRO levels, shards, and views that are gathered for a use.

level    0    masters, moments and gradients whole on each replica
level    1    masters and moments in shards           2    reduced gradients too
level    3    views too: gathered for each use within the step, or kept in parts by a group of replicas;
              frozen parameters in parts as well, gathered for each use
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.quantised import FORMATS
from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.model.blocks import PARAMETER_ALIGNMENT, Held, flat_elements, holders, parameters
from ratrain.ratrain_ir.model.slots import SPLIT_KINDS

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block


def zero_level(plan: Plan, block: Block) -> int:
    """Return the ZeRO level of a block: the plan's, unless the plan names another for the block."""
    levels = plan.zero_blocks
    return plan.zero if levels is None else levels.level(block.kind, block.layer, plan.zero)


def is_sharded(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether a block's optimizer state is sharded over replicas: ZeRO level 1 or more, and several replicas."""
    return holders(model, plan, block) > 1 and zero_level(plan, block) >= 1


def shard_count(model: ModelConfig, plan: Plan, block: Block) -> int:
    """Return the number of shards of a block's optimizer state; 1 if every replica has all of it."""
    return (plan.shard_group or holders(model, plan, block)) if is_sharded(model, plan, block) else 1


def gathered_bits(model: ModelConfig, plan: Plan, block: Block) -> int | None:
    """Return the bits that each element of a block is rounded to for its gathers; None if gathers are exact."""
    kind = plan.gather_quantised
    return FORMATS[kind] if kind is not None and is_sharded(model, plan, block) else None


def reduced_bits(model: ModelConfig, plan: Plan, block: Block) -> int | None:
    """Return the bits that each replica rounds a block's gradient elements to before their reduction; None if exact."""
    kind = plan.reduce_quantised
    return FORMATS[kind] if kind is not None and is_sharded(model, plan, block) else None


def gathers_within_step(plan: Plan, block: Block) -> bool:
    """Tell whether a block's view is gathered for each use (ZeRO 3) instead of once a step.

    A single replica makes it from its own masters.
    """
    return zero_level(plan, block) == 3


def parts_view(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether `view_group` replicas each keep a part of a block's view and gather the whole for each use."""
    return plan.view_group is not None and is_sharded(model, plan, block) and gathers_within_step(plan, block)


def shares_frozen(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether replicas have parts of a block's frozen parameters, and gather the whole for each use (ZeRO 3).

    Where gathers of views are rounded each replica has the whole: frozen parameters are rounded once, when they are
    loaded.
    """
    return is_sharded(model, plan, block) and gathers_within_step(plan, block) and plan.gather_quantised is None


def frozen_parts(model: ModelConfig, plan: Plan, block: Block) -> int:
    """Return the number of replicas that have a block's frozen parameters between them; 1 if each has all."""
    if not shares_frozen(model, plan, block):
        return 1
    return plan.view_group if plan.view_group is not None else shard_count(model, plan, block)


@cache
def frozen_elements(model: ModelConfig, plan: Plan, owner: Block) -> int:
    """Return the elements of a block's flat tensor of frozen parameters, of a tensor-parallel rank; 0 without any."""
    return _frozen_end(model, plan, owner, Held.PLAIN)


@cache
def packed_frozen_bytes(model: ModelConfig, plan: Plan, owner: Block) -> int:
    """Return the bytes of a block's frozen matrices that are stored in few bits; 0 without any."""
    return _frozen_end(model, plan, owner, Held.PACKED)


def _frozen_end(model: ModelConfig, plan: Plan, owner: Block, held: Held) -> int:
    """Return the length of a block's frozen tensor, padded to equal parts where replicas share it."""
    frozen = [each for each in parameters(rank_model(model, plan), owner) if each.held is held]
    ends = [each.offset + prod(each.stored_shape) for each in frozen]
    quantum = PARAMETER_ALIGNMENT * (holders(model, plan, owner) if shares_frozen(model, plan, owner) else 1)
    return -(-max(ends, default=0) // quantum) * quantum


def gathers_at_step_end(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether a block's view, or a replica's part of it, is made from masters once a step, for the next one."""
    return is_sharded(model, plan, block) and (parts_view(model, plan, block) or not gathers_within_step(plan, block))


def view_shard_elements(model: ModelConfig, plan: Plan, block: Block) -> int:
    """Return the elements of one replica's part of a view (`view_group` must be set)."""
    assert plan.view_group is not None
    return flat_elements(model, plan, block) // plan.view_group


def any_gathered_within_step(plan: Plan, blocks: Iterable[Block]) -> bool:
    """Tell whether any of some blocks has its view gathered for each use."""
    return any(gathers_within_step(plan, block) for block in blocks)


def gathers_layers_within_step(plan: Plan) -> bool:
    """Tell whether any layer may have its view gathered for each use.

    Recovery reads that view, so it waits for the gather of the backward.
    """
    levels = plan.zero_blocks
    if levels is None:
        return plan.zero == 3
    return 3 in levels.of_layers.values() or any(levels.level(kind, None, plan.zero) == 3 for kind in SPLIT_KINDS)


def keeps_view(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether every rank keeps a block's whole view from step to step, and its own update writes it."""
    return not is_sharded(model, plan, block) and not gathers_within_step(plan, block)


def reduces_each_micro_batch(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether a block's gradient is reduced into shards after every micro-batch. No full gradient is then kept."""
    return plan.reduce == "each-micro-batch" and holders(model, plan, block) > 1 and zero_level(plan, block) >= 2


def shard_elements(model: ModelConfig, plan: Plan, block: Block) -> int:
    """Return the elements of one replica's shard of a block."""
    return flat_elements(model, plan, block) // shard_count(model, plan, block)
