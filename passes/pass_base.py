"""Base class of passes: a name, options as attrs fields, facts that it needs and forbids, and `run`."""

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
from ratrain.ratrain_ir.ops.likeness import Forms, likeness
from ratrain.ratrain_ir.ops.numbering import Numbers
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.target import Target, WorkspaceRequest

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Stage
    from ratrain.ratrain_ir.ops.base import Op


class Fact(Enum):
    """Property of a module in addition to its level.

    Facts are read off the module itself, so a module read from a file can enter a pipeline at any pass.
    """

    PLACED = "placed"
    """Ops are in the order of a schedule."""
    RELEASED = "released"
    """Every step tensor has its release."""
    LEGALISED = "legalised"
    """Ops have the workspace and engines of a target."""
    ALLOCATED = "allocated"
    """Every tensor has an offset."""


def facts_of(module: Module) -> frozenset[Fact]:
    """Return the facts that hold for a module."""
    facts = set()
    if module.level is not Level.DATAFLOW:
        facts.add(Fact.PLACED)
    if any(Release in map(type, stage.ops) for stage in module.stages):
        facts.add(Fact.RELEASED)
    if module.target is not None:
        facts.add(Fact.LEGALISED)
    if module.level is Level.ALLOCATED:
        facts.add(Fact.ALLOCATED)
    return frozenset(facts)


@define
class PassContext:
    """Surroundings of a pass: the target, diagnostics to report, and statistics to fill in.

    Answers of the target are cached by the likeness of ops, for one model and plan at a time.
    """

    target: Target
    diagnostics: Diagnostics = field(factory=Diagnostics)
    statistics: dict[str, int | float | str] = field(factory=dict)
    peaks: list[int] | None = field(default=None, init=False)
    """Most live bytes in DDR by stage of the module that the pass leaves, if it had to find them."""
    arenas: dict[object, int] = field(factory=dict, init=False, repr=False)
    """Bytes of the arenas that trials placed, by lives and capacity."""
    _known_of: tuple[ModelConfig, Plan] | None = field(default=None, init=False, repr=False)
    _forms: Numbers[object] = field(factory=Numbers, init=False, repr=False)
    _likes: Numbers[object] = field(factory=Numbers, init=False, repr=False)
    _seconds_of_like: dict[int, float] = field(factory=dict, init=False, repr=False)
    _workspace_of_like: dict[int, WorkspaceRequest | None] = field(factory=dict, init=False, repr=False)

    def forms(self) -> Forms:
        """Return forms of tensors to ask about many ops with, for as long as no tensor changes."""
        return Forms(self._forms)

    def op_seconds(self, module: Module, stage: Stage, op: Op, forms: Forms | None = None) -> float:
        """Return the target's seconds for an op; similar ops are asked for once."""
        return self._seconds(module, stage, op, self._like(module, stage, op, forms))

    def workspace(self, module: Module, stage: Stage, op: Op, forms: Forms | None = None) -> WorkspaceRequest | None:
        """Return the workspace that the target wants for an op; None if it wants none.

        Block ops that are alike run the same routine, so the target is asked once for them.
        """
        if type(op) not in _CALL_ROUTINES:
            return self.target.workspace(module, op)
        return self._workspace(module, op, self._like(module, stage, op, forms))

    def needs(
        self, module: Module, stage: Stage, op: Op, forms: Forms | None = None
    ) -> tuple[WorkspaceRequest | None, float]:
        """Return the workspace and the seconds of an op, as `workspace` and `op_seconds` do."""
        like = self._like(module, stage, op, forms)
        return self._workspace(module, op, like), self._seconds(module, stage, op, like)

    def _seconds(self, module: Module, stage: Stage, op: Op, like: int) -> float:
        seconds = self._seconds_of_like.get(like)
        if seconds is None:
            seconds = self._seconds_of_like[like] = self.target.op_seconds(module, stage, op)
        return seconds

    def _workspace(self, module: Module, op: Op, like: int) -> WorkspaceRequest | None:
        if type(op) not in _CALL_ROUTINES:
            return self.target.workspace(module, op)
        if like not in self._workspace_of_like:
            self._workspace_of_like[like] = self.target.workspace(module, op)
        return self._workspace_of_like[like]

    def _like(self, module: Module, stage: Stage, op: Op, forms: Forms | None) -> int:
        """Return a number that is equal for ops that cost the same.

        Clears the caches when the model or the plan changes.
        """
        if self._known_of is None or self._known_of[0] is not module.model or self._known_of[1] is not module.plan:
            self._known_of = module.model, module.plan
            self._seconds_of_like.clear()
            self._workspace_of_like.clear()
        # a number is quick to look up again; the key is a tuple, whose hash is computed each time
        return self._likes[likeness(op, stage.index, forms), _layer_like(op, module.model)]


