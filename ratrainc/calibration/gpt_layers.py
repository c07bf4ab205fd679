"""Layers of measured GPT iterations: the factor between a layer's predicted time and its time in the iterations.

Iterations with layers of one shape share that layer, whatever their stages, replicas and number of layers. The part
that constants do not explain becomes a factor of the shape, as a measurement of that layer alone would give. Shapes
without a measured iteration have no factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrainc.calibration.gpt_block import BlockShape
from ratrain.ratrainc.calibration.gpt_iteration import GptTimes

if TYPE_CHECKING:
    from ratrain.ratrainc.calibration.gpt_rows import GptRow
    from ratrain.targets.machine.machine import Machine


@frozen
class MeasuredLayer:
    """A layer's measured time in both directions, relative to its time by a machine's constants."""

    shape: BlockShape
    factor: float
    """median over the rows"""
    rows: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Peers, hidden size, heads, tokens of a sequence, sequences of a micro-batch."""
        shape = self.shape
        return shape.peers, shape.hidden, shape.heads, shape.seq_len, shape.micro_batch

    def to_json(self) -> dict[str, Any]:
        """Return the layer as `--json` prints it."""
        names = ("tp", "hidden", "heads", "seq", "micro_batch")
        return {**dict(zip(names, self.sizes, strict=True)), "rows": self.rows, "factor": self.factor}


def measured_layers(rows: Sequence[GptRow], machine: Machine) -> list[MeasuredLayer]:
    """Measure the layers of rows: one factor for each shape, the median over its rows."""
    once = GptTimes(machine)
    twice = GptTimes(machine, dict.fromkeys((row.run.shape for row in rows), 2.0))
    factors: dict[BlockShape, list[float]] = {}
    for row in rows:
        modelled = once.iteration(row.run)
        # Stages are equal, so longer layers leave the same stage the slowest: an iteration is linear in a layer's time.
        layers = twice.iteration(row.run) - modelled
        factors.setdefault(row.run.shape, []).append(1 + (row.seconds - modelled) / layers)
    found = (MeasuredLayer(shape, max(0.0, median(each)), len(each)) for shape, each in factors.items())
    return sorted(found, key=lambda layer: layer.sizes)
