"""A plan through every strategy, verified after each pass: seconds per pass, simulated step, exposed tail.

`python benchmarks/strategies.py [MODEL PLAN.toml]`; without arguments LLaMA-2-70B on 96 clusters (48 uneven stages, 2 replicas, ZeRO 2).
Seconds of a pass are its own; what verification after each pass takes is the rest of the strategy's total. A strategy that does not fit
is shown with what it lacks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ratrain import api
from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrainc.choices.strategies import STRATEGIES, Strategy
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.mt3000.mt3000_target import Mt3000Target

DEFAULT = ("llama-2-70b", str(Path(__file__).resolve().parent.parent / "examples" / "llama-2-70b-96.toml"))


def row(item: Strategy, model: str, plan: str) -> str:
    """One line of the table."""
    config, resolved = api.resolved(model, plan)
    target = Mt3000Target(load_machine(None))
    manager = PassManager(target, verify_each=True)
    start = time.perf_counter()
    with paused_gc():
        adapted, pipeline = item.applied(resolved, config, target.machine)
        module = lower(config, adapted)
        try:
            manager.run(module, pipeline)
        except DiagnosticError as error:
            outcome = f"{error.diagnostics[0].message} | - | -"
        else:
            figures = api.simulate(api.emit(module))
            tail = max(stage.exposed_tail_seconds for stage in figures.stages)
            ops = sum(len(stage.ops) for stage in module.stages)
            outcome = f"{ops:,} ops | {figures.step_seconds:.2f} | {tail:.2f}"
    total = time.perf_counter() - start
    passes = ", ".join(f"{run.text.partition('{')[0]} {run.seconds:.1f}" for run in manager.runs)
    return f"| {item.name} | {outcome} | {total:.0f} | {passes} |"


def main() -> None:
    model, plan = sys.argv[1:3] if len(sys.argv) > 2 else DEFAULT
    print(f"{model}, {Path(plan).name}; verified after each pass; step and exposed tail are simulated")
    print("| strategy | module | step s | exposed tail s | seconds in all | seconds per pass |")
    print("|---|---|---|---|---|---|")
    peers = api.resolved(model, plan)[1].tp > 1
    for item in (item for item in STRATEGIES if peers or not item.needs_tensor_ranks):
        print(row(item, model, plan), flush=True)


if __name__ == "__main__":
    main()
