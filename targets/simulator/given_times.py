"""Times of ops that somebody states, in place of a machine's: textbook cases, and what a paper measured on its pipeline.

The unit of work is what a stage does for one micro-batch: its forward takes `forward` in all, spread evenly over the attention and
mlp blocks of the stage. Embedding and head take none of it, so that equal times make equal stages, as closed forms have them.
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
"""Whether the time of a kind is that of all blocks of a stage for one micro-batch; else it is that of one op."""
KINDS = tuple(_OF_A_STAGE)
"""The keywords that times can be given of."""
_HALVES = ("backward_input", "backward_weight")
_WITHOUT_TIME = ("embed", "head")


@frozen
class GivenTimes:
    """Times by the keyword of the op, in any unit: what is simulated with them is in the same one. Kinds that are left out take none.

    Of block ops the time is that of all attention and mlp blocks of a stage, for one micro-batch, of which a slice takes what it has of
    the tokens; of others, that of one op. A whole
    backward takes `backward`, or, where that is left out, what its halves `backward_input` and `backward_weight` take together.
    """

    seconds: Mapping[str, float]

    @classmethod
    def textbook(cls, forward: float, backward_input: float, backward_weight: float, message: float) -> GivenTimes:
        """T_F, T_B, T_W and T_comm of Qi et al. (2023): T_B makes the input's gradient, T_W the weights', T_comm is a message's."""
        halves = dict(zip(_HALVES, (backward_input, backward_weight), strict=True))
        return cls({"forward": forward, **halves, "send": message})

    def run(self, program: Program, *, rendezvous: bool = False) -> Timeline:
        """The timeline of a program whose ops take these times; nothing is shared.

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
    """The blocks of a stage that share its time."""
    compute = stage.streams[Engine.COMPUTE]
    return {item.blocks[0] for item in compute if item.keyword == "forward" and _takes_time(item)}


def _takes_time(instruction: Instruction) -> bool:
    return instruction.blocks[0] not in _WITHOUT_TIME
