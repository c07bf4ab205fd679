"""The differences between two schedules, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from ratrain.ratrain_ir.analysis.module_diff import StageDiff, diff_modules
from ratrain.ratrainc.console.parts import Part, Shown

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module

_SHOWN = 12


@frozen(repr=False)
class Difference(Shown):
    """The differences between two modules, stage by stage."""

    machines: tuple[str | None, str | None]
    """the machines that the two were compiled for; None for a module compiled for none"""
    stages: tuple[StageDiff, ...]

    @property
    def is_empty(self) -> bool:
        """True if nothing differs."""
        return self.machines[0] == self.machines[1] and all(stage.is_empty for stage in self.stages)

    def parts(self) -> Iterator[Part]:
        """Yield lines in schedule terms."""
        before, after = self.machines
        if before != after:
            yield f"compiled for: {before or 'no machine'} -> {after or 'no machine'}"
        if self.is_empty:
            yield "no difference"
        for stage in self.stages:
            if not stage.is_empty:
                yield from _lines(stage)

    def to_json(self) -> dict[str, Any]:
        """Return the difference as `--json` prints it."""
        return {"machines": list(self.machines), "stages": [asdict(stage) for stage in self.stages]}


def difference(before: Module, after: Module) -> Difference:
    """Compare two modules."""
    return Difference((_machine_text(before), _machine_text(after)), tuple(diff_modules(before, after)))


def _machine_text(module: Module) -> str | None:
    """Return the machine that a module is for, with a digest to tell it from others of the name; None without one."""
    target = module.target
    if target is None:
        return None
    digest = f" ({target.digest[:12]})" if target.digest else ""
    return f"{target.name}{digest}, {target.capacity_bytes} bytes a stage"


def _lines(stage: StageDiff) -> list[str]:
    lines = [f"stage @{stage.stage}: peak live {stage.peak_before} -> {stage.peak_after} bytes"]
    lines += _some("+ op", stage.added) + _some("- op", stage.dropped)
    lines += _some("~ moved", [f"{move.op}: {move.before} -> {move.after}" for move in stage.moved])
    lines += _some("~ operands of", stage.changed)
    lines += _some("+ tensor", stage.new_tensors) + _some("- tensor", stage.gone_tensors)
    if stage.readdressed:
        lines.append(f"  ~ {stage.readdressed} tensors have another address")
    lines += _some(
        "~ released", [f"%{each.tensor}: {_behind(each.before)} -> {_behind(each.after)}" for each in stage.released]
    )
    return lines


def _behind(op: str | None) -> str:
    return "nowhere" if op is None else f"behind {op}" if op else "at the start"


def _some(mark: str, items: Sequence[str]) -> list[str]:
    lines = [f"  {mark} {item}" for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"  {mark} ... and {len(items) - _SHOWN} more")
    return lines
