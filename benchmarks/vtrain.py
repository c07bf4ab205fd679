"""Measured A100 iterations (vTrain's ground truth) against the cost model on an A100's machine file.

    python benchmarks/vtrain.py FOLDER [-o a100-fitted.toml]

FOLDER holds calibration_single_node.csv: 8 GPUs of one node, Megatron-DeepSpeed, every layer recomputed. Rows with tensor parallelism
are left out, and so is everything that spans nodes. Efficiency depends on shape through `gemm_half_extent`, `head_efficiency`,
memory traffic and the host's dispatch of kernels. Every fifth row is held out; the error is theirs.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from ratrain.ratrainc.calibration.fitting import errors, fitted
from ratrain.ratrainc.calibration.gpt_rows import predicted_gpt, read_gpt_rows
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.writer import write_machine

MACHINE = Path(__file__).resolve().parent / "a100.toml"
NAMES = (
    "gemm_efficiency",
    "gemm_half_extent",
    "head_efficiency",
    "ddr_bandwidth",
    "launch",
    "dispatch",
    "link_bandwidth",
    "link_latency",
)
HOLD_OUT = 5


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", help="Write the fitted machine file.")
def main(folder: Path, output: str | None) -> None:
    """Fit an A100 and print the error of rows that were not fitted."""
    table = read_gpt_rows(str(folder / "calibration_single_node.csv"))
    rows = table.rows
    print(f"{len(rows)} rows; left out: {table.tensor_parallel} with tensor parallelism, and all that span nodes")
    measured = np.array([row.seconds for row in rows])
    held = np.arange(1, len(rows) + 1) % HOLD_OUT == 0
    kept = [row for row, each in zip(rows, held, strict=True) if not each]
    start = load_machine(str(MACHINE))
    for names in (("gemm_efficiency",), NAMES):
        machine = fitted(
            start,
            names,
            lambda tried: predicted_gpt(kept, tried),
            measured[~held],
            source=f"fitted to {len(kept)} rows",
        )
        print(", ".join(f"{name} {start[name]:.4g} -> {machine[name]:.4g}" for name in names))
        predicted = predicted_gpt(rows, machine)
        for what, chosen in (("fitted", ~held), ("held out", held)):
            summary = errors(predicted[chosen], measured[chosen])
            assert summary is not None
            print(
                f"  {what}: {summary.count} rows, error mean {100 * summary.mean:.2f} %, median {100 * summary.median:.2f} %,"
                f" largest {100 * summary.largest:.2f} %"
            )
    ratio = predicted / measured - 1
    for key in ("hidden", "micro_batch", "pp", "dp"):
        values = np.array([getattr(row.run, key) for row in rows])
        parts = (f"{v}: {100 * ratio[held & (values == v)].mean():+.1f} %" for v in np.unique(values[held]))
        print(f"  mean error of held-out rows by {key}: {', '.join(parts)}")
    if output is not None:
        write_machine(machine, output)
        print(f"wrote {output}")


if __name__ == "__main__":
    main()
