"""Iterations of GPT models in closed form: 1F1B over equal stages of the blocks of `gpt_block`, on the ranks' links.

Gradients are summed over replicas after the last backward, in one piece. Ranks are numbered as in Megatron-LM:
tensor-parallel ranks are neighbours, then the replicas of a stage, then stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.rank_mapping import Tile
from ratrain.ratrain_ir.topology import Mesh
from ratrain.ratrainc.calibration.gpt_block import ACTIVATION_BYTES, BlockShape, blocks_of
from ratrain.targets.machine.collective_cost import all_reduces, cheapest
from ratrain.targets.machine.cost import message_work, update_work
from ratrain.targets.machine.placement import Placement

if TYPE_CHECKING:
    from ratrain.targets.machine.link_groups import LinkGroup
    from ratrain.targets.machine.machine import Machine

_GRADIENT_BYTES = 2
_SUM_BYTES = 4
_UPDATE_BYTES = 30
"""Bytes that AdamW moves per parameter: f32 master, two moments read and written, gradient read, f16 weight written."""
_DIRECTIONS = 2
"""Messages of a boundary that fill and drain the pipeline: one activation, one gradient."""
_OWN_PASSES = 2
"""Passes over a sum in memory: it is read and written."""


@frozen
class GptRun:
    """A GPT under a parallel plan, in the terms of a measurement; `micro_batch` in sequences."""

    hidden: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    pp: int
    dp: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    """true if every layer's forward is computed again before its backward"""

    @property
    def shape(self) -> BlockShape:
        """Sizes that determine the kernels of its blocks."""
        return BlockShape(self.hidden, self.heads, self.seq_len, self.micro_batch, self.tp)


@frozen
class BlockSeconds:
    """Seconds of one micro-batch: a layer forward and backward, the head both ways, the embedding both ways."""

    forward: float
    backward: float
    head: float
    embedding: float


class GptTimes:
    """Times of iterations on one machine. Blocks are priced once per shape and place; `factors` scale layers."""

    def __init__(self, machine: Machine, factors: Mapping[BlockShape, float] | None = None) -> None:
        self.machine = machine
        self._factors = factors or {}
        self._blocks = cache(self._block_seconds)

    def blocks(self, run: GptRun) -> BlockSeconds:
        """Return the seconds of the blocks of a run."""
        return self._blocks(run.shape, placement_of_run(run.tp, run.dp, run.pp, self.machine.link_groups))

    def _block_seconds(self, shape: BlockShape, placement: Placement) -> BlockSeconds:
        whole = self._sum_seconds(placement, "tensor", shape.activation, ACTIVATION_BYTES)
        rows = self._sum_seconds(placement, "tensor", shape.rows, _SUM_BYTES)
        blocks, factor = blocks_of(shape), self._factors.get(shape, 1.0)
        layer = [factor * work.seconds(self.machine, whole, rows) for work in (blocks.forward, blocks.backward)]
        return BlockSeconds(
            *layer, *(work.seconds(self.machine, whole, rows) for work in (blocks.head, blocks.embedding))
        )

    def _sum_seconds(self, placement: Placement, group: str, elements: float, itemsize: int) -> float:
        """Return the seconds of an all-reduce in a group of ranks; 0 for a group of one."""
        members = placement.members(group)
        if members.count == 1:
            return 0.0
        own = _OWN_PASSES * elements * itemsize
        way = cheapest(all_reduces(elements, itemsize, members, self.machine), self.machine, own)
        return way.work(self.machine, own).seconds

    def iteration(self, run: GptRun) -> float:
        """Return the seconds of an iteration.

        One micro-batch goes through all stages in turn. Each further one adds the time of the slowest stage. Then
        gradients are reduced and weights are updated.
        """
        machine, shape, blocks = self.machine, run.shape, self.blocks(run)
        placement = placement_of_run(run.tp, run.dp, run.pp, machine.link_groups)
        layer = blocks.forward * (2 if run.recompute else 1) + blocks.backward
        stages = [run.layers / run.pp * layer] * run.pp
        stages[0] += blocks.embedding
        stages[-1] += blocks.head
        seconds = sum(stages) + (run.micro_batches - 1) * max(stages)
        for stage in range(run.pp - 1):
            level = placement.level_between(stage, stage + 1)
            nbytes = ACTIVATION_BYTES * shape.activation
            seconds += _DIRECTIONS * message_work(nbytes, placement.message_link(level), level, machine).seconds
        table = shape.words * run.hidden
        parameters = shape.layer_parameters * run.layers // run.pp + table
        seconds += self._sum_seconds(placement, "replicas", parameters, _GRADIENT_BYTES)
        if run.pp > 1:
            seconds += self._sum_seconds(placement, "ends", table, _GRADIENT_BYTES)
        return seconds + update_work(_UPDATE_BYTES * parameters, machine, on_host=False).seconds


@cache
def placement_of_run(tp: int, dp: int, pp: int, groups: tuple[LinkGroup, ...]) -> Placement:
    """Return the placement of ranks: tensor-parallel ranks fill a group first, then replicas, then stages."""
    tiles = []
    for group in groups[:-1]:
        room = group.clusters or tp * dp * pp
        peers = gcd(tp, room)
        replicas = gcd(dp, room // peers) if peers == tp else 1
        stages = gcd(pp, room // (peers * replicas)) if (peers, replicas) == (tp, dp) else 1
        tiles.append(Tile(group.name, stages, replicas, peers))
    return Placement(groups, Mesh(pp, dp, tp, tuple(range(pp))), tuple(tiles))
