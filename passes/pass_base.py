"""What a pass is: a small class with a name, options that are fields, what it needs and gives, and `run`."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from attrs import define, field, frozen

from ratrain_ir.diagnostics import Diagnostics
from ratrain_ir.module import Level, Module
from ratrain_ir.ops import Release
from ratrain_ir.target import Target


class Fact(Enum):
    """What can be true of a module beside its level; read off the module itself, so a file can enter a pipeline anywhere."""

    PLACED = "placed"
    """ops are in schedule order"""
    RELEASED = "released"
    """every step tensor has its release"""
    LEGALISED = "legalised"
    """ops have the workspace and engines of a target"""
    ALLOCATED = "allocated"
    """every tensor has an offset"""


def facts_of(module: Module) -> frozenset[Fact]:
    """The facts that hold for a module."""
    found = set()
    if module.level is not Level.DATAFLOW:
        found.add(Fact.PLACED)
    if any(type(op) is Release for stage in module.stages for op in stage.ops):
        found.add(Fact.RELEASED)
    if module.target is not None:
        found.add(Fact.LEGALISED)
    if module.level is Level.ALLOCATED:
        found.add(Fact.ALLOCATED)
    return frozenset(found)


@define
class PassContext:
    """What a pass works with: the target, a place for problems, statistics it reports."""

    target: Target
    diagnostics: Diagnostics = field(factory=Diagnostics)
    statistics: dict[str, int | float | str] = field(factory=dict)


@frozen
class Pass:
    """Base of all passes. Options are attrs fields with defaults; the class docstring's first line is its summary."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED})
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED, Fact.LEGALISED, Fact.ALLOCATED})
    """Facts that must not hold yet: a pass that moves ops comes before releases and addresses."""

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite the module in place.

        Raises `DiagnosticError` where it cannot.
        """
        raise NotImplementedError
