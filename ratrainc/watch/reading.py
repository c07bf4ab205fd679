"""The log of a run as it grows: whole lines are read once, half of one waits for its end."""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from typing import Any

from attrs import define, field

from ratrain.ratrain_ir.support.diagnostics import Location, fail
from ratrain.ratrain_ir.support.files import opened_regular, path_errors, without_mark
from ratrain.targets.runtime.arena.locks import is_held_by_another, lock_beside

NUMBERS = (
    *("loss", "eval_loss", "tokens", "tokens_per_second", "gradient_norm", "loss_scale", "learning_rate", "mfu"),
    *("skipped_blocks", "resident_bytes", "planned_bytes"),
)
"""The keys of a line that are numbers, beside `step`."""
_PIECE = 1 << 24
_LONGEST = 1 << 26
"""Bytes of a line: many times what the stages of any run take."""


@define(eq=False)
class GrowingLog:
    """What a log holds so far, in columns; what a line does not have is nan in its column."""

    path: str
    steps: array[int] = field(factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(factory=lambda: {name: array("d") for name in NUMBERS})
    ranks: list[tuple[tuple[float, float, float, str], ...]] = field(factory=list)
    """of each step, by stage: least, median and most compute seconds, and the slowest rank; empty where they are not told"""
    seen: set[str] = field(factory=set)
    """the keys of which some line has a number"""
    bad_lines: list[int] = field(factory=list)
    """numbers of lines that cannot be read"""
    _place: int = 0
    _file: tuple[int, int] | None = None
    _lines: int = 0
    _half: bytes = b""

    @property
    def half_line(self) -> bool:
        """Whether the last line has no end."""
        return bool(self._half)

    @property
    def is_growing(self) -> bool:
        """Whether a run has the log open, as far as this machine can tell."""
        return is_held_by_another(lock_beside(self.path))

    def read(self) -> bool:
        """Read what was added since, or all anew where the file is another one or is shorter; whether anything changed.

        Raises `DiagnosticError` RT002 where it cannot be read, or is no log.
        """
        before = self._file, self._place, len(self.steps)
        with path_errors(f"cannot read the log '{self.path}'"), opened_regular(self.path) as stream:
            status = os.fstat(stream.fileno())
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
        if self.steps and step <= self.steps[-1]:  # a run that began there again
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
        fail(
            "RT002",
            "this is not a line of a run's log",
            Location(self.path, max(1, self._lines), 1),
            help="name what 'ratrainc run --log losses.jsonl' writes, or a folder with such files",
        )


def _number(value: Any) -> float:
    """A number that a line tells; nan where it tells none."""
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
