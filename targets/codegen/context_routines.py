"""Attention of a context rank: its runs of queries against keys and values of all ranks, run by run.

A run is computed as a slice is, from the same kernels: forward carries the state of the softmax from one run of keys to
the next, backward takes each run of keys alone. Gathered keys are a tensor whose rows `held_runs` orders; the steps
name the rows of each run in it, and take runs in the order of positions. Which runs a rank's queries see depends on the
rank, so a step says for each context rank at which position its queries and keys start, or that it leaves the step out:

    2 ranks, contiguous:   keys of run 0: both ranks      keys of run 1: rank 1 alone
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.context_rows import earlier_runs, held_runs, positions_of, run_length, run_of, sees
from ratrain.ratrain_ir.model.micro_batch import tokens_per_micro_batch
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import KEY_SLOTS, WHOLE_KEYS, begins_key_gradients, seen_slices
from ratrain.ratrain_ir.ops.roles import of_slice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.codegen.builder import Builder, ByRank


@frozen
class Heads:
    """Heads that attention works on: one group of a rank's, or by default all of them."""

    group: int = 0
    """their group among the rank's"""
    groups: int = 1

    def part(self, number: int) -> int:
        """Return how many heads there are of a rank's number of them."""
        return number // self.groups


ALL_HEADS = Heads()


@frozen
class Run:
    """One run of rows of this rank's tensors; all rows without context ranks."""

    number: int
    """its number among the rank's runs"""
    runs: int
    """the runs of a rank"""
    rows: int
    """its rows, of all sequences of a micro-batch"""

    def of(self, name: str, heads: Heads = ALL_HEADS) -> str:
        """Return the run's rows of an operand that has the rows of all runs, of all groups of heads."""
        return self.part_of(name, self.rows, heads)

    def part_of(self, name: str, length: int, heads: Heads) -> str:
        """Return the run's part of an operand that has one of some length for each run, of all groups of heads."""
        place = heads.group * self.runs + self.number
        return name if self.runs * heads.groups == 1 else f"{name}[{place * length}:{(place + 1) * length}]"

    def of_all(self, operands: Mapping[str, str]) -> dict[str, str]:
        """Return the run's rows of some operands."""
        return {name: self.of(reference) for name, reference in operands.items()}


