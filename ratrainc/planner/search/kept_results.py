"""Results of tasks, kept in a file as they are found: of validated rows, of compared strategies.

A line is JSON: the row's id or the strategy's name, a key, and its evaluation. The key is a digest of the task and of
the installed code, so a changed row, machine, plan or compiler is evaluated anew, and its line stays as a record. A run
that was stopped goes on behind its last whole line.

    {"id": "zb-t4-1.5b-p8-b6-m24", "key": "3f0c...", "evaluation": {"step_seconds": 1.17, "peak_bytes": [...], ...}}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, fields

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Location, fail
from ratrain.ratrain_ir.support.files import is_there, read_text
from ratrain.ratrain_ir.support.proof_cache import entry_name, installation
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation
from ratrain.ratrainc.planner.search.workers import evaluate_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ratrain.ratrainc.planner.search.plan_evaluation import Task

_FIELDS = {item.name for item in fields(PlanEvaluation)} - {"disturbance", "taken"}
_TUPLES = ("peak_bytes", "schedule_bytes")


@define
class KeptResults:
    """The results in a file, by key; new ones are appended to it."""

    path: Path
    found: dict[str, PlanEvaluation]

    @classmethod
    def of(cls, path: str) -> KeptResults:
        """Read the file, if it is there. A last line without an end was not written whole and is removed.

        Raises `DiagnosticError` RT002 if it cannot be read, written, or holds something else.
        """
        file, whole = Path(path), ""
        found: dict[str, PlanEvaluation] = {}
        if is_there(path):
            text = read_text(path, "file of results")
            whole = text[: text.rfind("\n") + 1]
            for number, line in enumerate(whole.splitlines(), 1):
                found.update([_read(line, Location(path, number))])
        try:
            with file.open("a", encoding="utf-8") as handle:
                os.truncate(handle.fileno(), len(whole.encode()))
        except OSError as error:
            fail("RT002", f"cannot write the results '{path}': {error.strerror}")
        return cls(file, found)

    def get(self, task: Task) -> PlanEvaluation | None:
        """Return the evaluation of a task, if the file has it."""
        return self.found.get(_key(task))

    def put(self, name: str, task: Task, evaluation: PlanEvaluation) -> None:
        """Append the evaluation of a task, by name. Raises `DiagnosticError` RT002 if the file cannot be written."""
        data = asdict(evaluation, filter=lambda attribute, _value: attribute.name in _FIELDS)
        line = json.dumps({"id": name, "key": _key(task), "evaluation": data})
        try:
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(line + "\n")
        except OSError as error:
            fail("RT002", f"cannot write the results '{self.path}': {error.strerror}")


def evaluate_kept(
    tasks: Sequence[tuple[str, Task]],
    jobs: int,
    kept: KeptResults | None,
    hear: Callable[[int, PlanEvaluation | DiagnosticError], None],
    begin: Callable[[int], None] = lambda _number: None,
) -> list[PlanEvaluation | DiagnosticError]:
    """Evaluate named tasks as `evaluate_all` does, but those that are in `kept`, which are heard first.

    What is found goes there, unless it was stopped.
    """
    known = {} if kept is None else {number: was for number, (_, task) in enumerate(tasks) if (was := kept.get(task))}
    for number, was in known.items():
        hear(number, was)
    left = [number for number in range(len(tasks)) if number not in known]

    def note(at: int, found: PlanEvaluation | DiagnosticError) -> None:
        if kept is not None and isinstance(found, PlanEvaluation) and not found.stopped:
            kept.put(*tasks[left[at]], found)
        hear(left[at], found)

    found = evaluate_all([tasks[number][1] for number in left], jobs, note, lambda at: begin(left[at]))
    every = {**known, **dict(zip(left, found, strict=True))}
    return [every[number] for number in range(len(tasks))]


def _key(task: Task) -> str:
    """Return the digest of a task; it changes with the code, unless the code was edited while this process runs."""
    return entry_name(installation() or "", "validation", [repr(task).encode()])


def _read(line: str, place: Location) -> tuple[str, PlanEvaluation]:
    try:
        data = json.loads(line)
        evaluation: dict[str, Any] = data["evaluation"]
        tuples = {name: tuple(evaluation[name]) for name in _TUPLES}
        return str(data["key"]), PlanEvaluation(**{**evaluation, **tuples})
    except (ValueError, KeyError, TypeError):
        fail(
            "RT002",
            "this is not a line of results of 'ratrainc validate' or 'compare'",
            place,
            help="name another file, which is made if it is not there",
            source=line,
        )
