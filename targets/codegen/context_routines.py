"""Attention of a context rank: its runs of queries against keys and values of all ranks, run by run.

A run is computed as a slice is, from the same kernels: forward carries the state of the softmax from one run of keys to
the next, backward takes each run of keys alone. Keys of all ranks are a tensor in rank order; the steps name the rows
of each run in it, and take runs in the order of positions. Which runs a rank's queries see depends on the rank, so a
step says for each context rank at which position its queries start, or that it leaves the step out:

    2 ranks, contiguous:   keys of run 0: both ranks      keys of run 1: rank 1 alone
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.context_rows import first_position_of, holders, run_length, run_of, runs_of_rank, sees
from ratrain.ratrain_ir.model.slots import KEY_SLOTS, WHOLE_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.codegen.builder import Builder, ByRank


@frozen
class Run:
    """One run of rows of this rank's tensors; all rows without context ranks."""

    number: int
    """its number among the rank's runs"""
    runs: int
    """the runs of a rank"""
    rows: int
    """its rows, of all sequences of a micro-batch"""

    def of(self, name: str) -> str:
        """Return the run's rows of an operand that has those of all runs."""
        return name if self.runs == 1 else f"{name}[{self.number * self.rows}:{(self.number + 1) * self.rows}]"

    def of_all(self, operands: Mapping[str, str]) -> dict[str, str]:
        """Return the run's rows of some operands."""
        return {name: self.of(reference) for name, reference in operands.items()}


