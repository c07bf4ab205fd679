"""How an answer bears other links than its machine file says: every constant of the links changed, and clusters that share a port.

Sources seldom say what a link's bandwidth is the bandwidth of, a cluster's or that of the port which the clusters of a chip or node share.
What collectives make of a shared port depends on their rounds: in a ring one message in so many leaves a group, in the pairwise rounds
that sum in rank order nearly all do. So both are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrainc.choices.machines import changed_machine, with_constants
from ratrain.ratrainc.choices.timed_plan import TimedPlan, time_plan
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, TextTable
from ratrain.ratrainc.planner.answer.report import candidate_json, shape_text
from ratrain.ratrainc.planner.search.answer import Answer
from ratrain.targets.machine.link_groups import GROUP_UNITS
from ratrain.targets.machine.machine import largest_value
from ratrain.targets.simulator.figures import simulated

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.answer import Candidate
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

_FACTORS = {"bandwidth": (0.5, 2.0), "uplink": (0.5, 2.0), "latency": (0.1, 10.0)}
"""What the constants of links are multiplied by."""
_COSTS = {"message_cost": 10e-6, "round_skew": 10e-6, "rank_jitter": 0.01}
"""What is tried, assumed, of constants that a machine may leave out; ten times what it has where it does not, if it may be that much."""
_HALVINGS = 12
_IN_RANK_ORDER = ("pairwise",)
"""The one way to sum whose result does not depend on who shares a group with whom: what runs where sums are exact in rank order."""


@frozen
class LinkChange:
    """One constant changed, and the step of the answer's plan with it."""

    change: str
    step_seconds: float


@frozen
class Ports:
    """The clusters of each innermost group with one port, or, where they have one, each with its own; planned anew."""

    constant: str
    bandwidth: float
    """bytes a second by which a group leaves"""
    collectives: tuple[str, ...]
    """what the transport has"""
    answer: Answer
    kept_seconds: float
    """a step of the given answer's plan"""
    flips: bool
    """whether another plan is better there"""
    flips_at: float | None
    """bytes a second of the port at which both plans take equally long; None where there is no such port"""


@frozen
class RobustLinks:
    """What became of an answer under other links."""

    changes: tuple[LinkChange, ...]
    ports: tuple[Ports, ...]
    """with the machine's collectives, and with pairwise rounds alone; none where no clusters share a chip or a node"""


def robust_links(answer: Answer, plan_anew: Callable[[Machine], Answer]) -> RobustLinks:
    """Try other links on an answer; `plan_anew` answers the same request for a changed machine."""
    machine = answer.request.machine
    assert answer.best is not None
    program = _program(answer, answer.best, machine)
    changes = tuple(
        LinkChange(text, _step_seconds(program, with_constants(machine, values))) for text, values in _changes(machine)
    )
    port = _other_port(machine)
    if port is None:
        return RobustLinks(changes, ())
    transports = dict.fromkeys((machine.collectives, _IN_RANK_ORDER))
    return RobustLinks(changes, tuple(_ports(answer, program, port, each, plan_anew) for each in transports))


def _ports(
    answer: Answer,
    program: Program,
    port: tuple[str, float],
    collectives: tuple[str, ...],
    plan_anew: Callable[[Machine], Answer],
) -> Ports:
    """What another port comes to with some collectives; `program` is that of the answer's plan."""
    machine = evolve(answer.request.machine, collectives=collectives)
    there = changed_machine(machine, dict([port]))
    anew = plan_anew(there)
    kept = _step_seconds(program, there)
    flips, flips_at = _flip(answer, program, anew, machine, port)
    return Ports(*port, collectives, anew, kept, flips, flips_at)


def _program(answer: Answer, candidate: Candidate, machine: Machine) -> Program:
    timed = time_plan(answer.request.model, candidate.plan, candidate.pipeline, machine)
    assert isinstance(timed, TimedPlan), "the search placed it"
    return timed.program


def _step_seconds(program: Program, machine: Machine) -> float:
    return simulated(program, machine)[0].step_seconds


def _changes(machine: Machine) -> Iterator[tuple[str, dict[str, float]]]:
    """Every constant of the links, changed one by one, in words and as values."""
    for name, constant in machine.constants.items():
        kind = name.rpartition(".")[2].rpartition("_")[2]
        if kind in _FACTORS and (name.rpartition(".")[2] in GROUP_UNITS or name.startswith(("link_", "chip_"))):
            for factor in _FACTORS[kind]:
                yield f"{name} x {factor:g}", {name: constant.value * factor}
    for name, tried in _COSTS.items():
        has = machine.constants[name].value if name in machine.constants else 0.0
        value = min(10 * has, largest_value(name)) if has else tried
        yield f"{name} = {value:g}", {name: value}


