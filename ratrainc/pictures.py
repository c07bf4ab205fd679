"""What pictures are written as: every `--plot` asks here, by the ending of its file."""

from __future__ import annotations

from collections.abc import Container
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = {".png": "png", ".svg": "svg"}
"""What matplotlib calls each ending."""


def picture_kind(path: str, *, drawn_without: Container[str] = ()) -> str:
    """The kind of picture that a file's ending asks for: good to know before the work that is drawn.

    Kinds in `drawn_without` need no matplotlib. Raises `DiagnosticError` RT002 where the ending is another, or matplotlib is missing.
    """
    endings = " or ".join(PICTURES)
    kind = PICTURES.get(Path(path).suffix.lower())
    if kind is None:
        fail("RT002", f"a plot is written as {endings}, not '{path}'", help=f"name a file that ends in {endings}")
    if kind not in drawn_without and find_spec("matplotlib") is None:
        without = [ending for ending, name in PICTURES.items() if name in drawn_without]
        way_out = "pip install 'ratrain[plot]'" + "".join(f", or name a file that ends in {each}" for each in without)
        fail("RT002", f"drawing '{path}' needs matplotlib, which is not installed", help=way_out)
    return kind


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size (inches), which no window shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, path: str) -> None:
    """Write a figure as what the file's ending asks for. Raises `DiagnosticError` RT002 where it cannot be written."""
    data = BytesIO()
    figure.savefig(data, format=picture_kind(path))
    with replacing(path) as stream:
        stream.write(data.getvalue())
