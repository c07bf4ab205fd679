"""Who waits for whom, and why: from the positions of all ranks and the program they run.

Every engine of every rank that has work left is a node; it waits for other engines of its rank (the program's waits), for the
partner of a message, or for members of a collective that have not come. What waits needs all it waits for, so a cycle is a deadlock:
the program is at fault. Without one, following the waits ends at what does not wait: a process that is gone or stopped, a message that was sent
and did not arrive, an instruction that takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from ratrain.ratrain_ir.analysis.wait_graph import all_behind, circle_of
from ratrain.ratrain_ir.ops.base import ENGINES, Direction, Engine, Group
from ratrain.ratrain_ir.ops.messages import engines_of, payload_of
from ratrain.ratrain_ir.topology import Rank
from ratrain.targets.runtime.watch.liveness import Liveness
from ratrain.targets.runtime.watch.positions import RankPhase, RankPosition

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import GuestWay, Payload
    from ratrain.targets.program.instruction import CountWait, Instruction
    from ratrain.targets.program.program import Program

Node: TypeAlias = tuple[Rank, Engine]

_NEVER_SO_LONG = 50.0
"""An instruction that takes this many times the longest before it does not come back: a rank slowed tenfold still does."""

_SILENT_SECONDS = 8.0
"""Without a heartbeat, which comes several times a second; clocks of a cluster are assumed to differ by less."""


class Fault(Enum):
    """What the end of the waits is."""

    CYCLE = "cycle"
    GONE = "gone"
    STOPPED = "stopped"
    MISSING = "missing"
    LOST_MESSAGE = "lost message"
    STUCK = "stuck"
    COMPUTING = "computing"
    TRANSFER = "transfer"
    OTHER_WORK = "other work"

    @property
    def is_conclusive(self) -> bool:
        """Whether the run cannot go on."""
        return self not in (Fault.COMPUTING, Fault.TRANSFER, Fault.OTHER_WORK)


@frozen
class HangCause:
    """One end of the waits: what is the matter, in words, and with which ranks."""

    fault: Fault
    text: str
    places: tuple[Rank, ...]
    seconds: float


@frozen
class Diagnosis:
    """What can be said of a run that makes no progress."""

    causes: tuple[HangCause, ...]
    ranks: tuple[str, ...]
    """one line a rank: where it is, how long, what it waits for"""

    @property
    def is_conclusive(self) -> bool:
        """Whether the run cannot go on."""
        return any(cause.fault.is_conclusive for cause in self.causes)

    @property
    def is_other_work(self) -> bool:
        """Whether all wait for ranks that start or save: how long that takes, nobody knows."""
        return bool(self.causes) and all(cause.fault is Fault.OTHER_WORK for cause in self.causes)

    @property
    def verdict(self) -> str:
        """Whether the program or the machine is at fault."""
        faults = {cause.fault for cause in self.causes}
        if Fault.CYCLE in faults:
            return "a deadlock of the program: its instructions wait for each other in a circle"
        if any(fault.is_conclusive for fault in faults):
            return "not a deadlock of the program: a process or a message was lost"
        return "nothing is proved to be at fault: some rank or message is slow"

    def lines(self) -> list[str]:
        """All of it, to print."""
        return [*self.ranks, *(f"cause: {cause.text}" for cause in self.causes), self.verdict]


def diagnose(
    program: Program,
    positions: Sequence[RankPosition],
    now: float,
    state_of: Callable[[RankPosition], Liveness],
) -> Diagnosis:
    """What the positions of a run's ranks say; `state_of` tells whether their processes are alive."""
    return _Inquiry(program, positions, now, state_of).diagnosis()


