"""Spaces of families: their shapes with bounds for any cuts, in order of promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from ratrain.passes.recovery.recompute import PEER
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.support.time_limit import OutOfTime, is_ended
from ratrain.ratrainc.choices.strategies import hiding_exchanges, may_hide_exchanges
from ratrain.ratrainc.planner.bounds.bounds import shape_bounds
from ratrain.ratrainc.planner.bounds.cuts import BestCuts, best_cuts, cuts_of, partition_count
from ratrain.ratrainc.planner.bounds.estimates import shape_guesses
from ratrain.ratrainc.planner.bounds.other_memory import granted
from ratrain.ratrainc.planner.bounds.shape_bytes import shape_bounds_with_bytes
from ratrain.ratrainc.planner.bounds.shape_columns import Columns, Numbers, least_bytes
from ratrain.ratrainc.planner.search.answer import Candidate, OversizedShape
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.space.objective import WORST, Cost
from ratrain.ratrainc.planner.space.plan_families import AHEAD, PlanFamily
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.ratrainc.planner.space.variants import least_bytes_passes

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.console.progress import Steps
    from ratrain.ratrainc.planner.bounds.profiles import Profiles


@define(eq=False)
class FamilySpace:
    """The shapes of a family with their bounds for any cuts, in order of promise."""

    family: PlanFamily
    request: PlanRequest
    """the request for this family alone"""
    shapes: list[Shape]
    columns: Columns
    seconds: Numbers
    """lower bound of a shape under any cuts; infinite if the state alone does not fit"""
    row: dict[Shape, int] = field(init=False)
    clusters: Numbers = field(init=False)
    bytes: Numbers = field(init=False)
    """lower bound on the fullest rank"""
    measures: Numbers = field(init=False)
    """lower bound on the measure of a shape"""
    guesses: Numbers = field(init=False)
    """guess of the measure of a shape; at least its bound"""
    order: list[int] = field(init=False)
    """rows that fit, by guess"""
    taken: set[int] = field(factory=set)
    tight: NDArray[np.bool_] = field(init=False)
    """True if `seconds` come from `shape_bounds_with_bytes`, which takes longer"""
    position: dict[bool, int] = field(factory=lambda: {False: 0, True: 0})

    @classmethod
    def of(cls, request: PlanRequest, family: PlanFamily, profiles: Profiles) -> FamilySpace:
        """Make the space of a family of a request.

        Raises `DiagnosticError` RT064 if it has no shape.
        """
        own = evolve(request, strategy=family.strategy, families=(), slices_of_one=bool(request.families))
        shapes = own.shapes()
        # On one stage ZB-H1 has no idle time to fill and equals 1F1B, and `peer` has no other stage to keep anything.
        if (request.families and family.schedule == "zb-h1") or family.memory == PEER:
            shapes = [shape for shape in shapes if shape.pp > 1]
        if request.families and family.schedule == AHEAD:
            shapes = [shape for shape in shapes if may_hide_exchanges(shape) and shape.micro_batches > 1]
        if _is_1f1b_on_one_stage(request, family):
            shapes = [shape for shape in shapes if shape.pp > 1]
        if not shapes:
            fail("RT064", f"{family.name} has no plan of {request.model.name} on {request.clusters} clusters")
        columns = Columns.of(profiles, shapes, schedule=own.schedule)
        if family.memory is not None:
            columns = granted(columns, request.machine, family.memory)
        return cls(family, own, shapes, columns, shape_bounds(columns))

    def __attrs_post_init__(self) -> None:
        self.row = {shape: row for row, shape in enumerate(self.shapes)}
        self.clusters = np.fromiter((shape.clusters for shape in self.shapes), float, len(self.shapes))
        self.bytes = least_bytes(self.columns)
        self.tight = np.zeros(len(self.shapes), bool)
        measure: Any = self.request.objective.measure  # works on arrays too
        self.measures = measure(self.seconds, self.bytes, self.clusters)
        guessed = np.maximum(shape_guesses(self.columns), self.seconds)
        self.guesses = np.where(np.isfinite(guessed), measure(guessed, self.bytes, self.clusters), np.inf)
        # the last key of lexsort counts first
        order = np.lexsort((self.seconds, guessed, self.guesses))
        self.order = order[np.isfinite(self.seconds[order])].tolist()

    def cost(self, row: int) -> Cost:
        """Return a lower bound on the cost of a shape."""
        seconds = float(self.seconds[row])
        return (float(self.measures[row]), seconds) if np.isfinite(seconds) else WORST

    def tighten(self, limit: Cost) -> None:
        """Tighten the bounds of shapes that may cost less than a limit, with `shape_bounds_with_bytes`."""
        # each shape is tightened once, and only while it may still win: this bound costs a bisection
        rows = np.flatnonzero(~self.tight & (self.measures <= limit[0]) & np.isfinite(self.seconds))
        if not len(rows):
            return
        self.tight[rows] = True
        self.seconds[rows] = np.maximum(self.seconds[rows], shape_bounds_with_bytes(self.columns.rows(rows)))
        measure: Any = self.request.objective.measure
        measures = measure(self.seconds[rows], self.bytes[rows], self.clusters[rows])
        self.measures[rows] = np.where(np.isfinite(self.seconds[rows]), measures, np.inf)
        self.guesses[rows] = np.maximum(self.guesses[rows], self.measures[rows])

    def within(self, capacity: float) -> FamilySpace:
        """Return the space with at most `capacity` bytes of a rank for tensors."""
        columns = self.columns.with_capacity(np.minimum(self.columns.capacity, capacity))
        return FamilySpace(self.family, self.request, self.shapes, columns, shape_bounds(columns))

    def of_clusters(self, clusters: int) -> FamilySpace:
        """Return the space with the shapes of a number of clusters alone, whose bounds are known."""
        own = copy(self)  # the constructor would compute bounds and order anew
        chosen = self.clusters == clusters
        own.seconds = np.where(chosen, self.seconds, np.inf)
        own.order = [row for row in self.order if chosen[row]]
        own.taken, own.position = set(), {False: 0, True: 0}
        return own

    def next_row(self, is_out: Callable[[Cost], bool], *, of_whole: bool = False) -> int | None:
        """Return the row of the most promising shape that is neither taken nor out; None if there is none."""
        # The position only moves on. What is taken stays so; limits only fall and bounds only rise, so what is out
        # stays out.
        at = self.position[of_whole]
        while at < len(self.order):
            row = self.order[at]
            one = not of_whole or self.shapes[row].is_whole
            if one and row not in self.taken and not is_out(self.cost(row)):
                break
            at += 1
        self.position[of_whole] = at
        return self.order[at] if at < len(self.order) else None

    def guess(self, row: int) -> Cost:
        """Return a guess of the cost of a shape."""
        return float(self.guesses[row]), float(self.seconds[row])

    def least_left(self) -> Cost:
        """Return a lower bound on the cost of all shapes that were not taken."""
        left = self.left()
        return self.cost(left[0]) if left else WORST

    def below(self, seconds: float) -> list[int]:
        """Return the rows of shapes that were not taken and whose bound is below `seconds`."""
        rows: list[int] = np.flatnonzero(self.seconds < seconds).tolist()
        return [row for row in rows if row not in self.taken]

    def left(self) -> list[int]:
        """Return the rows of shapes that were not taken and whose state fits, by the bound on their cost."""
        left = np.isfinite(self.seconds)
        left[list(self.taken)] = False
        rows = np.flatnonzero(left)
        found: list[int] = rows[np.lexsort((self.seconds[rows], self.measures[rows]))].tolist()
        return found

    def columns_of(self, shape: Shape) -> Columns:
        """Return the columns of one shape."""
        # a slice of one row, so that columns stay views
        at = self.row[shape]
        return self.columns.rows(slice(at, at + 1))

    def best_cuts(self, shape: Shape) -> BestCuts:
        """Return the best cuts of a shape; if bytes are the objective, the cuts of least peak."""
        return best_cuts(self.columns_of(shape), roomiest=self.request.objective.of_bytes)

    def passes_for(self, plan: Plan) -> str:
        """Return the usual pipeline of a plan: exchanges hidden, and fewest bytes if these are the objective."""
        passes = self.request.strategy.passes
        if self.request.objective.of_bytes:
            passes = least_bytes_passes(passes)
        return hiding_exchanges(passes, plan)

    def candidate(self, shape: Shape, cuts: BestCuts, *, estimate: float = np.inf) -> Candidate:
        """Return the plan of a shape and cuts under its usual pipeline."""
        plan = shape.plan(self.request.setting, cuts_of(cuts.layers, shape))
        passes = self.passes_for(plan)
        return Candidate(shape, plan, passes, cuts.seconds, None, estimate, cuts.peak_bytes, self.family.name)

    def oversized(self, shape: Shape, cuts: BestCuts) -> OversizedShape:
        """Return a shape that fits under no cuts; `cuts` are those that lack least."""
        return OversizedShape(shape, cuts.stage, cuts.short_bytes, self.family.name)

    @property
    def plans(self) -> int:
        """Number of plans, with their cuts."""
        layers = self.request.model.layers
        return sum(partition_count(layers, shape.pp, shape.chunks) for shape in self.shapes)


def _is_1f1b_on_one_stage(request: PlanRequest, family: PlanFamily) -> bool:
    """Return True if a plugin's schedule orders one stage as 1F1B does, which is searched with the same memory too."""
    if SCHEDULES.is_own(family.schedule):
        return False
    if not any(each.schedule == "1f1b" and each.memory == family.memory for each in request.families):
        return False
    shapes = [PipelineShape(1, micro_batches) for micro_batches in (1, 2, 5)]
    if any(SCHEDULES[family.schedule].problem(shape) for shape in shapes):
        return False
    return all(SCHEDULES[family.schedule].actions(shape, 0) == SCHEDULES["1f1b"].actions(shape, 0) for shape in shapes)


