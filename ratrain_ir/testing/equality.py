"""Structural equality of modules: the first difference between two, as a readable path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.ops.kinds import FIELDS

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor

_TENSOR_FIELDS = ("name", "kind", "type", "carried", "home", "offset")
_OPERANDS = ("reads", "writes", "updates", "scratch")


def first_difference(a: Module, b: Module) -> str | None:
    """Return the first difference of two modules, such as `stage 1 / op 17 / reads 0: %x.0 and %x.1`; None if equal.

    Everything that the text format carries is compared, including the order of declarations. The origin of a module
    (its source text and line numbers) is not.
    """
    return next(_differences(a, b), None)


def _differences(a: Module, b: Module) -> Iterator[str]:
    yield from _unequal("name", a.name, b.name)
    yield from _unequal("level", a.level.value, b.level.value)
    yield from _fields("model", a.model.to_fields(), b.model.to_fields())
    yield from _fields("plan", a.plan.to_fields(), b.plan.to_fields())
    yield from _unequal("target", a.target, b.target)
    yield from _unequal("pipeline", a.pipeline, b.pipeline)
    yield from _unequal("number of stages", len(a.stages), len(b.stages))
    for mine, other in zip(a.stages, b.stages, strict=True):
        for difference in _stage(mine, other):
            yield f"stage {mine.index} / {difference}"


def _stage(a: Stage, b: Stage) -> Iterator[str]:
    yield from _unequal("index", a.index, b.index)
    for place, (mine, other) in enumerate(zip(a.tensors.values(), b.tensors.values(), strict=False)):
        for name in _TENSOR_FIELDS:
            yield from _unequal(f"tensor {place} / {name}", getattr(mine, name), getattr(other, name))
    yield from _unequal("number of tensors", len(a.tensors), len(b.tensors))
    for place, (first, second) in enumerate(zip(a.ops, b.ops, strict=False)):
        for difference in _op(first, second):
            yield f"op {place} / {difference}"
    yield from _unequal("number of ops", len(a.ops), len(b.ops))


def _op(a: Op, b: Op) -> Iterator[str]:
    yield from _unequal("kind", a.keyword, b.keyword)
    if type(a) is not type(b):
        return
    for attribute in FIELDS[type(a)]:
        yield from _unequal(attribute.name, getattr(a, attribute.name), getattr(b, attribute.name))
    for group in _OPERANDS:
        yield from _operands(group, getattr(a, group), getattr(b, group))


def _operands(group: str, a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[str]:
    for place, (mine, other) in enumerate(zip(a, b, strict=False)):
        yield from _unequal(f"{group} {place}", f"%{mine.name}", f"%{other.name}")
    yield from _unequal(f"number of {group}", len(a), len(b))


def _fields(where: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    for name in {**a, **b}:
        yield from _unequal(f"{where} / {name}", a.get(name), b.get(name))


def _unequal(where: str, a: object, b: object) -> Iterator[str]:
    # equal numbers of different types (1 and 1.0, 1 and True) print differently
    if a != b or type(a) is not type(b):
        yield f"{where}: {a} and {b}"
