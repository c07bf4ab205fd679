"""The shapes of families, with bounds for any cuts, in the order of what they cost at least."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from ratrain.passes.recovery.recompute import PEER
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrainc.planner.bounds.bounds import shape_bounds
from ratrain.ratrainc.planner.bounds.columns import Columns, Numbers, least_bytes
from ratrain.ratrainc.planner.bounds.cuts import partition_count
from ratrain.ratrainc.planner.bounds.estimates import shape_guesses
from ratrain.ratrainc.planner.bounds.other_memory import granted
from ratrain.ratrainc.planner.bounds.shape_bytes import shape_bounds_with_bytes
from ratrain.ratrainc.planner.search.answer import Request
from ratrain.ratrainc.planner.space.families import Family
from ratrain.ratrainc.planner.space.objective import WORST, Cost
from ratrain.ratrainc.planner.space.space import Shape

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.bounds.profile import Profiles


@define(eq=False)
class FamilySpace:
    """The shapes of a family, with their bounds for any cuts, in the order of what they cost at least."""

    family: Family
    request: Request
    """that of the family alone"""
    shapes: list[Shape]
    columns: Columns
    seconds: Numbers
    """that no cuts of a shape go below; infinite where the state alone does not fit"""
    row: dict[Shape, int] = field(init=False)
    clusters: Numbers = field(init=False)
    bytes: Numbers = field(init=False)
    """that the fullest rank needs at least"""
    measures: Numbers = field(init=False)
    """the least that the objective may measure of a shape"""
    guesses: Numbers = field(init=False)
    """about what the objective measures of a shape; at least its bound"""
    order: list[int] = field(init=False)
    """rows by guess, those that fit"""
    taken: set[int] = field(factory=set)
    tight: NDArray[np.bool_] = field(init=False)
    """whose seconds are those of `shape_bounds_with_bytes`, which take longer to find"""
    position: dict[bool, int] = field(factory=lambda: {False: 0, True: 0})

    @classmethod
    def of(cls, request: Request, family: Family, profiles: Profiles) -> FamilySpace:
        """The space of a family of a request.

        Raises `DiagnosticError` RT064 where it has no shape.
        """
        own = evolve(request, strategy=family.strategy, families=(), slices_of_one=bool(request.families))
        shapes = own.shapes()
        # on one stage ZB-H1 has no idle time to fill: that is 1F1B; nor is there another stage to keep anything
        if (request.families and family.schedule == "zb-h1") or family.memory == PEER:
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
        measure: Any = self.request.objective.measure  # of arrays as of numbers
        self.measures = measure(self.seconds, self.bytes, self.clusters)
        guessed = np.maximum(shape_guesses(self.columns), self.seconds)
        self.guesses = np.where(np.isfinite(guessed), measure(guessed, self.bytes, self.clusters), np.inf)
        order = np.lexsort((self.seconds, guessed, self.guesses))
        self.order = order[np.isfinite(self.seconds[order])].tolist()

    def cost(self, row: int) -> Cost:
        """The least that a shape costs."""
        seconds = float(self.seconds[row])
        return (float(self.measures[row]), seconds) if np.isfinite(seconds) else WORST

    def tighten(self, limit: Cost) -> None:
        """Bound anew, with the bytes that they need, the shapes that cost less than a limit."""
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
        """The same where a rank has so many bytes for tensors, or as many as it had if those are fewer."""
        columns = self.columns.with_capacity(np.minimum(self.columns.capacity, capacity))
        return FamilySpace(self.family, self.request, self.shapes, columns, shape_bounds(columns))

    def next_row(self, is_out: Callable[[Cost], bool], *, of_one_peer: bool = False) -> int | None:
        """The row of the most promising shape that was not taken and is not out, or of one tensor peer; None where there is none."""
        at = self.position[of_one_peer]
        while at < len(self.order):
            row = self.order[at]
            one = not of_one_peer or self.shapes[row].tp == 1
            if one and row not in self.taken and not is_out(self.cost(row)):
                break
            at += 1
        self.position[of_one_peer] = at
        return self.order[at] if at < len(self.order) else None

    def guess(self, row: int) -> Cost:
        """About what a shape costs."""
        return float(self.guesses[row]), float(self.seconds[row])

    def least_left(self) -> Cost:
        """The least cost of the shapes that were not taken."""
        left = np.isfinite(self.seconds)
        left[list(self.taken)] = False
        if not left.any():
            return WORST
        rows = np.flatnonzero(left)
        return self.cost(int(rows[np.lexsort((self.seconds[rows], self.measures[rows]))[0]]))

    def columns_of(self, shape: Shape) -> Columns:
        """The one row of a shape."""
        at = self.row[shape]
        return self.columns.rows(slice(at, at + 1))

    @property
    def plans(self) -> int:
        """Plans with their cuts."""
        layers = self.request.model.layers
        return sum(partition_count(layers, shape.pp, shape.chunks) for shape in self.shapes)


def family_spaces(request: Request, profiles: Profiles) -> list[FamilySpace]:
    """The spaces of all families of a request that have shapes.

    Raises `DiagnosticError` RT064 where none has.
    """
    spaces: list[FamilySpace] = []
    refused: list[DiagnosticError] = []
    for family in request.searched:
        try:
            spaces.append(FamilySpace.of(request, family, profiles))
        except DiagnosticError as error:
            refused.append(error)
    if not spaces:
        raise refused[0]
    return spaces
