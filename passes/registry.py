"""The table of passes by name. A class is imported only when it is asked for, so help texts cost no imports."""

from __future__ import annotations

import re
from typing import cast

import attrs

from ratrain.passes.pass_base import OPTION_UNITS, Fact, Pass
from ratrain.ratrain_ir.support.diagnostics import fail, nearest
from ratrain.ratrain_ir.support.plugins import WAY_OUT
from ratrain.ratrain_ir.support.registry import Registry

PASSES = Registry(
    "pass",
    "ratrain.passes",
    {
        "place-1f1b": "ratrain.passes.placement.place_1f1b:Place1F1BPass",
        "place-gpipe": "ratrain.passes.placement.place_gpipe:PlaceGpipePass",
        "place-zb-h1": "ratrain.passes.placement.place_zb_h1:PlaceZbH1Pass",
        "place-schedule": "ratrain.passes.placement.place_schedule:PlaceSchedulePass",
        "place-from-file": "ratrain.passes.placement.place_from_file:PlaceFromFilePass",
        "overlap-tensor": "ratrain.passes.placement.overlap_tensor:OverlapTensorPass",
        "lifetime": "ratrain.passes.memory.lifetime:LifetimePass",
        "recompute": "ratrain.passes.recovery.recompute:RecomputePass",
        "bucket-grad-sync": "ratrain.passes.state.bucket_grad_sync:BucketGradSyncPass",
        "schedule-update": "ratrain.passes.state.schedule_update:ScheduleUpdatePass",
        "insert-prefetch": "ratrain.passes.state.insert_prefetch:InsertPrefetchPass",
        "joint-order": "ratrain.passes.state.joint_order:JointOrderPass",
        "offload-state": "ratrain.passes.state.offload_state:OffloadStatePass",
        "insert-release": "ratrain.passes.memory.insert_release:InsertReleasePass",
        "legalise": "ratrain.passes.memory.legalise:LegalisePass",
        "allocate-ddr": "ratrain.passes.memory.allocate_ddr:AllocateDdrPass",
    },
)
"""Every pass. Passes of other distributions come from their entry point group `ratrain.passes`."""

PROVIDERS: dict[Fact, str] = {
    Fact.PLACED: "place-1f1b",
    Fact.RELEASED: "insert-release",
    Fact.LEGALISED: "legalise",
    Fact.ALLOCATED: "allocate-ddr",
}
"""Name of the pass that makes each fact true."""


def register_pass(cls: type[Pass]) -> type[Pass]:
    """Register a pass class under its name. A class decorator for modules that are given to `--plugin`.

    Raises `DiagnosticError` RT072 if the class is no pass, or another pass has the name.
    """
    _check_pass(cls, f"{getattr(cls, '__module__', '?')}:{getattr(cls, '__qualname__', repr(cls))}")
    PASSES.register(cls.name, cls)
    return cls


def pass_class(name: str) -> type[Pass]:
    """Return the class of the pass with a name.

    Raises `DiagnosticError` RT004 for an unknown name, RT072 if a plugin registered something that is no pass.
    """
    try:
        cls = PASSES.load(name)
    except KeyError:
        known = PASSES.names()
        way_out = nearest(name, known) or WAY_OUT
        fail("RT004", f"'{name}' is not a pass; the passes are {', '.join(known)}", help=way_out)
    place = str(PASSES.place(name))
    _check_pass(cls, place)
    if cls.name != name:
        fail("RT072", f"'{place}' is registered as '{name}' and calls itself '{cls.name}'")
    return cast("type[Pass]", cls)


def _check_pass(cls: object, place: str) -> None:
    """Raise `DiagnosticError` RT072 unless the class is a complete pass.

    Checked: it is a subclass of `Pass`, has a valid name, is an attrs class, and each option has choices or a unit.
    """
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        fail("RT072", f"'{place}' is no pass: it is no class on top of `Pass` (ratrain.passes.pass_base)")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        fail("RT072", f"the pass '{place}' has the name {name!r}", help="names are of small letters, digits and '-'")
    if "__attrs_attrs__" not in vars(cls):
        fail("RT072", f"the pass '{name}' of {place} declares its options to nobody", help="decorate it: @attrs.frozen")
    for option in attrs.fields(cls):
        if "choices" not in option.metadata and option.metadata.get("unit") not in OPTION_UNITS:
            text = f"the option '{option.name}' of the pass '{name}' declares neither choices nor a unit"
            units = ", ".join(OPTION_UNITS)
            fail(
                "RT072", text, help=f'metadata={{"choices": ("one", "other")}}, or {{"unit": ...}} with one of {units}'
            )
