"""The planner's figures: how fast level one is, the fewest clusters of each paper model, planning times, strategies on their best plans.

    python benchmarks/planner.py rate | smallest | plan | compare | spaces | examples [MODEL ...]

`spaces` plans the paper's models on 256 and 1024 clusters in growing spaces and prints what each part of the space is worth; `examples` plans the paper's models on 256, 512 and 1024 clusters and writes examples/best/; `smallest` writes examples/smallest/.

Every time of a training step is simulated; times of the planner itself are wall times of this machine, rates by the process's own time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.files import write_lines
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.plan_choices import PlanChoice, SearchEffort
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.console.progress import Steps
from ratrain.ratrainc.planner.answer.fewest_clusters import fewest_clusters
from ratrain.ratrainc.planner.answer.plan_files import plan_file
from ratrain.ratrainc.planner.answer.strategy_comparison import best_of_each, rows_on_best_plans
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.bounds.shape_columns import Columns
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task, evaluate, is_folded
from ratrain.ratrainc.planner.search.plan_request import planning_request
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import quick_answer
from ratrain.ratrainc.planner.space.plan_families import USUAL
from ratrain.ratrainc.planner.space.space import Shape, divisions

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

PAPER = {"llama-2-7b": 8, "baichuan2-13b": 16, "qwen2.5-32b": 64, "llama-2-70b": 96}
"""The models of the paper and the fewest clusters published for each."""
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
COMPARED = (
    "baseline-1f1b",
    "baseline-1f1b-overlapped",
    "full-save",
    "zero3",
    "zero3-blocking",
    "tuned-1f1b",
    "ratrain",
    "ratrain-no-fsr",
    "ratrain-inline",
    "ratrain-no-update-prefetch",
    "ratrain-no-layerwise",
)
COMPARE_SECONDS = 40.0
"""for the best plan of each strategy"""
WHOLE_SECONDS = {"llama-2-7b": 25.0, "baichuan2-13b": 25.0, "qwen2.5-32b": 60.0, "llama-2-70b": 50.0}
"""for a search; the whole simulation of what was folded comes on top"""
CLUSTERS = (256, 512, 1024)
SEQUENCES = 8
"""sequences a cluster in a step, as published for 7B on 256"""


def effort(seconds: float) -> SearchEffort:
    """A search of so long on all cores."""
    return SearchEffort(seconds, os.cpu_count() or 1)


def rate() -> None:
    """Plans bounded in a second of the process's own time, with uneven cuts, of each schedule."""
    model = load_model("llama-2-70b")
    request = planning_request(model, 1024, 8192, 2048)
    random = np.random.default_rng(0)
    count = 100_000
    states = [(1, "last"), (2, "each-micro-batch"), (3, "last")]
    for schedule, stages in product(USUAL, (4, 16, 48)):
        profiles = Profiles(request.setting)
        chunks, layout, slices = divisions(schedule)[0]
        if stages * chunks > model.layers:
            continue
        shapes = [
            Shape(
                stages,
                int(1 << random.integers(1, 5)),
                int(1 << random.integers(0, 3)),
                int(m),
                *states[random.integers(3)],
                chunks=chunks,
                layout=layout,
                slices=slices,
            )
            for m in stages * random.integers(1, 9, size=count)
        ]
        inner = np.tile(np.arange(1, model.layers), (count, 1))
        cuts = np.sort(random.permuted(inner, axis=1)[:, : stages - 1], axis=1)
        ends = np.full((count, 1), model.layers)
        layers = np.diff(np.concatenate([0 * ends, cuts, ends], axis=1), axis=1)
        start = time.process_time()
        columns = Columns.of(profiles, shapes, schedule=schedule)
        middle = time.process_time()
        for part in np.array_split(np.arange(count), 100):
            plan_bounds(columns.rows(part), layers[part].astype(float))
        end = time.process_time()
        print(
            f"{schedule}, {stages} stages: columns {count / (middle - start):,.0f}/s, "
            f"bounds {count / (end - middle):,.0f}/s, both {count / (end - start):,.0f}/s",
            flush=True,
        )


