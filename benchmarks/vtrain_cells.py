"""What no model of a layer can explain in vTrain's rows of one node.

    python benchmarks/vtrain_cells.py FOLDER

Rows that agree in tensor-parallel ranks, hidden size and micro-batch are a cell: its layers, head and embedding are the same. Of the rows that
`vtrain.py` fits to (no other is looked at), each cell's own times are found by non-negative least squares; the residual says how far rows of
a cell are from one closed form. Then the least mean error of all models in which a layer of more sequences or of a larger hidden size takes
no less, other times as the cells have them: a linear program over the cells.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, nnls

from ratrain.ratrainc.calibration.gpt_rows import GptRow, read_gpt_rows

Cell: TypeAlias = tuple[int, int, int]
"""Tensor-parallel ranks, hidden size, sequences of a micro-batch."""


def cell_of(row: GptRow) -> Cell:
    """The cell that a row belongs to."""
    return row.run.tp, row.run.hidden, row.run.micro_batch


def terms(row: GptRow) -> list[float]:
    """How often an iteration has: a layer, the head, the embedding; once an iteration, a layer's update, its reduction, the head's, messages.

    1F1B over equal stages, of which the last, with the head, is the slowest.
    """
    run = row.run
    layers, micro_batches, stages = run.layers / run.pp, run.micro_batches, run.pp
    others = (run.dp - 1) / run.dp
    messages = (micro_batches + stages - 1) * (stages > 1)
    embeddings = micro_batches if stages == 1 else 1
    return [
        layers * (micro_batches + stages - 1),
        micro_batches,
        embeddings,
        1,
        layers,
        others * layers,
        others,
        messages,
    ]


def least_error(layers: dict[Cell, float], weights: dict[Cell, float]) -> float:
    """The least weighted error of layers' times that never fall with the hidden size or the micro-batch."""
    cells = list(layers)
    place = {cell: index for index, cell in enumerate(cells)}
    rows: list[NDArray[np.float64]] = []
    bounds: list[float] = []
    count = len(cells)
    for index, (peers, hidden, micro_batch) in enumerate(cells):
        for sign in (1.0, -1.0):  # the error is no less than the factor less one, with either sign
            row = np.zeros(2 * count)
            row[index], row[count + index] = sign, -1.0
            rows.append(row)
            bounds.append(sign)
        for larger in ((peers, 2 * hidden, micro_batch), (peers, hidden, 2 * micro_batch)):
            if larger in place:
                row = np.zeros(2 * count)
                row[index], row[place[larger]] = layers[cells[index]], -layers[larger]
                rows.append(row)
                bounds.append(0.0)
    costs = np.concatenate((np.zeros(count), [weights[cell] for cell in cells]))
    return float(linprog(costs, A_ub=np.array(rows), b_ub=bounds).fun)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Print each cell's layer and how far its rows are from one closed form; then the bound."""
    rows = sorted(read_gpt_rows(str(folder / "calibration_single_node.csv"))[::2], key=cell_of)
    layers: dict[Cell, float] = {}
    weights: dict[Cell, float] = {}
    print(f"| peers | hidden | micro-batch | rows | terms | layer | largest residual |\n|{'---|' * 7}")
    for cell, group in groupby(rows, cell_of):
        members = list(group)
        counts = np.array([terms(row) for row in members])
        relative = counts / np.array([row.seconds for row in members])[:, None]
        times, _ = nnls(relative, np.ones(len(members)))
        layers[cell] = float(times[0])
        weights[cell] = float((relative[:, 0] * times[0]).sum() / len(rows))
        off = float(np.abs(relative @ times - 1).max())
        words = " | ".join(map(str, cell))
        print(f"| {words} | {len(members)} | {(times > 0).sum()} | {1e3 * times[0]:.3f} ms | {100 * off:.4f} % |")
    print(f"least mean error where more work takes no less: {100 * least_error(layers, weights):.2f} %")


if __name__ == "__main__":
    main()
