"""When what an instruction does is done: at once on a host; on a device that works behind the program, in the order of its streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from attrs import frozen

from ratrain.ratrain_ir.ops import Engine
from ratrain.ratrain_ir.topology import Hop, Rank


@frozen
class Issue:
    """An instruction that is handed to a rank's engine."""

    place: Rank
    engine: Engine
    number: int
    """instructions that the engine was handed before, over all steps"""
    waits: tuple[tuple[Engine, int], ...]
    """engines of the rank, and how many of their instructions, over all steps, must be done before"""


class Order(Protocol):
    """Has instructions done in the order of the program's waits."""

    def issuing(self, issues: Sequence[Issue], hop: Hop | None, *, sends: bool) -> AbstractContextManager[None]:
        """Around what an instruction does: one rank's, or a collective of all these. `hop` is the channel of a message."""

    def synchronize(self) -> None:
        """Return when all is done that was issued."""


class AtOnce:
    """`Order` of a host: an instruction is done when it returns."""

    def issuing(self, issues: Sequence[Issue], hop: Hop | None, *, sends: bool) -> AbstractContextManager[None]:
        """Nothing is needed."""
        del issues, hop, sends
        return nullcontext()

    def synchronize(self) -> None:
        """Everything is done."""
