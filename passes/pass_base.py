"""What a pass is: a small class with a name, options that are fields, what it needs and gives, and `run`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

from attrs import NOTHING, Attribute, define, field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.module import Level, Module
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, Release
from ratrain.ratrain_ir.ops.likeness import likeness
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.target import Target, WorkspaceRequest

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage
    from ratrain.ratrain_ir.ops.base import Op


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
    facts = set()
    if module.level is not Level.DATAFLOW:
        facts.add(Fact.PLACED)
    if any(type(op) is Release for stage in module.stages for op in stage.ops):
        facts.add(Fact.RELEASED)
    if module.target is not None:
        facts.add(Fact.LEGALISED)
    if module.level is Level.ALLOCATED:
        facts.add(Fact.ALLOCATED)
    return frozenset(facts)


@define
class PassContext:
    """What a pass works with: the target, a place for problems, statistics it reports."""

    target: Target
    diagnostics: Diagnostics = field(factory=Diagnostics)
    statistics: dict[str, int | float | str] = field(factory=dict)
    _known_of: tuple[ModelConfig, Plan] | None = field(default=None, init=False, repr=False)
    _seconds_of_like: dict[object, float] = field(factory=dict, init=False, repr=False)
    _workspace_of_like: dict[object, WorkspaceRequest | None] = field(factory=dict, init=False, repr=False)

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        """The target's seconds of an op, asked once for ops of a model and plan that are alike."""
        return self._seconds(module, stage, op, self._like(module, stage, op))

    def workspace(self, module: Module, stage: Stage, op: Op) -> WorkspaceRequest | None:
        """The workspace that the target wants for an op, asked once for block ops that are alike: these call one routine."""
        if type(op) not in _CALL_ROUTINES:
            return self.target.workspace(module, op)
        return self._workspace(module, op, self._like(module, stage, op))

    def needs(self, module: Module, stage: Stage, op: Op) -> tuple[WorkspaceRequest | None, float]:
        """Workspace and seconds of an op."""
        like = self._like(module, stage, op)
        return self._workspace(module, op, like), self._seconds(module, stage, op, like)

    def _seconds(self, module: Module, stage: Stage, op: Op, like: object) -> float:
        seconds = self._seconds_of_like.get(like)
        if seconds is None:
            seconds = self._seconds_of_like[like] = self.target.op_seconds(module, stage, op)
        return seconds

    def _workspace(self, module: Module, op: Op, like: object) -> WorkspaceRequest | None:
        if type(op) not in _CALL_ROUTINES:
            return self.target.workspace(module, op)
        if like not in self._workspace_of_like:
            self._workspace_of_like[like] = self.target.workspace(module, op)
        return self._workspace_of_like[like]

    def _like(self, module: Module, stage: Stage, op: Op) -> object:
        """Equal for ops that are alike; what is known of those of another model or plan is forgotten."""
        if self._known_of is None or self._known_of[0] is not module.model or self._known_of[1] is not module.plan:
            self._known_of = module.model, module.plan
            self._seconds_of_like.clear()
            self._workspace_of_like.clear()
        return likeness(op, stage.index), _layer_like(op, module.model)


_CALL_ROUTINES = frozenset(BLOCK_OPS)


def _layer_like(op: Op, model: ModelConfig) -> int | None:
    """The layer that stands for that of an op on a block where layers differ; None where none do."""
    block = getattr(op, "block", None)
    if not model.layer_kinds or block is None or block.layer is None:
        return None
    return model.first_alike(block.layer)


PATH = "path"
"""The unit of an option that names a file."""
OPTION_UNITS = ("bytes", "blocks", "micro-batches", PATH)
"""What options of passes that have no choices are: numbers that count something, or a path."""
_NOT_IN_A_PATH = re.compile(r"""[\s,{}"'`\\%]|[^\x20-\x7e]""")
"""What a pipeline, or the line of text that holds one, may read as something else."""


SWITCH = ("false", "true")
"""The choices of an option that is a `bool`."""


def option_text(value: object) -> str:
    """The value of an option as a pipeline writes it; in a path, what a pipeline reads as something else is written as in a URL."""
    if isinstance(value, bool):
        return str(value).lower()
    return _NOT_IN_A_PATH.sub(lambda match: quote_from_bytes(os.fsencode(match[0]), safe=""), str(value))


def path_of_text(text: str) -> str:
    """The path that `option_text` wrote."""
    return os.fsdecode(unquote_to_bytes(os.fsencode(text)))


def default_text(option: Attribute[Any]) -> str:
    """The default of an option in words."""
    if option.default is NOTHING:
        return "none: it must be given"
    unset: str = option.metadata.get("default", "what the machine has")
    return unset if option.default is None else option_text(option.default)


def values_text(option: Attribute[Any]) -> str:
    """What an option may be: its choices, or its unit."""
    words = (*option.metadata.get("choices", ()), *option.metadata.get("words", ()))
    unit = option.metadata.get("unit")
    return "|".join((*((unit,) if unit else ()), *words))


@frozen
class Idle:
    """An option that changes nothing, whatever it is or at its value."""

    option: str
    """the field"""
    why: str
    way_out: str


class Decision(Enum):
    """Decision of a pass that no other pass of the pipeline may take again."""

    ORDER = "the order of the schedule"
    REDUCTIONS = "which gradients are reduced together"
    UPDATES = "when shards are updated"
    GATHERS = "when views are gathered"
    RECOVERY = "what is recovered"
    EXCHANGES = "what runs beside the exchanges of tensor peers"


@frozen
class Pass:
    """Base of all passes. Options are attrs fields with defaults; the class docstring's first line is its summary."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED})
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED, Fact.LEGALISED, Fact.ALLOCATED})
    """Facts that must not hold yet: a pass that moves ops comes before releases and addresses."""
    decides: ClassVar[frozenset[Decision]] = frozenset()
    """Decisions that this pass takes. Only one pass of a pipeline may take each: two would overrule one another."""

    @property
    def schedule(self) -> str | None:
        """Name of the schedule that this pass places; None if it places none, or leaves that to the plan or a file."""
        return None

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """The options that change nothing under a plan, or beside the other options."""
        del plan, model
        return iter(())

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite the module in place. The manager hands in a draft, which shares its ops and tensors: to try something, change lists only.

        Raises `DiagnosticError` where it cannot.
        """
        raise NotImplementedError
