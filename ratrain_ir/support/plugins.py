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
from urllib.parse import quote, unquote

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail

VARIABLE = "RATRAIN_PLUGINS"
"""Holds the plugins that are loaded, in order, separated as in PATH; what is special there is written as in a URL (%3A)."""
WAY_OUT = "one of your own is found where its module is given: ratrainc --plugin FILE.py ..."
"""Help for a name that nothing has."""
_HOME = f"{Path(__file__).parents[2]}{os.sep}"
"""The folder of this package, as tracebacks name its files."""
_FILES = "ratrain_plugin_"
"""What the names of modules that are files begin with, so that none has the name of a library."""


def load_plugin(name: str) -> None:
    """Import a plugin, by the name of its module or the path of its file; again it is no work.

    Raises `DiagnosticError` RT072 where there is none, or where it fails while it is imported.
    """
    named = str(Path(name).resolve()) if name.endswith(".py") else name
    if named not in plugins():
        _import(named)
        os.environ[VARIABLE] = os.pathsep.join(quote(each) for each in (*plugins(), named))


def load_plugins() -> None:
    """Import what the environment names, in a process that did not get its plugins by `load_plugin`."""
    for name in plugins():
        _import(name)


def plugins() -> tuple[str, ...]:
    """The plugins of this process, as modules and absolute paths of files."""
    return tuple(unquote(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name)


def is_own(thing: type) -> bool:
    """Whether a class is this project's and not a plugin's."""
    return thing.__module__.startswith("ratrain.")


def place_of(error: BaseException, name: str) -> str:
    """The line of a plugin that an error came from: the last one of its own that was on the way."""
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
    """Import a file as a module that no other import finds."""
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