def rule_out_fewer(spaces: Sequence[FamilySpace], limit: Cost) -> list[OversizedShape]:
    """Ask bounds on bytes for every shape of fewer clusters than `limit` has; return those that fit under no cuts.

    The answer is whether fewer clusters can be enough, so it ends at the first shape that may fit.
    """
    for space in spaces:
        space.tighten((limit[0] - 1, inf))
    # by measure, the fewest clusters first
    rows = sorted((space.cost(row), number, row) for number, space in enumerate(spaces) for row in space.left())
    oversized = []
    for cost, number, row in rows:
        if cost[0] >= limit[0]:
            break
        space, shape = spaces[number], spaces[number].shapes[row]
        cuts = space.best_cuts(shape)
        if np.isfinite(cuts.seconds):
            break
        space.taken.add(row)
        oversized.append(space.oversized(shape, cuts))
    return oversized


def nearest_to_fit(spaces: Sequence[FamilySpace], known: Sequence[OversizedShape]) -> list[OversizedShape]:
    """Return shapes that fit under no cuts, one of which lacks the fewest bytes of all; `known` lack more or as many.

    Shapes whose state alone is too large are not searched for a plan, though one of them may lack least. At most
    `_NEAREST` are looked at.
    """
    least = min((shape.short_bytes for shape in known), default=inf)
    short = ((least_bytes(space.columns) - space.columns.capacity).tolist() for space in spaces)
    rows = sorted((lacking, number, row) for number, each in enumerate(short) for row, lacking in enumerate(each))
    found = []
    for lacking, number, row in rows[:_NEAREST]:
        if lacking >= least:
            break  # no cuts lack less than their state does
        space, shape = spaces[number], spaces[number].shapes[row]
        cuts = best_cuts(space.columns_of(shape))
        if not np.isfinite(cuts.seconds) and cuts.short_bytes < least:
            least = cuts.short_bytes
            found.append(space.oversized(shape, cuts))
    return found


_NEAREST = 512


def family_spaces(request: PlanRequest, profiles: Profiles, tick: Steps | None = None) -> list[FamilySpace]:
    """Make the spaces of all families of a request that have shapes.

    Raises `DiagnosticError` RT064 if none has, `OutOfTime` if an early end is asked for.
    """
    spaces: list[FamilySpace] = []
    refused: list[DiagnosticError] = []
    for family in request.searched:
        if is_ended():
            raise OutOfTime  # bounds of some families alone would prove nothing
        if tick is not None:
            tick.begin(f"bounds of {family.name}")
        try:
            spaces.append(FamilySpace.of(request, family, profiles))
        except DiagnosticError as error:
            refused.append(error)
    if not spaces:
        raise refused[0]
    return spaces