class _Inquiry:
    def __init__(
        self,
        program: Program,
        positions: Sequence[RankPosition],
        now: float,
        state_of: Callable[[RankPosition], Liveness],
    ) -> None:
        self.program = program
        self.now = max([now, *(position.heartbeat for position in positions)])
        self.at: dict[Rank, RankPosition] = {position.place: position for position in positions}
        self.states = {place: state_of(position) for place, position in self.at.items()}
        self.causes: dict[Node, HangCause] = {}
        self.waits: dict[Node, dict[Node, None]] = {}
        """of each engine, those that it waits for"""
        for place in self.places():
            for engine in ENGINES:
                if program.stages[place.stage].streams[engine]:
                    self.visit((place, engine))

    def places(self) -> Iterable[Rank]:
        """All ranks of the program."""
        return self.program.topology.ranks

    # The graph

    def visit(self, node: Node) -> None:
        """Enter what an engine waits for, or why it does not wait."""
        waits = self.waits.setdefault(node, {})
        whole = self.cause_of_rank(node[0])
        if whole is not None:
            self.causes[node] = whole
            return
        targets = self.targets(node)
        if targets is None:
            self.causes[node] = self.cause_of_instruction(node)
        for target in targets or ():
            self.waits.setdefault(target, {})
            waits[target] = None

    def cause_of_rank(self, place: Rank) -> HangCause | None:
        """Why a whole rank makes no progress, whatever its engines wait for."""
        position = self.at.get(place)
        if position is None:
            text = f"{self.name(place)} has left no position: its process never came so far"
            return HangCause(Fault.MISSING, text, (place,), 0.0)
        state = self.states[place]
        where = f"{self.name(place)} (process {position.number}, pid {position.pid} on {position.host})"
        if state is Liveness.GONE and position.phase is not RankPhase.ENDED:
            text = f"{where} is gone: it was killed, or ended without a word, {self.doing(place)}"
            return HangCause(Fault.GONE, text, (place,), self.now - position.heartbeat)
        silence = self.now - position.heartbeat
        if state is Liveness.UNKNOWN and silence > _SILENT_SECONDS and position.phase is not RankPhase.ENDED:
            text = f"{where} has given no sign for {silence:.0f} s: it or its machine is gone, {self.doing(place)}"
            return HangCause(Fault.GONE, text, (place,), silence)
        if state is Liveness.STOPPED:
            text = f"{where} is stopped by a signal, {self.doing(place)}"
            return HangCause(Fault.STOPPED, text, (place,), self.now - position.heartbeat)
        if position.phase in (RankPhase.STARTING, RankPhase.SAVING):
            text = f"{where} is {self.doing(place)}"
            return HangCause(Fault.OTHER_WORK, text, (place,), self.now - position.since)
        return None

    def targets(self, node: Node) -> list[Node] | None:
        """What an engine's next instruction waits for; None where it waits for nothing."""
        place, engine = node
        position = self.at[place]
        if position.phase in (RankPhase.BETWEEN_STEPS, RankPhase.ENDED):
            late = [
                other
                for other, theirs in self.at.items()
                if theirs.step < position.step or (theirs.step == position.step and theirs.phase is RankPhase.RUNNING)
            ]
            return [(other, busy) for other in late for busy in self.working(other)]
        instruction, step = self.next_instruction(node)
        unmet = [(place, wait.engine) for wait in instruction.waits if not self.is_met(place, wait, step)]
        if unmet or engine in (Engine.COMPUTE, Engine.HOST):
            return unmet or None
        if position.engines[Engine.COMPUTE].running:
            return [(place, Engine.COMPUTE)]  # its thread looks after messages when it has computed
        if instruction.peer is None and not instruction.group:
            return None  # what is stored in another memory of the rank, or fetched from there
        return self.members_to_come(node) if instruction.group else self.partner(node)

    def working(self, place: Rank) -> list[Engine]:
        """Engines of a rank that have not done all their instructions of the step."""
        stage, position = self.program.stages[place.stage], self.at[place]
        steps = max(position.engines[e].completed // len(stage.streams[e]) for e in ENGINES if stage.streams[e])
        unfinished = [
            engine
            for engine in ENGINES
            if stage.streams[engine]
            and (position.engines[engine].running or position.engines[engine].completed % len(stage.streams[engine]))
        ]
        behind = [
            engine
            for engine in ENGINES
            if stage.streams[engine] and position.engines[engine].completed // len(stage.streams[engine]) < steps
        ]
        return unfinished or behind or [Engine.COMPUTE]

    def partner(self, node: Node) -> list[Node] | None:
        """The other end of a message, unless it has done its part or does it now."""
        place, _ = node
        instruction, _ = self.next_instruction(node)
        assert instruction.peer is not None
        other: Node = (place._replace(stage=instruction.peer), _other_engine(instruction))
        mine = self.messages(node, instruction.peer, instruction)
        theirs = self.messages(other, place.stage, instruction)
        if theirs > mine:
            return None
        met = theirs == mine and self.is_at(other, lambda head: _is_message(head, place.stage, instruction))
        return None if met else [other]

    def members_to_come(self, node: Node) -> list[Node] | None:
        """The members of a collective that have not begun it."""
        place, engine = node
        group = self.next_instruction(node)[0].group
        mine = self.meetings(node, group)
        to_come: list[Node] = []
        for member in self.members(place, group):
            other: Node = (member, engine)
            theirs = self.meetings(other, group)
            met = theirs == mine and self.is_at(other, lambda head: head.group == group)
            if member != place and theirs <= mine and not met:
                to_come.append(other)
        return to_come or None

    def is_at(self, node: Node, matches: Callable[[Instruction], bool]) -> bool:
        """Whether an engine is ready for an instruction of a kind, and its rank's thread looks after it."""
        place = node[0]
        if place not in self.at or self.cause_of_rank(place) is not None:
            return False
        position = self.at[place]
        if position.phase is not RankPhase.RUNNING or position.engines[Engine.COMPUTE].running:
            return False
        instruction, step = self.next_instruction(node)
        return matches(instruction) and all(self.is_met(place, wait, step) for wait in instruction.waits)

    def members(self, place: Rank, group: str) -> Sequence[Rank]:
        """The ranks of a rank's group."""
        return self.program.topology.members(Group(group), place)

    # Counting

    def next_instruction(self, node: Node) -> tuple[Instruction, int]:
        """The instruction that heads an engine, and the step of the process it belongs to."""
        place, engine = node
        stream = self.program.stages[place.stage].streams[engine]
        step, index = divmod(self.at[place].engines[engine].completed, len(stream))
        return stream[index], step

    def is_met(self, place: Rank, wait: CountWait, step: int) -> bool:
        """Whether what an instruction of a step waits for has completed."""
        at = step - 1 if wait.previous_step else step
        length = len(self.program.stages[place.stage].streams[wait.engine])
        return at < 0 or self.at[place].engines[wait.engine].completed >= at * length + wait.count

    def messages(self, node: Node, peer: int, like: Instruction) -> int:
        """Messages with a stage, on the channel of another message, that an engine has completed."""
        return self.count(node, lambda instruction: _is_message(instruction, peer, like))

    def meetings(self, node: Node, group: str) -> int:
        """Collectives of a group that a rank has completed."""
        return self.count(node, lambda instruction: instruction.group == group)

    def count(self, node: Node, matches: Callable[[Instruction], bool]) -> int:
        """Completed instructions of a kind, over all steps."""
        place, engine = node
        if place not in self.at:
            return 0
        stream = self.program.stages[place.stage].streams[engine]
        if not stream:
            return 0
        steps, index = divmod(self.at[place].engines[engine].completed, len(stream))
        matching = [matches(instruction) for instruction in stream]
        return steps * sum(matching) + sum(matching[:index])

    def are_one_process(self, one: Rank, other: Rank) -> bool:
        """Whether two ranks run in the same process."""
        mine, theirs = self.at.get(one), self.at.get(other)
        return mine is not None and theirs is not None and (mine.host, mine.pid) == (theirs.host, theirs.pid)

    def is_shared(self, place: Rank) -> bool:
        """Whether a rank's process runs others too, and may be at work for one of them."""
        return any(other != place and self.are_one_process(place, other) for other in self.at)

    # Words

    def cause_of_instruction(self, node: Node) -> HangCause:
        """Why an instruction that waits for nothing has not ended."""
        place, engine = node
        position = self.at[place]
        seconds = self.now - position.engines[engine].since
        text = f"{self.name(place)} {self.doing_instruction(node)}"
        if engine in (Engine.COMPUTE, Engine.HOST):
            longest = position.longest_compute
            has_its_turn = position.engines[engine].running or not self.is_shared(place)
            if longest and has_its_turn and seconds > _NEVER_SO_LONG * longest:
                text += f"; none took longer than {longest:.2g} s before"
                return HangCause(Fault.STUCK, text, (place,), seconds)
            return HangCause(Fault.COMPUTING, text, (place,), seconds)
        instruction, _ = self.next_instruction(node)
        if instruction.direction is Direction.IN and instruction.peer is not None:
            sender: Node = (place._replace(stage=instruction.peer), _other_engine(instruction))
            # Within a process nothing is under way: the message is there, and the receiver's turn comes.
            if not self.are_one_process(place, sender[0]) and self.messages(
                sender, place.stage, instruction
            ) > self.messages(node, instruction.peer, instruction):
                text += f"; {self.name(sender[0])} has sent the message: it is lost or under way"
                return HangCause(Fault.LOST_MESSAGE, text, (place, sender[0]), seconds)
        what = "all members are there" if instruction.group else "both ends are there"
        return HangCause(Fault.TRANSFER, f"{text}; {what}", (place,), seconds)

    def name(self, place: Rank) -> str:
        """A rank as messages call it."""
        return self.program.topology.name(place)

    def doing(self, place: Rank) -> str:
        """What a rank does, or did last."""
        position = self.at[place]
        if position.phase is RankPhase.STARTING:
            return "starting"
        if position.phase is RankPhase.SAVING:
            return f"saving after step {position.step} for {self.now - position.since:.1f} s"
        if position.phase is RankPhase.BETWEEN_STEPS:
            return f"between steps, after step {position.step}"
        if position.phase is RankPhase.ENDED:
            return f"at its end, after step {position.step}"
        return self.doing_instruction((place, self.shown_engine(place)))

    def shown_engine(self, place: Rank) -> Engine:
        """The engine that says best where a rank is: one that computes, else the one that has been under way longest."""
        position = self.at[place]
        engines = self.working(place)
        if Engine.COMPUTE in engines and position.engines[Engine.COMPUTE].running:
            return Engine.COMPUTE
        running = [engine for engine in engines if position.engines[engine].running]
        return min(running or engines, key=lambda engine: position.engines[engine].since)

    def doing_instruction(self, node: Node) -> str:
        """An engine's next instruction in words."""
        place, engine = node
        position = self.at[place]
        instruction, _ = self.next_instruction(node)
        micro_batch = "" if instruction.micro_batch is None else f", micro-batch {instruction.micro_batch}"
        progress = position.engines[engine]
        verb = "in" if progress.running else "before"
        since = progress.since or position.since
        return (
            f"{verb} '{instruction.title}' (step {position.step}{micro_batch}) for {max(0.0, self.now - since):.1f} s"
        )

    def rank_line(self, place: Rank) -> str:
        """Where a rank is, and which ranks it waits for."""
        position = self.at.get(place)
        if position is None:
            return f"{self.name(place)}: no position"
        line = f"{self.name(place)} (process {position.number}): {self.doing(place)}"
        if self.states[place] in (Liveness.STOPPED, Liveness.GONE) and position.phase is not RankPhase.ENDED:
            return f"{line}; {self.states[place].value}"
        others = {target[0] for engine in ENGINES for target in self.waits.get((place, engine), ())} - {place}
        names = ", ".join(map(self.name, sorted(others)))
        return f"{line}; waits for {names}" if names else line

    # The verdict

    def diagnosis(self) -> Diagnosis:
        """Follow the waits to their ends."""
        lines = tuple(self.rank_line(place) for place in self.places())
        cycle = circle_of(self.waits)
        if cycle:
            links = [f"{self.node_name(node)}" for node in cycle]
            text = " waits for ".join([*links, links[0]])
            places = tuple(dict.fromkeys(node[0] for node in cycle))
            return Diagnosis((HangCause(Fault.CYCLE, text, places, self.longest_wait(cycle)),), lines)
        ends = [cause for node, cause in self.causes.items() if self.is_waited_for(node)]
        ends = ends or list(self.causes.values())
        distinct = {cause.text: cause for cause in ends}.values()
        causes = sorted(distinct, key=lambda cause: (not cause.fault.is_conclusive, -cause.seconds))
        if causes and causes[0].fault.is_conclusive:
            causes = [cause for cause in causes if cause.fault.is_conclusive]
        return Diagnosis(tuple(causes), lines)

    def is_waited_for(self, node: Node) -> bool:
        """Whether another rank waits for this, directly or through others; or the whole rank is gone."""
        if self.causes[node].fault in (Fault.GONE, Fault.STOPPED, Fault.MISSING, Fault.LOST_MESSAGE, Fault.STUCK):
            return True
        return any(other[0] != node[0] for other in all_behind(self.waits, node))

    def longest_wait(self, nodes: Sequence[Node]) -> float:
        """Seconds that the oldest of some waits has lasted."""
        return max(self.now - self.at[place].engines[engine].since for place, engine in nodes)

    def node_name(self, node: Node) -> str:
        """A rank's engine and its instruction."""
        place, engine = node
        return f"{self.name(place)} {engine.value} '{self.next_instruction(node)[0].title}'"


def only_gone(numbers: Collection[int]) -> Callable[[RankPosition], Liveness]:
    """The states of ranks when the first of them, whose numbers are given, were gone."""
    return lambda position: Liveness.GONE if position.number in numbers else Liveness.ALIVE


def _is_message(instruction: Instruction, peer: int, like: Instruction) -> bool:
    """Whether an instruction is a message with a stage, on the channel of another message."""
    return (instruction.peer, _payload(instruction), instruction.chunk) == (peer, _payload(like), like.chunk)


def _payload(instruction: Instruction) -> Payload | GuestWay | None:
    return payload_of(instruction.keyword, instruction.variant)


def _other_engine(message: Instruction) -> Engine:
    """The engine at the other end of a message."""
    payload = _payload(message)
    assert payload is not None  # the verifier has refused what carries nothing
    sender, receiver = engines_of(payload)
    return receiver if message.direction is Direction.OUT else sender
