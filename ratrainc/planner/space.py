"""The plans that are considered: every shape that takes a model and a global batch to at most so many clusters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain_ir.diagnostics import fail
from ratrain_ir.frontend.plan import Plan

if TYPE_CHECKING:
    from ratrain_ir.frontend.model_config import ModelConfig
    from ratrainc.planner.profile import Setting

STATE_MODES = ((0, "last"), (1, "last"), (2, "each-micro-batch"), (3, "last"), (3, "each-micro-batch"))
"""ZeRO levels and reduce modes. Level 2 with `last` is left out: its program is that of level 1."""


_MOST_SEQUENCES = 1 << 16
"""of a micro-batch: what a plan file allows"""


@frozen(order=True)
class Shape:
    """A plan without its stage cuts."""

    pp: int
    dp: int
    micro_batch_size: int
    micro_batches: int
    zero: int
    reduce: str

    @property
    def clusters(self) -> int:
        """Clusters it occupies."""
        return self.pp * self.dp

    def plan(self, setting: Setting, cuts: tuple[int, ...]) -> Plan:
        """The plan of these stage cuts."""
        return evolve(
            setting.template,
            pp=self.pp,
            dp=self.dp,
            cuts=cuts,
            micro_batch_size=self.micro_batch_size,
            micro_batches=self.micro_batches,
            zero=self.zero,
            reduce=self.reduce,
        )


def shapes(
    model: ModelConfig, clusters: int, global_batch: int, modes: tuple[tuple[int, str], ...] = STATE_MODES
) -> list[Shape]:
    """Every shape on at most `clusters` clusters whose replicas share the global batch evenly.

    Raises `DiagnosticError` RT064 where there is none.
    """
    found = list(_shapes(model, clusters, global_batch, modes))
    if not found:
        fail("RT064", f"{clusters} clusters and a global batch of {global_batch}: both must be at least 1")
    return found


def _shapes(
    model: ModelConfig, clusters: int, global_batch: int, modes: tuple[tuple[int, str], ...]
) -> Iterator[Shape]:
    replicas = [d for d in divisors(global_batch) if d <= clusters]
    for dp in replicas:
        sizes = [size for size in divisors(global_batch // dp) if size <= _MOST_SEQUENCES]
        for pp in range(1, min(model.layers, clusters // dp) + 1):
            for size in sizes:
                for zero, reduce in modes if dp > 1 else dict.fromkeys((min(zero, 0), "last") for zero, _ in modes):
                    yield Shape(pp, dp, size, global_batch // dp // size, zero, reduce)


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def template(seq_len: int) -> Plan:
    """What plans have in common unless a plan file says otherwise: f16 views, the usual AdamW, no clipping."""
    return Plan(pp=1, dp=1, cuts=(), micro_batch_size=1, micro_batches=1, seq_len=seq_len, zero=0)
