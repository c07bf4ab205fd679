"""A timeline in the Chrome trace format, which Perfetto and chrome://tracing show.

It has a track for each stage and engine, an arrow for each message, and a counter of the live bytes of each stage.

Perfetto's reader (json_trace_parser_impl.cc) decides the form:

- It keeps a category as one string, so an event has one category, of `CATEGORIES`.
- It names a thread by its number alone, whatever its process, and a thread with the number of its process is "main".
  So every track of the file has a number of its own, which no process has.
- It cuts times to whole nanoseconds, and drops a span that reaches over the end of the one around it. So spans start
  and end at whole nanoseconds, and a start is written a quarter above, where neither cutting nor rounding changes it. A
  duration that is cut is shorter, never longer.
- It binds an arrow to the span that is open, so an arrow ends within the receive and not at its end.
- It names a counter by its event and its argument: "live" and "bytes".

Of sort indices it takes no notice; chrome://tracing does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.ops.base import ENGINES, Direction, Engine
from ratrain.ratrain_ir.ops.collectives import COLLECTIVE_OPS, AllGather
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, LoadInput, Recompute, Release, ScaleUpdate, Update
from ratrain.ratrain_ir.ops.memory import Fetch, Store
from ratrain.ratrain_ir.ops.messages import DonorAccept, DonorReturn, PeerOffload, PeerReload, Recv, Send
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.ratrain_ir.support.files import write_lines
from ratrain.targets.machine.cost import routine_flops
from ratrain.targets.program.instruction import Access
from ratrain.targets.simulator.live_curve import live_curve

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.ratrain_ir.topology import Hop
    from ratrain.ratrainc.report.simulation import StepSimulation
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.timeline import Span, Timeline

MICROSECONDS = 1e6
CATEGORIES = PerOp(
    "category of a trace",
    {
        **dict.fromkeys(BLOCK_OPS, "compute"),
        Recompute: "recompute",
        Update: "update",
        ScaleUpdate: "update",
        LoadInput: "input",
        Send: "send",
        Recv: "recv",
        **dict.fromkeys(COLLECTIVE_OPS, "collective"),
        AllGather: "prefetch",
        **dict.fromkeys((Store, PeerOffload, DonorAccept), "offload"),
        **dict.fromkeys((Fetch, DonorReturn, PeerReload), "reload"),
    },
    never=[Release],
)
"""Category of the span of each kind of op; an arrow's is `message`."""
_NAMED = 4
"""Most tensors that a span names; with a thousand micro-batches names make most of the file."""


def write_trace(simulation: StepSimulation, path: str) -> None:
    """Write the timeline of a simulation for Perfetto or chrome://tracing, atomically.

    Raises `DiagnosticError` RT002 if the file cannot be written.
    """
    timeline = simulation.timeline
    events = [*_names(timeline), *_spans(timeline), *_flows(timeline), *_live_bytes(timeline)]
    lines = [json.dumps(event, separators=(",", ":")) for event in events]
    body = [line + "," for line in lines[:-1]] + lines[-1:]
    facts = json.dumps({"program": timeline.program.name, "times": "simulated"})
    write_lines(path, [f'{{"displayTimeUnit":"ms","otherData":{facts},"traceEvents":[', *body, "]}"])


_NOT_EVERYWHERE = (Engine.TENSOR, Engine.STORE, Engine.FETCH)
"""Engines that many programs do not use; without instructions they get no track."""


def engine_track(process: int, engine: Engine) -> dict[str, int]:
    """Return process and thread of an engine's track; no other track of the file has that thread's number."""
    return {"pid": process, "tid": 100 * (process + 1) + ENGINES.index(engine)}


def track_names(process: int, name: str, engines: list[Engine]) -> Iterator[dict[str, Any]]:
    """Yield the metadata of a process and the tracks of its engines: names, and their order."""
    own = engine_track(process, engines[0])
    yield {"ph": "M", "name": "process_name", **own, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **own, "args": {"sort_index": process}}
    for engine in engines:
        track = engine_track(process, engine)
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": engine.value}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": ENGINES.index(engine)}}


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for index, stage in enumerate(timeline.program.stages):
        engines = [each for each in ENGINES if each not in _NOT_EVERYWHERE or stage.streams[each]]
        yield from track_names(index, f"stage @{index} (simulated)", engines)


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    flops_of = _flops_of(timeline.program)
    for stage, engines in enumerate(timeline.spans):
        for engine, spans in engines.items():
            first, stop = timeline.ops_of(stage, engine)
            facts = [_facts(timeline, stage, op, flops_of) for op in range(first, stop)]
            for place, span in enumerate(spans):
                step, op = divmod(place, stop - first)
                start, end = _nanoseconds(span.start), _nanoseconds(span.end)
                event = instruction_event(span.instruction, engine, stage, _written(start), (end - start) / 1e3)
                event["args"] |= {"step": step, **facts[op]}
                yield event


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _written(nanoseconds: int) -> float:
    """Return microseconds that are read as these nanoseconds, whether a reader cuts or rounds."""
    return (nanoseconds + 0.25) / 1e3


