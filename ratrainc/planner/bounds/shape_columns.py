"""Columns: the numbers that bounds need of many shapes, as arrays with one entry a shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import field, fields, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrainc.choices.strategies import may_hide_exchanges
from ratrain.ratrainc.planner.bounds.exchange_profile import ExchangeProfile
from ratrain.ratrainc.planner.bounds.held_passes import has_halves
from ratrain.ratrainc.planner.bounds.layer_mix import LayerMix, Span
from ratrain.ratrainc.planner.bounds.state_profile import StateProfile
from ratrain.ratrainc.planner.bounds.work_profile import WorkProfile
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.ratrainc.planner.space.units import EMBED, EXCESS, HEAD, LAYER
from ratrain.targets.machine.slowest_rank import slowest_rank

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.bounds.profiles import Profiles

Numbers = NDArray[np.float64]


@frozen(eq=False, slots=False)  # for its cached property
class Columns:
    """Numbers of many shapes, on the last axis of a column; the first axis has units or lines.

    Columns without a note are fields of `WorkProfile` and `StateProfile`. `message` is the seconds of a boundary tensor
    to the next stage.
    """

    pp: Numbers
    micro_batches: Numbers
    layers: float
    capacity: Numbers
    """bytes that a rank has left for tensors"""
    forward: Numbers
    backward: Numbers
    held: Numbers
    mlp_ends: Numbers
    head_ends: Numbers
    tokens: Numbers
    labels: Numbers
    documents: Numbers
    mlp_saved: Numbers
    mlp_scratch: Numbers
    head_scratch: Numbers
    attention_scores: Numbers
    message: Numbers
    recovery_slope: Numbers
    """slopes of the lines whose maximum is a layer's recovery over the bytes it keeps, without the last line"""
    recovery_intercept: Numbers
    recovery_least: Numbers
    """seconds if everything is kept: the last line, which is flat"""
    carried: Numbers
    state: Numbers
    """bytes of masters and moments, which `carried` includes"""
    gradients: Numbers
    sliced_gradients: Numbers
    mlp_gradient: Numbers
    head_gradient: Numbers
    head_gathered: Numbers
    mlp_view: Numbers
    embed_view: Numbers
    head_view: Numbers
    layer_part: Numbers
    update: Numbers
    link: Numbers
    link_each: Numbers
    tail: Numbers
    tail_update: Numbers
    """seconds of the update, which `tail` includes"""
    first_forward: Numbers
    """way of the first slice, or of a whole micro-batch: compute plus exchanges with other ranks"""
    first_backward: Numbers
    forward_way: Numbers
    """way of a whole micro-batch: its compute, plus exchanges with tensor-parallel, context and expert ranks"""
    backward_way: Numbers
    weight_half: Numbers
    """seconds of backward that may follow after the gradient has passed; 0 if backwards are whole"""
    input_half: Numbers
    parameter_half: Numbers
    exchange: Numbers
    """seconds of the tensor engine for a micro-batch"""
    merged: Numbers
    """1 if a pass may be merged with the next one, as with tensor-parallel or expert ranks, else 0"""
    exchanging: Numbers
    """1 if several ranks compute a micro-batch together, and exchange for it, else 0"""
    pending: Numbers
    """bytes that it holds from the input half of its backward to its weight half, if they are apart"""
    chunks: Numbers
    slices: Numbers
    orders: Sequence[PipelineShape]
    """the distinct pipeline shapes"""
    order: NDArray[np.intp]
    """index into `orders` for each shape"""
    schedule: str
    has_halves: bool
    """True if weight halves may come later than the gradients of inputs"""
    head_stage: int
    """stage of the head: -1, or 0 in a vee"""
    mix: LayerMix | None = None
    """layers by class; None if all are alike"""
    span: Span | None = None
    """layers by class of the stages that are bounded; None if all layers are alike, or the least ones are meant"""
    other: OtherMemory | None = None
    """another memory that plans may use; the columns above are then what stays in DDR in any case"""

    @cached_property
    def has_exchanges(self) -> bool:
        """True if ranks of some shape exchange within a micro-batch; else the terms for them are skipped, for speed."""
        return bool(self.exchanging.any())

    @property
    def everything(self) -> Numbers:
        """Factors of a column's rows whose sum is that of all units."""
        counts = np.zeros(0) if self.mix is None else self.mix.counts[: len(self.forward) - EXCESS]
        return np.array([1.0, self.layers, 1.0, *counts])

    @property
    def overlaps_steps(self) -> bool:
        """True if some layers only go forward: a stage of such may begin the next step while others go back."""
        return self.mix is not None and not self.mix.all_go_back

    @property
    def in_one_step(self) -> Numbers:
        """Factors of a column's rows whose sum is that of all units that wait in each step for the step before.

        They are all units, or those that a gradient goes back through.
        """
        if self.mix is None or self.mix.all_go_back:
            return self.everything
        back = np.where(self.mix.goes_back, self.mix.counts, 0.0)
        return np.array([0.0, back.sum(), 1.0, *back[: len(self.forward) - EXCESS]])

    def within(self, before: Numbers, layers: Numbers) -> Columns:
        """Return the columns for stages of some layers after some others, whose classes are then known."""
        if self.mix is None:
            return self
        if self.is_chunked:  # a stage's layers are in several places
            return self.anywhere(layers)
        before = before.reshape((1,) * (layers.ndim - before.ndim) + before.shape)
        return self._over(Span(self.mix.first(before), self.mix.between(before, layers), exact=True))

    def anywhere(self, layers: Numbers, before: Numbers | None = None) -> Columns:
        """Return the columns for stages of some layers, of any classes, after at least `before` others."""
        if self.mix is None:
            return self
        own = self.mix.anywhere(layers, in_a_row=not self.is_chunked)
        passed = np.zeros(len(own)) if self.is_chunked or before is None else self.mix.first(before)
        return self._over(Span(passed, own, exact=False))

    def cut(self, layers: Numbers) -> Columns:
        """Return the columns for the stages of plans, [stages, plans]."""
        return self if self.mix is None else self.within(np.cumsum(layers, axis=0) - layers, layers)

    def _over(self, span: Span) -> Columns:
        other = self.other
        if other is not None:
            other = attrs.evolve(other, whole=attrs.evolve(other.whole, span=span))
        return attrs.evolve(self, span=span, other=other)

    @property
    def is_chunked(self) -> bool:
        """True if stages of some shape have several chunks."""
        return bool((self.chunks > 1).any())

    @property
    def in_order(self) -> bool:
        """True if stages follow 1F1B exactly, so that the bounds of its order hold."""
        return self.schedule == "1f1b"

    @property
    def is_one_chunk_order(self) -> bool:
        """True if forwards and input gradients are ordered as in 1F1B, with whole backwards on the first stage."""
        return self.schedule in ("1f1b", "zb-h1")

    @classmethod
    def of(cls, profiles: Profiles, shapes: Sequence[Shape], *, schedule: str = "1f1b") -> Columns:
        """Make the columns of shapes of a schedule; each distinct micro-batch and state is profiled once."""
        # many shapes share a micro-batch or a state: `grouped` gives one example of each group, and each shape's group
        attributes = _Attributes(shapes)
        sizes, size = attributes.grouped("micro_batch_size", "slices", "tp", "cp", "exchange", "groups", "ep")
        examples, order = attributes.grouped("pp", "micro_batches", "chunks", "layout", "slices")
        pipelines = [shape.pipeline for shape in examples]
        states, state = attributes.grouped(
            "dp", "zero", "reduce", "tiles", "tp", "ends", "shard_group", "view_group", "cp", "ep"
        )
        ways, way = attributes.grouped(
            "pp", "dp", "tiles", "micro_batch_size", "slices", "tp", "cp", "exchange", "groups", "ep"
        )
        meshes, mesh = attributes.grouped("pp", "dp", "tp", "cp", "ep")
        works = [profiles.work_of(shape) for shape in sizes]
        of_size = _table(works, _WORK_COLUMNS) | _recovery_lines([(work.kept_bytes, work.recovery) for work in works])
        # a step waits for the slowest of all ranks, so compute takes its time; links and exchanges do not
        jitter = profiles.setting.machine.rank_jitter
        slowest = np.array([slowest_rank(jitter, shape.clusters) for shape in meshes])[mesh]
        of_state = _table([profiles.state(shape) for shape in states], _STATE_COLUMNS)
        of_work: dict[str, Any] = {
            name: column.take(size, axis=-1) * (slowest if name in _COMPUTE_COLUMNS else 1.0)
            for name, column in of_size.items()
        }
        exchanges = [profiles.exchange(shape) for shape in ways]
        exchanged: dict[str, Any] = {
            name: column[:, way] for name, column in _table(exchanges, _EXCHANGE_COLUMNS).items()
        }
        of_work["first_forward"] += exchanged["first_forward"]
        of_work["first_backward"] += exchanged["first_backward"]
        return cls(
            pp=np.fromiter((s.pp for s in shapes), float, len(shapes)),
            micro_batches=np.fromiter((s.micro_batches for s in shapes), float, len(shapes)),
            layers=float(profiles.setting.model.layers),
            capacity=np.array([profiles.capacity(shape) for shape in meshes], float)[mesh],
            chunks=np.fromiter((s.chunks for s in shapes), float, len(shapes)),
            slices=np.fromiter((s.slices for s in shapes), float, len(shapes)),
            orders=pipelines,
            order=order,
            schedule=schedule,
            # a small pipeline with as many chunks shows it as well
            has_halves=has_halves(schedule, attrs.evolve(pipelines[0], stages=2, micro_batches=4)),
            head_stage=pipelines[0].chunk_stages[-1] if shapes[0].layout == "vee" else -1,
            message=np.array([profiles.message(shape) for shape in ways])[way],
            forward_way=of_work["forward"] + exchanged["forward"],
            backward_way=of_work.pop("passed_back") + exchanged["backward"],
            exchange=exchanged["engine"],
            merged=np.array([float(may_hide_exchanges(shape)) for shape in sizes])[size],
            exchanging=np.array([float(not shape.is_whole) for shape in sizes])[size],
            mix=LayerMix.of(profiles.setting.classes),
            **of_work,
            **dict[str, Any]((name, column.take(state, axis=-1)) for name, column in of_state.items()),
        )

    @property
    def there_and_back(self) -> Numbers:
        """Seconds of one micro-batch through all stages and back."""
        return self.everything @ (self.forward_way + self.backward_way) + 2 * self.message * (self.pp - 1)

    def rows(self, index: slice | NDArray[np.intp]) -> Columns:
        """Return the columns of some of the shapes."""
        columns: dict[str, Any] = attrs.asdict(self, recurse=False)
        if self.other is not None:
            columns["other"] = attrs.evolve(self.other, whole=self.other.whole.rows(index))
        for name, column in columns.items():
            if isinstance(column, np.ndarray):
                # a slice stays a view; `take` is faster than indexing by an array
                columns[name] = column[..., index] if isinstance(index, slice) else column.take(index, axis=-1)
        return Columns(**columns)

    def with_capacity(self, capacity: Numbers) -> Columns:
        """Return the columns with another capacity of a rank."""
        other = self.other
        if other is not None:
            other = attrs.evolve(other, whole=attrs.evolve(other.whole, capacity=capacity))
        return attrs.evolve(self, capacity=capacity, other=other)


