"""Bound on the messages in transit at once, from the program's order alone, so that it holds for every engine.

When a message is sent, its channel holds at most the messages sent before and not surely received before. "Surely
before" follows from the streams of the engines, their waits and the messages themselves, by vector clocks over one step
(no message outlives its step):

    clock of an instruction = for each (stage, engine): the number of its instructions that are surely done
                            = maximum over the clocks of the instruction before it in the stream, of its waits,
                              and of the send if it is a receive; its own stream's entry is then one more

    receives at positions 3 and 8 of the receiver's stream, clock of a send says 5: the receive at 3 is surely done

Orders that collectives make between ranks are left out, so that one replica stands for all. Fewer known orders can only
make the bound larger, so it stays safe. A channel of activation offloads, whose ends meet, holds one message at a time.
Cost: one visit for each instruction, with a clock of (stages x engines) entries.
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
"""Number of instructions of each stream that are surely done."""


def messages_ahead(program: Program, *, evaluates: bool) -> Counter[Form]:
    """Return the most messages of each form in transit at once in any allowed order, over all lanes.

    With `evaluates` evaluation passes count too: they skip the gradients that hold activations back in a step.
    """
    most = _of_pass(program, forward_only=False)
    if evaluates:
        most |= _of_pass(program, forward_only=True)
    return Counter({form: count * program.plan.replicas * program.plan.tp for form, count in most.items()})


def _of_pass(program: Program, *, forward_only: bool) -> Counter[Form]:
    """Return the bound for one replica, by form: the sum over channels of the most messages in each."""
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
            # A channel is first in, first out: if n messages are surely received, they are the first n sent.
            under_way.subtract(form for each in sends[received : send.received] for form in each.forms)
            received = send.received
            most |= under_way
        found += most
    return found


@define
class _Sent:
    """Message of a channel."""

    forms: tuple[Form, ...]
    """forms of its parts"""
    received: int
    """messages of the channel that were surely received before it was sent"""
    clock: _Clock


@define(eq=False)
class _Walk:
    """Walk through a step in any allowed order, which computes the clock of each message."""

    program: Program
    forward_only: bool
    sent: dict[Hop, list[_Sent]] = field(factory=dict)
    _received: dict[Hop, list[int]] = field(factory=dict)
    """position of each receive in its engine's stream, by channel"""
    _clocks: dict[_Stream, list[_Clock]] = field(factory=dict)

    def run(self) -> None:
        """Visit all instructions. One that never becomes ready is left out: the program hangs there."""
        streams = [(number, engine) for number in range(len(self.program.stages)) for engine in ENGINES]
        self._clocks = {stream: [] for stream in streams}
        # Visit streams in turn until no pass makes progress: then all are done, or the program hangs.
        moved = True
        while moved:
            moved = False
            for stream in streams:
                while self._advance(stream):
                    moved = True

    def _advance(self, stream: _Stream) -> bool:
        """Go past the next instruction of a stream; return True if it was ready."""
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
        """Yield the clocks of the instructions that this one waits for in its step; None for one not visited yet."""
        for wait in instruction.waits:
            if not wait.previous_step and wait.count:
                done = self._clocks[number, wait.engine]
                yield done[wait.count - 1] if wait.count <= len(done) else None
        if instruction.direction is Direction.IN and self._counts(instruction):
            hop = self._hop(number, instruction)
            # The k-th receive of a channel follows its k-th send.
            sends, taken = self.sent.get(hop, []), len(self._received.get(hop, []))
            yield sends[taken].clock if taken < len(sends) else None

    def _counts(self, instruction: Instruction) -> bool:
        """Return True if the pass executes an instruction."""
        return not self.forward_only or serves_the_loss(instruction)

    def _note(self, number: int, instruction: Instruction, clock: _Clock, position: int) -> None:
        """Record a message that is sent, with its clock, or the position of a receive."""
        if instruction.ends(number) is None:
            return
        hop = self._hop(number, instruction)
        if instruction.direction is Direction.IN:
            self._received.setdefault(hop, []).append(position)
            return
        tensors = self.program.stages[number].tensors
        kinds = [tensors[operand.tensor].type for operand in instruction.carried]
        sender, receiver = engines_of(hop.channel.payload)
        # Receives of this channel at positions below this count are surely done.
        known = clock.get((hop.target, receiver), 0)
        received = sum(position < known for position in self._received.get(hop, []))
        done = {**clock, (number, sender): position + 1}
        forms = tuple((kind.dtype, kind.shape) for kind in kinds)
        self.sent.setdefault(hop, []).append(_Sent(forms, received, done))

    def _hop(self, number: int, instruction: Instruction) -> Hop:
        hop = instruction.hop(number, self.program.topology)
        assert hop is not None  # the verifier has refused messages between stages that are no neighbours
        return hop