def smallest() -> None:
    """The fewest clusters on which each model fits, with ZeRO 3 and without."""
    for name in sys.argv[2:] or list(PAPER):
        published = PAPER[name]
        for levels in ((0, 1, 2, 3), (0, 1, 2)):
            start = time.perf_counter()
            request = planning_request(
                load_model(name), published + 32, 8, 2048, plans=PlanChoice(zero_levels=levels), fewest=True
            )
            try:
                fewest = fewest_clusters(request, name, MachineChoice(), Steps())
            except DiagnosticError:
                fewest = None
            text = "nothing"
            if fewest is not None:
                text = f"{fewest.clusters} clusters, {fewest.plan.summary}, cuts {fewest.plan.cuts}"
            print(
                f"{name} (published {published}), ZeRO {levels}: {text}; {time.perf_counter() - start:.1f} s",
                flush=True,
            )
            if fewest is not None and 3 in levels:
                path = EXAMPLES / "smallest" / f"{name}-{fewest.clusters}.toml"
                path.parent.mkdir(exist_ok=True)
                fewest.save(str(path))


def plan() -> None:
    """Seconds to plan, and the gap."""
    for name in PAPER:
        for clusters in (256, 1024):
            large = name in ("qwen2.5-32b", "llama-2-70b")
            seconds = 100.0 if large else 20.0
            request = planning_request(load_model(name), clusters, SEQUENCES * clusters, 2048, effort=effort(seconds))
            for kind, answer in (("quick", quick_answer(request)), ("full", Search(request).run())):
                best = answer.best
                text = "nothing fits" if best is None else f"{best.plan.summary} {best.seconds:.2f} s"
                gap = "-" if answer.relaxed_gap is None else f"{100 * answer.relaxed_gap:.2f} %"
                print(
                    f"{name} on {clusters}, {kind}: {text}, bound {answer.relaxed_bound_seconds:.2f} s, gap {gap}, "
                    f"{answer.evaluations} evaluations, {answer.seconds:.1f} s",
                    flush=True,
                )


def spaces() -> None:
    """What the parts of the space are worth: the best plan of 1F1B with one peer, with several, and of the whole space."""
    parts = {
        "1F1B, one peer": (PlanChoice(peers=(1,)), False),
        "and tensor-parallel ranks": (PlanChoice(), False),
        "the whole space": (PlanChoice(), True),
    }
    for name, clusters in product(sys.argv[2:] or list(PAPER), (256, 1024)):
        model, before = load_model(name), None
        for part, (plans, whole) in parts.items():
            limit = SearchEffort(WHOLE_SECONDS[name])
            request = planning_request(
                model, clusters, SEQUENCES * clusters, 2048, plans=plans, effort=limit, whole=whole
            )
            start = time.process_time()
            answer = Search(request).run()
            taken = time.process_time() - start
            best = answer.best
            if best is None or answer.relaxed_gap is None:
                print(f"{name} on {clusters}, {part}: nothing fits, {taken:.0f} CPU s", flush=True)
                continue
            gain = "" if before is None else f", {100 * (1 - best.seconds / before):.1f} % less"
            before = best.seconds if before is None else min(before, best.seconds)
            print(
                f"{name} on {clusters}, {part}: {best.family} {best.plan.summary} {best.seconds:.2f} s{gain}, closed form "
                f"{answer.relaxed_bound_seconds:.2f} s, gap {100 * answer.relaxed_gap:.1f} %, {answer.plans:.3g} plans, "
                f"{answer.evaluations} evaluations, {taken:.0f} CPU s",
                flush=True,
            )


