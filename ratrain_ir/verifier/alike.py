"""Which ops of a stage are alike to every rule about one op alone: what such a rule says of the first of them, it says of all.

Alike are ops of one kind with the same fields, but for which of the plan's micro-batches they name, whose operands are one by one of
the same kind, type and memory, and saved slots of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import FIELDS
from ratrain.ratrain_ir.ops.signatures import operand_roles
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op


@define(eq=False)
class Alike:
    """What is known of ops that are alike."""

    has_legal_structure: bool = False
    """whether one of them was found so"""
    has_workspace: bool = False
    """whether one of them was found to have what its routine needs"""
    _roles: tuple[str, ...] | None = None

    def roles(self, op: Op, module: Module) -> dict[str, Tensor]:
        """The operands by role of one of these ops.

        Raises `SignatureError` where they do not fit the op.
        """
        if self._roles is None:
            self._roles, _ = operand_roles(op, module.model, module.plan)
        return dict(zip(self._roles, op.reads + op.writes + op.updates, strict=True))


@define(eq=False)
class _Forms(dict[Tensor, int]):
    """Tensors by the number of their form: all of them that a rule about one op depends on."""

    numbers: dict[object, int] = field(factory=dict)

    def __missing__(self, tensor: Tensor) -> int:
        kind = tensor.kind
        form = kind, tensor.type, tensor.home, tensor.slot if kind is StateKind.SAVED else None
        number = self[tensor] = self.numbers.setdefault(form, len(self.numbers))
        return number


def alike_ops(module: Module, stage: Stage) -> list[Alike]:
    """Of each op of a stage the ops that it is alike with: equal objects for alike ops."""
    micro_batches = module.plan.micro_batches
    form = _Forms().__getitem__
    known: dict[object, Alike] = {}
    found: list[Alike] = []
    for op in stage.ops:
        kind = type(op)
        key: tuple[object, ...]
        if kind is Release:  # which may end whatever there is
            key = (kind, *map(form, op.scratch))
        else:
            micro_batch_of, own_fields = _FIELDS[kind]
            micro_batch = micro_batch_of(op)
            key = (
                kind,
                micro_batch is None or (micro_batch < micro_batches or micro_batch),
                own_fields(op),
                tuple(map(form, op.reads)),
                tuple(map(form, op.writes)),
                tuple(map(form, op.updates)),
                tuple(map(form, op.scratch)),
            )
        alike = known.get(key)
        if alike is None:
            alike = known[key] = Alike()
        found.append(alike)
    return found


def _readers(kind: type[Op]) -> tuple[Callable[[Op], int | None], Callable[[Op], object]]:
    """What reads the micro-batch of ops of a kind, and what their other fields."""
    names = [attribute.name for attribute in FIELDS[kind]]
    others = [name for name in names if name != _MICRO_BATCH]
    return attrgetter(_MICRO_BATCH) if _MICRO_BATCH in names else _nothing, attrgetter(*others) if others else _nothing


def _nothing(_: object) -> None:
    return None


_MICRO_BATCH = "micro_batch"
_FIELDS = {kind: _readers(kind) for kind in FIELDS}
