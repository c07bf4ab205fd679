"""The table of passes: name to class, imported when asked for, so that help costs nothing."""

from __future__ import annotations

from ratrain.passes.pass_base import Fact, Pass
from ratrain.ratrain_ir.diagnostics import fail, nearest
from ratrain.ratrain_ir.registry import Registry

PASSES = Registry(
    "pass",
    "ratrain.passes",
    {
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
    },
)
"""Every pass there is. A pass of another distribution stands in its entry point group `ratrain.passes`."""

PROVIDERS: dict[Fact, str] = {
    Fact.PLACED: "place-1f1b",
    Fact.RELEASED: "insert-release",
    Fact.LEGALISED: "legalise",
    Fact.ALLOCATED: "allocate-ddr",
}
"""The pass that makes a fact true."""


def register_pass(cls: type[Pass]) -> type[Pass]:
    """Let a pass of one's own be found by its name; a class decorator for modules that are given to `--plugin`.

    Raises `DiagnosticError` RT004 where another pass has the name.
    """
    PASSES.register(cls.name, f"{cls.__module__}:{cls.__qualname__}")
    return cls


def pass_class(name: str) -> type[Pass]:
    """The class of a pass.

    Raises `DiagnosticError` RT004 for an unknown name, and for one that stands for something else than a pass.
    """
    try:
        loaded = PASSES.load(name)
    except KeyError:
        known = PASSES.names()
        fail("RT004", f"'{name}' is not a pass; the passes are {', '.join(known)}", help=nearest(name, known))
    if not (isinstance(loaded, type) and issubclass(loaded, Pass)):
        fail(
            "RT004",
            f"'{PASSES.place(name)}' is not a pass: it is not a class derived from `Pass` (ratrain.passes.pass_base)",
        )
    if loaded.name != name:
        fail("RT004", f"'{PASSES.place(name)}' is registered as '{name}' and calls itself '{loaded.name}'")
    return loaded
