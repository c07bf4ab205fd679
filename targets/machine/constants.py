"""Constants of a machine: their units, the bounds of their values, and which of them may be left out."""

from __future__ import annotations

from typing import Any, TypeGuard

from attrs import frozen

from ratrain.ratrain_ir.config.types import STORES
from ratrain.targets.machine.link_groups import GROUP_UNITS

CERTAINTIES = ("stated", "derived", "assumed", "unverified", "measured", "fitted")
NEEDED_UNITS = {
    "ddr_capacity": "bytes",
    "ddr_bandwidth": "bytes/s",
    "fp16_peak": "flop/s",
    "gemm_efficiency": "fraction of fp16_peak",
    "attention_efficiency": "fraction of fp16_peak",
    "link_bandwidth": "bytes/s",
    "link_latency": "s",
    "launch": "s",
    "collective_chunk": "bytes",
}
"""Constants that every machine has."""
TILE_UNITS = {
    "cores": "cores",
    "gsm_capacity": "bytes",
    "am_capacity": "bytes",
    "sm_capacity": "bytes",
    "clock": "cycles/s",
    "gsm_bandwidth": "bytes/s",
    "am_load": "bytes/cycle",
    "dma_start": "cycles",
    "micro_kernel_start": "cycles",
    "transpose_rate": "elements/cycle",
    "exp_operations": "vector operations",
}
"""Constants that cost = "tiles" needs; they may be left out otherwise."""
STORE_UNITS = {
    f"{home.value}_{name}": unit
    for home in STORES
    for name, unit in {"capacity": "bytes", "store": "bytes/s", "fetch": "bytes/s", "latency": "s"}.items()
}
"""Constants of each memory other than DDR: its bytes for a rank, its bytes a second in both directions, its seconds for
each transfer."""
OPTIONAL_UNITS = {
    "fp32_sum_peak": "flop/s",
    "host_bandwidth": "bytes/s",
    "host_handover": "s",
    "clusters_per_chip": "clusters",
    "chip_bandwidth": "bytes/s",
    "chip_latency": "s",
    "chip_uplink": "bytes/s",
    "message_cost": "s",
    "round_skew": "s",
    "part_copy": "s",
    "rank_jitter": "fraction of compute time",
    "dispatch": "s",
    "engine_gap": "s",
    "core_sharing": "fraction of an op's time",
    "gemm_half_extent": "elements",
    "head_efficiency": "fraction of fp16_peak",
    "runtime_overhead": "bytes",
    "transport_overhead": "bytes",
    "transport_overhead_per_group": "bytes",
    "allocator_slack": "fraction of ddr_capacity",
    "step_error": "fraction of a step's time",
    **STORE_UNITS,
    "host_update": "bytes/s",
}
ALL_UNITS = NEEDED_UNITS | TILE_UNITS | OPTIONAL_UNITS
"""Units by constant, of groups of clusters none: those have `GROUP_UNITS`."""
_WHOLE = (
    "clusters",
    "ddr_capacity",
    "collective_chunk",
    "clusters_per_chip",
    "cores",
    "gsm_capacity",
    "am_capacity",
    "sm_capacity",
    "runtime_overhead",
    "transport_overhead",
    "transport_overhead_per_group",
    *(f"{home.value}_capacity" for home in STORES),
)
LEAST, MOST = 1e-15, 1e30
"""Bounds far beyond any machine, so that no sum or quotient of times overflows."""
MOST_WHOLE = (1 << 50) - 1
NO_SOURCE = "not said"
"""Source of a constant whose file gives none."""
MAY_BE_ZERO = (
    "latency",
    *(f"{home.value}_latency" for home in STORES),
    "link_latency",
    "launch",
    "host_handover",
    "chip_latency",
    "message_cost",
    "round_skew",
    "part_copy",
    "rank_jitter",
    "dispatch",
    "engine_gap",
    "core_sharing",
    "gemm_half_extent",
    "runtime_overhead",
    "transport_overhead",
    "transport_overhead_per_group",
    "allocator_slack",
    "step_error",
)
WORDS = ("base", "name", "update_engine", "cost", "target", "op", "link_group", "collectives")
"""Keys of a machine file that are no constants."""


@frozen
class Constant:
    """One number of a machine, with its source."""

    value: float
    unit: str
    certainty: str
    source: str


def is_machine_key(key: str) -> bool:
    """Return whether a key may stand at the top of a machine file."""
    return key in ALL_UNITS or key in WORDS


def kind_of(key: str) -> str:
    """Return the name of a constant without its group."""
    return key.rpartition(".")[2]


def is_whole(key: str) -> bool:
    """Return whether a constant counts something."""
    return kind_of(key) in _WHOLE


def is_fraction(key: str) -> bool:
    """Return whether a constant is a fraction, which no value above 1 is."""
    return ALL_UNITS.get(key, "").startswith("fraction")


def unit_of(key: str) -> str:
    """Return the unit of a constant, whichever group it belongs to."""
    return (ALL_UNITS | GROUP_UNITS)[kind_of(key)]


def largest_value(key: str) -> float:
    """Return the largest allowed value of a constant."""
    if is_fraction(key):
        return 1.0
    return float(MOST_WHOLE) if is_whole(key) else MOST


def is_sound(value: Any, key: str) -> TypeGuard[int | float]:
    """Return whether a value is a number within the bounds of its constant."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if value == 0:
        return kind_of(key) in MAY_BE_ZERO
    return 1 <= value <= MOST_WHOLE if is_whole(key) else LEAST <= value <= MOST
