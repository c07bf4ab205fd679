"""Keys of ops that take equal time: a target may cache the seconds of an op by them.

Ops and tensors declare in their fields what the time depends on (`ratrain.ratrain_ir.ops.op_fields.TIME`). A field that
declares nothing counts with its whole value. So a field added later can at worst make equal ops be timed twice; it
cannot make ops that differ share their seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs

from ratrain.ratrain_ir.ops.op_fields import NOTHING, TIME
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.numbering import Numbers

_OPERANDS = ("reads", "writes", "updates")


class Forms(dict[Tensor, int]):
    """Number of each tensor's form, which is all of it that the time of an op depends on; read once per tensor.

    For as long as no tensor changes. Forms that share `numbers` give equal numbers to tensors of equal form.
    """

    def __init__(self, numbers: Numbers[object]) -> None:
        super().__init__()
        self._numbers = numbers

    def __missing__(self, tensor: Tensor) -> int:
        number = self[tensor] = self._numbers[_tensor_fields(tensor)]
        return number


def likeness(op: Op, stage: int, forms: Forms | None = None) -> object:
    """Return a key that is equal for ops of one module that take equal time; `stage` is the index of the op's stage.

    Keys by `forms` are made and compared faster. They equal only keys by forms of the same numbers.
    """
    kind = type(op)
    own_fields = _OP_FIELDS.get(kind)
    if own_fields is None:
        own_fields = _OP_FIELDS[kind] = timed_fields(kind, apart=_OPERANDS)
    form = _tensor_fields if forms is None else forms.__getitem__
    return (
        kind,
        None if kind.alike_on_all_stages else stage,
        own_fields(op),
        tuple(map(form, op.reads)),
        tuple(map(form, op.writes)),
        tuple(map(form, op.updates)),
    )


def timed_fields(kind: type[Any], *others: str, apart: Collection[str] = ()) -> Callable[[Any], object]:
    """Return a function that reads those fields of an object of `kind` that the time of an op depends on.

    `others` are names of further attributes to read. Fields named in `apart` are left out: the caller handles them.
    """
    paths = list(others)
    for field in attrs.fields(kind):
        part = field.metadata.get(TIME)
        if field.name not in apart and part != NOTHING:
            paths.append(field.name if part is None else f"{field.name}.{part}")
    return attrgetter(*paths) if paths else _nothing


def _nothing(_: object) -> None:
    return None


_OP_FIELDS: dict[type[Op], Callable[[Op], object]] = {}
_tensor_fields = timed_fields(Tensor, "role")
