"""What a pass is: a small class with a name, options that are fields, what it needs and gives, and `run`."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import Attribute, define, field, frozen

from ratrain.ratrain_ir.diagnostics import Diagnostics
from ratrain.ratrain_ir.module import Level, Module
from ratrain.ratrain_ir.ops import Op, Recv, Release, Send, Tensor
from ratrain.ratrain_ir.target import Target
from ratrain.ratrain_ir.types import StateKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage


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
    prepared: dict[Op, Op] = field(factory=dict, init=False, repr=False)
    """Ops of trials as the target will make them."""
    workspace: dict[tuple[int, str], Tensor] = field(factory=dict, init=False, repr=False)
    """Workspace of trials, by stage and routine."""
    _seconds: dict[Op, float] = field(factory=dict, init=False, repr=False)
    _seconds_of_like: dict[object, float] = field(factory=dict, init=False, repr=False)

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        """The target's seconds of an op, asked once for ops that do the same on the same engine to tensors of the same kinds and types."""
        found = self._seconds.get(op)
        if found is None:
            like = _likeness(stage, op)
            found = self._seconds_of_like.get(like)
            if found is None:
                found = self._seconds_of_like[like] = self.target.op_seconds(module, stage, op)
            self._seconds[op] = found
        return found

    def forget_trials(self) -> None:
        """Forget the ops of trials that are over: each trial makes its own, and they would be kept until the pass ends."""
        self.prepared.clear()
        self._seconds.clear()


def _likeness(stage: Stage, op: Op) -> object:
    """Equal for ops of a module that take equal time; messages between other stages may go over other links."""
    unit = getattr(op, "block", None)
    operands = tuple(
        tuple((t.slot if t.kind is StateKind.SAVED else t.kind, id(t.type)) for t in tensors)
        for tensors in (op.reads, op.writes, op.updates)
    )
    hop = (stage.index, op.peer) if isinstance(op, Send | Recv) else None
    return type(op), op.engine, unit and unit.kind, getattr(op, "group", None), hop, operands


def default_text(option: Attribute[Any]) -> str:
    """The default of an option in words."""
    unset: str = option.metadata.get("default", "what the machine has")
    return unset if option.default is None else str(option.default)


def values_text(option: Attribute[Any]) -> str:
    """What an option may be: its choices, or its unit."""
    words = (*option.metadata.get("choices", ()), *option.metadata.get("words", ()))
    unit = option.metadata.get("unit")
    return "|".join((*((unit,) if unit else ()), *words))


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