def of_any_levels(gathered: Columns, kept: Columns) -> Columns:
    """Return the least of two columns: shapes that gather views for each use, and the same shapes that keep them.

    They bound any mix of levels. `layer_part` stays that of the gathered shapes: it is subtracted, and whole views are
    never freed.
    """
    least = {name: np.minimum(getattr(gathered, name), getattr(kept, name)) for name in _STATE_COLUMNS}
    other = gathered.other
    if other is not None and kept.other is not None:
        other = attrs.evolve(other, whole=of_any_levels(other.whole, kept.other.whole))
    return attrs.evolve(gathered, **least | {"layer_part": gathered.layer_part, "other": other})


@frozen(eq=False)
class OtherMemory:
    """A memory other than a rank's DDR, for state and for activations that wait for their backward."""

    whole: Columns
    """columns of the same shapes with everything in DDR"""
    room: float
    """its bytes a rank; infinite if unknown"""
    rate: float
    """bytes a second of its slower direction"""
    both_ways: float
    """seconds of a byte there and back"""
    takes_state: bool
    """True if masters and moments may be in it"""
    streams: bool
    """True if these are transferred in every step; False if they are updated in place"""


_WORK_COLUMNS = tuple(
    each.name for each in fields(WorkProfile) if each.name not in ("kept_bytes", "recovery", "boundary")
)
_COMPUTE_SECONDS = (
    *("forward", "backward", "first_forward", "first_backward", "passed_back", "weight_half"),
    *("input_half", "parameter_half"),
)
_COMPUTE_COLUMNS = {*_COMPUTE_SECONDS, "recovery_slope", "recovery_intercept", "recovery_least"}
"""Columns of the compute engine's seconds, which are the slowest rank's."""
_EXCHANGE_COLUMNS = tuple(each.name for each in fields(ExchangeProfile))
_STATE_COLUMNS = tuple(each.name for each in fields(StateProfile))


