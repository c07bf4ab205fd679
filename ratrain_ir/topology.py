"""Who is where: the ranks of a plan, what each holds, who meets whom in which order, and over which channels.

The ranks are the points of a mesh of pipeline stages x replicas x tensor peers. A *stage* is a position in the pipeline and one
section of the text, written once for all its replicas and tensor peers (SPMD). The chain of blocks is cut into *chunks*, numbered in
forward order; a stage holds one or several. What travels between two chunks that follow each other has a *channel* of its own for each
payload, so that two edges between the same two stages never share one. Collectives meet in *groups*, whose members stand in rank order.

Everybody asks here; nobody else compares a stage with the last one, or computes where a shard begins.
"""

from __future__ import annotations

from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from attrs import field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.blocks import Block, block, parts_view, shard_count, shard_elements, view_shard_elements
from ratrain.ratrain_ir.ops.base import Group, GuestWay, Payload

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape


class Rank(NamedTuple):
    """A point of the mesh. Ranks are ordered by stage, then replica, then tensor peer."""

    stage: int
    replica: int
    peer: int = 0


class Channel(NamedTuple):
    """One direction of the edge between two chunks that follow each other, for one payload.

    Or, of guests, one between two stages, each given by the first chunk that it holds.
    """

    source: int
    """the chunk whose stage sends"""
    target: int
    """the chunk whose stage receives"""
    payload: Payload | GuestWay

    @property
    def into(self) -> int:
        """The chunk whose input it carries, or the gradient of whose input: the later one."""
        return max(self.source, self.target)


class Hop(NamedTuple):
    """A channel between two stages, and which they are."""

    source: int
    target: int
    channel: Channel


