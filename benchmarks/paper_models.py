"""The four models of the paper at their published smallest scale: what each stage holds, and what was chosen for it.

`python benchmarks/paper_models.py [--all-stages]` compiles each with the default strategy and prints, per stage: peak live bytes, arena,
their ratio, the seconds allocation took, and what recomputation keeps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain import api
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, strategy

if TYPE_CHECKING:
    from ratrain.passes.manager import PassRun
    from ratrain.ratrain_ir.module import Module

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CASES = (
    ("llama-2-7b", "llama-2-7b-8.toml", "19.57 GB (published)"),
    ("baichuan2-13b", "baichuan2-13b-16.toml", "19.06 GB (published)"),
    ("qwen2.5-32b", "qwen2.5-32b-64.toml", "not published"),
    ("llama-2-70b", "llama-2-70b-96.toml", "not published"),
)


def compiled(model: str, plan: str) -> tuple[Module, list[PassRun], float]:
    """The module under the default strategy, what its passes did, and the seconds of it all, verification included."""
    start = time.perf_counter()
    module = api.lowered(model, str(EXAMPLES / plan))
    runs = api.run_passes(module, strategy(DEFAULT_STRATEGY).passes)
    return module, runs, time.perf_counter() - start


def main() -> None:
    every = "--all-stages" in sys.argv[1:]
    for model, plan, published in CASES:
        module, runs, seconds = compiled(model, plan)
        report(module, runs, seconds, published, every=every)


def report(module: Module, runs: list[PassRun], seconds: float, published: str, *, every: bool) -> None:
    by_name = {run.text.partition("{")[0]: run for run in runs}
    allocation, recompute = by_name["allocate-ddr"], by_name["joint-order"]
    clusters = module.plan.clusters
    print(f"\n{module.name}: {clusters} clusters, P = {module.plan.pp}, cuts {list(module.plan.cuts)}")
    print(f"compiled and verified in {seconds:.1f} s, of which allocation {allocation.seconds:.2f} s; peak {published}")
    print("| stage | peak live | arena | ratio | GB | recomputation |")
    print("|---|---|---|---|---|---|")
    last = len(module.stages) - 1
    for stage in module.stages:
        if not every and 3 < stage.index < last - 1:
            continue
        peak, arena = lifetimes(stage).peak_bytes, stage.arena_bytes
        kept = recompute.statistics[f"stage {stage.index}"]
        print(f"| @{stage.index} | {peak} | {arena} | {arena / peak:.5f} | {arena / 1e9:.2f} | {kept} |")


if __name__ == "__main__":
    main()
