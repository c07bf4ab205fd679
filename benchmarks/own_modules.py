"""The allocator on our own modules: each stage's arena against the bytes that live at once, for all placements and what else changes lifetimes.

    python benchmarks/own_modules.py                                  LLaMA-2-7B, 8 stages, 64 micro-batches
    python benchmarks/own_modules.py --stages 4 --micro-batches 16

The bound is the largest number of bytes that live at once, with those that are kept a little longer so that no engine waits for bytes that
another one still works on, and what holes in lives add (`passes/memory/allocation/cliques.py`): no placement of these lifetimes is lower. The
ratio is that of the stage where it is worst. The allocator goes on until a thousandth above the bound, or until its methods have all been tried; as
all of these fit the machine, it does not search beyond.
CPU seconds are of all passes.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.choices.strategies import strategy

RATIO = re.compile(r"ratio ([0-9.]+), (.*), [0-9.]+ s$")
ROOT = Path(__file__).resolve().parents[1]
USUAL = "joint-order,allocate-ddr"


@frozen
class Case:
    """A module: what its plan says beside the usual, and its passes."""

    name: str
    passes: str = USUAL
    parallel: str = ""
    batch: str = ""
    state: str = "zero = 1"
    dp: int = 2
    machine: str = "h100-node"


def plan_text(case: Case, stages: int, micro_batches: int) -> str:
    """The plan's file."""
    return f"""
[parallel]
pp = {stages}
dp = {case.dp}
{case.parallel}
[batch]
micro_batch_size = 1
micro_batches = {micro_batches}
seq_len = 2048
{case.batch}
[state]
{case.state}
"""


def cases() -> Iterator[Case]:
    """All placements; then what else makes lifetimes of its own."""
    for name in SCHEDULES:
        vee = name in ("zb-v", "v-half", "v-min", "dualpipe-v")
        chunks = "chunks = 2\n" if vee or name in ("interleaved", "breadth-first") else ""
        slices = "slices = [512, 512, 512, 512]" if name == "seq1f1b" else ""
        passes = f"place-schedule{{kind={name}}},{USUAL}"
        yield Case(name, passes, chunks + ('layout = "vee"' if vee else ""), slices)
    yield Case("1f1b, baseline", strategy("baseline-1f1b").passes)
    yield Case("1f1b, all saved", "recompute{policy=none},allocate-ddr")
    yield Case("1f1b, all recovered", "joint-order{policy=full},allocate-ddr")
    host = str(ROOT / "examples" / "h200-host.toml")
    stored = "recompute{policy=none store=host},allocate-ddr"
    yield Case("1f1b, stored on the host", stored, machine=host)
    offloaded = "place-1f1b,offload-state{home=host},joint-order,allocate-ddr"
    yield Case("1f1b, state on the host", offloaded, machine=host)
    yield Case("1f1b, stored at a peer", "recompute{policy=none store=peer},allocate-ddr")
    yield Case("1f1b, 2 tensor-parallel ranks", f"overlap-tensor,{USUAL}", "tp = 2")
    yield Case("1f1b, ZeRO 3", strategy("zero3").passes, state='zero = 3\nreduce = "each-micro-batch"', dp=4)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=64)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    chosen = parser.parse_args(arguments)
    model = load_model(chosen.model)
    print(f"{'module':24} {'tensors':>8} {'worst stage':>11} {'ratio':>8} {'CPU s':>6}  method")
    for case in cases():
        if chosen.only not in case.name:
            continue
        cpu = time.process_time()
        module = api.lowered(
            model, parse_plan(plan_text(case, chosen.stages, chosen.micro_batches), file=case.name, model=model)
        )
        runs = api.run_passes(module, case.passes, machine=case.machine)
        found = [RATIO.search(text) for key, text in runs[-1].statistics.items() if re.fullmatch(r"stage \d+", key)]
        stages = [(float(match[1]), number, match[2]) for number, match in enumerate(found) if match]
        ratio, number, method = max(stages)
        tensors = len(module.stages[number].tensors)
        seconds = time.process_time() - cpu
        print(f"{case.name:24} {tensors:8} {number:11} {ratio:8.4f} {seconds:6.1f}  {method}", flush=True)


if __name__ == "__main__":
    main()
