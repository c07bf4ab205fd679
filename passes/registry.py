"""The table of passes: name to class, imported when asked for, so that help costs nothing."""

from __future__ import annotations

from importlib import import_module

from passes.pass_base import Fact, Pass
from ratrain_ir.diagnostics import fail, nearest

PASSES: dict[str, str] = {
    "place-1f1b": "passes.place_1f1b:Place1F1BPass",
    "place-gpipe": "passes.place_gpipe:PlaceGpipePass",
    "place-zb-h1": "passes.place_zb_h1:PlaceZbH1Pass",
    "lifetime": "passes.lifetime:LifetimePass",
    "recompute": "passes.recompute:RecomputePass",
    "bucket-grad-sync": "passes.bucket_grad_sync:BucketGradSyncPass",
    "schedule-update": "passes.schedule_update:ScheduleUpdatePass",
    "insert-prefetch": "passes.insert_prefetch:InsertPrefetchPass",
    "joint-order": "passes.joint_order:JointOrderPass",
    "insert-release": "passes.insert_release:InsertReleasePass",
    "legalise": "passes.legalise:LegalisePass",
    "allocate-ddr": "passes.allocate_ddr:AllocateDdrPass",
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