def runs_of(plan: Plan, rows: int) -> list[Run]:
    """Return the runs of rows that a rank has in a tensor with some rows."""
    runs = runs_of_rank(plan)
    return [Run(number, runs, rows // runs) for number in range(runs)]


def positions(plan: Plan, run: Run) -> tuple[dict[str, int], ByRank]:
    """Return the options of a kernel that give the positions of a run's rows, and what ranks add to them."""
    length = run_length(plan)
    if plan.cp == 1:
        return {"seq_len": length, **({"first_position": plan.first_position} if plan.first_position else {})}, ()
    starts = [first_position_of(plan, run_of(plan, rank, run.number)) for rank in range(plan.cp)]
    return {"seq_len": length}, tuple({"first_position": start} for start in starts)


@frozen
class _Keys:
    """One run of keys and values, by the rows of the operands that hold those of all ranks."""

    run: int
    """its index in the order of positions"""
    rows: tuple[int, int]

    def of(self, name: str) -> str:
        """Return the run's rows of an operand that has those of all ranks."""
        return f"{name}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def operands(self) -> dict[str, str]:
        """The run's keys and values, as kernels take them."""
        return {name: self.of(whole) for name, whole in zip(KEY_SLOTS, WHOLE_KEYS, strict=True)}


def _all_keys(builder: Builder) -> list[_Keys]:
    """Return the runs of keys of all ranks, in the order of positions."""
    plan = builder.plan
    runs, rows = runs_of_rank(plan), builder.rows // runs_of_rank(plan)
    places = [rank * runs + number for rank, number in holders(plan)]
    return [_Keys(index, (place * rows, (place + 1) * rows)) for index, place in enumerate(places)]


def _options(builder: Builder, run: Run, keys: _Keys, attention: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that all ranks have in common; a rank adds the position of its queries."""
    length = run_length(builder.plan)
    first = first_position_of(builder.plan, run_of(builder.plan, 0, run.number))
    return {
        "batch": builder.plan.micro_batch_size,
        "queries": length,
        "keys": length,
        "first_query": max(first, first_position_of(builder.plan, keys.run)),
        "first_key": first_position_of(builder.plan, keys.run),
        **attention,
    }


def _sees(builder: Builder, rank: int, run: Run, keys: _Keys) -> bool:
    return sees(builder.plan, builder.layer_kind.window, run_of(builder.plan, rank, run.number), keys.run)


def _query_of(builder: Builder, rank: int, run: Run) -> dict[str, Any]:
    return {"first_query": first_position_of(builder.plan, run_of(builder.plan, rank, run.number))}


def context_forward(builder: Builder, attention: Mapping[str, Any]) -> None:
    """Add the steps from queries, and keys and values of all ranks, to the output of the heads."""
    model, ranks = builder.model, range(builder.plan.cp)
    o, lse = builder.slot("o"), builder.slot("lse")
    for run in runs_of(builder.plan, builder.rows):
        state = {
            "acc": builder.temporary(f"acc_{run.number}", run.rows, model.heads * model.head_dim, dtype=Dtype.F32),
            "peak": builder.temporary(f"peak_{run.number}", model.heads, run.rows, dtype=Dtype.F32),
            "total": builder.temporary(f"total_{run.number}", model.heads, run.rows, dtype=Dtype.F32),
        }
        begun: set[int] = set()
        for keys in _all_keys(builder):
            seeing = [rank for rank in ranks if _sees(builder, rank, run, keys)]
            if not seeing:
                continue
            by_rank = tuple(
                {**_query_of(builder, rank, run), "accumulate": rank in begun} if rank in seeing else None
                for rank in ranks
            )
            operands = {"q": run.of("q"), **keys.operands, **state}
            operands |= run.of_all(builder.documents)
            options = _options(builder, run, keys, attention)
            accumulate = bool(begun.intersection(seeing))
            builder.step_by_rank(by_rank, "attention_partial_forward", operands, **options, accumulate=accumulate)
            begun.update(seeing)
        outputs = {"o": run.of(o), "lse": _heads_of(builder, run, lse)}
        builder.step("attention_partial_finish", {**state, **outputs}, heads=model.heads, head_dim=model.head_dim)


def _heads_of(builder: Builder, run: Run, lse: str) -> str:
    """Return a run's part of the log-sum-exp, which has all heads of the first run, then those of the second."""
    heads = builder.model.heads
    return lse if run.runs == 1 else f"{lse}[{run.number * heads}:{(run.number + 1) * heads}]"


def context_backward(builder: Builder, attention: Mapping[str, Any]) -> None:
    """Add the steps from the gradient `do` of the heads' output to that of queries, and to parts of all keys'.

    Later runs come first, as later slices do. Where no query of a rank sees some keys, its part of their gradient is 0.
    """
    model, ranks = builder.model, range(builder.plan.cp)
    queries = builder.temporary("dq_sum", builder.rows, model.heads * model.head_dim, dtype=Dtype.F32)
    builder.step("zero", {"a": queries})
    parts = tuple(f"d{name}" for name in WHOLE_KEYS)
    begun: dict[int, set[int]] = {keys.run: set() for keys in _all_keys(builder)}
    for run in reversed(runs_of(builder.plan, builder.rows)):
        delta = builder.temporary(f"delta_{run.number}", model.heads, run.rows, dtype=Dtype.F32)
        operands = {"o": run.of("o"), "do": run.of("do"), "delta": delta}
        builder.step("attention_delta", operands, heads=model.heads, head_dim=model.head_dim)
        common = {"q": run.of("q"), "lse": _heads_of(builder, run, "lse"), "do": run.of("do"), "delta": delta}
        common |= {"dq": run.of(queries), **run.of_all(builder.documents)}
        for keys in _all_keys(builder):
            seeing = [rank for rank in ranks if _sees(builder, rank, run, keys)]
            if not seeing:
                continue
            by_rank = tuple(
                {**_query_of(builder, rank, run), "accumulate": rank in begun[keys.run]} if rank in seeing else None
                for rank in ranks
            )
            operands = {**common, **keys.operands}
            operands |= {"dk": keys.of(parts[0]), "dv": keys.of(parts[1])}
            options = _options(builder, run, keys, attention)
            accumulate = bool(begun[keys.run].intersection(seeing))
            builder.step_by_rank(by_rank, "attention_partial_backward", operands, **options, accumulate=accumulate)
            begun[keys.run].update(seeing)
    for keys in _all_keys(builder):
        unseen: ByRank = tuple(None if rank in begun[keys.run] else {} for rank in ranks)
        if any(own is not None for own in unseen):
            for part in parts:
                builder.step_by_rank(unseen, "zero", {"a": keys.of(part)})
    builder.step("cast", {"src": queries, "dst": "dq_out"})
