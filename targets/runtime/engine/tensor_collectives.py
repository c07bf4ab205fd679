"""Collectives of tensor-parallel and context ranks in the local engine: rows, keys, losses and gradients.

Functions take all members in rank order and write results into their arenas, as in `collectives`. Sums are made in rank
order in float32 (the loss in float64) and rounded once, so that results are the same in every run with as many ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.tensor_ranks import rank_model, share_of
from ratrain.ratrain_ir.config.types import Dtype, TensorType
from ratrain.ratrain_ir.model.blocks import named_block, parameters_within
from ratrain.ratrain_ir.model.context_rows import held_runs, runs_by_holder, shared_rows
from ratrain.ratrain_ir.model.expert_ranks import expert_copies
from ratrain.ratrain_ir.model.slots import KEY_GRADIENTS, KEY_SLOTS, SHARED_BY_OWN, WHOLE_KEYS
from ratrain.ratrain_ir.ops.base import Engine, Group
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.scratch import Buffer, plan_bytes
from ratrain.targets.runtime.engine.rank import shape_only

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.arena.scalars import Flags, Scalars
    from ratrain.targets.runtime.engine.collectives import Member
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.kernels import KernelSet, Scratch


def gather_rows(members: Sequence[Member], kernels: KernelSet) -> None:
    """Copy the rows of all ranks (role `rows`) to every rank (role `whole`), in rank order."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    length = len(views[0]["rows"])
    for mine in views:
        for number, other in enumerate(views):
            kernels.memory.copy(mine["whole"][number * length : (number + 1) * length], other["rows"])