def compare() -> None:
    """The strategies on 256 clusters: each on its best plan, and all on each of three plans."""
    for name in sys.argv[2:] or ("baichuan2-13b", "qwen2.5-32b"):
        request = planning_request(load_model(name), 256, 4096, 2048, effort=effort(COMPARE_SECONDS))
        best = _each_on_its_best(name, request, COMPARED)
        pipelines = _each_on_its_best(name, evolve(request, zero_levels=(0, 1, 2)), ("baseline-1f1b", "ratrain"))
        owners = {
            "ratrain's best": best["ratrain"],
            "ratrain's best with ZeRO 0 to 2": pipelines["ratrain"],
            "baseline's best": best["baseline-1f1b"],
        }
        for owner, plan in owners.items():
            _on_one_plan(name, request, owner, plan)


def _each_on_its_best(name: str, request: PlanRequest, names: Sequence[str]) -> dict[str, Plan]:
    chosen = [strategy(item) for item in names]
    answers = best_of_each(request, chosen, Steps())
    for row, answer in zip(rows_on_best_plans(chosen, answers), answers, strict=True):
        where = f"{name}, ZeRO {request.zero_levels}, {row['name']} on its best"
        if answer.best is None:
            print(f"{where}: nothing fits", flush=True)
            continue
        print(
            f"{where}: {answer.best.plan.summary} cuts {answer.best.plan.cuts} {_times(row)}, "
            f"bound {answer.bound_seconds:.2f} s, {answer.seconds:.0f} s",
            flush=True,
        )
    return {item: answer.best.plan for item, answer in zip(names, answers, strict=True) if answer.best}


def _on_one_plan(name: str, request: PlanRequest, owner: str, plan: Plan) -> None:
    named = [strategy(item) for item in COMPARED]
    applied = {item.name: item.applied(plan, request.model, request.machine) for item in named}
    known: dict[tuple[Plan, str], PlanEvaluation] = {}
    for item in named:
        key = applied[item.name]
        if key not in known:
            known[key] = evaluate(Task(request.model, *key, request.machine, is_folded(plan, key[1])))
    first = known[applied[named[0].name]].step_seconds
    for item in named:
        outcome = known[applied[item.name]]
        seconds = outcome.step_seconds
        row = {
            "step_seconds": seconds,
            "exposed_tail_seconds": outcome.exposed_tail_seconds,
            "speedup": first / seconds if first and seconds else None,
        }
        text = "does not fit" if seconds is None else f"{_times(row)}{', folded' * outcome.estimated}"
        print(f"  {name} on {owner}: {item.name} {text}", flush=True)


def _times(row: Mapping[str, Any]) -> str:
    speedup = "-" if row["speedup"] is None else f"{row['speedup']:.3f}"
    return f"{row['step_seconds']:.2f} s, tail {row['exposed_tail_seconds']:.2f} s, speed-up {speedup}"


def examples() -> None:
    """The plan files of examples/best/."""
    wanted = sys.argv[2:] or list(PAPER)
    for name in wanted:
        for clusters in CLUSTERS:
            seconds = 80.0 if name in ("qwen2.5-32b", "llama-2-70b") else 20.0
            request = planning_request(load_model(name), clusters, SEQUENCES * clusters, 2048, effort=effort(seconds))
            answer = Search(request).run()
            if answer.best is None:
                print(f"{name} on {clusters}: nothing fits")
                continue
            path = EXAMPLES / "best" / f"{name}-{clusters}.toml"
            write_lines(str(path), plan_file(answer, answer.best, name).splitlines())
            print(
                f"{path.name}: {answer.best.plan.summary} {answer.best.seconds:.2f} s, gap {answer.gap:.2%}, "
                f"closed form {answer.relaxed_bound_seconds:.2f} s, gap {answer.relaxed_gap:.2%}, "
                f"{answer.evaluations} evaluations, {answer.seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    modes = {
        "rate": rate,
        "smallest": smallest,
        "plan": plan,
        "compare": compare,
        "spaces": spaces,
        "examples": examples,
    }
    modes[sys.argv[1]]()
