"""A first cost model: a kernel takes the longer of its arithmetic and its DDR traffic; links have latency and bandwidth.

Arithmetic runs at a fraction of the FP16 peak that the machine file gives; every operand crosses DDR once. Tile shapes are not
modelled yet, so efficiency does not depend on shape.
"""

from __future__ import annotations

from math import ceil, log2, prod
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from targets.mt3000.machine import Machine
    from targets.routine import Routine, Step

UPDATE_BYTES_PER_PARAMETER = 30
"""AdamW reads and writes f32 master and two moments (24 bytes) and moves gradient and view (facts: 28 - 30, DDR bound)."""

_GEMM_KERNELS = ("gemm", "head_forward", "head_backward")
_ATTENTION_KERNELS = ("attention_forward", "attention_backward")


@frozen
class Work:
    """What a kernel does: floating-point operations and bytes to or from DDR."""

    flops: float
    ddr_bytes: float


def step_work(routine: Routine, step: Step) -> Work:
    """Operations and DDR bytes of one kernel of a routine."""
    ddr = sum(_bytes(routine, reference) for reference in step.operands.values())
    return Work(_flops(routine, step), ddr)


def _bytes(routine: Routine, reference: str) -> int:
    dtype, shape = routine.operand(reference)
    return prod(shape) * dtype.itemsize


def _flops(routine: Routine, step: Step) -> float:
    if step.kernel == "gemm":
        rows, columns = routine.shape_of(step.operands["out"])
        shape = routine.shape_of(step.operands["a"])
        inner = shape[0] if step.options.get("trans_a") else shape[1]
        return 2.0 * rows * columns * inner
    if step.kernel in _ATTENTION_KERNELS:
        options = step.options
        visible = _visible_keys(int(options["seq_len"]), options["window"])
        products = 2 if step.kernel == "attention_forward" else 5
        return 2.0 * products * int(options["batch"]) * int(options["heads"]) * int(options["head_dim"]) * visible
    if step.kernel in ("head_forward", "head_backward"):
        rows, hidden = routine.shape_of(step.operands["xn"])
        vocab = routine.shape_of(step.operands["table"])[0]
        return 2.0 * rows * hidden * vocab * (1 if step.kernel == "head_forward" else 3)
    return 0.0


def _visible_keys(seq_len: int, window: int | None) -> float:
    """Query-key pairs a causal mask leaves in one sequence."""
    if window is None or window >= seq_len:
        return seq_len * (seq_len + 1) / 2
    return window * (window + 1) / 2 + (seq_len - window) * window


def routine_seconds(routine: Routine, machine: Machine) -> float:
    """Seconds of a routine that has the cluster and its DDR to itself."""
    return sum(_step_seconds(routine, step, machine) for step in routine.steps)


def _step_seconds(routine: Routine, step: Step, machine: Machine) -> float:
    work = step_work(routine, step)
    efficiency = machine["attention_efficiency" if step.kernel in _ATTENTION_KERNELS else "gemm_efficiency"]
    arithmetic = work.flops / (machine["fp16_peak"] * efficiency)
    return machine["launch"] + max(arithmetic, work.ddr_bytes / machine["ddr_bandwidth"])


def routine_flops(routine: Routine) -> float:
    """Floating-point operations of all kernels of a routine."""
    return sum(step_work(routine, step).flops for step in routine.steps)


def message_seconds(nbytes: int, machine: Machine) -> float:
    """Seconds of a point-to-point message."""
    return machine["link_latency"] + nbytes / machine["link_bandwidth"]


def ring_seconds(nbytes: int, members: int, machine: Machine) -> float:
    """Seconds of a ring reduce-scatter or all-gather of `nbytes` in all: latency grows with D, traffic is (D-1)/D."""
    if members <= 1:
        return nbytes / machine["ddr_bandwidth"]
    hops = members - 1
    return hops * machine["link_latency"] + nbytes * hops / members / machine["link_bandwidth"]


def scalar_seconds(members: int, machine: Machine) -> float:
    """Seconds of an all-reduce of a few bytes: a tree up and down."""
    return 2 * ceil(log2(max(2, members))) * machine["link_latency"] if members > 1 else 0.0


def update_seconds(parameters: int, machine: Machine) -> float:
    """Seconds of AdamW on a shard, bound by DDR."""
    return machine["launch"] + UPDATE_BYTES_PER_PARAMETER * parameters / machine["ddr_bandwidth"]


def copy_seconds(nbytes: int, machine: Machine) -> float:
    """Seconds of moving bytes within DDR."""
    return nbytes / machine["ddr_bandwidth"]
