"""Compare kernels on the device with numpy's, one by one and in trainings of tiny models."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from drill_parts import Drill

    from ratrain.targets.runtime.kernels import KernelSet

WORKSPACES = {("head_backward", "logits"), ("expert_sums", "sums")}
"""Outputs by kernel that hold anything after it."""


def correctness(drill: Drill) -> None:
    """Compare kernels on the device with numpy's, and three steps of tiny models of three families."""
    if drill.on_host:
        os.environ["TRITON_INTERPRET"] = "1"
    import ml_dtypes
    import numpy as np
    from drill_parts import make_tests_importable, version_of

    from ratrain.targets.runtime.kernels import KERNEL_SETS

    make_tests_importable()
    names = list(drill.sets) or ["torch-device", *(["torch-triton"] if version_of("triton") else [])]
    if "torch-triton" not in names and not drill.sets:
        print("torch-triton is left out: Triton is not installed")
    kinds: list[Any] = [np.float16, ml_dtypes.bfloat16, np.float32]
    done = 0
    for name in names:
        kernels = drill.kernel_set(name)
        asked = _kernels_of_its_own(type(kernels), KERNEL_SETS.load("torch-device"), drill.words)
        variants = ("plain", "capped", "packed")
        is_slow = drill.on_host and name == "torch-triton"  # interpreted
        for dtype in kinds[1:2] if is_slow else kinds:
            for variant in variants[: 1 if is_slow else 3]:
                start, worst, calls = time.monotonic(), ("", 0.0), 0
                what = f"{name:13s} {np.dtype(dtype).name:9s} {variant:7s}"
                for kernel, share in _kernel_errors(drill, kernels, variant, dtype, asked):
                    calls += 1
                    worst = max(worst, (kernel, share), key=lambda each: each[1])
                    drill.check(share <= 1, f"{' '.join(what.split())} {kernel}: {share:.3g} of the bound")
                done += calls
                seconds = f"{time.monotonic() - start:.1f} s"
                print(
                    f"{what} {calls:3d} kernels, worst {worst[1]:.2f} of the bound ({worst[0]}), {seconds}", flush=True
                )
    drill.figures["kernel calls"] = done
    for name in names:
        _check_trainings(drill, name)


def _kernels_of_its_own(made: type, plain: type, words: Sequence[str]) -> Callable[[str], bool]:
    """Return a test of a kernel's name: it has one of some words, and its set does not inherit it from the plain one."""

    def is_compared(kernel: str) -> bool:
        is_own = made is plain or getattr(made, kernel) is not getattr(plain, kernel)
        return is_own and (not words or any(word in kernel for word in words))

    return is_compared


def _kernel_errors(
    drill: Drill, kernels: KernelSet, variant: str, dtype: Any, asked: Callable[[str], bool]
) -> Iterator[tuple[str, float]]:
    """Yield each kernel with the largest error of an output, as a share of what is allowed.

    Allowed are two roundings to the narrowest type of its operands.
    """
    from copy import deepcopy

    from drill_parts import one_line

    from ratrain.targets.program.kernels import KERNELS
    from ratrain.targets.runtime.kernels import Scratch, kernel_set
    from tests.targets.pytorch.kernel_calls import kernel_calls

    reference, memory = kernel_set("reference"), kernels.memory
    for kernel, arguments in kernel_calls(variant, dtype).items():
        if not asked(kernel):
            continue
        try:
            expected, on_host = deepcopy(arguments), deepcopy(arguments)
            value = getattr(reference, kernel)(**expected, scratch=Scratch(reference.scratch_bytes(kernel, **expected)))
            scratch = memory.scratch(kernels.scratch_bytes(kernel, **on_host))
            given = _on_device(on_host, memory)
            again = getattr(kernels, kernel)(**given, scratch=scratch)
            shares = [0.0 if not isinstance(value, bool) or bool(again) == value else float("inf")]
            for output in KERNELS[kernel].outputs:
                if output in arguments and (kernel, output) not in WORKSPACES:
                    found = memory.to_host(given[output])
                    shares.append(_share(found, expected[output], _allowed(arguments)))
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the others are asked too
            drill.check(False, f"{kernels.name} {kernel} {variant}: {one_line(error)}")
        else:
            yield kernel, max(shares)


def _on_device(arguments: dict[str, Any], memory: Any) -> dict[str, Any]:
    """Move arrays among arguments to the device; those that are one array become one tensor."""
    import numpy as np

    known: dict[int, Any] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in known:
            known[id(value)] = memory.staged(value)
        return known[id(value)]

    return {name: moved(value) for name, value in arguments.items()}


def _allowed(arguments: dict[str, Any]) -> float:
    import ml_dtypes
    import numpy as np

    arrays = [each for each in arguments.values() if isinstance(each, np.ndarray)]
    narrow = [float(ml_dtypes.finfo(each.dtype).eps) for each in arrays if each.dtype.itemsize == 2]
    return max([2e-5, *(2 * eps for eps in narrow)])


def _share(found: np.ndarray, expected: np.ndarray, allowed: float) -> float:
    """Return the largest error as a share of what is allowed, relative to the element or to the largest one."""
    import numpy as np

    found, expected = found.astype(np.float64), expected.astype(np.float64)
    bound = allowed * (max(1.0, float(np.abs(expected).max(initial=0.0))) + np.abs(expected))
    error = np.abs(found - expected) / bound
    return float(error.max(initial=0.0)) if np.isfinite(found).all() else float("inf")


NEAR = {"f32": 1e-5, "f16": 2e-3, "bf16": 4e-3}
"""Of losses, relative; the tests have 2e-6 for f32, with the exponentials of one processor."""


def _check_trainings(drill: Drill, name: str) -> None:
    """Compare losses of three steps with those of the reference kernels."""
    from ratrain.targets.runtime.kernels import kernel_set
    from tests.end_to_end.tiny_runs import MODEL, losses, make_program, run_settings, stream_for
    from tests.end_to_end.toys import EXPERTS, GEMMA3, GPT2, SHARED_EXPERT
    from tests.program_files import prepare

    models = {"llama": MODEL, "gpt2": GPT2, "gemma3": GEMMA3, "olmoe": EXPERTS, "qwen2_moe": SHARED_EXPERT}
    for family, model in models.items():
        is_short = drill.on_host and name == "torch-triton"  # what is interpreted is slow
        if is_short and family != "llama":
            continue
        off = {}
        for dtype, near in (NEAR if not is_short else {"f32": NEAR["f32"]}).items():
            program = make_program(model, view_dtype=dtype)
            both = []
            for kernels in (kernel_set("reference"), drill.kernel_set(name)):
                run = prepare(program, stream_for(program), run_settings(3, kernels=kernels.name), kernels)
                list(run.steps())
                both.append(losses(run))
            off[dtype] = max(abs(mine / theirs - 1) for theirs, mine in zip(*both, strict=True))
            drill.check(off[dtype] <= near, f"{name} trains {family} in {dtype} with losses {off[dtype]:.1e} off")
        words = ", ".join(f"{dtype} {each:.1e}" for dtype, each in off.items())
        print(f"{name:13s} {family}: losses of 3 steps of 4 ranks off by {words}", flush=True)
        drill.figures[f"losses {name} {family}"] = off
