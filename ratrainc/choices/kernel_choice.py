"""Choice of the kernel set of a run: `--kernels auto`.

Bits are those of one kernel set, so a run that goes on from a checkpoint keeps the set that it began with. Else the
device, the type of the views and this processor decide:

    cuda             torch-triton where Triton is installed, else torch-device
    cpu, f16 or f32  fast: torch multiplies these by the same routines
    cpu, bf16        torch if this processor has matrix units for bf16 (AMX) and PyTorch is installed; if it multiplies
                     bf16 by vectors alone, the faster of both at a product of this model, timed for half a second;
                     else fast
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen
from threadpoolctl import threadpool_limits

from ratrain.ratrain_ir.config.accumulation import F32_SUMS
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.console.extras import is_installed
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.processor import bf16_instructions, cpu_flags
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_run
from ratrain.targets.runtime.kernels import KERNEL_SETS, kernel_set
from ratrain.targets.runtime.settings import AUTO_KERNELS, HOST_DEVICE, default_kernels

if TYPE_CHECKING:
    from collections.abc import Collection

    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.settings import RunSettings

_MATRIX_UNITS = "amx_bf16"
_SECONDS = 0.25
"""Time for each of two kernel sets."""
_MOST_ROWS = 512
"""Rows of the product that is timed: a fraction of a micro-batch, so that each set has several turns."""
_EVEN = 1.05
"""Speed at which a set counts as faster: less is within what a busy machine changes from turn to turn."""


@frozen
class KernelChoice:
    """A kernel set, and the reason for it."""

    name: str
    reason: str


def with_kernels(program: Program, settings: RunSettings, *, several: bool) -> RunSettings:
    """Return settings that name a kernel set, where they leave it to be chosen; with the reason.

    `several` processes must choose alike, so nothing is timed then.
    """
    execution = settings.execution
    if execution.kernels != AUTO_KERNELS:
        return settings
    chosen = _kept(settings) or _of_device(execution.device) or _of_host(program, several=several)
    return evolve(settings, execution=evolve(execution, kernels=chosen.name, kernels_reason=chosen.reason))


def host_choice(dtype: Dtype, flags: Collection[str], *, has_torch: bool) -> KernelChoice | None:
    """Choose by the type of views and what a processor with these flags multiplies; None where times must decide."""
    if dtype is not Dtype.BF16:
        return KernelChoice("fast", f"this plan computes in {dtype.value}")
    native = bf16_instructions(flags)
    if not native:
        return KernelChoice("fast", "this processor does not multiply bf16")
    if not has_torch:
        missing = "PyTorch would use that this processor multiplies bf16: pip install 'ratrain[torch]'"
        return KernelChoice("fast", missing)
    if _MATRIX_UNITS in native:
        return KernelChoice("torch", f"PyTorch multiplies bf16 by this processor's {_MATRIX_UNITS}")
    return None


def _kept(settings: RunSettings) -> KernelChoice | None:
    """Return the set of the run that is gone on with, if it works here."""
    if settings.start.checkpoint is None:
        return None
    try:
        name = latest_run(settings.start.checkpoint).get("kernels")
    except DiagnosticError:  # loading it says why
        return None
    if not isinstance(name, str) or KERNEL_SETS.place(name) is None:
        return None
    if name.startswith("torch") and not is_installed("torch"):
        return None
    on_host = settings.execution.device == HOST_DEVICE
    if (name == "torch-triton" and on_host) or not (on_host or KERNEL_SETS.load(name).on_devices):
        return None
    return KernelChoice(name, "the run it goes on from had them")


def _of_device(device: str) -> KernelChoice | None:
    if device == HOST_DEVICE:
        return None
    name = default_kernels(device)
    return KernelChoice(name, "Triton is installed" if name == "torch-triton" else "Triton is not installed")


def _of_host(program: Program, *, several: bool) -> KernelChoice:
    plan, flags = program.plan, cpu_flags()
    if plan.accumulate != F32_SUMS:
        return KernelChoice("fast", f'PyTorch does not sum as numerics.accumulate = "{plan.accumulate}" says')
    chosen = host_choice(Dtype(plan.view_dtype), flags, has_torch=is_installed("torch"))
    if chosen is not None:
        return chosen
    native = ", ".join(bf16_instructions(flags))
    if several:
        return KernelChoice("torch", f"PyTorch multiplies bf16 by this processor's {native}")
    rows = min(_MOST_ROWS, plan.micro_batch_size * plan.seq_len)
    gain = _seconds("fast", rows, program.model.hidden_size) / _seconds("torch", rows, program.model.hidden_size)
    if gain >= _EVEN:
        return KernelChoice("torch", f"PyTorch multiplies bf16 {gain:.1f} times as fast ({native}; timed now)")
    return KernelChoice("fast", f"PyTorch multiplies bf16 {gain:.1f} times as fast here ({native}; timed now)")


def _seconds(name: str, rows: int, width: int) -> float:
    """Return the least seconds of a product [rows, width] x [width, width] of bf16 by one thread."""
    kernels: Any = kernel_set(name)
    kind = NUMPY_DTYPES[Dtype.BF16]
    random = np.random.default_rng(0)
    a = random.standard_normal((rows, width), np.float32).astype(kind)
    b = random.standard_normal((width, width), np.float32).astype(kind)
    out = np.empty((rows, width), kind)
    scratch = kernels.memory.scratch(kernels.scratch_bytes("gemm", a=a, b=b, out=out))
    least, end = float("inf"), None
    with threadpool_limits(limits=1):
        while end is None or perf_counter() < end:
            scratch.reset()
            begin = perf_counter()
            kernels.gemm(a, b, out, scratch=scratch)
            least = min(least, perf_counter() - begin)
            end = end or perf_counter() + _SECONDS  # the first call compiles, or loads a library
    return least
