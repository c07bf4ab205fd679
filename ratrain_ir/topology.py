"""Ranks of a plan: the state each owns, the groups that meet in collectives, and the channels of messages.

Ranks are the points of a mesh of pipeline stages x replicas x tensor-parallel ranks (tensor-parallel ranks). A *stage*
is a position in the pipeline and one section of the text, written once for all its replicas and tensor-parallel ranks
(SPMD). The chain of blocks is cut into *chunks*, numbered in forward order; a stage holds one or several. Each pair of
consecutive chunks has a *channel* for each payload, so two edges between the same two stages never share one.
Collectives meet in *groups*, whose members stand in rank order.

    4 chunks on 2 stages (loop):   chunk 0 @0 --> chunk 1 @1 --> chunk 2 @0 --> chunk 3 @1
    ranks of 2 x 2 x 1:            0 = @0 replica 0, 1 = @0 replica 1, 2 = @1 replica 0, 3 = @1 replica 1

All other code asks here. Nothing else compares a stage with the last one, or computes the start of a shard.
"""

from __future__ import annotations

from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.blocks import Block, block, has_backward, has_experts, holders
from ratrain.ratrain_ir.model.sharded_blocks import (
    frozen_parts,
    parts_view,
    shard_count,
    shard_elements,
    view_shard_elements,
)
from ratrain.ratrain_ir.ops.base import Group, Payload, PeerTransfer
from ratrain.ratrain_ir.support.quantities import number_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape


class Rank(NamedTuple):
    """Point of the mesh. Ranks are ordered by stage, then replica, then tensor-parallel rank."""

    stage: int
    replica: int
    peer: int = 0


class Channel(NamedTuple):
    """One direction of the edge between two consecutive chunks, for one payload.

    For offloaded activations a channel connects any two stages, each given by the first chunk that it holds.
    """

    source: int
    """the chunk whose stage sends"""
    target: int
    """the chunk whose stage receives"""
    payload: Payload | PeerTransfer

    @property
    def into(self) -> int:
        """Later of the two chunks: the one whose input, or gradient of the input, the channel carries."""
        return max(self.source, self.target)


class Hop(NamedTuple):
    """Channel with its source and target stage."""

    source: int
    target: int
    channel: Channel


