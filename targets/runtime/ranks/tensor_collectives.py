"""Exchanges of a rank with its tensor-parallel group or its context ranks: rows, losses, keys.

They run while other collectives of the rank are under way. Parts of a sum are collected and added in rank order in
float32, whatever the reduction of gradients: a library's own sum would move as many bytes, but rounds activations in
half precision after every addition.

    reduce_rows, 2 ranks, rows divide:   rank 0 has a0 a1  -->  a0 b0  -->  a0 + b0   (then gathered, if all need all)
                                         rank 1 has b0 b1       a1 b1       a1 + b1
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.model.context_rows import HeldRun, earlier_runs, held_runs, runs_by_holder, shared_rows
from ratrain.ratrain_ir.model.slots import KEY_GRADIENTS, KEY_SLOTS, WHOLE_KEYS
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import STATE_OPS, CombineLoss, GatherRows, ReduceRows, ReduceSums
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.context_ranks import HEAD_OPS, KEY_OPS, GatherHeads, GatherKeys, ReduceKeys, ReturnHeads
from ratrain.ratrain_ir.ops.expert_ranks import EXPERT_OPS, Combine, Dispatch
from ratrain.ratrain_ir.ops.kinds import LONE_OPS
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.scratch import Buffer, plan_bytes
from ratrain.targets.runtime.engine import tensor_collectives
from ratrain.targets.runtime.ranks import expert_exchanges

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.runtime.arena.scalars import Scalars
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.kernels import KernelSet, Scratch
    from ratrain.targets.runtime.ranks.collectives import Phases
    from ratrain.targets.runtime.ranks.communicator import Buffer as Rows
    from ratrain.targets.runtime.ranks.communicator import Communicator, Request


class TensorCollectives:
    """The exchanges of one rank's tensor engine. Only one runs at a time, since all use the same staging bytes."""

    def __init__(
        self,
        rank: RankExecutor,
        peers: Communicator | None,
        contexts: Communicator | None,
        experts: Communicator | None,
        kernels: KernelSet,
        scalars: Scalars,
        scratch: Scratch,
    ) -> None:
        self.rank = rank
        self._peers, self._contexts, self._experts = peers, contexts, experts
        self.kernels = kernels
        self.scalars = scalars
        self.scratch = scratch
        stream = rank.stage.streams[Engine.TENSOR]
        needed = max((plan_bytes(_arriving(rank, each)) for each in stream), default=0)
        self.staging: Scratch = kernels.memory.scratch(needed)
        """Transport memory for parts of other ranks, outside the arena and of the same kind."""

    @property
    def peers(self) -> Communicator:
        """The tensor-parallel ranks of this rank's group."""
        assert self._peers is not None  # only such ranks have instructions for them
        return self._peers

    @property
    def contexts(self) -> Communicator:
        """The context ranks of this rank's group."""
        assert self._contexts is not None  # only such ranks have instructions for them
        return self._contexts

    @property
    def experts(self) -> Communicator:
        """The expert ranks of this rank's group."""
        assert self._experts is not None  # only such ranks have instructions for them
        return self._experts

    def start(self, instruction: Instruction) -> Phases:
        """Start an exchange that this rank has reached; return its phases."""
        self.staging.reset()
        return _PHASES[instruction.keyword](self, instruction)

    def gather_rows(self, instruction: Instruction) -> Phases:
        """Gather the rows of all ranks, straight from arena to arena."""
        views = self.rank.by_role(instruction)
        yield [self.peers.iallgather(views["whole"], views["rows"])]

    def reduce_rows(self, instruction: Instruction) -> Phases:
        """Sum this rank's run of the rows; if every rank needs all rows, gather the runs afterwards."""
        views = self.rank.by_role(instruction)
        (parts,) = self.staging.take_all(_arriving(self.rank, instruction))
        part, whole = views["part"].reshape(-1), views["sum"].reshape(-1)
        # A sum that every rank needs whole is cut into runs if it divides evenly: each rank sums its run and gathers
        # the others, which moves fewer bytes than all parts to everyone.
        run = slice(0, len(whole))
        if len(parts[0]) < len(whole):
            run = slice(self.peers.rank * len(parts[0]), (self.peers.rank + 1) * len(parts[0]))
        # the residual stream comes first, so that the order of the sum is the local engine's
        stream = [views["stream"].reshape(-1)[run]] if "stream" in views else []
        collect = self.peers.iallgather if len(parts[0]) == len(part) else self.peers.ialltoall
        yield [collect(parts, part)]
        tensor_collectives.summed([*stream, *parts], whole[run], (), self.scalars, self.scratch)
        if len(parts[0]) < len(whole):
            yield [self.peers.iallgather(whole)]

    def gather_keys(self, instruction: Instruction) -> Phases:
        """Gather keys and values of context ranks: of all, straight from arena to arena, or those that it sees."""
        views = self.rank.by_role(instruction)
        seen = _SeenRuns.of(self.rank, instruction)
        own = [self._of_head_group(views[name], instruction) for name in KEY_SLOTS]
        if seen is None:
            keys = zip(WHOLE_KEYS, own, strict=True)
            yield [self.contexts.iallgather(views[whole], mine) for whole, mine in keys]
            return
        given = [mine.reshape(seen.own, -1) for mine in own]
        gathered = [views[whole].reshape(seen.places, -1) for whole in WHOLE_KEYS]
        copy = self.kernels.memory.copy
        for rows, places in zip(given, gathered, strict=True):
            for each in seen.kept:
                copy(places[each.place], rows[each.number])
        packed = [[rows[each.number] for each in seen.shown] for rows in given]
        arrived = yield from self._exchange(instruction, packed, seen.shown_counts, seen.met_counts)
        for places, parts in zip(gathered, arrived, strict=True):
            for each, part in zip(seen.met, parts, strict=True):
                copy(places[each.place], part)

    def reduce_keys(self, instruction: Instruction) -> Phases:
        """Sum context ranks' parts of the gradients of this rank's keys and values, the last viewer's first."""
        views = self.rank.by_role(instruction)
        seen = _SeenRuns.of(self.rank, instruction)
        if seen is None:
            arrived = self.staging.take_all(_arriving(self.rank, instruction))
            given = [views[f"d{whole}"].reshape(-1) for whole in WHOLE_KEYS]
            yield [self.contexts.ialltoall(parts, mine) for parts, mine in zip(arrived, given, strict=True)]
            for name, parts in zip(KEY_GRADIENTS, arrived, strict=True):
                out = self._of_head_group(views[name], instruction)
                tensor_collectives.summed(list(parts)[::-1], out, (), self.scalars, self.scratch)
            return
        places = [views[f"d{whole}"].reshape(seen.places, -1) for whole in WHOLE_KEYS]
        packed = [[rows[each.place] for each in seen.met] for rows in places]
        arrived = yield from self._exchange(instruction, packed, seen.met_counts, seen.shown_counts)
        for name, rows, theirs in zip(KEY_GRADIENTS, places, arrived, strict=True):
            found = {each: rows[each.place] for each in seen.kept} | dict(zip(seen.shown, theirs, strict=True))
            for number, out in enumerate(self._of_head_group(views[name], instruction).reshape(seen.own, -1)):
                of_run = [found[each] for each in seen.viewers if each.number == number]
                tensor_collectives.summed(of_run, out, (), self.scalars, self.scratch)

    def _of_head_group(self, rows: Rows, instruction: Instruction) -> Rows:
        """Return the rows of an exchange's group of heads, flat; all rows without groups."""
        own: Rows = tensor_collectives.of_head_group(rows, instruction, self.rank.program.plan)
        return own.reshape(-1)

    def gather_heads(self, instruction: Instruction) -> Phases:
        """Exchange this rank's tokens of all heads for all tokens of its share of the heads, in packed parts."""
        plan, pairs, (packed, arrived) = self._exchanged_heads(instruction)
        for (own, shared), sent in zip(pairs, packed, strict=True):
            for rank, place in enumerate(sent):
                part = tensor_collectives.share_of_heads(own, shared, plan.cp, rank)
                self.kernels.memory.copy(place.reshape(part.shape), part)
        yield [self.contexts.ialltoall(*each) for each in zip(arrived, packed, strict=True)]
        for (own, shared), received in zip(pairs, arrived, strict=True):
            for holder, part in enumerate(received):
                rows = part.reshape(len(own), *shared.shape[1:])
                for run in shared_rows(plan, holder):
                    self.kernels.memory.copy(shared[run.whole], rows[run.own])

    def return_heads(self, instruction: Instruction) -> Phases:
        """Exchange all tokens of this rank's share of the heads for its tokens of all heads, in packed parts.

        Gradients of keys and values whose heads several ranks have are summed.
        """
        plan, pairs, (packed, arrived) = self._exchanged_heads(instruction)
        for (own, shared), sent in zip(pairs, packed, strict=True):
            for holder, place in enumerate(sent):
                rows = place.reshape(len(own), shared.shape[1])
                for run in shared_rows(plan, holder):
                    self.kernels.memory.copy(rows[run.own], shared[run.whole])
        yield [self.contexts.ialltoall(*each) for each in zip(arrived, packed, strict=True)]
        for (own, shared), received in zip(pairs, arrived, strict=True):
            copies = tensor_collectives.ranks_of_a_head(own, shared, plan.cp)
            for first in range(0, plan.cp, copies):
                total = received[first]
                if copies > 1:
                    parts = [received[rank] for rank in range(first, first + copies)]
                    tensor_collectives.summed(parts, total, (), self.scalars, self.scratch)
                out = tensor_collectives.share_of_heads(own, shared, plan.cp, first)
                self.kernels.memory.copy(out, total.reshape(out.shape))

    def dispatch(self, instruction: Instruction) -> Phases:
        """Bring rows to the expert ranks that compute them."""
        return expert_exchanges.dispatch(self.rank, instruction, self.experts, self.staging)

    def combine(self, instruction: Instruction) -> Phases:
        """Bring computed rows back from expert ranks."""
        return expert_exchanges.combine(self.rank, instruction, self.experts, self.staging, self.scalars, self.scratch)

    def _exchanged_heads(self, instruction: Instruction) -> tuple[Plan, list[tuple[Rows, Rows]], list[list[Rows]]]:
        """Return the plan, the operands in pairs, and packed buffers of each: to be sent, and as they arrive."""
        views = self.rank.by_role(instruction)
        pairs = [(views[name], views[shared]) for name, shared in tensor_collectives.exchanged_names(views)]
        buffers = self.staging.take_all(_arriving(self.rank, instruction))
        return self.rank.program.plan, pairs, [buffers[: len(pairs)], buffers[len(pairs) :]]

    def _exchange(
        self,
        instruction: Instruction,
        packed: Sequence[Sequence[Rows]],
        leaving: Sequence[int],
        arriving: Sequence[int],
    ) -> Generator[list[Request], None, list[Rows]]:
        """Send runs of keys and of values; return those that arrive, in the order of ranks.

        `leaving` and `arriving` count the runs for, and from, each rank.
        """
        buffers = self.staging.take_all(_arriving(self.rank, instruction))
        requests = []
        for sent, received, runs in zip(buffers[:2], buffers[2:], packed, strict=True):
            for place, run in zip(sent, runs, strict=True):
                self.kernels.memory.copy(place, run)
            counts = [[count * sent.shape[1] for count in each] for each in (arriving, leaving)]
            requests.append(self.contexts.ialltoallv(received, sent, *counts))
        yield requests
        return buffers[2:]

    def combine_loss(self, instruction: Instruction) -> Phases:
        """Combine all ranks' log-sum-exps and label logits, in rank order, into the whole vocabulary's loss."""
        views, own = self.rank.by_role(instruction), self.peers.rank
        logs, at_labels = self.staging.take_all(_arriving(self.rank, instruction))
        self.scratch.reset()
        # this rank's number is written into its place of the gathered ones
        self.scalars.logits_of_labels([views], at_labels[own : own + 1], scratch=self.scratch)
        yield [self.peers.iallgather(logs, views["lse_part"]), self.peers.iallgather(at_labels)]
        self.scratch.reset()
        self.scalars.combine_losses(
            list(logs), at_labels, [views], scratch=self.scratch, accumulate=instruction.accumulates
        )


