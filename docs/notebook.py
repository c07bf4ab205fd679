"""The page of the notebook: its cells are run one after the other, and what each shows stands below it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
from pathlib import Path
from pprint import pformat
from typing import Any

from ratrain.api import machine_for
from ratrain.ratrain_ir.module import Module
from ratrain.ratrainc.console.parts import text_of
from ratrain.ratrainc.report.summary_tables import module_parts

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "python-api.ipynb"
COLUMNS = 96
_HEAD = "The page is [a notebook](../examples/python-api.ipynb) that was run; `ratrainc examples DIR` copies it out.\n\n<!-- written by docs/generate.py -->\n"


def run_notebook() -> tuple[str, dict[str, str]]:
    """The page, and its pictures by their names.

    Raises whatever a cell raises.
    """
    space: dict[str, Any] = {}
    parts: list[str] = []
    pictures: dict[str, str] = {}
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(COLUMNS)
    try:
        for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(f"{text}\n" if parts else f"{text}\n\n{_HEAD}")
                continue
            parts.append(f"```python\n{text}\n```\n")
            shown, said = run_cell(text, space)
            if said:
                parts.append(f"```text\n{said.rstrip()}\n```\n")
            if svg := getattr(shown, "_repr_svg_", None):
                name = f"images/notebook-{len(pictures) + 1}.svg"
                pictures[name] = svg()
                parts.append(f"![what the cell shows]({name})\n")
            elif shown is not None:
                parts.append(f"```text\n{_words(shown)}\n```\n")
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return "\n".join(parts), pictures


def _words(shown: object) -> str:
    """What a notebook shows, as text."""
    if isinstance(shown, Module):
        return text_of(module_parts(shown, machine_for(shown, None)))
    return str(shown) if hasattr(shown, "_repr_html_") else pformat(shown, width=COLUMNS)


def run_cell(text: str, space: dict[str, Any]) -> tuple[object, str]:
    """Run a cell as a notebook does: the value of its last line, if that is an expression, and what it printed."""
    body = ast.parse(text).body
    out = io.StringIO()
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), space)  # noqa: S102 - our own notebook
        shown = None if last is None else eval(compile(last, str(NOTEBOOK), "eval"), space)  # noqa: S307
    return shown, out.getvalue()
