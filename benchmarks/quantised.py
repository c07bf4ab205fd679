"""A small LLaMA trained on real text with exact and with block-quantised collectives: how far the losses come apart.

    python benchmarks/quantised.py [--steps 300] [--seed 0] [--data TEXT] [--json]

The model and the plan are those of `ratrainc quickstart` (examples/tiny.json, examples/tiny.toml), and so is the text, the English help
that ships inside every Python. Runs differ in keys of the plan alone: same weights, same data in the same order. The last row is a yardstick:
exact, but for the type in which reduced gradients are added up, so that its losses differ by roundings alone. Deviations are those
of a step's loss from that of the exact run, in percent of it; the last column is of the mean loss over the last tenth of the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from ratrain import api
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.running.examples import example_path
from ratrain.ratrainc.running.training_data import open_data
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import RunSettings
from ratrain.targets.runtime.training.preparation import prepare

EXACT = "exact"
RUNS: dict[str, dict[str, Any]] = {
    EXACT: {},
    "gather int8": {"gather_quantised": "int8-block"},
    "gather int4": {"gather_quantised": "int4-block"},
    "reduce int8": {"reduce_quantised": "int8-block"},
    "gather int8, reduce int8": {"gather_quantised": "int8-block", "reduce_quantised": "int8-block"},
    "gather int4, reduce int8": {"gather_quantised": "int4-block", "reduce_quantised": "int8-block"},
    "exact, grad_shard_dtype = f32": {"grad_shard_dtype": "f32"},
}
SHOWN = (50, 100, 200, 300)
"""Steps whose losses the table has."""


def losses(keys: dict[str, Any], steps: int, seed: int, data: str | None) -> list[float]:
    """The losses of a run."""
    model, plan = api.resolved(str(example_path("tiny.json")), str(example_path("tiny.toml")))
    program = api.emit(api.compile(model, evolve(plan, seed=seed, **keys)))
    stream, _ = open_data(program, DataChoice((data,) if data else ()))
    run = prepare(program, stream, RunSettings(steps=steps), kernel_set("fast"))
    found = [timed.report.loss for timed in run.steps()]
    run.close()
    return found


def deviation(found: float, exact: float) -> float:
    """In percent."""
    return 100 * (found - exact) / exact


def row(name: str, found: Sequence[float], exact: Sequence[float]) -> list[str]:
    """A row of the table."""
    shown = [step for step in SHOWN if step <= len(exact)]
    if name == EXACT:
        return [name, *(f"{exact[step - 1]:.4f}" for step in shown), "-", f"{_last(exact):.4f}"]
    off = [deviation(*pair) for pair in zip(found, exact, strict=True)]
    worst = max(range(len(off)), key=lambda step: abs(off[step]))
    of_last = deviation(_last(found), _last(exact))
    return [
        name,
        *(f"{off[step - 1]:+.3f} %" for step in shown),
        f"{off[worst]:+.3f} % (step {worst + 1})",
        f"{of_last:+.3f} %",
    ]


def _last(found: Sequence[float]) -> float:
    return statistics.fmean(found[-max(1, len(found) // 10) :])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="a text file, read byte by byte")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    shown = [f"step {step}" for step in SHOWN if step <= given.steps]
    titles = ["collectives", *shown, "largest", f"last {max(1, given.steps // 10)} steps"]
    if not given.json:
        print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    found: dict[str, list[float]] = {}
    for name, keys in RUNS.items():
        found[name] = losses(keys, given.steps, given.seed, given.data)
        if not given.json:
            print(f"| {' | '.join(row(name, found[name], found[EXACT]))} |", flush=True)
    if given.json:
        print(json.dumps({"steps": given.steps, "seed": given.seed, "losses": found}))


if __name__ == "__main__":
    main()
