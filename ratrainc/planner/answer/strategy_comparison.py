"""Strategies compared, on one plan or each on its own best plan: what `ratrainc compare` computes and shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.plan_summary import legend
from ratrain.ratrain_ir.config.plan_text import changes_text
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrain_ir.support.time_limit import OutOfTime, is_ended
from ratrain.ratrain_ir.topology import topology_of
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, STRATEGIES, Strategy, strategy, table_strategy
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.planner.bounds.profiles import rank_capacity
from ratrain.ratrainc.planner.search.kept_results import evaluate_kept
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.workers import workers
from ratrain.targets.machine.capacity import capacity_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.console.progress import Steps
    from ratrain.ratrainc.planner.search.answer import Answer
    from ratrain.ratrainc.planner.search.kept_results import KeptResults
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest
    from ratrain.targets.machine.machine import Machine

YARDSTICK = "baseline-1f1b"


@frozen(repr=False)
class Comparison(Shown):
    """Simulated figures of strategies, a row for each; speed-ups are over the first."""

    rows: tuple[dict[str, Any], ...]
    """figures of each strategy on one plan, or on its own best plan"""
    machine: str
    """name of the machine"""
    left_out: tuple[str, ...]
    """sentences: which strategies cannot have the plan, and why"""
    is_planned: bool = False
    """True if each is on its own best plan"""
    common: dict[str, Any] | None = None
    """if each is on its own: the rows of all on the best plan of the default strategy, if that has one"""
    notes: tuple[str, ...] = ()
    step_error: float | None = None
    """that of the machine"""

    def parts(self) -> Iterator[Part]:
        """Yield a table of all on one plan, a table of each on its own, and notes."""
        if self.common:
            where = f"all on the best plan of {self.common['best_for']}, {self.common['plan']['summary']}"
            yield from _rows_parts(self.common["strategies"], where, self.machine)
        where = "each on its best plan" if self.is_planned else "on one plan"
        yield from _rows_parts(self.rows, where, self.machine)
        yield from self.notes

    def to_json(self) -> dict[str, Any]:
        """Return the rows as `--json` prints them."""
        common = {"on_one_plan": self.common} if self.is_planned else {}
        least = min(row["capacity_bytes"] for row in self.rows)
        of_machine = {"machine": self.machine, "step_error": self.step_error, "capacity_bytes": least}
        return {"strategies": list(self.rows), **common, **of_machine}


def chosen_strategies(names: Sequence[str] | None, *, tables: bool = False) -> list[Strategy]:
    """Return the strategies of some names, with `tables` also of tables' files; of None, all, the yardstick first."""
    if names is not None:
        return [table_strategy(name) if tables and name.endswith(".csv") else strategy(name) for name in names]
    return sorted(STRATEGIES, key=lambda item: item.name != YARDSTICK)


def compare_on_plan(
    config: ModelConfig,
    plan: Plan,
    names: Sequence[str] | None,
    machine: Machine,
    tick: Steps,
    place: Callable[[], Place] = Place,
    kept: KeptResults | None = None,
) -> Comparison:
    """Compile and simulate one plan under several strategies; without names, all that can have the plan.

    What is in `kept` is not simulated again, and what is found goes there. Raises `DiagnosticError` RT064 for a named
    strategy that cannot have the plan, whose schedule is at `place`.
    """
    wanted = chosen_strategies(names, tables=True)
    left: list[str] = []
    fitting = _of_schedule(wanted, plan, place, left, named=names is not None)
    possible = _where(fitting, lambda item: item.adapted(plan, config, machine), left, named=names is not None)
    tick.total = len(possible)
    rows = rows_on_one_plan(config, plan, possible, machine, tick, kept=kept)
    left += _interrupted(possible[len(rows) :])
    if not rows and is_ended():
        raise OutOfTime
    notes = (*(item.note for item in possible if item.note), *_accuracy(machine))
    return Comparison(tuple(rows), machine.name, tuple(left), notes=notes, step_error=machine.step_error)


