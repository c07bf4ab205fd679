"""Passes of a micro-batch through a stage, copied from an earlier micro-batch.

Lowering decides anew which tensors an op takes for each op of a micro-batch. But all micro-batches after the first do
the same; only the number differs, in fields of ops and in names of tensors:

    micro-batch 1, the pattern              micro-batch 2
    forward mlp.0 m1 (%w, %x.mlp.0.m1)      forward mlp.0 m2 (%w, %x.mlp.0.m2)

Tensors that the pattern declares are of its micro-batch, and each later one gets its own; all others are shared. The
cost is linear in ops and operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.kinds import FIELDS
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op

PATTERN = 1
"""Micro-batch that later ones repeat; the first begins gradients and the loss, to which the others add."""
_NUMBER = f".m{PATTERN}"
"""Part of a name that says the micro-batch."""


@define(eq=False)
class RepeatedPasses:
    """Maker of passes of later micro-batches of a stage."""

    stage: Stage
    _tensors: dict[int, dict[Tensor, Tensor]] = field(factory=dict, init=False)
    """By micro-batch: its tensor for each of the pattern's."""

    def add(self, ops: Sequence[Op], declared: Iterable[Tensor], micro_batches: Iterable[int]) -> None:
        """Append the ops of the pattern, and the tensors that it declares, once more for each of `micro_batches`."""
        named = [(tensor, *tensor.name.partition(_NUMBER)) for tensor in declared]
        made: list[tuple[Any, dict[str, Any], Op]] = [(type(op), _other_fields(op), op) for op in ops]
        for micro_batch in micro_batches:
            own = self._tensors.setdefault(micro_batch, {})
            for tensor, before, _, after in named:
                name = f"{before}.m{micro_batch}{after}"
                own[tensor] = self.stage.add(Tensor(name, tensor.kind, tensor.type, home=tensor.home))
            self.stage.ops += [
                make(
                    micro_batch=micro_batch,
                    reads=tuple([own.get(tensor, tensor) for tensor in op.reads]),
                    writes=tuple([own.get(tensor, tensor) for tensor in op.writes]),
                    updates=tuple([own.get(tensor, tensor) for tensor in op.updates]),
                    **others,
                )
                for make, others, op in made
            ]


def _other_fields(op: Op) -> dict[str, Any]:
    """Return the fields that an op's class declares, without its micro-batch."""
    return {each.name: getattr(op, each.name) for each in FIELDS[type(op)] if each.name != "micro_batch"}
