"""Measured iterations of GPT models as CSV, with the columns of vTrain's ground truth.

Columns: gpus, global_batch, micro_batch (sequences), hidden, heads, layers, seq, tp, dp, pp, iter_ms (milliseconds).
Optional: source_row, and recompute (1: every layer is recomputed, as in tables without this column; 0: none is).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Location, fail, nearest
from ratrain.ratrainc.calibration.gpt_iteration import GptRun, GptTimes
from ratrain.ratrainc.validation.measured_tables import TableLine, read_table

if TYPE_CHECKING:
    from ratrain.ratrainc.calibration.gpt_block import BlockShape
    from ratrain.ratrainc.validation.errors import Seconds
    from ratrain.targets.machine.machine import Machine

_COUNTS = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp")
_MEASURE = "iter_ms"
_NUMBER = "source_row"
_RECOMPUTE = "recompute"
_OPTIONAL = (_NUMBER, _RECOMPUTE)
_MOST_ERRORS = 100
_MOST = 1 << 30


@frozen
class GptRow:
    """A measured iteration."""

    run: GptRun
    seconds: float
    number: int
    """row number in the table's source, or its line"""


def is_gpt_header(header: Sequence[str]) -> bool:
    """Tell whether a header is that of a table of GPT iterations."""
    return _MEASURE in header


def read_gpt_rows(path: str) -> list[GptRow]:
    """Read the rows of a table of GPT iterations.

    Raises `DiagnosticError` RT002, RT004 and RT005 with the line and field of every error.
    """
    lines = read_table(path, "table of measured iterations")
    head = lines[0]
    header = head.cells
    for index, name in enumerate(header):
        if name not in (*_COUNTS, _MEASURE, *_OPTIONAL):
            place, help_text = head.place_of(index), nearest(name, (*_COUNTS, *_OPTIONAL))
            fail("RT004", f"there is no column '{name}'", place, help=help_text, source=head.text)
    for name in (*_COUNTS, _MEASURE):
        if header.count(name) != 1:
            fail("RT002", f"the header needs the column '{name}' once", head.place, source=head.text)
    diagnostics = Diagnostics()
    rows: list[GptRow] = []
    for line in lines[1:]:
        if len(diagnostics.items) >= _MOST_ERRORS:
            break
        values = _values(line, header, diagnostics)
        if values is not None:
            rows.append(_row(values, line.number))
    diagnostics.check()
    if not rows:
        fail("RT002", "the table has no rows", Location(path, 1))
    return rows


def _values(line: TableLine, header: Sequence[str], diagnostics: Diagnostics) -> dict[str, float] | None:
    """Return the numbers of a line; None after adding its errors to the diagnostics."""
    if len(line.cells) != len(header):
        text = f"expected {len(header)} fields as in the header, got {len(line.cells)}"
        diagnostics.error("RT002", text, line.place, source=line.text)
        return None
    values: dict[str, float] = {}
    for index, (name, cell) in enumerate(zip(header, line.cells, strict=True)):
        least = 0 if name in (*_OPTIONAL, _MEASURE) else 1
        most = 1 if name == _RECOMPUTE else _MOST
        try:
            value = float(cell) if name == _MEASURE else int(cell[:20])
        except ValueError:
            value = -1
        if not least <= value <= most or (name == _MEASURE and value == 0):
            what = "a positive number" if name == _MEASURE else f"a whole number from {least}"
            what = "0 or 1" if name == _RECOMPUTE else what
            text = f"{name} is {what}, got '{cell[:40]}'"
            diagnostics.error("RT005", text, line.place_of(index), source=line.text)
            return None
        values[name] = value
    batch, replicas = values["global_batch"], values["dp"] * values["micro_batch"]
    if values["gpus"] != values["tp"] * values["dp"] * values["pp"]:
        diagnostics.error("RT005", "gpus is not tp * dp * pp", line.place, source=line.text)
    elif batch % replicas or values["layers"] % values["pp"] or values["hidden"] % values["heads"]:
        text = "the batch, the layers or the heads do not divide evenly"
        diagnostics.error("RT005", text, line.place, source=line.text)
    elif values["heads"] % values["tp"]:
        text = f"{values['tp']:.0f} tensor-parallel ranks do not share out {values['heads']:.0f} heads evenly"
        diagnostics.error("RT005", text, line.place, source=line.text)
    else:
        return values
    return None


def _row(values: dict[str, float], line: int) -> GptRow:
    count = {name: int(values[name]) for name in _COUNTS}
    run = GptRun(
        hidden=count["hidden"],
        heads=count["heads"],
        layers=count["layers"],
        seq_len=count["seq"],
        tp=count["tp"],
        pp=count["pp"],
        dp=count["dp"],
        micro_batch=count["micro_batch"],
        micro_batches=count["global_batch"] // (count["dp"] * count["micro_batch"]),
        recompute=bool(values.get(_RECOMPUTE, 1)),
    )
    return GptRow(run, values[_MEASURE] / 1e3, int(values.get(_NUMBER, line)))


def predicted_gpt(
    rows: Sequence[GptRow], machine: Machine, factors: Mapping[BlockShape, float] | None = None
) -> Seconds:
    """Predict the seconds of every row on a machine; `factors` scale layers by their shape."""
    times = GptTimes(machine, factors)
    return np.array([times.iteration(row.run) for row in rows])
