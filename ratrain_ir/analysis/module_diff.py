"""Difference of two modules in terms of schedules: ops added, dropped and moved; tensors added, dropped and changed.

Ops are identified by keyword and fields, so reordering shows as moves, not as piles of removed and added lines. Ops
have moved if they do not belong to a longest run of ops that kept their order:

    before  A B C D        longest common order  A C D
    after   A C D B        moved                 B

Cost: n log n in the number of ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.compute import Release

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor


@frozen
class Move:
    """Op that changed its place: positions before and after, counted without releases."""

    op: str
    before: int
    after: int


@frozen
class Resize:
    """Tensor of both modules whose number of bytes differs."""

    tensor: str
    before: int
    after: int


@frozen
class Released:
    """Tensor that is released behind another op; "" stands for the start of the list, None for no release."""

    tensor: str
    before: str | None
    after: str | None


@frozen
class StageDiff:
    """Differences of one stage."""

    stage: int
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    moved: tuple[Move, ...]
    changed: tuple[str, ...]
    """ops of both whose operands differ"""
    new_tensors: tuple[str, ...]
    """declarations in `after` alone, or of another type there"""
    gone_tensors: tuple[str, ...]
    resized: tuple[Resize, ...]
    """tensors of both whose bytes differ; they are among new and gone ones too, as their type differs"""
    readdressed: int
    """number of tensors whose offset differs"""
    released: tuple[Released, ...]
    """tensors of both that are released behind different ops"""
    peak_before: int
    peak_after: int

    @property
    def is_empty(self) -> bool:
        """True if nothing differs."""
        return not (
            self.added
            or self.dropped
            or self.moved
            or self.changed
            or self.new_tensors
            or self.gone_tensors
            or self.readdressed
            or self.released
        )


def diff_modules(before: Module, after: Module) -> list[StageDiff]:
    """Compare all stages of two modules. A stage that only one has counts as wholly added or dropped."""
    count = max(len(before.stages), len(after.stages))
    return [_diff_stages(_stage(before, index), _stage(after, index)) for index in range(count)]


def _stage(module: Module, index: int) -> Stage:
    return module.stages[index] if index < len(module.stages) else Stage(index)


def _diff_stages(before: Stage, after: Stage) -> StageDiff:
    old, new = _named(before), _named(after)
    added = [name for name in new if name not in old]
    dropped = [name for name in old if name not in new]
    common_old = [name for name in old if name in new]
    position_in_new = {name: index for index, name in enumerate(new)}
    position_in_old = {name: index for index, name in enumerate(old)}
    # positions in the new list, in old order: an increasing run of them kept its order
    kept = set(_longest_increasing([position_in_new[name] for name in common_old]))
    moved = [
        Move(name, position_in_old[name], position_in_new[name])
        for name in common_old
        if position_in_new[name] not in kept
    ]
    changed = [name for name in common_old if _operands(old[name]) != _operands(new[name])]
    same = {
        name for name, held in before.tensors.items() if name in after.tensors and after.tensors[name].type is held.type
    }
    resized = [
        Resize(name, held.type.nbytes, after.tensors[name].type.nbytes)
        for name, held in before.tensors.items()
        if name in after.tensors and held.type.nbytes != after.tensors[name].type.nbytes
    ]
    readdressed = sum(1 for name in same if before.tensors[name].offset != after.tensors[name].offset)
    return StageDiff(
        before.index,
        tuple(added),
        tuple(dropped),
        tuple(moved),
        tuple(changed),
        tuple(_declared(after.tensors[name]) for name in after.tensors if name not in same),
        tuple(_declared(before.tensors[name]) for name in before.tensors if name not in same),
        tuple(resized),
        readdressed,
        _released_elsewhere(before, after),
        lifetimes(before).peak_bytes,
        lifetimes(after).peak_bytes,
    )


def _named(stage: Stage) -> dict[str, Op]:
    """Return the ops, without releases, by name; a repeated op gets a number."""
    return {name: op for name, op in _with_names(stage) if type(op) is not Release}


def _with_names(stage: Stage) -> Iterator[tuple[str, Op]]:
    """Yield all ops with their names; a release has the name of the op before it, or "" at the start."""
    name, seen = "", Counter[str]()
    for op in stage.ops:
        if type(op) is not Release:
            own = repr(op)
            seen[own] += 1
            name = own if seen[own] == 1 else f"{own} ({seen[own]})"
        yield name, op


def _released_elsewhere(before: Stage, after: Stage) -> tuple[Released, ...]:
    old, new = _places_of_releases(before), _places_of_releases(after)
    both = [name for name in before.tensors if name in after.tensors]
    return tuple(Released(name, old.get(name), new.get(name)) for name in both if old.get(name) != new.get(name))


def _places_of_releases(stage: Stage) -> dict[str, str]:
    """Return the name of the op behind which each tensor is released."""
    return {tensor.name: name for name, op in _with_names(stage) if type(op) is Release for tensor in op.reads}


def _operands(op: Op) -> tuple[tuple[str, ...], ...]:
    groups = (op.writes, op.updates, op.reads, op.scratch)
    return tuple(tuple(t.name for t in group) for group in groups)


def _declared(tensor: Tensor) -> str:
    return f"{tensor.kind.value} %{tensor.name} : {tensor.type}"


def _longest_increasing(values: list[int]) -> list[int]:
    """Return a longest increasing subsequence of distinct values (patience sorting, n log n)."""
    # tails[k]: the least value that ends an increasing subsequence of k + 1 values so far, ascending in k
    tails: list[int] = []
    tail_index: list[int] = []
    previous: list[int] = []
    for index, value in enumerate(values):
        at = bisect_left(tails, value)
        previous.append(tail_index[at - 1] if at else -1)
        if at == len(tails):
            tails.append(value)
            tail_index.append(index)
        else:
            tails[at] = value
            tail_index[at] = index
    chosen: list[int] = []
    index = tail_index[-1] if tail_index else -1
    while index >= 0:
        chosen.append(values[index])
        index = previous[index]
    return chosen[::-1]