@frozen(eq=False)
class _Attributes:
    """Attributes of many shapes as numbers, equal for equal values."""

    shapes: Sequence[Shape]
    numbers: dict[str, NDArray[np.int64]] = field(factory=dict)

    def of(self, name: str) -> NDArray[np.int64]:
        """Return the values of an attribute, numbered in order of first occurrence."""
        if name not in self.numbers:
            value = attrgetter(name)
            place = {common: at for at, common in enumerate(dict.fromkeys(map(value, self.shapes)))}
            numbers = map(place.__getitem__, map(value, self.shapes))  # no loop of Python's: shapes are many
            self.numbers[name] = np.fromiter(numbers, np.int64, len(self.shapes))
        return self.numbers[name]

    def grouped(self, *names: str) -> tuple[list[Shape], NDArray[np.intp]]:
        """Group shapes by attributes; return one shape of each group, and the group of each shape."""
        key = np.zeros(len(self.shapes), np.int64)
        # mixed radix: shapes with equal attributes get equal keys
        for name in names:
            numbers = self.of(name)
            key = key * (int(numbers.max()) + 1) + numbers
        _, examples, groups = np.unique(key, return_index=True, return_inverse=True)
        return [self.shapes[at] for at in examples.tolist()], groups


def _table(profiles: Sequence[object], names: Sequence[str]) -> dict[str, Numbers]:
    """Return attributes of profiles as arrays whose last axis has the profiles."""
    return {name: np.array([getattr(profile, name) for profile in profiles], float).T for name in names}


