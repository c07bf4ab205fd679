"""Bytes with an owner: the terms in which the room answers."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

Bytes = dict[str, int]
"""Bytes by their owner's name."""


@frozen
class Owner:
    """Bytes that one purpose holds."""

    name: str
    bytes: int


@frozen
class Moment:
    """One moment of a step and the bytes that are allocated at it."""

    name: str
    """in words: `at the loss`, `in the optimizer's step`"""
    owners: tuple[Owner, ...]

    @property
    def bytes(self) -> int:
        """Sum over the owners."""
        return sum(each.bytes for each in self.owners)


@frozen
class RankBytes:
    """Bytes of the ranks of one kind, at the fullest moment of their step."""

    name: str
    """`each rank`, or the pipeline stage: `first stage`, `middle stages`, `last stage`"""
    ranks: int
    """devices of this kind"""
    peak_bytes: int
    """bytes of tensors at the fullest moment, as `torch.cuda.max_memory_allocated` counts them"""
    moment: str
    """name of that moment"""
    owners: tuple[Owner, ...]
    """holders at that moment; their sum is `peak_bytes`"""
    moments: tuple[Moment, ...]
    """all moments that were considered, in the order of a step"""
    overhead: tuple[Owner, ...]
    """bytes of the device in addition to tensors: rounding and fragmentation, communicators, context"""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the device that the process takes: `peak_bytes` and the overhead, as `nvidia-smi` counts them."""
        return self.peak_bytes + sum(each.bytes for each in self.overhead)


def together(parts: Iterable[Bytes]) -> Bytes:
    """Return the sum of several accounts by owner, in order of first appearance."""
    total: Bytes = {}
    for part in parts:
        for name, nbytes in part.items():
            total[name] = total.get(name, 0) + nbytes
    return total


def owners_of(account: Bytes) -> tuple[Owner, ...]:
    """Return the owners of an account, without those that hold nothing."""
    return tuple(Owner(name, nbytes) for name, nbytes in account.items() if nbytes)
