"""Exchanges of a rank with its expert ranks: rows and copies of experts, packed for each receiver.

Counts travel first; from them every rank knows who computes which rows (`targets/program/expert_balance.py`), so that
all numbers of bytes are known on both sides. Copies of experts travel in rounds, in each of which a rank gives to one
other at most, so that one pool's bytes are staged whatever the routers say. Sums are made in the order of the local
engine.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.model.expert_ranks import capacity_of, pool_elements
from ratrain.ratrain_ir.ops.expert_ranks import Dispatch
from ratrain.targets.program.expert_balance import Routes, Run
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.engine.expert_exchanges import (
    chosen_of,
    clear_dropped,
    clear_rest,
    copied_places,
    sorted_choices,
    take,
)
from ratrain.targets.runtime.engine.tensor_collectives import summed

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.runtime.arena.scalars import Scalars
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.kernels import Scratch
    from ratrain.targets.runtime.ranks.collectives import Phases
    from ratrain.targets.runtime.ranks.communicator import Communicator, Request


_SOURCES = {"rows": "xn", "row_weights": "weights", "drows": "dy"}
"""Tensors that a dispatch brings, and those of a row's own rank that they come from."""


@frozen(eq=False)
class _OwnRoutes:
    """Rows that travel between a rank and the others."""

    rank: int
    order: NDArray[np.int32]
    """the rank's choices, by expert"""
    first: NDArray[np.int64]
    of_all: Routes

    @classmethod
    def of(cls, rank: int, counts: NDArray[np.int32], order: NDArray[np.int32], capacity: int | None) -> _OwnRoutes:
        """Return the routes of a rank whose choices by expert are `order`."""
        of_all = Routes.of(counts, capacity)
        return cls(rank, order, of_all.first_rows(rank), of_all)

    @property
    def runs(self) -> list[list[Run]]:
        """Rows that each rank computes."""
        return self.of_all.runs

    def sent(self) -> list[list[Run]]:
        """Return the runs of the rank's own rows, by the rank that computes them."""
        return [[run for run in runs if run.origin == self.rank] for runs in self.runs]

    def received(self) -> list[list[Run]]:
        """Return the runs that the rank computes, by the rank they come from."""
        return [[run for run in self.runs[self.rank] if run.origin == origin] for origin in range(len(self.runs))]

    def chosen(self, run: Run) -> NDArray[np.int32]:
        """Return the choices of a run of the rank's own rows."""
        return chosen_of(run, self.order, self.first)

    def rounds(self) -> list[list[tuple[int, int]]]:
        """Return pairs (donor, taker) by round, takers of a donor ascending; a rank gives once in a round at most."""
        takers: dict[int, list[int]] = {}
        for taker, share in enumerate(self.of_all.shares):
            if share.donor is not None:
                takers.setdefault(share.donor, []).append(taker)
        most = max(map(len, takers.values()), default=0)
        return [[(donor, of[turn]) for donor, of in takers.items() if turn < len(of)] for turn in range(most)]


def _rows_of(runs: Sequence[Sequence[Run]]) -> list[int]:
    return [sum(run.rows for run in each) for each in runs]


def _exchange(
    experts: Communicator,
    arrays: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    leaving: Sequence[int],
    arriving: Sequence[int],
) -> list[Request]:
    """Start the exchange of packed rows: (arriving, leaving) arrays, and the rows for and from each rank.

    There may be room for more rows than travel.
    """
    requests = []
    for into, out in arrays:
        width = int(np.prod(out.shape[1:], dtype=np.int64))
        counts = ([count * width for count in each] for each in (arriving, leaving))
        requests.append(experts.ialltoallv(into[: sum(arriving)], out[: sum(leaving)], *counts))
    return requests


