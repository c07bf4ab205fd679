"""Times of ops that are stated instead of computed for a machine: textbook cases, and times that a paper measured.

The unit of work is the work of a stage for one micro-batch: its forward takes `forward` in all, spread evenly over the
attention and mlp blocks of the stage. Embedding and head take no time, so that equal times make equal stages, as closed
forms assume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import COLLECTIVE_OPS
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, LoadInput, Release, ScaleUpdate, Update
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.simulator.timed_run import simulate

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program, ProgramStage
    from ratrain.targets.simulator.timeline import Timeline

_OF_A_STAGE: PerOp[bool] = PerOp(
    "unit of a given time",
    dict.fromkeys(BLOCK_OPS, True)
    | dict.fromkeys((*MESSAGE_OPS, *MEMORY_OPS, LoadInput, Update, ScaleUpdate), False)
    | dict.fromkeys(COLLECTIVE_OPS, False),
    never=(Release,),
)
"""True for kinds whose time is for all blocks of a stage and one micro-batch, False for kinds whose time is for one
op."""
KINDS = tuple(_OF_A_STAGE)
"""Keywords whose times can be given."""
_HALVES = ("backward_input", "backward_weight")
_WITHOUT_TIME = ("embed", "head")


@frozen
class GivenTimes:
    """Times by the keyword of the op, in any unit; results are in the same unit. Kinds that are left out take no time.

    The time of a block op is for all attention and mlp blocks of a stage and one micro-batch; a slice takes its share
    of the tokens. The time of any other op is for one op. A whole backward takes `backward`, or, where that is left
    out, the sum of its halves `backward_input` and `backward_weight`.
    """

    seconds: Mapping[str, float]

    @classmethod
    def textbook(cls, forward: float, backward_input: float, backward_weight: float, message: float) -> GivenTimes:
        """Return times from T_F, T_B, T_W and T_comm of Qi et al. (2023).

        T_B computes the input's gradient, T_W the weights' gradient, T_comm is for one message.
        """
        halves = dict(zip(_HALVES, (backward_input, backward_weight), strict=True))
        return cls({"forward": forward, **halves, "send": message})

    def run(self, program: Program, *, rendezvous: bool = False) -> Timeline:
        """Return the timeline of a program whose ops take these times; nothing is shared.

        Raises `DiagnosticError` RT005 where the program splits backwards and only the time of whole ones is given.
        """
        if "backward" in self.seconds and any(map(_has_halves, program.stages)):
            fail(
                "RT005",
                "the program splits backwards in halves, and 'backward' is the time of whole ones",
                help=f"give {' and '.join(_HALVES)} in its place: a whole backward takes both",
            )
        whole = self.seconds.get("backward", sum(self.seconds.get(half, 0.0) for half in _HALVES))
        times = {**self.seconds, "backward": whole}
        blocks = [len(_timed_blocks(stage)) for stage in program.stages]
        slices = program.plan.slices

        def duration(stage: int, instruction: Instruction) -> float:
            seconds = times.get(instruction.keyword, 0.0)
            if not _OF_A_STAGE[instruction.keyword]:
                return seconds
            if not _takes_time(instruction):
                return 0.0
            share = 1.0 if instruction.slice is None else slices[instruction.slice] / program.plan.seq_len
            return share * seconds / blocks[stage]

        return simulate(program, duration, rendezvous=rendezvous)


def _has_halves(stage: ProgramStage) -> bool:
    return any(item.keyword in _HALVES for item in stage.streams[Engine.COMPUTE])


def _timed_blocks(stage: ProgramStage) -> set[str]:
    """Return the blocks of a stage that share its time."""
    compute = stage.streams[Engine.COMPUTE]
    return {item.blocks[0] for item in compute if item.keyword == "forward" and _takes_time(item)}


def _takes_time(instruction: Instruction) -> bool:
    return instruction.blocks[0] not in _WITHOUT_TIME
