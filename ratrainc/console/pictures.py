"""Pictures: their kind by file ending, and those drawn with matplotlib (extra `plot`), as all `--plot` options do."""

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
"""Matplotlib's name of the format of each file ending."""
DRAWN = ".svg"
"""Ending of pictures that are drawn without matplotlib."""


def check_ending(path: str, what: str, *known: str) -> None:
    """Raise `DiagnosticError` RT002 for a path of another ending than these; call it before the work that is drawn."""
    if Path(path).suffix.lower() not in known:
        endings = " or ".join(known)
        fail("RT002", f"a {what} is written as {endings}, not '{path}'", help=f"name a file that ends in {endings}")


def picture_kind(path: str) -> str:
    """Return the format that a file's ending asks for; call it before the work that is drawn.

    Raises `DiagnosticError` RT002 for another ending, or if matplotlib is missing.
    """
    check_ending(path, "plot", *PICTURES)
    kind = PICTURES[Path(path).suffix.lower()]
    check_installed("matplotlib", "plot", f"drawing '{path}'")
    return kind


def new_figure(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """Make a figure of this size in inches, without a window, and its empty axes."""
    figure = blank_figure(width, height)
    axes = figure.add_subplot()
    axes.set_title(printable(title), parse_math=False)
    return figure, axes


def blank_figure(width: float, height: float) -> Figure:
    """Make a figure of this size in inches, without a window and without axes."""
    # If the home directory cannot be written, matplotlib keeps its fonts elsewhere and prints a long warning, which is
    # of no use for one picture.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, path: str) -> None:
    """Write a figure in the format of the file's ending; the same figure gives the same bytes.

    Raises `DiagnosticError` RT002 as `picture_kind` does, and if the file cannot be written.
    """
    from matplotlib import rc_context

    kind = picture_kind(path)
    data = BytesIO()
    # A fixed salt makes names within an SVG the same each time; text stays text and does not become paths.
    with rc_context({"svg.hashsalt": "ratrain", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph"
        )  # a title in letters that the font does not have: boxes stand for them
        figure.savefig(data, format=kind, metadata={"Date": None})
    with replacing(path) as stream:
        stream.write(data.getvalue())
