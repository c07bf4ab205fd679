"""A head's forward and backward in one pass, where the backward follows at once: the logits are made once, not twice.

    forward  head   norm, head_forward                      norm
    backward head   norm, head_backward, norm backward      norm, head_in_one_pass, norm backward

The program stays as it is, and so do its proofs. What the forward leaves to the backward, lse and loss, is then written
one instruction later. That is sound where nobody can look at it before (`head_pairs`): the backward is the stage's very
next computation, and all other instructions that name these tensors wait until it is complete. The one pass needs no
other bytes than the backward, besides the loss, which is live because it is read later. An evaluation, which goes
forward alone, calls the forward with all its kernels.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from attrs import define

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.targets.runtime.kernels.interface import OnChipKernels, OnePassHeadKernels

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import ProgramStage
    from ratrain.targets.runtime.engine.rank import BoundRoutine
    from ratrain.targets.runtime.kernels import KernelSet

_SHARED = ("labels", "lse")
"""Roles of tensors that forward and backward of one head share; the view of its weights may be gathered anew."""
_FORWARD, _BACKWARD = "head_forward", "head_backward"
_OPTIONS = ("normalise", "scale_of_logits", "softcap")


def head_pairs(stage: ProgramStage) -> list[tuple[Instruction, Instruction]]:
    """Return each head's forward and backward of which the one may leave its sums to the other."""
    found: list[tuple[int, Instruction, Instruction, int, int]] = []
    for at, (forward, backward) in enumerate(pairwise(stage.streams[Engine.COMPUTE])):
        mine, others = ({operand.role: operand.tensor for operand in each.operands} for each in (forward, backward))
        if "loss" in mine and all(mine.get(role) == others.get(role) for role in _SHARED):
            found.append((at + 2, forward, backward, mine["lse"], mine["loss"]))
    looks = _looks(stage, {tensor for *_, lse, loss in found for tensor in (lse, loss)})
    return [
        (forward, backward)
        for done, forward, backward, lse, loss in found
        if min(looks[lse].first, looks[loss].first) >= done <= looks[loss].last
    ]


@define
class _Looks:
    """Computations after which instructions name a tensor: the fewest on other engines, and the most on any."""

    first: float = inf
    last: int = 0


def _looks(stage: ProgramStage, tensors: set[int]) -> dict[int, _Looks]:
    """Return when instructions name these tensors; one computation counts those before it."""
    looks = {tensor: _Looks() for tensor in tensors}
    for engine, stream in stage.streams.items() if tensors else ():
        done = 0
        for at, instruction in enumerate(stream):
            waits = (w.count for w in instruction.waits if w.engine is Engine.COMPUTE and not w.previous_step)
            # an engine goes through its stream in order, so what it has waited for stays done
            done = at if engine is Engine.COMPUTE else max(done, *waits, 0)
            for tensor in {operand.tensor for operand in instruction.operands} & tensors:
                look = looks[tensor]
                look.last = max(look.last, done)
                if engine is not Engine.COMPUTE:
                    look.first = min(look.first, done)
    return looks


def join_head(forward: BoundRoutine, backward: BoundRoutine, kernels: KernelSet) -> None:
    """Let the backward make the forward's sums too, if the kernel set can for these arguments.

    A set that executes on-chip schedules runs those of the program.
    """
    if not isinstance(kernels, OnePassHeadKernels) or isinstance(kernels, OnChipKernels):
        return
    first, second = forward.arguments(_FORWARD), backward.arguments(_BACKWARD)
    if not first or not second or first["logits"].shape != second["logits"].shape:
        return
    shaping = {name: second[name] for name in _OPTIONS if name in second}
    if kernels.makes_head_in_one_pass(second["xn"], second["table"], second["logits"], **shaping):
        forward.leave(_FORWARD)
        backward.replace(_BACKWARD, kernels.head_in_one_pass, loss=first["loss"], adds_loss=first["accumulate"])