def runs_of(plan: Plan, rows: int) -> list[Run]:
    """Return the runs of rows that a rank has in a tensor with some rows."""
    runs = plan.context_runs
    return [Run(number, runs, rows // runs) for number in range(runs)]


def positions(plan: Plan, run: Run) -> tuple[dict[str, int], ByRank]:
    """Return the options of a kernel that give the positions of a run's rows, and what ranks add to them."""
    length = run_length(plan)
    if plan.cp == 1:
        return {"seq_len": length, **({"first_position": plan.first_position} if plan.first_position else {})}, ()
    return {"seq_len": length}, tuple({"first_position": each.start} for each in _positions_on_ranks(plan, run))


def _positions_on_ranks(plan: Plan, run: Run) -> list[range]:
    """Return the positions of a run's rows on each context rank."""
    return [positions_of(plan, run_of(plan, rank, run.number)) for rank in range(plan.cp)]


@frozen
class _Keys:
    """One run of keys and values, by the rows of the operands that hold gathered ones."""

    positions: tuple[range | None, ...]
    """on each context rank; None where a rank has no such run"""
    rows: tuple[int, int]
    slice: int | None
    """number of the earlier slice that it is of; None: of the routine's own"""

    def of(self, name: str) -> str:
        """Return the run's rows of an operand that has the rows of all runs."""
        held = name if self.slice is None else of_slice(name, self.slice)
        return f"{held}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def operands(self) -> dict[str, str]:
        """The run's keys and values, as kernels take them."""
        return {name: self.of(whole) for name, whole in zip(KEY_SLOTS, WHOLE_KEYS, strict=True)}


def _gathered_keys(builder: Builder) -> list[_Keys]:
    """Return the gathered runs of keys, of earlier slices and of the routine's own, in the order of rows."""
    plan, window = builder.plan, builder.layer_kind.window
    found = []
    for number in (*seen_slices(builder.whole, plan), None):
        of = plan if number is None else slice_plan(plan.whole, number)
        rows = tokens_per_micro_batch(of) // of.context_runs
        for place, runs in enumerate(zip(*(held_runs(of, window, rank) for rank in range(of.cp)), strict=True)):
            positions = tuple(None if run is None else positions_of(of, run) for run in runs)
            found.append(_Keys(positions, (place * rows, (place + 1) * rows), number))
    return found


def _keys_of(builder: Builder, run: Run, every: list[_Keys]) -> list[_Keys]:
    """Return the gathered runs that a run of queries may see, in the order of positions."""
    reach = earlier_runs(builder.plan, builder.layer_kind.window)
    if reach is not None:
        return every[run.number * (reach + 1) : (run.number + 1) * (reach + 1)]
    return sorted(every, key=lambda keys: [positions.start for positions in keys.positions if positions is not None])


def _attend(
    builder: Builder,
    kernel: str,
    run: Run,
    keys: _Keys,
    operands: dict[str, str],
    begun: set[int],
    attention: Mapping[str, Any],
) -> None:
    """Add the step of a kernel on a run of queries and one of keys, on the context ranks that see any of these keys.

    It adds to the results of ranks in `begun`. It begins the results of other ranks, and puts these into `begun`.
    """
    window, queries = builder.layer_kind.window, _positions_on_ranks(builder.plan, run)
    met = dict(enumerate(zip(queries, keys.positions, strict=True)))
    seeing = {rank: (own, of) for rank, (own, of) in met.items() if of is not None and sees(window, own, of)}
    if not seeing:
        return
    by_rank = tuple(
        {"first_query": seeing[rank][0].start, "first_key": seeing[rank][1].start, "accumulate": rank in begun}
        if rank in seeing
        else None
        for rank in met
    )
    own, of = next(iter(seeing.values()))
    options = {
        "batch": builder.plan.micro_batch_size,
        "queries": len(own),
        "keys": len(of),
        "first_query": own.start,
        "first_key": of.start,
        **attention,
        "accumulate": bool(begun.intersection(seeing)),
    }
    builder.step_by_rank(by_rank, kernel, {**operands, **keys.operands}, **options)
    begun.update(seeing)


def context_forward(builder: Builder, attention: Mapping[str, Any], of: Heads = ALL_HEADS) -> None:
    """Add the steps from queries, and keys and values of all ranks, to the output of some heads."""
    every, heads, head_dim = _gathered_keys(builder), of.part(builder.model.heads), builder.model.head_dim
    o, lse = builder.slot("o"), builder.slot("lse")
    for run in runs_of(builder.plan, builder.rows):
        state = {
            "acc": builder.temporary(f"acc_{run.number}", run.rows, heads * head_dim, dtype=Dtype.F32),
            "peak": builder.temporary(f"peak_{run.number}", heads, run.rows, dtype=Dtype.F32),
            "total": builder.temporary(f"total_{run.number}", heads, run.rows, dtype=Dtype.F32),
        }
        begun: set[int] = set()
        operands = {"q": run.of("q", of), **state, **run.of_all(builder.documents)}
        for keys in _keys_of(builder, run, every):
            _attend(builder, "attention_partial_forward", run, keys, operands, begun, attention)
        # of the log-sum-exp a run has a row for each head
        outputs = {"o": run.of(o, of), "lse": run.part_of(lse, heads, of)}
        builder.step("attention_partial_finish", {**state, **outputs}, heads=heads, head_dim=head_dim)


def context_backward(builder: Builder, attention: Mapping[str, Any], do: str, of: Heads = ALL_HEADS) -> None:
    """Add the steps from the gradient `do` of the heads' output to that of queries, and to parts of all keys'.

    Later runs come first, as later slices do. Where no query of a rank sees some keys, its part of their gradient is 0,
    if this is where the part begins.
    """
    every, heads, head_dim = _gathered_keys(builder), of.part(builder.model.heads), builder.model.head_dim
    queries = builder.temporary("dq_sum", builder.rows, heads * head_dim, dtype=Dtype.F32)
    builder.step("zero", {"a": queries})
    begun: dict[_Keys, set[int]] = {}
    for keys in every:
        owner = builder.plan if keys.slice is None else slice_plan(builder.plan.whole, keys.slice)
        begins = begins_key_gradients(builder.whole, builder.plan, owner)
        begun[keys] = set() if begins else {*range(builder.plan.cp)}
    for run in reversed(runs_of(builder.plan, builder.rows)):
        delta = builder.temporary(f"delta_{run.number}", heads, run.rows, dtype=Dtype.F32)
        operands = {"o": run.of("o", of), "do": run.of(do, of), "delta": delta}
        builder.step("attention_delta", operands, heads=heads, head_dim=head_dim)
        common = {"q": run.of("q", of), "lse": run.part_of("lse", heads, of), "do": run.of(do, of), "delta": delta}
        common |= {"dq": run.of(queries), **run.of_all(builder.documents)}
        for keys in _keys_of(builder, run, every):
            parts = _parts_of(keys)
            _attend(builder, "attention_partial_backward", run, keys, {**common, **parts}, begun[keys], attention)
    for keys, known in begun.items():
        unseen: ByRank = tuple(None if rank in known else {} for rank in range(builder.plan.cp))
        if len(known) < builder.plan.cp:
            for name in _parts_of(keys).values():
                builder.step_by_rank(unseen, "zero", {"a": name})
    builder.step("cast", {"src": queries, "dst": Run(0, 1, builder.rows).of("dq_out", of)})


def _parts_of(keys: _Keys) -> dict[str, str]:
    """Return a run's parts of the gradients of keys and values, as kernels take them."""
    return {name: keys.of(f"d{whole}") for name, whole in zip(("dk", "dv"), WHOLE_KEYS, strict=True)}
