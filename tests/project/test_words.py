"""Check docstrings and comments of the product: a verb or a noun first, lines that fit, no private words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ratrain_ir", "passes", "targets", "ratrainc")
FILES = sorted(
    [*(ROOT / "src" / "ratrain").glob("*.py"), *(path for each in FOLDERS for path in (ROOT / each).rglob("*.py"))]
)
OPENERS = re.compile(r"\W*(What|Whether|How|Which|Where|When|Who|It|Those|That|There|They)\b")
"""Words with which a sentence begins that says neither what is done nor what is meant."""
PRIVATE = re.compile(r"\b(so many|there too|as ever)\b")
LONGEST = 120


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """List the docstrings of modules, classes, functions, fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def faults(text: str) -> list[str]:
    """Return what is wrong with the docstrings and comments of a source, each with its line."""
    lines, wrong = text.split("\n"), []
    for each in docstrings(ast.parse(text)):
        opener = OPENERS.match(str(each.value))
        if opener is not None:
            wrong.append(f"{each.lineno}: opens with '{opener[1]}'")
        wrong += [
            f"{number}: {len(lines[number - 1])} columns"
            for number in range(each.lineno, (each.end_lineno or each.lineno) + 1)
            if len(lines[number - 1]) > LONGEST
        ]
        wrong += [f"{each.lineno}: says '{found}'" for found in PRIVATE.findall(str(each.value))]
    wrong += [
        f"{number}: a comment of {len(line)} columns"
        for number, line in enumerate(lines, 1)
        if line.lstrip().startswith("# ") and len(line) > LONGEST
    ]
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_say_what_is_done(path: Path) -> None:
    assert faults(path.read_text()) == []


def test_faults_are_found() -> None:
    assert faults('"""What it is."""\n') == ["1: opens with 'What'"]
    assert faults('def f():\n    """Whether so many fit."""\n') == [
        "2: opens with 'Whether'",
        "2: says 'so many'",
    ]
    assert faults("# " + "a" * 130) == ["1: a comment of 132 columns"]
    assert faults('"""Load the machine."""\nX = 1\n"""Number of tries."""\n') == []
