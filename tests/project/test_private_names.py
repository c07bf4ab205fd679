"""A class overrides no private name of a base class of ours: what it may change is public, and documented there.

Read from the syntax trees, so that modules count whose libraries are not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import resolve_name

import pytest
from attrs import define, field

from tests.project.package_modules import all_modules


@define
class Class:
    """A class, its bases as its module names them, and the lines of its private names."""

    name: str
    module: str
    bases: list[str]
    private: dict[str, int]


@define
class Package:
    """All classes by full name, and what each module calls the things it imports."""

    classes: dict[str, Class] = field(factory=dict)
    imported: dict[str, str] = field(factory=dict)
    """by module and name, as in `ratrain.a.b.Name`: the full name of the origin"""

    def read(self, source: str, module: str, *, is_package: bool = False) -> None:
        """Add a module."""
        package = module if is_package else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                origin = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
                for alias in node.names:
                    self.imported[f"{module}.{alias.asname or alias.name}"] = f"{origin}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[f"{module}.{alias.asname or alias.name}"] = alias.name
            elif isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]
                self.classes[f"{module}.{node.name}"] = Class(node.name, module, bases, dict(private_names(node)))

    def origin(self, name: str) -> str:
        """The full name by which a thing is defined, through imports from one module to the next."""
        seen = set()
        while name not in self.classes and name not in seen:
            seen.add(name)
            head, *rest = next(((start, *end) for start, end in prefixes(name) if start in self.imported), (name,))
            if head in self.imported:
                name = ".".join([self.imported[head], *rest])
        return name

    def ancestors(self, found: Class) -> Iterator[Class]:
        """Base classes of ours, theirs included."""
        for base in found.bases:
            parent = self.classes.get(self.origin(f"{found.module}.{base}"))
            if parent is not None:
                yield parent
                yield from self.ancestors(parent)

    def violations(self) -> list[str]:
        """A line for each private name that is overridden."""
        return [
            f"{found.module}:{line} {found.name} overrides {parent.name}.{name}"
            for found in self.classes.values()
            for parent in self.ancestors(found)
            for name, line in found.private.items()
            if name in parent.private
        ]


def prefixes(name: str) -> Iterator[tuple[str, list[str]]]:
    """A dotted name in two parts, the longest first part first."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end]), parts[end:]


def private_names(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """Methods, attributes and fields of a class whose names begin with one underscore."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.name]
        elif isinstance(each, ast.Assign):
            names = [target.id for target in each.targets if isinstance(target, ast.Name)]
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names = [each.target.id]
        else:
            continue
        yield from ((name, each.lineno) for name in names if name.startswith("_") and not name.startswith("__"))


def test_no_class_overrides_a_private_name() -> None:
    package = Package()
    for path, module in all_modules():
        package.read(path.read_text(encoding="utf-8"), module, is_package=path.stem == "__init__")
    (ranks,) = [found for found in package.classes.values() if found.name == "RankEngine"]
    assert [parent.name for parent in package.ancestors(ranks)] == ["ProgramEngine"]
    tiled = package.classes["ratrain.targets.mt3000.kernels.tiled.Tiled"]
    assert {"Fast", "KernelSetBase"} <= {parent.name for parent in package.ancestors(tiled)}
    assert not package.violations()


BASE = """
class Base:
    _limit: int = 1
    def run(self): ...
    def _step(self): ...
    def __enter__(self): ...
    def __secret(self): ...
"""


@pytest.mark.parametrize(
    ("source", "overridden"),
    [
        ("from ratrain.a import Base\nclass Own(Base):\n    def _step(self): ...", "_step"),
        ("from ratrain.a import Base\nclass Own(Base):\n    async def _step(self): ...", "_step"),
        ("from .a import Base as Other\nclass Own(Other[int]):\n    @property\n    def _step(self): ...", "_step"),
        ("import ratrain.a\nclass Own(ratrain.a.Base):\n    _step = None", "_step"),
        ("from ratrain import a\nclass Own(a.Base):\n    _limit: int = 2", "_limit"),
        ("from ratrain.a import Base\nclass Mid(Base): ...\nclass Own(Mid):\n    def _step(self): ...", "_step"),
        ("from ratrain.c import Base\nclass Own(object, Base):\n    def _step(self): ...", "_step"),
        ("from ratrain.a import Base\nclass Own(Base):\n    def run(self): ...\n    def _other(self): ...", None),
        (
            "from ratrain.a import Base\nclass Own(Base):\n    def __enter__(self): ...\n    def __secret(self): ...",
            None,
        ),
        ("from click import Base\nclass Own(Base):\n    def _step(self): ...", None),
        ("class Own:\n    def _step(self): ...", None),
    ],
)
def test_overridden_private_names_are_found(source: str, overridden: str | None) -> None:
    package = Package()
    package.read(BASE, "ratrain.a")
    package.read("from ratrain.a import Base", "ratrain.c", is_package=True)
    package.read(source, "ratrain.b")
    line = len(source.splitlines())
    expected = [] if overridden is None else [f"ratrain.b:{line} Own overrides Base.{overridden}"]
    assert package.violations() == expected
