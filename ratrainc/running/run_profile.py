"""A profile of a run: op times in the Chrome trace format, like the simulator's timelines, with data for calibration.

If ranks shared cores, the program is part of the profile: the time that sharing added depends on the program's order.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.ops.base import ENGINES, Group
from ratrain.ratrain_ir.support.files import write_lines
from ratrain.ratrainc.report.trace import MICROSECONDS, instruction_event, track_names
from ratrain.targets.machine.timing import op_key
from ratrain.targets.program.rtx import program_bytes
from ratrain.targets.simulator.op_works import timed_instruction

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Mesh, Rank
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.engine.profile import Concurrency, Profile, RunSpan, StepSpan

FORMAT = "ratrain run profile 2"


def write_profile(
    program: Program, profile: Profile, path: str, concurrency: Concurrency = "ordered", kernel_threads: int = 1
) -> None:
    """Write a run's op times, all ranks in one file, atomically.

    Times in the file are microseconds. Raises `DiagnosticError` RT002 if the file cannot be written.
    """
    facts = {
        "format": FORMAT,
        "program": program.name,
        "concurrency": concurrency,
        "kernel_threads": kernel_threads,
        "ranks_per_core": profile.ranks_per_core,
        "recording": profile.overhead_seconds() * MICROSECONDS,
        "steps": [[step.step, *_event_times(profile, step)] for step in profile.steps],
        "routines": [routine.to_json() for routine in program.routines],
        "rtx": b64encode(program_bytes(program)).decode() if (profile.ranks_per_core or 0) > 1 else None,
    }
    events = [json.dumps(event, separators=(",", ":")) for event in (*_names(program), *_spans(program, profile))]
    head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(facts)},"traceEvents":['
    write_lines(path, [head, *(line + "," for line in events[:-1]), *events[-1:], "]}"])


def _names(program: Program) -> Iterator[dict[str, Any]]:
    for pid, rank in enumerate(program.topology.ranks):
        yield from track_names(pid, f"{program.topology.name(rank)} (measured)", list(ENGINES))


def _spans(program: Program, profile: Profile) -> Iterator[dict[str, Any]]:
    facts: dict[tuple[Rank, int], dict[str, Any]] = {}
    numbers = {rank: number for number, rank in enumerate(program.topology.ranks)}
    for span in profile.spans(program):
        # the facts of an instruction are equal in all steps, and costly to find
        place = span.rank, id(span.instruction)
        if place not in facts:
            facts[place] = _facts(program, span)
        event = instruction_event(span.instruction, span.engine, numbers[span.rank], *_event_times(profile, span))
        event["args"] |= facts[place] | {"step": span.step, "cpu": span.cpu_seconds * MICROSECONDS}
        yield event


def _event_times(profile: Profile, span: RunSpan | StepSpan) -> tuple[float, float]:
    """Return start and duration in microseconds, counted from the first recorded step."""
    begin = profile.steps[0].start
    return (span.start - begin) * MICROSECONDS, (span.end - span.start) * MICROSECONDS


def _facts(program: Program, span: RunSpan) -> dict[str, Any]:
    """Return an op's key in a machine's table, with its bytes, members, routine number and meeting."""
    instruction = span.instruction
    timed = timed_instruction(program, span.rank.stage, span.engine, instruction)
    members = program.topology.group_size(Group(instruction.group)) if instruction.group else 1
    return {
        "op": op_key(timed, program.plan),
        "bytes": timed.own_bytes,
        "members": members,
        "routine": instruction.routine,
        "meeting": _meeting(program.topology, span),
    }


def _gathering(mesh: Mesh, rank: Rank, group: Group) -> str:
    """Return the text that names a group of replicas; empty if all replicas are in it."""
    members = mesh.replicas_of(group, rank.replica)
    return "" if len(members) == mesh.replicas else f" of the group of replica {members[0]}"


def _meeting(mesh: Mesh, span: RunSpan) -> str | None:
    """Return a name that is equal for both ends of a message, or all members of a collective; None for other ops.

    The k-th op of that name on each rank belong together.
    """
    instruction, rank = span.instruction, span.rank
    stage, replica = f"stage @{rank.stage}", f"replica {rank.replica}"
    peer = f" tensor rank {rank.peer}" if mesh.peers > 1 else ""
    ends = instruction.ends(rank.stage)
    if ends is not None:
        return f"{instruction.variant} from stage @{ends[0]} to @{ends[1]} of {replica}{peer}"
    if not instruction.group:
        return None
    where = {
        Group.REPLICAS: f" of {stage}{peer}",
        **{
            each: f" of {stage}{_gathering(mesh, rank, each)}{peer}"
            for each in (Group.SHARDS, Group.VIEWS, Group.PARTS, Group.CONTEXT, Group.EXPERTS, Group.COPIES)
        },
        Group.ENDS: f" of {replica}{peer}",
        Group.TENSOR: f" of {stage} {replica}",
        Group.ALL: "",
    }
    return f"{instruction.title_without_blocks}{where[Group(instruction.group)]}"
