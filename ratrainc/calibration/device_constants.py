"""Constants of a machine file that are measured on a device, or taken from another machine's file."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrainc.facts.machine_facts import memory_limit
from ratrain.targets.machine.constants import Constant
from ratrain.targets.machine.link_groups import SHORT_KEYS
from ratrain.targets.runtime.arena.process_memory import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.runtime.arena.stopwatch import Stopwatch
    from ratrain.targets.runtime.kernels import KernelSet

_OF_LINKS = (
    *SHORT_KEYS,
    *("collective_chunk", "message_cost", "round_skew", "transport_overhead", "transport_overhead_per_group"),
)
_COPIED = 1 << 26
_FEW = 64
_COPIES = 7


def link_part(machine: Machine) -> tuple[dict[str, Constant], tuple[str, ...], tuple[str, ...]]:
    """Return the link constants of a machine, the names of its link groups, and its algorithms of collectives.

    Each constant keeps its certainty; its source names the machine.
    """
    constants = {
        name: evolve(constant, source=f"machine '{machine.name}': {constant.source}")
        for name, constant in machine.constants.items()
        if name in _OF_LINKS or "." in name
    }
    return constants, machine.group_names, machine.collectives


def capacity_constants(kernels: KernelSet) -> dict[str, Constant]:
    """Measure a device's memory, and the part in use before any arena; load kernels first by a small product."""
    _load(kernels)
    facts = kernels.memory.device_facts()
    if facts is not None:
        total, taken, what = facts.total, facts.taken, f"{facts.name}: what cudaMemGetInfo reports"
        of_taken = (
            f"{facts.name}: neither free nor PyTorch's own once kernels are loaded: context, libraries, other processes"
        )
    else:
        total, taken, what = (
            memory_limit(),
            resident_bytes() or 0,
            "memory of this host, or what its control group allows",
        )
        of_taken = "resident in this process once kernels are loaded: interpreter and libraries"
    constants = {"ddr_capacity": Constant(float(total), "bytes", "measured", what)}
    if taken:
        constants["runtime_overhead"] = Constant(float(taken), "bytes", "measured", of_taken)
    return constants


def copy_constants(kernels: KernelSet) -> dict[str, Constant]:
    """Measure the bandwidth of copies within the device and, on a GPU, from its host.

    The first is where the fit of `ddr_bandwidth` starts. From the host, a small copy gives the constant part.
    """
    memory = kernels.memory
    target, source = memory.allocate(_COPIED), memory.allocate(_COPIED)
    watch = memory.stopwatch()
    within = _seconds_of(watch, lambda: memory.copy(target, source))
    start = Constant(2 * _COPIED / within, "bytes/s", "assumed", "where the fit of rates starts: a copy")
    constants = {"ddr_bandwidth": start}
    facts = memory.device_facts()
    if facts is None:
        return constants

    many, few = (_seconds_of(watch, memory.feed(target[:count]).deliver) for count in (_COPIED, _FEW))
    bandwidth = min(_COPIED / max(many - few, 1e-12), start.value)
    text = f"{facts.name}: {_COPIED >> 20} MiB from pinned memory of its host"
    constants["host_bandwidth"] = Constant(bandwidth, "bytes/s", "measured", text)
    constants["host_handover"] = Constant(few, "s", "measured", f"{facts.name}: {_FEW} bytes from its host")
    return constants


def _seconds_of(watch: Stopwatch, function: Callable[[], None]) -> float:
    """Return the median seconds of several calls, after one that is not counted."""
    taken = []
    for _ in range(_COPIES + 1):
        start = watch.now()
        function()
        taken.append(watch.now() - start)
    return median(taken[1:])


def _load(kernels: KernelSet) -> None:
    """Compute a small product, to load the libraries."""
    memory = kernels.memory
    side = 64
    matrices = [memory.typed(memory.allocate(4 * side * side), Dtype.F32, (side, side)) for _ in range(3)]
    shapes = dict(zip(("a", "b", "out"), [np.zeros((side, side), np.float32)] * 3, strict=True))
    scratch = memory.scratch(kernels.scratch_bytes("gemm", **shapes))
    gemm: Any = getattr(kernels, "gemm")  # noqa: B009 - kernels are called by the names that steps give
    gemm(*matrices, scratch=scratch)
    memory.stopwatch().now()
