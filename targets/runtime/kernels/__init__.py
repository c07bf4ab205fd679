"""Primitive kernels: one interface, six sets.

`reference` is plain numpy, `fast` BLAS and fused numba loops, `tiled` runs on-chip tile schedules, `torch` multiplies
by PyTorch on the host, `torch-device` works on PyTorch tensors, `torch-triton` adds fused Triton kernels to that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ratrain.ratrain_ir.support.diagnostics import fail, nearest
from ratrain.ratrain_ir.support.registry import Registry
from ratrain.targets.runtime.arena.scratch import Scratch
from ratrain.targets.runtime.kernels.interface import KernelSet, OnChipKernels

__all__ = ["KERNEL_SETS", "KernelSet", "OnChipKernels", "Scratch", "kernel_set"]

KERNEL_SETS = Registry(
    "kernel set",
    "ratrain.kernel_sets",
    {
        "fast": "ratrain.targets.runtime.kernels.fast.fast:Fast",
        "reference": "ratrain.targets.runtime.kernels.reference.reference:ReferenceKernels",
        "tiled": "ratrain.targets.mt3000.kernels.tiled:Tiled",
        "torch": "ratrain.targets.pytorch.host.host_kernels:TorchOnHost",
        "torch-device": "ratrain.targets.pytorch.device.device_kernels:TorchDevice",
        "torch-triton": "ratrain.targets.pytorch.triton.triton_kernels:TorchTriton",
    },
)
"""All kernel sets by name.

A class is imported when it is asked for, so that numba and PyTorch are imported only if used.

Other distributions add theirs in the entry point group `ratrain.kernel_sets`; they derive from `KernelSetBase`.
"""


def kernel_set(name: str, threads: int = 1, device: str = "cpu") -> KernelSet:
    """Return the kernel set of that name. `threads` share the work of each kernel if the set is `threaded`.

    Raises `DiagnosticError`: RT004 for an unknown name or a set that does not work on the device, RT002 if PyTorch or
    Triton is not installed, RT093 if PyTorch finds no such device.
    """
    try:
        made = KERNEL_SETS.load(name)
    except KeyError:
        known = KERNEL_SETS.names()
        fail("RT004", f"'{name}' is not a kernel set; the sets are {', '.join(known)}", help=nearest(name, known))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        text = f"the kernel set '{name}' needs {error.name}, which is not installed"
        extra = "triton" if name == "torch-triton" else "torch"
        fail("RT002", text, help=f"pip install 'ratrain[{extra}]', or leave --kernels out")
    if made.on_devices:
        return _device_kernel_set(made, device)
    if device != "cpu":
        text = f"the kernel set '{name}' works on this processor, not on the device '{device}'"
        fail("RT004", text, help="leave --kernels out, or take torch-device")
    return _kernel_set(made, threads if made.threaded else 1)


@cache
def _device_kernel_set(made: Any, device: str) -> KernelSet:
    kernels: KernelSet = made(device)
    return kernels


@cache
def _kernel_set(made: Any, threads: int) -> KernelSet:
    kernels: KernelSet = made(threads) if made.threaded else made()
    return kernels
