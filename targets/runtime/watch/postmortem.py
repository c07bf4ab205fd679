"""Post-mortem of a run that makes no progress: who waits for whom, and why.

From the positions of all ranks and their program it builds a wait graph. Each engine of each rank with work left is a
node; its edges go to all engines that it waits for: other engines of its rank (the program's waits), the partner of a
message, members of a collective that have not come.

    stage 0 send   ->  stage 1 recv  ->  stage 1 compute  (stopped by a signal)         an end: the process is at fault
    stage 0 send   ->  stage 1 recv  ->  stage 1 send     ->  stage 0 recv
          ^--------------------------------------------------------'                    a cycle: the program is at fault

A node needs all that it waits for, so a cycle is a deadlock. Without a cycle every path ends at a node that waits for
nothing: a process that is gone or stopped, a message that was sent and did not arrive, an instruction that takes long.
These ends are the causes.

Partners are found by counting: the k-th send of a channel belongs to its k-th receive, and the k-th collective of a
group is the same on all members. Positions are a snapshot of running processes; a verdict holds only if nothing moved
for some time (`watchdog`). Cost: (ranks x engines) nodes, and for each count one pass over a stream.
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
    from ratrain.ratrain_ir.ops.base import Payload, PeerTransfer
    from ratrain.targets.program.instruction import CountWait, Instruction
    from ratrain.targets.program.program import Program

Node: TypeAlias = tuple[Rank, Engine]
"""Engine of a rank."""

_NEVER_SO_LONG = 50.0
"""An instruction that takes this many times the longest one before is taken for stuck: a rank slowed tenfold is not."""

_SILENT_SECONDS = 8.0
"""Seconds without a heartbeat, which comes several times a second; clocks of a cluster are assumed to differ by
less."""


class Fault(Enum):
    """Kind of an end of the waits."""

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
        """True if the run cannot continue."""
        return self not in (Fault.COMPUTING, Fault.TRANSFER, Fault.OTHER_WORK)


@frozen
class HangCause:
    """End of the waits: the fault in words, and the ranks that have it."""

    fault: Fault
    text: str
    places: tuple[Rank, ...]
    seconds: float


@frozen
class Diagnosis:
    """Verdict on a run that makes no progress."""

    causes: tuple[HangCause, ...]
    ranks: tuple[str, ...]
    """one line for each rank: what it does, for how long, and which ranks it waits for"""

    @property
    def is_conclusive(self) -> bool:
        """True if the run cannot continue."""
        return any(cause.fault.is_conclusive for cause in self.causes)

    @property
    def is_other_work(self) -> bool:
        """True if all wait for ranks that start or save, which may take any time."""
        return bool(self.causes) and all(cause.fault is Fault.OTHER_WORK for cause in self.causes)

    @property
    def verdict(self) -> str:
        """Sentence that says whether the program or the machine is at fault."""
        faults = {cause.fault for cause in self.causes}
        if Fault.CYCLE in faults:
            return "a deadlock of the program: its instructions wait for each other in a circle"
        if any(fault.is_conclusive for fault in faults):
            return (
                "not a deadlock of the program: the waits form no circle, so a process, a message or the machine failed"
            )
        return "nothing is proved to be at fault: some rank or message is slow"

    def lines(self) -> list[str]:
        """Return the whole diagnosis as lines to print."""
        return [*self.ranks, *(f"cause: {cause.text}" for cause in self.causes), self.verdict]


def diagnose(
    program: Program,
    positions: Sequence[RankPosition],
    now: float,
    state_of: Callable[[RankPosition], Liveness],
) -> Diagnosis:
    """Diagnose a run from the positions of its ranks; `state_of` tells whether their processes are alive."""
    return _Inquiry(program, positions, now, state_of).diagnosis()


class _Inquiry:
    """Wait graph of a run at one moment, built by its constructor."""

    def __init__(
        self,
        program: Program,
        positions: Sequence[RankPosition],
        now: float,
        state_of: Callable[[RankPosition], Liveness],
    ) -> None:
        self.program = program
        # Clocks of machines differ: no heartbeat may lie in the future, or durations would be negative.
        self.now = max([now, *(position.heartbeat for position in positions)])
        self.at: dict[Rank, RankPosition] = {position.place: position for position in positions}
        self.states = {place: state_of(position) for place, position in self.at.items()}
        self.causes: dict[Node, HangCause] = {}
        self.waits: dict[Node, dict[Node, None]] = {}
        """engines that each engine waits for; a dict of None is a set that keeps its order"""
        for place in self.places():
            for engine in ENGINES:
                if program.stages[place.stage].streams[engine]:
                    self.visit((place, engine))

    def places(self) -> Iterable[Rank]:
        """Return all ranks of the program."""
        return self.program.topology.ranks

    # The graph

    def visit(self, node: Node) -> None:
        """Add the edges of an engine, or the cause why it has none."""
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
        """Return why a whole rank makes no progress, whatever its engines wait for; None if it does its step."""
        position = self.at.get(place)
        if position is None:
            text = f"{self.name(place)} has left no position: its process never came so far"
            return HangCause(Fault.MISSING, text, (place,), 0.0)
        state = self.states[place]
        where = f"{self.name(place)} (process {position.number}, pid {position.pid} on {position.host})"
        # A rank that has ended its last step may leave at any time.
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
        """Return the engines that an engine's next instruction waits for; None if it waits for nothing."""
        place, engine = node
        position = self.at[place]
        if position.phase in (RankPhase.BETWEEN_STEPS, RankPhase.ENDED):
            # Between steps a rank waits for all ranks that are still in the step: losses and flags are exchanged.
            late = [
                other
                for other, theirs in self.at.items()
                if theirs.step < position.step or (theirs.step == position.step and theirs.phase is RankPhase.RUNNING)
            ]
            return [(other, busy) for other in late for busy in self.working(other)]
        instruction, step = self.next_instruction(node)
        unmet = [(place, wait.engine) for wait in instruction.waits if not self.is_met(place, wait, step)]
        # Waits within the rank come first: only when they are met does the engine turn to its partner.
        if unmet or engine in (Engine.COMPUTE, Engine.HOST):
            return unmet or None
        if position.engines[Engine.COMPUTE].running:
            return [(place, Engine.COMPUTE)]  # its thread serves messages only between computations
        if instruction.peer is None and not instruction.group:
            return None  # a store to, or fetch from, another memory of the rank
        return self.members_to_come(node) if instruction.group else self.partner(node)

    def working(self, place: Rank) -> list[Engine]:
        """Return the engines of a rank that have not done all their instructions of the step."""
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
        # An engine exactly at a step's end has either finished this step or not begun it: the count of steps tells.
        return unfinished or behind or [Engine.COMPUTE]

    def partner(self, node: Node) -> list[Node] | None:
        """Return the other end of a message; None if it has done its part or is doing it."""
        place, _ = node
        instruction, _ = self.next_instruction(node)
        assert instruction.peer is not None
        other: Node = (place._replace(stage=instruction.peer), _other_engine(instruction))
        mine = self.messages(node, instruction.peer, instruction)
        theirs = self.messages(other, place.stage, instruction)
        # The partner has completed more messages of this channel, so this one too.
        if theirs > mine:
            return None
        met = theirs == mine and self.is_at(other, lambda head: _is_message(head, place.stage, instruction))
        return None if met else [other]

    def members_to_come(self, node: Node) -> list[Node] | None:
        """Return the members of a collective that have not begun it; None if all have."""
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
        """Return True if an engine is ready for a matching instruction, and its rank's thread can serve it."""
        place = node[0]
        if place not in self.at or self.cause_of_rank(place) is not None:
            return False
        position = self.at[place]
        if position.phase is not RankPhase.RUNNING or position.engines[Engine.COMPUTE].running:
            return False
        instruction, step = self.next_instruction(node)
        return matches(instruction) and all(self.is_met(place, wait, step) for wait in instruction.waits)

    def members(self, place: Rank, group: str) -> Sequence[Rank]:
        """Return the ranks of a rank's group."""
        return self.program.topology.members(Group(group), place)

    # Counting

    def next_instruction(self, node: Node) -> tuple[Instruction, int]:
        """Return the instruction at the head of an engine, and the step of the process that it belongs to."""
        place, engine = node
        stream = self.program.stages[place.stage].streams[engine]
        step, index = divmod(self.at[place].engines[engine].completed, len(stream))
        return stream[index], step

    def is_met(self, place: Rank, wait: CountWait, step: int) -> bool:
        """Return True if a wait of an instruction of a step is over."""
        at = step - 1 if wait.previous_step else step
        length = len(self.program.stages[place.stage].streams[wait.engine])
        return at < 0 or self.at[place].engines[wait.engine].completed >= at * length + wait.count

    def messages(self, node: Node, peer: int, like: Instruction) -> int:
        """Return how many messages with stage `peer`, on the channel of `like`, an engine has completed."""
        return self.count(node, lambda instruction: _is_message(instruction, peer, like))

    def meetings(self, node: Node, group: str) -> int:
        """Return how many collectives of a group a rank has completed."""
        return self.count(node, lambda instruction: instruction.group == group)

    def count(self, node: Node, matches: Callable[[Instruction], bool]) -> int:
        """Return how many matching instructions an engine has completed, over all steps."""
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
        """Return True if two ranks run in the same process."""
        mine, theirs = self.at.get(one), self.at.get(other)
        return mine is not None and theirs is not None and (mine.host, mine.pid) == (theirs.host, theirs.pid)

    def is_shared(self, place: Rank) -> bool:
        """Return True if a rank's process runs other ranks too, and may be working for one of them."""
        return any(other != place and self.are_one_process(place, other) for other in self.at)

    # Words

    def cause_of_instruction(self, node: Node) -> HangCause:
        """Return why an instruction that waits for nothing, on a rank that does its step, has not ended.

        On compute and host: STUCK if it has its turn and takes far longer than any before, else COMPUTING. On others:
        LOST_MESSAGE if it receives what another process has sent, else TRANSFER.
        """
        place, engine = node
        position = self.at[place]
        seconds = self.now - position.engines[engine].since
        text = f"{self.name(place)} {self.doing_instruction(node)}"
        if engine in (Engine.COMPUTE, Engine.HOST):
            longest = position.longest_compute
            # In a shared process a ready instruction may wait for its turn behind another rank's: that is not stuck.
            has_its_turn = position.engines[engine].running or not self.is_shared(place)
            if longest and has_its_turn and seconds > _NEVER_SO_LONG * longest:
                text += f"; none took longer than {longest:.2g} s before"
                return HangCause(Fault.STUCK, text, (place,), seconds)
            return HangCause(Fault.COMPUTING, text, (place,), seconds)
        instruction, _ = self.next_instruction(node)
        if instruction.direction is Direction.IN and instruction.peer is not None:
            sender: Node = (place._replace(stage=instruction.peer), _other_engine(instruction))
            # Within a process no message is in transit: it is there, and the receiver's turn comes.
            if not self.are_one_process(place, sender[0]) and self.messages(
                sender, place.stage, instruction
            ) > self.messages(node, instruction.peer, instruction):
                text += f"; {self.name(sender[0])} has sent the message: it is lost or under way"
                return HangCause(Fault.LOST_MESSAGE, text, (place, sender[0]), seconds)
        what = "all members are there" if instruction.group else "both ends are there"
        return HangCause(Fault.TRANSFER, f"{text}; {what}", (place,), seconds)

    def name(self, place: Rank) -> str:
        """Return the name of a rank in messages."""
        return self.program.topology.name(place)

    def doing(self, place: Rank) -> str:
        """Describe what a rank does, or did last."""
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
        """Return the engine that represents a rank: compute if it runs, else the one that has been busy longest."""
        position = self.at[place]
        engines = self.working(place)
        if Engine.COMPUTE in engines and position.engines[Engine.COMPUTE].running:
            return Engine.COMPUTE
        running = [engine for engine in engines if position.engines[engine].running]
        return min(running or engines, key=lambda engine: position.engines[engine].since)

    def doing_instruction(self, node: Node) -> str:
        """Describe an engine's next instruction."""
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
        """Describe what a rank does, and which ranks it waits for."""
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
        # An end that nobody waits for explains nothing. If all ends are like this, show them all.
        ends = [cause for node, cause in self.causes.items() if self.is_waited_for(node)]
        ends = ends or list(self.causes.values())
        distinct = {cause.text: cause for cause in ends}.values()
        causes = sorted(distinct, key=lambda cause: (not cause.fault.is_conclusive, -cause.seconds))
        # A proved fault explains the slow ones: drop those.
        if causes and causes[0].fault.is_conclusive:
            causes = [cause for cause in causes if cause.fault.is_conclusive]
        return Diagnosis(tuple(causes), lines)

    def is_waited_for(self, node: Node) -> bool:
        """Return True if another rank waits for this node, directly or not, or if the fault is conclusive by itself."""
        if self.causes[node].fault in (Fault.GONE, Fault.STOPPED, Fault.MISSING, Fault.LOST_MESSAGE, Fault.STUCK):
            return True
        return any(other[0] != node[0] for other in all_behind(self.waits, node))

    def longest_wait(self, nodes: Sequence[Node]) -> float:
        """Return the seconds of the longest of some waits."""
        return max(self.now - self.at[place].engines[engine].since for place, engine in nodes)

    def node_name(self, node: Node) -> str:
        """Describe a rank's engine and its instruction."""
        place, engine = node
        return f"{self.name(place)} {engine.value} '{self.next_instruction(node)[0].title}'"


def only_gone(numbers: Collection[int]) -> Callable[[RankPosition], Liveness]:
    """Return a `state_of` by which exactly the ranks of these numbers are gone.

    It describes the moment when the first ranks were lost, before the launcher ended the others.
    """
    return lambda position: Liveness.GONE if position.number in numbers else Liveness.ALIVE


def _is_message(instruction: Instruction, peer: int, like: Instruction) -> bool:
    """Return True if an instruction is a message with stage `peer`, on the channel of message `like`."""
    return (instruction.peer, _payload(instruction), instruction.chunk) == (peer, _payload(like), like.chunk)


def _payload(instruction: Instruction) -> Payload | PeerTransfer | None:
    return payload_of(instruction.keyword, instruction.variant)


def _other_engine(message: Instruction) -> Engine:
    """Return the engine at the other end of a message."""
    payload = _payload(message)
    assert payload is not None  # the verifier refuses messages that carry nothing
    sender, receiver = engines_of(payload)
    return receiver if message.direction is Direction.OUT else sender
