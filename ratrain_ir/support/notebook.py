"""Display of objects in a notebook. The drawing code is in a higher layer, so it registers itself here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DRAWN_BY: dict[str, Callable[[Any], str]] = {}
"""Functions that make HTML of an object, by the name of its class; `ratrain.api` fills it."""


class ShownInNotebook:
    """Base of objects that a notebook shows as HTML if `ratrain.api` was imported, else by their `repr`."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        draw = DRAWN_BY.get(type(self).__name__)
        return None if draw is None else draw(self)
