"""Choice of what to keep: `recompute{policy=auto}` for one stage.

An item is one layer of one micro-batch in flight; stage s has layers x min(P - s, M) of them under 1F1B. Each item
takes one option: what its attention and its mlp keep, at a cost in bytes while the micro-batch is in flight and in
seconds of recomputation.

    option              bytes   seconds         3 items, budget 8 bytes
    keep nothing          0        5            1 x everything, 2 x lean:      4 + 2 + 2 = 8 bytes,  0 + 2 + 2 = 4 s
    lean                  2        2            2 x everything, 1 x nothing:   4 + 4 + 0 = 8 bytes,  0 + 0 + 5 = 5 s
    keep everything       4        0

Items of layers of one kind are alike, so the problem is how many of each kind take which option: minimise seconds under
a byte budget. Dynamic programming over Pareto fronts of (bytes, seconds) solves it, of each kind and then of all. The
fronts are exact up to 1024 points; longer ones are thinned before they are joined. Cost: O(log items) joins of two
fronts, each O(n^2 log n) in their points.

The budget is not a formula. Each choice is written into a copy of the stage's list, and the exact live bytes of that
list, with the workspace of its ops, are compared with the capacity; larger choices are tried until none fits. Bytes
that let other engines lag without being waited for (`passes/trial/overlap.py`) are reserved first: they are few, and a
wait costs as much as a recomputation. Finally a trial placement checks the arena; if it exceeds the capacity, the
budget shrinks by the gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from ratrain.passes.recovery.kept_bytes import branch_bytes, mlp_input_bytes, recovers_whole_layer
from ratrain.passes.recovery.layer_choice import CHOICES, EVERYTHING, Donor, KeptHome, LayerChoice, keeps
from ratrain.passes.recovery.rewriting import (
    Rewriting,
    in_slot_order,
    made_before,
    recovery_op,
    rewritten,
    views_of,
    whole_keys_of,
)
from ratrain.passes.recovery.storing import store_kept
from ratrain.ratrain_ir.analysis.chunk_actions import most_in_flight_on
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import Home, StateKind, aligned
from ratrain.ratrain_ir.model.blocks import Block, block, has_backward
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import Slot, kept_in_forward, saved_slots
from ratrain.ratrain_ir.ops.base import Engine, Piece
from ratrain.ratrain_ir.ops.compute import Forward, Project
from ratrain.ratrain_ir.ops.memory import Fetch, Store, fetches_parameters
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from ratrain.passes.trial.overlap import Occupancy
    from ratrain.passes.trial.trial import Trials
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module, Stage

_MAX_TRIALS = 40
"""Most trial placements of one choice."""


@frozen
class Option:
    """Treatment of a layer: bytes kept while in flight, seconds of recomputation in each backward."""

    choice: LayerChoice
    nbytes: int
    seconds: float


@frozen
class ChosenOfKind:
    """Choice for the layers of one kind."""

    layers: tuple[int, ...]
    counts: Mapping[LayerChoice, int]
    """Number of items per layer choice."""

    def choice_of(self, item: int) -> LayerChoice:
        """Return the choice for an item by its number; the first items take the first choice of `counts`, and so on."""
        for choice, count in self.counts.items():
            if item < count:
                return choice
            item -= count
        raise AssertionError("the counts cover every item")


@frozen
class Chosen:
    """Choice for a stage."""

    kinds: tuple[ChosenOfKind, ...]
    in_flight: int
    """Pieces (micro-batches, or slices of them) of a layer in flight."""
    slices: int

    def choice_of(self, layer: int, piece: Piece) -> LayerChoice:
        """Return the choice for a layer and a piece; items are dealt out so that pieces take about equal time."""
        # Items are numbered layer by layer. A piece takes the place of the one that has left the flight before it.
        number = piece if isinstance(piece, int) else piece.micro_batch * self.slices + piece.number
        kind = next(kind for kind in self.kinds if layer in kind.layers)
        return kind.choice_of(kind.layers.index(layer) * self.in_flight + number % self.in_flight)

    def home_of(self, layer: int, piece: Piece) -> KeptHome:
        """Return the memory or donor where kept tensors of a layer and a piece wait for their backward."""
        return self.choice_of(layer, piece).home

    @property
    def stores(self) -> bool:
        """True if anything waits outside the stage's own DDR."""
        return any(choice.home is not Home.DDR for kind in self.kinds for choice in kind.counts)

    @property
    def keeps_everything(self) -> bool:
        """True if nothing is recomputed or stored."""
        return all(set(kind.counts) <= {EVERYTHING} for kind in self.kinds)

    @property
    def recovers_nothing(self) -> bool:
        """True if everything is kept, here or elsewhere."""
        return all(choice.attention == choice.mlp == "all" for kind in self.kinds for choice in kind.counts)

    @property
    def summary(self) -> str:
        """Description of the counts, for the statistics."""
        if not self.kinds:
            return "nothing is kept: no layer has a backward"
        counts: Counter[LayerChoice] = Counter()
        for kind in self.kinds:
            counts.update(kind.counts)
        names = [f"{count} x {_words(choice)}" for choice, count in counts.items() if count]
        layers = sum(len(kind.layers) for kind in self.kinds)
        return f"kept, of {layers} layers x {self.in_flight} in flight: {'; '.join(names)}"