_PHASES: PerOp[Callable[[TensorCollectives, Instruction], Phases]] = PerOp(
    "phases of exchanges of tensor-parallel ranks",
    {
        GatherRows: TensorCollectives.gather_rows,
        **dict.fromkeys((ReduceRows, ReduceSums), TensorCollectives.reduce_rows),
        CombineLoss: TensorCollectives.combine_loss,
        GatherKeys: TensorCollectives.gather_keys,
        ReduceKeys: TensorCollectives.reduce_keys,
        GatherHeads: TensorCollectives.gather_heads,
        ReturnHeads: TensorCollectives.return_heads,
        Dispatch: TensorCollectives.dispatch,
        Combine: TensorCollectives.combine,
    },
    never=(*LONE_OPS, *MESSAGE_OPS, *STATE_OPS, Release),
)


def _arriving(rank: RankExecutor, instruction: Instruction) -> list[Buffer]:
    """Return the buffers in which parts of an exchange arrive, one row from each rank.

    A sum has this rank's run of every part, or all of every part if it does not divide evenly. A loss has the
    log-sum-exp of all rows and one number. A gather has none, but for keys: see `_arriving_keys`. Tokens and heads are
    packed, to be sent and as they arrive.
    """
    peers = rank.program.plan.tp
    if instruction.keyword in [kind.keyword for kind in EXPERT_OPS]:
        return expert_exchanges.arriving_rows(rank, instruction)
    if instruction.keyword in [kind.keyword for kind in KEY_OPS]:
        return _arriving_keys(rank, instruction)
    tensors = {operand.role: rank.stage.tensors[operand.tensor].type for operand in instruction.operands}
    if instruction.keyword in [kind.keyword for kind in HEAD_OPS]:
        ranks, types = rank.program.plan.cp, [tensors[each] for _, each in tensor_collectives.exchanged_names(tensors)]
        return 2 * [Buffer((ranks, type_.elements // ranks), NUMPY_DTYPES[type_.dtype]) for type_ in types]
    arriving = tensors.get("part") or tensors.get("lse_part")
    if arriving is None:
        return []
    is_cut = "part" in tensors and not arriving.elements % peers
    elements = arriving.elements // peers if is_cut else arriving.elements
    numbers = [] if "part" in tensors else [tensor_collectives.at_labels_buffer(peers)]
    return [Buffer((peers, elements), NUMPY_DTYPES[arriving.dtype]), *numbers]


def _arriving_keys(rank: RankExecutor, instruction: Instruction) -> list[Buffer]:
    """Return the buffers of an exchange of keys: parts of their gradients from all ranks, or of what is seen alone.

    Where ranks gather what they see, runs of keys and of values are packed to be sent, and arrive packed.
    """
    views, gathers = rank.by_role(instruction), instruction.keyword == GatherKeys.keyword
    seen = _SeenRuns.of(rank, instruction)
    if seen is None:
        ranks = rank.program.plan.cp
        sizes = [] if gathers else [views[f"d{whole}"].size // ranks for whole in WHOLE_KEYS]
        return [Buffer((ranks, size), np.float32) for size in sizes]
    sizes = [views[whole if gathers else f"d{whole}"].size // seen.places for whole in WHOLE_KEYS]
    sides = (seen.shown, seen.met) if gathers else (seen.met, seen.shown)
    types = {operand.role: rank.stage.tensors[operand.tensor].type.dtype for operand in instruction.operands}
    dtype = NUMPY_DTYPES[types[WHOLE_KEYS[0]]] if gathers else np.float32
    return [Buffer((len(side), size), dtype) for side in sides for size in sizes]


@frozen
class _SeenRuns:
    """Runs of keys that context ranks exchange where each gathers those that it sees, from one rank's side."""

    own: int
    """number of runs of the rank itself"""
    places: int
    """number of runs that it gathers"""
    viewers: tuple[HeldRun, ...]
    """the own runs wherever a rank gathers them, in the order in which parts of their gradients are summed"""
    kept: tuple[HeldRun, ...]
    """of these, those that the rank itself gathers"""
    shown: tuple[HeldRun, ...]
    """of these, those that others gather, by them"""
    met: tuple[HeldRun, ...]
    """gathered runs of others, by holder"""
    shown_counts: tuple[int, ...]
    """by rank: the number of `shown` runs that it gathers"""
    met_counts: tuple[int, ...]
    """by rank: the number of `met` runs that it holds"""

    @classmethod
    def of(cls, rank: RankExecutor, instruction: Instruction) -> _SeenRuns | None:
        """Return the runs of an exchange; None where ranks gather all."""
        return _seen_runs(rank.program.plan, tensor_collectives.window_of(rank, instruction), rank.context)


@cache
def _seen_runs(plan: Plan, window: int | None, rank: int) -> _SeenRuns | None:
    if earlier_runs(plan, window) is None:
        return None
    every, ranks = runs_by_holder(plan, window), range(plan.cp)
    viewers = tuple(each for each in every if each.holder == rank)
    others = [each for each in viewers if each.rank != rank]
    shown = tuple(sorted(others, key=lambda each: (each.rank, each.place)))
    arriving = [each for each in every if each.rank == rank != each.holder]
    met = tuple(sorted(arriving, key=lambda each: (each.holder, each.place)))
    gathering, holding = [each.rank for each in shown], [each.holder for each in met]
    return _SeenRuns(
        own=plan.context_runs,
        places=len(held_runs(plan, window, rank)),
        viewers=viewers,
        kept=tuple(each for each in viewers if each.rank == rank),
        shown=shown,
        met=met,
        shown_counts=tuple(map(gathering.count, ranks)),
        met_counts=tuple(map(holding.count, ranks)),
    )
