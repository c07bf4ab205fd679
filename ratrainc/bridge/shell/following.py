"""Search of a script for the training commands that it may start, each with the path to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.text import MAX_BYTES, Source
from ratrain.ratrainc.bridge.shell.assigning import Assigning
from ratrain.ratrainc.bridge.shell.path_state import Launch, PathState
from ratrain.ratrainc.bridge.shell.scheduler import of_slurm
from ratrain.ratrainc.bridge.shell.shell_text import Script, Text, Unknown, literal, nothing_known
from ratrain.ratrainc.bridge.shell.statements import Runner

_OF_ARGUMENTS = re.compile(r"--?\w")


@frozen
class Followed:
    """The result of following a script."""

    launches: tuple[Launch, ...]
    """commands on the paths that need the fewest variables of the environment"""
    states: tuple[PathState, ...]
    unused: tuple[tuple[str, Text | None], ...]
    """variables of the command line that the script does not read, or sets itself (then with its value)"""


def follow(file: str, text: str, given: Mapping[str, str]) -> Followed:
    """Follow a script on all paths, without running any of it; return the commands that it may start.

    `given` has variables of the environment, and the script's arguments by their numbers (`1`, `2`, ...). Raises
    `DiagnosticError` RT063 if the text is no shell script, and RT064 if it has too many paths or steps.
    """
    text = text.replace("\r\n", "\n")
    script = Script(text, Source(file, text).span, str(Path(file).parent) if Path(file).is_file() else None, file)
    texts = {name: literal(value) for name, value in given.items()}
    assigning = Assigning(texts)
    runner = Runner(assigning, _script_of)
    try:
        states = _kept(runner.script(script, _start(script, texts)))
    except RecursionError:
        place = script.place(0, 1)
        fail("RT063", "the file is nested too deeply for a script", place.location, source=place.source)
    launches = [launch for state in states for launch in _one_of_lines(state)]
    if not launches:
        launches = [launch for state in states for launch in _arguments_of(state)]
    used = assigning.used | ({*filter(str.isdigit, texts)} if "@" in assigning.used else set())
    unused = [
        (name, assigning.overridden.get(name)) for name in texts if name not in used or name in assigning.overridden
    ]
    return Followed(tuple(launches), tuple(states), tuple(unused))


def _start(script: Script, given: Mapping[str, Text]) -> PathState:
    set_by, environment = of_slurm(script)
    last = max((int(name) for name in given if re.fullmatch(r"[1-9]\d{0,2}", name)), default=0)
    numbered = [given.get(str(n)) or _argument(n, script) for n in range(1, last + 1)]
    named = {name: value for name, value in given.items() if not name.isdigit()}
    variables = {**set_by, **named}
    state = PathState(variables=dict(variables), exported={*variables}, arguments=numbered or None)
    state.environment = environment - {*named}
    return state


def _argument(number: int, script: Script) -> Text:
    """Return an unknown text in place of the script's argument `number`, which the caller of the script did not give.

    It is needed where a later argument is given.
    """
    name = str(number)
    return nothing_known(f"${name}", Unknown(name, f"${name} is an argument of the script", script.place(0, 1)))


def _kept(states: list[PathState]) -> list[PathState]:
    """Return the states that start a command and need the fewest variables of the environment.

    If no state starts a command, all of them count.
    """
    started = [state for state in states if state.launches] or states
    least = min((len(state.contrary) for state in started), default=0)
    return [state for state in started if len(state.contrary) == least]


def _one_of_lines(state: PathState) -> list[Launch]:
    """Return the commands that a state starts; lines of arguments alone become one command.

    A file of arguments has only such lines. In a script that also starts a program they are ignored.
    """
    programs = [each for each in state.launches if not each.words[0].shown.startswith("--")]
    if programs or not state.launches:
        return programs
    first = state.launches[0]
    return [evolve(first, words=tuple(word for each in state.launches for word in each.words), state=state)]


def _arguments_of(state: PathState) -> list[Launch]:
    """Return, as one command, arguments that a file defines in variables and other scripts read."""
    words: list[Text] = []
    for value in state.variables.values():
        items = value if isinstance(value, list) else _words(value) if isinstance(value, Text) else []
        if items and _OF_ARGUMENTS.match(items[0].shown):
            words += [each.replaced(state.known) for each in items]
    return [Launch(tuple(words), state)] if words else []


def _words(text: Text) -> list[Text]:
    return [text.part(*match.span()) for match in re.finditer(r"\S+", text.shown)] if text.plain is not None else []


def _script_of(path: str, script: Script) -> Script | None:
    """Find a script that another one names: at its path, or next to it if the path begins with an unknown part.

    Return None if there is no such file.
    """
    if script.folder is None:
        return None
    # If the path begins with a variable (`$DIR/x.sh`), the rest of it is looked for.
    relative = path.rpartition("}")[2].rpartition(")")[2].lstrip("/") if path.startswith("$") else path
    # A path that repeats the script's own folder is relative to the working directory.
    inside = script.folder not in ("", ".") and relative.startswith(f"{script.folder}/")
    found = Path(relative) if inside else Path(script.folder, relative)
    try:
        if not relative or not found.is_file() or found.stat().st_size > MAX_BYTES:
            return None
        text = found.read_text("utf-8")  # line ends become those of the shell
    except (OSError, ValueError):
        return None
    return Script(text, Source(str(found), text).span, str(found.parent), str(found))
