"""Tile schedules of the kernel calls of a routine, and the cost of a tiled call."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.machine.cost import (
    copy_seconds,
    expert_groups,
    experts_and_rows,
    roofline_work,
    unread_stack_bytes,
)
from ratrain.targets.machine.resource_work import ResourceWork
from ratrain.targets.mt3000.tiles.calls import PARTS, UNTILED_EXPERTS, has_softcap, tiles_of
from ratrain.targets.mt3000.tiling.attention import AttentionShape
from ratrain.targets.mt3000.tiling.core import cluster_of
from ratrain.targets.mt3000.tiling.gemm import GemmShape
from ratrain.targets.mt3000.tiling.tile_search import attention_tiles, gemm_tiles, timed

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.mt3000.tiles.tile_schedule import TileSchedule
    from ratrain.targets.mt3000.tiling.core import Cluster
    from ratrain.targets.program.routine import Routine, Step


@frozen
class TiledCall:
    """Cost of a kernel call by its tiles: seconds alone, bytes across DDR, bytes by (source, destination) memory."""

    seconds: float
    ddr_bytes: int
    transfers: dict[tuple[str, str], int]


def with_tiles(routine: Routine, cluster: Cluster) -> Routine:
    """Return the routine with a schedule for every step that can be tiled on a cluster; other steps have none."""
    known = _known.setdefault(cluster, {})
    # Tiled routines are kept by name, as routines of one model and plan have different names. Another model may use the
    # same name for another routine, hence the test of identity.
    if routine.key not in known or known[routine.key][0] is not routine:
        steps = tuple(attrs.evolve(step, on_chip=step_tiles(routine, step, cluster)) for step in routine.steps)
        known[routine.key] = routine, attrs.evolve(routine, steps=steps)
    return known[routine.key][1]


_known: dict[Cluster, dict[str, tuple[Routine, Routine]]] = {}
"""Last routine of each name, and the tiled routine made of it. Routines are made once a shape, so that identity tells
them apart."""


def step_tiles(routine: Routine, step: Step, cluster: Cluster) -> dict[str, TileSchedule]:
    """Return the schedules of the parts of a kernel call; none where it is not tiled or nothing fits."""
    if has_softcap(step):
        return {}
    try:
        return {part: _schedule(routine, step, part, cluster) for part in PARTS.get(step.kernel, ())}
    except ValueError:
        return {}


def _schedule(routine: Routine, step: Step, part: str, cluster: Cluster) -> TileSchedule:
    if part == "gemm":
        return gemm_tiles(gemm_shape(routine, step), cluster)
    names = ("batch", "seq_len", "heads", "kv_heads", "head_dim", "window")
    dtype = routine.operand(step.operands["q"])[0]
    options = {name: step.options[name] for name in names}
    shape = AttentionShape(**options, dtype=dtype, documents="documents" in step.operands)
    return attention_tiles(part, shape, cluster)


def gemm_shape(routine: Routine, step: Step) -> GemmShape:
    """Return the shape of a `gemm` step."""
    (a, a_shape), (b, _), (out, (m, n)) = (routine.operand(step.operands[name]) for name in ("a", "b", "out"))
    trans_a, trans_b = (bool(step.options.get(name)) for name in ("trans_a", "trans_b"))
    names = [name for name in ("bias", "residual") if name in step.operands]
    added: list[tuple[str, Dtype]] = [(name, routine.operand(step.operands[name])[0]) for name in names]
    if step.options.get("accumulate"):
        added.append(("out", out))
    return GemmShape(
        m, n, a_shape[0 if trans_a else 1], a, b, out, trans_a, trans_b, tuple(added), step.options.get("half_run")
    )


def one_expert_shape(routine: Routine, step: Step, own_rows: int | None = None) -> GemmShape:
    """Return the shape of one expert's product, which is assumed to have as many rows as the others', if not told.

    Rows are at least one. Sums over a token's experts go to float32 workspace, which each product reads and writes.
    """
    (a, _), (b, _) = (routine.operand(step.operands[name]) for name in ("a", "b"))
    out, out_shape = routine.operand(step.operands["out"])
    if own_rows is None:
        experts, rows = experts_and_rows(routine, step)
        own_rows = max(1, -(-rows // experts))
    if step.kernel == "expert_gradients":
        added = (("out", out),) if step.options["accumulate"] else ()
        return GemmShape(out_shape[1], out_shape[2], own_rows, a, b, out, trans_a=True, added=added)
    trans_b = bool(step.options.get("trans_b"))
    inner = routine.shape_of(step.operands["a"])[1]
    if step.kernel == "expert_sums":
        return GemmShape(own_rows, out_shape[1], inner, a, b, Dtype.F32, trans_b=trans_b, added=(("out", Dtype.F32),))
    added = (("out", out),) if step.options.get("accumulate") else ()
    return GemmShape(own_rows, out_shape[1], inner, a, b, out, trans_b=trans_b, added=added)


def tiled_work(routine: Routine, step: Step, machine: Machine) -> ResourceWork:
    """Return the work of a kernel call: products and attention by their tiles, everything else by the roofline."""
    call = tiled_call(routine, step, machine)
    if call is None:
        return roofline_work(routine, step, machine)
    return ResourceWork(machine["launch"] * len(PARTS.get(step.kernel, (step.kernel,))) + call.seconds, call.ddr_bytes)


def tiled_call(routine: Routine, step: Step, machine: Machine) -> TiledCall | None:
    """Return the cost of a kernel call by its tiles, its parts one after the other; None where it is not tiled.

    The step's own schedules count. A step whose schedules are for other memories, or that has none, gets schedules for
    this machine. Products of experts have none: they cost what one expert's tiles do, for each expert.
    """
    cluster = cluster_of(machine)
    if step.kernel in UNTILED_EXPERTS and step.expert_rows:
        return _routed_call(routine, step, machine)
    if step.kernel in UNTILED_EXPERTS:
        return _expert_call(one_expert_shape(routine, step), experts_and_rows(routine, step)[0], cluster)
    if step.kernel not in PARTS:
        return None
    tiles = tiles_of(step.on_chip)
    if not tiles or any(schedule.memories != cluster.memories for schedule in tiles.values()):
        tiles = step_tiles(routine, step, cluster)
    return _call(tuple(tiles.values()), cluster) if tiles else None


def _routed_call(routine: Routine, step: Step, machine: Machine) -> TiledCall | None:
    """Return the cost of products of experts whose rows are told: each takes the tiles of its own rows."""
    seconds, nbytes, transfers = 0.0, 0, Counter[tuple[str, str]]()
    for experts, rows in expert_groups(step):
        if not rows:
            unread = experts * unread_stack_bytes(routine, step)
            seconds, nbytes = seconds + copy_seconds(unread, machine), nbytes + round(unread)
            continue
        call = _expert_call(one_expert_shape(routine, step, rows), experts, cluster_of(machine))
        if call is None:
            return None
        seconds, nbytes = seconds + call.seconds, nbytes + call.ddr_bytes
        transfers.update(call.transfers)
    return TiledCall(seconds, nbytes, dict(transfers))


@cache
def _expert_call(shape: GemmShape, experts: int, cluster: Cluster) -> TiledCall | None:
    """Return the cost of the products of all experts, one after the other; None where no tile of them fits."""
    try:
        time = timed(gemm_tiles(shape, cluster), cluster)
    except ValueError:
        return None
    transfers = {pair: nbytes * experts for pair, nbytes in time.transfers.items()}
    return TiledCall(time.seconds * experts, time.ddr_bytes * experts, transfers)


@cache
def _call(schedules: tuple[TileSchedule, ...], cluster: Cluster) -> TiledCall:
    times = [timed(schedule, cluster) for schedule in schedules]
    transfers: dict[tuple[str, str], int] = {}
    for time in times:
        for pair, nbytes in time.transfers.items():
            transfers[pair] = transfers.get(pair, 0) + nbytes
    return TiledCall(sum(time.seconds for time in times), sum(time.ddr_bytes for time in times), transfers)
