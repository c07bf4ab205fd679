"""When what an instruction does is done: at once on a host; on a device that works behind the program, in the order of its streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from attrs import frozen

from ratrain.ratrain_ir.ops.base import Engine
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


class Graph(Protocol):
    """What was issued, recorded."""

    def replay(self) -> None:
        """Issue it, with the same addresses in the same order."""


class Order(Protocol):
    """Has instructions done in the order of the program's waits."""

    def issuing(self, issues: Sequence[Issue], hop: Hop | None, *, sends: bool) -> AbstractContextManager[None]:
        """Around what an instruction does: one rank's, or a collective of all these. `hop` is the channel of a message."""

    def joined(self) -> AbstractContextManager[None]:
        """Around all that is issued for a step: it comes after what the caller has issued before, and before what the caller issues next."""

    def synchronize(self) -> None:
        """Return when all is done that was issued."""

    @property
    def captures(self) -> bool:
        """Whether there is a `graph`."""

    def graph(self, issue: Callable[[], None]) -> Graph:
        """Whatever `issue` issues, recorded and not done. Raises `DiagnosticError` RT093 where the device cannot record it."""


class AtOnce:
    """`Order` of a host: an instruction is done when it returns."""

    captures = False

    def issuing(self, issues: Sequence[Issue], hop: Hop | None, *, sends: bool) -> AbstractContextManager[None]:
        """Nothing is needed."""
        del issues, hop, sends
        return nullcontext()

    def joined(self) -> AbstractContextManager[None]:
        """Nothing is needed."""
        return nullcontext()

    def graph(self, issue: Callable[[], None]) -> Graph:
        """Nothing is recorded on a host, and nobody asks for it: `captures` says so."""
        raise NotImplementedError(f"{issue} cannot be recorded")

    def synchronize(self) -> None:
        """Everything is done."""
