"""Order in which instructions take effect: at once on a host; by streams on a device that runs asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from attrs import frozen

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.topology import Hop, Rank


@frozen
class Issue:
    """Instruction that is handed to a rank's engine."""

    place: Rank
    engine: Engine
    number: int
    """number of instructions that the engine was handed before, over all steps"""
    waits: tuple[tuple[Engine, int], ...]
    """engines of the rank, each with the number of its instructions (over all steps) that must be done before"""


class Graph(Protocol):
    """Recorded work of a device."""

    def replay(self) -> None:
        """Issue the recorded work again, with the same addresses in the same order."""


class Order(Protocol):
    """Order of execution that respects the program's waits."""

    def issuing(self, issues: Sequence[Issue], hop: Hop | None, *, sends: bool) -> AbstractContextManager[None]:
        """Return the context in which one rank's instruction, or a collective of all of `issues`, is issued.

        `hop` is the channel of a message, `sends` says at which end of it this rank is.
        """

    def joined(self) -> AbstractContextManager[None]:
        """Return the context in which a step is issued: after the caller's earlier work, before its later work."""

    def synchronize(self) -> None:
        """Wait until all issued work is done."""

    @property
    def captures(self) -> bool:
        """True if `graph` can record work."""

    def graph(self, issue: Callable[[], None]) -> Graph:
        """Record what `issue` issues, without running it.

        Raises `DiagnosticError` RT093 where the device cannot record it.
        """


class AtOnce:
    """`Order` of a host, where an instruction is done when it returns."""

    captures = False

    def issuing(self, issues: Sequence[Issue], hop: Hop | None, *, sends: bool) -> AbstractContextManager[None]:
        """Return an empty context."""
        del issues, hop, sends
        return nullcontext()

    def joined(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def graph(self, issue: Callable[[], None]) -> Graph:
        """Refuse: a host records nothing, as `captures` says."""
        raise NotImplementedError(f"{issue} cannot be recorded")

    def synchronize(self) -> None:
        """Do nothing: everything is done."""
