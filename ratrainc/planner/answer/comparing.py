"""Strategies compared, each as far as it can have the plan: what `ratrainc compare` does and says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, STRATEGIES, Strategy, strategy
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.planner.answer.comparison import best_of_each, comparison_rows, rows_on_one_plan
from ratrain.ratrainc.planner.answer.report import candidate_json

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.search.answer import Request
    from ratrain.targets.machine.machine import Machine

YARDSTICK = "baseline-1f1b"


@frozen(repr=False)
class Comparison(Shown):
    """What strategies come to, simulated: a row of facts each; speed-ups are over the first."""

    rows: tuple[dict[str, Any], ...]
    """on one plan, or each on its own best"""
    left_out: tuple[str, ...]
    """in sentences: which strategies cannot have the plan, and why"""
    is_planned: bool = False
    """whether each is on its own best plan"""
    common: dict[str, Any] | None = None
    """where each is on its own: all on the best plan of the default strategy, if that has one"""
    notes: tuple[str, ...] = ()

    def parts(self) -> Iterator[Part]:
        """A table of all on one plan, one of each on its own, and notes."""
        if self.common:
            where = f"all on the best plan of {self.common['best_for']}, {_plan_text(self.common['plan'])}"
            yield from _rows_parts(self.common["strategies"], where)
        yield from _rows_parts(self.rows, "each on its best plan" if self.is_planned else "on one plan")
        yield from self.notes

    def to_json(self) -> dict[str, Any]:
        """The rows as `--json` prints them."""
        common = {"on_one_plan": self.common} if self.is_planned else {}
        least = min(row["capacity_bytes"] for row in self.rows)
        return {"strategies": list(self.rows), **common, "capacity_bytes": least}


def chosen_strategies(names: Sequence[str] | None) -> list[Strategy]:
    """The strategies of some names, or all, the yardstick first."""
    if names is not None:
        return [strategy(name) for name in names]
    return sorted(STRATEGIES, key=lambda item: item.name != YARDSTICK)


def compare_on_plan(
    config: ModelConfig,
    plan: Plan,
    names: Sequence[str] | None,
    machine: Machine,
    tick: Callable[[str], None],
    place: Callable[[], Place] = Place,
) -> Comparison:
    """Compile and simulate one plan under several strategies; of no names all that the plan can have.

    Raises `DiagnosticError` RT064 for a strategy that was named and cannot have the plan, which says its schedule at `place`.
    """
    wanted = chosen_strategies(names)
    left: list[str] = []
    if names is not None:
        for item in wanted:
            item.check_schedule(plan, place)
    fitting = [item for item in wanted if plan.schedule is None or item.schedule in (None, plan.schedule)]
    others = ", ".join(item.name for item in wanted if item not in fitting)
    if others:
        left.append(f'left out, as the plan says schedule = "{plan.schedule}": {others}')
    possible = _where(fitting, lambda item: item.adapted(plan, config, machine), left, named=names is not None)
    rows = rows_on_one_plan(config, plan, possible, machine, tick)
    return Comparison(tuple(rows), tuple(left), notes=tuple(item.note for item in possible if item.note))


def compare_on_best(
    request: Request, names: Sequence[str] | None, machine: Machine, tick: Callable[[str], None]
) -> Comparison:
    """What strategies come to on the best plan of the default one, and each on its own.

    Raises `DiagnosticError` for a strategy that was named and has no plan that could be looked for.
    """
    left: list[str] = []
    wanted = chosen_strategies(names)
    chosen = _where(wanted, lambda item: evolve(request, strategy=item).shapes(), left, named=names is not None)
    best, *answers = best_of_each(request, [request.strategy, *chosen], tick)
    rows = tuple(comparison_rows(chosen, answers))
    if best.best is None:
        note = f"no plan was found that fits {DEFAULT_STRATEGY}: there is no comparison on one plan"
        return Comparison(rows, tuple(left), is_planned=True, notes=(note,))
    plan = best.best.plan
    possible = _where(chosen, lambda item: item.adapted(plan, request.model, machine), left, named=False)
    common = {
        "best_for": request.strategy.name,
        "plan": candidate_json(best.best, request.clusters, None),
        "strategies": rows_on_one_plan(request.model, plan, possible, machine, tick),
    }
    return Comparison(rows, tuple(left), is_planned=True, common=common)


def _where(
    chosen: Sequence[Strategy], attempt: Callable[[Strategy], object], left: list[str], *, named: bool
) -> list[Strategy]:
    """The strategies for which an attempt is not refused; where they were asked for by name, the refusal stands."""
    possible = []
    for item in chosen:
        try:
            attempt(item)
        except DiagnosticError as error:
            if named:
                raise
            left.append(f"left out: {item.name}: {error.diagnostics[0].message}")
        else:
            possible.append(item)
    return possible


def _rows_parts(rows: Sequence[dict[str, Any]], where: str) -> Iterator[Part]:
    planned = any("plan" in row for row in rows)
    shown = []
    for row in rows:
        if row["fits"]:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.3f}"
            tail = seconds_text(row["exposed_tail_seconds"])
            times = [seconds_text(row["step_seconds"]), f"{row['tokens_per_second']:,.0f}", tail, speedup]
        else:
            lacking = row["peak_bytes"] - row["capacity_bytes"]
            # what is live may fit where no placement of it was found
            times = [f"lacks {size_text(lacking)}" if lacking > 0 else "not placed", "-", "-", "-"]
        plan = [_plan_text(row["plan"]) if row["plan"] else "-"] if planned else []
        shown.append([row["name"], *plan, size_text(row["peak_bytes"]), *times])
    columns = (
        "strategy",
        *(["plan"] if planned else []),
        "highest peak",
        "step",
        "tokens/s",
        "exposed tail",
        "speed-up",
    )
    yield TextTable(f"strategies {where} (simulated; speed-up over the first that is named)", columns, shown)
    for row in rows:
        if "changes" in row:
            yield f"{row['name']} gives the plan {row['changes']}"
    if len(rows) > 1 and not rows[0]["fits"]:
        yield f"{rows[0]['name']} does not fit, so there is nothing to be faster than"


def _plan_text(plan: dict[str, Any]) -> str:
    each = " each" if plan["reduce"] == "each-micro-batch" else ""
    sizes = f"P{plan['pp']} D{plan['dp']} b{plan['micro_batch_size']} M{plan['micro_batches']}"
    chunks = "" if plan["chunks"] == 1 else f" V{plan['chunks']}"
    slices = f" k{len(plan['slices'])}" if plan["slices"] else ""
    return f"{sizes}{chunks}{slices} Z{plan['zero']}{each}"
