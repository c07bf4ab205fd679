"""A collective message by message: what the closed forms of `collective_cost` are checked against.

Every message of every member is an event. It begins when its sender and its receiver are both at its round, waits for its latency and
the host's work, then its bytes pass through ports: the sender's link outwards and the receiver's inwards, of the innermost group that
holds both, and the uplinks of the groups that it leaves and enters. A member is at its next round when its own message of this one has
arrived and what it is to receive is there; nobody waits for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ratrain.ratrain_ir.support.loops import part
from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from ratrain.targets.machine.collective_cost import Algorithm
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.placement import Members
    from ratrain.targets.simulator.flat_program import Float64s, Int64s

_ARRIVED, _WAITS, _OVERHEAD, _FLOWS = range(4)
"""What the message of a member is at; one that sends nothing counts as having arrived."""


class _Messages(NamedTuple):
    """What is sent in each round."""

    targets: Int64s
    """[rounds, members], -1 where a member sends nothing"""
    nbytes: Float64s
    """of a message, by round"""
    sources: Int64s
    """[rounds, members], -1 where a member receives nothing"""


class _Ports(NamedTuple):
    """What bytes pass through: by level and member two links, outwards and inwards; by level and group two uplinks."""

    within: Int64s
    """members of a group, by level"""
    overheads: Float64s
    """seconds of a message, bytes apart, by level"""
    capacities: Float64s
    """bytes a second"""
    users: Int64s
    """[ports, members]: whose messages pass through now"""
    counts: Int64s
    """how many those are"""
    free: Float64s
    """when a port that serves one after the other has served all"""


class _State(NamedTuple):
    """By member: its round, and its message."""

    rounds: Int64s
    phases: Int64s
    remaining: Float64s
    rates: Float64s
    since: Float64s
    received: Int64s
    """whether what it receives in its round is there, or it receives nothing"""
    ports: Int64s
    """[members, ports of a message], -1 for none"""
    heap: Int64s
    """members by the time of their message's next event, earliest first"""
    places: Int64s
    """where in it each is, -1 nowhere"""
    times: Float64s
    size: Int64s
    """[1]: of the heap"""


def message_seconds(algorithm: Algorithm, members: Members, machine: Machine, *, in_turn: bool = False) -> float:
    """Seconds until the last message of a collective has arrived; staging in chunks is left out.

    A port is shared evenly by the messages that pass through it at once, or, `in_turn`, serves them one after the other.
    """
    count, levels = members.count, len(members.within)
    targets = np.array(
        [each.pattern.targets(number, count) for each in algorithm.rounds for number in range(each.count)], np.int64
    )
    nbytes = np.array([each.message_bytes for each in algorithm.rounds for _ in range(each.count)], float)
    sources = np.full_like(targets, -1)
    at, sender = np.nonzero(targets >= 0)
    sources[at, targets[at, sender]] = sender
    uplinks = [*members.uplinks, np.inf]
    capacities = np.repeat([*(link.bandwidth for link in members.links), *uplinks], 2 * count)
    overheads = [link.latency + machine.message_cost + machine.round_skew for link in members.links]
    most = max((1, *members.within[:-1]))
    ports = _Ports(
        np.array(members.within, np.int64),
        np.array(overheads),
        capacities,
        np.zeros((len(capacities), 2 * most), np.int64),
        np.zeros(len(capacities), np.int64),
        np.zeros(len(capacities)),
    )
    state = _State(
        np.full(count, -1, np.int64),
        np.full(count, _ARRIVED, np.int64),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count),
        np.ones(count, np.int64),
        np.full((count, 2 * levels), -1, np.int64),
        np.zeros(count, np.int64),
        np.full(count, -1, np.int64),
        np.zeros(count),
        np.zeros(1, np.int64),
    )
    return float(_run(_Messages(targets, nbytes, sources), ports, state, in_turn))


@native
def _run(messages: _Messages, ports: _Ports, state: _State, in_turn: bool) -> float:
    now = 0.0
    for member in range(len(state.rounds)):
        _go_on(messages, ports, state, member, now)
    while state.size[0]:
        member = _take_first(state)
        now = state.times[member]
        if state.phases[member] == _OVERHEAD:
            _let_flow(messages, ports, state, member, now, in_turn)
            continue
        target = messages.targets[state.rounds[member], member]
        state.phases[member], state.received[target] = _ARRIVED, 1
        if not in_turn:
            _leave_ports(ports, state, member, now)
        _go_on(messages, ports, state, member, now)
        _go_on(messages, ports, state, target, now)
    return now


@part
def _go_on(messages: _Messages, ports: _Ports, state: _State, member: int, now: float) -> None:
    """Take a member to its next round, and on through those in which it has no part, if it has done with this one."""
    while state.phases[member] == _ARRIVED and state.received[member]:
        state.rounds[member] += 1
        number = state.rounds[member]
        if number >= len(messages.nbytes):
            state.received[member] = 0
            return
        source = messages.sources[number, member]
        state.received[member] = source < 0
        if messages.targets[number, member] >= 0:
            state.phases[member] = _WAITS
            _begin_if_met(messages, ports, state, member, now)
        if source >= 0:
            _begin_if_met(messages, ports, state, source, now)