_CALL_ROUTINES = frozenset(BLOCK_OPS)


def _layer_like(op: Op, model: ModelConfig) -> tuple[int, ...]:
    """Return the first layers whose blocks are as those of the op; empty where all layers are alike."""
    if not model.layer_kinds and not model.mlp_kinds:
        return ()
    block = getattr(op, "block", None)
    blocks: tuple[Block, ...] = getattr(op, "blocks", ()) if block is None else (block,)
    return tuple(model.first_alike(each.kind, each.layer) for each in blocks if each.layer is not None)


PATH = "path"
"""Unit of an option that names a file."""
OPTION_UNITS = ("bytes", "blocks", "layers", "micro-batches", PATH)
"""Units of options without choices: counts of something, or a path."""
_NOT_IN_A_PATH = re.compile(r"""[\s,{}"'`\\%]|[^\x20-\x7e]""")
"""Characters that a pipeline string, or the line of text that holds it, could misread."""


SWITCH = ("false", "true")
"""Choices of a `bool` option."""


def option_text(value: object) -> str:
    """Return the value of an option as a pipeline string writes it.

    Characters that a pipeline would misread are percent-encoded, as in a URL. `path_of_text` reads a path back.
    """
    if isinstance(value, bool):
        return str(value).lower()
    return _NOT_IN_A_PATH.sub(lambda match: quote_from_bytes(os.fsencode(match[0]), safe=""), str(value))


def path_of_text(text: str) -> str:
    """Return the path that `option_text` wrote."""
    return os.fsdecode(unquote_to_bytes(os.fsencode(text)))


def default_text(option: Attribute[Any]) -> str:
    """Describe the default of an option for help texts and docs."""
    if option.default is NOTHING:
        return "none: it must be given"
    unset: str = option.metadata.get("default", "what the machine has")
    return unset if option.default is None else option_text(option.default)


def values_text(option: Attribute[Any]) -> str:
    """Return the values that an option takes for help texts and docs: its unit and its choices, joined by `|`."""
    words = (*option.metadata.get("choices", ()), *option.metadata.get("words", ()))
    unit = option.metadata.get("unit")
    return "|".join((*((unit,) if unit else ()), *words))


@frozen
class Idle:
    """Option that has no effect under a plan, at its value or at any value."""

    option: str
    """Name of the field."""
    why: str
    way_out: str
    unless_fetched: bool = False
    """True: it has an effect after a pass that fetches views within the step (`Pass.fetches_views`)."""


class Decision(Enum):
    """Decision that at most one pass of a pipeline may take."""

    ORDER = "the order of the schedule"
    REDUCTIONS = "which gradients are reduced together"
    UPDATES = "when shards are updated"
    GATHERS = "when views are gathered"
    RECOVERY = "what is recovered"
    EXCHANGES = "what runs during exchanges of tensor-parallel ranks"


@frozen
class Pass:
    """Base of all passes. Options are attrs fields with defaults; the class docstring's first line is its summary."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED})
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED, Fact.LEGALISED, Fact.ALLOCATED})
    """Facts that must not hold yet: a pass that moves ops must run before releases and addresses exist."""
    decides: ClassVar[frozenset[Decision]] = frozenset()
    """Decisions that this pass takes.

    Two passes of one pipeline may not share one: the second would overrule the first.
    """

    @property
    def schedule(self) -> str | None:
        """Name of the schedule that this pass places; None if it places none, or leaves that to the plan or a file."""
        return None

    @property
    def fetches_views(self) -> bool:
        """True if this pass fetches views from another memory within the step."""
        return False

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """Yield the options that have no effect under a plan, given the values of the other options."""
        del plan, model
        return iter(())

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite the module in place.

        The manager hands in a draft, which shares ops and tensors with the module. A pass may change lists freely; it
        changes an op or a tensor only once nothing can fail any more. Raises `DiagnosticError` where it cannot do its
        work.
        """
        raise NotImplementedError