def dispatch(rank: RankExecutor, instruction: Instruction, experts: Communicator, staging: Scratch) -> Phases:
    """Bring rows and their weights to the ranks that compute them, and copies of experts to those that need some.

    In the backward the gradients of what rows gave; alone, by the counts of the forward, where rows were kept.
    """
    views, model, plan = rank.by_role(instruction), rank.program.model, rank.program.plan
    assert model.experts is not None
    order, count = sorted_choices(views["chosen"], model.experts)
    if "rows" in views:
        views["counts"][experts.rank] = count
        yield [experts.iallgather(views["counts"])]
    routes = _OwnRoutes.of(experts.rank, views["counts"], order, capacity_of(model, plan))
    choices = views["chosen"].shape[1]
    bounds = routes.of_all.bounds(experts.rank)
    if "rows" in views:
        views["bounds"][...] = bounds
    *buffers, pool_out, pool_in = staging.take_all(arriving_rows(rank, instruction))
    given = {name: source for name, source in _SOURCES.items() if name in views}
    pairs = dict(zip(given, zip(buffers[::2], buffers[1::2], strict=True), strict=True))
    at = 0
    for runs in routes.sent():
        for run in runs:
            picked, place = routes.chosen(run), slice(at, at + run.rows)
            for name, source in given.items():
                if source == "weights":
                    pairs[name][0][place, 0] = views[source].reshape(-1)[picked]
                else:
                    take(views[source], picked // choices, pairs[name][0][place])
            at += run.rows
    sent, received = _rows_of(routes.sent()), _rows_of(routes.received())
    yield _exchange(experts, [(into, out) for out, into in pairs.values()], sent, received)
    at = 0
    for runs in routes.received():
        for run in runs:
            for name, (_, into) in pairs.items():
                views[name][run.at : run.at + run.rows] = into[at : at + run.rows]
            at += run.rows
    clear_rest(views, int(bounds[-1]))
    for pairing in routes.rounds():
        copies = [(donor, taker, copied_places(model, plan, routes.runs[taker])) for donor, taker in pairing]
        for place, part in (yield from _matrices(experts, copies, views["w"], (pool_out, pool_in))):
            views["pool"][place] = part


def _matrices(
    experts: Communicator,
    moves: Sequence[tuple[int, int, Sequence[tuple[slice, slice]]]],
    source: NDArray[Any],
    staged: tuple[NDArray[Any], NDArray[Any]],
) -> Generator[list[Request], None, list[tuple[slice, NDArray[Any]]]]:
    """Exchange matrices in a round of `moves` (giver, taker, places at both); return (place, matrix) of what came.

    A rank gives to one other at most, and takes from one at most. Matrices are packed in `staged`, as they leave and as
    they arrive.
    """
    out, into = staged
    leaving, arriving = [0] * experts.size, [0] * experts.size
    came: list[tuple[slice, NDArray[Any]]] = []
    for giver, taker, places in moves:
        at = 0
        for given, taken in places:
            stop = at + given.stop - given.start
            if giver == experts.rank:
                out[at:stop] = source[given]
                leaving[taker] = stop
            if taker == experts.rank:
                came.append((taken, into[at:stop]))
                arriving[giver] = stop
            at = stop
    yield [experts.ialltoallv(into[: sum(arriving)], out[: sum(leaving)], arriving, leaving)]
    return came


def combine(
    rank: RankExecutor,
    instruction: Instruction,
    experts: Communicator,
    staging: Scratch,
    scalars: Scalars,
    scratch: Scratch,
) -> Phases:
    """Bring computed rows back to their choices; in the backward, gradients of copied experts to their holders."""
    views, model, plan = rank.by_role(instruction), rank.program.model, rank.program.plan
    assert model.experts is not None
    order, _ = sorted_choices(views["chosen"], model.experts)
    routes = _OwnRoutes.of(experts.rank, views["counts"], order, capacity_of(model, plan))
    gradient = "dreturned" in views
    *buffers, pool_out, pool_in = staging.take_all(arriving_rows(rank, instruction))
    back = {"dreturned": "dsent", "dweights": "drow_weights"} if gradient else {"returned": "made"}
    pairs = dict(zip(back, zip(buffers[::2], buffers[1::2], strict=True), strict=True))
    at = 0
    for runs in routes.received():
        for run in runs:
            for name, source in back.items():
                pairs[name][0][at : at + run.rows] = views[source][run.at : run.at + run.rows]
            at += run.rows
    sent, received = _rows_of(routes.received()), _rows_of(routes.sent())
    yield _exchange(experts, [(into, out) for out, into in pairs.values()], sent, received)
    clear_dropped(views, routes.of_all.dropped(experts.rank), order)
    at = 0
    for runs in routes.sent():
        for run in runs:
            picked, place = routes.chosen(run), slice(at, at + run.rows)
            for name, (_, into) in pairs.items():
                if name == "dweights":
                    views[name].reshape(-1)[picked] = into[place, 0]
                else:
                    views[name][picked] = into[place]
            at += run.rows
    for pairing in routes.rounds() if gradient else ():
        gradients = []
        for donor, taker in pairing:
            places = copied_places(model, plan, routes.runs[taker])
            gradients.append((taker, donor, [(copied, own) for own, copied in places]))
        for place, part in (yield from _matrices(experts, gradients, views["dpool"], (pool_out, pool_in))):
            summed([views["g"][place], part], views["g"][place], (), scalars, scratch)


def arriving_rows(rank: RankExecutor, instruction: Instruction) -> list[Buffer]:
    """Return the buffers of an exchange of rows: of each array as it leaves and as it arrives, then two pools."""
    types = {operand.role: rank.stage.tensors[operand.tensor].type for operand in instruction.operands}
    back = ("dsent", "drow_weights", "made")
    names = tuple(_SOURCES) if instruction.keyword == Dispatch.keyword else back
    of_rows = [types[name] for name in names if name in types]
    rows = [Buffer(type_.shape, NUMPY_DTYPES[type_.dtype]) for type_ in of_rows for _ in range(2)]
    copies = types.get("pool") or types.get("dpool")
    model, plan = rank.program.model, rank.program.plan
    elements, dtype = (0, np.float32) if copies is None else (pool_elements(model, plan), NUMPY_DTYPES[copies.dtype])
    return [*rows, *(Buffer((elements,), dtype) for _ in range(2))]
