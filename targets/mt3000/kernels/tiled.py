"""Kernels that execute the tile schedules of a program: matrix products and attention, tile by tile in on-chip buffers.

The buffers have the sizes of the machine's GSM, AM and SM; a tile that does not fit cannot be computed. `fast` computes
everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.mt3000.kernels.tiled_compute import TilePosition
from ratrain.targets.mt3000.kernels.tiled_memory import PlaceOf, TiledMemory, memory_plan
from ratrain.targets.mt3000.tiles.calls import PARTS, UNTILED_BLOCKS, UNTILED_EXPERTS, UNTILED_SCORES, tiles_of
from ratrain.targets.mt3000.tiles.tile_schedule import OnChipMemory, Ranges, TileSchedule
from ratrain.targets.program.kernel_options import ProductOptions
from ratrain.targets.runtime.arena.scratch import plan_bytes
from ratrain.targets.runtime.kernels.fast.fast import Fast
from ratrain.targets.runtime.kernels.reference.reference_common import quiet
from ratrain.targets.runtime.kernels.shared import check_starts

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionSpec
    from ratrain.targets.program.routine import OnChipSchedule
    from ratrain.targets.runtime.arena.scratch import Scratch
    from ratrain.targets.runtime.kernels.interface import Array


def _no_place(ranges: Ranges, keys_first: bool) -> TilePosition:
    """Return a position for products, which do not depend on one."""
    del ranges, keys_first
    return TilePosition((0, 0), (0, 0), np.float32(1), np.float32(0), None, keys_first=True)


def _place_of(spec: AttentionSpec) -> PlaceOf:
    slopes = spec.slopes
    scale = np.float32(spec.multiplier)

    def place(ranges: Ranges, keys_first: bool) -> TilePosition:
        head = ranges["g"][0] * spec.group + ranges["h"][0]
        return TilePosition(
            ranges["q"], ranges["k"], scale, np.float32(slopes[head]), spec.window, keys_first=keys_first
        )

    return place


class Tiled(Fast):
    """`KernelSet` bound to the tile schedules of one step; `bound_to` binds it to others."""

    name = "tiled"
    threaded = False

    def __init__(self, tiles: Mapping[str, TileSchedule] | None = None) -> None:
        super().__init__()
        self.tiles: Mapping[str, TileSchedule] = tiles or {}
        self.late = False
        """transfers happen when they are waited for instead of when they are issued"""

    def bound_to(self, schedules: Mapping[str, OnChipSchedule]) -> Self:
        """Return the set bound to the tile schedules of a step; it shares the tables of this one."""
        bound = copy(self)
        bound.tiles = tiles_of(schedules)
        return bound

    def scratch_bytes(self, kernel: str, **arguments: Any) -> int:
        """Return the bytes of scratch that a kernel takes: the machine's memories; see `KernelSet.scratch_bytes`.

        Raises `DiagnosticError` RT093 where a kernel that runs by tiles has no schedule, or is a product that nothing
        tiles.
        """
        if kernel in UNTILED_SCORES:
            text = f"there are no tile schedules for '{kernel}': whole score matrices are not computed by tiles"
            fail("RT093", text, help='plan with attention = "fused", or run it with --kernels fast')
        if kernel in UNTILED_BLOCKS:
            text = f"there are no tile schedules for '{kernel}': slices of a sequence are not computed by tiles"
            fail("RT093", text, help="plan without slices, or run it with --kernels fast")
        if kernel in UNTILED_EXPERTS:
            text = f"there are no tile schedules for '{kernel}': products of experts are not computed by tiles"
            fail("RT093", text, help="run it with --kernels fast")
        if kernel in PARTS and getattr(arguments.get("spec"), "softcap", None) is not None:
            text = (
                f"there are no tile schedules for '{kernel}' with a soft cap: capped scores are not computed by tiles"
            )
            fail("RT093", text, help="run it with --kernels fast")
        if kernel in PARTS:
            if not self.tiles:
                text = f"a step '{kernel}' of this program has no tile schedule"
                fail(
                    "RT093", text, help="compile it for a machine whose cost is 'tiles', or run it with --kernels fast"
                )
            return max(plan_bytes(memory_plan(schedule.memories)) for schedule in self.tiles.values())
        return super().scratch_bytes(kernel, **arguments)

    def execute(
        self, part: str, operands: Mapping[str, Array | None], scratch: Scratch, place_of: PlaceOf = _no_place
    ) -> None:
        """Execute one schedule on operands in DDR."""
        schedule = self.tiles[part]
        scratch.reset()
        gsm, am, sm = scratch.take_all(memory_plan(schedule.memories))
        memories = {OnChipMemory.GSM: gsm[None], OnChipMemory.AM: am, OnChipMemory.SM: sm}
        present = {name: operand for name, operand in operands.items() if operand is not None}
        for operand in schedule.operands:
            assert present[operand.name].shape == schedule.operand_shape(operand), operand.name
        TiledMemory(schedule, present, place_of, memories, self.late).run()

    @quiet
    def gemm(self, a, b, out, *, scratch, **options):
        # its schedule, which is verified against the step, has the transpositions and the runs
        given = ProductOptions(**options)
        operands = {"a": a, "b": b, "out": out, "bias": given.bias, "residual": given.residual}
        self.execute("gemm", operands, scratch)

    @quiet
    def attention_forward(self, q, k, v, o, lse, *, documents=None, scratch, spec):
        check_starts(documents, spec.seq_len)
        operands = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "documents": documents}
        self.execute("attention_forward", operands, scratch, _place_of(spec))

    @quiet
    def attention_backward(self, q, k, v, o, lse, do, dq, dk, dv, delta, *, documents=None, scratch, spec):
        """Compute the gradient of queries, and delta with it; then the gradients of keys and values from delta."""
        check_starts(documents, spec.seq_len)
        read = {"q": q, "k": k, "v": v, "lse": lse, "do": do, "delta": delta, "documents": documents}
        self.execute("attention_query_gradient", {**read, "o": o, "dq": dq}, scratch, _place_of(spec))
        operands = {**read, "dk": dk, "dv": dv}
        self.execute("attention_key_gradient", operands, scratch, _place_of(spec))
