"""A profile of a run: op times in the Chrome trace format, as the simulator's timelines are, and what calibration needs beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ratrain_ir.files import write_lines
from ratrain_ir.ops import ENGINES
from ratrainc.trace import MICROSECONDS, instruction_event
from targets.mt3000.simulation import timed_instruction
from targets.mt3000.timing import members_of, op_key

if TYPE_CHECKING:
    from targets.program import Program
    from targets.runtime.profile import Profile, RunSpan

FORMAT = "ratrain run profile 1"


def write_profile(program: Program, profile: Profile, path: str, *, engines_side_by_side: bool) -> None:
    """Write a run's op times, all ranks in one file, atomically.

    Raises `DiagnosticError` RT002 when the file cannot be written.
    """
    facts = {
        "format": FORMAT,
        "program": program.name,
        "ordered": not engines_side_by_side,
        "routines": [routine.to_json() for routine in program.routines],
    }
    events = [json.dumps(event, separators=(",", ":")) for event in (*_names(program), *_spans(program, profile))]
    head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(facts)},"traceEvents":['
    write_lines(path, [head, *(line + "," for line in events[:-1]), *events[-1:], "]}"])


def _names(program: Program) -> Iterator[dict[str, Any]]:
    plan = program.plan
    for stage in range(plan.pp):
        for replica in range(plan.dp):
            pid = stage * plan.dp + replica
            name = f"stage @{stage} replica {replica} (measured)"
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for engine in ENGINES:
                track = {"pid": pid, "tid": ENGINES.index(engine)}
                yield {"ph": "M", "name": "thread_name", **track, "args": {"name": engine.value}}


def _spans(program: Program, profile: Profile) -> Iterator[dict[str, Any]]:
    begin = min((span.start for span in profile.spans), default=0.0)
    facts: dict[tuple[int, int], dict[str, Any]] = {}
    for span in profile.spans:
        place = span.stage, id(span.instruction)
        if place not in facts:
            facts[place] = _facts(program, span)
        event = instruction_event(
            span.instruction,
            span.engine,
            span.stage * program.plan.dp + span.replica,
            (span.start - begin) * MICROSECONDS,
            (span.end - span.start) * MICROSECONDS,
        )
        event["args"] |= facts[place] | {"step": span.step}
        yield event


def _facts(program: Program, span: RunSpan) -> dict[str, Any]:
    """What the op is to a machine's table; of a routine, its number too."""
    instruction = span.instruction
    timed = timed_instruction(program, span.stage, span.engine, instruction)
    members = members_of(instruction.group, program.plan) if instruction.group else 1
    return {
        "op": op_key(timed, program.plan),
        "bytes": timed.own_bytes,
        "members": members,
        "routine": instruction.routine,
    }
