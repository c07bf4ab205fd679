"""The planner's figures: how fast level one is, the fewest clusters of each paper model, planning times, strategies on their best plans.

    python benchmarks/planner.py rate | smallest | plan | compare | examples

`examples` plans the paper's models on 256 and 1024 clusters and writes examples/best/.

Every time of a training step is simulated; times of the planner itself are wall times of this machine.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from attrs import evolve

from ratrain_ir.files import write_lines
from ratrain_ir.frontend.model_config import load_model
from ratrainc.levers import Setting, try_setting
from ratrainc.planner.bounds import Columns, plan_bounds
from ratrainc.planner.profile import Profiles
from ratrainc.planner.quick import quick_answer
from ratrainc.planner.report import plan_file, shape_text
from ratrainc.planner.requests import planning_request
from ratrainc.planner.search import Search
from ratrainc.planner.smallest import smallest_clusters
from ratrainc.planner.space import Shape
from ratrainc.strategies import strategy

PAPER = {"llama-2-7b": 8, "baichuan2-13b": 16, "qwen2.5-32b": 64, "llama-2-70b": 96}
"""The models of the paper and the fewest clusters published for each."""
EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "best"
SEQUENCES = 8
"""sequences a cluster in a step, as published for 7B on 256"""


def rate() -> None:
    """Plans bounded in a second, with uneven cuts, on one core."""
    model = load_model("llama-2-70b")
    request = planning_request(model, 1024, 8192, 2048)
    profiles = Profiles(request.setting)
    random = np.random.default_rng(0)
    for stages in (4, 16, 48):
        count = 100_000
        states = [(1, "last"), (2, "each-micro-batch"), (3, "last")]
        shapes = [
            Shape(stages, 1 << random.integers(1, 5), 1 << random.integers(0, 3), int(m), *states[random.integers(3)])
            for m in random.integers(8, 256, size=count)
        ]
        cuts = np.sort(random.permuted(np.tile(np.arange(1, 80), (count, 1)), axis=1)[:, : stages - 1], axis=1)
        layers = np.diff(np.concatenate([np.zeros((count, 1)), cuts, np.full((count, 1), 80)], axis=1), axis=1)
        start = time.perf_counter()
        columns = Columns.of(profiles, shapes)
        middle = time.perf_counter()
        for part in np.array_split(np.arange(count), 100):
            plan_bounds(columns.rows(part), layers[part].astype(float))
        end = time.perf_counter()
        print(f"{stages} stages: columns {count / (middle - start):,.0f}/s, bounds {count / (end - middle):,.0f}/s")


def smallest() -> None:
    """The fewest clusters on which each model fits, with ZeRO 3 and without."""
    for name, published in PAPER.items():
        for levels in ((0, 1, 2, 3), (0, 1, 2)):
            start = time.perf_counter()
            request = planning_request(load_model(name), published + 32, 8, 2048, zero_levels=levels)
            found = smallest_clusters(request, lambda _text: None)
            text = (
                "nothing"
                if found is None
                else f"{found[0]} clusters, {shape_text(found[1])}, cuts {found[1].plan.cuts}"
            )
            print(
                f"{name} (published {published}), ZeRO {levels}: {text}; {time.perf_counter() - start:.1f} s",
                flush=True,
            )


def plan() -> None:
    """Seconds to plan, and the gap."""
    for name in PAPER:
        for clusters in (256, 1024):
            large = name in ("qwen2.5-32b", "llama-2-70b")
            seconds = 100.0 if large else 20.0
            request = planning_request(
                load_model(name), clusters, SEQUENCES * clusters, 2048, seconds=seconds, jobs=os.cpu_count() or 1
            )
            for kind, answer in (("quick", quick_answer(request)), ("full", Search(request).run())):
                best = answer.best
                text = "nothing fits" if best is None else f"{shape_text(best)} {best.seconds:.2f} s"
                gap = "-" if answer.gap is None else f"{100 * answer.gap:.2f} %"
                print(
                    f"{name} on {clusters}, {kind}: {text}, bound {answer.bound_seconds:.2f} s, gap {gap}, "
                    f"{answer.evaluations} evaluations, {answer.seconds:.1f} s",
                    flush=True,
                )


def compare() -> None:
    """The strategies on one plan (the best of the baseline, of RATrain, and one without ZeRO 3), and each on its best."""
    for name in ("baichuan2-13b", "qwen2.5-32b"):
        request = planning_request(load_model(name), 256, 4096, 2048, seconds=40.0, jobs=os.cpu_count() or 1)
        for levels in ((0, 1, 2, 3), (0, 1, 2)):
            found = {}
            for item in ("tuned-1f1b", "ratrain", "ratrain-no-fsr"):
                answer = Search(evolve(request, strategy=strategy(item), zero_levels=levels)).run()
                best = answer.best
                found[item] = best
                text = "nothing fits" if best is None else f"{shape_text(best)} {best.seconds:.2f} s"
                print(f"{name}, ZeRO {levels}, best of {item}: {text}, bound {answer.bound_seconds:.2f} s", flush=True)
            for owner in ("tuned-1f1b", "ratrain"):
                best = found[owner]
                for item in ("baseline-1f1b", "ratrain", "full-save", "zero3") if best else ():
                    named = strategy(item)
                    plan = named.adapted(best.plan)
                    outcome = try_setting(Setting(request.model, plan, named.passes, request.machine), item)
                    assert outcome is not None
                    text = "does not fit" if outcome.step_seconds is None else f"{outcome.step_seconds:.2f} s"
                    print(f"  {name}, on the best plan of {owner}: {item} {text}", flush=True)


def examples() -> None:
    """The plan files of examples/best/."""
    wanted = sys.argv[2:] or list(PAPER)
    for name in wanted:
        for clusters in (256, 1024):
            seconds = 80.0 if name in ("qwen2.5-32b", "llama-2-70b") else 20.0
            request = planning_request(
                load_model(name), clusters, SEQUENCES * clusters, 2048, seconds=seconds, jobs=os.cpu_count() or 1
            )
            answer = Search(request).run()
            if answer.best is None:
                print(f"{name} on {clusters}: nothing fits")
                continue
            path = EXAMPLES / f"{name}-{clusters}.toml"
            write_lines(str(path), plan_file(answer, answer.best, name).splitlines())
            print(
                f"{path.name}: {shape_text(answer.best)} {answer.best.seconds:.2f} s, gap {answer.gap:.2%}, {answer.seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    modes = {"rate": rate, "smallest": smallest, "plan": plan, "compare": compare, "examples": examples}
    modes[sys.argv[1]]()