def compare_on_best(
    request: PlanRequest,
    names: Sequence[str] | None,
    machine: Machine,
    tick: Steps,
    like: Plan | None = None,
    place: Callable[[], Place] = Place,
) -> Comparison:
    """Compare strategies on the best plan of the default one, and each on its own.

    `like` is the plan that gave the request its template, if one did; its schedule is at `place`. Raises
    `DiagnosticError` for a named strategy without any shape to search, or named after another schedule.
    """
    left: list[str] = []
    wanted = _of_schedule(chosen_strategies(names), like, place, left, named=names is not None)
    chosen = _where(wanted, lambda item: evolve(request, strategy=item).shapes(), left, named=names is not None)
    best, *answers = best_of_each(request, [request.strategy, *chosen], tick)
    found = [(item, answer) for item, answer in zip(chosen, answers, strict=True) if answer is not None]
    left += _interrupted([item for item, answer in zip(chosen, answers, strict=True) if answer is None])
    if best is None or not found:
        raise OutOfTime
    chosen = [item for item, _ in found]
    rows = tuple(rows_on_best_plans(chosen, [answer for _, answer in found]))
    if best.best is None:
        note = f"no plan was found that fits {DEFAULT_STRATEGY}: there is no comparison on one plan"
        notes = (note, *_accuracy(machine))
        return Comparison(rows, machine.name, tuple(left), is_planned=True, notes=notes, step_error=machine.step_error)
    plan = best.best.plan
    if is_ended():
        note = (
            f"interrupted: nothing was compared on the best plan of {DEFAULT_STRATEGY}, and plans are the best so far"
        )
        notes = (note, *_accuracy(machine))
        return Comparison(rows, machine.name, tuple(left), is_planned=True, notes=notes, step_error=machine.step_error)
    possible = _where(chosen, lambda item: item.adapted(plan, request.model, machine), left, named=False)
    tick.prefix = f"on the best plan of {request.strategy.name}, "
    common = {
        "best_for": request.strategy.name,
        "plan": best.best.to_json(request.clusters),
        "strategies": rows_on_one_plan(request.model, plan, possible, machine, tick, request.jobs),
    }
    tick.prefix = ""
    return Comparison(
        *(rows, machine.name, tuple(left)),
        is_planned=True,
        common=common,
        notes=_accuracy(machine),
        step_error=machine.step_error,
    )


def _accuracy(machine: Machine) -> tuple[str, ...]:
    return (machine.accuracy,) if machine.accuracy else ()


def _searched(request: PlanRequest, tick: Steps) -> Answer | None:
    """Search; return None if that was interrupted before anything was found."""
    try:
        answer = Search(request, tick).run()
    except OutOfTime:
        return None
    return None if answer.interrupted and answer.best is None else answer


def _interrupted(strategies: Sequence[Strategy]) -> list[str]:
    """Say that strategies are left out as the comparison was interrupted; empty if none is."""
    names = ", ".join(item.name for item in strategies)
    return [f"left out, as the comparison was interrupted: {names}"] if names else []


def _of_schedule(
    wanted: list[Strategy], plan: Plan | None, place: Callable[[], Place], left: list[str], *, named: bool
) -> list[Strategy]:
    """Return the strategies that go with a plan's schedule, at `place`; if they are `named`, another one is refused."""
    if plan is None or plan.schedule is None:
        return wanted
    if named:
        for item in wanted:
            item.check_schedule(plan, place)
    fitting = [item for item in wanted if item.schedule in (None, plan.schedule)]
    others = ", ".join(item.name for item in wanted if item not in fitting)
    if others:
        left.append(f'left out, as the plan says schedule = "{plan.schedule}": {others}')
    return fitting


def _where(
    chosen: Sequence[Strategy], attempt: Callable[[Strategy], object], left: list[str], *, named: bool
) -> list[Strategy]:
    """Return the strategies for which an attempt is not refused; if they are `named`, the refusal is raised."""
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


