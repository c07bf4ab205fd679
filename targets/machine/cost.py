"""Costs of kernels, messages and updates on a machine.

A machine file says by its `cost` which model prices kernels (`KERNEL_COSTS`). By the roofline a kernel takes the longer
of its arithmetic, at a fraction of the machine's peak for products that are summed as its are, and of its DDR traffic,
every operand once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.model_flops import visible_block_pairs, visible_pairs
from ratrain.targets.machine.machine import KERNEL_COSTS, Machine
from ratrain.targets.machine.resource_work import Flow, ResourceWork
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.per_kernel import PerKernel
from ratrain.targets.program.routine import COPIES, Routine, Step, parse_reference

if TYPE_CHECKING:
    from ratrain.targets.machine.link_groups import Link
    from ratrain.targets.machine.routing import ExpertLoads

KernelCost: TypeAlias = "Callable[[Routine, Step, Machine], ResourceWork]"
"""Work (seconds, DDR bytes) of one call of a kernel of a routine on a machine."""


def _bytes(routine: Routine, reference: str) -> int:
    dtype, shape = routine.operand(reference)
    return prod(shape) * dtype.itemsize


@frozen
class _Arithmetic:
    """Operations of a kernel, and the fraction of the peak at which it does them."""

    flops: Callable[[Routine, Step], float]
    efficiency: Callable[[Routine, Step, Machine], float]


def _product_flops(routine: Routine, step: Step) -> float:
    rows, columns = routine.shape_of(step.operands["out"])
    return 2.0 * rows * columns * _inner(routine, step)


def _inner(routine: Routine, step: Step) -> int:
    """Return the extent that a product sums over."""
    shape = routine.shape_of(step.operands["a"])
    return shape[0] if step.options.get("trans_a") else shape[1]


def _product_efficiency(routine: Routine, step: Step, machine: Machine) -> float:
    if not machine.gemm_half_extent:
        return machine["gemm_efficiency"]
    inner, batch = _inner(routine, step), step.options.get("batch", 1)
    rows, columns = routine.shape_of(step.operands["out"])
    return _efficiency_of(machine, rows / batch, inner, columns)


def _efficiency_of(machine: Machine, *extents: float) -> float:
    """Return the fraction of the peak that a product reaches: it falls with each extent that is short.

    An extent equal to `gemm_half_extent` halves it.
    """
    half = machine.gemm_half_extent
    return machine["gemm_efficiency"] * prod(extent / (extent + half) for extent in extents)


def _pairs(options: Mapping[str, Any]) -> int:
    """Return the pairs of a query and a key that it sees, of one head of one sequence.

    Documents that are kept apart count as under the causal mask: where they start is data, so costs are an upper bound.
    """
    if "seq_len" in options:
        return visible_pairs(int(options["seq_len"]), options["window"])
    offset = options["first_query"] - options["first_key"]
    return visible_block_pairs(options["queries"], options["keys"], offset, options["window"])


def _attention(products: int) -> _Arithmetic:
    """Return the arithmetic of `products` products of each query with each key it sees."""

    def flops(routine: Routine, step: Step) -> float:
        del routine
        options = step.options
        return (
            2.0 * products * int(options["batch"]) * int(options["heads"]) * int(options["head_dim"]) * _pairs(options)
        )

    return _Arithmetic(flops, lambda _routine, _step, machine: machine["attention_efficiency"])


def _scores(products: int) -> _Arithmetic:
    """Return the arithmetic of `products` products of each query with each key of its sequence, seen or not.

    They are matrix products, one for each head of each sequence.
    """

    def flops(routine: Routine, step: Step) -> float:
        del routine
        options = step.options
        seq_len, head_dim = int(options["seq_len"]), int(options["head_dim"])
        return 2.0 * products * int(options["batch"]) * int(options["heads"]) * head_dim * seq_len * seq_len

    def efficiency(routine: Routine, step: Step, machine: Machine) -> float:
        del routine
        seq_len = int(step.options["seq_len"])
        return _efficiency_of(machine, seq_len, seq_len, int(step.options["head_dim"]))

    return _Arithmetic(flops, efficiency)


def _head(products: int) -> _Arithmetic:
    """Return the arithmetic of `products` products with the output table; a backward without `dtable` has one less."""

    def flops(routine: Routine, step: Step) -> float:
        rows, hidden = routine.shape_of(step.operands["xn"])
        vocab = routine.shape_of(step.operands["table"])[0]
        frozen = "dxn" in step.operands and "dtable" not in step.operands
        return 2.0 * rows * hidden * vocab * (products - frozen)

    return _Arithmetic(flops, lambda _routine, _step, machine: machine.head_efficiency)


def experts_and_rows(routine: Routine, step: Step) -> tuple[int, int]:
    """Return the experts of a step, and the rows of all of them: a factor or the product has each."""
    a, b, out = (routine.shape_of(step.operands[name]) for name in ("a", "b", "out"))
    return (out[0], max(a[0], b[0])) if step.kernel == "expert_gradients" else (b[0], max(a[0], out[0]))


def expert_groups(step: Step) -> list[tuple[int, int]]:
    """Return (experts, rows of each) of a step whose rows are told, by rows."""
    return [(len(list(group)), rows) for rows, group in groupby(sorted(step.expert_rows))]


def unread_stack_bytes(routine: Routine, step: Step) -> float:
    """Return the bytes that an expert without rows still costs: a gradient that is not added to is zeroed."""
    zeroed = step.kernel == "expert_gradients" and not step.options["accumulate"]
    return _bytes(routine, step.operands["out"]) / experts_and_rows(routine, step)[0] if zeroed else 0.0


def _stack(step: Step) -> str:
    """Return the operand of a step that has a matrix of each expert."""
    return "out" if step.kernel == "expert_gradients" else "b"


def _expert_matrix(routine: Routine, step: Step) -> tuple[int, int]:
    """Return both extents of one expert's matrix."""
    _, inner, columns = routine.shape_of(step.operands[_stack(step)])
    return inner, columns


