"""The numbers a schedule is made for: stages, micro-batches, chunks and how they are laid over the stages, slices."""

from __future__ import annotations

from attrs import frozen

LAYOUTS = ("loop", "vee")
"""How chunks, numbered in forward order, lie on P stages: `loop` puts chunk c on stage c mod P, `vee` goes 0..P-1 and back."""


@frozen(cache_hash=True)
class PipelineShape:
    """What a schedule depends on."""

    stages: int
    """P"""
    micro_batches: int
    """M, of a step"""
    chunks: int = 1
    """V, of a stage"""
    layout: str = "loop"
    """one of `LAYOUTS`"""
    slices: int = 1
    """k, of a micro-batch"""

    @property
    def chunk_stages(self) -> tuple[int, ...]:
        """The stage of each chunk, in forward order."""
        there = tuple(range(self.stages))
        turns = (there, there[::-1]) if self.layout == "vee" else (there, there)
        return tuple(stage for turn in range(self.chunks) for stage in turns[turn % 2])

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks of a stage, in forward order."""
        places = (stage, self.stages - 1 - stage if self.layout == "vee" else stage)
        return tuple(turn * self.stages + places[turn % 2] for turn in range(self.chunks))
