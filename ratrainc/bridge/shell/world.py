"""One path through a script: the values of its variables, the decisions on the way, and the commands it has started."""

from __future__ import annotations

from typing import Any

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrainc.bridge.shell.shell_text import Script, Text, Unknown

Value = Text | list[Text] | dict[str, Text]
"""Of a variable: a text, an array, or an array by words."""


@frozen
class CommandOutcome:
    """The outcome of a condition or a command."""

    value: bool | None
    """None if nothing in the script says it"""
    shown: str = ""
    """the condition, as the script has it"""
    place: Place | None = field(default=None, eq=False)
    key: object = None
    """equal for conditions that have the same outcome"""
    because: Unknown | None = None
    """the unknown that it hangs on"""
    binds: tuple[Unknown, Text] | None = None
    """an unknown, and its text where the outcome is yes"""
    assumed: bool = False
    """it holds where a variable that is never assigned is not in the environment either"""

    def other(self) -> CommandOutcome:
        """Return the opposite."""
        value = None if self.value is None else not self.value
        return evolve(self, value=value, key=("not", self.key), binds=None)


@frozen
class TakenOutcome:
    """An outcome that was taken on the way."""

    answer: CommandOutcome
    value: bool


@frozen
class Launch:
    """A command of the script: its words, in one world."""

    words: tuple[Text, ...]
    world: World = field(eq=False)
    outer: tuple[Text, ...] = ()
    """the words of commands that start it, as `srun` with its options"""


@define
class World:
    """The state of a script between two of its commands."""

    variables: dict[str, Value] = field(factory=dict)
    exported: set[str] = field(factory=set)
    arguments: list[Text] | None = None
    """`$1` and on; None if the script was started with nobody knows what"""
    functions: dict[str, tuple[Any, Script]] = field(factory=dict)
    """the node of each body, and the script that it stands in"""
    files: dict[str, Text] = field(factory=dict)
    """what the script writes into files, by their paths"""
    known: dict[Unknown, Text] = field(factory=dict)
    facts: dict[object, bool] = field(factory=dict)
    decisions: tuple[TakenOutcome, ...] = ()
    launches: tuple[Launch, ...] = ()
    unread: tuple[str, ...] = ()
    """files that were sourced and could not be read"""
    assumed: dict[str, str] = field(factory=dict)
    """variables that were taken as not set, and what the script has instead"""
    contrary: frozenset[str] = frozenset()
    """variables that must be set by the environment for the script to go this way"""
    strict: bool = False
    """`set -u`: a variable that is not set ends the script"""
    ended: str = ""
    """`exit`, `return`, `break` or `continue`: what is skipped until its end"""
    status: CommandOutcome = CommandOutcome(value=True)
    output: list[Text] | None = None
    """what `echo` has written, where that is kept"""
    frames: list[dict[str, Value | None]] = field(factory=list)
    """of each function that runs, what its local variables held before"""
    environment: frozenset[str] = frozenset()
    """variables that the scheduler sets, to values that are not known"""

    def copy(self) -> World:
        """Return a world that goes on from here on its own."""
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
        """Equal for worlds that go on alike."""
        return (
            tuple((name, _key(self.variables[name])) for name in sorted(self.variables)),
            None if self.arguments is None else tuple(each.key for each in self.arguments),
            tuple(sorted((name, node.start_byte) for name, (node, _) in self.functions.items())),
            tuple((name, self.files[name].key) for name in sorted(self.files)),
            tuple(tuple(word.key for word in each.words) for each in self.launches),
            (self.strict, self.ended, self.status.value, self.status.key, self.unread),
            None if self.output is None else tuple(each.key for each in self.output),
        )


def split(world: World, answer: CommandOutcome) -> list[tuple[World, bool]]:
    """Return the ways on from a condition; one where its outcome is known, or was decided before."""
    if answer.value is not None and not answer.assumed:
        return [(world, answer.value)]
    key, turned = answer.key, False
    while isinstance(key, tuple) and len(key) == 2 and key[0] == "not":
        key, turned = key[1], not turned
    if key in world.facts:
        return [(world, world.facts[key] != turned)]
    first = True if answer.value is None else answer.value
    ways = [(world, first), (world.copy(), not first)]
    for way, value in ways:
        way.facts[key] = value != turned
        way.decisions = (*way.decisions, TakenOutcome(answer, value))
        if value and answer.binds is not None:
            way.known[answer.binds[0]] = answer.binds[1]
    if answer.assumed and answer.because is not None:
        if answer.because.name:
            world.assumed.setdefault(answer.because.name, "")
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


def merged(worlds: list[World]) -> list[World]:
    """Return the worlds that differ in what comes of them; of two that do not, what both have found out stays."""
    found: dict[tuple[object, ...], World] = {}
    for world in worlds:
        key = world.key()
        other = found.get(key)
        if other is None:
            found[key] = world
            continue
        other.facts = {name: value for name, value in other.facts.items() if world.facts.get(name) == value}
        other.known = {name: value for name, value in other.known.items() if world.known.get(name) == value}
        other.decisions = tuple(each for each in other.decisions if each in world.decisions)
        if len(world.contrary) < len(other.contrary):
            other.contrary = world.contrary
    return list(found.values())
