"""How many messages may be on their way at once: a bound from the program's order alone, so that it holds for every engine that keeps to it.

A channel holds at most what was sent on it and not surely received before; one of guests, whose ends meet, a message at a time. What is surely before what follows from the streams of the engines,
their waits and the messages themselves, by vector clocks over one step: no message outlives the step that sent it. Orders that
collectives make between ranks are left out, so that one replica stands for all; that makes the bound no smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from attrs import define, field

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.ops.base import ENGINES, Direction, Engine
from ratrain.ratrain_ir.ops.messages import engines_of, meets
from ratrain.ratrain_ir.topology import Hop
from ratrain.targets.program.program import Program
from ratrain.targets.runtime.engine.evaluation import serves_the_loss

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction

Form: TypeAlias = tuple[Dtype, tuple[int, ...]]
"""Element type and shape of a message."""
_Stream: TypeAlias = tuple[int, Engine]
_Clock: TypeAlias = dict[_Stream, int]
"""How many instructions of each stream are surely done."""


def messages_ahead(program: Program, *, evaluates: bool) -> Counter[Form]:
    """Most messages of each form that are on their way at once in any order that a program allows, over all replicas and their tensor peers.

    With `evaluates` passes of the loss alone count too: they leave out the gradients that hold activations back in a step.
    """
    most = _of_pass(program, forward_only=False)
    if evaluates:
        most |= _of_pass(program, forward_only=True)
    return Counter({form: count * program.plan.dp * program.plan.tp for form, count in most.items()})


def _of_pass(program: Program, *, forward_only: bool) -> Counter[Form]:
    walk = _Walk(program, forward_only=forward_only)
    walk.run()
    found: Counter[Form] = Counter()
    for hop, sends in walk.sent.items():
        most: Counter[Form] = Counter()
        if meets(hop.channel.payload):
            for send in sends:
                most |= Counter(send.forms)
            found += most
            continue
        under_way: Counter[Form] = Counter()
        received = 0
        for send in sends:
            under_way.update(send.forms)
            under_way.subtract(form for each in sends[received : send.received] for form in each.forms)
            received = send.received
            most |= under_way
        found += most
    return found


@define
class _Sent:
    """A message of a channel."""

    forms: tuple[Form, ...]
    """of its parts"""
    received: int
    """messages of the channel that were surely received before it"""
    clock: _Clock


@define(eq=False)
class _Walk:
    """Goes through a step in any order that is allowed, and notes what each message comes after."""

    program: Program
    forward_only: bool
    sent: dict[Hop, list[_Sent]] = field(factory=dict)
    _received: dict[Hop, list[int]] = field(factory=dict)
    """By channel: where in its engine's stream each receipt stands."""
    _clocks: dict[_Stream, list[_Clock]] = field(factory=dict)

    def run(self) -> None:
        """All of it. An instruction that never becomes ready is left out: the program hangs there."""
        streams = [(number, engine) for number in range(len(self.program.stages)) for engine in ENGINES]
        self._clocks = {stream: [] for stream in streams}
        moved = True
        while moved:
            moved = False
            for stream in streams:
                while self._advance(stream):
                    moved = True

    def _advance(self, stream: _Stream) -> bool:
        """Go past the next instruction of a stream, if it is ready."""
        (number, engine), done = stream, self._clocks[stream]
        instructions = self.program.stages[number].streams[engine]
        if len(done) == len(instructions):
            return False
        instruction = instructions[len(done)]
        before = list(self._before(number, instruction))
        if any(clock is None for clock in before):
            return False
        clock: _Clock = dict(done[-1]) if done else {}
        for other in before:
            for key, count in (other or {}).items():
                clock[key] = max(clock.get(key, 0), count)
        if self._counts(instruction):
            self._note(number, instruction, clock, len(done))
        done.append({**clock, stream: len(done) + 1})
        return True

    def _before(self, number: int, instruction: Instruction) -> Iterator[_Clock | None]:
        """What an instruction waits for in its step: clocks, None of what is not done yet."""
        for wait in instruction.waits:
            if not wait.previous_step and wait.count:
                done = self._clocks[number, wait.engine]
                yield done[wait.count - 1] if wait.count <= len(done) else None
        if instruction.direction is Direction.IN and self._counts(instruction):
            hop = self._hop(number, instruction)
            sends, taken = self.sent.get(hop, []), len(self._received.get(hop, []))
            yield sends[taken].clock if taken < len(sends) else None

    def _counts(self, instruction: Instruction) -> bool:
        return not self.forward_only or serves_the_loss(instruction)

    def _note(self, number: int, instruction: Instruction, clock: _Clock, position: int) -> None:
        if instruction.ends(number) is None:
            return
        hop = self._hop(number, instruction)
        if instruction.direction is Direction.IN:
            self._received.setdefault(hop, []).append(position)
            return
        tensors = self.program.stages[number].tensors
        kinds = [tensors[operand.tensor].type for operand in instruction.carried]
        sender, receiver = engines_of(hop.channel.payload)
        known = clock.get((hop.target, receiver), 0)
        received = sum(position < known for position in self._received.get(hop, []))
        done = {**clock, (number, sender): position + 1}
        forms = tuple((kind.dtype, kind.shape) for kind in kinds)
        self.sent.setdefault(hop, []).append(_Sent(forms, received, done))

    def _hop(self, number: int, instruction: Instruction) -> Hop:
        hop = instruction.hop(number, self.program.topology)
        assert hop is not None  # the verifier has refused messages between stages that are no neighbours
        return hop
