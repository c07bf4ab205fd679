"""Numbers of expert ranks to consider: neighbouring replicas that share out the experts of every layer.

They divide the bytes of a layer's experts, and what replicas gather and reduce of these, and exchange rows for it. A
search has every number that shares out the experts evenly: 128 experts on 24 clusters give 1, 2, 4, 8 and 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
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
    for number in asked:
        if number > clusters:
            text = f"{number} expert ranks take more than the {clusters} clusters"
            fail("RT064", text, help="use more clusters, or fewer expert ranks (--ep)")
        if (problem := _problem(setting, number)) is not None:
            text, help_text = problem
            fail("RT064", text, help=help_text.replace("ep = 1", "--ep 1").replace("leave it out", "leave out --ep"))
    return tuple(sorted(asked))


def _problem(setting: SearchSetting, number: int) -> tuple[str, str] | None:
    """Return why a number of replicas cannot share out a model's experts, and a way out; None if they can."""
    if number == 1:
        return None
    try:
        check_plan(Shape(1, number, 1, 1, 0, "last", ep=number).plan(setting, ()), setting.model)
    except DiagnosticError as error:
        return error.diagnostics[0].message, error.diagnostics[0].help or ""
    return None
