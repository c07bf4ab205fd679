"""Imports between the project's packages run one way only: grammar <- ratrain_ir <- passes <- targets <- ratrainc.

Read from the syntax trees, so imports inside functions and `TYPE_CHECKING` blocks count, and so do the literal names
given to `importlib.import_module` and `__import__`.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Container, Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import networkx as nx
import pytest

from tests.project.package_modules import SOURCE, all_modules

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("grammar", "ratrain_ir", "passes", "targets", "ratrainc")  # each may import itself and those before it
FORBIDDEN = (
    *(  # the MT-3000 is one target of several: what all share knows it by name alone
        (f"ratrain.{name}", "ratrain.targets.mt3000")
        for name in (
            *(
                f"targets.{room}"
                for room in ("program", "codegen", "machine", "simulator", "runtime", "verifier", "target")
            ),
            "ratrainc",
            "api",
        )
    ),
    # what moves the bytes of ranks is behind a protocol
    ("ratrain.targets.runtime", "ratrain.targets.pytorch"),
    ("ratrain.targets.runtime.ranks", "ratrain.targets.runtime.mpi"),
)
ONLY_IN = {"torch": "ratrain.targets.pytorch", "mpi4py": "ratrain.targets.runtime.mpi"}
"""Packages that move the bytes of ranks, and the only package here that imports each; what the engine asks of both is its own protocol."""
MAY_ASK = {"mpi4py": ("ratrain.ratrainc.facts.machine_facts",)}
"""And who may besides, only to say whether it is there."""
OUTSIDE = ("tests", "benchmarks", "docs", *LAYERS)  # not installed, or not by this name: no package may need them


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


def _is_anothers(module: str, name: str) -> bool:
    """Whether a library is imported that only one package here may."""
    library = name.partition(".")[0]
    return library in ONLY_IN and not _within(module, ONLY_IN[library]) and module not in MAY_ASK.get(library, ())


def _layer(module: str) -> int:
    """Where a module of the package stands: `ratrain.passes.memory.lifetime` by the word after the dot; the API is the driver's."""
    name = module.split(".")[1]
    return LAYERS.index("ratrainc" if name in {"api", "__main__"} else name)


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return one line for each import in `source`, the text of `module`, that runs the wrong way."""
    package = module if is_package else module.rpartition(".")[0]
    layer = _layer(module)
    found = []
    for line, name in _imports(ast.parse(source), package):
        upwards = name.startswith("ratrain.") and _layer(name) > layer
        forbidden = any(_within(module, importer) and _within(name, imported) for importer, imported in FORBIDDEN)
        if upwards or forbidden or name.partition(".")[0] in OUTSIDE or _is_anothers(module, name):
            found.append(f"{module}:{line} imports {name}")
    return found


def test_imports_run_one_way() -> None:
    seen = dict.fromkeys(LAYERS, 0)
    found: list[str] = []
    for path, module in all_modules():
        seen[LAYERS[_layer(module)]] += 1
        found += violations(path.read_text(encoding="utf-8"), module, is_package=path.stem == "__init__")
    assert all(seen.values()), f"a package has no modules: {seen}"
    assert not found, "\n".join(found)


def test_no_modules_need_each_other() -> None:
    """Not even for their types: a circle of modules can only be read as one."""
    needs = nx.DiGraph(_imported())
    circles = [sorted(circle) for circle in nx.strongly_connected_components(needs) if len(circle) > 1]
    assert not circles


MOST_FILES = 30
"""Python files that a folder may hold: more than one reads through."""
ENTRY = "ratrain.__main__"
"""The way in, which nobody imports: it stands in the room of the API and starts the command line above it."""


@cache
def _imported() -> frozenset[tuple[str, str]]:
    """Return the pairs (module, module that it imports) of the package."""
    found = set()
    modules = {module: path for path, module in all_modules()}
    for module, path in modules.items():
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        for _, name in _imports(ast.parse(path.read_text(encoding="utf-8")), package):
            imported = _module_of(name, modules)
            if imported not in (None, module):
                found.add((module, imported))
    return frozenset(found)


def _rooms() -> dict[str, str]:
    """The folder of each module; that of a package is itself."""
    return {
        module: module if path.stem == "__init__" or module == ENTRY else module.rpartition(".")[0]
        for path, module in all_modules()
    }


def test_no_folders_need_each_other() -> None:
    rooms = _rooms()
    needs = nx.DiGraph((rooms[a], rooms[b]) for a, b in _imported() if rooms[a] != rooms[b])
    circles = [sorted(circle) for circle in nx.strongly_connected_components(needs) if len(circle) > 1]
    assert not circles


def test_no_folder_is_crowded() -> None:
    files = Counter(path.parent for path, _ in all_modules())
    assert not {str(folder): count for folder, count in files.items() if count > MOST_FILES}


WITHOUT_TORCH = {
    "ratrain.targets.pytorch.availability",
    "ratrain.targets.pytorch.cuda_libraries",
    "ratrain.targets.pytorch.ranks.channel_groups",
}
"""Small files that are asked, or tested, where PyTorch is not installed; the files that they serve import it."""


def test_no_file_is_a_part_of_another() -> None:
    """What has one importer and few lines belongs into it, unless it is loaded by name."""
    importers: dict[str, set[str]] = {}
    for importer, imported in _imported():
        importers.setdefault(imported, set()).add(importer)
    small = {m for path, m in all_modules() if path.stem != "__init__" and len(path.read_text().splitlines()) < 40}
    assert {module for module in small if len(importers.get(module, ())) == 1} - WITHOUT_TORCH == set()


def _module_of(name: str, modules: Container[str]) -> str | None:
    """The module that a name is, or stands in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def test_every_folder_of_the_package_is_a_link_and_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    sources = project["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]
    links = {path.name: path.readlink() for path in (SOURCE / "ratrain").iterdir() if path.is_symlink()}
    assert links == {name: Path("../..") / name for name in LAYERS}
    examples = {"examples": "ratrain/ratrainc/examples"}
    assert sources == {"src/ratrain": "ratrain"} | {name: f"ratrain/{name}" for name in links} | examples


BAD = {
    "plain": ("ratrain.passes.memory.lifetime", "import ratrain.targets.program.program"),
    "from": ("ratrain.ratrain_ir.module", "from ratrain.passes.manager import run"),
    "package": ("ratrain.ratrain_ir.module", "import ratrain.ratrainc"),
    "renamed": ("ratrain.grammar.text", "import numpy, ratrain.ratrain_ir.ops.base as ops"),
    "in a function": (
        "ratrain.passes.memory.lifetime",
        "def f():\n    def g():\n        from ratrain.targets import program",
    ),
    "for types only": (
        "ratrain.ratrain_ir.ops.base",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ratrain.passes",
    ),
    "in a handler": (
        "ratrain.targets.program.program",
        "try:\n    pass\nexcept ValueError:\n    import ratrain.ratrainc.cli",
    ),
    "import_module": (
        "ratrain.passes.memory.lifetime",
        "import importlib\nimportlib.import_module('ratrain.targets.simulator.timed_run')",
    ),
    "bare import_module": (
        "ratrain.passes.memory.lifetime",
        "from importlib import import_module\nimport_module('ratrain.targets')",
    ),
    "formatted": ("ratrain.ratrain_ir.plug", "import importlib\nimportlib.import_module(f'ratrain.passes.{name}')"),
    "__import__": ("ratrain.grammar.text", "__import__('ratrain.passes')"),
    "runtime to machine": ("ratrain.targets.runtime.arena", "import ratrain.targets.mt3000.mt3000_target"),
    "runtime to machine, from": ("ratrain.targets.runtime.arena", "from ratrain.targets import mt3000"),
    "runtime to machine, relative": ("ratrain.targets.runtime.arena", "from ..mt3000 import cost"),
    "runtime to machine, deeper": ("ratrain.targets.runtime.kernels.fast.fast", "from ....mt3000.cost import seconds"),
    "runtime to machine, by name": (
        "ratrain.targets.runtime.arena",
        "import importlib\nimport_module('..mt3000', __package__)",
    ),
    "program to machine": (
        "ratrain.targets.program.rtx",
        "from ratrain.targets.mt3000.tiles.tile_schedule import Memory",
    ),
    "cost to machine": ("ratrain.targets.machine.cost", "from ..mt3000.tiles.calls import PARTS"),
    "emitter to machine, for types only": (
        "ratrain.targets.codegen.emitter",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ratrain.targets.mt3000 import mt3000_target",
    ),
    "simulator to machine": ("ratrain.targets.simulator.figures", "import ratrain.targets.mt3000"),
    "torch": ("ratrain.targets.runtime.ranks.engine", "def f():\n    import torch.distributed as dist"),
    "torch, in the driver": ("ratrain.ratrainc.facts.machine_facts", "from torch import Tensor"),
    "mpi4py": ("ratrain.targets.runtime.ranks.collectives", "from mpi4py import MPI"),
    "runtime to pytorch": ("ratrain.targets.runtime.ranks.engine", "from ratrain.targets.pytorch import transport"),
    "tests": ("ratrain.ratrain_ir.testing.strategies", "from tests.conftest import Golden"),
}


@pytest.mark.parametrize(("module", "source"), BAD.values(), ids=BAD.keys())
def test_a_wrong_import_is_caught(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


def test_a_wrong_relative_import_of_a_package_is_caught() -> None:
    assert violations("from ..mt3000 import cost", "ratrain.targets.runtime", is_package=True)
    assert not violations("from .mt3000 import cost", "ratrain.targets.runtime", is_package=True)


def test_all_wrong_imports_of_a_module_are_named_with_their_lines() -> None:
    source = "import numpy\nimport ratrain.targets\nimport ratrain.ratrain_ir\nfrom ratrain.ratrainc import cli\n"
    assert violations(source, "ratrain.passes.x") == [
        "ratrain.passes.x:2 imports ratrain.targets",
        "ratrain.passes.x:4 imports ratrain.ratrainc.cli",
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "ratrain.ratrainc.cli",
            "import ratrain.grammar, ratrain.ratrain_ir, ratrain.passes.memory.lifetime, ratrain.targets.runtime",
        ),
        (
            "ratrain.passes.memory.lifetime",
            "from ratrain.ratrain_ir.analysis import live\nfrom ratrain.passes import manager\nfrom . import manager",
        ),
        (
            "ratrain.targets.pytorch.ranks.communicator",
            "import torch\nfrom ratrain.targets.runtime.ranks import communicator",
        ),
        ("ratrain.targets.runtime.mpi.transport", "from mpi4py import MPI"),
        ("ratrain.targets.machine.cost", "from ratrain.targets.runtime import arena\nfrom ..program import Program"),
        (
            "ratrain.targets.runtime.arena",
            "from . import interpreter\nfrom ..program import Program\nimport ratrain.targets.simulator.timed_run",
        ),
        (
            "ratrain.ratrain_ir.ops.base",
            "import passes_of_others\nimport numpy.testing\nprint('import ratrain.targets')  # import ratrain.ratrainc",
        ),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert violations(source, module) == []