@part
def _begin_if_met(messages: _Messages, ports: _Ports, state: _State, member: int, now: float) -> None:
    """Begin the message of a member that waits, if its receiver is at its round too."""
    if state.phases[member] != _WAITS:
        return
    number = state.rounds[member]
    target = messages.targets[number, member]
    if state.rounds[target] == number:
        state.phases[member] = _OVERHEAD
        _put(state, member, now + ports.overheads[_level(ports, member, target)])


@part
def _level(ports: _Ports, member: int, other: int) -> int:
    """The innermost level whose groups hold both."""
    level = 0
    while member // ports.within[level] != other // ports.within[level]:
        level += 1
    return level


@part
def _let_flow(messages: _Messages, ports: _Ports, state: _State, member: int, now: float, in_turn: bool) -> None:
    """The bytes of a member's message begin to flow."""
    number = state.rounds[member]
    target, nbytes = messages.targets[number, member], messages.nbytes[number]
    count, levels = len(state.rounds), len(ports.within)
    level = _level(ports, member, target)
    state.phases[member] = _FLOWS
    state.ports[member, 0] = 2 * count * level + member
    state.ports[member, 1] = 2 * count * level + count + target
    for inner in range(level):
        first = 2 * count * (levels + inner)
        state.ports[member, 2 + 2 * inner] = first + member // ports.within[inner]
        state.ports[member, 3 + 2 * inner] = first + count + target // ports.within[inner]
    for place in range(2 + 2 * level, 2 * levels):
        state.ports[member, place] = -1
    if in_turn:
        end = now
        for place in range(2 + 2 * level):
            port = state.ports[member, place]
            if port >= 0:
                ports.free[port] = max(now, ports.free[port]) + nbytes / ports.capacities[port]
                end = max(end, ports.free[port])
        _put(state, member, end)
        return
    state.remaining[member], state.rates[member], state.since[member] = nbytes, 0.0, now
    for at in range(state.ports.shape[1]):
        port = state.ports[member, at]
        if port >= 0:
            ports.users[port, ports.counts[port]] = member
            ports.counts[port] += 1
    _share(ports, state, member, now)


@part
def _leave_ports(ports: _Ports, state: _State, member: int, now: float) -> None:
    """The bytes of a member's message have flowed."""
    for at in range(state.ports.shape[1]):
        port = state.ports[member, at]
        if port >= 0:
            ports.counts[port] -= 1
            last = ports.counts[port]
            for place in range(last):
                if ports.users[port, place] == member:
                    ports.users[port, place] = ports.users[port, last]
    _share(ports, state, member, now)


@part
def _share(ports: _Ports, state: _State, member: int, now: float) -> None:
    """New rates for the messages that pass through the ports of a member's message."""
    for at in range(state.ports.shape[1]):
        port = state.ports[member, at]
        if port >= 0:
            for place in range(ports.counts[port]):
                _set_rate(ports, state, ports.users[port, place], now)


@part
def _set_rate(ports: _Ports, state: _State, member: int, now: float) -> None:
    """An even share of each port, and no more than the least of them."""
    rate = np.inf
    for at in range(state.ports.shape[1]):
        port = state.ports[member, at]
        if port >= 0:
            rate = min(rate, ports.capacities[port] / ports.counts[port])
    if rate != state.rates[member]:
        state.remaining[member] -= state.rates[member] * (now - state.since[member])
        state.since[member], state.rates[member] = now, rate
        _put(state, member, now + max(0.0, state.remaining[member]) / rate)


@part
def _put(state: _State, member: int, time: float) -> None:
    """Enter a member's event, or move it to another time."""
    place = state.places[member]
    if place < 0:
        place = state.size[0]
        state.size[0] += 1
    state.times[member] = time
    _sift(state, member, place)


@part
def _take_first(state: _State) -> int:
    """Remove the member whose event is the earliest."""
    member: int = state.heap[0]
    state.places[member] = -1
    state.size[0] -= 1
    if state.size[0]:
        _sift(state, state.heap[state.size[0]], 0)
    return member


@part
def _sift(state: _State, member: int, place: int) -> None:
    """Put a member where it belongs in the heap; `place` is free."""
    heap, times, time = state.heap, state.times, state.times[member]
    while place > 0 and times[heap[(place - 1) // 2]] > time:
        heap[place] = heap[(place - 1) // 2]
        state.places[heap[place]] = place
        place = (place - 1) // 2
    while 2 * place + 1 < state.size[0]:
        below = 2 * place + 1
        if below + 1 < state.size[0] and times[heap[below + 1]] < times[heap[below]]:
            below += 1
        if times[heap[below]] >= time:
            break
        heap[place] = heap[below]
        state.places[heap[place]] = place
        place = below
    heap[place] = member
    state.places[member] = place
