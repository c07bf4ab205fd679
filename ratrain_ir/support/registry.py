"""Registry of things that are found by name and imported on demand: passes, targets.

Others add theirs in three ways: another distribution names them in an entry point group, a module given to `--plugin`
registers them, or a script calls `register`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.plugins import load_plugins


class Registry:
    """Places (`module:attribute`) by name.

    `what` describes a named thing in messages; `group` is the entry point group in which other distributions add
    theirs.
    """

    def __init__(self, what: str, group: str, own: Mapping[str, str]) -> None:
        self.what = what
        self.group = group
        self._own = dict(own)

    def register(self, name: str, what: str | type) -> None:
        """Add a name for a place or a class.

        Raises `DiagnosticError` RT072 if the name already has another place, or `what` is neither.
        """
        place = f"{what.__module__}:{what.__qualname__}" if isinstance(what, type) else what
        if not isinstance(place, str) or ":" not in place:
            text = f"the {self.what} '{name}' is registered as {place!r}: a class or 'module:attribute' is expected"
            fail("RT072", text)
        if self._own.get(name, place) != place:
            fail("RT072", f"the {self.what} '{name}' of {place} has the name of {self._own[name]}", help="rename it")
        self._own[name] = place

    def names(self) -> list[str]:
        """Return all names, the project's own first."""
        others = self._of_others
        return list({**self._own, **others})

    def places(self) -> dict[str, str]:
        """Return the place of each name."""
        return {name: str(self.place(name)) for name in self.names()}

    def place(self, name: str) -> str | None:
        """Return the place of a name, None if it is unknown.

        Entry points are read only if the name is not the project's own.
        """
        if name not in self._own:
            others = self._of_others
            return self._own.get(name, others.get(name))
        return self._own[name]

    def load(self, name: str) -> Any:
        """Import and return the thing with a name.

        Raises KeyError for an unknown name, `DiagnosticError` RT072 if a place outside this project cannot be imported.
        """
        place = self.place(name)
        if place is None:
            raise KeyError(name)
        module, _, attribute = place.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            if module.startswith("ratrain."):
                raise
            fail("RT072", f"{self.what} '{name}' cannot be loaded from '{place}': {error}")

    @cached_property
    def _of_others(self) -> dict[str, str]:
        """Places by name that the entry points of installed distributions declare, read once.

        Reading it also loads the plugins that the environment names, which register theirs.
        """
        load_plugins()
        return {each.name: each.value for each in entry_points(group=self.group)}
