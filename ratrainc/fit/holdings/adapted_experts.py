"""Adapters of parameters of a block with experts: stacks of their matrices, and the router's.

PEFT makes the whole parameter anew at each forward, and autograd keeps it for the gradient of the rows (0.21.2,
tuners/lora/layer.py, ParamWrapper and _LoraFactorsProxy; torch derivatives.yaml _grouped_mm, baddbmm). A layer of
Qwen3-30B-A3B in bf16 with rank r on `down_proj` [E, h, I] = [128, 2048, 768], T k rows:

    trains       A [E r, I] and B [h, E r]
    kept         the new stack, 2 E h I = 384 MiB; the input of its product, 2 T k I; casts of A and B, if they are f32
    backward     gradient of the new stack, 2 E h I, until those of A and B are made of it

So each layer that is not recomputed keeps a second copy of its adapted experts, and one that is has it in its backward.
The product is made in the type of the frozen weights: autocast is off inside. A router's is W + B A, which autocast
makes. Neither takes dropout. tests/ratrainc/fit/test_adapted_experts.py counts the storages of PEFT's classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.model.expert_targets import DOWN, GATE_UP, ExpertTargets, expert_targets
from ratrain.ratrain_ir.support.module_patterns import is_named
from ratrain.ratrainc.bridge.jobs.job import Experts, Job, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import LISTS_LINEARS
from ratrain.ratrainc.fit.holdings.part import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ratrain.ratrainc.fit.holdings.part import Part

ROUTER = "router"
_WHOLE = (Sharding.NONE, Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2)


@frozen
class Adapted:
    """One parameter with an adapter: a stack of matrices, or a single one."""

    name: str
    matrices: int
    inputs: int
    outputs: int
    rank: int

    @property
    def elements(self) -> int:
        """Elements of the parameter."""
        return self.matrices * self.inputs * self.outputs

    @property
    def sides(self) -> tuple[int, int]:
        """Elements of A and of B."""
        return self.matrices * self.rank * self.inputs, self.matrices * self.rank * self.outputs


def targets_of_experts(job: Job) -> ExpertTargets:
    """Return the targets of a job's adapter, apart by linear layers and parameters; of a dense model all are linear."""
    adapter, model = job.adapter, job.model
    assert adapter is not None
    if model is None or model.experts is None:
        return ExpertTargets(adapter.targets, ())
    lists = job.framework in LISTS_LINEARS
    return expert_targets(model.family, adapter.targets, adapter.target_parameters, lists_linears=lists)


def _paths(family: str) -> Mapping[str, str]:
    """Return the paths of parameters in a layer, by what they are."""
    block, router = ("block_sparse_moe", "router") if family == "granitemoe" else ("mlp", "gate")
    return {
        ROUTER: f"{block}.{router}.weight",
        GATE_UP: f"{block}.experts.{GATE_UP}",
        DOWN: f"{block}.experts.{DOWN}",
    }


def adapted_parameters(part: Part) -> dict[str, Adapted]:
    """Return the parameters of a layer that take an adapter, by what they are; none without experts."""
    adapter, model = part.job.adapter, part.model
    if adapter is None or model.experts is None:
        return {}
    found = targets_of_experts(part.job)
    hidden, inner, rank = model.hidden_size, model.expert_width, adapter.rank
    every = (
        Adapted(ROUTER, 1, hidden, model.experts, rank),
        Adapted(GATE_UP, model.experts, hidden, 2 * inner, 2 * rank if found.doubled else rank),
        Adapted(DOWN, model.experts, inner, hidden, rank),
    )
    paths = _paths(model.family)
    return {each.name: each for each in every if any(is_named(paths[each.name], name) for name in found.parameters)}


def parameters_trained(part: Part) -> int:
    """Return the elements of one layer's adapters of parameters."""
    return sum(sum(each.sides) for each in adapted_parameters(part).values())


def _held_item(part: Part) -> int:
    """Return the bytes of an element of A and B: an engine has them in the type in which it computes."""
    return part.item if part.job.master_dtype is not None else itemsize(part.job.trained_dtype)


def stacks_kept(part: Part) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of what adapted stacks keep: themselves, casts of A and B, and inputs of their products."""
    item, held = itemsize(part.job.weight_dtype), _held_item(part)
    for name, width in ((GATE_UP, part.model.hidden_size), (DOWN, part.model.expert_width)):
        stack = adapted_parameters(part).get(name)
        if stack is None:
            continue
        yield "adapted stacks", item * stack.elements
        yield "rows" if name == GATE_UP else "product", part.expert_item * part.rows_of_experts * width
        if held != item:
            yield "casts of adapters of stacks", item * sum(stack.sides)


def router_kept(part: Part) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of what an adapted router keeps, without its input."""
    router = adapted_parameters(part).get(ROUTER)
    if router is None:
        return
    yield "adapted router", part.item * router.elements
    if part.job.autocast and _held_item(part) != part.item:
        yield "casts of adapters of routers", part.item * sum(router.sides)


def stack_gradient(part: Part, name: str) -> int:
    """Return the bytes of the gradient of an adapted stack, which lives until those of its A and B are made."""
    stack = adapted_parameters(part).get(name)
    return 0 if stack is None else itemsize(part.job.weight_dtype) * stack.elements


def share_differentiated(part: Part) -> float:
    """Return the share of a layer's products whose weights get a gradient: those of adapted stacks do, whole."""
    model = part.model
    stacks = [each for name, each in adapted_parameters(part).items() if name != ROUTER]
    used = sum(each.inputs * each.outputs for each in stacks) * (model.experts_per_token or 0)
    return used / model.layer_matrix_elements(0)


# Refusals


def parameters_refusal(job: Job) -> str:
    """Return why adapters of a job's routers and stacks of experts are not known; empty if they are, or none is."""
    adapter, model = job.adapter, job.model
    assert adapter is not None
    assert model is not None
    found = targets_of_experts(job)
    if found.missing:
        return f"adapter: {found.missing} is missing in the targets: with it others are one stack, and PEFT stops"
    if not found.parameters:
        return ""
    paths = _paths(model.family)
    odd = next((name for name in found.parameters if not any(is_named(each, name) for each in paths.values())), "")
    if odd:
        return f"adapter: the parameter {odd!r} is not counted (known: {', '.join(paths.values())})"
    if adapter.dropout and not (job.framework == "axolotl" and not adapter.target_parameters):
        # axolotl leaves it out where PEFT takes old names for parameters (loaders/adapter.py, load_lora)
        return "adapter: PEFT stops where adapters of stacks or routers have dropout: without it they are known"
    if job.experts is not Experts.GROUPED:
        return f"adapter: adapters of stacks or routers were read with grouped products, not {job.experts.value!r}"
    if job.sharding not in _WHOLE:
        known = ", ".join(each.value for each in _WHOLE if each is not Sharding.NONE)
        return (
            f"adapter: what {job.sharding.value} does with parameters that PEFT makes anew was not read ({known} are)"
        )
    return ""
