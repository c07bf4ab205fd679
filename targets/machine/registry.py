"""Targets by name, and the machine files they bring: a folder `machines` next to a target's module.

A target of another distribution is registered in its entry point group `ratrain.targets`; its class derives from
`MachineTarget`.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.registry import Registry

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

TARGETS = Registry(
    "target",
    "ratrain.targets",
    {
        "mt3000": "ratrain.targets.mt3000.mt3000_target:Mt3000Target",
        "pytorch": "ratrain.targets.pytorch.pytorch_target:PytorchTarget",
    },
)
DEFAULT_TARGET = "mt3000"
"""Target of machine files that name none."""


def machine_files() -> dict[str, Traversable]:
    """Return the machine files that targets bring, by the name of the machine."""
    return {
        entry.name.removesuffix(".toml"): entry
        for place in reversed(TARGETS.places().values())  # the first target of a name wins
        for entry in _machine_folder(place)
        if entry.name.endswith(".toml")
    }


def _machine_folder(place: str) -> list[Traversable]:
    """Return the files of a target's folder `machines`; none where its module is missing or in no package.

    Loading that target reports the error.
    """
    package = place.partition(":")[0].rpartition(".")[0]
    try:
        folder = resources.files(package) / "machines" if package else None
    except ImportError:
        return []
    return list(folder.iterdir()) if folder is not None and folder.is_dir() else []
