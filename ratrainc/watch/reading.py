r"""The log of a run as it grows: whole lines are read once, half a line waits for its end.

    read 1    {"step": 0, ...}\n{"step": 1, ...}\n{"ste        2 rows, 5 bytes wait
    read 2    p": 2, ...}\n{"step": 2, ...}\n                  step 2 again: the first row of it is dropped

A line with a step that is already there means that a resumed run began again at that step: the rows from there on are
replaced. A shorter file, or another file under the name, is read anew.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from typing import Any

from attrs import define, field

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Location
from ratrain.ratrain_ir.support.files import opened_regular, path_errors, without_mark
from ratrain.targets.runtime.arena.locks import is_held_by_another, lock_path

NUMBERS = (
    *("loss", "eval_loss", "tokens", "tokens_per_second", "gradient_norm", "loss_scale", "learning_rate", "mfu"),
    *("skipped_blocks", "resident_bytes", "planned_bytes", "busiest_expert"),
)
"""Keys of a line that are numbers, in addition to `step`."""
_PIECE = 1 << 24
_LONGEST = 1 << 26
"""Longest line in bytes: many times what the stages of any run take."""


class NoLogError(DiagnosticError):
    """Refusal of a file that can be read, and is not the log of a run."""


@define(eq=False)
class GrowingLog:
    """The contents of a log so far, in columns; nan for keys that a line does not have."""

    path: str
    steps: array[int] = field(factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(factory=lambda: {name: array("d") for name in NUMBERS})
    ranks: list[tuple[tuple[float, float, float, str], ...]] = field(factory=list)
    """least, median and most compute seconds and the slowest rank, by step and stage; empty if the line has none"""
    seen: set[str] = field(factory=set)
    """keys for which some line has a number"""
    bad_lines: list[int] = field(factory=list)
    """numbers of lines that cannot be read"""
    _place: int = 0
    _file: tuple[int, int] | None = None
    _lines: int = 0
    _half: bytes = b""

    @property
    def half_line(self) -> bool:
        """True if the last line has no end yet."""
        return bool(self._half)

    @property
    def is_growing(self) -> bool:
        """True if a run has the log open, as far as this machine can tell."""
        return is_held_by_another(lock_path(self.path))

    def read(self) -> bool:
        """Read what was added; return True if anything changed.

        Another file, or a shorter one, is read anew. Raises `DiagnosticError` RT002 if it cannot be read, and
        `NoLogError` RT002 if it is not a log.
        """
        before = self._file, self._place, len(self.steps)
        with path_errors(f"cannot read the log '{self.path}'"), opened_regular(self.path) as stream:
            status = os.fstat(stream.fileno())
            # a resumed run replaces its log by a new file without the steps that come again
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._place:
                self._forget()
                self._file = status.st_dev, status.st_ino
            stream.seek(self._place)
            while piece := stream.read(_PIECE):
                self._place += len(piece)
                *lines, self._half = (self._half + piece).split(b"\n")
                for line in lines:
                    self._lines += 1
                    self._take(line)
                if len(self._half) > _LONGEST:
                    self._refuse()
        if self._half and not self._lines and not without_mark(self._half).startswith(b"{"):
            self._refuse()
        return before != (self._file, self._place, len(self.steps))

    def _forget(self) -> None:
        self.steps, self.columns = array("q"), {name: array("d") for name in NUMBERS}
        self.ranks, self.seen, self.bad_lines = [], set(), []
        self._place, self._lines, self._half = 0, 0, b""

    def _take(self, line: bytes) -> None:
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):
            told = None
        step = told.get("step") if isinstance(told, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 62:
            self.bad_lines.append(self._lines)
            if not self.steps and self._lines == len(self.bad_lines):
                self._refuse()
            return
        if self.steps and step <= self.steps[-1]:  # a resumed run began again at this step
            self._cut(bisect_left(self.steps, step))
        self.steps.append(step)
        for name, column in self.columns.items():
            value = _number(told.get(name))
            column.append(value)
            if math.isfinite(value):
                self.seen.add(name)
        self.ranks.append(_stages(told.get("compute_seconds")))

    def _cut(self, rows: int) -> None:
        del self.steps[rows:], self.ranks[rows:]
        for column in self.columns.values():
            del column[rows:]

    def _refuse(self) -> None:
        text, place = "this is not a line of a run's log", Location(self.path, max(1, self._lines), 1)
        way_out = "name what 'ratrainc run --log losses.jsonl' writes, or a folder with such files"
        raise NoLogError([Diagnostic("RT002", text, place, help=way_out)])


def _number(value: Any) -> float:
    """Return the number in a line; nan for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return math.nan


def _stages(told: Any) -> tuple[tuple[float, float, float, str], ...]:
    if not isinstance(told, list):
        return ()
    found = []
    for stage in told:
        if not isinstance(stage, dict):
            return ()
        least, median, most = (_number(stage.get(name)) for name in ("least", "median", "most"))
        if not math.isfinite(least + median + most):
            return ()
        found.append((least, median, most, str(stage.get("slowest"))))
    return tuple(found)
