"""The space of plans: every shape that trains a model with a global batch on at most a number of clusters.

A shape is a plan without stage cuts. Example: 2 clusters and a global batch of 2 give, for one tensor-parallel rank, P
= 1 D = 1 with micro-batches of 1 or 2, P = 2 D = 1 with the same, and P = 1 D = 2 under each ZeRO level; each is then
divided into the chunks and slices of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_keys import OF_HEADS, OF_KEYS
from ratrain.ratrain_ir.config.plan_summary import sizes_text
from ratrain.ratrain_ir.config.rank_mapping import RankMapping, Tile
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.planner.space.search_setting import WHOLE_KEYS, ContextExchange
from ratrain.ratrainc.planner.space.tilings import divisors, tilings
from ratrain.targets.machine.link_groups import Link, LinkGroup

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.planner.space.search_setting import SearchSetting

STATE_MODES = ((0, "last"), (1, "last"), (2, "each-micro-batch"), (3, "last"), (3, "each-micro-batch"))
"""ZeRO levels and reduce modes. Level 2 with `last` is left out: its program is that of level 1."""


ONE_GROUP = (LinkGroup("system", None, Link(1.0, 0.0)),)
"""Groups of a machine of uniform links: their values do not matter to the space."""

_MOST_SEQUENCES = 1 << 16
"""Sequences of a micro-batch that a plan file allows."""


@frozen(order=True)
class Shape:
    """A plan without its stage cuts."""

    pp: int
    dp: int
    micro_batch_size: int
    micro_batches: int
    zero: int
    reduce: str
    tiles: tuple[Tile, ...] = ()
    """the mapping to groups of clusters; empty for none"""
    chunks: int = 1
    layout: str = "loop"
    slices: int = 1
    """number of slices, of even work"""
    tp: int = 1
    ends: int | None = field(default=None, order=lambda level: -1 if level is None else level)
    """the ZeRO level of embedding and head; None: that of all blocks"""
    shard_group: int | None = field(default=None, order=lambda group: group or 0)
    """replicas that have all shards between them; None: all"""
    view_group: int | None = field(default=None, order=lambda group: group or 0)
    """replicas that have views of level 3 between them; None: these are gathered of shards"""
    cp: int = 1
    exchange: str = OF_KEYS
    """what context ranks exchange for attention"""
    groups: int = 1
    """groups of key heads that they gather one after the other"""
    ep: int = 1
    """expert ranks: neighbouring replicas that share out the experts of every layer"""

    @property
    def clusters(self) -> int:
        """Clusters that it occupies."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights of a stage: replicas times context ranks."""
        return self.dp * self.cp

    @property
    def is_whole(self) -> bool:
        """True if a rank of a stage computes a micro-batch alone, without tensor-parallel, context and expert ranks."""
        return self.tp == self.cp == self.ep == 1

    @property
    def summary(self) -> str:
        """Sizes and levels in the words of a plan's summary."""
        return sizes_text(self, self.slices, self.cp, self.exchange, self.groups, self.ep)

    @property
    def pipeline(self) -> PipelineShape:
        """The numbers that its schedule depends on."""
        return PipelineShape(self.pp, self.micro_batches, self.chunks, self.layout, self.slices)

    @property
    def mapping(self) -> RankMapping | None:
        """Mapping of its ranks to groups of clusters; None if it has none."""
        return RankMapping(self.tiles) if self.tiles else None

    @property
    def stage(self) -> Shape:
        """One of its stages, of one sequence: everything that the bytes and seconds of its training state depend on.

        Context ranks count as replicas, which they are to the state.
        """
        tiles = tuple(evolve(tile, stages=1) for tile in self.tiles)
        whole = evolve(self, dp=self.replicas, cp=1, exchange=OF_KEYS, groups=1, tiles=tiles)
        return evolve(whole, pp=1, micro_batch_size=1, micro_batches=1, chunks=1, layout="loop", slices=1)

    @property
    def zero_blocks(self) -> ZeroLevels | None:
        """Plan key `zero_blocks` for a separate ZeRO level of embedding and head; None if they have the plan's."""
        return None if self.ends is None else ZeroLevels.parse(f"embed {self.ends}, head {self.ends}")

    def plan(self, setting: SearchSetting, cuts: tuple[int, ...]) -> Plan:
        """Return the plan with these cuts, one before each chunk but the first."""
        return setting.template.reshaped(
            pp=self.pp,
            dp=self.dp,
            cuts=cuts,
            micro_batch_size=self.micro_batch_size,
            micro_batches=self.micro_batches,
            zero=self.zero,
            reduce=self.reduce,
            mapping=self.mapping,
            chunks=self.chunks,
            layout=self.layout,
            slices=setting.slice_lengths(self.slices, self.cp),
            cp=self.cp,
            context_layout=setting.context_layout(self.cp),
            context_exchange=self.exchange,
            context_groups=self.groups,
            ep=self.ep,
            tp=self.tp,
            sequence_sharding=setting.shards_sequences(self.tp),
            zero_blocks=self.zero_blocks,
            shard_group=self.shard_group,
            view_group=self.view_group,
        )


