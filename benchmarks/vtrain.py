"""Measured A100 iterations (vTrain's ground truth) against the cost model on an A100's machine file.

    python benchmarks/vtrain.py FOLDER [-o a100-fitted.toml] [--json]

FOLDER holds calibration_single_node.csv, up to 8 GPUs of one node, and may hold calibration_multi_node.csv, 64 to 512
GPUs: both with and without tensor parallelism, Megatron-DeepSpeed. Every second row is held out; the errors are theirs,
by constants alone and with the times that fitted rows give layers of their shape. Between nodes, memory and all links
but the latency of the inner one are as their data sheets say. -o writes the machine that the single-node rows give.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))
from processes import handed_back

from ratrain.ratrainc.calibration.fitting import OUTLIER, fitted
from ratrain.ratrainc.calibration.gpt_layers import measured_layers
from ratrain.ratrainc.calibration.gpt_rows import GptRow, predicted_gpt, read_gpt_rows
from ratrain.ratrainc.validation.errors import Errors
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.writer import write_machine

MACHINE = Path(__file__).resolve().parent / "published" / "machines" / "a100-80gb-8-800gbps.toml"
ONE_NODE = (
    "gemm_efficiency",
    "gemm_half_extent",
    "ddr_bandwidth",
    "head_efficiency",
    "launch",
    "dispatch",
    "node.bandwidth",
    "node.latency",
)
MANY_NODES = ("gemm_efficiency", "gemm_half_extent", "node.latency")
HOLD_OUT = 2


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", help="Write the machine file fitted to the rows of one node.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, the text on stderr.")
def main(folder: Path, output: str | None, as_json: bool) -> None:
    """Fit an A100 and print the error of rows that were not fitted."""
    start, one_node = load_machine(str(MACHINE)), folder / "calibration_single_node.csv"
    if not one_node.exists():
        raise click.BadParameter(f"it has no {one_node.name}", param_hint="FOLDER")
    # The larger iterations of one node would need more than an A100's peak for their products if layers were
    # recomputed, and their activations fit without. The source's own default is to recompute, and without it the
    # multi-node rows would not fit.
    rows = [evolve(row, run=evolve(row.run, recompute=False)) for row in read_gpt_rows(str(one_node))]
    with handed_back(as_json) as figures:
        report(rows, start, ("gemm_efficiency",))
        machine, figures["one node"] = report(rows, start, ONE_NODE)
        many = folder / "calibration_multi_node.csv"
        if many.exists():
            _, figures["many nodes"] = report(read_gpt_rows(str(many)), start, MANY_NODES)
        if output is not None:
            write_machine(machine, output)
            print(f"wrote {output}")


def report(rows: Sequence[GptRow], start: Machine, names: Sequence[str]) -> tuple[Machine, dict[str, Any]]:
    """Fit constants to every other row; print the errors of the rows between them.

    Return the machine with these constants, and the errors of the rows held out: by constants alone (`held_out`) and
    with layers' own times (`layers`).
    """
    measured = np.array([row.seconds for row in rows])
    held = np.arange(1, len(rows) + 1) % HOLD_OUT == 0
    kept = [row for row, each in zip(rows, held, strict=True) if not each]
    machine = fitted(
        start,
        names,
        lambda tried: predicted_gpt(kept, tried),
        measured[~held],
        source=f"fitted to {len(kept)} rows",
        outlier=OUTLIER,
    )
    print(", ".join(f"{name} {start[name]:.4g} -> {machine[name]:.4g}" for name in names))
    signed = predicted_gpt(rows, machine) / measured - 1
    print(f"  fitted: {_words(Errors.of(signed[~held]))}")
    held_out = Errors.of(signed[held])
    print(f"  held out: {_words(held_out)}")
    for key in ("tp", "hidden", "micro_batch", "pp", "dp"):
        values = np.array([getattr(row.run, key) for row in rows])
        for value in np.unique(values[held]):
            of_value = signed[held & (values == value)]
            print(f"    {key} {value}: {_words(Errors.of(of_value))}, on average {100 * of_value.mean():+.1f} %")
    layers = {each.shape: each.factor for each in measured_layers(kept, machine)}
    signed = predicted_gpt(rows, machine, layers) / measured - 1
    known = np.array([row.run.shape in layers for row in rows])
    of_layers = Errors.of(signed[held])
    print(f"  held out, with layers' own times: {_words(of_layers)}; of {(held & known).sum()} the layer was fitted")
    return machine, {"held_out": held_out.to_json(), "layers": of_layers.to_json()}


def _words(of: Errors) -> str:
    return f"{of.count} rows, error mean {100 * of.mean:.2f} %, median {100 * of.median:.2f} %, largest {100 * of.largest:.2f} %"


if __name__ == "__main__":
    main()
