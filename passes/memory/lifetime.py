"""`lifetime`: reports the peak of live bytes of every stage, and what is live there. The module stays unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from ratrain.passes.pass_base import Fact, Pass, PassContext
from ratrain.ratrain_ir.analysis.lifetime import lifetimes

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module


@frozen
class LifetimePass(Pass):
    """Report live-byte peaks by state kind."""

    name: ClassVar[str] = "lifetime"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    forbids: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, module: Module, context: PassContext) -> None:
        """Add one line per stage to the statistics: bytes at the peak, the op there, and bytes by state kind."""
        for stage in module.stages:
            lives = lifetimes(stage)
            position = lives.peak_position
            kinds = ", ".join(f"{kind.value} {size}" for kind, size in lives.bytes_by_kind(position).items())
            where = repr(stage.ops[position]) if stage.ops else "nothing"
            context.statistics[f"stage {stage.index}"] = f"peak {lives.peak_bytes} bytes live at '{where}': {kinds}"