def shapes(
    model: ModelConfig,
    clusters: int,
    global_batch: int,
    modes: tuple[tuple[int, str], ...] = STATE_MODES,
    groups: tuple[LinkGroup, ...] = ONE_GROUP,
    *,
    schedule: str = "1f1b",
    seq_len: int = 1,
    peers: tuple[int, ...] = (1,),
    contexts: tuple[int, ...] = (1,),
    exchanges: Callable[[int, int], tuple[ContextExchange, ...]] = lambda *_: (WHOLE_KEYS,),
    expert_ranks: tuple[int, ...] = (1,),
    ends: tuple[int, ...] = (),
    slices_of_one: bool = False,
    contexts_of_one: bool = False,
) -> list[Shape]:
    """Return every shape on at most `clusters` clusters, under every mapping to groups.

    Replicas share the global batch evenly. `schedule` gives the chunks and slices (`divisions`), as far as there are
    layers and tokens for them; with `slices_of_one` only micro-batches of one sequence are cut into slices. `peers` are
    the numbers of tensor-parallel ranks, which may not share out the model; `contexts` those of context ranks; with
    `contexts_of_one` several have micro-batches of one sequence alone. `exchanges` gives how a number of each may
    exchange for attention. `expert_ranks` are numbers of replicas that share out experts, of ranks that compute whole
    micro-batches. `ends` are the ZeRO levels that embedding and head may have of their own; if there are any,
    shards, or views of level 3 alone, may also be kept within groups of near replicas. Raises `DiagnosticError`
    RT064 if there is no shape, or the machine has fewer clusters.
    """
    most = groups[-1].clusters
    if most is not None and clusters > most:
        fail("RT064", f"the machine has {number_of(most, 'cluster')}, {clusters} are asked for")
    ways = divisions(schedule)
    ranks = tuple(
        (tp, cp, each, ep)
        for tp, cp, ep in product(peers, contexts, expert_ranks)
        for each in exchanges(tp, cp)
        if tp == cp == 1 or ep == 1
    )
    whole = _whole_shapes(
        model.layers, clusters, global_batch, modes, groups, ranks, ends, contexts_of_one=contexts_of_one
    )
    space = [
        divided
        for shape in whole
        for divided in _divided(
            shape, ways, model.layers, 1 if slices_of_one and shape.micro_batch_size > 1 else seq_len
        )
    ]
    if not space and schedule != "1f1b" and clusters >= 1 <= global_batch:
        sizes = f"of {number_of(model.layers, 'layer')} and {number_of(seq_len, 'token')}"
        text = f"{SCHEDULES[schedule].title} has no plan of {model.name} on {number_of(clusters, 'cluster')}, {sizes}"
        fail("RT064", text, help="use more clusters, or another strategy")
    if not space:
        fail("RT064", f"{number_of(clusters, 'cluster')} and a global batch of {global_batch}: both must be at least 1")
    return space


def divisions(schedule: str) -> tuple[tuple[int, str, int], ...]:
    """Return (chunks a stage, layout, slices) for a schedule: of 1, 2, 4 and 8 those that it can have.

    A schedule that usually has one chunk a stage keeps one.
    """
    usual = SCHEDULES[schedule]
    several = ((chunks, slices) for chunks in (_NUMBERS if usual.chunks > 1 else (1,)) for slices in _NUMBERS)
    items = ((chunks, usual.layout, slices) for chunks, slices in several)
    return tuple(item for item in items if usual.problem(PipelineShape(2, 2, *item)) is None)


_NUMBERS = (1, 2, 4, 8)


