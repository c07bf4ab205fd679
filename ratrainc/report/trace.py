"""A timeline in the Chrome trace format, which Perfetto and chrome://tracing show.

It has a track for each stage and engine, an arrow for each message, and a counter of the live bytes of each stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.ops.base import ENGINES, Direction, Engine
from ratrain.ratrain_ir.support.files import write_lines
from ratrain.targets.simulator.live_curve import live_curve

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Hop
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.simulator.timeline import Span, Timeline

MICROSECONDS = 1e6


def write_trace(timeline: Timeline, path: str) -> None:
    """Write a simulated timeline, atomically.

    Raises `DiagnosticError` RT002 if the file cannot be written.
    """
    events = [*_names(timeline), *_spans(timeline), *_flows(timeline), *_live_bytes(timeline)]
    lines = [json.dumps(event, separators=(",", ":")) for event in events]
    body = [line + "," for line in lines[:-1]] + lines[-1:]
    write_lines(path, ['{"displayTimeUnit":"ms","traceEvents":[', *body, "]}"])


_NOT_EVERYWHERE = (Engine.TENSOR, Engine.STORE, Engine.FETCH)
"""Engines that many programs do not use; without instructions they get no track."""


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for stage in range(len(timeline.spans)):
        yield {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage @{stage} (simulated)"}}
        for engine in ENGINES:
            if engine in _NOT_EVERYWHERE and not timeline.program.stages[stage].streams[engine]:
                continue
            track = {"pid": stage, "tid": ENGINES.index(engine)}
            yield {"ph": "M", "name": "thread_name", **track, "args": {"name": engine.value}}


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for stage, engines in enumerate(timeline.spans):
        for engine, spans in engines.items():
            for span in spans:
                duration = (span.end - span.start) * MICROSECONDS
                yield instruction_event(span.instruction, engine, stage, span.start * MICROSECONDS, duration)


def instruction_event(
    instruction: Instruction, engine: Engine, process: int, start: float, duration: float
) -> dict[str, Any]:
    """Return the span of an instruction, simulated or measured; times are in microseconds."""
    waits = [f"{w.engine.value} {w.count}{' (previous step)' if w.previous_step else ''}" for w in instruction.waits]
    return {
        "ph": "X",
        "name": instruction.title,
        "cat": instruction.keyword,
        "pid": process,
        "tid": ENGINES.index(engine),
        "ts": start,
        "dur": duration,
        "args": {"micro_batch": instruction.micro_batch, "waits": waits},
    }


def _live_bytes(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for stage in range(len(timeline.spans)):
        times, live = live_curve(timeline, stage)
        for time, count in zip(times.tolist(), live.tolist(), strict=True):
            yield {"ph": "C", "name": "live bytes", "pid": stage, "ts": time * MICROSECONDS, "args": {"bytes": count}}


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
            start = {"pid": hop.source, "tid": ENGINES.index(engine), "ts": span.start * MICROSECONDS}
            yield {"ph": "s", **common, **start}
            end = {"pid": hop.target, "tid": ENGINES.index(other_engine), "ts": arrival.end * MICROSECONDS}
            yield {"ph": "f", "bp": "e", **common, **end}