@frozen(slots=False)  # for its cached properties
class Mesh:
    """Ranks of a plan, their groups and channels, as far as they do not depend on the model.

    `chunk_stages[c]` is the stage that holds chunk c. Groups of replicas are nested runs of neighbours. Each
    `shard_group` replicas share out all shards of sharded state (None: all replicas do). Within these, each
    `view_group` replicas share out views (None: none do).
    """

    stages: int
    replicas: int
    peers: int
    chunk_stages: tuple[int, ...]
    shard_group: int | None = field(default=None, kw_only=True)
    view_group: int | None = field(default=None, kw_only=True)
    contexts: int = field(default=1, kw_only=True)
    """context ranks: as many neighbouring replicas share sequences"""
    expert_ranks: int = field(default=1, kw_only=True)
    """expert ranks: as many neighbouring replicas share out the experts of each layer"""

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, in rank order."""
        return tuple(
            Rank(stage, replica, peer)
            for stage in range(self.stages)
            for replica in range(self.replicas)
            for peer in range(self.peers)
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.stages * self.replicas * self.peers

    @property
    def lanes(self) -> int:
        """Ranks of a stage: replicas x tensor-parallel ranks."""
        return self.replicas * self.peers

    def lane(self, rank: Rank) -> int:
        """Return the index of a rank among the ranks of its stage, in rank order."""
        return rank.replica * self.peers + rank.peer

    def in_lane(self, stage: int, lane: int) -> Rank:
        """Return the rank of a stage with an index among its ranks; inverse of `lane`."""
        return Rank(stage, *divmod(lane, self.peers))

    def name(self, rank: Rank) -> str:
        """Return a rank's name for messages, `stage @1 replica 0 tensor rank 2`; no tensor rank if tp is 1."""
        peer = f" tensor rank {rank.peer}" if self.peers > 1 else ""
        replica, context = self.in_context(rank.replica)
        shared = f" context rank {context}" if self.contexts > 1 else ""
        return f"stage @{rank.stage} replica {replica}{shared}{peer}"

    def in_context(self, replica: int) -> tuple[int, int]:
        """Return the replica whose sequences a holder of weights has, and its rank among those that share them."""
        return divmod(replica, self.contexts)

    @cached_property
    def sum_order(self) -> tuple[int, ...]:
        """Replicas in the order in which their gradients are summed: ascending, but context ranks descend.

        Later tokens come first, as slices add their gradients.
        """
        of_one = range(self.contexts - 1, -1, -1)
        return tuple(first + rank for first in range(0, self.replicas, self.contexts) for rank in of_one)

    @property
    def words(self) -> str:
        """Numbers of stages, replicas and tensor-parallel ranks (if several), in words for messages."""
        peers = f" x {self.peers} tensor-parallel ranks" if self.peers > 1 else ""
        contexts = f" x {self.contexts} context ranks" if self.contexts > 1 else ""
        return (
            f"{number_of(self.stages, 'stage')} x "
            f"{number_of(self.replicas // self.contexts, 'replica')}{contexts}{peers}"
        )

    # Chunks

    @property
    def first_stage(self) -> int:
        """Stage that loads tokens and embeds them."""
        return self.chunk_stages[0]

    @property
    def last_stage(self) -> int:
        """Stage that loads labels and computes the loss."""
        return self.chunk_stages[-1]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks that a stage holds, in forward order."""
        return tuple(chunk for chunk, holder in enumerate(self.chunk_stages) if holder == stage)

    def neighbours(self, chunk: int) -> tuple[int | None, int | None]:
        """Return the stages of the chunks before and after a chunk; None at the ends, or if it is the same stage."""
        own = self.chunk_stages[chunk]
        before = self.chunk_stages[chunk - 1] if chunk > 0 else own
        after = self.chunk_stages[chunk + 1] if chunk + 1 < len(self.chunk_stages) else own
        return (None if before == own else before), (None if after == own else after)

    # Messages

    @cached_property
    def channel_numbers(self) -> dict[Channel, int]:
        """Number of each channel between different stages, the same on all ranks."""
        return {hop.channel: number for number, hop in enumerate(self.hops)}

    def channel_number(self, channel: Channel) -> int:
        """Return the number of a channel, the same on all ranks.

        It is unique among the channels from the same stage to the same stage. All channels of remote buffers share two
        numbers, one for each direction.
        """
        if isinstance(channel.payload, PeerTransfer):
            return len(self.hops) + _TRANSFERS.index(channel.payload)
        return self.channel_numbers[channel]

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """All channels between different stages: activations to the next chunk, gradients back."""
        hops = []
        for (source, here), (target, there) in pairwise(enumerate(self.chunk_stages)):
            if there != here:
                hops.append(Hop(here, there, Channel(source, target, Payload.ACTIVATION)))
                hops.append(Hop(there, here, Channel(target, source, Payload.GRADIENT)))
        return tuple(hops)

    @cached_property
    def _partners(self) -> dict[int, set[int]]:
        """Stages that each stage exchanges activations and gradients with; stages that exchange none are left out.

        Targets alone suffice: gradients go back where activations came from. Messages of remote buffers do not count.
        """
        partners: dict[int, set[int]] = {}
        for hop in self.hops:
            partners.setdefault(hop.source, set()).add(hop.target)
        return partners

    @property
    def has_several_chunks(self) -> bool:
        """True if stages hold more than one chunk, so that messages name the chunk they go into."""
        return len(self.chunk_stages) > self.stages

    def chunk_of_message(self, channel: Channel) -> int | None:
        """Return the `chunk` field of a message on a channel; None if stages hold one chunk each."""
        return channel.into if self.has_several_chunks else None

    @cached_property
    def _hop_of(self) -> dict[tuple[int | None, int | None, Payload | PeerTransfer, int | None], Hop]:
        return {
            (hop.source, hop.target, hop.channel.payload, self.chunk_of_message(hop.channel)): hop for hop in self.hops
        }

    def hop(
        self, source: int | None, target: int | None, payload: Payload | PeerTransfer, chunk: int | None = None
    ) -> Hop | None:
        """Return the channel on which a stage sends a payload to another; None if there is no such edge.

        `chunk` is the message's field. Remote buffers may go from any stage to any other.
        """
        if not isinstance(payload, PeerTransfer):
            return self._hop_of.get((source, target, payload, chunk))
        stages = range(self.stages)
        if source is None or target is None or source == target or source not in stages or target not in stages:
            return None
        return Hop(source, target, Channel(self._first_chunks[source], self._first_chunks[target], payload))

    @cached_property
    def _first_chunks(self) -> tuple[int, ...]:
        return tuple(self.chunks_of(stage)[0] for stage in range(self.stages))

    def mirror_image(self, stage: int) -> int:
        """Return the stage as far from the last one as `stage` is from the first.

        Under 1F1B the later stage of such a pair has fewer micro-batches in flight, by the distance between the two
        (BPipe, Kim et al., ICML 2023).
        """
        return self.stages - 1 - stage

    # Groups

    def stages_of(self, group: Group, stage: int) -> tuple[int, ...]:
        """Return the stages, ascending, whose ranks meet in the group of this kind that a stage belongs to."""
        if group is Group.ALL:
            return tuple(range(self.stages))
        return tuple(sorted({self.first_stage, self.last_stage})) if group is Group.ENDS else (stage,)

    def members(self, group: Group, rank: Rank) -> tuple[Rank, ...]:
        """Return the members of a rank's group of a kind, in rank order.

        `REPLICAS`: the replicas of its stage and peer. `SHARDS`, `VIEWS`, `PARTS`: some of these, see `replicas_of`.
        `CONTEXT`, `EXPERTS` and `COPIES` also. `ENDS`: first and last stage of its replica and peer. `TENSOR`: the
        tensor-parallel ranks of its stage and replica. `ALL`: all ranks.
        """
        if group is Group.ALL:
            return self.ranks
        if group is Group.TENSOR:
            return tuple(rank._replace(peer=peer) for peer in range(self.peers))
        if group is Group.ENDS:
            return tuple(rank._replace(stage=stage) for stage in self.stages_of(group, rank.stage))
        return tuple(rank._replace(replica=replica) for replica in self.replicas_of(group, rank.replica))

    def replicas_of(self, group: Group, replica: int) -> range:
        """Return the replicas of a stage that meet one of them in a group of a kind.

        `SHARDS` share out all shards; `VIEWS` share out a view; `PARTS`, within a shard group, hold the same part of a
        view. `CONTEXT` share sequences, `EXPERTS` the experts of each layer; `COPIES` hold the same of these. Other
        groups are all replicas.
        """
        if group is Group.CONTEXT:
            return _neighbours(replica, self.contexts)
        if group is Group.EXPERTS:
            return _neighbours(replica, self.expert_ranks)
        if group is Group.COPIES:
            return range(replica % self.expert_ranks, self.replicas, self.expert_ranks)
        if group is Group.SHARDS:
            return _neighbours(replica, self.shards)
        if group is Group.VIEWS:
            return _neighbours(replica, self.viewers)
        if group is Group.PARTS:
            first = _neighbours(replica, self.shards).start
            return range(first + replica % self.viewers, first + self.shards, self.viewers)
        return range(self.replicas)

    @property
    def shards(self) -> int:
        """Number of shards that sharded state is cut into."""
        return self.shard_group or self.replicas

    @property
    def viewers(self) -> int:
        """Replicas that share out each view that is gathered for each use."""
        return self.view_group or self.shards

    def group_size(self, group: Group) -> int:
        """Return the number of members of each group of a kind."""
        return len(self.members(group, Rank(self.first_stage, 0)))

    def communicators(self, stage: int, *, tied: bool) -> int:
        """Count the communicators of a rank of a stage: groups of several ranks, one for each partner stage.

        Counted are: all ranks; its replicas; two for shard groups (its own, and the replicas with the same shards); two
        for view groups (its own, and the replicas with the same part); the ends if they share a matrix (`tied`); one
        for its context ranks; three for its expert ranks (rows, gradients, and the replicas with the same experts); and
        two for its tensor-parallel ranks, as activations and gradients are under way at the same time.
        """
        ends = self.stages_of(Group.ENDS, stage)
        peers, shards = 2 * (self.peers > 1), 2 * ((self.shard_group is not None) + (self.view_group is not None))
        of_replicas = (self.replicas > 1) + (self.contexts > 1) + 3 * (self.expert_ranks > 1)
        groups = (self.size > 1) + of_replicas + shards + peers + (tied and len(ends) > 1 and stage in ends)
        return groups + len(self._partners.get(stage, ()))

    def most_communicators(self, *, tied: bool) -> int:
        """Return the communicators of a rank of the stage that has the most."""
        return max(self.communicators(stage, tied=tied) for stage in range(self.stages))


@frozen(slots=False)  # for its cached properties
class Topology(Mesh):
    """Ranks of a model under a plan, and what each holds. `chunk_layers[c]` are the layers of chunk c."""

    model: ModelConfig
    plan: Plan
    chunk_layers: tuple[range, ...]

    @cached_property
    def chunk_blocks(self) -> tuple[tuple[Block, ...], ...]:
        """Blocks of each chunk, in forward order. The first chunk has the embedding, the last one the head."""
        chunks = [
            [block(kind, layer) for layer in layers for kind in ("attention", "mlp")] for layers in self.chunk_layers
        ]
        chunks[0].insert(0, block("embed"))
        chunks[-1].append(block("head"))
        return tuple(map(tuple, chunks))

    @cached_property
    def stage_blocks(self) -> tuple[tuple[Block, ...], ...]:
        """Blocks of each stage, in forward order."""
        return tuple(
            tuple(block for chunk in self.chunks_of(stage) for block in self.chunk_blocks[chunk])
            for stage in range(self.stages)
        )

    def ends_of_chunks(self, stage: int) -> tuple[tuple[Block, Block], ...]:
        """Return the first and the last block of each chunk that a stage holds, in forward order."""
        return tuple((self.chunk_blocks[chunk][0], self.chunk_blocks[chunk][-1]) for chunk in self.chunks_of(stage))

    @cached_property
    def chunk_of(self) -> dict[Block, int]:
        """Chunk of each block."""
        return {block: chunk for chunk, blocks in enumerate(self.chunk_blocks) for block in blocks}

    @cached_property
    def forward_only(self) -> int:
        """Number of first chunks without a backward: nothing in them, or below them, trains."""
        return next(
            chunk for chunk, blocks in enumerate(self.chunk_blocks) if has_backward(self.model, self.plan, blocks[-1])
        )

    @cached_property
    def shape(self) -> PipelineShape:
        """Shape of the pipeline, with the chunks that only go forward."""
        return evolve(self.plan.shape, forward_only=self.forward_only)

    @cached_property
    def backward_ends(self) -> frozenset[Block]:
        """Block of each chunk with which a backward through it ends: its first one, or the lowest that has one."""
        return frozenset(
            next(each for each in blocks if has_backward(self.model, self.plan, each))
            for blocks in self.chunk_blocks[self.forward_only :]
        )

    @cached_property
    def blocks_behind_cuts(self) -> frozenset[Block]:
        """Blocks whose input comes from another stage."""
        return frozenset(self.chunk_blocks[hop.channel.target][0] for hop in self.hops if _goes_forward(hop.channel))

    def crossing_block(self, channel: Channel) -> Block:
        """Return the block whose input, or gradient of the input, a channel carries: the first one behind the cut."""
        return self.chunk_blocks[channel.target if _goes_forward(channel) else channel.source][0]

    def among_holders(self, block: Block, replica: int) -> int:
        """Return the number of a replica among those with the same parameters of a block, ascending."""
        return replica // self.expert_ranks if has_experts(self.model, block) else replica

    def shard_index(self, block: Block, replica: int) -> int:
        """Return the shard of a block's flat tensors that a replica owns, as an index in the order of addresses.

        Without view groups it is the replica's number in its shard group. With them, the shards of replicas that hold
        the same part of a view are adjacent, so together they are that part. Example, 4 shards and view groups of 2:
        replicas 0 1 2 3 own shards 0 2 1 3.
        """
        count = shard_count(self.model, self.plan, block)
        replica = self.among_holders(block, replica)
        copies = count // self.viewers if parts_view(self.model, self.plan, block) else 1
        # `across`: which view group of the shard group; `part`: which part of a view. The shards of a part are the
        # `copies` shards at the same `part`, one from each view group.
        across, part = divmod(replica % count, count // copies)
        return part * copies + across

    def reduced_part(self, block: Block, replica: int) -> int:
        """Return the index of the part of a sharded block's gradient that a replica reduces.

        The gradient has as many parts as there are replicas. The part lies in the replica's own shard; replicas with
        copies of a shard reduce different parts of it.
        """
        count, number = shard_count(self.model, self.plan, block), self.among_holders(block, replica)
        return self.shard_index(block, replica) * (holders(self.model, self.plan, block) // count) + number // count

    def is_rearranged(self, block: Block) -> bool:
        """Tell whether `reduced_part` of a sharded block can differ from the replica's number."""
        return self.shard_group is not None or parts_view(self.model, self.plan, block)

    def lanes_by_shard(self, block: Block) -> list[int]:
        """Return the ranks of a stage, as `lane` indices, sorted by the shard of a block that they own."""
        lanes = [self.in_lane(0, lane) for lane in range(self.lanes)]
        return [self.lane(rank) for rank in sorted(lanes, key=lambda rank: self.shard_index(block, rank.replica))]

    def shard_range(self, block: Block, replica: int) -> range:
        """Return the elements of a block's flat tensors whose optimizer state a replica owns; all if unsharded."""
        length, index = shard_elements(self.model, self.plan, block), self.shard_index(block, replica)
        return range(index * length, (index + 1) * length)

    def view_range(self, block: Block, replica: int) -> range:
        """Return the elements of a view that a replica holds from step to step."""
        length, index = view_shard_elements(self.model, self.plan, block), replica % self.viewers
        return range(index * length, (index + 1) * length)

    def frozen_range(self, block: Block, replica: int, count: int) -> range:
        """Return the elements of a block's frozen tensor of `count` that a replica holds from step to step."""
        parts = frozen_parts(self.model, self.plan, block)
        index = 0
        if parts > 1:
            of_group = parts_view(self.model, self.plan, block)
            index = replica % self.viewers if of_group else self.shard_index(block, replica)
        return range(index * count // parts, (index + 1) * count // parts)

    def is_first_holder(self, block: Block, replica: int) -> bool:
        """Tell whether no replica with a lower number has the same optimizer state of a block, and the same experts."""
        return self.among_holders(block, replica) < shard_count(self.model, self.plan, block)


_TRANSFERS = tuple(PeerTransfer)


def _neighbours(replica: int, count: int) -> range:
    """Return the run of `count` neighbours that a replica is in."""
    first = replica - replica % count
    return range(first, first + count)


def _goes_forward(channel: Channel) -> bool:
    return channel.payload is Payload.ACTIVATION


@cache
def grid(stages: int, replicas: int, peers: int = 1) -> Mesh:
    """Return the mesh with one chunk a stage."""
    return Mesh(stages, replicas, peers, tuple(range(stages)))


@cache
def mesh_of_shape(
    shape: PipelineShape,
    replicas: int,
    peers: int = 1,
    shard_group: int | None = None,
    view_group: int | None = None,
    contexts: int = 1,
    expert_ranks: int = 1,
) -> Mesh:
    """Return the mesh of a pipeline's shape with its replicas (context ranks included) and tensor-parallel ranks."""
    return Mesh(
        shape.stages,
        replicas,
        peers,
        shape.chunk_stages,
        shard_group=shard_group,
        view_group=view_group,
        contexts=contexts,
        expert_ranks=expert_ranks,
    )


def mesh_of(plan: Plan) -> Mesh:
    """Return the mesh of a plan."""
    return mesh_of_shape(plan.shape, plan.replicas, plan.tp, plan.shard_group, plan.view_group, plan.cp, plan.ep)


@cache
def topology_of(model: ModelConfig, plan: Plan) -> Topology:
    """Return the topology of a model under a plan; equal arguments give the same object."""
    mesh = mesh_of(plan)
    layers = tuple(plan.chunk_layers(chunk, model) for chunk in range(len(mesh.chunk_stages)))
    return Topology(
        mesh.stages,
        mesh.replicas,
        mesh.peers,
        mesh.chunk_stages,
        model,
        plan,
        layers,
        shard_group=mesh.shard_group,
        view_group=mesh.view_group,
        contexts=mesh.contexts,
        expert_ranks=mesh.expert_ranks,
    )
