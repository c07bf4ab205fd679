"""How objects show themselves in a notebook. What draws them is further up than they are, so it registers itself here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DRAWN_BY: dict[str, Callable[[Any], str]] = {}
"""What makes HTML of objects, by the name of their class, so that none is imported for it; `ratrain.api` fills it."""


class ShownInNotebook:
    """What a notebook shows as HTML where `ratrain.api` was imported, and as its `repr` elsewhere."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        draw = DRAWN_BY.get(type(self).__name__)
        return None if draw is None else draw(self)
