"""The table of passes: name to class, imported when asked for, so that help costs nothing."""

from __future__ import annotations

from importlib import import_module

from ratrain.passes.pass_base import Fact, Pass
from ratrain.ratrain_ir.diagnostics import fail, nearest

PASSES: dict[str, str] = {
    "place-1f1b": "ratrain.passes.placement.place_1f1b:Place1F1BPass",
    "place-gpipe": "ratrain.passes.placement.place_gpipe:PlaceGpipePass",
    "place-zb-h1": "ratrain.passes.placement.place_zb_h1:PlaceZbH1Pass",
    "lifetime": "ratrain.passes.memory.lifetime:LifetimePass",
    "recompute": "ratrain.passes.recovery.recompute:RecomputePass",
    "bucket-grad-sync": "ratrain.passes.state.bucket_grad_sync:BucketGradSyncPass",
    "schedule-update": "ratrain.passes.state.schedule_update:ScheduleUpdatePass",
    "insert-prefetch": "ratrain.passes.state.insert_prefetch:InsertPrefetchPass",
    "joint-order": "ratrain.passes.state.joint_order:JointOrderPass",
    "insert-release": "ratrain.passes.memory.insert_release:InsertReleasePass",
    "legalise": "ratrain.passes.memory.legalise:LegalisePass",
    "allocate-ddr": "ratrain.passes.memory.allocate_ddr:AllocateDdrPass",
}

PROVIDERS: dict[Fact, str] = {
    Fact.PLACED: "place-1f1b",
    Fact.RELEASED: "insert-release",
    Fact.LEGALISED: "legalise",
    Fact.ALLOCATED: "allocate-ddr",
}
"""The pass that makes a fact true."""


def pass_class(name: str) -> type[Pass]:
    """The class of a pass.

    Raises `DiagnosticError` RT004 for an unknown name.
    """
    if name not in PASSES:
        fail("RT004", f"'{name}' is not a pass; the passes are {', '.join(PASSES)}", help=nearest(name, PASSES))
    module, _, cls = PASSES[name].partition(":")
    found: type[Pass] = getattr(import_module(module), cls)
    return found
