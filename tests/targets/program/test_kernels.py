"""Kernels are declared once: tables and kernel sets are complete over the declarations, and a kernel that is forgotten is named."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.machine.cost import routine_work
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.program.kernel import Kernel
from ratrain.targets.program.kernel_calls import step_problem
from ratrain.targets.program.kernel_options import AdamWOptions, LogitOptions, ProductOptions, RopeOptions
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.per_kernel import TABLES, PerKernel
from ratrain.targets.program.routine import Shape, Step
from ratrain.targets.runtime.kernels import KERNEL_SETS, KernelSet, kernel_set
from ratrain.targets.runtime.kernels.reference.reference import ReferenceKernels
from ratrain.targets.runtime.kernels.shared import set_problems
from tests.end_to_end.tiny_runs import make_program

OWNERS = {
    "arithmetic": "ratrain.targets.machine.cost",
    "scratch in 'fast'": "ratrain.targets.runtime.kernels.fast.fast",
    "scratch in 'reference'": "ratrain.targets.runtime.kernels.reference.reference",
    "parts on the chip": "ratrain.targets.mt3000.tiles.calls",
}
"""What each layer knows of a kernel, and where."""
OF_TORCH = {
    "torch": "ratrain.targets.pytorch.host.host_kernels",
    "torch-device": "ratrain.targets.pytorch.device.device_kernels",
}
TORCH_FOLDERS = ("pytorch/device", "pytorch/host", "pytorch/triton")
OF_TRITON = {"torch-triton": "ratrain.targets.pytorch.triton.triton_kernels"}
SETS = [name for name in KERNEL_SETS.names() if name not in (*OF_TORCH, *OF_TRITON)]
if find_spec("torch") is not None:
    OF_TORCH |= OF_TRITON if find_spec("triton") is not None else {}
    SETS += OF_TORCH
    OWNERS |= {f"scratch in '{name}'": module for name, module in OF_TORCH.items()}

ROOT = Path(__file__).parents[3]
UNTYPED = [
    path.relative_to(ROOT)
    for folder in ("runtime/kernels/fast", "runtime/kernels/reference", "mt3000/kernels", *TORCH_FOLDERS)
    for path in sorted((ROOT / "targets" / folder).glob("*.py"))
]
"""Files of kernel sets, which mypy and ruff allow kernels without types."""

GELU = Kernel("gelu", "y = gelu(x).", "x:s[T,f] y:s[T,f]=")
"""A kernel that no layer has heard of."""


def test_a_new_kernel_is_missed_by_name_in_every_layer() -> None:
    for module in OWNERS.values():
        import_module(module)
    found = {table.what: table for table in TABLES}
    assert found.keys() == OWNERS.keys()
    for what, table in found.items():
        assert table.missing([*KERNELS.values(), GELU]) == [f"'gelu' has no {what}"]


@pytest.mark.parametrize("name", SETS)
def test_a_new_kernel_is_missed_by_name_in_every_kernel_set(name: str) -> None:
    kernels = type(kernel_set(name))
    assert set_problems(kernels, [*KERNELS.values(), GELU]) == [f"the kernel set '{name}' has no 'gelu'"]


@pytest.mark.parametrize("name", SETS)
def test_every_kernel_set_has_the_declared_signatures(name: str) -> None:
    kernels = kernel_set(name)
    assert kernels.name == name
    for kernel in KERNELS.values():
        assert kernel.signature_problem(parameters_of(getattr(type(kernels), kernel.name)).values()) is None


def test_what_the_runtime_calls_itself_is_typed_as_declared() -> None:
    typed = [name for name in KERNELS if hasattr(KernelSet, name)]
    assert {"adamw", "mean_of_replicas", "all_finite"} <= {*typed}
    for name in typed:
        check_signature(getattr(KernelSet, name), KERNELS[name])


def parameters_of(method: object) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(method).parameters)
    del parameters["self"]
    return parameters


def check_signature(method: object, kernel: Kernel) -> None:
    parameters = parameters_of(method)
    assert kernel.signature_problem(parameters.values()) is None
    assert parameters == kernel.parameters, kernel.name
    assert inspect.signature(method).return_annotation == kernel.returns, kernel.name


@pytest.mark.parametrize("path", UNTYPED, ids=str)
def test_kernels_alone_leave_their_types_to_the_declarations(path: Path) -> None:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name not in KERNELS:
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [each.arg for each in given if each.annotation is None and each.arg not in ("self", "cls")]
            assert not untyped, f"{node.name} of {path} does not say what {untyped} are"
            assert node.returns is not None, f"{node.name} of {path} does not say what it returns"


def test_a_kernel_set_with_other_arguments_cannot_be_made() -> None:
    with pytest.raises(
        TypeError, match=r"kernel set 'reference': 'column_sum' is declared with accumulate.*has nothing"
    ):

        class Forgets(ReferenceKernels):
            def column_sum(self, a, out, *, scratch):
                pass

    with pytest.raises(TypeError, match=r"'all_finite' is declared with nothing; it has limit=1, keyword-only"):

        class Adds(ReferenceKernels):
            def all_finite(self, a, *, scratch, limit=1):
                pass

    with pytest.raises(TypeError, match="'zero' is declared with a, positional or keyword; it has a, keyword-only"):

        class Names(ReferenceKernels):
            def zero(self, *, a, scratch):
                pass

    with pytest.raises(TypeError, match="'cast' is declared with the order src, dst"):

        class Turns(ReferenceKernels):
            def cast(self, dst, src, *, scratch):
                pass

    with pytest.raises(TypeError, match="the kernel set 'reference' has no 'add'"):

        class Lacks(ReferenceKernels):
            add = None


def test_an_implementation_may_take_options_together_but_nothing_else() -> None:
    gemm = KERNELS["gemm"]

    def together(self, a, b, out, *, scratch, **options): ...

    def without_scratch(self, a, b, out, **options): ...

    def other_default(self, a, b, out, *, scratch, trans_a=True, **options): ...

    assert gemm.signature_problem(parameters_of(together).values()) is None
    assert "'gemm' is declared with scratch" in str(gemm.signature_problem(parameters_of(without_scratch).values()))
    assert "it has trans_a=True" in str(gemm.signature_problem(parameters_of(other_default).values()))


@pytest.mark.parametrize("options", [ProductOptions, RopeOptions, LogitOptions, AdamWOptions])
def test_options_that_are_taken_together_are_as_declared(options: type) -> None:
    """Names and defaults are those of the declarations, and an unknown name is refused."""
    kernels = {ProductOptions: ("gemm",), RopeOptions: ("rope",), AdamWOptions: ("adamw",)}
    heads = ("head_forward", "head_backward", "head_backward_from_logits")
    for kernel in kernels.get(options, heads):
        declared = KERNELS[kernel].parameters
        for name, own in inspect.signature(options).parameters.items():
            assert own.default == declared[name].default, (kernel, name)
    with pytest.raises(TypeError, match="unexpected keyword argument 'trans_c'"):
        options(trans_c=True)


def test_a_table_that_forgets_a_kernel_or_invents_one_cannot_be_made() -> None:
    some = {name: 1 for name in KERNELS if name not in ("gemm", "rope")}
    before = len(TABLES)
    with pytest.raises(TypeError, match="'gemm' has no colour"):
        PerKernel("colour", some, never=["rope"])
    with pytest.raises(TypeError, match="'gelu' is not declared"):
        PerKernel("colour", {**some, "gemm": 1, "gelu": 1}, never=["rope"])
    with pytest.raises(TypeError, match="'add' has colour, and never occurs there"):
        PerKernel("colour", {**some, "gemm": 1}, never=["rope", "add"])
    assert len(TABLES) == before


def test_outputs_are_the_operands_that_are_written() -> None:
    outputs = {"gemm": ("out",), "rmsnorm_forward": ("xn", "rstd"), "rope": ("x",), "attention_forward": ("o", "lse")}
    assert {name: KERNELS[name].outputs for name in outputs} == outputs
    assert KERNELS["adamw"].outputs == ("master", "m", "v", "view")
    assert KERNELS["all_finite"].outputs == ()


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_declarations_are_sound(kernel: Kernel) -> None:
    written = {operand.name for operand in kernel.operands if operand.is_written}
    assert all(out in written for out, _ in kernel.in_place)
    assert {source for _, source in kernel.in_place} <= {operand.name for operand in kernel.operands}
    assert {operand.mode == "+" for operand in kernel.operands} <= {False, "accumulate" in kernel.options}
    assert all((option.allows is not None) == kernel.in_routines for option in kernel.options.values())


ROWS = {"a": (6, 8), "b": (3, 8, 5), "bounds": (4,), "out": (6, 5)}
"""Extents of `expert_rows` without an order: three experts."""


@pytest.mark.parametrize(
    ("kernel", "extents", "words"),
    [
        ("expert_rows", ROWS, None),
        ("expert_rows", {**ROWS, "a": (3, 8), "order": (6,)}, None),
        ("expert_rows", {**ROWS, "a": (3, 8)}, "without an order need as many rows as 3, not 6"),
        ("expert_rows", {**ROWS, "a": (4, 8), "order": (6,)}, "6 rows of experts for 4 tokens"),
        ("expert_rows", {**ROWS, "bounds": (3,)}, "'bounds' of 'expert_rows' is i32.3.: it does not fit"),
        ("expert_gradients", {"a": (6, 8), "b": (6, 5), "bounds": (4,), "out": (3, 8, 5)}, None),
        ("expert_gradients", {"a": (6, 8), "b": (3, 5), "bounds": (4,), "out": (3, 8, 5)}, "without an order need"),
        ("choice_sums", {"a": (6, 8), "out": (3, 8), "residual": (3, 8)}, None),
        ("choice_sums", {"a": (6, 8), "out": (4, 8)}, "6 rows are not as many for each of 4 tokens"),
        ("choice_sums", {"a": (2, 8), "out": (4, 8)}, "2 rows are not as many for each of 4 tokens"),
    ],
)
def test_rows_of_experts_fit_or_are_refused(kernel: str, extents: dict[str, Shape], words: str | None) -> None:
    integers = ("bounds", "order")
    types = {name: (Dtype.I32 if name in integers else Dtype.F16, shape) for name, shape in extents.items()}
    options = {"gathers_a": False, "accumulate": False} if kernel == "expert_gradients" else {}
    problem = step_problem(Step(kernel, {name: name for name in types}, options), types)
    assert problem is None if words is None else re.search(words, str(problem)), problem


def test_a_text_that_declares_no_operand_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'y:f16\[n\]' declares no operand"):
        Kernel("halve", "y = x / 2.", "x:*[n] y:f16[n]")


def test_a_kernel_that_is_not_declared_has_no_price() -> None:
    routine = make_program().routines[0]
    unknown = evolve(routine, steps=(evolve(routine.steps[0], kernel="gelu"),))
    with pytest.raises(KeyError, match="gelu"):
        routine_work(unknown, load_machine("mt3000"))
