"""Profiles: lower bounds of the seconds and bytes of a model's units, asked of the compiler's own functions.

Units are the embedding, a layer of each class (attention and mlp) and the head. This module and the profiles that it
makes (`work_profile.py`, `state_profile.py`, `exchange_profile.py`) are the only ones of the planner that ask a target
for times; all others compute with the arrays made here. No figure exceeds that of the compiler and the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.topology import Mesh, mesh_of_shape
from ratrain.ratrainc.planner.bounds.exchange_profile import ExchangeProfile, exchange_profile, no_exchanges
from ratrain.ratrainc.planner.bounds.state_profile import StateProfile, state_profile
from ratrain.ratrainc.planner.bounds.work_profile import WorkProfile, work_profile
from ratrain.ratrainc.planner.space.search_setting import WHOLE_KEYS, ContextExchange, SearchSetting
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.ratrainc.planner.space.tilings import Tiles
from ratrain.targets.machine.capacity import mesh_capacity
from ratrain.targets.machine.link_groups import Link
from ratrain.targets.machine.placement import Members, Placement
from ratrain.targets.machine.timing import TimedOp, message_seconds

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.target import Capacity
    from ratrain.targets.machine.machine import Machine


_EXCHANGING = (Group.TENSOR, Group.CONTEXT, Group.EXPERTS)
"""Groups of ranks that exchange tensors within the passes of a micro-batch."""


@define(eq=False)
class Profiles:
    """The profiles of a setting; each is made once."""

    setting: SearchSetting
    works: dict[tuple[int, int, int, int, ContextExchange, int], WorkProfile] = field(factory=dict)
    states: dict[Shape, StateProfile] = field(factory=dict)
    crossed: dict[tuple[int, int, int, Tiles], frozenset[Link]] = field(factory=dict)
    exchanged: dict[tuple[Any, ...], ExchangeProfile] = field(factory=dict)
    """by what a micro-batch is to its ranks (`works`), and how near these are"""
    timed: dict[tuple[int, int, int, int | None, int | None, Tiles], dict[TimedOp, float]] = field(factory=dict)
    """seconds of collectives and updates by dp, tp, ep, shard and view group and tiles; levels decide which ops there
    are, not their seconds"""
    ranks_near: dict[tuple[int, int, int, int, Tiles], tuple[Members, ...]] = field(factory=dict)
    capacities: dict[tuple[int, int, int, int, int], int] = field(factory=dict)

    def under_links(self, machine: Machine) -> Profiles:
        """Return profiles under a machine that differs in links and collectives alone: `works` know none of them."""
        return Profiles(evolve(self.setting, machine=machine), works=self.works)

    def work(
        self,
        micro_batch_size: int,
        slices: int = 1,
        tp: int = 1,
        cp: int = 1,
        exchange: ContextExchange = WHOLE_KEYS,
        ep: int = 1,
    ) -> WorkProfile:
        """Return the profile of one micro-batch of a size, cut into slices, on one of its ranks.

        `tp` tensor-parallel ranks share every block, `cp` context ranks the tokens, which exchange keys or heads.
        `ep` expert ranks share out the experts.
        """
        key = micro_batch_size, slices, tp, cp, exchange, ep
        if key not in self.works:
            self.works[key] = work_profile(self.setting, *key)
        return self.works[key]

    def work_of(self, shape: Shape) -> WorkProfile:
        """Return the profile of one micro-batch of a shape."""
        return self.work(*_of_micro_batch(shape))

    def state(self, shape: Shape) -> StateProfile:
        """Return the profile of the training state of a shape's stages."""
        key = shape.stage
        if key not in self.states:
            # seconds of ops are shared by all levels: these decide only which ops there are
            near = key.dp, key.tp, key.ep, key.shard_group, key.view_group, key.tiles
            self.states[key] = state_profile(self.setting, key, self.timed.setdefault(near, {}))
        return self.states[key]

    def message(self, shape: Shape) -> float:
        """Return the seconds of a boundary tensor to the next stage, over the fastest link between two stages."""
        key = (shape.pp, shape.replicas, shape.tp, shape.tiles)
        if key not in self.crossed:
            self.crossed[key] = _links_between_stages(self.setting.machine, *key)
        nbytes = self.work_of(shape).boundary
        return min(message_seconds(nbytes, link, self.setting.machine) for link in self.crossed[key])

    def exchange(self, shape: Shape) -> ExchangeProfile:
        """Return the exchanges of a shape's peers; shapes whose peers are equally near each other share one."""
        if shape.is_whole:
            return no_exchanges(len(self.setting.classes))
        near = shape.dp, shape.tp, shape.cp, shape.ep, shape.tiles
        if near not in self.ranks_near:
            mesh = _mesh(1, shape.replicas, shape.tp, shape.cp, shape.ep)
            placement = Placement(self.setting.machine.link_groups, mesh, shape.stage.tiles or None)
            self.ranks_near[near] = tuple(placement.members(group.value) for group in _EXCHANGING)
        # how near the peers are decides the seconds, whatever mapping places them so
        key = *_of_micro_batch(shape), self.ranks_near[near]
        if key not in self.exchanged:
            self.exchanged[key] = exchange_profile(self.setting, shape)
        return self.exchanged[key]

    def capacity(self, shape: Shape) -> int:
        """Return the bytes that a rank of a shape has left for tensors."""
        mesh = shape.pp, shape.dp, shape.tp, shape.cp, shape.ep
        if mesh not in self.capacities:
            self.capacities[mesh] = rank_capacity(self.setting.model, self.setting.machine, shape).left
        return self.capacities[mesh]


def _of_micro_batch(shape: Shape) -> tuple[int, int, int, int, ContextExchange, int]:
    """Return the arguments of `Profiles.work` for a shape."""
    exchange = shape.exchange, shape.groups
    return shape.micro_batch_size, shape.slices, shape.tp, shape.cp, exchange, shape.ep


def rank_capacity(model: ModelConfig, machine: Machine, shape: Shape) -> Capacity:
    """Return the DDR of a rank of a shape, with the bytes left for tensors."""
    mesh = _mesh(shape.pp, shape.replicas, shape.tp, shape.cp, shape.ep)
    return mesh_capacity(machine, mesh, tied=model.tied_embeddings)


def _mesh(pp: int, replicas: int, tp: int, cp: int = 1, ep: int = 1) -> Mesh:
    """Return the mesh with one chunk a stage; `replicas` include context ranks."""
    return mesh_of_shape(PipelineShape(pp, 1), replicas, tp, contexts=cp, expert_ranks=ep)


def _links_between_stages(machine: Machine, pp: int, replicas: int, tp: int, tiles: Tiles) -> frozenset[Link]:
    placement = Placement(machine.link_groups, _mesh(pp, replicas, tp), tiles or None)
    hops = placement.mesh.hops
    # a single stage sends nothing, so any link serves
    levels = {placement.level_between(hop.source, hop.target) for hop in hops} or {placement.outermost}
    return frozenset(placement.message_link(level) for level in levels)
