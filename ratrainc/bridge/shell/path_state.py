"""One path through a script: the values of its variables, the decisions on the way, and the commands it has started."""

from __future__ import annotations

from typing import Any

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrainc.bridge.shell.shell_text import Script, Text, Unknown

Value = Text | list[Text] | dict[str, Text]
"""Value of a variable: a text, an array, or an associative array."""


@frozen
class CommandOutcome:
    """The outcome of a condition or a command."""

    value: bool | None
    """None if the script does not determine it"""
    shown: str = ""
    """source text of the condition"""
    place: Place | None = field(default=None, eq=False)
    key: object = None
    """equal for conditions that always have the same outcome"""
    because: Unknown | None = None
    """unknown part that it depends on"""
    binds: tuple[Unknown, Text] | None = None
    """an unknown part, and the text that it must be if the outcome is true"""
    assumed: bool = False
    """true if the value is only valid while the environment does not set a variable"""

    def other(self) -> CommandOutcome:
        """Return the negated outcome."""
        value = None if self.value is None else not self.value
        return evolve(self, value=value, key=("not", self.key), binds=None)


@frozen
class TakenOutcome:
    """A decision on a path: a condition, and the value that was chosen for it."""

    answer: CommandOutcome
    value: bool


@frozen
class Launch:
    """A training command that a script starts."""

    words: tuple[Text, ...]
    state: PathState = field(eq=False)
    outer: tuple[Text, ...] = ()
    """words of the commands around it, such as `srun` with its options"""


@define
class PathState:
    """The state of a script between two commands, on one path."""

    variables: dict[str, Value] = field(factory=dict)
    exported: set[str] = field(factory=set)
    arguments: list[Text] | None = None
    """`$1` and on; None if they are unknown"""
    functions: dict[str, tuple[Any, Script]] = field(factory=dict)
    """body of each function, and the script that it is in"""
    files: dict[str, Text] = field(factory=dict)
    """contents of files that the script wrote, by path"""
    known: dict[Unknown, Text] = field(factory=dict)
    """values of unknown parts that decisions on this path imply"""
    facts: dict[object, bool] = field(factory=dict)
    """values decided on this path, by the condition's key"""
    decisions: tuple[TakenOutcome, ...] = ()
    launches: tuple[Launch, ...] = ()
    unread: tuple[str, ...] = ()
    """scripts that are run or sourced and could not be read"""
    assumed: dict[str, str] = field(factory=dict)
    """variables taken as not set, and the text that the script uses instead"""
    contrary: frozenset[str] = frozenset()
    """variables that the environment must set for this path"""
    strict: bool = False
    """`set -u`: a variable that is not set ends the script"""
    ended: str = ""
    """`exit`, `return`, `break` or `continue`: statements are skipped up to its end; else empty"""
    status: CommandOutcome = CommandOutcome(value=True)
    output: list[Text] | None = None
    """output so far, if something reads it; else None"""
    frames: list[dict[str, Value | None]] = field(factory=list)
    """for each function that runs, the values that its local variables hide; None if there was none"""
    environment: frozenset[str] = frozenset()
    """variables that the scheduler sets to unknown values"""

    def copy(self) -> PathState:
        """Return an independent copy, to follow another path."""
        return evolve(
            self,
            variables={name: _copied(value) for name, value in self.variables.items()},
            exported=set(self.exported),
            arguments=None if self.arguments is None else list(self.arguments),
            functions=dict(self.functions),
            files=dict(self.files),
            known=dict(self.known),
            facts=dict(self.facts),
            assumed=dict(self.assumed),
            output=None if self.output is None else list(self.output),
            frames=[dict(frame) for frame in self.frames],
        )

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for states with the same future.

        Decisions, facts and known values are left out: they record the past.
        """
        return (
            tuple((name, _key(self.variables[name])) for name in sorted(self.variables)),
            None if self.arguments is None else tuple(each.key for each in self.arguments),
            tuple(sorted((name, node.start_byte) for name, (node, _) in self.functions.items())),
            tuple((name, self.files[name].key) for name in sorted(self.files)),
            tuple(tuple(word.key for word in each.words) for each in self.launches),
            (self.strict, self.ended, self.status.value, self.status.key, self.unread),
            None if self.output is None else tuple(each.key for each in self.output),
        )


def split(state: PathState, answer: CommandOutcome) -> list[tuple[PathState, bool]]:
    """Return the paths on from a condition, each with its value; one path if it is known or decided before."""
    if answer.value is not None and not answer.assumed:
        return [(state, answer.value)]
    # X and `!X` share one fact: `turned` is true if an odd number of negations was taken off.
    key, turned = answer.key, False
    while isinstance(key, tuple) and len(key) == 2 and key[0] == "not":
        key, turned = key[1], not turned
    if key in state.facts:
        return [(state, state.facts[key] != turned)]
    # The first path keeps this state, with the assumed value if there is one; the second is a copy with the other
    # value.
    first = True if answer.value is None else answer.value
    ways = [(state, first), (state.copy(), not first)]
    for way, value in ways:
        way.facts[key] = value != turned
        way.decisions = (*way.decisions, TakenOutcome(answer, value))
        if value and answer.binds is not None:
            way.known[answer.binds[0]] = answer.binds[1]
    if answer.assumed and answer.because is not None:
        if answer.because.name:
            state.assumed.setdefault(answer.because.name, "")
        # The other path needs the environment to set the variable.
        ways[1][0].contrary |= {answer.because.name}
    return ways


def _copied(value: Value) -> Value:
    return value if isinstance(value, Text) else list(value) if isinstance(value, list) else dict(value)


def _key(value: Value) -> object:
    if isinstance(value, Text):
        return value.key
    if isinstance(value, list):
        return ("array", tuple(each.key for each in value))
    return ("words", tuple((name, value[name].key) for name in sorted(value)))


def merged(states: list[PathState]) -> list[PathState]:
    """Return the states without those that equal another one by `PathState.key`.

    Of equal states the first remains, with the facts, values and decisions that they share.
    """
    found: dict[tuple[object, ...], PathState] = {}
    for state in states:
        key = state.key()
        other = found.get(key)
        if other is None:
            found[key] = state
            continue
        other.facts = {name: value for name, value in other.facts.items() if state.facts.get(name) == value}
        other.known = {name: value for name, value in other.known.items() if state.known.get(name) == value}
        other.decisions = tuple(each for each in other.decisions if each in state.decisions)
        if len(state.contrary) < len(other.contrary):
            other.contrary = state.contrary
    return list(found.values())
