"""Crossings: the groups of clusters that a plan's messages, collectives and tensor exchanges stay within."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.rank_mapping import RankMapping
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Group, Op, Payload
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, GatherRows, ReduceRows, ReduceScatter
from ratrain.ratrain_ir.ops.context_ranks import GatherKeys, ReduceKeys
from ratrain.ratrainc.console.console import size_text
from ratrain.ratrainc.planner.space.layer_classes import layer_classes
from ratrain.targets.machine.placement import placement_of
from ratrain.targets.machine.timing import collective_way
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine

_SHOWN_BOUNDARIES = 4


@frozen
class Crossing:
    """Traffic that takes the same way."""

    what: str
    group: str
    """the outermost group it stays within"""
    way: str
    """algorithm of a collective, and the bytes that a cluster sends over its link of each group; empty for messages"""

    def to_json(self) -> dict[str, Any]:
        """Return the crossing as plain data."""
        return {"what": self.what, "group": self.group, "way": self.way}

    def __str__(self) -> str:
        return f"{self.what} within a {self.group}" + (f", {self.way}" if self.way else "")


def crossings(plan: Plan, model: ModelConfig, machine: Machine) -> list[Crossing]:
    """Return the traffic of a plan: messages by group, from the innermost, then the collectives of one mlp."""
    return [*_messages(plan, machine), *_collectives(plan, model, machine)]


def _messages(plan: Plan, machine: Machine) -> list[Crossing]:
    placement = placement_of(plan, machine)
    edges = [hop for hop in placement.mesh.hops if hop.channel.payload is Payload.ACTIVATION]
    levels = sorted((placement.level_between(hop.source, hop.target), hop.source, hop.target) for hop in edges)
    messages = []
    for level, members in groupby(levels, key=lambda item: item[0]):
        names = list(dict.fromkeys(f"@{source}-@{target}" for _, source, target in members))
        shown = ", ".join(names[:_SHOWN_BOUNDARIES])
        more = f" and {len(names) - _SHOWN_BOUNDARIES} more" if len(names) > _SHOWN_BOUNDARIES else ""
        messages.append(Crossing(f"messages {shown}{more}", machine.link_groups[level].name, ""))
    return messages


def _collectives(plan: Plan, model: ModelConfig, machine: Machine) -> list[Crossing]:
    # collectives of one layer on one stage, with the ranks of that stage where the mapping has them
    tiles = tuple(evolve(tile, stages=1) for tile in plan.mapping.tiles) if plan.mapping is not None else None
    mapping = RankMapping(tiles) if tiles is not None else None
    single = evolve(
        plan, pp=1, cuts=(), chunks=1, layout="loop", slices=(), schedule=None, micro_batches=1, mapping=mapping
    )
    module = lower(layer_classes(model, single).model, single)
    target = target_of(machine)
    by_kind: dict[tuple[str, str], Crossing] = {}
    for op in module.stages[0].ops:
        if not _is_shown(op):
            continue
        timed = target.timed(module, module.stages[0], op)
        way = collective_way(timed, single, machine)
        # one of each collective and group is shown: of the first layer that has it
        if way is None or (op.keyword, timed.group) in by_kind:
            continue
        used = [level for level in range(len(machine.link_groups)) if way.bytes_at(level)]
        sent = ", ".join(f"{machine.link_groups[level].name} {size_text(int(way.bytes_at(level)))}" for level in used)
        among = _AMONG.get(timed.group, "")
        block = "attention" if timed.group == Group.CONTEXT.value else "mlp"
        what = f"{op.keyword} of an {block}{among}, {size_text(timed.payload_bytes)}"
        by_kind[op.keyword, timed.group] = Crossing(
            what, machine.link_groups[used[-1]].name, f"{way.name}: {sent} a cluster"
        )
    return list(by_kind.values())


_AMONG = {
    Group.TENSOR.value: " among tensor-parallel ranks",
    Group.CONTEXT.value: " among context ranks",
    Group.EXPERTS.value: " among expert ranks",
}


def _is_shown(op: Op) -> bool:
    """Return True if a collective, or an exchange of tensor-parallel ranks, is for an mlp alone, or one of keys."""
    if isinstance(op, GatherKeys | ReduceKeys):
        return True
    if isinstance(op, GatherRows | ReduceRows):
        return op.block.kind == "mlp"
    return isinstance(op, ReduceScatter | AllReduce | AllGather) and {unit.kind for unit in op.blocks} == {"mlp"}
