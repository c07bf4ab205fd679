"""Statements of a shell script, followed on every path: an unknown condition takes both branches.

    if [ $NODES -gt 1 ]; then ARGS=a; else ARGS=b; fi     NODES unknown: two states, one with ARGS=a, one with ARGS=b
    train $ARGS                                           each state starts its own command

Worlds that agree in everything are merged, so their number stays small; a script with too many is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from attrs import define, evolve

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.bridge.shell.assigning import Assigning
from ratrain.ratrainc.bridge.shell.commands import Commands
from ratrain.ratrainc.bridge.shell.conditions import Conditions
from ratrain.ratrainc.bridge.shell.path_state import CommandOutcome, PathState, Value, merged, split
from ratrain.ratrainc.bridge.shell.shell_syntax import parse, source_of
from ratrain.ratrainc.bridge.shell.shell_text import NOT_RUN, Script, Text, Unknown, joined, literal, nothing_known
from ratrain.ratrainc.bridge.shell.words import Expander

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST_STEPS = 20_000
_MOST_WORLDS = 64
_MOST_DEPTH = 40
_MOST_ROUNDS = 1000
_REDIRECTS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
_LOOPS = ("break", "continue")


@define
class Runner:
    """Interpreter of a script. It starts nothing, and reads no files but scripts."""

    assigning: Assigning
    read: Callable[[str, Script], Script | None]
    """returns the script at a path that another script names; None if it cannot be read"""
    steps: int = 0
    """statements followed, counted once in each state"""
    depth: int = 0
    outer: tuple[Text, ...] = ()
    """words of the commands around the present shell, such as `srun` with its options"""

    def script(self, script: Script, state: PathState) -> list[PathState]:
        """Follow a script; return the states after it.

        Raises `DiagnosticError` RT063 for a syntax error, and RT064 if calls are nested too deeply.
        """
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            place = script.place(0, 1)
            fail("RT064", "scripts and functions call one another without end", place.location, source=place.source)
        try:
            return self.run(parse(script).children, script, [state])
        finally:
            self.depth -= 1

    def run(self, nodes: Iterable[Node], script: Script, states: list[PathState]) -> list[PathState]:
        """Follow statements in each of some states; return the states after them."""
        for node in nodes:
            if not node.is_named or node.type == "comment":
                continue
            after: list[PathState] = []
            for state in states:
                after += [state] if state.ended else self.statement(node, script, state)
            # Keys of states take time: compare states only if their number has grown.
            states = merged(after) if len(after) > len(states) else after
            self._count(node, script, states)
        return states

    def _count(self, node: Node, script: Script, states: list[PathState], rounds: int = 0) -> None:
        self.steps += len(states)
        # Report a loop with too many rounds like a script with too many steps.
        if rounds > _MOST_ROUNDS:
            self.steps = _MOST_STEPS + 1
        if self.steps <= _MOST_STEPS and len(states) <= _MOST_WORLDS:
            return
        place = script.place(node.start_byte, node.end_byte)
        if self.steps > _MOST_STEPS:
            fail("RT064", "the script has more steps than are followed", place.location, source=place.source)
        hangs = dict.fromkeys(
            each.answer.because.name for state in states for each in state.decisions if each.answer.because is not None
        )
        names = [name for name in hangs if name]
        fail(
            "RT064",
            f"up to here the script may go {len(states)} ways, by conditions that are not known",
            place.location,
            source=place.source,
            help=f"say what they hang on: {' '.join(f'--set {name}=VALUE' for name in names[:8])}" if names else None,
        )

    def expander(self, script: Script, state: PathState) -> Expander:
        """Return an expander for words of a script in a state."""
        return Expander(state, script, self.output, self.assigning.used.add)

    def fields(self, nodes: Iterable[Node], script: Script, state: PathState) -> list[Text]:
        """Expand words of a script to the words of a command."""
        return self.expander(script, state).words(nodes)

    def statement(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        """Follow one statement; return the states after it.

        An unsupported kind of statement has no effect, and an unknown status.
        """
        # Each kind of statement has the method of its name in the grammar: `if_statement` is followed by
        # `_if_statement`.
        found = getattr(self, f"_{node.type}", None)
        if found is None:
            state.status = CommandOutcome(None, source_of(node, script)[:60], key=("other", source_of(node, script)))
            return [state]
        states: list[PathState] = found(node, script, state)
        return states

    # what stands alone

    def _program(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        return self.run(node.children, script, [state])

    def _compound_statement(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        if node.children and node.children[0].type == "((":
            return self._answered(Conditions(self.expander(script, state)).number(node), node, script, state)
        return self.run(node.children, script, [state])

    _do_group = _compound_statement

    def _test_command(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        return self._answered(Conditions(self.expander(script, state)).answer(node), node, script, state)

    def _answered(self, answer: CommandOutcome, node: Node, script: Script, state: PathState) -> list[PathState]:
        shown = " ".join(source_of(node, script).split())
        state.status = evolve(answer, shown=shown, place=script.place(node.start_byte, node.end_byte))
        return [state]

    def _negated_command(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        states = self.run(node.children, script, [state])
        for each in states:
            each.status = each.status.other()
        return states

    def _function_definition(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            state.functions[source_of(name, script)] = (body, script)
        return [state]

    def _subshell(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        return self.inside(state, lambda inner: self.run(node.children, script, [inner]))

    def inside(self, state: PathState, run: Callable[[PathState], list[PathState]]) -> list[PathState]:
        """Follow a child process; return the states after it, with the shell's own state from before.

        Variables, arguments and functions come back. Started commands, written files and decisions stay.
        """
        kept = state.copy()
        after = run(state)
        for each in after:
            # One copy for each state, since states must not share mutable state.
            again = kept.copy()
            each.variables, each.exported, each.arguments = again.variables, again.exported, again.arguments
            each.functions, each.frames, each.strict, each.ended = again.functions, again.frames, again.strict, ""
        return after

    # commands

    def _command(self, node: Node, script: Script, state: PathState, stdin: Text | None = None) -> list[PathState]:
        prefix: list[tuple[str, Value]] = []
        written: list[Node] = []
        expander = self.expander(script, state)
        for child in node.children:
            if child.type == "variable_assignment":
                name = child.child_by_field_name("name")
                value = child.child_by_field_name("value")
                if name is not None:
                    prefix.append((source_of(name, script), expander.text(value) if value is not None else Text()))
            elif child.type == "herestring_redirect":
                stdin = joined(expander.text(each) for each in child.named_children)
            elif child.is_named and child.type not in _REDIRECTS:
                written.append(child)
        words = expander.words(written)
        state.status = CommandOutcome(value=True)
        place = script.place(node.start_byte, node.end_byte)
        return Commands(self, script, place).run(words, state, stdin, prefix)

    def _redirected_statement(
        self, node: Node, script: Script, state: PathState, stdin: Text | None = None
    ) -> list[PathState]:
        """Run a command with its input; keep its output as a file, which may be a script that is run later."""
        expander = self.expander(script, state)
        redirects = [each for each in node.children if each.type in _REDIRECTS]
        piped: list[Node] = []
        after: list[Node] = []
        for child in redirects:
            if child.type == "heredoc_redirect":
                # The grammar puts the rest of the line (`cat <<END > FILE`, `... | bash`, `... && next`) inside the
                # here-document's node. The list grows while it is iterated; the file redirects that it gains are for
                # `_target`.
                stdin = self._here_document(child, script, expander)
                redirects += [each for each in child.children if each.type == "file_redirect"]
                piped += [each for each in child.children if each.type == "pipeline"]
                after += [each for each in child.children if each.type in ("command", "list", "redirected_statement")]
            elif child.type == "herestring_redirect":
                stdin = joined(expander.text(each) for each in child.named_children)
        body = node.child_by_field_name("body")
        if body is None:
            return [state]
        target, adds = self._target(redirects, script, expander)
        # While the command runs, its output collects in this list; then it becomes the file's contents.
        outer, state.output = state.output, [] if target is not None else state.output
        if piped:
            states = self._piped(node, [body, *piped], script, state, stdin)
        else:
            states = self._with_input(body, script, state, stdin)
        for each in states:
            if target is None:
                break
            before = [each.files[target.shown]] if adds and target.shown in each.files else []
            each.files[target.shown] = joined([*before, *(each.output or [])])
            each.output = None if outer is None else list(outer)
        return self.run(after, script, states) if after else states

    def _with_input(self, body: Node, script: Script, state: PathState, stdin: Text | None) -> list[PathState]:
        if body.type == "command":
            return self._command(body, script, state, stdin)
        if body.type == "redirected_statement":
            return self._redirected_statement(body, script, state, stdin)
        return self.statement(body, script, state)

    def _target(self, nodes: list[Node], script: Script, expander: Expander) -> tuple[Text | None, bool]:
        """Return the file that the output goes to, and True if it is appended."""
        for node in nodes:
            sign = next((each.type for each in node.children if not each.is_named), "")
            number = next((source_of(each, script) for each in node.children if each.type == "file_descriptor"), "1")
            destination = node.child_by_field_name("destination")
            if sign in (">", ">|", ">>") and number == "1" and destination is not None:
                return expander.text(destination), sign == ">>"
        return None, False

    def _here_document(self, node: Node, script: Script, expander: Expander) -> Text:
        start = next((each for each in node.children if each.type == "heredoc_start"), None)
        body = next((each for each in node.children if each.type == "heredoc_body"), None)
        if body is None:
            return Text()
        if start is not None and source_of(start, script)[:1] in "'\"\\":
            return expander.raw(body)
        return expander.body(body)

    def _pipeline(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        stages = [each for each in node.children if each.is_named]
        if node.children and node.children[0].type == "!":
            stages = stages[1:]
        return self._piped(node, stages, script, state, None)

    def _piped(
        self, node: Node, stages: list[Node], script: Script, state: PathState, text: Text | None
    ) -> list[PathState]:
        """Run the commands of a pipeline, each with the output of the one before as its input."""
        # Flatten pipelines in pipelines: `a | b | c` is one of three commands.
        while any(each.type == "pipeline" for each in stages):
            stages = [
                each for stage in stages for each in (stage.named_children if stage.type == "pipeline" else [stage])
            ]
        whole = source_of(node, script)
        for number, stage in enumerate(stages):
            last = number + 1 == len(stages)
            keeps = state.output
            stdin = text

            # Defaults bind the values of this round: a closure would see the last round's.
            def run(
                inner: PathState, stage: Node = stage, stdin: Text | None = stdin, *, last: bool = last
            ) -> list[PathState]:
                if not last:
                    inner.output = []
                return self._with_input(stage, script, inner, stdin)

            states = self.inside(state, run)
            # On several paths the next command would read several texts: the rest of the pipeline is not followed.
            if len(states) != 1:
                for each in states:
                    each.output = keeps
                    each.status = CommandOutcome(None, whole[:60], key=("command", whole))
                return states
            state = states[0]
            if not last:
                text = None if state.output is None else joined(state.output)
                state.output = keeps
        state.status = CommandOutcome(
            None, " ".join(whole.split())[:60], script.place(node.start_byte, node.end_byte), ("command", whole)
        )
        return [state]

    def output(self, node: Node, script: Script, state: PathState) -> Text:
        """Return the output of a command substitution; an unknown text if it has several paths or unknown parts."""
        inner = state.copy()
        inner.output = []
        shown = source_of(node, script).strip()
        place = script.place(node.start_byte, node.end_byte)
        why = f"{' '.join(shown.split())[:60]} is a command, and {NOT_RUN}"
        unknown = nothing_known(shown, Unknown("", why, place))
        after = self.run(node.children, script, [inner])
        if len(after) != 1 or after[0].output is None or any(each.unknown for each in after[0].output):
            # Name a variable that the output depends on, so that advice can propose to set it. The output need not be
            # empty if the variable is, so `unset` is dropped.
            hangs = [each.unknown for each in after[0].output or () if each.unknown is not None] if after else []
            named = next((each for each in hangs if each.name), None)
            return unknown if named is None else nothing_known(shown, evolve(named, unset=False))
        state.assumed.update(after[0].assumed)
        # As in bash, newlines at the end are dropped.
        text = joined(after[0].output)
        return text.part(0, len(text.shown.rstrip("\n")))

    # assignments

    def _variable_assignment(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        self.assigning.assign(node, self.expander(script, state))
        state.status = CommandOutcome(value=True)
        return [state]

    _variable_assignments = _program

    def _declaration_command(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        keyword = source_of(node.children[0], script)
        flags = "".join(source_of(each, script) for each in node.children[1:] if source_of(each, script)[:1] == "-")
        exports = keyword == "export" or (keyword != "local" and "x" in flags)
        # Inside a function, `local`, `declare` and `typeset` (without -g) hide the variable until the function returns.
        local = (keyword == "local" or (keyword in ("declare", "typeset") and "g" not in flags)) and state.frames
        for child in node.children[1:]:
            source = source_of(child, script)
            name = source.partition("=")[0].rstrip("+").partition("[")[0]
            if not child.is_named or source[:1] == "-":
                continue
            if local:
                state.frames[-1].setdefault(name, state.variables.get(name))
                if child.type != "variable_assignment":
                    state.variables[name] = Text()
            if child.type == "variable_assignment":
                self.assigning.assign(child, self.expander(script, state), by_words="A" in flags)
            elif child.type in ("simple_expansion", "expansion", "string", "concatenation", "raw_string"):
                self.assigning.declared(self.expander(script, state).fields(child), state, exports=exports)
                continue
            elif "A" in flags:
                state.variables.setdefault(name, {})
            if exports:
                state.exported.add(name)
        state.status = CommandOutcome(value=True)
        return [state]

    def _unset_command(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        for child in node.children:
            if child.type in ("variable_name", "word"):
                name = source_of(child, script)
                state.variables.pop(name, None)
                state.functions.pop(name, None)
        return [state]

    # what decides

    def _list(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        sides = [each for each in node.children if each.is_named]
        sign = next((each.type for each in node.children if not each.is_named), "&&")
        if len(sides) != 2:
            return self.run(sides, script, [state])
        after: list[PathState] = []
        for first in self.statement(sides[0], script, state):
            if first.ended:
                after.append(first)
                continue
            # `&&` goes on where the left side is true, `||` where it is false.
            for way, value in split(first, first.status):
                if value == (sign == "&&"):
                    after += self.statement(sides[1], script, way)
                else:
                    way.status = CommandOutcome(value)
                    after.append(way)
        return merged(after)

    def _if_statement(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        branches: list[tuple[list[Node], list[Node]]] = []
        otherwise: list[Node] = []
        condition: list[Node] = []
        body: list[Node] = []
        for child in node.children:
            if child.type == "then":
                body = []
                # The children of an `if` are flat. Those up to `then` are the condition; `body` gets the later ones
                # after this.
                branches.append((condition, body))
            elif child.type == "elif_clause":
                at = next((i for i, each in enumerate(child.children) if each.type == "then"), len(child.children))
                branches.append((list(child.children[1:at]), list(child.children[at + 1 :])))
            elif child.type == "else_clause":
                otherwise = list(child.children)
            elif branches:
                body.append(child)
            elif child.type != "if":
                condition.append(child)
        return self._branches(branches, otherwise, script, state)

    def _branches(
        self, branches: list[tuple[list[Node], list[Node]]], otherwise: list[Node], script: Script, state: PathState
    ) -> list[PathState]:
        if not branches:
            return self.run(otherwise, script, [state])
        (condition, body), *rest = branches
        after: list[PathState] = []
        for each in self.run(condition, script, [state]):
            if each.ended:
                after.append(each)
                continue
            for way, value in split(each, each.status):
                way.status = CommandOutcome(value=True)
                after += self.run(body, script, [way]) if value else self._branches(rest, otherwise, script, way)
        return merged(after)

    def _case_statement(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        word = node.child_by_field_name("value")
        items = [each for each in node.children if each.type == "case_item"]
        text = self.expander(script, state).text(word) if word is not None else Text()
        return merged(self._cases(text, items, script, state))

    def _cases(self, word: Text, items: list[Node], script: Script, state: PathState) -> list[PathState]:
        if not items:
            return [state]
        values = items[0].children_by_field_name("value")
        body = [each for each in items[0].children if each.is_named and each not in values]
        after: list[PathState] = []
        # Each pattern is tried in the states that no earlier pattern matched. A match may make the word known.
        ways = [state]
        for value in values:
            rest: list[PathState] = []
            for way in ways:
                answer = Conditions(self.expander(script, way)).case(word.replaced(way.known), value)
                answer = evolve(answer, shown=f"case {word.shown} in {answer.shown})")
                for further, matches in split(way, answer):
                    if matches:
                        after += self.run(body, script, [further])
                    else:
                        rest.append(further)
            ways = rest
        for way in ways:
            after += self._cases(word, items[1:], script, way)
        return after

    # the body of the loop

    def _for_statement(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None:
            return [state]
        name = source_of(variable, script)
        values = node.children_by_field_name("value")
        listed = any(each.type == "in" for each in node.children)
        words = self.fields(values, script, state) if listed else list(state.arguments or [])
        # Unknown words, and patterns of files, may be any number of words.
        if any(each.bare or each.sole is not None for each in words) or any(
            set(each.shown) & set("*?") for each in words
        ):
            why = f"it is {name} of a loop over what is not known"
            state.variables[name] = nothing_known(
                f"${name}", Unknown("", why, script.place(node.start_byte, node.end_byte))
            )
            return self._unknown_rounds([body], script, state)
        states = [state]
        for word in words:
            after: list[PathState] = []
            for each in states:
                if each.ended:
                    after.append(each)
                    continue
                each.variables[name] = word
                after += self._round([body], script, each)
            states = merged(after)
        return _after_loop(states)

    def _round(self, body: list[Node], script: Script, state: PathState) -> list[PathState]:
        states = self.run(body, script, [state])
        for each in states:
            if each.ended == "continue":
                each.ended = ""
        return states

    def _c_style_for_statement(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        parts = source_of(node, script)
        inner = parts[parts.index("((") + 2 : parts.index("))")].split(";")
        body = node.child_by_field_name("body")
        if body is None or len(inner) != 3:
            return [state]
        start, condition, step = (literal(each) for each in inner)
        self.expander(script, state).whole(start)
        after, states, rounds = [], [state], 0
        while states:
            going: list[PathState] = []
            for each in states:
                value = self.expander(script, each).whole(condition) if condition.shown.strip() else 1
                if not isinstance(value, int):
                    after += self._unknown_rounds([body], script, each)
                elif value and not each.ended:
                    for way in self._round([body], script, each):
                        self.expander(script, way).whole(step)
                        going.append(way)
                else:
                    after.append(each)
            states = merged(going)
            rounds += 1
            self._count(node, script, states or after, rounds)
        return _after_loop(merged(after))

    def _while_statement(self, node: Node, script: Script, state: PathState) -> list[PathState]:
        body = node.child_by_field_name("body")
        conditions = [each for each in node.children if each.is_named and each != body]
        wanted = node.children[0].type == "while"
        after, states, rounds = [], [state], 0
        while states and body is not None:
            going: list[PathState] = []
            for each in states:
                launches = each.launches
                for way in self.run(conditions, script, [each]):
                    if way.status.value is None:
                        after += self._unknown_rounds([body], script, way)
                    elif way.status.value is wanted and not way.ended:
                        for further in self._round([body], script, way):
                            # A round that starts the same command as the round before would do so forever: a script
                            # that restarts its training. The loop ends after it.
                            again = len(further.launches) > len(launches) and further.launches[-1:] == launches[-1:]
                            (after if again or further.ended else going).append(further)
                    else:
                        after.append(way)
            states = merged(going)
            rounds += 1
            self._count(node, script, states or after, rounds)
        return _after_loop(merged(after))

    def _unknown_rounds(self, body: list[Node], script: Script, state: PathState) -> list[PathState]:
        """Return the states after a loop with an unknown number of rounds.

        The body is followed once, so that its commands are found. Variables that it changes become unknown.
        """
        before = state.copy()
        place = script.place(body[0].start_byte, body[0].start_byte + 1)
        states = self._round(body, script, state)
        for each in states:
            for name, value in each.variables.items():
                old = before.variables.get(name)
                if old != value:
                    why = f"{name} is set in a loop whose rounds are not known"
                    each.variables[name] = self.assigning.given.get(
                        name, nothing_known(f"${name}", Unknown(name, why, place))
                    )
            each.arguments = before.arguments
            # The body may not run at all, so an `exit` in it does not end the script.
            each.ended = "" if each.ended in (*_LOOPS, "exit") else each.ended
        return _after_loop(states)


def _after_loop(states: list[PathState]) -> list[PathState]:
    for each in states:
        if each.ended in _LOOPS:
            each.ended = ""
    return states