@frozen(slots=False)  # for its cached properties
class Mesh:
    """The ranks of a plan, their groups and channels: all that does not ask what the model is.

    `chunk_stages[c]` is the stage that holds chunk c. Groups of replicas lie one in another, each of neighbours: `shard_group` replicas
    have all shards of sharded state between them, all where it is None; of these `view_group` have views between them, none where it is.
    """

    stages: int
    replicas: int
    peers: int
    chunk_stages: tuple[int, ...]
    shard_group: int | None = field(default=None, kw_only=True)
    view_group: int | None = field(default=None, kw_only=True)

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
        """Ranks of a stage."""
        return self.replicas * self.peers

    def lane(self, rank: Rank) -> int:
        """The number of a rank among those of its stage, in rank order."""
        return rank.replica * self.peers + rank.peer

    def in_lane(self, stage: int, lane: int) -> Rank:
        """The rank of a stage that has a number among its ranks."""
        return Rank(stage, *divmod(lane, self.peers))

    def name(self, rank: Rank) -> str:
        """A rank as messages call it."""
        peer = f" peer {rank.peer}" if self.peers > 1 else ""
        return f"stage @{rank.stage} replica {rank.replica}{peer}"

    @property
    def words(self) -> str:
        """How many stages, replicas and, where there are any, tensor peers there are, as messages say it."""
        peers = f" x {self.peers} tensor peers" if self.peers > 1 else ""
        return f"{self.stages} stages x {self.replicas} replicas{peers}"

    # Chunks

    @property
    def first_stage(self) -> int:
        """The stage that loads tokens and embeds them."""
        return self.chunk_stages[0]

    @property
    def last_stage(self) -> int:
        """The stage that loads labels and knows the loss."""
        return self.chunk_stages[-1]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that a stage holds, in forward order."""
        return tuple(chunk for chunk, holder in enumerate(self.chunk_stages) if holder == stage)

    def neighbours(self, chunk: int) -> tuple[int | None, int | None]:
        """The stages of the chunks before and after a chunk; None where there is none, or the same stage holds it."""
        own = self.chunk_stages[chunk]
        before = self.chunk_stages[chunk - 1] if chunk > 0 else own
        after = self.chunk_stages[chunk + 1] if chunk + 1 < len(self.chunk_stages) else own
        return (None if before == own else before), (None if after == own else after)

    # Messages

    @cached_property
    def channel_numbers(self) -> dict[Channel, int]:
        """A number for each channel of the pipeline between different stages, the same on all ranks."""
        return {hop.channel: number for number, hop in enumerate(self.hops)}

    def channel_number(self, channel: Channel) -> int:
        """The number of a channel, the same on all ranks: no other channel from the same stage to the same stage has it."""
        if isinstance(channel.payload, GuestWay):
            return len(self.hops) + _GUEST_WAYS.index(channel.payload)
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
        """The stages that each stage exchanges messages with: activations go the one way, gradients the other."""
        partners: dict[int, set[int]] = {}
        for hop in self.hops:
            partners.setdefault(hop.source, set()).add(hop.target)
        return partners

    @property
    def has_several_chunks(self) -> bool:
        """Whether stages hold more than one chunk, so that messages say which one they go into."""
        return len(self.chunk_stages) > self.stages

    def chunk_of_message(self, channel: Channel) -> int | None:
        """What a message on a channel says of the chunk that it goes into: nothing where stages hold one chunk each."""
        return channel.into if self.has_several_chunks else None

    @cached_property
    def _hop_of(self) -> dict[tuple[int | None, int | None, Payload | GuestWay, int | None], Hop]:
        return {
            (hop.source, hop.target, hop.channel.payload, self.chunk_of_message(hop.channel)): hop for hop in self.hops
        }

    def hop(
        self, source: int | None, target: int | None, payload: Payload | GuestWay, chunk: int | None = None
    ) -> Hop | None:
        """The channel on which a stage sends a payload to another; `chunk` as the message says it. None where there is no such edge.

        Guests may go from any stage to any other.
        """
        if not isinstance(payload, GuestWay):
            return self._hop_of.get((source, target, payload, chunk))
        stages = range(self.stages)
        if source is None or target is None or source == target or source not in stages or target not in stages:
            return None
        return Hop(source, target, Channel(self._first_chunks[source], self._first_chunks[target], payload))

    @cached_property
    def _first_chunks(self) -> tuple[int, ...]:
        return tuple(self.chunks_of(stage)[0] for stage in range(self.stages))

    def mirror_image(self, stage: int) -> int:
        """The stage that is as far from the last as a stage is from the first.

        Under 1F1B the later of the two has as many micro-batches less in flight as it is behind (BPipe, Kim et al., ICML 2023).
        """
        return self.stages - 1 - stage

    # Groups

    def stages_of(self, group: Group, stage: int) -> tuple[int, ...]:
        """The stages whose ranks meet in the group of a kind that a stage's ranks are members of, in order."""
        if group is Group.ALL:
            return tuple(range(self.stages))
        return tuple(sorted({self.first_stage, self.last_stage})) if group is Group.ENDS else (stage,)

    def members(self, group: Group, rank: Rank) -> tuple[Rank, ...]:
        """The members of a rank's group of a kind, in rank order.

        The replicas of its stage, or those of them that have all shards, or a view, between them, or the same part of one; first and last
        stage of its replica; the tensor peers of its stage and replica; or all ranks. Each tensor peer has groups of the others of its own.
        """
        if group is Group.ALL:
            return self.ranks
        if group is Group.TENSOR:
            return tuple(rank._replace(peer=peer) for peer in range(self.peers))
        if group is Group.ENDS:
            return tuple(rank._replace(stage=stage) for stage in self.stages_of(group, rank.stage))
        return tuple(rank._replace(replica=replica) for replica in self.replicas_of(group, rank.replica))

    def replicas_of(self, group: Group, replica: int) -> range:
        """The replicas of a stage that meet one of them in a group of a kind."""
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
        """Shards that sharded state is cut into."""
        return self.shard_group or self.replicas

    @property
    def viewers(self) -> int:
        """Replicas that have a view between them which is gathered for each use."""
        return self.view_group or self.shards

    def group_size(self, group: Group) -> int:
        """Members of each group of a kind."""
        return len(self.members(group, Rank(self.first_stage, 0)))

    def communicators(self, stage: int, *, tied: bool) -> int:
        """Communicators that a rank of a stage is a member of: groups of more than one rank, and a pair with each stage it has messages with.

        All ranks are one; its replicas, and where these are in shard groups, its own and those that have the same shards as it, and where
        groups have views between them, its own and those that have the same part of one; the ends, where first and last stage share a matrix (`tied`). Its tensor peers are two: their activations and their gradients are under way
        at the same time.
        """
        ends = self.stages_of(Group.ENDS, stage)
        peers, shards = 2 * (self.peers > 1), 2 * ((self.shard_group is not None) + (self.view_group is not None))
        groups = (self.size > 1) + (self.replicas > 1) + shards + peers + (tied and len(ends) > 1 and stage in ends)
        return groups + len(self._partners.get(stage, ()))

    def most_communicators(self, *, tied: bool) -> int:
        """Communicators of a rank of the stage that has most of them."""
        return max(self.communicators(stage, tied=tied) for stage in range(self.stages))