def _flops_of(program: Program) -> Callable[[int | None], int]:
    """Return a function that counts the operations of a routine by its number, once each; 0 for None."""

    @cache
    def flops(number: int | None) -> int:
        if number is None:
            return 0
        return round(routine_flops(program.routines[number]))

    return flops


def _facts(timeline: Timeline, stage: int, op: int, flops_of: Callable[[int | None], int]) -> dict[str, Any]:
    """Return what an op moves and computes on one rank, without what is 0: tensors, bytes, traffic, operations.

    The tensors are those that it writes or updates, or that a message takes along; `bytes` are of all of them.
    """
    item, tensors = timeline.instructions[op], timeline.program.stages[stage].tensors
    if item.direction is Direction.OUT:
        operands = item.carried
    else:
        operands = tuple(each for each in item.operands if each.access in (Access.WRITE, Access.UPDATE))
    moved = [tensors[each.tensor] for each in operands]
    more = [f"{len(moved) - _NAMED} more"] if len(moved) > _NAMED else []
    counts = {
        "bytes": sum(tensor.type.nbytes for tensor in moved),
        "flops": flops_of(item.routine),
        "ddr_bytes": round(float(timeline.works["ddr_bytes"][op])),
        "link_bytes": round(float(timeline.works["link_bytes"][op])),
    }
    return {
        "tensors": ", ".join([*(f"%{tensor.name}" for tensor in moved[:_NAMED]), *more]),
        **{name: count for name, count in counts.items() if count},
    }


def instruction_event(
    instruction: Instruction, engine: Engine, process: int, start: float, duration: float
) -> dict[str, Any]:
    """Return the span of an instruction, simulated or measured; times are in microseconds."""
    waits = [f"{w.engine.value} {w.count}{' (previous step)' if w.previous_step else ''}" for w in instruction.waits]
    return {
        "ph": "X",
        "name": instruction.title,
        "cat": CATEGORIES[instruction.keyword],
        **engine_track(process, engine),
        "ts": start,
        "dur": duration,
        "args": {"keyword": instruction.keyword, "micro_batch": instruction.micro_batch, "waits": waits},
    }


def _live_bytes(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for stage in range(len(timeline.spans)):
        track = engine_track(stage, Engine.COMPUTE)
        times, live = live_curve(timeline, stage)
        for time, count in zip(times.tolist(), live.tolist(), strict=True):
            yield {"ph": "C", "name": "live", **track, "ts": _written(_nanoseconds(time)), "args": {"bytes": count}}


def _flows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each send to its receive; the k-th send and the k-th receive of a hop belong together."""
    sent: dict[Hop, list[tuple[Engine, Span]]] = {}
    received: dict[Hop, list[tuple[Engine, Span]]] = {}
    topology = timeline.program.topology
    for stage, engines in enumerate(timeline.spans):
        for engine, spans in engines.items():
            for span in spans:
                hop = span.instruction.hop(stage, topology)
                if hop is not None:
                    side = sent if span.instruction.direction is Direction.OUT else received
                    side.setdefault(hop, []).append((engine, span))
    number = 0
    for hop, sends in sent.items():
        for (engine, span), (other_engine, arrival) in zip(sends, received[hop], strict=True):
            number += 1
            common = {"name": hop.channel.payload.value, "cat": "message", "id": number}
            yield {"ph": "s", **common, **engine_track(hop.source, engine), "ts": _written(_nanoseconds(span.start))}
            begin, end = _nanoseconds(arrival.start), _nanoseconds(arrival.end)
            within = {**engine_track(hop.target, other_engine), "ts": _written(max(begin, end - 1))}
            yield {"ph": "f", "bp": "e", **common, **within}
