"""Price the type that sums products on an MT-3000: the paper's plan and our best ones, under one peak and under two.

    python benchmarks/accumulate.py [NAME ...]    # llama-2-7b, baichuan2-13b, qwen2.5-32b, llama-2-70b; minutes each

A column is a machine and a plan's `numerics.accumulate`. `mt3000` has one peak for both sums; `mt3000-two-peaks` halves it for sums in
float32. A plan is recompiled for each, as recovery depends on times. All steps are simulated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attrs import evolve, frozen

from ratrain import api
from ratrain.ratrain_ir.config.accumulation import F32_SUMS, HALF_RUNS
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PRICES = (("mt3000", F32_SUMS), ("mt3000-two-peaks", F32_SUMS), ("mt3000-two-peaks", HALF_RUNS))
"""Machines and sums that are compared."""
BEST = "joint-order,allocate-ddr"
"""Passes of the plans in examples/best."""
TOKENS = 2048 * 2048
"""Tokens of a step of every plan on 256 clusters."""


@frozen
class Case:
    """A plan, and how it is compiled."""

    model: str
    plan: str
    strategy: str | None = None
    passes: str | None = None


CASES = {
    "llama-2-7b": (
        *(Case("llama-2-7b", "llama-2-7b-256.toml", name) for name in ("baseline-1f1b", "zero3", "ratrain")),
        Case("llama-2-7b", "best/llama-2-7b-256.toml", passes=BEST),
    ),
    "baichuan2-13b": (Case("baichuan2-13b", "best/baichuan2-13b-256.toml", passes=BEST),),
    "qwen2.5-32b": (Case("qwen2.5-32b", "best/qwen2.5-32b-256.toml", passes=BEST),),
    "llama-2-70b": (Case("llama-2-70b", "best/llama-2-70b-256.toml", passes=BEST),),
}


def step(case: Case, machine: str, accumulate: str) -> str:
    """Simulated seconds of a step, or why there are none."""
    _, plan = api.resolved(case.model, str(EXAMPLES / case.plan))
    try:
        module = api.compile(
            case.model,
            evolve(plan, accumulate=accumulate),
            machine=machine,
            strategy=case.strategy,
            passes=case.passes,
        )
    except DiagnosticError as error:
        return error.diagnostics[0].message
    return f"{api.simulate(api.emit(module)).step_seconds:.2f}"


def main(names: list[str]) -> None:
    print("| plan | passes | " + " | ".join(f"{machine}, {sums}" for machine, sums in PRICES) + " |")
    print("|---|---|" + "---|" * len(PRICES))
    for name in names or CASES:
        for case in CASES[name]:
            cells = [step(case, *price) for price in PRICES]
            print(f"| {case.plan} | {case.strategy or case.passes} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
