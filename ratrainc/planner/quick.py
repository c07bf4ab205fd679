"""Level one alone: the plan with the least pessimistic estimate, and how far that is from the bound on every plan."""

from __future__ import annotations

import time

import numpy as np
from attrs import evolve

from ratrain.ratrainc.planner.answer import Answer, Candidate, Rejected, Request
from ratrain.ratrainc.planner.bounds import shape_bounds
from ratrain.ratrainc.planner.columns import Columns, state_bytes
from ratrain.ratrainc.planner.cuts import best_cuts, cuts_of, partition_count
from ratrain.ratrainc.planner.estimates import plan_estimates
from ratrain.ratrainc.planner.profile import Profiles
from ratrain.ratrainc.planner.variants import pipeline_for

SECONDS = 3.0
"""of computing for the cuts of shapes, once one fits; what is left then is covered by its bound. Others' work changes no answer"""


def quick_answer(request: Request) -> Answer:
    """An answer without compiling anything: its times are estimates, its peaks lower bounds."""
    begin = time.monotonic()
    profiles = Profiles(request.setting)
    space = request.shapes()
    columns = Columns.of(profiles, space, schedule=request.schedule)
    bounds = shape_bounds(columns)
    computed = time.process_time()
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    least, open_bound = float("inf"), float("inf")
    for at in np.argsort(bounds, kind="stable"):
        late = np.isfinite(least) and time.process_time() - computed > SECONDS
        if not np.isfinite(bounds[at]) or bounds[at] >= least or late:
            open_bound = float(bounds[at])
            break
        row = columns.rows(slice(at, at + 1))
        cuts = best_cuts(row)
        if not np.isfinite(cuts.seconds):
            rejected.append(Rejected(space[at], cuts.stage, cuts.short_bytes))
            continue
        estimate = float(plan_estimates(row, np.array([cuts.layers], float))[0])
        plan = space[at].plan(profiles.setting, cuts_of(cuts.layers, space[at]))
        pipeline = pipeline_for(request.strategy.passes, plan)
        candidates.append(Candidate(space[at], plan, pipeline, cuts.seconds, None, estimate, cuts.peak_bytes))
        least = min(least, estimate)
    if not candidates and not rejected:  # the state alone is too large for every shape
        smallest = int(np.argmin(state_bytes(columns)))
        cuts = best_cuts(columns.rows(slice(smallest, smallest + 1)))
        rejected.append(Rejected(space[smallest], cuts.stage, cuts.short_bytes))
    candidates.sort(key=lambda c: c.seconds)
    bound = min([open_bound, *(c.bound_seconds for c in candidates)])
    fitting = [c for c in candidates if np.isfinite(c.seconds)]
    return Answer(
        evolve(request, seconds=SECONDS),
        fitting,
        [],
        rejected,
        bound,
        bound,
        len(space),
        sum(partition_count(request.model.layers, shape.pp, shape.chunks) for shape in space),
        0,
        time.monotonic() - begin,
        proven=False,
    )
