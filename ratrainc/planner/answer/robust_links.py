"""Robustness of an answer to its links: every constant of the links changed, and clusters that share a port.

Sources seldom say if a link's bandwidth is that of a cluster or that of the port that the clusters of a chip or node
share. The effect of a shared port on collectives depends on their rounds: in a ring, one message of each group leaves
it; in the pairwise rounds that sum in rank order, nearly all do. So the answer is planned again under both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from ratrain.ratrainc.choices.machine_changes import changed_machine, with_constants
from ratrain.ratrainc.choices.timed_plan import TimedPlan, time_plan
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.planner.answer.planned import Planned
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.answer import Answer
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.workers import workers
from ratrain.targets.machine.constants import largest_value
from ratrain.targets.machine.link_groups import GROUP_UNITS
from ratrain.targets.simulator.figures import simulated

if TYPE_CHECKING:
    from ratrain.ratrainc.console.progress import Steps
    from ratrain.ratrainc.planner.search.answer import Candidate
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

_FACTORS = {"bandwidth": (0.5, 2.0), "uplink": (0.5, 2.0), "latency": (0.1, 10.0)}
"""Factors on the constants of links."""
_COSTS = {"message_cost": 10e-6, "round_skew": 10e-6, "rank_jitter": 0.01}
"""Assumed values of constants that a machine leaves out; a constant that it has is multiplied by ten, as far as
allowed."""
_HALVINGS = 12
_IN_RANK_ORDER = ("pairwise",)
"""The only collectives whose sums do not depend on the mapping to groups: they run if sums are exact in rank order."""


@frozen
class LinkChange:
    """One changed constant, and the step of the answer's plan with it."""

    change: str
    step_seconds: float


@frozen
class Ports:
    """The answer with one port for the clusters of each innermost group, or, if they have one, with a port for each."""

    constant: str
    bandwidth: float
    """bytes a second out of a group"""
    collectives: tuple[str, ...]
    """collective algorithms of the transport"""
    answer: Answer
    kept_seconds: float
    """a step of the given answer's plan"""
    flips: bool
    """True if another plan is better there"""
    flips_at: float | None
    """bytes a second of the port at which both plans take equally long; None if there is no such port"""


