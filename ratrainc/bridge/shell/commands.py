"""Simple commands of a shell script: builtins, functions, scripts that it runs, and programs that it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from zlib import crc32

from attrs import evolve

from ratrain.ratrainc.bridge.shell.conditions import Conditions
from ratrain.ratrainc.bridge.shell.path_state import CommandOutcome, Launch, PathState, Value
from ratrain.ratrainc.bridge.shell.printing import Printing
from ratrain.ratrainc.bridge.shell.scheduler import of_slurm
from ratrain.ratrainc.bridge.shell.shell_text import Script, Text, TextRun, Unknown, joined, literal

SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
_SUBMITS = {"sbatch", "qsub", "bsub", "salloc"}
_STARTS = {"torchrun", "deepspeed", "srun", "mpirun", "mpiexec", "accelerate", *SHELLS}
_WRAPPERS = {
    "srun",
    "mpirun",
    "mpiexec",
    "prun",
    "jsrun",
    "aprun",
    "nohup",
    "time",
    "timeout",
    "singularity",
    "apptainer",
    "docker",
    "podman",
    "enroot",
    "numactl",
    "nsys",
    "env",
    "sudo",
    "ssh",
    "stdbuf",
    "script",
    "xargs",
    "parallel",
    "pdsh",
    "taskset",
    "setsid",
}
_SILENT = {
    "mkdir",
    "rm",
    "cp",
    "mv",
    "touch",
    "ln",
    "chmod",
    "sleep",
    "trap",
    "pushd",
    "popd",
    "module",
    "ulimit",
    "wait",
}


def name_of(word: Text) -> str:
    """Return the name of a program without its folder; empty if it is unknown."""
    return word.shown.rpartition("/")[2] if word.plain is not None or "/" in word.shown else ""


def is_program(word: Text) -> bool:
    """Tell whether a word names a Python program, or a program that starts one."""
    name = name_of(word)
    return name in _STARTS or name.endswith(".py") or re.fullmatch(r"python[\d.]*", name) is not None


class Commands(Printing):
    """Execution of simple commands, as far as they affect later commands of the script."""

    def run(
        self,
        words: list[Text],
        state: PathState,
        stdin: Text | None,
        prefix: list[tuple[str, Value]],
        outer: tuple[Text, ...] = (),
    ) -> list[PathState]:
        """Run one command; return the states after it.

        `stdin` is its input, if known. `prefix` has variables that are set for this command alone (`A=1 command`), and
        `outer` the words of the launchers around it.
        """
        if not words:
            for name, value in prefix:
                self.runner.assigning.put(name, value, state)
            return [state]
        name = words[0].plain or ""
        rest = words[1:]
        if name in state.functions:
            return self._function(name, rest, state)
        # Builtins, and programs whose output is known, are the methods `_do_NAME`. A variable that was set for one
        # command has its earlier value again after it.
        builtin = getattr(self, f"_do_{name}", None) if name.isidentifier() else None
        if builtin is not None:
            before = {variable: state.variables.get(variable) for variable, _ in prefix}
            state.variables |= dict(prefix)
            states: list[PathState] = builtin(rest, state, stdin)
            for each in states:
                restore(each, before)
            return states
        if name in (":", "true", "false"):
            state.status = CommandOutcome(value=name != "false")
            return [state]
        if name == "[":
            return self._do_test(rest[:-1], state, stdin)
        if name in (".", "source"):
            return self._source(rest, state)
        if name in ("exit", "return", "break", "continue"):
            state.ended = name
            return [state]
        if name in ("exec", "command", "builtin") and rest and not rest[0].shown.startswith("-"):
            # `exec COMMAND` does not return: the script ends with the command.
            states = self.run(rest, state, stdin, prefix)
            for each in states if name == "exec" else ():
                each.ended = "exit"
            return states
        return self._external(words, state, stdin, prefix, outer)

    # builtins

    def _do_test(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        answer = Conditions(self.runner.expander(self.script, state)).words(words)
        shown = " ".join(each.shown for each in words)
        return self._status(state, evolve(answer, shown=f"[ {shown} ]", place=self.place))

    def _do_let(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        value: object = None
        for word in words:
            value = self.runner.expander(self.script, state).whole(word)
        known = value != 0 if isinstance(value, int) else None
        return self._status(state, CommandOutcome(known, "let", self.place, ("let", tuple(words))))

    def _do_set(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        # Of all options only these affect the commands that are started: -u (a variable that is not set ends the
        # script), -a (exports variables; here those that exist so far), and new arguments.
        options = iter(words)
        for word in options:
            text = word.shown
            if text in ("--", "-") or text[:1] not in "-+" or not text:
                state.arguments = [*([] if text in ("--", "-") else [word]), *options]
            elif text[1:] == "o" or text.endswith("o"):
                option = next(options, Text()).shown
                if option == "nounset" or "u" in text[1:]:
                    state.strict = text[0] == "-"
            elif "u" in text[1:]:
                state.strict = text[0] == "-"
            if "a" in text[1:] and text[:1] == "-" and text != "--":
                state.exported |= {*state.variables}
        return self._status(state, CommandOutcome(value=True))

    def _do_shift(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        count = int(words[0].shown) if words and words[0].shown.isdecimal() and len(words[0].shown) < 5 else 1
        if state.arguments is not None:
            enough = len(state.arguments) >= count
            state.arguments = state.arguments[count:] if enough else state.arguments
            return self._status(state, CommandOutcome(enough))
        return self._status(state, CommandOutcome(value=True))

    def _do_eval(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        script, variables = as_script(joined(words, literal(" ")), self.script)
        state.variables |= variables
        return self.runner.script(script, state)

    def _do_read(self, words: list[Text], state: PathState, stdin: Text | None) -> list[PathState]:
        names = [each.shown for each in words if each.shown.isidentifier()]
        array = any(each.shown.startswith("-") and each.shown.endswith("a") for each in words)
        known = stdin is not None and stdin.plain is not None
        if known and stdin is not None:
            spaces = state.variables.get("IFS")
            cut = spaces.shown if isinstance(spaces, Text) else " \t\n"
            texts = [stdin.part(*match.span()) for match in re.finditer(f"[^{re.escape(cut)}\n]+", stdin.shown)]
            if array and names:
                state.variables[names[0]] = list(texts)
                return self._status(state, CommandOutcome(value=True))
            for number, name in enumerate(names):
                last = number + 1 == len(names)
                state.variables[name] = (
                    joined(texts[number:], literal(" ")) if last else (texts[number : number + 1] or [Text()])[0]
                )
            return self._status(state, CommandOutcome(value=True))
        for name in names:
            self.runner.assigning.put(name, self._unknown("read", name), state)
        return self._status(state, self._command_status(words, "read"))

    def _do_mapfile(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        for word in words[-1:]:
            if word.shown.isidentifier():
                self.runner.assigning.fill(word.shown, self._unknown("mapfile", ""), state)
        return self._status(state, CommandOutcome(value=True))

    _do_readarray = _do_mapfile

    def _do_getopts(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        if len(words) < 2:
            return self._status(state, CommandOutcome(value=False))
        letters, name = words[0].shown, words[1].shown
        self.runner.assigning.used.add("@")
        # OPTIND counts arguments from 1. Letters in one word (`-ab`) are not separated: only the first is seen.
        at = state.variables.get("OPTIND")
        number = int(at.shown) if isinstance(at, Text) and at.shown.isdecimal() else 1
        if state.arguments is None:
            unset = Unknown("1", "the file does not say with which arguments it is started", self.place, unset=True)
            return self._status(state, CommandOutcome(value=False, key=("getopts",), because=unset, assumed=True))
        word = state.arguments[number - 1] if number <= len(state.arguments) else Text()
        letter = word.shown[1:2]
        if word.shown[:1] != "-" or not letter or word.shown == "--":
            return self._status(state, CommandOutcome(value=False))
        takes = f"{letter}:" in letters
        state.variables[name] = literal(letter if letter in letters else "?", word)
        if takes:
            attached = len(word.shown) > 2
            value = word.part(2, len(word.shown)) if attached else (state.arguments[number : number + 1] or [Text()])[0]
            state.variables["OPTARG"] = value
            number += not attached
        state.variables["OPTIND"] = literal(str(number + 1))
        return self._status(state, CommandOutcome(value=True))

    # functions and scripts

    def _function(self, name: str, words: list[Text], state: PathState) -> list[PathState]:
        body, script = state.functions[name]
        before = state.arguments
        state.arguments = words
        # The frame collects values that local variables hide. They come back when the function returns.
        state.frames.append({})
        self.runner.depth += 1
        try:
            if self.runner.depth > 40:
                return self.runner.script(self.script, state)  # refuses
            after = self.runner.run([body], script, [state])
        finally:
            self.runner.depth -= 1
        for each in after:
            each.arguments = None if before is None else list(before)
            restore(each, each.frames.pop() if each.frames else {})
            each.ended = "" if each.ended == "return" else each.ended
        return after

    def _source(self, words: list[Text], state: PathState) -> list[PathState]:
        if not words:
            return [state]
        script = self._script_at(words[0], state)
        if script is None:
            # A file that is not read may set any variable: from here on, a variable that is not set is unknown, not
            # empty.
            if words[0].shown not in state.unread:
                state.unread = (*state.unread, words[0].shown)
            return self._status(state, self._command_status(words, "source"))
        before = state.arguments
        if len(words) > 1:
            state.arguments = words[1:]
        after = self.runner.script(script, state)
        for each in after:
            each.ended = "" if each.ended == "return" else each.ended
            if len(words) > 1:
                each.arguments = before
        return after

    def _script_at(self, word: Text, state: PathState) -> Script | None:
        """Find the script at a path: a file that the script wrote, else one that can be read; None without either."""
        paths = (word.shown, word.shown.removeprefix("./"), f"./{word.shown}")
        written = next((state.files[path] for path in paths if path in state.files), None)
        if written is not None:
            script, variables = as_script(written, self.script)
            state.variables |= variables
            state.exported |= {*variables}
            return script
        return self.runner.read(word.shown, self.script)

    def _child(
        self, text: Text | Script, arguments: list[Text], state: PathState, prefix: list[tuple[str, Value]]
    ) -> list[PathState]:
        """Run a script in a child shell, which has exported variables and `prefix`; return the states after it."""
        script, variables = (text, dict[str, Value]()) if isinstance(text, Script) else as_script(text, self.script)

        def run(inner: PathState) -> list[PathState]:
            visible = {
                name: value
                for name, value in inner.variables.items()
                if name in inner.exported or name.startswith(_MARK)
            }
            inner.variables = {**visible, **dict(prefix), **variables}
            inner.exported = {*inner.variables}
            # Functions, local variables and `set -u` do not reach a child shell.
            inner.functions, inner.frames, inner.strict = {}, [], False
            inner.arguments = arguments
            return self.runner.script(script, inner)

        return self.runner.inside(state, run)

    # programs

    def _external(
        self,
        words: list[Text],
        state: PathState,
        stdin: Text | None,
        prefix: list[tuple[str, Value]],
        outer: tuple[Text, ...],
    ) -> list[PathState]:
        name = name_of(words[0])
        shown = " ".join(each.shown for each in words)
        status = CommandOutcome(None, shown[:60], self.place, ("command", shown))
        if name in SHELLS or name in _SUBMITS:
            kept, self.runner.outer = self.runner.outer, (*self.runner.outer, *outer)
            states = self._shell(name, words, state, stdin, prefix)
            self.runner.outer = kept
        elif name == "ssh" and stdin is not None:
            states = self._child(stdin, [], state, prefix)
        elif name == "ssh" and len(words) > 2 and not any(is_program(each) for each in words[1:]):
            states = self._child(joined(words[2:], literal(" ")), [], state, prefix)
        elif (name.endswith(".sh") or words[0].plain in state.files) and (
            script := self._script_at(words[0], state)
        ) is not None:
            states = self._child(script, words[1:], state, prefix)
        else:
            states = self._started(words, state, stdin, prefix, outer)
        for each in states:
            each.status = status
            # The output of a program is unknown, except if it has none.
            if each.output is not None and name not in _SILENT:
                each.output.append(self._unknown(shown[:60], ""))
        return states

    def _started(
        self,
        words: list[Text],
        state: PathState,
        stdin: Text | None,
        prefix: list[tuple[str, Value]],
        outer: tuple[Text, ...],
    ) -> list[PathState]:
        name = name_of(words[0])
        if (
            name.endswith(".py")
            or name in ("torchrun", "deepspeed", "accelerate")
            or re.fullmatch(r"python[\d.]*", name)
        ):
            self._launch(words, state, outer)
            return [state]
        # The command may be a wrapper (`srun --mpi=pmix python ...`): look for a program among its words, and run that.
        at = next((number for number, each in enumerate(words) if number and is_program(each)), None)
        if at is None and name in _WRAPPERS:
            at = next(
                (n for n, each in enumerate(words) if n and each.shown.endswith(".sh") and each.plain is not None), None
            )
        if at is None:
            if words[0].shown.startswith("--"):  # a file of arguments
                self._launch(words, state, outer)
            return [state]
        inner = (
            [
                (each.shown.partition("=")[0], each.part(len(each.shown.partition("=")[0]) + 1, len(each.shown)))
                for each in words[1:at]
                if re.match(r"[A-Za-z_]\w*=", each.shown)
            ]
            if name == "env"
            else []
        )
        return self._external(words[at:], state, stdin, [*prefix, *inner], (*outer, *words[:at]))

    def _launch(self, words: list[Text], state: PathState, outer: tuple[Text, ...]) -> None:
        """Note that a program is started, in the state so far."""
        launch = Launch(tuple(each.replaced(state.known) for each in words), state.copy(), (*self.runner.outer, *outer))
        state.launches = (*state.launches, launch)

    def _shell(
        self, name: str, words: list[Text], state: PathState, stdin: Text | None, prefix: list[tuple[str, Value]]
    ) -> list[PathState]:
        if name in _SUBMITS:
            return self._submit(words, state, stdin)
        at = 1
        while at < len(words):
            text = words[at].shown
            if name in SHELLS and re.fullmatch(r"-[a-z]*c", text) and at + 1 < len(words):
                # In `bash -c TEXT NAME ARGUMENT...` the word after the text is `$0`.
                return self._child(words[at + 1], words[at + 3 :], state, prefix)
            if text[:1] in ("-", "+") and text != "-":
                at += 2 if text in ("-o", "-O", "--rcfile", "+o") else 1
                continue
            script = self._script_at(words[at], state)
            if script is not None:
                return self._child(script, words[at + 1 :], state, prefix)
            state.unread = (*state.unread, text) if text not in state.unread else state.unread
            return [state]
        return self._child(stdin, [], state, prefix) if stdin is not None else [state]

    def _submit(self, words: list[Text], state: PathState, stdin: Text | None) -> list[PathState]:
        """Follow a batch script that `sbatch` or its like is given; return the states after it.

        The script has Slurm's variables by its `#SBATCH` lines and by the options of the command, which override them.
        """
        script: Script | None = None
        variables: dict[str, Value] = {}
        at = 1
        while at < len(words) and script is None:
            if words[at].shown.startswith("--wrap"):
                wrapped = words[at].part(len("--wrap="), len(words[at].shown)) if "=" in words[at].shown else None
                text = wrapped if wrapped is not None else (*words[at + 1 : at + 2], Text())[0]
                script, variables = as_script(text, self.script)
            elif not words[at].shown.startswith("-"):
                script = self._script_at(words[at], state)
            at += 1
        if script is None and stdin is not None:
            script, variables = as_script(stdin, self.script)
        if script is None:
            names = [each.shown for each in words[1:] if each.shown.endswith((".sh", ".sbatch", ".slurm"))]
            state.unread = tuple(dict.fromkeys([*state.unread, *names]))
            return [state]
        if (script.path, script.text) == (self.script.path, self.script.text):  # it submits itself again, to go on
            return [state]
        known, unknown = of_slurm(script, words[1 : at - 1] or [literal("--")])
        before = state.environment
        state.environment = unknown
        after = self._child(script, words[at:], state, [*known.items(), *variables.items()])
        for each in after:
            each.environment = before
        return after


_MARK = "__unknown_"
"""Prefix of variables that stand for unknown parts of a script's text."""


def restore(state: PathState, variables: Mapping[str, Value | None]) -> None:
    """Set variables to earlier values; None removes the variable."""
    for name, value in variables.items():
        if value is None:
            state.variables.pop(name, None)
        else:
            state.variables[name] = value


def as_script(text: Text, within: Script) -> tuple[Script, dict[str, Value]]:
    """Turn a text into a script, and its unknown parts into variables that the script reads; return both."""
    variables: dict[str, Value] = {}
    pieces: list[TextRun] = []
    for piece in text.pieces:
        if piece.unknown is None:
            pieces.append(piece)
            continue
        # The checksum gives equal parts equal names, so that equal texts give equal scripts.
        name = f"{_MARK}{crc32(repr((piece.unknown.name, piece.unknown.why, piece.unknown.unset)).encode()):x}"
        variables[name] = Text((piece,))
        pieces.append(evolve(piece, text=f"${{{name}}}", exact=False, unknown=None))
    script = Text(tuple(pieces)).script()
    return evolve(script, folder=within.folder, path=within.path), variables
