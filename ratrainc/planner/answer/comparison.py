"""Strategies compared: all on one plan, or each on its own best plan. A row a strategy, as `ratrainc compare --json` prints it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.config.plan_text import changes_text
from ratrain.ratrain_ir.topology import topology_of
from ratrain.ratrainc.choices.levers import Outcome, Setting, try_setting
from ratrain.ratrainc.planner.answer.report import candidate_json
from ratrain.ratrainc.planner.bounds.profile import rank_capacity
from ratrain.ratrainc.planner.search.search import Search
from ratrain.targets.machine.capacity import capacity_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.choices.strategies import Strategy
    from ratrain.ratrainc.planner.search.answer import Answer, Request
    from ratrain.targets.machine.machine import Machine


def rows_on_one_plan(
    model: ModelConfig, plan: Plan, strategies: Sequence[Strategy], machine: Machine, tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row a strategy on one plan, which was checked; speed-ups are over the first. One that does not fit has no speed-up.

    Where a strategy gives the plan chunks or slices, its row says which, as `changes`. Raises `DiagnosticError` RT064 for a strategy that
    cannot have the plan.
    """
    outcomes, changes = [], []
    for item in strategies:
        adapted = item.adapted(plan, model, machine)
        outcome = try_setting(Setting(model, adapted, item.passes_for(adapted), machine), item.name)
        assert outcome is not None, "a strategy's plan was checked"
        outcomes.append(outcome)
        changes.append(changes_text(plan, adapted) if adapted.shape != plan.shape else "")
        tick(item.name)
    capacity = capacity_of(machine, topology_of(model, plan)).left
    rows = [_row(outcome, outcomes[0], plan.tokens_per_step, capacity) for outcome in outcomes]
    return [row | ({"changes": text} if text else {}) for row, text in zip(rows, changes, strict=True)]


def _row(outcome: Outcome, yardstick: Outcome, tokens: int, capacity: int) -> dict[str, Any]:
    seconds, reference = outcome.step_seconds, yardstick.step_seconds
    return {
        "name": outcome.name,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "peak_bytes": max(outcome.peak_bytes),
        "exposed_tail_seconds": outcome.exposed_tail_seconds,
        "speedup": reference / seconds if seconds and reference else None,
        "fits": outcome.fits,
        "capacity_bytes": capacity,
    }


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
        nearest = min(answer.rejected, key=lambda r: r.short_bytes, default=None)
        shown = best or nearest
        assert shown is not None, "where nothing fits, bounds on bytes have ruled something out"
        capacity = rank_capacity(answer.request.model, answer.request.machine, shown.shape).left
        # what some shapes lack says nothing while others may fit
        short = nearest.short_bytes if nearest and answer.proven_empty else 0.0
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
                "capacity_bytes": capacity,
                "plan": candidate_json(best, answer.request.clusters, None) if best else None,
                "bound_step_seconds": answer.bound_seconds if best else None,
            }
        )
    return rows
