"""What Python finds by the everyday names of our packages (`passes`, `targets`, ...) is ours, and not a file of the user's."""

from __future__ import annotations

import sys
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

NAMES = ("grammar", "ratrain_ir", "passes", "targets")
_HOME = Path(__file__).resolve().parent.parent


class ShadowedError(ImportError):
    """A file of somebody else's stands where Python looks for a package of ours."""


def check_own_packages() -> None:
    """Raise `ShadowedError` where something else is found, or was imported, by the name of one of our packages."""
    for name in NAMES:
        found = _place_of(name)
        if found is not None and _home_of(found) != _HOME:
            raise ShadowedError(
                f"{found!r} stands in the way of ratrain's own package '{name}', which Python looks for by the same name: "
                "rename it, start elsewhere, or take its folder off PYTHONPATH and sys.path"
            )


def put_own_packages_first() -> None:
    """Let this process, which is all ours, find our packages before others of their names.

    Raises `ShadowedError` where one of those is imported already.
    """
    try:
        check_own_packages()
    except ShadowedError:
        sys.path.insert(0, str(_HOME))
        invalidate_caches()
        check_own_packages()


def _place_of(name: str) -> str | None:
    """The file that is, or would be, imported by a name; None where there is none."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None)
    spec = find_spec(name)
    return spec.origin if spec is not None else None


def _home_of(place: str) -> Path:
    """The folder on the import path that a package's `__init__.py`, or a module, was found in."""
    path = Path(place).resolve()
    return path.parent.parent if path.name == "__init__.py" else path.parent
