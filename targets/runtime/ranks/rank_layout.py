"""Choices for a job of many processes: which rank each one runs, and how sums are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from attrs import frozen

from ratrain.ratrain_ir.config.rank_mapping import RankMapping, Tile
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.topology import Mesh, Rank, mesh_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan

RankOrder: TypeAlias = Literal["pp-first", "dp-first", "mapping"]
"""Order of processes: stages of one replica first, replicas of one stage first, or tiles of the plan's mapping.

Tensor-parallel ranks follow one another in the first two.
"""

Reduction: TypeAlias = Literal["ordered", "fast"]
"""Order of sums of gradients over replicas: rank order (the bits of the local engine), or the library's choice.

Sums over the tensor-parallel group always go in rank order.
"""


def check_reduction(plan: Plan, reduction: Reduction) -> None:
    """Raise `DiagnosticError` RT064 if a library would have to sum quantised gradients, which it cannot read."""
    if reduction == "fast" and plan.reduce_quantised is not None:
        text = f'the plan packs gradients (reduce_quantised = "{plan.reduce_quantised}"), which no library sums'
        fail("RT064", text, help="use --reduction ordered, or leave reduce_quantised out of the plan")


@frozen
class RankLayout:
    """Map between process numbers and the ranks of a mesh."""

    mesh: Mesh
    order: RankOrder = "pp-first"
    mapping: RankMapping | None = None

    @classmethod
    def of_plan(cls, plan: Plan, order: RankOrder) -> RankLayout:
        """Return the layout of a plan's ranks.

        Raises `DiagnosticError` RT064 if the order is `mapping` and the plan has none.
        """
        if order == "mapping" and plan.mapping is None:
            fail("RT064", "the plan has no mapping to order ranks by", help="use --rank-order pp-first or dp-first")
        return cls(mesh_of(plan), order, plan.mapping)

    @property
    def size(self) -> int:
        """Number of processes of the job."""
        return self.mesh.size

    @property
    def tiles(self) -> RankMapping:
        """Tiles of ranks that are consecutive processes; no tile means that the replicas of a stage are."""
        if self.order == "mapping" and self.mapping is not None:
            return self.mapping
        mesh = self.mesh
        return RankMapping((Tile("replica", mesh.stages, 1, mesh.peers),) if self.order == "pp-first" else ())

    def place(self, process: int) -> Rank:
        """Return the rank that a process runs."""
        return Rank(*self.tiles.place(process, self._whole))

    def process(self, rank: Rank) -> int:
        """Return the number of the process that runs a rank."""
        return self.tiles.position(*rank, self._whole)

    @property
    def _whole(self) -> Tile:
        return Tile("plan", self.mesh.stages, self.mesh.replicas, self.mesh.peers)
