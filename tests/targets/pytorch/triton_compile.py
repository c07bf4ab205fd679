"""Compile, without a GPU, every fused kernel for every call that tests make, to the code of a GPU: a line of JSON for each.

TRITON_INTERPRET=0 python triton_compile.py CAPABILITY TYPE
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch
from ratrain.targets.pytorch.triton import triton_common, triton_head, triton_kernels
from ratrain.targets.pytorch.triton.triton_common import BLOCK
from tests.targets.pytorch.kernel_calls import VARIANTS, kernel_calls
from tests.targets.pytorch.tensor_calls import as_tensors

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
}
TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
EXACT = {"gelu_forward", "gelu_backward", "geglu_forward", "geglu_backward"}


def word_of(value: Any) -> str:
    """The type of an argument, as Triton calls it."""
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


class Recorder:
    """Compiles what is launched in place of launching it, each kernel for the same arguments once."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.found: dict[str, dict[str, Any]] = {}

    def launch(
        self, kernel: Any, grid: Any, *arguments: Any, warps: int = 4, stages: int = 3, **constants: Any
    ) -> None:
        assert all(grid)
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        signature = {name: word_of(value) for name, value in given.items()} | dict.fromkeys(constants, "constexpr")
        key = json.dumps([kernel.__name__, signature, constants, warps])
        if key in self.found:
            return
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        aligned = {
            (number,): [["tt.divisibility", 16]] for number, value in enumerate(arguments) if torch.is_tensor(value)
        }
        source = ASTSource(kernel, signature, places, aligned)
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
        made = triton.compile(source, target=self.target, options=options)
        text = made.asm["ptx"]
        self.found[key] = {
            "kernel": kernel.__name__,
            "constants": constants,
            "cubin": len(made.asm["cubin"]),
            "atomic": bool(re.search(r"\b(atom|red)\.", text)),
            "fused": "fma.rn.f32" in text,
            "shared": made.metadata.shared,
        }
        sys.stdout.write(f"{json.dumps(self.found[key])}\n")


def compile_experts(kernels: Any, dtype: Any) -> None:
    """Make calls with experts of a model's size: 2048 to 768 elements, and back; and choices among 128."""

    def made(kernel: str, **arguments: Any) -> None:
        scratch = TensorScratch(kernels.scratch_bytes(kernel, **arguments))
        getattr(kernels, kernel)(**{name: as_tensors(value) for name, value in arguments.items()}, scratch=scratch)

    grouped = {"order": np.zeros(32, np.int32), "bounds": np.zeros(3, np.int32)}
    wide, narrow, sums = np.ones((16, 2048), dtype), np.ones((32, 768), dtype), np.ones((16, 2048), np.float32)
    for trans_b in (False, True):
        up, down = np.ones((2, 768, 2048), dtype), np.ones((2, 2048, 768), dtype)
        up, down = (up, down) if trans_b else (down, up)
        made("expert_rows", a=wide, b=up, **grouped, out=narrow, trans_b=trans_b)
        made(
            "expert_rows",
            a=narrow,
            b=down,
            bounds=grouped["bounds"],
            out=np.ones((32, 2048), dtype),
            trans_b=trans_b,
            accumulate=True,
        )
        made("expert_sums", a=narrow, b=down, **grouped, sums=sums, out=wide, trans_b=trans_b, accumulate=trans_b)
    for stored in (dtype, np.float32):
        of_up, of_down = np.ones((2, 2048, 768), stored), np.ones((2, 768, 2048), stored)
        made("expert_gradients", a=wide, b=narrow, **grouped, out=of_up, gathers_a=True, accumulate=False)
        made("expert_gradients", a=narrow, b=wide, **grouped, out=of_down, gathers_a=False, accumulate=True)
        made(
            "expert_gradients", a=narrow, b=narrow, bounds=grouped["bounds"], out=of_up, gathers_a=True, accumulate=True
        )
    made("choice_sums", a=np.ones((32, 2048), dtype), out=wide)
    made("choice_sums", a=np.ones((32, 2048), dtype), out=wide, residual=wide, accumulate=True)
    route = {"logits": np.ones((16, 128), np.float32), "chosen": np.ones((16, 8), np.int32)}
    route |= {"weights": np.ones((16, 8), np.float32), "normalise": True}
    made("route_forward", **route)
    above = {"dweights": route["weights"], "bounds": np.zeros(129, np.int32), "dlogits": route["logits"]}
    made("route_backward", **route, **above)
    made("route_backward", **route, **above, scale=np.ones(2, np.float32), balance=0.01, z=0.001)


def main(capability: int, dtype: Any) -> None:
    """Make each call of the tests, with a recorder in place of a GPU."""
    recorder = Recorder(capability)
    for name, module in list(sys.modules.items()):
        if name.startswith("ratrain.targets.pytorch.triton.triton_") and hasattr(module, "launch"):
            module.launch = recorder.launch  # type: ignore[attr-defined]
    triton_kernels.interpreted = lambda: True  # type: ignore[assignment]
    assert not triton_common.interpreted()
    kernels = triton_kernels.TorchTriton()
    for variant in VARIANTS:
        for kernel, arguments in kernel_calls(variant, dtype).items():
            for more in ({"exact": False}, {"exact": True}) if kernel in EXACT else ({},):
                scratch = TensorScratch(kernels.scratch_bytes(kernel, **{**arguments, **more}))
                given = {key: as_tensors(value) for key, value in arguments.items()}
                getattr(kernels, kernel)(**{**given, **more}, scratch=scratch)
    for width in (2048, 5120, 16384):  # rows of models
        rows = {name: np.ones((3, width), dtype) for name in ("dxn", "x", "residual", "dx")}
        lines = {name: np.ones(width, dtype) for name in ("gamma", "dgamma", "dbeta")}
        numbers = {name: np.ones(3, np.float32) for name in ("mean", "rstd")}
        arguments = {**rows, **lines, **numbers, "accumulate": False}
        scratch = TensorScratch(kernels.scratch_bytes("layernorm_backward", **arguments))
        kernels.layernorm_backward(**{key: as_tensors(value) for key, value in arguments.items()}, scratch=scratch)
    compile_experts(kernels, dtype)
    numbers = torch.ones(100, dtype=torch.float64)
    kernels.add_squares([torch.ones(100)], numbers, numbers, numbers)
    recorder.launch(triton_head.split, (1, 1), torch.ones(100), *[torch.ones(100).bfloat16()] * 2, 100, block=BLOCK)
    arrays = {name: torch.ones(100) for name in ("master", "m", "v", "grad", "view")}
    numbers = {"t": torch.ones((), dtype=torch.int64), "multiplier": torch.ones(1), "lr": torch.ones(1)}
    scratch = TensorScratch(kernels.scratch_bytes("adamw"))
    rest = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decay": [(0, 50)], "scratch": scratch}
    kernels.adamw_on_device(**arrays, **numbers, **rest, skip=torch.zeros(1, dtype=torch.bool))


if __name__ == "__main__":
    main(int(sys.argv[1]), TYPES[sys.argv[2]])
