"""Completion of words in shells: presets, machines, strategies, passes, files. Modules are imported when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    import click

Completer = Callable[["click.Context", "click.Parameter", str], list[CompletionItem]]


def _presets() -> Iterable[str]:
    from ratrain.ratrain_ir.config.model_files import preset_names

    return preset_names()


def _machines() -> Iterable[str]:
    from ratrain.targets.machine.machine import machine_names

    return machine_names()


def _strategies() -> Iterable[str]:
    from ratrain.ratrainc.choices.strategies import STRATEGIES

    return [strategy.name for strategy in STRATEGIES]


def _passes() -> Iterable[str]:
    from ratrain.passes.registry import PASSES

    return PASSES.names()


def _one_of(names: Callable[[], Iterable[str]]) -> Completer:
    return lambda _context, _parameter, begun: words(names(), begun)


def _list_of(names: Callable[[], Iterable[str]]) -> Completer:
    """Make a completer for the last word of a comma-separated list; options of a pass are not completed."""

    def complete(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        if begun.count("{") > begun.count("}"):
            return []
        before, comma, last = begun.rpartition(",")
        return [CompletionItem(before + comma + name) for name in names() if name.startswith(last)]

    return complete


strategy: Completer = _one_of(_strategies)
strategies: Completer = _list_of(_strategies)
passes: Completer = _list_of(_passes)
pass_name: Completer = _one_of(_passes)
_NAMED = {"model": _presets, "machine": _machines}
"""Kinds of files that may be given by a name."""


def words(known: Iterable[str], begun: str) -> list[CompletionItem]:
    """Return the words that begin with `begun`."""
    return [CompletionItem(word) for word in known if word.startswith(begun)]


def file_or_name(kind: str, begun: str) -> list[CompletionItem]:
    """Complete a file, which the shell does, or one of the names that stand for files of a kind."""
    names = _NAMED.get(kind, tuple)()
    return [CompletionItem(begun, type="file"), *words(names, begun)]
