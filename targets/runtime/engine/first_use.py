"""Memory that a process takes at the first use of libraries and compiled loops, in addition to planned memory.

The figures are measured, not derived; a run adds them, so that its total is an upper bound. They are the growth of
resident memory beyond arenas, scratch, declared constants and the resident bytes before the arenas were made. Measured
on Linux, glibc, x86-64 with AVX-512: one and two threads, arenas of 2.5, 301 and 1110 MiB, f16 and bf16
(docs/runtime.md has the table). Each figure is above all that were seen. Device memory is not included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.loops import compiled_anew
from ratrain.targets.runtime.arena.tensor_file import PIECE_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.kernels import KernelSet

_MIB = 1 << 20
_LOOPS = "compiled loops"
_BUFFERS = "buffers of BLAS"
_PAGES = "pages of libraries"
BY_COMPILER = "compiling loops"
_CODE = {"fast": 8, "tiled": 8, "torch": 8}
"""MiB by kernel set: loops read from disk at their first call, and what the reader leaves behind. Seen: 5.3."""
_LIBRARY_PAGES = {"fast": 3, "tiled": 3, "reference": 4, "torch": 13, "torch-device": 18, "torch-triton": 18}
"""MiB by kernel set: library pages that the first step touches. Seen: 0.7 to 1.9 with numpy alone, 9.4 with
PyTorch's products, 15.3 where its tensors are the arenas."""
_BUFFER = 8
"""MiB that BLAS packs factors into, for each thread that multiplies. Seen: 4.8 of OpenBLAS, 5.4 of PyTorch's."""
_FORM_OF_PRODUCT = 3 * _MIB // 2
"""Bytes that oneDNN keeps for each form of product: code and packed factors. Seen: 0.5 to 1.1 MiB, and 6 once."""
_STACK = 256 << 10
"""Bytes of a thread's stack that engines touch."""
_PIECES = 2 * PIECE_ELEMENTS * 4
"""Bytes of weights, checkpoints and data being moved: a piece that is read or written, and its converted copy."""
COMPILING = 128 * _MIB
"""Bytes that the compiler takes and keeps. Seen: 72 MiB, once on a machine."""
_FIGURES_OF_STEP = 2560
"""Bytes that a run keeps of each step for its summary and plots. Seen: 2.2 KiB."""


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
    """Return the most bytes taken at first use, by what takes them; empty for a device.

    `scratch_bytes` is the process's scratch, `multiplying` the threads that multiply, `engines` the threads of engines,
    `steps` the steps to come. `compiles` is True if loops are not kept on disk yet.
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
        BY_COMPILER: COMPILING if compiles and name in _CODE else 0,
        "figures of steps": steps * _FIGURES_OF_STEP,
    }
    if name == "reference":  # numpy makes temporaries as large as the scratch of the other kernel sets
        found["temporaries of numpy"] = scratch_bytes
    if name == "torch" and Dtype(program.plan.view_dtype) is Dtype.BF16:
        found["forms of products"] = len(_forms_of_products(program)) * _FORM_OF_PRODUCT
    return {what: count for what, count in found.items() if count}


def compiles(program: Program, kernels: KernelSet) -> bool:
    """Tell whether loops that a program runs are not on disk: they have been compiled, or will be."""
    needed = {step.kernel for routine in program.routines for step in routine.steps}
    lacks: Callable[[Collection[str]], bool] = getattr(kernels, "compiles_for", lambda _: False)
    return compiled_anew() > 0 or lacks(needed)


def _forms_of_products(program: Program) -> set[object]:
    """Return the products that differ in shapes, or in transposition or addition."""
    forms: set[object] = set()
    for routine in program.routines:
        for step in routine.steps:
            if step.kernel in _MULTIPLY:
                shapes = tuple(routine.shape_of(reference) for reference in step.operands.values())
                forms.add((step.kernel, shapes, tuple(step.options.items())))
    return forms


_MULTIPLY = ("gemm", "head_forward", "head_backward")
