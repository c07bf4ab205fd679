"""Things that are found by name and imported when asked for: passes, targets. Those of others come in three ways.

Another distribution names them in an entry point group; a module given to `--plugin` registers them; a script calls `register`.
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
    """Names to places, `module:attribute`.

    `what` says in a diagnostic what the names are of; `group` is the entry point group of other distributions.
    """

    def __init__(self, what: str, group: str, own: Mapping[str, str]) -> None:
        self.what = what
        self.group = group
        self._own = dict(own)

    def register(self, name: str, what: str | type) -> None:
        """Add a name for a place, or for a class. Raises `DiagnosticError` RT072 where another has it, or it stands for nothing."""
        place = f"{what.__module__}:{what.__qualname__}" if isinstance(what, type) else what
        if not isinstance(place, str) or ":" not in place:
            text = f"the {self.what} '{name}' is registered as {place!r}: a class or 'module:attribute' is expected"
            fail("RT072", text)
        if self._own.get(name, place) != place:
            fail("RT072", f"the {self.what} '{name}' of {place} has the name of {self._own[name]}", help="rename it")
        self._own[name] = place

    def names(self) -> list[str]:
        """Every name, the project's own first."""
        others = self._of_others
        return list({**self._own, **others})

    def places(self) -> dict[str, str]:
        """Every name with its place."""
        return {name: str(self.place(name)) for name in self.names()}

    def place(self, name: str) -> str | None:
        """The place of a name; None where nothing has it. Other distributions are only asked for what is not our own."""
        if name not in self._own:
            others = self._of_others
            return self._own.get(name, others.get(name))
        return self._own[name]

    def load(self, name: str) -> Any:
        """What stands at the place of a name.

        Raises KeyError for an unknown name, `DiagnosticError` RT072 where another's place cannot be imported.
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
        """What installed distributions name, asked once; modules that the environment names register theirs now."""
        load_plugins()
        return {each.name: each.value for each in entry_points(group=self.group)}