def reduce_rows(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """Sum partial rows, and the residual stream where it is an operand; give every rank its rows of the sum, or all.

    With sequence parallelism the sum is shared out by rows; otherwise, and for sums over rows, every rank gets all of
    it.
    """
    views = [rank.by_role(instruction) for rank, instruction in members]
    # The lengths tell: a sum that is shorter than the parts is one rank's share of rows.
    shares = len(views[0]["sum"]) < len(views[0]["part"])
    for number, mine in enumerate(views):
        length = len(mine["sum"])
        rows = slice(number * length, (number + 1) * length) if shares else slice(0, length)
        stream = [mine["stream"]] if "stream" in mine else []
        parts = [each.reshape(-1) for each in (*stream, *(other["part"][rows] for other in views))]
        summed(parts, mine["sum"].reshape(-1), (), scalars, scratch)


def window_of(rank: RankExecutor, instruction: Instruction) -> int | None:
    """Return the window of the attention whose keys an exchange of context ranks brings; None if it has none."""
    layer = named_block(instruction.blocks[0]).layer
    assert layer is not None  # only attentions gather keys
    return rank.program.model.layer_kind(layer).window


def of_head_group(rows: Any, instruction: Instruction, plan: Plan) -> Any:
    """Return the rows of an exchange's group of heads, in a tensor of all of them; all rows without groups."""
    return rows.reshape(plan.context_groups, -1)[instruction.head_group or 0]


def gather_keys(members: Sequence[Member], kernels: KernelSet) -> None:
    """Copy the keys and values of context ranks to every rank that gathers them."""
    plan, window = members[0][0].program.plan, window_of(*members[0])
    views = [rank.by_role(instruction) for rank, instruction in members]
    instruction = members[0][1]
    for name, whole in zip(KEY_SLOTS, WHOLE_KEYS, strict=True):
        given = [of_head_group(each[name], instruction, plan).reshape(plan.context_runs, -1) for each in views]
        gathered = [each[whole].reshape(len(held_runs(plan, window, 0)), -1) for each in views]
        for each in runs_by_holder(plan, window):
            kernels.memory.copy(gathered[each.rank][each.place], given[each.holder][each.number])


def reduce_keys(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """Sum context ranks' parts of the gradients of keys and values, the last viewer's first; each rank gets its own."""
    plan, window = members[0][0].program.plan, window_of(*members[0])
    views = [rank.by_role(instruction) for rank, instruction in members]
    instruction = members[0][1]
    for name, whole in zip(KEY_GRADIENTS, WHOLE_KEYS, strict=True):
        own = [of_head_group(each[name], instruction, plan).reshape(plan.context_runs, -1) for each in views]
        parts = [each[f"d{whole}"].reshape(len(held_runs(plan, window, 0)), -1) for each in views]
        for (holder, number), found in groupby(runs_by_holder(plan, window), key=lambda each: each[:2]):
            of_run = [parts[each.rank][each.place] for each in found]
            summed(of_run, own[holder][number], (), scalars, scratch)


def gather_heads(members: Sequence[Member], kernels: KernelSet) -> None:
    """Copy each context rank's tokens of all heads to the ranks that have these heads, in the order of positions."""
    plan, views = members[0][0].program.plan, [rank.by_role(instruction) for rank, instruction in members]
    for name, shared in exchanged_names(views[0]):
        for holder, rank in product(range(plan.cp), repeat=2):
            part = share_of_heads(views[holder][name], views[rank][shared], plan.cp, rank)
            for run in shared_rows(plan, holder):
                kernels.memory.copy(views[rank][shared][run.whole], part[run.own])


def return_heads(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Copy all tokens of each context rank's share of the heads to the ranks that have these tokens.

    Where several ranks have the same heads of keys and values, their parts of the gradients are summed.
    """
    plan, views = members[0][0].program.plan, [rank.by_role(instruction) for rank, instruction in members]
    for name, shared in exchanged_names(views[0]):
        copies = ranks_of_a_head(views[0][name], views[0][shared], plan.cp)
        for holder, first in product(range(plan.cp), range(0, plan.cp, copies)):
            out = share_of_heads(views[holder][name], views[first][shared], plan.cp, first)
            for run in shared_rows(plan, holder):
                parts = [views[rank][shared][run.whole] for rank in range(first, first + copies)]
                scratch.reset()
                total = parts[0]
                if copies > 1:
                    (total,) = scratch.take_all([Buffer(tuple(total.shape), kernels.memory.element_type(total))])
                    flat = [part.reshape(-1) for part in parts]
                    scalars.mean_of_replicas(
                        flat, total.reshape(-1), (), scratch=scratch, accumulate=False, divisor=1.0
                    )
                kernels.memory.copy(out[run.own], total)


def exchanged_names(views: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the operands of an exchange of tokens for heads, in pairs: of own tokens, and of all tokens."""
    return [(name, shared) for name, shared in SHARED_BY_OWN.items() if name in views]


def ranks_of_a_head(own: NDArray[Any], shared: NDArray[Any], ranks: int) -> int:
    """Return how many neighbouring context ranks have the same heads: several where keys have fewer heads than ranks.

    `own` has a rank's tokens of all heads, `shared` all tokens of its share.
    """
    return ranks if own.ndim == 1 else ranks * shared.shape[1] // own.shape[1]


def share_of_heads(own: NDArray[Any], shared: NDArray[Any], ranks: int, rank: int) -> NDArray[Any]:
    """Return the part of a tensor of all heads that is of one context rank's share; all of it if it has no heads."""
    if own.ndim == 1:
        return own
    width, number = shared.shape[1], rank // ranks_of_a_head(own, shared, ranks)
    return own[:, number * width : (number + 1) * width]


def summed(parts: Sequence[NDArray[Any]], out: NDArray[Any], flags: Flags, scalars: Scalars, scratch: Scratch) -> None:
    """Set `out` to the sum of parts, the first of which it may be; raise flags unless all of it is finite."""
    scratch.reset()
    scalars.mean_of_replicas(parts, out, flags, scratch=scratch, accumulate=False, divisor=1.0)


def exchange_scratch_bytes(program: Program, kernels: KernelSet) -> int:
    """Return the scratch of the largest sum of rows, of gradients of copied experts, or of the loss; 0 without any."""
    most = 0
    for stage in program.stages:
        for instruction in stage.streams[Engine.TENSOR]:
            types = {operand.role: stage.tensors[operand.tensor].type for operand in instruction.operands}
            if "sum" in types:
                out = shape_only(types["sum"].dtype, (types["sum"].elements,))
                parts = [out] * (1 + program.plan.tp)
                needed = kernels.scratch_bytes("mean_of_replicas", parts=parts, out=out, accumulate=False, divisor=1.0)
                most = max(most, needed + kernels.scalar_bytes)
            of_keys = [types[role] for role in types if role in KEY_GRADIENTS]
            for type_ in of_keys:
                elements = type_.elements // program.plan.context_groups
                out = shape_only(type_.dtype, (elements,))
                parts = [shape_only(Dtype.F32, (elements,))] * program.plan.cp
                needed = kernels.scratch_bytes("mean_of_replicas", parts=parts, out=out, accumulate=False, divisor=1.0)
                most = max(most, needed + kernels.scalar_bytes)
            if "dpool" in types:
                out = shape_only(types["dpool"].dtype, (types["dpool"].elements,))
                parts = [out] * 2
                needed = kernels.scratch_bytes("mean_of_replicas", parts=parts, out=out, accumulate=False, divisor=1.0)
                most = max(most, needed + kernels.scalar_bytes)
            if "dk_heads" in types:
                most = max(most, _summed_heads_bytes(program, types["dk_out"], types["dk_heads"], kernels))
            if "lse_part" in types:
                needed = plan_bytes([at_labels_buffer(program.plan.tp)])
                most = max(most, needed + kernels.combined_loss_bytes(types["lse_part"].elements))
    return most


def _summed_heads_bytes(program: Program, own: TensorType, shared: TensorType, kernels: KernelSet) -> int:
    """Return the scratch of a sum of gradients of keys whose heads several context ranks have; 0 if one has each."""
    rows, width = shared.shape
    copies = program.plan.cp * width // own.shape[1]
    if copies == 1:
        return 0
    run = rows // (program.plan.cp * program.plan.context_runs * program.plan.micro_batch_size) * width
    out = shape_only(shared.dtype, (run,))
    needed = kernels.scratch_bytes("mean_of_replicas", parts=[out] * copies, out=out, accumulate=False, divisor=1.0)
    return plan_bytes([Buffer((run,), NUMPY_DTYPES[shared.dtype])]) + needed + kernels.scalar_bytes


def at_labels_buffer(peers: int) -> Buffer:
    """Return the buffer for the sum of label logits of each rank."""
    return Buffer((peers,), np.float64)


def combine_loss(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """Set `lse` of each row (log of the sum of exponentials over all words) and the micro-batch's `loss` on all ranks.

    See `Scalars.logits_of_labels` and `Scalars.combine_losses`.
    """
    views = [rank.by_role(instruction) for rank, instruction in members]
    scratch.reset()
    (at_labels,) = scratch.take_all([at_labels_buffer(len(views))])
    scalars.logits_of_labels(views, at_labels, scratch=scratch)
    parts = [mine["lse_part"] for mine in views]
    scalars.combine_losses(parts, at_labels, views, scratch=scratch, accumulate=members[0][1].accumulates)


def all_reduce_shared(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Sum gradients of parameters that several ranks hold copies of; a block's flag on any rank is set on all."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    ranks = [rank for rank, _ in members]
    for name in members[0][1].blocks:
        gradients, flags = ([mine[f"{what}.{name}"] for mine in views] for what in ("gs", "flag"))
        for copies, low, high in shared_ranges(ranks[0], name, len(gradients[0]), members[0][1].group):
            # Copies of a part are on consecutive ranks.
            for first in range(0, len(members), copies):
                parts = [gradient[low:high] for gradient in gradients[first : first + copies]]
                summed(parts, parts[0], flags, scalars, scratch)
                for other in parts[1:]:
                    kernels.memory.copy(other, parts[0])
        scalars.spread(flags, flags)


def shared_ranges(rank: RankExecutor, name: str, elements: int, group: str) -> Iterator[tuple[int, int, int]]:
    """Yield the ranges (copies, low, high) of a block's gradient whose parameters `copies` ranks hold alike.

    Ranges are within the rank's part of the gradient, which has `elements` elements. The ranks are those of a group:
    tensor-parallel ones, or expert ranks, which hold all alike but the experts.
    """
    program = rank.program
    owner = named_block(name)
    start = program.topology.shard_range(owner, rank.replica).start
    for parameter, low, high in parameters_within(rank_model(program.model, program.plan), owner, start, elements):
        if group == Group.EXPERTS.value:
            copies = expert_copies(program.plan, parameter.weight)
        else:
            copies = share_of(program.model, program.plan.tp, parameter.weight).copies
        if copies > 1:
            yield copies, low, high
