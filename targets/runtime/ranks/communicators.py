"""The communicators of a rank. All processes make them in one order.

Example, 2 stages x 4 replicas with `shard_group = 2`: stage 0 splits into `shards` {r0 r1} {r2 r3}, which have all
shards between them, and `copies` {r0 r2} {r1 r3}, which have the same shard. `replicas` is {r0 r1 r2 r3}.
"""

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
    """The groups of ranks that a rank talks with. Members of each are numbered in rank order."""

    place: Rank
    world: Communicator
    """all ranks, for exchanges that are no instruction: reports, checkpoints"""
    everyone: Communicator
    """all ranks, for collectives of the group `all`"""
    replicas: Communicator
    """the data-parallel replicas of this rank's stage that are the same tensor-parallel rank"""
    shards: Communicator
    """the replicas that have all shards between them, this one included; equal to `replicas` without shard groups"""
    copies: Communicator | None
    """the replicas that have the same shard; None without shard groups"""
    viewers: Communicator | None
    """the replicas that have one view between them; None if each use gathers all shards"""
    parts: Communicator | None
    """the members of `shards` that have the same part of a view; None without view groups"""
    pipeline: Communicator
    """the stages of this rank's replica, same tensor-parallel rank: messages only, the tag is the channel's number"""
    ends: Communicator | None
    """first and last stage of this rank's replica, same tensor-parallel rank; None on stages between

    The tag of a message is the end that sends it.
    """
    peers: Communicator | None = None
    """this rank's tensor-parallel group, for the tensor engine; None if there is no other rank in it"""
    tensor_gradients: Communicator | None = None
    """the same ranks for the collective engine, which runs at the same time and needs an order of its own"""

    contexts: Communicator | None = None
    """the ranks that share this rank's sequences, for the tensor engine; None without context ranks"""
    experts: Communicator | None = None
    """the ranks that share out experts with this rank, for the tensor engine; None without expert ranks"""
    expert_gradients: Communicator | None = None
    """the same ranks for the collective engine"""
    same_experts: Communicator | None = None
    """the replicas that hold the same experts; None without expert ranks"""

    @classmethod
    def of_layout(cls, layout: RankLayout, transport: Transport) -> Communicators:
        """Make the communicators of this process. All processes must call it.

        Raises `DiagnosticError` RT093 if the launcher started another number of processes than the plan has ranks.
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
        # `split` is collective: every rank makes the same sequence of calls, with colour None where it belongs to no
        # group. Which splits are made depends on the mesh alone, never on the rank.
        has_tensor_ranks, team = mesh.peers > 1, place.stage * mesh.replicas + place.replica
        replicas = _own_part(world.split(place.stage * mesh.peers + place.peer))
        in_groups, index = mesh.shard_group is not None, place.replica % mesh.shards
        shards = _own_part(replicas.split(place.replica - index)) if in_groups else replicas
        copies = replicas.split(index) if in_groups else None
        has_parts, part = mesh.view_group is not None, place.replica % mesh.viewers
        viewers = replicas.split(place.replica - part) if has_parts else None
        parts = shards.split(part) if has_parts else None
        contexts = replicas.split(mesh.in_context(place.replica)[0]) if mesh.contexts > 1 else None
        spread, run = mesh.expert_ranks > 1, place.replica - place.replica % mesh.expert_ranks
        experts, expert_gradients = (replicas.split(run) if spread else None for _ in range(2))
        same_experts = replicas.split(place.replica % mesh.expert_ranks) if spread else None
        # Groups for messages come last: a library may tell groups apart by the number that a process has made, and
        # these differ from rank to rank.
        ends = world.split(lane if is_end else None)
        peers, tensor_gradients = (world.split(team) if has_tensor_ranks else None for _ in range(2))
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
            tensor_gradients,
            contexts,
            experts,
            expert_gradients,
            same_experts,
        )

    def of_mean(self, group: Group) -> Communicator:
        """Return the ranks over which a group's gradients are averaged."""
        return _own_part(self.same_experts) if group is Group.COPIES else self.replicas

    def of_gather(self, group: Group) -> Communicator:
        """Return the ranks that gather views, or parts of views, in a group."""
        members = {
            Group.SHARDS: self.shards,
            Group.VIEWS: self.viewers,
            Group.PARTS: self.parts,
            Group.COPIES: self.same_experts,
        }
        return _own_part(members[group])


def _own_part(part: Communicator | None) -> Communicator:
    assert part is not None  # a colour was given
    return part


def exchanged(world: Communicator, value: T) -> list[T]:
    """Exchange a picklable value; return every process's value by its number. All processes must call it."""
    mine = np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)  # writable, as buffers are
    sizes = np.zeros(world.size, np.int64)
    sizes[world.rank] = mine.size
    finish(world.iallgather(sizes))
    whole = np.empty(int(sizes.sum()), np.uint8)
    finish(world.iallgatherv(whole, mine, sizes.tolist()))
    ends = np.cumsum(sizes).tolist()
    parts = (whole[end - size : end] for size, end in zip(sizes.tolist(), ends, strict=True))
    return [pickle.loads(part.tobytes()) for part in parts]  # noqa: S301 - written by the processes of this very job, line above
