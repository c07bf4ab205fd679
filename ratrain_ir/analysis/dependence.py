"""Dependences within a stage: what each op must wait for on the other engines, this step and the one before.

Read-after-write, write-after-read and write-after-write over the list order; once tensors have addresses, also byte reuse:
whoever first writes new bytes waits for every accessor of the old. A blocking collective waits for the last compute op before it in
the list, and the next compute op waits for it. What is taken back from another stage waits until it was evicted to it. The step is swept twice, so that waits across the step's
end come out of the same rules. Since an engine runs its ops in order, one position an engine is enough, and what another
wait (or the engine's own order) implies is left out: the waits are transitively reduced with vector clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.analysis.dependence_sweep import NONE, SweptOps, reduced_waits
from ratrain.ratrain_ir.config.types import Home, aligned
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.ops.collectives import is_blocking
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.messages import Evict, TakeBack
from ratrain.ratrain_ir.ops.numbering import Numbers
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.module import Stage

ENGINE_INDEX = {engine: index for index, engine in enumerate(ENGINES)}
_COMPUTE, _COLLECTIVE = ENGINE_INDEX[Engine.COMPUTE], ENGINE_INDEX[Engine.COLLECTIVE]
_MEMORY = 1 << 56
"""Addresses that each memory has in a space of them all: no offset is as large."""
_BEGINS = {home: number * _MEMORY for number, home in enumerate(Home)}


@frozen(eq=False)
class StageNumbers:
    """The ops of a stage as numbers, and the tensors that the numbers mean."""

    swept: SweptOps
    tensors: list[Tensor]
    """what the ops touch"""

    def reduced_waits(self) -> tuple[Sequence[int], Sequence[int]]:
        """What each op waits for on other engines, transitively reduced.

        Of each op: how many waits it has; and the waits, op by op, the latest first, as positions in two copies of the list, of
        which those in the first are of the step before.
        """
        return reduced_waits(self.swept, len(ENGINES), _COMPUTE, _COLLECTIVE)


def stage_numbers(stage: Stage, *, reuse: bool = True) -> StageNumbers:
    """The ops of a stage as numbers, those of tensors in the order in which ops touch them. Without `reuse` tensors have no addresses."""
    numbers: Numbers[Tensor] = Numbers()
    number_of = numbers.__getitem__
    engines: list[int] = []
    blocks: list[int] = []
    bounds: list[int] = []
    tensors: list[int] = []
    slots: list[tuple[int, int, int]] = []
    kept_elsewhere: dict[object, int] = {}
    for op in stage.ops:
        if type(op) is Release:
            engines.append(NONE)
            blocks.append(0)
            bounds += (len(tensors),) * 4
            continue
        engine = ENGINE_INDEX[op.engine]
        blocks.append(engine == _COLLECTIVE and is_blocking(op))
        tensors += map(number_of, op.reads)
        read = len(tensors)
        tensors += map(number_of, op.updates)
        updated = len(tensors)
        tensors += map(number_of, op.writes)
        written = len(tensors)
        tensors += map(number_of, op.scratch)
        bounds += read, updated, written, len(tensors)
        if type(op) is Evict or type(op) is TakeBack:
            slot = kept_elsewhere.setdefault((op.peer, op.block, piece_of(op)), len(kept_elsewhere))
            slots.append((len(engines), slot, type(op) is Evict))
        engines.append(engine)
    posts, awaits = [NONE] * len(engines), [NONE] * len(engines)
    for position, slot, leaves in slots:
        (posts if leaves else awaits)[position] = slot
    starts, stops = (list(map(end, numbers)) if reuse else [NONE] * len(numbers) for end in (first_byte, end_byte))
    return StageNumbers(SweptOps(engines, blocks, bounds, tensors, starts, stops, posts, awaits), list(numbers))


def first_byte(tensor: Tensor) -> int:
    """Where a tensor begins, in one space of addresses of all memories; `NONE` where it has no address."""
    return NONE if tensor.offset is None else _BEGINS[tensor.home] + tensor.offset


def end_byte(tensor: Tensor) -> int:
    """Where its bytes end, with what aligns them; `NONE` where it has no address."""
    return NONE if tensor.offset is None else _BEGINS[tensor.home] + tensor.offset + aligned(tensor.type.nbytes)