def _divided(shape: Shape, ways: tuple[tuple[int, str, int], ...], layers: int, slices_at_most: int) -> Iterator[Shape]:
    for chunks, layout, slices in ways:
        if slices > 1 and (shape.exchange == OF_HEADS or shape.groups > 1 or shape.ep > 1):
            continue
        # each context rank has up to two runs of a slice
        least = slices * 2 * shape.cp if slices > 1 < shape.cp else slices
        if least <= slices_at_most and (chunks == 1 or (shape.pp > 1 and shape.pp * chunks <= layers)):
            if (chunks, layout, slices) == (shape.chunks, shape.layout, shape.slices):
                yield shape
                continue
            s = shape  # not `evolve`, which takes several times as long: shapes are many
            sizes = s.pp, s.dp, s.micro_batch_size, s.micro_batches, s.zero, s.reduce, s.tiles
            near = s.ends, s.shard_group, s.view_group
            yield Shape(*sizes, chunks, layout, slices, s.tp, *near, s.cp, s.exchange, s.groups, s.ep)


@lru_cache(maxsize=1)
def _whole_shapes(
    layers: int,
    clusters: int,
    global_batch: int,
    modes: tuple[tuple[int, str], ...],
    groups: tuple[LinkGroup, ...],
    ranks: tuple[tuple[int, int, ContextExchange, int], ...],
    ends: tuple[int, ...],
    *,
    contexts_of_one: bool,
) -> tuple[Shape, ...]:
    """Return the shapes of one chunk a stage and whole micro-batches; cached, as all schedules divide the same ones."""
    return tuple(
        shape
        for of_ranks in ranks
        for shape in _of_ranks(layers, clusters, global_batch, modes, groups, of_ranks, ends)
        if not (contexts_of_one and shape.cp > 1 < shape.micro_batch_size)
    )


def _of_ranks(
    layers: int,
    clusters: int,
    global_batch: int,
    modes: tuple[tuple[int, str], ...],
    groups: tuple[LinkGroup, ...],
    ranks: tuple[int, int, ContextExchange, int],
    ends: tuple[int, ...],
) -> Iterator[Shape]:
    tp, cp, (exchange, of_heads), ep = ranks
    replicas = [d for d in divisors(global_batch) if d * cp * tp <= clusters and d % ep == 0]
    for dp in replicas:
        sizes = [size for size in divisors(global_batch // dp) if size <= _MOST_SEQUENCES]
        for pp in range(1, min(layers, clusters // (dp * cp * tp)) + 1):
            mapped = tilings(pp, dp * cp, clusters, groups, tp)
            states = modes if dp * cp > 1 else ((0, "last"),)
            for size, (zero, reduce), tiles in product(sizes, states, mapped):
                numbers = pp, dp, size, global_batch // dp // size
                shape = Shape(*numbers, zero, reduce, tiles, tp=tp, cp=cp, exchange=exchange, groups=of_heads, ep=ep)
                yield shape
                if ends and zero:
                    yield from (evolve(shape, ends=level) for level in ENDS[zero, reduce] if level in ends)
                    near = _groups_near(shape) if ep == 1 else ()
                    yield from (evolve(shape, shard_group=group) for group in near)
                    if zero == 3:
                        yield from (evolve(shape, view_group=group) for group in near)


ENDS: dict[tuple[int, str], tuple[int, ...]] = {
    (1, "last"): (3,),
    (2, "each-micro-batch"): (3,),
    (3, "last"): (1,),
    (3, "each-micro-batch"): (2,),
}
"""ZeRO levels of embedding and head to consider for each level and reduce mode: they gather their views for each use if
others do not, and vice versa."""


def _groups_near(shape: Shape) -> list[int]:
    """Return the sizes of groups of replicas that a mapping places together and that divide all replicas."""
    near = {tile.replicas for tile in shape.tiles}
    return sorted(number for number in near if 1 < number < shape.replicas and shape.replicas % number == 0)


def template(seq_len: int) -> Plan:
    """Return the plan template without a plan file: f16 views, the usual AdamW, no clipping."""
    return Plan(pp=1, dp=1, cuts=(), micro_batch_size=1, micro_batches=1, seq_len=seq_len, zero=0)


def with_dtype(plan: Plan, dtype: str) -> Plan:
    """Return the plan with views and gradients of one type; losses are scaled for f16 alone."""
    scale = None if dtype == "f16" else 1.0
    return evolve(plan, view_dtype=dtype, grad_dtype=dtype, grad_shard_dtype=dtype, loss_scale=scale)