@frozen(repr=False)
class RobustLinks(Shown):
    """An answer under other links."""

    planned: Planned
    changes: tuple[LinkChange, ...] = field(eq=False)
    ports: tuple[Ports, ...] = field(eq=False)
    """results with the machine's collectives, then with pairwise rounds alone; empty if no clusters share a chip or
    node
    """

    def parts(self) -> Iterator[Part]:
        """Yield a table of the plan under changed links, then sentences about ports: whether the answer flips.

        There is one for the machine's collectives and one for pairwise rounds alone, if these differ; or one that says
        that no clusters could share a port.
        """
        usual = self.planned.best.seconds
        rows = [["unchanged", seconds_text(usual), ""]]
        rows += [
            [each.change, seconds_text(each.step_seconds), f"{100 * (each.step_seconds / usual - 1):+.2f} %"]
            for each in self.changes
        ]
        yield TextTable("links: this plan with each constant changed (simulated)", ["link", "step", "change"], rows)
        if not self.ports:
            yield "no clusters share a chip or a node on this machine: no port that they could share"
        yield from map(_verdict, self.ports)

    def to_json(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        changes = [{"change": each.change, "step_seconds": each.step_seconds} for each in self.changes]
        return {"links": changes, "ports": [_ports_json(each, self.planned.tokens) for each in self.ports]}


def robust_links(planned: Planned, tick: Steps) -> RobustLinks:
    """Try other links: each constant changed, then a new search with shared ports, or without those there are."""
    answer = planned.answer
    machine = answer.request.machine
    program = _program(answer, planned.best, machine)
    changes = []
    for text, values in _changes(machine):
        tick.begin(text)
        changes.append(LinkChange(text, _step_seconds(program, with_constants(machine, values))))
        tick(text)
    port = _other_port(machine)
    if port is None:
        return RobustLinks(planned, tuple(changes), ())
    transports = dict.fromkeys((machine.collectives, _IN_RANK_ORDER))
    with workers(answer.request.jobs):  # one pool for both searches
        ports = tuple(_ports(answer, program, port, each, tick) for each in transports)
    return RobustLinks(planned, tuple(changes), ports)


def _ports(
    answer: Answer, program: Program, port: tuple[str, float], collectives: tuple[str, ...], tick: Steps
) -> Ports:
    """Plan again with another port and some collectives; `program` is that of the answer's plan."""
    machine = evolve(answer.request.machine, collectives=collectives)
    there = changed_machine(machine, dict([port]))
    tick.prefix = f"ports shared, {'/'.join(collectives)}: "
    profiles = answer.profiles or Profiles(answer.request.setting)
    anew = Search(evolve(answer.request, machine=there), tick, profiles=profiles.under_links(there)).run()
    tick.prefix = ""
    kept = _step_seconds(program, there)
    _keep(answer, anew, kept)
    flips, flips_at = _flip(answer, program, anew, machine, port)
    return Ports(*port, collectives, anew, kept, flips, flips_at)


def _keep(answer: Answer, anew: Answer, seconds: float) -> None:
    """Make the answer's plan the best one anew if it takes fewer `seconds` there than all that a search found."""
    # a search that ends by its seconds may not reach the plan that it reached on the other machine
    usual = answer.best
    if usual is None or usual.evaluation is None or (anew.best is not None and anew.best.seconds <= seconds):
        return
    kept = evolve(usual, evaluation=evolve(usual.evaluation, step_seconds=seconds))
    anew.candidates = [kept, *(each for each in anew.candidates if each.identity != kept.identity)]


def _program(answer: Answer, candidate: Candidate, machine: Machine) -> Program:
    timed = time_plan(answer.request.model, candidate.plan, candidate.pipeline, machine)
    assert isinstance(timed, TimedPlan), "the search placed it"
    return timed.program


def _step_seconds(program: Program, machine: Machine) -> float:
    return simulated(program, machine)[0].step_seconds


def _changes(machine: Machine) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each change of one constant of the links, in words and as values."""
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
    """Return the constant of the innermost groups' ports, and its value with one link for all clusters, or without."""
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
    """Return True if the new plan is faster with the port, and the port's bandwidth at which the plans change places.

    There is no such bandwidth if the new plan is faster with the machine's own ports too: then collectives alone make
    the difference.
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


def _ports_json(ports: Ports, tokens: float | None) -> dict[str, Any]:
    best = ports.answer.best
    return {
        "constant": ports.constant,
        "bytes_per_second": ports.bandwidth,
        "collectives": list(ports.collectives),
        "plan": best.to_json(ports.answer.request.clusters, tokens) if best else None,
        "step_seconds_with_the_same_plan": ports.kept_seconds,
        "flips": ports.flips,
        "flips_at_bytes_per_second": ports.flips_at,
    }


def _verdict(ports: Ports) -> str:
    """Say if the answer stays the best with shared ports, or without them."""
    best = ports.answer.best
    there = f"with {ports.constant} = {ports.bandwidth / 1e9:g} GB/s and collectives by {', '.join(ports.collectives)}"
    kept = f"{there} this plan takes {seconds_text(ports.kept_seconds)}"
    if best is None:
        return f"{kept}; no plan was found anew"
    anew = f"{best.plan.summary} takes {seconds_text(best.seconds)}"
    if not ports.flips:
        return f"{kept}; the answer does not flip: the best plan anew, {anew}"
    if ports.flips_at is None:
        better = "and with these collectives it is the better one whatever the port carries"
        return f"{kept}; the answer flips: {anew}, {better}"
    return (
        f"{kept}; the answer flips: {anew}, and is better there: both take equally long at "
        f"{ports.flips_at / 1e9:.2f} GB/s"
    )