def _expert_flops(routine: Routine, step: Step) -> float:
    _, rows = experts_and_rows(routine, step)
    return 2.0 * rows * prod(_expert_matrix(routine, step))


def _expert_efficiency(routine: Routine, step: Step, machine: Machine) -> float:
    """Return the efficiency of one expert's product; the router is assumed to send each as many rows as the others."""
    experts, rows = experts_and_rows(routine, step)
    return _one_expert_efficiency(routine, step, machine, rows / experts)


def _one_expert_efficiency(routine: Routine, step: Step, machine: Machine, rows: float) -> float:
    """Return the efficiency of the product of one expert with a number of rows."""
    if not machine.gemm_half_extent:
        return machine["gemm_efficiency"]
    return _efficiency_of(machine, max(1.0, rows), *_expert_matrix(routine, step))


_OF_EXPERTS = _Arithmetic(_expert_flops, _expert_efficiency)
"""Products of rows grouped by expert."""

_BOUND_BY_DDR = _Arithmetic(lambda _routine, _step: 0.0, lambda _routine, _step, _machine: 1.0)
"""Kernels with few operations on each element: moving their operands to and from DDR takes longer."""

_ARITHMETIC: PerKernel[_Arithmetic] = PerKernel(
    "arithmetic",
    {
        "gemm": _Arithmetic(_product_flops, _product_efficiency),
        "attention_forward": _attention(2),
        "attention_backward": _attention(5),
        "attention_partial_forward": _attention(2),
        "attention_partial_finish": _BOUND_BY_DDR,
        "attention_delta": _BOUND_BY_DDR,
        "attention_partial_backward": _attention(5),
        "attention_scores_forward": _scores(1),
        "attention_values_forward": _scores(1),
        "attention_values_backward": _scores(2),
        "attention_scores_backward": _scores(2),
        "attention_softmax_forward": _BOUND_BY_DDR,
        "attention_softmax_backward": _BOUND_BY_DDR,
        "head_backward_from_logits": _head(2),
        "head_forward": _head(1),
        "head_backward": _head(3),
        "dequantise": _BOUND_BY_DDR,
        "dequantise_nf4": _BOUND_BY_DDR,
        "column_sum": _BOUND_BY_DDR,
        "rmsnorm_forward": _BOUND_BY_DDR,
        "rmsnorm_backward": _BOUND_BY_DDR,
        "layernorm_forward": _BOUND_BY_DDR,
        "layernorm_backward": _BOUND_BY_DDR,
        "row_squares": _BOUND_BY_DDR,
        "row_products": _BOUND_BY_DDR,
        "summed_norm_forward": _BOUND_BY_DDR,
        "summed_norm_backward": _BOUND_BY_DDR,
        "head_norm_forward": _BOUND_BY_DDR,
        "head_norm_backward": _BOUND_BY_DDR,
        "rope": _BOUND_BY_DDR,
        "swiglu_forward": _BOUND_BY_DDR,
        "swiglu_backward": _BOUND_BY_DDR,
        "geglu_forward": _BOUND_BY_DDR,
        "geglu_backward": _BOUND_BY_DDR,
        "relu2_forward": _BOUND_BY_DDR,
        "relu2_backward": _BOUND_BY_DDR,
        "gelu_forward": _BOUND_BY_DDR,
        "gelu_backward": _BOUND_BY_DDR,
        "embedding_forward": _BOUND_BY_DDR,
        "embedding_backward": _BOUND_BY_DDR,
        "position_forward": _BOUND_BY_DDR,
        "position_backward": _BOUND_BY_DDR,
        "route_forward": _BOUND_BY_DDR,
        "add_rows": _BOUND_BY_DDR,
        "route_backward": _BOUND_BY_DDR,
        "group_rows": _BOUND_BY_DDR,
        "expert_rows": _OF_EXPERTS,
        "expert_sums": _OF_EXPERTS,
        "choice_sums": _BOUND_BY_DDR,
        "expert_gradients": _OF_EXPERTS,
        "weighted_swiglu_forward": _BOUND_BY_DDR,
        "weighted_swiglu_backward": _BOUND_BY_DDR,
        "sigmoid_forward": _BOUND_BY_DDR,
        "sigmoid_backward": _BOUND_BY_DDR,
        "zero": _BOUND_BY_DDR,
        "cast": _BOUND_BY_DDR,
        "group_columns": _BOUND_BY_DDR,
        "add": _BOUND_BY_DDR,
        "scale": _BOUND_BY_DDR,
    },
    never=[kernel.name for kernel in KERNELS.values() if not kernel.in_routines],
)


