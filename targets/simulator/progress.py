"""Progress of a program: does every stream reach its end whatever the timing, and if not, which ops wait for ever.

A program with buffered or rendezvous sends is turned into a graph of waits over `STEPS` consecutive steps. Ops that can
never run are those on a circle, and those behind one. The cost is linear in the waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrain_ir.analysis.wait_graph import WaitGraph
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.simulator.flat_program import NEVER, STREAMS, FlatProgram, Int64s, flatten

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Topology
    from ratrain.targets.program.columns import ProgramColumns

STEPS = 3
"""Consecutive steps of a run: the first starts cold, the distance of the last two is the steady period."""
_SHOWN_WAITING = 20


def check_progress(columns: ProgramColumns, topology: Topology) -> None:
    """Raise `DiagnosticError` RT042 unless a program ends with buffered and with rendezvous sends.

    Both ends of each message must be there. A rendezvous only adds waits, so a program that ends with rendezvous sends
    ends with buffered sends too; buffered sends are examined only after a failure, for the more telling message.
    """
    flat = flatten(columns, topology)
    met = instructions_done(flat, rendezvous=True)
    if (met < STEPS * columns.lengths.ravel()).any():
        check_done(columns, instructions_done(flat, rendezvous=False), STEPS, rendezvous=False)
        check_done(columns, met, STEPS, rendezvous=True)


def instructions_done(flat: FlatProgram, *, rendezvous: bool) -> Int64s:
    """Count by stream the instructions of all steps that can be done."""
    count = len(flat.ops)
    graph = WaitGraph(STEPS * count)
    steps = np.arange(STEPS)[:, None] * count

    def of_all_steps(ops: Int64s) -> Int64s:
        found: Int64s = (steps + ops).ravel()
        return found

    def after(sources: Int64s, targets: Int64s) -> None:
        """Let `targets` wait for `sources` in every step.

        A negative source is an op of the step before. Sources before the first step count as done.
        """
        awaited, waiting = of_all_steps(sources), of_all_steps(targets)
        graph.add_waits(awaited[awaited >= 0], waiting[awaited >= 0])

    ops = np.arange(count)
    later = np.setdiff1d(ops, flat.first_ops)
    after(later - 1, later)
    after(flat.last_ops - count, flat.first_ops)
    awaited = flat.streams["first"][flat.waits["stream"]] + flat.waits["count"] - 1 - flat.waits["previous"] * count
    after(awaited, np.repeat(ops, flat.ops["wait_stop"] - flat.ops["wait_first"]))
    lengths = flat.channels["send_stop"] - flat.channels["send_first"]
    meet = np.repeat(flat.channels["meets"] > 0, lengths) | rendezvous
    after(flat.sends[~meet], flat.recvs[~meet])
    graph.merge(of_all_steps(flat.recvs[meet]), of_all_steps(flat.sends[meet]))
    sizes = flat.meetings["stop"] - flat.meetings["first"]
    leaders = np.repeat(flat.members[flat.meetings["first"]], sizes)
    graph.merge(of_all_steps(flat.members), of_all_steps(leaders))
    # An op whose partner is missing waits for itself, so for ever.
    partnerless = np.flatnonzero(flat.ops["mode"] == NEVER)
    after(partnerless, partnerless)
    # A stream runs in order, so the number of its ops that can run is also its first op that cannot.
    done = np.tile(flat.ops["stream"], STEPS)[~graph.never()]
    return np.bincount(done, minlength=len(flat.streams))


def check_done(columns: ProgramColumns, done: Int64s, steps: int, *, rendezvous: bool) -> None:
    """Raise `DiagnosticError` RT042 with who waits, unless every stream has done the instructions of `steps` steps."""
    waiting = []
    lengths = columns.lengths.ravel()
    for stream in np.flatnonzero(done < steps * lengths).tolist():
        first = columns.stream_stops[stream] - lengths[stream]
        title = columns.instruction(int(first + done[stream] % lengths[stream])).title
        waiting.append(f"stage @{stream // STREAMS} {ENGINES[stream % STREAMS].value} engine at '{title}'")
    if waiting:
        mode = "rendezvous" if rendezvous else "buffered"
        text = "; ".join(waiting[:_SHOWN_WAITING])
        fail("RT042", f"the program cannot end with {mode} sends; these wait for ever: {text}")
