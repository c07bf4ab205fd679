"""Lowest held-out loss of a run so far: what early stopping waits for, and which state `--save-best` keeps."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

from attrs import define

NOTE = "evaluation"
"""Name of the note in a checkpoint with which a resumed run goes on counting."""


@define
class Best:
    """Lowest held-out loss, and the evaluations since."""

    data: str
    """digest of the held-out data: losses of other data do not compare"""
    loss: float = inf
    step: int = 0
    """steps done when it was found"""
    since: int = 0
    """evaluations after it, none of which was lower"""

    @classmethod
    def noted(cls, notes: Mapping[str, Any], data: str) -> Best:
        """Return the best that a checkpoint's notes hold for the same data; else none yet."""
        held = notes.get(NOTE)
        if not isinstance(held, dict) or held.get("data") != data:
            return cls(data)
        loss, step, since = held.get("loss"), held.get("step"), held.get("since")
        if not isinstance(loss, float) or not isinstance(step, int) or not isinstance(since, int):
            return cls(data)
        return cls(data, loss, step, since)

    def note(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; nothing before the first finite loss, which JSON could not hold."""
        if not isfinite(self.loss):
            return {}
        return {NOTE: {"data": self.data, "loss": self.loss, "step": self.step, "since": self.since}}

    def hear(self, loss: float, step: int) -> bool:
        """Take the loss of an evaluation; return True if it is the lowest so far."""
        if isfinite(loss) and loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False