def _words(choice: LayerChoice) -> str:
    if choice.home is not Home.DDR:
        where = f"at {choice.home.value}" if isinstance(choice.home, Donor) else f"in '{choice.home.value}'"
        return f"all {where}" if choice.attention == choice.mlp == "all" else f"{_kept_words(choice)} {where}"
    return _kept_words(choice)


def _kept_words(choice: LayerChoice) -> str:
    return f"attention {choice.attention}, mlp {choice.mlp}"


def choose(rewriting: Rewriting, trials: Trials, capacity: int, store: Home = Home.DDR) -> Chosen:
    """Return the cheapest choice for a stage that fits `capacity` bytes.

    If not even full recomputation fits, that is returned, and allocation then reports what is missing. With another
    memory in `store`, whole items of the first layers, which wait longest, are stored there: as many as make the
    stage's own period shortest. The rest is chosen for the bytes that this leaves.
    """
    stage = rewriting.stage
    shape = StageShape.of(stage, trials)
    if not shape.kinds:
        return shape.chosen(())
    best = kept_in_ddr(rewriting, trials, capacity, shape, shape.none_stored)
    if store is Home.DDR or best.keeps_everything:
        return best
    room = trials.context.target.info(trials.module).capacity_of(store)

    @cache
    def found(count: int) -> tuple[float, Chosen]:
        if not count:
            return trials.period(as_chosen(rewriting, trials, best)), best
        chosen = kept_in_ddr(rewriting, trials, capacity, shape, shape.stored(count, evolve(EVERYTHING, home=store)))
        draft = as_chosen(rewriting, trials, chosen)
        fits = lifetimes(draft, store).peak_bytes <= room
        return trials.period(draft) if fits else inf, chosen

    def keeps_the_rest(count: int) -> bool:
        return found(count)[1].recovers_nothing

    # The period is not convex in the number stored, so a few numbers are tried. If all the rest can be kept from some
    # number on, storing far fewer leaves recomputation, so only numbers from half of it up are tried; else all eighths.
    most = min(shape.items, _most_hidden(stage, trials, shape, store))
    if most > FEW:
        enough = least(most, keeps_the_rest)
        counts = {0, *(enough * share // FEW for share in range(1 if enough == most else FEW // 2, FEW + 1))}
    else:
        counts = set(range(most + 1))
    return found(min(sorted(counts), key=lambda count: found(count)[0]))[1]


FEW = 8
"""Items up to which every number to store is tried; for more items, at most this many numbers."""


def least(most: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest n in 1..`most` for which a monotone predicate holds; `most` if there is none."""
    if not holds(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _most_hidden(stage: Stage, trials: Trials, shape: StageShape, store: Home) -> int:
    """Return how many items in flight can go to another memory, or come back, during the compute time of a step."""
    # Measure with everything kept and stored: the link time then scales with the number of items.
    everything = rewritten(stage, lambda _layer, _piece: EVERYTHING)
    computes = sum(trials.op_seconds(everything, op) for op in everything.ops if op.engine is Engine.COMPUTE)
    store_kept(everything, trials, lambda _layer, _piece: store)
    moved = [
        [trials.op_seconds(everything, op) for op in everything.ops if type(op) is kind and not fetches_parameters(op)]
        for kind in (Store, Fetch)
    ]
    longest = max(map(sum, moved))
    return int(shape.items * computes / longest) if longest else 0


def as_chosen(rewriting: Rewriting, trials: Trials, chosen: Chosen) -> Stage:
    """Return a draft of a stage under a choice."""
    draft, _ = rewriting.under(chosen.choice_of)
    if chosen.stores:
        store_kept(draft, trials, chosen.home_of)
    return draft


@frozen
class StageShape:
    """Layers of a stage by kind, and the number of pieces in flight."""

    kinds: tuple[tuple[int, ...], ...]
    in_flight: int
    slices: int
    options: tuple[tuple[Option, ...], ...]
    """By kind: the options of one layer."""

    @classmethod
    def of(cls, stage: Stage, trials: Trials) -> StageShape:
        """Return the shape of a stage."""
        plan = trials.module.plan
        slices = plan.shape.slices
        # Pieces in flight are counted over all chunks of the stage that have a backward; a layer is in one chunk.
        topology = trials.module.topology
        chunks = sum(chunk >= topology.forward_only for chunk in topology.chunks_of(stage.index))
        in_flight = min(ceil(most_in_flight_on(trials.module, stage) / max(chunks, 1)), plan.micro_batches * slices)
        kinds = _kinds_of_layers(stage, trials.module)
        options = (tuple(_pareto(_options(stage, trials, layers[0]))) for layers in kinds)
        return cls(tuple(kinds), in_flight, slices, tuple(options))

    @property
    def items(self) -> int:
        """Number of items: layers times pieces in flight."""
        return self.in_flight * sum(map(len, self.kinds))

    @property
    def none_stored(self) -> tuple[dict[LayerChoice, int], ...]:
        """Empty counts for each kind."""
        return tuple({} for _ in self.kinds)

    def chosen(self, counts: Iterable[Mapping[LayerChoice, int]]) -> Chosen:
        """Return the choice with the given counts of each kind."""
        return Chosen(tuple(map(ChosenOfKind, self.kinds, counts)), self.in_flight, self.slices)

    def stored(self, count: int, choice: LayerChoice) -> tuple[dict[LayerChoice, int], ...]:
        """Return counts in which each kind stores its share of `count` items with a choice."""
        return tuple({choice: len(layers) * self.in_flight * count // self.items} for layers in self.kinds)


@frozen
class Front:
    """Pareto front of the choices for items that are not stored: bytes ascend, seconds of recomputation descend."""

    shape: StageShape
    stored: Sequence[Mapping[LayerChoice, int]]
    """By kind: the items that are decided already."""
    points: list[Point]

    @classmethod
    def of(cls, shape: StageShape, stored: Sequence[Mapping[LayerChoice, int]]) -> Front:
        """Return the front of the items that are not in `stored`."""
        left = [
            len(layers) * shape.in_flight - sum(counts.values())
            for layers, counts in zip(shape.kinds, stored, strict=True)
        ]
        return cls(shape, stored, _front_of_kinds(list(zip(shape.options, left, strict=True))))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each choice while all items are in flight."""
        return [nbytes for nbytes, _, _ in self.points]

    @property
    def seconds(self) -> list[float]:
        """Seconds of recomputation of each choice, for all items in flight once."""
        return [seconds for _, seconds, _ in self.points]

    def counts(self, index: int) -> list[dict[LayerChoice, int]]:
        """Return, by kind, how many items take each choice; stored ones come first."""
        counts = iter(self.points[index][2])
        return [
            {**taken, **{option.choice: count for option in own if (count := next(counts))}}
            for own, taken in zip(self.shape.options, self.stored, strict=True)
        ]

    def chosen(self, index: int) -> Chosen:
        """Return the choice at an index of the front."""
        return self.shape.chosen(self.counts(index))

    def best_within(self, capacity: int, rewriting: Rewriting, trials: Trials) -> int:
        """Return the index of the cheapest choice with which a stage fits `capacity`; 0 if none does."""

        @cache
        def occupied(index: int) -> Occupancy:
            return trials.occupancy(as_chosen(rewriting, trials, self.chosen(index)))

        # Reserve the bytes for lag as if everything were recomputed; the same lag then holds for all choices.
        lag = occupied(0).lag_within(capacity)
        sizes = self.sizes
        best = _last_that_fits(sizes, lambda index: capacity - occupied(index).peak_bytes(lag))
        for _ in range(_MAX_TRIALS):
            excess = trials.excess_bytes(occupied(best), lag, capacity) if best else 0
            if not excess:
                break
            # The arena exceeds the live bytes by fragmentation: go down at least that far, then check again.
            tightened = sizes[best] - excess
            best = max((i for i in range(best) if sizes[i] <= tightened), default=0)
        return best


def kept_in_ddr(
    rewriting: Rewriting, trials: Trials, capacity: int, shape: StageShape, stored: Sequence[Mapping[LayerChoice, int]]
) -> Chosen:
    """Return the cheapest choice that fits for the items that are not stored."""
    front = Front.of(shape, stored)
    return front.chosen(front.best_within(capacity, rewriting, trials))


def _kinds_of_layers(stage: Stage, module: Module) -> list[tuple[int, ...]]:
    """Return the layers of a stage that have a backward, by kind; layers of a kind take the same time to recompute."""
    kinds: dict[tuple[int, int], list[int]] = {}
    model = module.model
    for chunk in module.topology.chunks_of(stage.index):
        layers = module.topology.chunk_layers[chunk]
        for layer in (each for each in layers if has_backward(model, module.plan, block("mlp", each))):
            alike = model.first_alike("attention", layer), model.first_alike("mlp", layer)
            kinds.setdefault(alike, []).append(layer)
    return [tuple(layers) for layers in kinds.values()]


def _last_that_fits(sizes: Sequence[int], room: Callable[[int], int]) -> int:
    """Return the index of the last choice that leaves room; 0 if none does.

    `sizes` ascend, and `room(index)` falls about as they grow. The room left by one choice predicts the next candidate,
    so few are tried; every third probe bisects, in case the prediction is bad.
    """
    low, above, left = 0, len(sizes), room(0)
    probes = 0
    while left >= 0 and above - low > 1:
        probes += 1
        guess = (low + above) // 2 if probes % 3 == 0 else bisect_right(sizes, sizes[low] + left) - 1
        # Always strictly between, so each probe makes progress.
        guess = min(max(guess, low + 1), above - 1)
        room_left = room(guess)
        if room_left >= 0:
            low, left = guess, room_left
        else:
            above = guess
    return low


def _options(stage: Stage, trials: Trials, layer: int) -> list[Option]:
    """Return every treatment of a layer, with its exact bytes and the target's seconds."""
    options = []
    for choice in CHOICES["auto"]:
        whole_layer = recovers_whole_layer(trials.module.plan, choice)
        nbytes = _between_blocks(trials, whole_layer=whole_layer)
        seconds = 0.0
        for half in (block("attention", layer), block("mlp", layer)):
            kept, dropped = _split_slots(trials.module, half, choice.kept(half.kind))
            nbytes += sum(aligned(slot.type.nbytes) for slot in kept)
            if dropped:
                seconds += _recovery_seconds(stage, trials, half, dropped, whole_layer=whole_layer)
        options.append(Option(choice, nbytes, seconds))
    return options


def _split_slots(module: Module, half: Block, kept: str) -> tuple[list[Slot], list[Slot]]:
    plan = slice_plan(module.plan, typical_slice(module.plan))
    slots = saved_slots(module.model, plan, half)
    always = kept_in_forward(module.model, plan, half)
    names = {slot.name for slot in slots if slot.name in always or keeps(kept, half.kind, slot.name)}
    return [s for s in slots if s.name in names], [s for s in slots if s.name not in names]


def typical_slice(plan: Plan) -> int | None:
    """Return the number of the slice that stands for all: the middle one, since later slices attend to more keys.

    None where micro-batches are not sliced.
    """
    return len(plan.slices) // 2 if plan.slices else None


def _forward_of(stage: Stage, trials: Trials, half: Block) -> Forward:
    number = typical_slice(trials.module.plan)
    return next(op for op in stage.ops if type(op) is Forward and op.block is half and op.slice == number)


def _between_blocks(trials: Trials, *, whole_layer: bool) -> int:
    """Return the bytes between the blocks of a layer, which are kept unless the whole layer is recomputed."""
    model, plan = trials.module.model, slice_plan(trials.module.plan, typical_slice(trials.module.plan))
    return 0 if whole_layer else mlp_input_bytes(model, plan) + branch_bytes(model, plan)


def _recovery_seconds(stage: Stage, trials: Trials, half: Block, dropped: list[Slot], *, whole_layer: bool) -> float:
    forward = _forward_of(stage, trials, half)
    names = {slot.name for slot in dropped}
    same = (op for op in stage.ops if type(op) is Project and op.block is half and op.slice == forward.slice)
    project = next((op for op in same if op.micro_batch == forward.micro_batch), None)
    saved = in_slot_order((*made_before(forward, project), *(t for t in forward.writes if t.kind is StateKind.SAVED)))
    first = project or forward
    kept = tuple(t for t in saved if t.slot not in names)
    writes = tuple(t for t in saved if t.slot in names)
    # A whole layer's recomputation of attention also makes the input of the mlp, which costs the output product.
    if whole_layer and half.kind == "attention":
        output = Tensor("y", StateKind.ACTIVATION, forward.writes[0].type)
        writes = (*writes, output)
    keys = whole_keys_of(forward)
    recovery = recovery_op(forward, first.reads[0], kept, views_of(first), writes, project, keys)
    return trials.op_seconds(stage, recovery)


def _pareto(options: list[Option]) -> list[Option]:
    """Return the options that no other beats in both bytes and seconds, bytes ascending."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.seconds, o.choice.attention, o.choice.mlp)):
        # Sorted by bytes: an option stays only if it saves seconds over everything cheaper.
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return kept


Point = tuple[int, float, tuple[int, ...]]
"""Point of a front: bytes, seconds, number of items per option."""


@lru_cache(maxsize=32)  # stages of a plan often have the same layers in flight
def _front(options: tuple[Option, ...], items: int) -> list[Point]:
    """Return the Pareto front of `items` items as (bytes, seconds, counts by option), bytes ascending.

    Fronts of 1, 2, 4, ... items are joined pairwise, so the number of joins is logarithmic in the number of items.
    """
    total: list[Point] = [(0, 0.0, (0,) * len(options))]
    for exponent in range(items.bit_length()):
        if items >> exponent & 1:
            total = _joined(total, _front_of_power(options, exponent))
    return total


@lru_cache(maxsize=64)  # other numbers of items need the same
def _front_of_power(options: tuple[Option, ...], exponent: int) -> list[Point]:
    """Return the Pareto front of 2^`exponent` items, in the order of `_front`."""
    if exponent:
        half = _front_of_power(options, exponent - 1)
        return _joined(half, half)
    return [
        (option.nbytes, option.seconds, tuple(int(i == j) for j in range(len(options))))
        for i, option in enumerate(options)
    ]


def _front_of_kinds(kinds: Sequence[tuple[Sequence[Option], int]]) -> list[Point]:
    """Return the Pareto front of items of several kinds, each given by its options and number of items.

    The counts of the kinds follow each other in each point.
    """
    options, items = kinds[0]
    total = _front(tuple(options), items)
    for options, items in kinds[1:]:
        width, own = len(total[0][2]), _front(tuple(options), items)
        # Pad the counts with zeros, so that adding two points concatenates the counts of their kinds.
        before = [(nbytes, seconds, (*counts, *(0,) * len(options))) for nbytes, seconds, counts in total]
        total = _joined(before, [(nbytes, seconds, (*(0,) * width, *counts)) for nbytes, seconds, counts in own])
    return total


def _joined(left: Sequence[Point], right: Sequence[Point]) -> list[Point]:
    """Return all sums of a point of each front that no other sum beats.

    Fronts longer than `_MOST_POINTS` are thinned first.
    """
    left, right = _thinned(left), _thinned(right)
    nbytes = np.add.outer([p[0] for p in left], [p[0] for p in right]).ravel()
    seconds = np.add.outer([p[1] for p in left], [p[1] for p in right]).ravel()
    order = np.lexsort((seconds, nbytes))
    best = np.minimum.accumulate(seconds[order])
    # A point stays if it beats everything cheaper by more than the rounding of sums.
    keep = np.ones(len(order), bool)
    keep[1:] = best[1:] < best[:-1] * (1 - _ROUNDING)
    front: list[Point] = []
    for index in order[keep]:
        a, b = left[index // len(right)], right[index % len(right)]
        front.append((a[0] + b[0], a[1] + b[1], tuple(map(int.__add__, a[2], b[2]))))
    return front


_MOST_POINTS = 1024
"""Most points of a front that is joined with another.

Beyond these, the number of points grows with a power of the items, and the cost of a join with its square.
"""


def _thinned(front: Sequence[Point]) -> Sequence[Point]:
    """Return at most `_MOST_POINTS` points of a front, the first and the last included.

    They are evenly spaced in the sum of relative bytes and relative seconds.
    """
    if len(front) <= _MOST_POINTS:
        return front
    nbytes, seconds = np.array([point[0] for point in front], float), np.array([point[1] for point in front])
    along = (nbytes - nbytes[0]) / (nbytes[-1] - nbytes[0]) + (seconds[0] - seconds) / (seconds[0] - seconds[-1])
    spaced = np.linspace(0, along[-1], _MOST_POINTS)
    return [front[index] for index in np.unique(np.searchsorted(along, spaced, "right") - 1)]


_ROUNDING = 1e-12
"""Relative error of sums of seconds."""