def _recovery_lines(hulls: Sequence[tuple[Numbers, Numbers]]) -> dict[str, Numbers]:
    """Return the lines of hulls, padded to equal numbers: a convex function is the maximum of its segments' lines."""
    least = np.array([seconds[-1] for _, seconds in hulls])
    # a flat line at the least recovery is never above the hull, so it pads shorter ones
    slopes = np.zeros((max(len(x) for x, _ in hulls) - 1, len(hulls)))
    intercepts = np.tile(least, (len(slopes), 1))
    for at, (x, y) in enumerate(hulls):
        slope = np.diff(y) / np.diff(x)
        slopes[: len(slope), at] = slope
        intercepts[: len(slope), at] = y[:-1] - slope * x[:-1]
    return {"recovery_slope": slopes, "recovery_intercept": intercepts, "recovery_least": least}


def unit_sum(c: Columns, column: Numbers, layers: Numbers) -> Numbers:
    """Sum a column over the units (embed, layers, head) of stages; axes of `layers` as for `stage_bounds`.

    Of layers that differ those count that `Columns.span` has; without it the least ones.
    """
    total: Numbers = layer_sum(c, column, layers)
    total[0] += column[EMBED]
    total[c.head_stage] += column[HEAD]
    return total


def layer_sum(c: Columns, column: Numbers, layers: Numbers) -> Numbers:
    """Sum a column over the layers of stages."""
    total: Numbers = layers * column[LAYER]
    return total if c.span is None else total + excess_sum(column, c.span.own)


def excess_sum(column: Numbers, counts: Numbers) -> Numbers:
    """Sum what layers have beyond the least one, `counts` of each class; 0 where all are alike."""
    total: Numbers = sum((n * row for n, row in zip(counts, column[EXCESS:], strict=False)), np.zeros(1))
    return total


def most_sum(c: Columns, column: Numbers, layers: Numbers) -> Numbers:
    """Sum a column over the units of stages; at most, if it is not known which layers they have."""
    if c.span is None or c.span.exact:
        return unit_sum(c, column, layers)
    total: Numbers = unit_sum(attrs.evolve(c, span=None), column, layers) + layers * (most(column) - column[LAYER])
    return total


def most(column: Numbers) -> Numbers:
    """Return a column's number of the layer that has most."""
    excess = column[EXCESS:]
    largest: Numbers = column[LAYER] + (excess.max(axis=0) if len(excess) else 0.0)
    return largest


def with_backward(c: Columns, layers: Numbers) -> Numbers:
    """Return how many layers of stages have a backward; at least, if it is not known which they are."""
    if c.mix is None or c.mix.all_go_back:
        return layers
    if c.span is None:
        return np.zeros_like(layers)
    back: Numbers = c.span.own[c.mix.goes_back].sum(axis=0)
    if not c.span.exact:  # those without one may be other stages'
        back = np.maximum(back, layers - c.mix.counts[~c.mix.goes_back].sum())
    return back


