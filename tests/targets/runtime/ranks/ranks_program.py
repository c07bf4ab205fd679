"""Run by every process of a job in rank_jobs.py: trains programs from files, and prints what process 0 saw as JSON.

Arguments: the engine that moves the bytes, mpi, torch or torch-untagged (messages of gloo without tags, as those of NCCL are); a JSON list of {program, order, reduction, steps, settings}; what is printed is a list of {reports, events}, where events are
(engine, title, "begin" or "end") of process 0 in the order in which it met them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from ratrain.targets.program.rtx import read_program
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.ranks.engine import RankEngine
from ratrain.targets.runtime.ranks.processes import RankProcesses
from ratrain.targets.runtime.ranks.rank_layout import RankLayout
from tests.end_to_end.tiny_runs import reports_of, run_settings, stream_for
from tests.program_files import prepare

if TYPE_CHECKING:
    from ratrain.targets.runtime.ranks.communicator import Transport


def transport_of(engine: str) -> Transport:
    """The job that this process is one of."""
    if engine == "mpi":
        from ratrain.targets.runtime.mpi.transport import MpiTransport

        return MpiTransport()
    from ratrain.targets.pytorch.place import TorchrunPlace
    from ratrain.targets.pytorch.ranks.transport import TorchTransport

    tagged = False if engine == "torch-untagged" else None
    return TorchTransport(TorchrunPlace.of_environment(os.environ), tagged=tagged)


class Recorded(RankEngine):
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


class RecordedProcesses(RankProcesses):
    """Processes whose engines note what they do."""

    engine_class = Recorded


def train(transport: Transport, task: dict[str, Any]) -> dict[str, Any]:
    program = read_program(task["program"])
    processes = RecordedProcesses(transport, RankLayout.of_plan(program.plan, task["order"]), task["reduction"])
    settings = run_settings(task["steps"], **task.get("settings", {}))
    run = prepare(program, stream_for(program), settings, kernel_set(settings.execution.kernels), processes)
    list(run.steps())
    run.save()
    return {"reports": reports_of(run), "events": run.engine.events}


def main(transport: Transport) -> None:
    with threadpool_limits(1):
        found = [train(transport, task) for task in json.loads(sys.argv[2])]
    if transport.number == 0:
        sys.stdout.write(json.dumps(found))
    transport.close()


if __name__ == "__main__":
    job = transport_of(sys.argv[1])
    try:
        main(job)
    except Exception:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        sys.stderr.flush()
        job.abort(1)  # others would wait for ever
