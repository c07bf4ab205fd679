"""How many bytes of a stage's arena are live at each instruction of its step, from the program alone."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Home, aligned
from ratrain.targets.program.instruction import Access

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Engine
    from ratrain.targets.program.program import ProgramStage

_BEGINS = (Access.WRITE, Access.SCRATCH)


def live_bytes(stage: ProgramStage) -> dict[tuple[Engine, int], int]:
    """Live bytes in DDR while an instruction, (engine, position in its stream), runs, in the stage's execution order.

    A tensor lives from the instruction that writes it to the last one that accesses it; a carried one across the step's end too.
    """
    order = stage.execution_order()
    changes = [0] * (len(order) + 1)
    lives: dict[int, tuple[int, int]] = {}
    """The first and the last place in the order of each tensor's present life; before the step is place 0."""

    def end_life(tensor: int, last: int) -> None:
        held = stage.tensors[tensor]
        size = aligned(held.type.nbytes) if held.home is Home.DDR else 0
        changes[lives[tensor][0]] += size
        changes[last + 1] -= size

    accessed: set[int] = set()
    for place, (engine, position) in enumerate(order):
        for operand in stage.streams[engine][position].operands:
            tensor = operand.tensor
            if operand.access in _BEGINS:
                if tensor in lives:
                    end_life(tensor, lives[tensor][1])
                lives[tensor] = (place, place)
            else:
                lives[tensor] = (lives[tensor][0] if tensor in lives else 0, place)
            accessed.add(tensor)
    for tensor, held in enumerate(stage.tensors):
        if held.carried and tensor not in accessed:
            lives[tensor] = (0, 0)
    for tensor, (_, last) in lives.items():
        end_life(tensor, len(order) - 1 if stage.tensors[tensor].carried else last)
    return dict(zip(order, accumulate(changes), strict=False))
