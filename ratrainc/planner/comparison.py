"""Strategies, each on its own best plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrainc.planner.report import candidate_json
from ratrain.ratrainc.planner.search import Search

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.answer import Answer, Request
    from ratrain.ratrainc.strategies import Strategy


def best_of_each(request: Request, strategies: Sequence[Strategy], tick: Callable[[str], None]) -> list[Answer]:
    """The answers for some strategies; those with the same passes and ZeRO levels share a search."""
    known: dict[tuple[str, int | None], Answer] = {}
    for item in strategies:
        key = (item.passes, item.zero)
        if key not in known:
            known[key] = Search(evolve(request, strategy=item), tick).run()
    return [known[item.passes, item.zero] for item in strategies]


def comparison_rows(strategies: Sequence[Strategy], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """A row a strategy; speed-ups are over the first. One that does not fit has its shortfall and no speed-up."""
    reference = answers[0].best.seconds if answers[0].best else None
    rows = []
    for item, answer in zip(strategies, answers, strict=True):
        best = answer.best
        capacity = answer.request.machine.whole("ddr_capacity")
        lacking = [r.short_bytes for r in answer.rejected] if answer.proven_empty else []
        short = min(lacking, default=0.0)  # what some shapes lack says nothing while others may fit
        evaluation = best.evaluation if best else None
        rows.append(
            {
                "name": item.name,
                "step_seconds": best.seconds if best else None,
                "tokens_per_second": best.plan.tokens_per_step / best.seconds if best else None,
                "peak_bytes": best.peak_bytes if best else capacity + int(short),
                "exposed_tail_seconds": evaluation.exposed_tail_seconds if evaluation else None,
                "speedup": reference / best.seconds if best and reference else None,
                "fits": best is not None,
                "plan": candidate_json(best, answer.request.clusters, None) if best else None,
                "bound_step_seconds": answer.bound_seconds if best else None,
            }
        )
    return rows