def _other_port(machine: Machine) -> tuple[str, float] | None:
    """The constant by which the innermost groups leave, and its value if their clusters shared one link, or no longer shared one."""
    groups = machine.link_groups
    if len(groups) == 1:
        return None
    inner, link = groups[0], groups[1].link.bandwidth
    assert inner.clusters is not None
    constant = f"{inner.name}.uplink" if machine.group_names else f"{inner.name}_uplink"
    shares = inner.uplink is not None and inner.uplink < inner.clusters * link
    return constant, inner.clusters * link if shares else link


def _flip(
    answer: Answer, program: Program, anew: Answer, machine: Machine, port: tuple[str, float]
) -> tuple[bool, float | None]:
    """Whether the plan found anew is faster with the port, and the port's bandwidth at which the plans change places.

    There is none where it is faster with the ports that the machine has, too: collectives alone make the difference then.
    """
    constant, bandwidth = port
    if answer.best is None or anew.best is None or anew.best.shape == answer.best.shape:
        return False, None
    other = _program(anew, anew.best, anew.request.machine)

    def gain(value: float) -> float:
        there = with_constants(machine, {constant: value})
        return _step_seconds(program, there) - _step_seconds(other, there)

    group = machine.link_groups[0]
    assert group.clusters is not None
    own = group.uplink or group.clusters * machine.link_groups[1].link.bandwidth
    if gain(bandwidth) <= 0:
        return False, None
    if gain(own) >= 0:
        return True, None
    better, worse = bandwidth, own
    for _ in range(_HALVINGS):
        middle = (better + worse) / 2
        if gain(middle) > 0:
            better = middle
        else:
            worse = middle
    return True, (better + worse) / 2


def robust_links_json(found: RobustLinks, tokens: float | None = None) -> dict[str, Any]:
    """What `--json` prints."""
    changes = [{"change": each.change, "step_seconds": each.step_seconds} for each in found.changes]
    return {"links": changes, "ports": [_ports_json(each, tokens) for each in found.ports]}


def _ports_json(ports: Ports, tokens: float | None) -> dict[str, Any]:
    best = ports.answer.best
    return {
        "constant": ports.constant,
        "bytes_per_second": ports.bandwidth,
        "collectives": list(ports.collectives),
        "plan": candidate_json(best, ports.answer.request.clusters, tokens) if best else None,
        "step_seconds_with_the_same_plan": ports.kept_seconds,
        "flips": ports.flips,
        "flips_at_bytes_per_second": ports.flips_at,
    }


def robust_links_parts(answer: Answer, found: RobustLinks) -> Iterator[Part]:
    """A table of the plan under changed links, and whether the answer flips."""
    assert answer.best is not None
    usual = answer.best.seconds
    rows = [["as it is", seconds_text(usual), ""]]
    rows += [
        [each.change, seconds_text(each.step_seconds), f"{100 * (each.step_seconds / usual - 1):+.2f} %"]
        for each in found.changes
    ]
    yield TextTable("links: this plan with each constant changed (simulated)", ["link", "step", "change"], rows)
    if not found.ports:
        yield "no clusters share a chip or a node on this machine: no port that they could share"
    for ports in found.ports:
        yield _verdict(ports)


def _verdict(ports: Ports) -> str:
    """Whether the answer stays the best where ports are shared, or no longer are."""
    best = ports.answer.best
    there = f"with {ports.constant} = {ports.bandwidth / 1e9:g} GB/s and collectives by {', '.join(ports.collectives)}"
    kept = f"{there} this plan takes {seconds_text(ports.kept_seconds)}"
    if best is None:
        return f"{kept}; no plan was found anew"
    anew = f"{shape_text(best)} takes {seconds_text(best.seconds)}"
    if not ports.flips:
        return f"{kept}; the answer does not flip: the best plan anew, {anew}"
    if ports.flips_at is None:
        return f"{kept}; the answer flips: {anew}, and with these collectives it is the better one whatever the port carries"
    return f"{kept}; the answer flips: {anew}, and is the better one on that side of {ports.flips_at / 1e9:.2f} GB/s"