def kernel_work(routine: Routine, step: Step, machine: Machine) -> ResourceWork:
    """Return the work of one kernel call that has the cluster and its DDR to itself: seconds with launch, DDR bytes."""
    if works_on_copies(step) and not step.expert_rows:  # balanced routers send these no row; gradients are zeroed
        ddr = _bytes(routine, step.operands["out"]) if step.kernel == "expert_gradients" else 0
        return ResourceWork(machine["launch"] + copy_seconds(ddr, machine), ddr)
    return _kernel_cost(machine.cost)(routine, step, machine)


@cache
def _kernel_cost(name: str) -> KernelCost:
    cost: KernelCost = KERNEL_COSTS.load(name)
    return cost


def roofline_work(routine: Routine, step: Step, machine: Machine) -> ResourceWork:
    """Return the work of a kernel call by the roofline: from its operations and its operands' bytes alone."""
    if step.expert_rows:
        return _routed_work(routine, step, machine)
    work = _ARITHMETIC[step.kernel]
    peak = machine.product_peak(half_sums=sums_halves(step))
    seconds = work.flops(routine, step) / (peak * work.efficiency(routine, step, machine))
    ddr = sum(_bytes(routine, reference) for reference in step.operands.values())
    return ResourceWork(machine["launch"] + max(seconds, copy_seconds(ddr, machine)), ddr)


def _routed_work(routine: Routine, step: Step, machine: Machine) -> ResourceWork:
    """Return the work of products of experts by the roofline of each: one with few rows waits for its weights.

    Its weights are moved once for all its rows, and not at all for none.
    """
    experts, total = experts_and_rows(routine, step)
    stack = _bytes(routine, step.operands[_stack(step)]) / experts
    a_row = sum(_bytes(routine, each) for name, each in step.operands.items() if name != _stack(step)) / total
    rate = machine.product_peak(half_sums=sums_halves(step))
    seconds, ddr = machine["launch"], 0.0
    for count, rows in expert_groups(step):
        flops = 2.0 * rows * prod(_expert_matrix(routine, step))
        nbytes = stack + a_row * rows if rows else unread_stack_bytes(routine, step)
        computing = flops / (rate * _one_expert_efficiency(routine, step, machine, rows))
        seconds += count * max(computing, copy_seconds(nbytes, machine))
        ddr += count * nbytes
    return ResourceWork(seconds, ddr)


def works_on_copies(step: Step) -> bool:
    """Return whether a kernel call is of copies of another rank's experts, which only unbalanced routers need."""
    return any(parse_reference(each).base in (COPIES, f"d{COPIES}") for each in step.operands.values())


