"""Plugins: modules of users that add passes and targets, loaded by `ratrainc --plugin MODULE|FILE.py ...`.

Child processes find them through the environment variable `RATRAIN_PLUGINS`.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from urllib.parse import quote, unquote

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail

VARIABLE = "RATRAIN_PLUGINS"
"""Environment variable with the loaded plugins, in order, separated as in PATH.

Special characters are written as in a URL (%3A).
"""
WAY_OUT = "one of your own is found where its module is given: ratrainc --plugin FILE.py ..."
"""Help for a name that nothing has registered."""
_HOME = f"{Path(__file__).parents[2]}{os.sep}"
"""Folder of this package, as the prefix of its files in tracebacks."""
_FILES = "ratrain_plugin_"
"""Prefix of the module names of plugins that are files, so that none has the name of a library."""


def load_plugin(name: str) -> None:
    """Import a plugin by the name of its module or the path of its file; do nothing if it is loaded already.

    Raises `DiagnosticError` RT072 if there is none, or if importing it fails.
    """
    named = str(Path(name).resolve()) if name.endswith(".py") else name
    if named not in plugins():
        _import(named)
        os.environ[VARIABLE] = os.pathsep.join(quote(each) for each in (*plugins(), named))


def load_plugins() -> None:
    """Import the plugins that the environment names, in a process that did not call `load_plugin`."""
    for name in plugins():
        _import(name)


def plugins() -> tuple[str, ...]:
    """Return the plugins of this process: names of modules and absolute paths of files, in order."""
    return tuple(unquote(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name)


def is_own(thing: type) -> bool:
    """Tell whether a class belongs to this project rather than to a plugin."""
    return thing.__module__.startswith("ratrain.")


def line_of(function: object) -> str:
    """Return the place where a plugin's function begins, as ` (file:line)`; empty if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def place_of(error: BaseException, name: str) -> str:
    """Return the place in a plugin that an error came from, as ` (file:line)`; empty if there is none.

    It is the last frame of the traceback in the plugin `name`, else the last one outside this package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    own = [frame for frame in frames if frame.filename == name] or [
        frame for frame in frames if not frame.filename.startswith((_HOME, "<frozen"))
    ]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _import(name: str) -> None:
    is_file = name.endswith(".py")
    if is_file and not Path(name).exists():
        fail("RT072", f"there is no plugin '{name}'")
    try:
        if is_file:
            _import_file(Path(name))
        else:
            import_module(name)
    except DiagnosticError:
        raise
    except ModuleNotFoundError as error:
        fail("RT072", f"the plugin '{name}' cannot be loaded: {error}{place_of(error, name)}", help=_way_out(name))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a plugin raises is told, in words
        text = f"the plugin '{name}' cannot be loaded: {type(error).__name__}: {error}{place_of(error, name)}"
        fail("RT072", text)


def _way_out(name: str) -> str | None:
    if Path(f"{name}.py").is_file():
        return f"a file is given with its ending: --plugin {name}.py"
    return None if name.endswith(".py") else "modules are looked for on the import path (PYTHONPATH); files end in .py"


def _import_file(path: Path) -> None:
    """Import a file as a module under a name of its own, which no ordinary import finds."""
    module_name = f"{_FILES}{path.stem}"
    known = sys.modules.get(module_name)
    if known is not None and known.__file__ == str(path):
        return
    if known is not None:
        raise ImportError(f"'{known.__file__}' is a plugin of the same name: give one of them another")
    spec = spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
