"""Dependences within a stage: the ops on other engines that each op waits for, in this step and the one before.

The dependences are read-after-write, write-after-read and write-after-write in list order. Tensors with addresses add
the reuse of bytes: the first writer of new contents waits for every accessor of the old. A blocking collective waits
for the last compute op before it in the list, and the next compute op waits for it. A `peer_reload` from another stage
waits for its `peer_offload`.

    position  engine   op                       waits for
    0         compute  forward writes %x        -
    1         send     send reads %x            0
    2         compute  forward reads %x         -  (the same engine: in order)
    3         recv     recv writes bytes of %x  1 and 2; not 0, which both imply

The step is swept twice, so waits across the end of a step follow from the same rules. An engine runs its ops in order,
so one position per engine describes what is complete. Waits that other waits or the engine's order imply are left out:
vector clocks reduce them transitively.

Cost: for each access a visit of every engine; for each tensor that begins a life a search among the segments of bytes.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.analysis.dependence_sweep import NONE, SweptOps, reduced_waits
from ratrain.ratrain_ir.config.types import Home, aligned
from ratrain.ratrain_ir.ops.base import ENGINE_NUMBERS, ENGINES, Engine
from ratrain.ratrain_ir.ops.collectives import is_blocking
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.messages import PeerOffload, PeerReload
from ratrain.ratrain_ir.ops.numbering import operands_of
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.module import Stage

_COMPUTE, _COLLECTIVE = ENGINE_NUMBERS[Engine.COMPUTE], ENGINE_NUMBERS[Engine.COLLECTIVE]
_MEMORY = 1 << 56
"""Addresses of each memory in a joint space of all memories; no offset is as large."""
_BEGINS = {home: number * _MEMORY for number, home in enumerate(Home)}


@frozen(eq=False)
class StageNumbers:
    """Ops of a stage as numbers, and the tensors that these mean."""

    swept: SweptOps
    tensors: list[Tensor]
    """tensors that the ops touch, by number"""

    def reduced_waits(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return what each op waits for on other engines, transitively reduced, as (counts, waits).

        `counts` has the number of waits of each op. `waits` lists these op by op, the latest first, as positions in two
        copies of the op list: a position below the number of ops is in the step before.
        """
        return reduced_waits(self.swept, len(ENGINES), _COMPUTE, _COLLECTIVE)


def ops_as_numbers(stage: Stage, *, reuse: bool = True) -> StageNumbers:
    """Return the ops of a stage as numbers; tensors are numbered in the order in which ops touch them.

    Without `reuse` tensors count as having no addresses, so no waits follow from shared bytes.
    """
    engines: list[int] = []
    blocks: list[int] = []
    slots: list[tuple[int, int, int]] = []
    kept_elsewhere: dict[object, int] = {}
    for op in stage.ops:
        if type(op) is Release:
            # A mark without work: the next life of the bytes waits for accesses, not for releases.
            engines.append(NONE)
            blocks.append(0)
            continue
        engine = ENGINE_NUMBERS[op.engine]
        blocks.append(engine == _COLLECTIVE and is_blocking(op))
        # a `peer_offload` and its `peer_reload` agree in stage, block and piece
        if type(op) is PeerOffload or type(op) is PeerReload:
            slot = kept_elsewhere.setdefault((op.peer, op.block, piece_of(op)), len(kept_elsewhere))
            slots.append((len(engines), slot, type(op) is PeerOffload))
        engines.append(engine)
    touched, bounds = operands_of(stage.ops)
    numbers = dict(zip(dict.fromkeys(touched), count()))
    tensors = list(map(numbers.__getitem__, touched))
    posts, awaits = [NONE] * len(engines), [NONE] * len(engines)
    for position, slot, leaves in slots:
        (posts if leaves else awaits)[position] = slot
    starts, stops = (list(map(end, numbers)) if reuse else [NONE] * len(numbers) for end in (first_byte, end_byte))
    return StageNumbers(SweptOps(engines, blocks, bounds, tensors, starts, stops, posts, awaits), list(numbers))


def first_byte(tensor: Tensor) -> int:
    """Return the first byte of a tensor in the joint address space of all memories; `NONE` without an address."""
    return NONE if tensor.offset is None else _BEGINS[tensor.home] + tensor.offset


def end_byte(tensor: Tensor) -> int:
    """Return the exclusive end byte of a tensor, alignment included, in the joint space; `NONE` without an address."""
    return NONE if tensor.offset is None else _BEGINS[tensor.home] + tensor.offset + aligned(tensor.type.nbytes)
