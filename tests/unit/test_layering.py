"""Imports between the project's packages run one way only: grammar <- ratrain_ir <- passes <- targets <- ratrainc.

Read from the syntax trees, so imports inside functions and `TYPE_CHECKING` blocks count, and so do the literal names
given to `importlib.import_module` and `__import__`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("grammar", "ratrain_ir", "passes", "targets", "ratrainc")  # each may import itself and those before it
FORBIDDEN = (("targets.runtime", "targets.mt3000"),)  # the runtime executes programs of any target
OUTSIDE = ("tests", "benchmarks")  # not installed: no package may need them


def _literal_start(node: ast.expr) -> str | None:
    """Return the text of a string literal, or that before the first `{` of an f-string."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of all a module imports; `package` is what its relative imports start from.

    `from a import b` yields `a.b`: whether b is a module or a name in a makes no difference to the layers.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
            name = _literal_start(node.args[0]) if called in {"import_module", "__import__"} else None
            if name is not None:
                yield node.lineno, resolve_name(name, package) if name.startswith(".") else name


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return one line for each import in `source`, the text of `module`, that runs the wrong way."""
    package = module if is_package else module.rpartition(".")[0]
    layer = LAYERS.index(module.partition(".")[0])
    found = []
    for line, name in _imports(ast.parse(source), package):
        top = name.partition(".")[0]
        upwards = top in LAYERS and LAYERS.index(top) > layer
        forbidden = any(_within(module, importer) and _within(name, imported) for importer, imported in FORBIDDEN)
        if upwards or forbidden or top in OUTSIDE:
            found.append(f"{module}:{line} imports {name}")
    return found


def _modules() -> Iterator[tuple[Path, str]]:
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield path, ".".join(parts[:-1] if path.stem == "__init__" else parts)


def test_imports_run_one_way() -> None:
    seen = dict.fromkeys(LAYERS, 0)
    found: list[str] = []
    for path, module in _modules():
        seen[module.partition(".")[0]] += 1
        found += violations(path.read_text(encoding="utf-8"), module, is_package=path.stem == "__init__")
    assert all(seen.values()), f"a package has no modules: {seen}"
    assert not found, "\n".join(found)


def test_every_installed_package_has_its_layer() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(LAYERS)


BAD = {
    "plain": ("passes.lifetime", "import targets.program"),
    "from": ("ratrain_ir.module", "from passes.manager import run"),
    "package": ("ratrain_ir.module", "import ratrainc"),
    "renamed": ("grammar.text", "import numpy, ratrain_ir.ops as ops"),
    "in a function": ("passes.lifetime", "def f():\n    def g():\n        from targets import program"),
    "for types only": ("ratrain_ir.ops", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import passes"),
    "in a handler": ("targets.program", "try:\n    pass\nexcept ValueError:\n    import ratrainc.cli"),
    "import_module": ("passes.lifetime", "import importlib\nimportlib.import_module('targets.simulator')"),
    "bare import_module": ("passes.lifetime", "from importlib import import_module\nimport_module('targets')"),
    "formatted": ("ratrain_ir.plug", "import importlib\nimportlib.import_module(f'passes.{name}')"),
    "__import__": ("grammar.text", "__import__('passes')"),
    "runtime to machine": ("targets.runtime.arena", "import targets.mt3000.cost"),
    "runtime to machine, from": ("targets.runtime.arena", "from targets import mt3000"),
    "runtime to machine, relative": ("targets.runtime.arena", "from ..mt3000 import cost"),
    "runtime to machine, deeper": ("targets.runtime.kernels.fast", "from ...mt3000.cost import seconds"),
    "runtime to machine, by name": (
        "targets.runtime.arena",
        "import importlib\nimport_module('..mt3000', __package__)",
    ),
    "tests": ("ratrain_ir.testing.strategies", "from tests.conftest import Golden"),
}


@pytest.mark.parametrize(("module", "source"), BAD.values(), ids=BAD.keys())
def test_a_wrong_import_is_caught(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


def test_a_wrong_relative_import_of_a_package_is_caught() -> None:
    assert violations("from ..mt3000 import cost", "targets.runtime", is_package=True)
    assert not violations("from .mt3000 import cost", "targets.runtime", is_package=True)


def test_all_wrong_imports_of_a_module_are_named_with_their_lines() -> None:
    source = "import numpy\nimport targets\nimport ratrain_ir\nfrom ratrainc import cli\n"
    assert violations(source, "passes.x") == ["passes.x:2 imports targets", "passes.x:4 imports ratrainc.cli"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ratrainc.cli", "import grammar, ratrain_ir, passes.lifetime, targets.mt3000.cost, targets.runtime"),
        ("passes.lifetime", "from ratrain_ir.analysis import live\nfrom passes import manager\nfrom . import manager"),
        ("targets.mt3000.cost", "from targets.runtime import arena\nfrom ..program import Program"),
        ("targets.runtime.arena", "from . import interpreter\nfrom ..program import Program\nimport targets.simulator"),
        ("ratrain_ir.ops", "import passes_of_others\nimport numpy.testing\nprint('import targets')  # import ratrainc"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert violations(source, module) == []
