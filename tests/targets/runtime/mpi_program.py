"""Run by every process of an MPI job in test_mpi.py: trains programs from files, and prints what process 0 saw as JSON.

Arguments: a JSON list of {program, order, reduction, steps, settings}; what is printed is a list of {reports, events}, where events are
(engine, title, "begin" or "end") of process 0 in the order in which it met them.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from attrs import asdict
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from ratrain.targets.program.rtx import read_program
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.mpi.engine import MpiEngine
from ratrain.targets.runtime.mpi.layout import Layout
from ratrain.targets.runtime.mpi.processes import MpiProcesses
from ratrain.targets.runtime.preparation import prepare
from tests.end_to_end.tiny_runs import make_stream, run_settings


class Recorded(MpiEngine):
    """An engine that notes when instructions begin and end."""

    def __init__(self, *words: Any, **named: Any) -> None:
        self.events: list[tuple[str, str, str]] = []
        super().__init__(*words, **named)

    def begin(self, rank: Any, engine: Any, instruction: Any) -> None:
        self.events.append((instruction.keyword, instruction.title, "begin"))
        super().begin(rank, engine, instruction)

    def complete(self, rank: Any, engine: Any, instruction: Any) -> None:
        super().complete(rank, engine, instruction)
        self.events.append((instruction.keyword, instruction.title, "end"))


class RecordedProcesses(MpiProcesses):
    """Processes whose engines note what they do."""

    engine_class = Recorded


def train(task: dict[str, Any]) -> dict[str, Any]:
    program = read_program(task["program"])
    processes = RecordedProcesses(Layout.of_plan(program.plan, task["order"]), task["reduction"])
    settings = run_settings(task["steps"], **task.get("settings", {}))
    run = prepare(program, make_stream(program.model), settings, kernel_set("fast"), processes)
    list(run.steps())
    run.save()
    return {"reports": [asdict(step.report) for step in run.done], "events": run.engine.events}


def main() -> None:
    with threadpool_limits(1):
        found = [train(task) for task in json.loads(sys.argv[1])]
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)  # others would wait for ever
        raise
