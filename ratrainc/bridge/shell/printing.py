"""Commands whose output a script may use: `echo`, `printf`, `cat`, paths, numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from ratrain.ratrainc.bridge.shell.path_state import CommandOutcome, PathState
from ratrain.ratrainc.bridge.shell.shell_text import NOT_RUN, Script, Text, Unknown, joined, literal, nothing_known

if TYPE_CHECKING:
    from tree_sitter import Node

    from ratrain.ratrain_ir.support.text import Place
    from ratrain.ratrainc.bridge.shell.assigning import Assigning
    from ratrain.ratrainc.bridge.shell.words import Expander

_FORMAT = re.compile(r"%[-0]?\d*([sdq%])|\\(n|t|\\)")


class Follower(Protocol):
    """The part of `Runner` that commands use."""

    assigning: Assigning
    read: Callable[[str, Script], Script | None]
    """returns the script at a path that another script names; None if it cannot be read"""
    depth: int
    """number of scripts and functions that run within one another"""
    outer: tuple[Text, ...]
    """words of the commands around the present shell, such as `srun` with its options"""

    def script(self, script: Script, state: PathState) -> list[PathState]:
        """Follow a script; return the states after it."""

    def run(self, nodes: Iterable[Node], script: Script, states: list[PathState]) -> list[PathState]:
        """Follow statements; return the states after them."""

    def inside(self, state: PathState, run: Callable[[PathState], list[PathState]]) -> list[PathState]:
        """Follow a child process; return the states after it, with the variables from before."""

    def expander(self, script: Script, state: PathState) -> Expander:
        """Return an expander for words of a script in a state."""


class Printing:
    """Execution of commands that print. Their output is kept only if something reads it (`PathState.output`)."""

    def __init__(self, runner: Follower, script: Script, place: Place) -> None:
        self.runner = runner
        self.script = script
        self.place = place

    def _status(self, state: PathState, answer: CommandOutcome) -> list[PathState]:
        state.status = answer
        return [state]

    def _do_echo(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        if state.output is not None:
            ends = True
            while words and words[0].shown in ("-n", "-e", "-ne", "-en"):
                ends = ends and "n" not in words[0].shown
                words = words[1:]
            state.output.append(joined([joined(words, literal(" ")), literal("\n" if ends else "")]))
        return self._status(state, CommandOutcome(value=True))

    def _do_printf(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        if words and words[0].shown == "-v" and len(words) > 1:
            self.runner.assigning.put(words[1].shown, self._printed(words[2:]), state)
        elif state.output is not None:
            state.output.append(self._printed(words))
        return self._status(state, CommandOutcome(value=True))

    def _printed(self, words: list[Text]) -> Text:
        values, texts, at = list(words[1:]), list[Text](), 0
        if not words or words[0].plain is None:
            return self._unknown("printf", "")
        # The format is used once: with more values than conversions, the output is unknown.
        form = words[0].shown
        for match in _FORMAT.finditer(form):
            texts.append(literal(form[at : match.start()], words[0]))
            at = match.end()
            if match[2]:
                texts.append(literal({"n": "\n", "t": "\t", "\\": "\\"}[match[2]]))
            elif match[1] == "%":
                texts.append(literal("%"))
            elif values:
                texts.append(values.pop(0))
        return joined([*texts, literal(form[at:], words[0])]) if not values else self._unknown("printf", "")

    def _do_cat(self, words: list[Text], state: PathState, stdin: Text | None) -> list[PathState]:
        if state.output is not None:
            named = [each for each in words if each.shown != "-"]
            if not named and stdin is not None:
                state.output.append(stdin)
            # Contents are known of files that the script wrote itself.
            elif named and all(each.plain in state.files for each in named):
                state.output += [state.files[each.shown] for each in named]
            else:
                state.output.append(self._unknown("cat", ""))
        return self._status(state, self._command_status(words, "cat"))

    def _do_tee(self, words: list[Text], state: PathState, stdin: Text | None) -> list[PathState]:
        for word in words:
            if stdin is not None and word.plain is not None:
                state.files[word.shown] = stdin
        if state.output is not None:
            state.output.append(stdin if stdin is not None else self._unknown("tee", ""))
        return self._status(state, CommandOutcome(value=True))

    def _do_envsubst(self, _words: list[Text], state: PathState, stdin: Text | None) -> list[PathState]:
        if state.output is not None and stdin is not None and stdin.plain is not None:
            state.output.append(self._substituted(stdin, state))
        elif state.output is not None:
            state.output.append(self._unknown("envsubst", ""))
        return self._status(state, CommandOutcome(value=True))

    def _substituted(self, text: Text, state: PathState) -> Text:
        parts, at = list[Text](), 0
        for match in re.finditer(r"\$\{(\w+)\}|\$(\w+)", text.shown):
            name = match[1] or match[2]
            value = state.variables.get(name) if name in state.exported else None
            parts.append(text.part(at, match.start()))
            unset = nothing_known(
                match[0], Unknown(name, f"{name} is not exported in the file", self.place, unset=True)
            )
            parts.append(value.replaced(state.known) if isinstance(value, Text) else unset)
            at = match.end()
        return joined([*parts, text.part(at, len(text.shown))])

    def _do_dirname(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        return self._print_path(words, state, lambda text: text.rpartition("/")[0] or ("/" if text[:1] == "/" else "."))

    def _do_basename(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        suffix = words[1].shown if len(words) > 1 else ""
        return self._print_path(words, state, lambda text: text.rpartition("/")[2].removesuffix(suffix))

    def _do_realpath(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        # Links are not resolved: the path stays as it is written.
        return self._print_path([each for each in words if each.shown[:1] != "-"], state, lambda text: text)

    _do_readlink = _do_realpath

    def _do_cd(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        if words and words[-1].plain is not None:
            state.variables["PWD"] = words[-1]
        # In a substitution, as in `$(cd DIR && pwd)`, the folder is taken to exist.
        return self._status(
            state, CommandOutcome(None if state.output is None else True, "cd", self.place, ("cd", tuple(words)))
        )

    def _do_pwd(self, _words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        held = state.variables.get("PWD")
        if state.output is not None:
            # PWD is what `cd` was last given; without one, the folder of the run is unknown.
            text = held if isinstance(held, Text) else self._unknown("pwd", "")
            state.output.append(joined([text, literal("\n")]))
        return self._status(state, CommandOutcome(value=True))

    def _print_path(self, words: list[Text], state: PathState, change: Callable[[str], str]) -> list[PathState]:
        if state.output is not None:
            known = words and words[0].plain is not None
            text = literal(f"{change(words[0].shown)}\n", words[0]) if known else self._unknown("a path", "")
            state.output.append(text)
        return self._status(state, CommandOutcome(value=True))

    def _do_seq(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        numbers = [int(each.shown) for each in words if re.fullmatch(r"-?\d{1,6}", each.plain or "")]
        if state.output is not None:
            if len(numbers) == len(words) and 1 <= len(words) <= 3 and (len(words) < 3 or numbers[1]):
                first, step, last = (
                    (1, 1, numbers[0])
                    if len(words) == 1
                    else (numbers[0], numbers[1] if len(words) == 3 else 1, numbers[-1])
                )
                # The limit keeps a script from making a text of any length.
                values = range(first, last + (1 if step > 0 else -1), step)[:10_000]
                state.output.append(literal("".join(f"{each}\n" for each in values), words[0]))
            else:
                state.output.append(self._unknown("seq", ""))
        return self._status(state, CommandOutcome(value=True))

    def _do_expr(self, words: list[Text], state: PathState, _stdin: Text | None) -> list[PathState]:
        if state.output is not None:
            value = self.runner.expander(self.script, state).whole(joined(words, literal(" ")))
            state.output.append(
                literal(f"{value}\n", words[0]) if isinstance(value, int) and words else self._unknown("expr", "")
            )
        return self._status(state, CommandOutcome(value=True))

    def _do_bc(self, _words: list[Text], state: PathState, stdin: Text | None) -> list[PathState]:
        if state.output is not None:
            value = self.runner.expander(self.script, state).whole(stdin) if stdin is not None else None
            state.output.append(literal(f"{value}\n", stdin) if isinstance(value, int) else self._unknown("bc", ""))
        return self._status(state, CommandOutcome(value=True))

    def _unknown(self, what: str, name: str) -> Text:
        return nothing_known(f"$({what})", Unknown(name, f"$({what}) is a command, and {NOT_RUN}", self.place))

    def _command_status(self, words: list[Text], name: str) -> CommandOutcome:
        shown = " ".join([name, *(each.shown for each in words)])
        return CommandOutcome(None, shown[:60], self.place, ("command", shown))
