"""Numbers of expert ranks to consider: neighbouring replicas that share out the experts of every layer.

They divide the bytes of a layer's experts, and what replicas gather and reduce of these, and exchange rows for it. A
search has every number that shares out the experts evenly: 128 experts on 24 clusters give 1, 2, 4, 8 and 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrainc.planner.space.asked_ranks import Problem, check_asked, problem_of
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.ratrainc.planner.space.tilings import divisors

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.space.search_setting import SearchSetting

HALVES = "backwards in halves, of a model whose experts replicas share out, are not built"
"""Reason why some schedules have no expert ranks."""
SLICES = "slices, which leave each expert fewer rows, are not searched where replicas share out experts"
"""Reason why others have none."""


def choose_ep(setting: SearchSetting, clusters: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers of expert ranks to choose from: `asked`, else 1 and all that are possible.

    Raises `DiagnosticError` RT064 if an asked number does not share out the experts, or exceeds the clusters.
    """
    if asked is None:
        numbers = divisors(setting.model.experts or 1)
        return tuple(number for number in numbers if number <= clusters and _problem(setting, number) is None)
    check_asked(asked, clusters, "expert", "ep", lambda number: _problem(setting, number))
    return tuple(sorted(asked))


def _problem(setting: SearchSetting, number: int) -> Problem | None:
    """Return why a number of replicas cannot share out a model's experts, and a way out; None if they can."""
    if number == 1:
        return None
    plan = Shape(1, number, 1, 1, 0, "last", ep=number).plan(setting, ())
    found = problem_of(check_plan, plan, setting.model)
    return found and (found[0], found[1].replace("leave it out", "leave out --ep"))
