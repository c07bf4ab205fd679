"""Cycles of a DSP core: micro-kernels on 16 lanes of 64 bit with three multiply-add units."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.mt3000.tiles.tile_schedule import Memories

if TYPE_CHECKING:
    from ratrain.targets.program.on_chip import Constants

LANE_BYTES = 16 * 8
"""Bytes of a vector register."""
MULTIPLY_ADD_UNITS = 3
MICRO_TILES = ((18, 1), (9, 2), (6, 3), (6, 4))
"""Register tiles (rows, vectors). Rows times vectors are multiples of 3 and at least 18, to hide the six cycles of a
multiply-add. Operands and accumulators fit the 64 registers; accumulators are float32, so take two registers for a
vector of halves."""
_LEAST_CYCLES = 6
"""Least cycles of one step along k: the latency of a multiply-add, after which the same accumulator may be used
again."""


def lanes(dtype: Dtype) -> int:
    """Return the elements of a vector register."""
    return LANE_BYTES // dtype.itemsize


def registers(micro: tuple[int, int], dtype: Dtype, *, half_sums: bool = False) -> int:
    """Return the vector registers a micro-kernel holds: one step's operands, and accumulators.

    These are at least float32, or, with `half_sums`, float16.
    """
    rows, vectors = micro
    return rows + vectors + rows * vectors * (1 if half_sums else max(1, Dtype.F32.itemsize // dtype.itemsize))


def step_cycles(micro: tuple[int, int]) -> int:
    """Return the cycles of one step along k."""
    rows, vectors = micro
    return max(_LEAST_CYCLES, -(-rows * vectors // MULTIPLY_ADD_UNITS))


def run_end_cycles(micro: tuple[int, int]) -> int:
    """Return the cycles in which a micro-kernel adds its float16 sums to float32 sums in AM.

    Assumed: each register of halves is converted to two of floats, and each of these is added, on three units.
    """
    rows, vectors = micro
    return -(-4 * rows * vectors // MULTIPLY_ADD_UNITS)


@frozen
class Cluster:
    """Constants of a machine file that tiles need, in bytes, seconds and cycles."""

    memories: Memories
    clock: float
    ddr_bandwidth: float
    gsm_bandwidth: float
    am_load: float
    """bytes a cycle, of each core"""
    dma_start: float
    """cycles of the core for issuing a transfer and waiting for it"""
    micro_kernel_start: float
    """cycles of a micro-kernel in addition to its steps"""
    transpose_rate: float
    """elements a cycle, of each core"""
    exp_operations: float
    """vector operations of an exponential"""
    half_sum_speed: float = 1.0
    """times that products of halves are faster with float16 sums than with float32 sums"""

    def sum_factor(self, dtype: Dtype, *, half_sums: bool) -> float:
        """Return the factor on a product's cycles, counted for vectors as wide as its operands of type `dtype`.

        Only float32 sums of halves have one: an instruction then multiplies a part of a vector.
        """
        return self.half_sum_speed if dtype.itemsize < Dtype.F32.itemsize and not half_sums else 1.0

    @property
    def cores(self) -> int:
        """Number of DSP cores."""
        return self.memories.cores


@cache
def _cluster(values: tuple[float, ...]) -> Cluster:
    cores, gsm, am, sm, *rates = values
    return Cluster(Memories(int(cores), int(gsm), int(am), int(sm)), *rates)


_ORDER = (
    "cores",
    "gsm_capacity",
    "am_capacity",
    "sm_capacity",
    "clock",
    "ddr_bandwidth",
    "gsm_bandwidth",
    "am_load",
    "dma_start",
    "micro_kernel_start",
    "transpose_rate",
    "exp_operations",
)


def cluster_of(machine: Constants) -> Cluster:
    """Return the cluster a machine file describes; equal values give the same object.

    Raises KeyError where the file has no memory levels.
    """
    return _cluster((*(machine[name] for name in _ORDER), _half_sum_speed(machine)))


def _half_sum_speed(machine: Constants) -> float:
    try:
        return machine["fp16_peak"] / machine["fp32_sum_peak"]
    except KeyError:  # a machine that has one peak for both
        return 1.0
