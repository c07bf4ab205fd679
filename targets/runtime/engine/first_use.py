"""Memory that a process takes at the first use of libraries and compiled loops, beside what it plans.

The figures are measured, not derived: a run adds them, so that its sum holds. They are the growth of resident memory
beyond arenas, scratch, declared constants and what was resident before the arenas were made. Measured on Linux, glibc,
x86-64 with AVX-512: one and two threads, arenas of 2.5, 301 and 1110 MiB, f16 and bf16 (docs/runtime.md has the table).
Each figure is above all that were seen. The memory of devices is not among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.runtime.arena.tensor_file import PIECE_ELEMENTS

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.kernels import KernelSet

_MIB = 1 << 20
_LOOPS = "compiled loops"
_BUFFERS = "buffers of BLAS"
_PAGES = "pages of libraries"
_CODE = {"fast": 8, "tiled": 8, "torch": 8}
"""MiB by kernel set: loops that are read from disk as they are first called, with what the reader leaves behind. Seen: 5.3."""
_LIBRARY_PAGES = {"fast": 3, "tiled": 3, "reference": 4, "torch": 13, "torch-device": 18, "torch-triton": 18}
"""MiB by kernel set: of files of libraries what the first step touches. Seen: 0.7 to 1.9 with numpy alone, 9.4 with PyTorch's products, 15.3 where
its tensors are the arenas."""
_BUFFER = 8
"""MiB that BLAS packs factors into, for each thread that multiplies: seen 4.8 of OpenBLAS, 5.4 of PyTorch's."""
_FORM_OF_PRODUCT = 3 * _MIB // 2
"""Bytes that oneDNN keeps for each form of product: code and packed factors. Seen 0.5 to 1.1 MiB, and 6 once."""
_STACK = 256 << 10
"""Bytes of a thread's stack that engines touch."""
_PIECES = 2 * PIECE_ELEMENTS * 4
"""Bytes of weights, checkpoints and data on their way: a piece that is read or written, and what it becomes."""
_COMPILING = 128 * _MIB
"""Bytes that the compiler takes, which stay: seen 72 MiB, once on a machine."""
_FIGURES_OF_STEP = 2560
"""Bytes that a run keeps of each step, for its last words and plots: seen 2.2 KiB."""


def first_use(
    program: Program,
    kernels: KernelSet,
    *,
    scratch_bytes: int,
    multiplying: int,
    engines: int,
    compiles: bool,
    steps: int,
) -> dict[str, int]:
    """Bytes by what takes them, of a process with so much scratch, so many threads that multiply and threads of engines, and so many steps to come.

    One that `compiles` has loops that are not kept on disk yet. Empty where a device has the arenas.
    """
    if kernels.memory.overlaps:
        return {}
    name = kernels.name
    found = {
        _LOOPS: _CODE.get(name, 0) * _MIB,
        _BUFFERS: _BUFFER * _MIB * multiplying,
        _PAGES: _LIBRARY_PAGES.get(name, max(_LIBRARY_PAGES.values())) * _MIB,
        "stacks of threads": engines * _STACK,
        "pieces of files": _PIECES,
        "compiling loops": _COMPILING if compiles and name in _CODE else 0,
        "figures of steps": steps * _FIGURES_OF_STEP,
    }
    if (
        name == "reference"
    ):  # numpy makes temporaries as large as those that the other sets have room for in their scratch
        found["temporaries of numpy"] = scratch_bytes
    if name == "torch" and Dtype(program.plan.view_dtype) is Dtype.BF16:
        found["forms of products"] = len(_forms_of_products(program)) * _FORM_OF_PRODUCT
    return {what: count for what, count in found.items() if count}


def _forms_of_products(program: Program) -> set[object]:
    """The products that differ in shapes, or in what is transposed or added."""
    forms: set[object] = set()
    for routine in program.routines:
        for step in routine.steps:
            if step.kernel in _MULTIPLY:
                shapes = tuple(routine.shape_of(reference) for reference in step.operands.values())
                forms.add((step.kernel, shapes, tuple(step.options.items())))
    return forms


_MULTIPLY = ("gemm", "head_forward", "head_backward")
