"""The communicators of a rank, made by all processes in one order."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.topology import Rank
from ratrain.targets.runtime.ranks.communicator import Communicator
from ratrain.targets.runtime.ranks.waiting import finish

if TYPE_CHECKING:
    from ratrain.targets.runtime.ranks.communicator import Transport
    from ratrain.targets.runtime.ranks.rank_layout import RankLayout

T = TypeVar("T")


@frozen(eq=False)
class Communicators:
    """Who a rank talks with. Ranks of each are numbered in rank order."""

    place: Rank
    world: Communicator
    """all ranks, for what is no instruction: reports, checkpoints"""
    everyone: Communicator
    """all ranks: collectives of the group `all`"""
    replicas: Communicator
    """the replicas of this rank's stage, of the same tensor peer"""
    shards: Communicator
    """of these the ones that have all shards between them"""
    copies: Communicator | None
    """of these the ones that have the same shard; None where no others do"""
    viewers: Communicator | None
    """of those with all shards the ones that have a view between them; None where each use gathers all shards"""
    parts: Communicator | None
    """of those with all shards the ones that have the same part of a view; None there too"""
    pipeline: Communicator
    """the stages of this rank's replica, of the same tensor peer: messages only, tag = number of the channel"""
    ends: Communicator | None
    """first and last stage of this rank's replica, of the same tensor peer; None on stages between. Tag of a message = which of them sends it"""
    peers: Communicator | None = None
    """this rank's tensor peers, for what the tensor engine does; None where it has none"""
    peer_gradients: Communicator | None = None
    """the same, for what the collective engine does beside it"""

    @classmethod
    def of_layout(cls, layout: RankLayout, transport: Transport) -> Communicators:
        """Make the communicators of this process.

        Raises `DiagnosticError` RT093 where the launcher started another number of processes than the plan has ranks.
        """
        mesh = layout.mesh
        if transport.count != layout.size:
            fail(
                "RT093",
                f"the plan has {mesh.words} = {layout.size} ranks, "
                f"but {transport.launcher} started {transport.count} process{'es' if transport.count > 1 else ''}",
                help=f"start it as: {transport.start_command(layout.size)}",
            )
        place = layout.place(transport.number)
        world = transport.world(mesh.ranks.index(place))
        lane, is_end = mesh.lane(place), place.stage in mesh.stages_of(Group.ENDS, place.stage)
        has_peers, team = mesh.peers > 1, place.stage * mesh.replicas + place.replica
        replicas = _own_part(world.split(place.stage * mesh.peers + place.peer))
        in_groups, index = mesh.shard_group is not None, place.replica % mesh.shards
        shards = _own_part(replicas.split(place.replica - index)) if in_groups else replicas
        copies = replicas.split(index) if in_groups else None
        has_parts, part = mesh.view_group is not None, place.replica % mesh.viewers
        viewers = replicas.split(place.replica - part) if has_parts else None
        parts = shards.split(part) if has_parts else None
        # groups of messages are made last: a library may tell groups apart by how many a process has made
        ends = world.split(lane if is_end else None)
        peers, peer_gradients = (world.split(team) if has_peers else None for _ in range(2))
        return cls(
            place,
            world,
            _own_part(world.split(0)),
            replicas,
            shards,
            copies,
            viewers,
            parts,
            _own_part(world.split(lane)).for_messages([(hop.source, hop.target) for hop in mesh.hops]),
            None if ends is None else ends.for_messages([(0, 1), (1, 0)] if ends.size > 1 else []),
            peers,
            peer_gradients,
        )

    def of_gather(self, group: Group) -> Communicator:
        """Who gathers views, or parts of them, together."""
        return _own_part({Group.SHARDS: self.shards, Group.VIEWS: self.viewers, Group.PARTS: self.parts}[group])


def _own_part(part: Communicator | None) -> Communicator:
    assert part is not None  # a colour was given
    return part


def exchanged(world: Communicator, value: T) -> list[T]:
    """What every process gave, by number. All must call it."""
    mine = np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)  # writable, as buffers are
    sizes = np.zeros(world.size, np.int64)
    sizes[world.rank] = mine.size
    finish(world.iallgather(sizes))
    whole = np.empty(int(sizes.sum()), np.uint8)
    finish(world.iallgatherv(whole, mine, sizes.tolist()))
    ends = np.cumsum(sizes).tolist()
    parts = (whole[end - size : end] for size, end in zip(sizes.tolist(), ends, strict=True))
    return [pickle.loads(part.tobytes()) for part in parts]  # noqa: S301 - written by the processes of this very job, line above