@frozen(slots=False)  # for its cached properties
class Topology(Mesh):
    """The ranks of a model under a plan, and what each holds. `chunk_layers[c]` are the layers of chunk c."""

    model: ModelConfig
    plan: Plan
    chunk_layers: tuple[range, ...]

    @cached_property
    def chunk_blocks(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of each chunk, in forward order: the embedding with the first layers, the head with the last."""
        chunks = [
            [block(kind, layer) for layer in layers for kind in ("attention", "mlp")] for layers in self.chunk_layers
        ]
        chunks[0].insert(0, block("embed"))
        chunks[-1].append(block("head"))
        return tuple(map(tuple, chunks))

    @cached_property
    def stage_blocks(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of each stage, in forward order."""
        return tuple(
            tuple(block for chunk in self.chunks_of(stage) for block in self.chunk_blocks[chunk])
            for stage in range(self.stages)
        )

    def ends_of_chunks(self, stage: int) -> tuple[tuple[Block, Block], ...]:
        """The first and the last block of each chunk that a stage holds, in forward order."""
        return tuple((self.chunk_blocks[chunk][0], self.chunk_blocks[chunk][-1]) for chunk in self.chunks_of(stage))

    @cached_property
    def chunk_of(self) -> dict[Block, int]:
        """The chunk of each block."""
        return {block: chunk for chunk, blocks in enumerate(self.chunk_blocks) for block in blocks}

    @cached_property
    def blocks_behind_cuts(self) -> frozenset[Block]:
        """The blocks whose input comes from another stage."""
        return frozenset(self.chunk_blocks[hop.channel.target][0] for hop in self.hops if _goes_forward(hop.channel))

    def crossing_block(self, channel: Channel) -> Block:
        """The block whose input, or gradient of the input, a channel carries: the first one behind the cut."""
        return self.chunk_blocks[channel.target if _goes_forward(channel) else channel.source][0]

    def shard_index(self, block: Block, replica: int) -> int:
        """Which shard of a block's flat tensors a replica owns, as they lie there.

        In rank order; but those of replicas that have the same part of a view lie one behind the other, so that together they are that
        part.
        """
        count = shard_count(self.plan, block)
        copies = count // self.viewers if parts_view(self.plan, block) else 1
        across, part = divmod(replica % count, count // copies)
        return part * copies + across

    def reduced_part(self, block: Block, replica: int) -> int:
        """Which part, of as many as there are replicas, of a sharded block's gradient a replica reduces: one of its own shard."""
        count = shard_count(self.plan, block)
        return self.shard_index(block, replica) * (self.replicas // count) + replica // count

    def is_rearranged(self, block: Block) -> bool:
        """Whether replicas reduce other parts of a sharded block's gradient than those of their own number."""
        return self.shard_group is not None or parts_view(self.plan, block)

    def lanes_by_shard(self, block: Block) -> list[int]:
        """The ranks of a stage, by their number there, in the order of the shards of a block that they have."""
        lanes = [self.in_lane(0, lane) for lane in range(self.lanes)]
        return [self.lane(rank) for rank in sorted(lanes, key=lambda rank: self.shard_index(block, rank.replica))]

    def shard_range(self, block: Block, replica: int) -> range:
        """The elements of a block's flat tensors whose optimizer state a replica owns; all of them where nothing is sharded."""
        length, index = shard_elements(self.model, self.plan, block), self.shard_index(block, replica)
        return range(index * length, (index + 1) * length)

    def view_range(self, block: Block, replica: int) -> range:
        """The elements of a view of which a replica has a part from step to step."""
        length, index = view_shard_elements(self.model, self.plan, block), replica % self.viewers
        return range(index * length, (index + 1) * length)

    def is_first_holder(self, block: Block, replica: int) -> bool:
        """Whether no replica before has the same optimizer state of a block."""
        return replica < shard_count(self.plan, block)


_GUEST_WAYS = tuple(GuestWay)


def _neighbours(replica: int, count: int) -> range:
    """The group of so many neighbours that a replica is in."""
    first = replica - replica % count
    return range(first, first + count)


def _goes_forward(channel: Channel) -> bool:
    return channel.payload is Payload.ACTIVATION


@cache
def grid(stages: int, replicas: int, peers: int = 1) -> Mesh:
    """The mesh of so many stages with one chunk each, replicas and tensor peers."""
    return Mesh(stages, replicas, peers, tuple(range(stages)))


@cache
def mesh_of_shape(
    shape: PipelineShape,
    replicas: int,
    peers: int = 1,
    shard_group: int | None = None,
    view_group: int | None = None,
) -> Mesh:
    """The mesh of replicas of a pipeline."""
    return Mesh(shape.stages, replicas, peers, shape.chunk_stages, shard_group=shard_group, view_group=view_group)


def mesh_of(plan: Plan) -> Mesh:
    """The mesh of a plan."""
    return mesh_of_shape(plan.shape, plan.dp, plan.tp, plan.shard_group, plan.view_group)


@cache
def topology_of(model: ModelConfig, plan: Plan) -> Topology:
    """The topology of a model under a plan; what is asked for twice is the same object."""
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
    )
