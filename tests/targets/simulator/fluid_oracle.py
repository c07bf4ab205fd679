"""A second simulator, plain and slow: no heap, no arrays, all rates found anew at every event. It shares no code with the first.

It reads a program's streams by themselves. Works are fractions of what is left; time advances by the smallest time in which any ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.ops.base import ENGINES, Engine

if TYPE_CHECKING:
    from ratrain.targets.machine.resource_work import Bandwidths, ResourceWork
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program

Place = tuple[int, Engine]
Flow = tuple[tuple[tuple[str, int], ...], float]
"""The resources it passes through, and its own limit."""


Channel = tuple[int | None, int | None, str, int | None]
"""Sender, receiver, payload, chunk."""


def max_min(flows: dict[object, Flow], capacities: dict[str, float]) -> dict[object, float]:
    """Max-min fair rates, by their definition: raise all that can still rise by the same small amount, until none can."""
    rates = dict.fromkeys(flows, 0.0)
    rising = set(flows)
    while rising:
        room = []
        for resource in {r for flow in rising for r in flows[flow][0]}:
            users = [flow for flow in flows if resource in flows[flow][0]]
            free = capacities[resource[0]] - sum(rates[flow] for flow in users)
            room.append((free / sum(flow in rising for flow in users), resource))
        limits = [(flows[flow][1] - rates[flow], flow) for flow in rising]
        step = max(0.0, min([r for r, _ in room] + [r for r, _ in limits]))
        for flow in rising:
            rates[flow] += step
        full = {resource for r, resource in room if r <= step * (1 + 1e-12)}
        held = {flow for r, flow in limits if r <= step * (1 + 1e-12)}
        rising = {flow for flow in rising if flow not in held and not full & set(flows[flow][0])}
    return rates


def way(instruction: Instruction) -> tuple[str, int | None]:
    """What tells the channels between two stages apart: payload and chunk."""
    return instruction.variant, instruction.chunk


class Oracle:
    """Runs a program; `times[stage, engine]` is the list of (start, end) of its instructions."""

    def __init__(
        self,
        program: Program,
        work_of: Callable[[int, Engine, Instruction], ResourceWork],
        bandwidths: Bandwidths,
        *,
        rendezvous: bool,
        steps: int,
    ) -> None:
        self.program, self.work_of, self.bandwidths = program, work_of, bandwidths
        self.rendezvous, self.steps = rendezvous, steps
        self.now = 0.0
        self.times: dict[Place, list[tuple[float, float]]] = {
            (s, e): [] for s in range(len(program.stages)) for e in ENGINES
        }
        self.running: dict[Place, float] = {}
        """start of what runs"""
        self.left: dict[tuple[Place, str], float] = {}
        """work that is not done"""
        self.partners: dict[Place, set[Place]] = {}
        """who ends with whom"""
        self.sent: dict[Channel, list[bool]] = {}
        """by channel, whether each message that has started has arrived"""
        self.received: dict[Channel, int] = {}
        self.receiving: dict[Place, tuple[Channel, int]] = {}

    def run(self) -> None:
        while True:
            while sum(self.try_start(place) for place in self.times):
                pass
            if not self.running:
                return
            self.advance()

    def stream(self, place: Place) -> list[Instruction]:
        return self.program.stages[place[0]].streams[place[1]]

    def head(self, place: Place) -> Instruction | None:
        """The next instruction of a place, if all it waits for on its stage is done."""
        stream, done = self.stream(place), len(self.times[place])
        if place in self.running or done >= self.steps * len(stream):
            return None
        instruction = stream[done % len(stream)]
        step = done // len(stream)
        for wait in instruction.waits:
            at = step - wait.previous_step
            other = (place[0], wait.engine)
            if at >= 0 and len(self.times[other]) < at * len(self.stream(other)) + wait.count:
                return None
        return instruction

    def try_start(self, place: Place) -> bool:
        instruction = self.head(place)
        if instruction is None:
            return False
        stage = place[0]
        if instruction.group in ("ends", "all"):
            streams = [held.streams[Engine.COLLECTIVE] for held in self.program.stages]
            members = [s for s, items in enumerate(streams) if any(i.group == instruction.group for i in items)]
            places = {(s, Engine.COLLECTIVE) for s in members}
            heads = [self.head(p) for p in places]
            if any(h is None or h.title_without_blocks != instruction.title_without_blocks for h in heads):
                return False
            return self.start(places)
        if instruction.keyword == "send" and self.rendezvous:
            other = (instruction.peer, Engine.RECV)
            partner = self.head(other)
            if partner is None or (partner.peer, *way(partner)) != (stage, *way(instruction)):
                return False
            return self.start({place, other})
        if instruction.keyword == "send":
            self.sent.setdefault((stage, instruction.peer, *way(instruction)), []).append(False)
        if instruction.keyword == "recv":
            channel = (instruction.peer, stage, *way(instruction))
            number = self.received.get(channel, 0)
            if self.rendezvous or number >= len(self.sent.get(channel, [])):
                return False
            self.received[channel] = number + 1
            self.receiving[place] = (channel, number)
        return self.start({place})

    def start(self, places: set[Place]) -> bool:
        for place in places:
            instruction = self.stream(place)[len(self.times[place]) % len(self.stream(place))]
            work = self.work_of(*place, instruction)
            self.running[place] = self.now
            self.partners[place] = places
            self.left[place, "seconds"] = work.seconds
            self.left[place, "ddr"] = work.ddr_bytes
            for number, flow in enumerate(work.flows):
                self.left[place, f"link {number}"] = flow.nbytes
        return True

    def flow(self, place: Place, kind: str) -> Flow:
        stage, engine = place
        if kind == "seconds":
            return (), 1.0
        if kind == "ddr":
            return (("ddr", stage),), self.bandwidths.host if engine is Engine.HOST else float("inf")
        instruction = self.stream(place)[len(self.times[place]) % len(self.stream(place))]
        target = instruction.peer if instruction.keyword == "send" else stage
        flow = self.work_of(stage, engine, instruction).flows[int(kind.removeprefix("link "))]
        through = [] if flow.link is None else [(f"out {flow.link}", stage), (f"in {flow.link}", target)]
        for left in flow.uplinks:
            link = self.bandwidths.links[left]
            if link.uplink < float("inf"):
                through += [(f"leaving {left}", stage // link.stages), (f"entering {left}", target // link.stages)]
        return tuple(through), float("inf")

    def capacities(self) -> dict[str, float]:
        found = {"ddr": self.bandwidths.ddr}
        for level, link in enumerate(self.bandwidths.links):
            found |= {f"{way} {level}": link.bandwidth for way in ("out", "in")}
            found |= {f"{way} {level}": link.uplink for way in ("leaving", "entering")}
        return found

    def advance(self) -> None:
        flows = {key: self.flow(*key) for key, left in self.left.items() if left > 0}
        for key in [key for key, (through, limit) in flows.items() if not through and limit == float("inf")]:
            self.left[key] = 0.0
            del flows[key]
        rates = max_min(flows, self.capacities())
        passed = min((self.left[key] / rates[key] for key in flows), default=0.0)
        if not any(self.done(place) for place in self.running):
            self.now += passed
            for key in flows:
                rest = self.left[key] - rates[key] * passed
                self.left[key] = rest if rest > 1e-12 * rates[key] * max(self.now, passed) else 0.0
        for place in [p for p in self.running if self.done(p)]:
            instruction = self.stream(place)[len(self.times[place]) % len(self.stream(place))]
            self.times[place].append((self.running.pop(place), self.now))
            if instruction.keyword == "send" and not self.rendezvous:
                arrived = self.sent[(place[0], instruction.peer, *way(instruction))]
                arrived[arrived.index(False)] = True
            for key in [key for key in self.left if key[0] == place]:
                del self.left[key]
            self.receiving.pop(place, None)

    def done(self, place: Place) -> bool:
        """Whether all works of what runs at a place, and of all that ends with it, have ended."""
        if place in self.receiving:
            channel, number = self.receiving[place]
            if not self.sent[channel][number]:
                return False
        return not any(left > 0 for (p, _), left in self.left.items() if p in self.partners[place])