def sums_halves(step: Step) -> bool:
    """Return whether a kernel call sums products in float16."""
    return step.options.get("half_run") is not None


def kernel_flops(routine: Routine, step: Step) -> float:
    """Return the operations of a kernel call by the roofline; 0 for kernels bound by DDR."""
    return 0.0 if works_on_copies(step) else _ARITHMETIC[step.kernel].flops(routine, step)


def routine_flops(routine: Routine) -> float:
    """Return the operations of a routine's kernels; where context ranks differ, of the one with the most."""
    routine = routine.as_expected
    return max(
        sum(kernel_flops(own, step) for step in own.steps) for own in map(routine.on_rank, range(routine.context_ranks))
    )


def weight_bound_rows(machine: Machine, itemsize: int, *, half_sums: bool = False) -> float:
    """Return the rows below which a product takes longer to read its weights from DDR than to compute.

    `itemsize` is bytes of a weight; `half_sums` is whether products are summed in float16. A row takes two operations
    of each weight: 2 * rows / rate = itemsize / bandwidth. On the MT-3000 these are 189 rows of f16.
    """
    rate = machine.product_peak(half_sums=half_sums) * machine["gemm_efficiency"]
    return rate * itemsize / (2 * machine["ddr_bandwidth"])


def routine_work(routine: Routine, machine: Machine, loads: ExpertLoads = ()) -> ResourceWork:
    """Return the work of all kernels of a routine, one after the other, no faster than they can be dispatched.

    Context ranks wait for the one with the most work, so its work counts. So do expert ranks, whose experts' rows are
    `loads`: of own and of copied experts. Without these all experts have as many as balanced routers send.
    """
    if loads:
        works = (routine_work(_with_rows(routine, *load), machine) for load in loads)
        return max(works, key=lambda work: work.seconds)
    routine = routine.as_expected
    if (ranks := routine.context_ranks) > 1:
        works = (routine_work(routine.on_rank(rank), machine) for rank in range(ranks))
        return max(works, key=lambda work: work.seconds)
    whole = sum((kernel_work(routine, step, machine) for step in routine.steps), ResourceWork(0.0))
    least = machine.dispatch * len(routine.steps)
    return whole if least <= whole.seconds else evolve(whole, seconds=least)


def _with_rows(routine: Routine, own: tuple[int, ...], copied: tuple[int, ...]) -> Routine:
    """Return the routine with the rows of each expert in its products of experts, and with as many rows in all."""
    _, room = experts_and_rows(routine, next(filter(is_of_experts, routine.steps)))
    steps = (
        evolve(step, expert_rows=copied if works_on_copies(step) else own) if is_of_experts(step) else step
        for step in routine.steps
    )
    # a rank for whose experts no row comes: sizes stay positive
    return evolve(routine.with_rows(room, max(1, sum(own) + sum(copied))), steps=tuple(steps))


def is_of_experts(step: Step) -> bool:
    """Tell whether a kernel call is of products of rows grouped by expert."""
    return _ARITHMETIC[step.kernel] is _OF_EXPERTS


def message_work(nbytes: int, link: Link, level: int, machine: Machine) -> ResourceWork:
    """Return the work of sending a point-to-point message.

    The message is read from DDR, crosses the link of a level and leaves the groups of the levels below.
    """
    seconds = link.latency + machine.message_cost + nbytes / link.bandwidth
    flow = Flow(nbytes, level, tuple(range(level)))
    return ResourceWork(seconds, nbytes, nbytes, (flow,) if nbytes else ())


def update_work(nbytes: float, machine: Machine, *, on_host: bool) -> ResourceWork:
    """Return the work of AdamW on a shard, bound by its DDR bytes, on the compute engine or on the host's cores."""
    if on_host:
        return host_work(nbytes, machine)
    return ResourceWork(machine["launch"] + copy_seconds(nbytes, machine), nbytes)


def host_work(nbytes: float, machine: Machine) -> ResourceWork:
    """Return the work of a task of the host's cores that is bound by DDR bytes."""
    return ResourceWork(machine.host_handover + nbytes / machine.host_bandwidth, nbytes)


def copy_work(nbytes: float, machine: Machine) -> ResourceWork:
    """Return the work of reading or writing bytes of DDR."""
    return ResourceWork(copy_seconds(nbytes, machine), nbytes)


def copy_seconds(nbytes: float, machine: Machine) -> float:
    """Return the seconds of bytes that have the DDR to themselves."""
    return nbytes / machine["ddr_bandwidth"]
