"""Measure the schedule language: reading, printing, verifying and analyses, in ops a second.

python benchmarks/language.py [--ops 100000] [--xdsl-ops 10000] [--repeat 3] [--json]

The module is one training step of a 70B model in 8 stages, with recovery, releases, workspace and addresses. Where
xDSL can be imported, it does the same with an equivalent module (`xdsl_equivalent.py`) in the same run. Times are CPU
times of this process, the best of `--repeat`, with the garbage collector paused for both.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

sys.path.insert(0, str(Path(__file__).parent))
from processes import handed_back

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis.dependence import ops_as_numbers
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier.communication import check_communication
from ratrain.ratrain_ir.verifier.memory import check_memory
from ratrain.ratrain_ir.verifier.reporter import Reporter
from ratrain.ratrain_ir.verifier.stage_ends import stage_ends
from ratrain.ratrain_ir.verifier.structure import check_structure
from ratrain.ratrain_ir.verifier.symbolic_traces import check_dataflow

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage

STAGES = 8
LAYERS = 80
OPS_PER_MICRO_BATCH = 770
OPS_PER_STEP = 845
"""Ops that come once a step, all stages together: updates, gathers, scalars."""


def schedule(ops: int) -> Module:
    """An allocated module of about this many ops."""
    cuts = tuple(range(LAYERS // STAGES, LAYERS, LAYERS // STAGES))
    plan = Plan(STAGES, 2, cuts, 1, max(1, round((ops - OPS_PER_STEP) / OPS_PER_MICRO_BATCH)), 2048)
    module = lower(load_model("llama-2-70b"), plan)
    return PassManager(FakeTarget()).run(module, "place-1f1b,recompute,allocate-ddr")


def count(module: Module) -> int:
    """Number of ops, releases included and declarations not."""
    return sum(len(stage.ops) for stage in module.stages)


@define
class Stopwatch:
    """Measures calls that do something with a number of ops."""

    ops: int
    repeat: int

    def rate(self, call: Callable[[], object]) -> float:
        """Ops a second, in the best of the repetitions."""
        return self.ops / min(self.seconds(call) for _ in range(self.repeat))

    def seconds(self, call: Callable[[], object]) -> float:
        """CPU seconds of one call; freeing what it returns is not part of it."""
        with paused_gc():
            start = time.process_time()
            result = call()
            seconds = time.process_time() - start
        del result
        return seconds


def verified(module: Module, layer: Callable[[Module, Reporter], None]) -> None:
    """Run one layer of the verifier; nothing may be wrong."""
    diagnostics = Diagnostics()
    layer(module, Reporter(module, diagnostics))
    diagnostics.check()


def _of_all_stages(layer: Callable[[Module, Reporter, Sequence[Stage]], None]) -> Callable[[Module, Reporter], None]:
    return lambda module, report: layer(module, report, module.stages)


def _of_their_ends(module: Module, report: Reporter) -> None:
    ends = [stage_ends(module, stage, report.columns(stage)) for stage in module.stages]
    check_communication(module, report, ends)


def measure(module: Module, repeat: int) -> dict[str, float]:
    """Ops a second of everything, by name."""
    rate = Stopwatch(count(module), repeat).rate
    text = print_module(module)
    difference = first_difference(parse_module(text), module)
    if difference is not None:
        sys.exit(f"what was read differs from what was printed: {difference}")
    layers = {
        "verify: structure": _of_all_stages(check_structure),
        "verify: dataflow": _of_all_stages(check_dataflow),
        "verify: memory": _of_all_stages(check_memory),
        "verify: communication": _of_their_ends,
    }
    return {
        "parse": rate(lambda: parse_module(text)),
        "print": rate(lambda: print_module(module)),
        **{name: rate(partial(verified, module, layer)) for name, layer in layers.items()},
        "lifetimes": rate(lambda: [lifetimes(stage) for stage in module.stages]),
        "dependence graph": rate(lambda: [ops_as_numbers(stage).reduced_waits() for stage in module.stages]),
    }


def xdsl_columns(ops: int, repeat: int) -> dict[str, dict[str, float]]:
    """Rates of xDSL by column and row; none where it cannot be imported."""
    if importlib.util.find_spec("xdsl") is None:
        return {}
    from xdsl_equivalent import FORMS, parsed, printed

    module = schedule(ops)
    stopwatch = Stopwatch(count(module), repeat)
    return {form.title: _xdsl_rates(form, module, stopwatch, parsed, printed) for form in FORMS}


def _xdsl_rates(form: Any, module: Module, stopwatch: Stopwatch, parsed: Any, printed: Any) -> dict[str, float]:
    equivalent = form.convert(module)
    text = printed(equivalent)
    if not parsed(text, form).is_structurally_equivalent(equivalent):
        sys.exit("what xDSL read differs from what it printed")
    return {
        "parse": stopwatch.rate(lambda: parsed(text, form)),
        "print": stopwatch.rate(lambda: printed(equivalent)),
        "verify: structure": stopwatch.rate(equivalent.verify),
    }


def table(ours: dict[str, float], others: dict[str, dict[str, float]]) -> str:
    """All rates, and how many times the others' ours are."""
    lines = [["ops/s", "RATrain", *(cell for title in others for cell in (title, "ratio"))]]
    for name, rate in ours.items():
        lines.append([name, f"{rate:,.0f}"])
        for rates in others.values():
            other = rates.get(name)
            lines[-1] += ["", ""] if other is None else [f"{other:,.0f}", f"{rate / other:.1f}x"]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Speed of the schedule language.")
    parser.add_argument("--ops", type=int, default=100_000, help="size of the module, about")
    parser.add_argument(
        "--xdsl-ops", type=int, default=10_000, help="size of the module for xDSL, about; 0: without xDSL"
    )
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    options = parser.parse_args(arguments)
    with handed_back(options.json) as figures:
        with paused_gc():
            module = schedule(options.ops)
        tensors = sum(len(stage.tensors) for stage in module.stages)
        print(f"Python {platform.python_version()}, {count(module):,} ops, {tensors:,} declarations")
        ours = measure(module, options.repeat)
        others = xdsl_columns(options.xdsl_ops, options.repeat) if options.xdsl_ops else {}
        print(table(ours, others))
        figures |= {"ours": ours, "others": others}


if __name__ == "__main__":
    main()
