"""Shape of a pipeline that schedules are made for: stages, micro-batches, chunks and their layout, slices."""

from __future__ import annotations

from attrs import evolve, frozen

LAYOUTS = ("loop", "vee")
"""Layouts of chunks, numbered in forward order, on P stages: `loop` is stage c mod P, `vee` goes 0..P-1 and back."""


@frozen(cache_hash=True)
class PipelineShape:
    """Numbers that a schedule depends on. P, M, V and k are their letters in the formulas of schedules."""

    stages: int
    """P, number of pipeline stages"""
    micro_batches: int
    """M, micro-batches of a step"""
    chunks: int = 1
    """V, chunks of a stage"""
    layout: str = "loop"
    """one of `LAYOUTS`"""
    slices: int = 1
    """k, slices of a micro-batch; 1 if micro-batches are whole"""
    forward_only: int = 0
    """first chunks without a backward: nothing in them, or below them, trains"""

    @property
    def trained_whole(self) -> PipelineShape:
        """The shape in which every chunk has a backward; schedules are written for it."""
        return evolve(self, forward_only=0) if self.forward_only else self

    @property
    def chunk_stages(self) -> tuple[int, ...]:
        """The stage of each chunk, indexed by the chunk's number in forward order."""
        there = tuple(range(self.stages))
        turns = (there, there[::-1]) if self.layout == "vee" else (there, there)
        return tuple(stage for turn in range(self.chunks) for stage in turns[turn % 2])

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of the chunks on a stage, in forward order."""
        places = (stage, self.stages - 1 - stage if self.layout == "vee" else stage)
        return tuple(turn * self.stages + places[turn % 2] for turn in range(self.chunks))