def raise_to_engines(c: Columns, longest: Numbers, work: Numbers, layers: Numbers) -> Numbers:
    """Raise step seconds in place to the busy seconds of the compute, tensor and collective engines.

    `work` are the seconds of compute without updates.
    """
    np.maximum(longest, work + unit_sum(c, c.update, layers), out=longest)
    if c.has_exchanges:
        np.maximum(longest, unit_sum(c, c.micro_batches * c.exchange, layers), out=longest)
    return np.maximum(longest, unit_sum(c, c.link + c.micro_batches * c.link_each, layers), out=longest)


def least_recovery(c: Columns, share: Numbers) -> Numbers:
    """Return the least seconds of recovery of a layer of a pass with `share` free bytes."""
    # the arrays are large, so lines are joined in place, one at a time
    seconds = np.zeros_like(share)
    seconds += c.recovery_least
    for slope, intercept in zip(c.recovery_slope, c.recovery_intercept, strict=True):
        line = slope * share
        line += intercept
        np.maximum(seconds, line, out=seconds)
    return seconds


def backward_bytes(c: Columns, of_mlp: Numbers) -> tuple[Numbers, Numbers]:
    """Return the bytes that a layer's backward works on, given its mlp's bytes: at most, and in a last micro-batch.

    The larger of the mlp's bytes and of the bytes of the attention's scores below it counts: the same passes are held
    then, unless one is merged with this. A part of the layer's views may be dead by then and, in a last micro-batch,
    its gradients.
    """
    scores = np.where(c.merged > 0, 0.0, c.attention_scores - c.layer_part)
    return np.maximum(of_mlp, scores), np.maximum(of_mlp, scores - most(c.gradients))


def head_backward_bytes(c: Columns) -> Numbers:
    """Return the bytes that the head's backward works on: what it reads, makes and has as workspace."""
    return c.head_scratch + c.head_ends + c.head_gradient + c.head_gathered + c.labels


def surely_held(c: Columns, passes: Numbers) -> Numbers:
    """Return how many passes a stage surely holds when a backward begins: one less if it is merged with a forward."""
    return np.where(passes > 1, passes - c.merged, passes) if c.has_exchanges else passes


def left_behind(c: Columns, layers: Numbers) -> Numbers:
    """Return the most backward seconds after a stage's last gradient has left: weight halves of two merged passes."""
    seconds: Numbers = 2 * layers * most(c.weight_half) if c.has_exchanges else np.zeros(1)
    return seconds


def stage_numbers(layers: Numbers) -> Numbers:
    """Return the stage numbers along the first axis of `layers`."""
    stages = np.arange(len(layers), dtype=float)
    return stages.reshape(-1, *(1,) * (layers.ndim - 1))


def evenest(c: Columns, units: Numbers) -> Numbers:
    """Return a lower bound, over all cuts, of the heaviest stage of each shape, for a quantity given by unit.

    Layers are whole. The search halves an interval for the smallest load under which the stages have room for all
    layers.
    """
    # stages of embedding and head bear these in addition; in a vee both are on stage 0
    special = np.stack([units[EMBED], units[HEAD]]) if c.head_stage else (units[EMBED] + units[HEAD])[None]
    plain = c.pp - len(special)
    # no load is below the mean, nor below that of a special stage with its least layer
    low = np.maximum(c.everything @ units / c.pp, special.max(axis=0) + units[LAYER])
    high = c.everything @ units
    one, layer = high.copy(), np.maximum(units[LAYER], 1e-300)
    for _ in range(_HALVINGS):
        load = (low + high) / 2
        fit = plain * np.floor(load / layer) + np.maximum(np.floor((load - special) / layer), 0.0).sum(axis=0)
        enough = fit >= c.layers
        high = np.where(enough, load, high)
        low = np.where(enough, low, load)
    # one stage has everything; the factor keeps rounding from lifting the bound
    heaviest: Numbers = np.where(plain < 0, one, low * (1 - 1e-9))
    return heaviest


_HALVINGS = 24


def least_bytes(c: Columns) -> Numbers:
    """Return the bytes that some stage needs at least: a P-th of the state, and the operands of one backward."""
    carried = c.everything @ c.carried - c.embed_view - c.head_view
    own = c.mlp_saved + c.mlp_ends + c.mlp_view
    if c.in_order or not c.has_halves:
        own = own + c.mlp_scratch + c.mlp_gradient
    if c.has_exchanges:
        own = backward_bytes(c, own)[1]
    if c.mix is not None and not c.mix.all_go_back:
        own = 0.0 * own  # it may be a stage without a backward
    nbytes: Numbers = carried / c.pp + own
    return nbytes if c.other is None else np.maximum(nbytes, least_bytes(c.other.whole) - c.other.room)
