"""Modules of others that add passes and targets: `ratrainc --plugin MODULE|FILE.py ...`.

Processes that this one starts find them by the environment variable `RATRAIN_PLUGINS`.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from ratrain.ratrain_ir.diagnostics import fail

VARIABLE = "RATRAIN_PLUGINS"
"""Holds the plugins that are loaded, in order, separated as in PATH."""


def load_plugin(name: str) -> None:
    """Import a plugin, by the name of its module or the path of its file; again it is no work.

    Raises `DiagnosticError` RT004 where there is none, or where it fails while it is imported.
    """
    is_file = name.endswith(".py")
    named = str(Path(name).resolve()) if is_file else name
    if named not in plugins():
        _import(named, is_file=is_file)
        os.environ[VARIABLE] = os.pathsep.join((*plugins(), named))


def load_plugins() -> None:
    """Import what the environment names, in a process that did not get its plugins by `load_plugin`."""
    for name in plugins():
        _import(name, is_file=name.endswith(".py"))


def plugins() -> tuple[str, ...]:
    """The plugins of this process, as modules and absolute paths of files."""
    return tuple(name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name)


def _import(name: str, *, is_file: bool) -> None:
    try:
        if is_file:
            _import_file(Path(name))
        else:
            import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is told, in words
        at = traceback.extract_tb(error.__traceback__)[-1]
        fail(
            "RT004",
            f"the plugin '{name}' cannot be loaded: {type(error).__name__}: {error} ({at.filename}:{at.lineno})",
        )


def _import_file(path: Path) -> None:
    """Import a file as a module by the name of the file, as if its folder were on the import path."""
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return
    if known is not None:
        raise ImportError(f"a module '{path.stem}' is imported already: give the file another name")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