def rows_on_one_plan(
    model: ModelConfig,
    plan: Plan,
    strategies: Sequence[Strategy],
    machine: Machine,
    tick: Steps,
    jobs: int = 1,
    kept: KeptResults | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each strategy on one plan, which was checked, by `jobs` processes; speed-ups are over the first.

    If a strategy adds chunks or slices to the plan, its row has them as `changes`. Raises `DiagnosticError` RT064 for a
    strategy that cannot have the plan.
    """
    capacity = capacity_of(machine, topology_of(model, plan)).left
    rows: list[dict[str, Any]] = []
    reference: float | None = None
    applied = [item.applied(plan, model, machine) for item in strategies]

    def hear(number: int, found: PlanEvaluation | DiagnosticError) -> None:
        name = strategies[number].name
        if isinstance(found, DiagnosticError) or found.stopped:
            tick(name)
        else:
            tick.found(_line(name, found.step_seconds, max(found.peak_bytes), capacity))

    tasks = [Task(model, adapted, pipeline, machine) for adapted, pipeline in applied]
    evaluations = evaluate_kept(
        [(item.name, task) for item, task in zip(strategies, tasks, strict=True)],
        jobs,
        kept,
        hear,
        lambda number: tick.begin(strategies[number].name),
    )
    for item, (adapted, _), found in zip(strategies, applied, evaluations, strict=True):
        if isinstance(found, DiagnosticError):
            raise found
        if found.stopped:
            break
        reference = reference if rows else found.step_seconds
        figures = found.step_seconds, max(found.peak_bytes), found.exposed_tail_seconds
        row = _row(item.name, *figures, reference, plan.tokens_per_step, capacity)
        text = changes_text(plan, adapted) if adapted.shape != plan.shape else ""
        rows.append(row | ({"changes": text} if text else {}))
    return rows


def _line(name: str, seconds: float | None, peak_bytes: int, capacity: int) -> str:
    """Return the line that tells of a strategy when its figures are there."""
    if seconds is None:
        return f"{name}: does not fit, {_lacking_text(peak_bytes, capacity)}"
    return f"{name}: {seconds_text(seconds)} a step, highest peak {size_text(peak_bytes)}"


def _lacking_text(peak_bytes: int, capacity: int) -> str:
    """Say why a strategy does not fit; live bytes may fit though no placement of them was found."""
    lacking = peak_bytes - capacity
    return f"lacks {size_text(lacking)}" if lacking > 0 else "not placed"


def _row(
    name: str,
    seconds: float | None,
    peak_bytes: int,
    tail: float | None,
    reference: float | None,
    tokens: int,
    capacity: int,
) -> dict[str, Any]:
    """Return the row of a strategy as `--json` prints it; without `seconds` it does not fit and has no speed-up."""
    return {
        "name": name,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "peak_bytes": peak_bytes,
        "exposed_tail_seconds": tail,
        "speedup": reference / seconds if seconds and reference else None,
        "fits": seconds is not None,
        "capacity_bytes": capacity,
    }


def best_of_each(request: PlanRequest, strategies: Sequence[Strategy], tick: Steps) -> list[Answer | None]:
    """Search the best plan of each strategy; those with the same passes and ZeRO level share a search.

    None stands for searches that were interrupted before they found anything. `tick` hears first how long all searches
    may take, then the best plan of each strategy.
    """
    known: dict[tuple[str, int | None], Answer | None] = {}
    told: set[str] = set()
    searches = len({(item.passes, item.zero) for item in strategies})
    if not request.exhaustive:
        tick.tell(_limits_text(searches, request.seconds))
    with workers(request.jobs):  # one pool for all searches
        for item in strategies:
            key = (item.passes, item.zero)
            if key not in known and not is_ended():
                tick.prefix = f"search {len(known) + 1} of {searches}, {item.name}: "
                known[key] = _searched(evolve(request, strategy=item), tick)
                tick.prefix = ""
            answer = known.setdefault(key, None)
            if answer is not None and item.name not in told:
                told.add(item.name)
                tick.tell(_best_line(item.name, answer))
    return [known[item.passes, item.zero] for item in strategies]


def _limits_text(searches: int, seconds: float) -> str:
    """Say how long searches may take together."""
    if searches == 1:
        return f"1 search of about {seconds_text(seconds)} at most"
    return (
        f"{searches} searches of about {seconds_text(seconds)} at most each: {seconds_text(searches * seconds)} in all"
    )


def _best_line(name: str, answer: Answer) -> str:
    """Return the line that tells of the best plan of a strategy."""
    best = answer.best
    if best is None:
        return f"{name}: no plan was found that fits"
    return (
        f"{name}: {best.plan.summary}, {seconds_text(best.seconds)} a step, highest peak {size_text(best.peak_bytes)}"
    )


def rows_on_best_plans(strategies: Sequence[Strategy], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return a row for each strategy on its best plan; speed-ups are over the first.

    Without a plan, the peak includes the bytes that it lacks.
    """
    reference = answers[0].best.seconds if answers[0].best else None
    rows = []
    for item, answer in zip(strategies, answers, strict=True):
        best, nearest, request = answer.best, answer.nearest, answer.request
        shown = best or nearest
        assert shown is not None, "where nothing fits, bounds on bytes have ruled something out"
        capacity = rank_capacity(request.model, request.machine, shown.shape).left
        # while others may fit, the bytes that some shapes lack mean nothing
        short = nearest.short_bytes if nearest and answer.proven_empty else 0.0
        seconds, peak = (best.seconds, best.peak_bytes) if best else (None, capacity + int(short))
        tail = best.evaluation.exposed_tail_seconds if best and best.evaluation else None
        tokens = request.global_batch * request.seq_len
        row = _row(item.name, seconds, peak, tail, reference, tokens, capacity)
        of_plan = {
            "plan": best.to_json(request.clusters) if best else None,
            "bound_step_seconds": answer.bound_seconds if best else None,
        }
        rows.append(row | of_plan)
    return rows


def _rows_parts(rows: Sequence[dict[str, Any]], where: str, machine: str) -> Iterator[Part]:
    planned = any("plan" in row for row in rows)
    shown = []
    for row in rows:
        if row["fits"]:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.3f}"
            tail = seconds_text(row["exposed_tail_seconds"])
            times = [seconds_text(row["step_seconds"]), f"{row['tokens_per_second']:,.0f}", tail, speedup]
        else:
            times = [_lacking_text(row["peak_bytes"], row["capacity_bytes"]), "-", "-", "-"]
        plan = [row["plan"]["summary"] if row["plan"] else "-"] if planned else []
        shown.append([row["name"], *plan, size_text(row["peak_bytes"]), *times])
    figures = ("highest peak", "step", "tokens/s", "exposed tail", "speed-up")
    columns = ("strategy", *(["plan"] if planned else []), *figures)
    yield TextTable(
        f"strategies {where}, on {machine} (simulated; speed-up over the first that is named)", columns, shown
    )
    if meaning := legend(row["plan"]["summary"] for row in rows if row.get("plan")):
        yield meaning
    for row in rows:
        if "changes" in row:
            yield f"{row['name']} gives the plan {row['changes']}"
    if len(rows) > 1 and not rows[0]["fits"]:
        yield f"{rows[0]['name']} does not fit, so there is nothing to be faster than"
