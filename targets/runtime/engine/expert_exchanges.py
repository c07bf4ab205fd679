"""Exchanges of expert ranks in the local engine: rows to the ranks of their experts and back, copies of experts.

Functions take all members in rank order, as in `collectives`. Who computes which row follows from the counts of all
ranks (`targets/program/expert_balance.py`), which every rank computes alike:

    dispatch   xn, chosen, weights of ranks 0..n-1  ->  rows of each rank, by expert, then by origin
    combine    products of these rows               ->  a row for each choice of each token, at its origin

Of choices whose rows are dropped, above the capacity of an expert, `combine` makes zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.model.expert_ranks import capacity_of, first_with_experts, stacks_of
from ratrain.targets.program.expert_balance import Routes, Run
from ratrain.targets.runtime.engine.tensor_collectives import summed
from ratrain.targets.runtime.kernels.shared import group_by_expert

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.runtime.arena.scalars import Scalars
    from ratrain.targets.runtime.engine.collectives import Member
    from ratrain.targets.runtime.kernels import Scratch


def copied_places(model: ModelConfig, plan: Plan, runs: Iterable[Run]) -> list[tuple[slice, slice]]:
    """Return the places of the matrices that a rank with some runs needs copies of, by expert.

    Each is (place in the flat tensor of the expert's holder, place in the rank's pool of copies).
    """
    assert model.experts is not None
    stacks, own, places = stacks_of(rank_model(model, plan), first_with_experts(model)), model.experts // plan.ep, []
    for expert in sorted({run.expert for run in runs if run.copied}):
        for stack in stacks:
            at, copied = (start + expert % own * stack.length for start in (stack.in_block, stack.in_pool))
            places.append((slice(at, at + stack.length), slice(copied, copied + stack.length)))
    return places


def sorted_choices(chosen: NDArray[np.int32], experts: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the choices t * k + j of a rank by expert, then by t, and the number of each expert's."""
    order = np.empty(chosen.size, np.int32)
    bounds = np.empty(experts + 1, np.int32)
    group_by_expert(chosen, order, bounds)
    return order, np.diff(bounds)


def chosen_of(run: Run, order: NDArray[np.int32], first: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the choices of a run at its origin, whose choices by expert are `order`."""
    start = int(first[run.expert]) + run.first
    return order[start : start + run.rows]


def dispatch(members: Sequence[Member]) -> None:
    """Bring every row, its weight and (in the backward) the gradient of what it gave to the rank that computes it.

    Where rows were kept from the forward, gradients alone.
    """
    views = [rank.by_role(instruction) for rank, instruction in members]
    model, plan = members[0][0].program.model, members[0][0].program.plan
    assert model.experts is not None
    sorted_by = [sorted_choices(view["chosen"], model.experts) for view in views]
    counts = np.stack([count for _, count in sorted_by])
    routes, choices = Routes.of(counts, capacity_of(model, plan)), views[0]["chosen"].shape[1]
    first = [routes.first_rows(origin) for origin in range(plan.ep)]
    for number, mine in enumerate(views):
        bounds = routes.bounds(number)
        if "rows" in mine:
            mine["counts"][...] = counts
            mine["bounds"][...] = bounds
        for run in routes.runs[number]:
            given = views[run.origin]
            picked = chosen_of(run, sorted_by[run.origin][0], first[run.origin])
            place = slice(run.at, run.at + run.rows)
            if "rows" in mine:
                take(given["xn"], picked // choices, mine["rows"][place])
                mine["row_weights"][place, 0] = given["weights"].reshape(-1)[picked]
            if "drows" in mine:
                take(given["dy"], picked // choices, mine["drows"][place])
        clear_rest(mine, int(bounds[-1]))
        donor = routes.shares[number].donor
        if donor is not None:
            for own, copied in copied_places(model, plan, routes.runs[number]):
                mine["pool"][copied] = views[donor]["w"][own]


def clear_rest(views: Mapping[str, NDArray[Any]], came: int) -> None:
    """Set gradients behind the rows that came to zero: a branch's scale multiplies all that there is room for."""
    if "drows" in views:
        views["drows"][came:] = 0


def clear_dropped(views: Mapping[str, NDArray[Any]], dropped: Iterable[slice], order: NDArray[np.int32]) -> None:
    """Set what comes back for the dropped choices of a rank to zero."""
    for place in dropped:
        for name in ("returned", "dreturned", "dweights"):
            if name in views:
                back = views[name]
                (back.reshape(-1) if name == "dweights" else back)[order[place]] = 0


def take(source: NDArray[Any], rows: NDArray[np.int32], out: NDArray[Any]) -> None:
    """Copy some rows, without a temporary."""
    np.take(source, rows, axis=0, out=out, mode="clip")


def combine(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """Bring every computed row, or its gradients, back to its choice; add the gradients of copied experts at home."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    model, plan = members[0][0].program.model, members[0][0].program.plan
    assert model.experts is not None
    routes = Routes.of(views[0]["counts"], capacity_of(model, plan))
    gradient = "dreturned" in views[0]
    orders = [sorted_choices(view["chosen"], model.experts)[0] for view in views]
    first = [routes.first_rows(origin) for origin in range(plan.ep)]
    for number, mine in enumerate(views):
        clear_dropped(mine, routes.dropped(number), orders[number])
        for run in routes.runs[number]:
            home, place = views[run.origin], slice(run.at, run.at + run.rows)
            picked = chosen_of(run, orders[run.origin], first[run.origin])
            if gradient:
                home["dreturned"][picked] = mine["dsent"][place]
                home["dweights"].reshape(-1)[picked] = mine["drow_weights"][place, 0]
            else:
                home["returned"][picked] = mine["made"][place]
        donor = routes.shares[number].donor
        if gradient and donor is not None:
            holder = views[donor]["g"]
            for own, copied in copied_places(model, plan, routes.runs[number]):
                summed([holder[own], mine["dpool"][copied]], holder[own], (), scalars, scratch)
