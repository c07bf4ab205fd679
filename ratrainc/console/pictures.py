"""Pictures, drawn with matplotlib (extra `plot`): every `--plot` asks here, by the ending of its file."""

from __future__ import annotations

import logging
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import fail, printable
from ratrain.ratrain_ir.support.files import replacing
from ratrain.ratrainc.console.extras import check_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = {".png": "png", ".svg": "svg"}
"""What matplotlib calls each ending."""


def picture_kind(path: str) -> str:
    """The kind of picture that a file's ending asks for: good to know before the work that is drawn.

    Raises `DiagnosticError` RT002 where the ending is another, or matplotlib is missing.
    """
    endings = " or ".join(PICTURES)
    kind = PICTURES.get(Path(path).suffix.lower())
    if kind is None:
        fail("RT002", f"a plot is written as {endings}, not '{path}'", help=f"name a file that ends in {endings}")
    check_installed("matplotlib", "plot", f"drawing '{path}'")
    return kind


def new_figure(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A figure of this size (inches), which no window shows, and its empty axes."""
    # Where the home directory cannot be written it keeps its fonts elsewhere, and says so at length: one picture is drawn all the same.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(printable(title), parse_math=False)
    return figure, axes


def write_figure(figure: Figure, path: str) -> None:
    """Write a figure as what the file's ending asks for; the same figure gives the same bytes.

    Raises `DiagnosticError` RT002 as `picture_kind` does, and where it cannot be written.
    """
    from matplotlib import rc_context

    kind = picture_kind(path)
    data = BytesIO()
    # A salt of its own makes names within an SVG the same each time; texts stay texts.
    with rc_context({"svg.hashsalt": "ratrain", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph"
        )  # a title in letters that the font does not have: boxes stand for them
        figure.savefig(data, format=kind, metadata={"Date": None})
    with replacing(path) as stream:
        stream.write(data.getvalue())
