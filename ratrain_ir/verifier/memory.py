"""Layer 3: addresses, by an independent sweep over lifetimes that shares no code with the allocator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.analysis.dependence_sweep import NONE
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Home, aligned
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.support.diagnostics import Note
from ratrain.ratrain_ir.text.printer import declaration_text
from ratrain.ratrain_ir.verifier.memory_sweep import conflicts

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.columns import StageColumns
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.ratrain_ir.verifier.reporter import Reporter


def check_memory(module: Module, report: Reporter, stages: Sequence[Stage]) -> None:
    """Run all rules of this layer on some stages; below level `allocated` no tensor may have an offset."""
    for stage in stages:
        columns = report.columns(stage)
        if module.level is Level.ALLOCATED:
            if check_offsets(columns, report):
                check_no_shared_byte(stage, columns, report)
            check_capacity(module, stage, columns.bytes_by_home, report)
        else:
            check_peak(module, stage, report)
            for tensor in stage.tensors.values():
                if tensor.offset is not None:
                    text = f"%{tensor.name} has an offset, but the module is at level {module.level.value}"
                    report.at_tensor("RT051", text, tensor)


def check_offsets(columns: StageColumns, report: Reporter) -> bool:
    """Report RT051 unless every tensor has an aligned offset; return True if all have."""
    starts = np.asarray(columns.starts, np.int64)
    wrong = np.flatnonzero((starts == NONE) | (starts % ALIGNMENT_BYTES != 0)).tolist()
    for number in wrong:
        tensor = columns.tensors[number]
        text = f"%{tensor.name} has no offset"
        if tensor.offset is not None:
            text = f"the offset {tensor.offset:#x} of %{tensor.name} is not a multiple of {ALIGNMENT_BYTES}"
        report.at_tensor("RT051", text, tensor)
    return not wrong


def check_capacity(module: Module, stage: Stage, bytes_by_home: Mapping[Home, int], report: Reporter) -> None:
    """Report RT052 unless the arena, and the bytes in other memories, fit the capacities of the target."""
    if module.target is None:
        return
    for home, nbytes in bytes_by_home.items():
        excess = nbytes - module.target.capacity_of(home)
        if excess > 0:
            what = "the arena" if home is Home.DDR else f"what is stored in '{home.value}'"
            text = f"{what} of stage @{stage.index} has {nbytes} bytes, {excess} more than the capacity"
            report.at_stage("RT052", text, stage)


def check_peak(module: Module, stage: Stage, report: Reporter) -> None:
    """Report RT053 unless the live bytes fit the capacity of the target, if one is named.

    No allocation can need fewer bytes.
    """
    if module.target is None:
        return
    for home in stage.homes:
        peak = lifetimes(stage, home).peak_bytes
        excess = peak - module.target.capacity_of(home)
        if excess > 0:
            where = "" if home is Home.DDR else f" in the memory '{home.value}'"
            text = f"stage @{stage.index} has {peak} bytes live at once{where}, {excess} more than the capacity"
            report.at_stage("RT053", text, stage)


def check_no_shared_byte(stage: Stage, columns: StageColumns, report: Reporter) -> None:
    """Report RT050 if two tensors that are live together share a byte of a memory.

    The ops are swept backwards. Carried tensors are live at the end; a use makes a tensor live, and before its
    definition it is not. The occupied ranges are kept sorted by address, and each range that enters is compared with
    its neighbours (`memory_sweep`).
    """
    carried: Any = np.flatnonzero(columns.carried)
    operands: Any = np.concatenate((np.asarray(columns.operands, np.int64), carried))
    bounds: Any = np.concatenate((np.asarray(columns.bounds, np.int64), np.full(4, len(operands))))
    given = bounds, operands, columns.starts, columns.stops
    if not conflicts(*given, [0] * len(columns.starts), 1):
        return
    # Something is wrong: sweep again to list conflicts. Which of several overlapping ranges are neighbours depends on
    # how equal ranges are ordered. Order them by name, so that the report does not depend on the order of declarations.
    tensors = [columns.tensors[number] for number in range(len(columns.starts))]
    places = {name: place for place, name in enumerate(sorted(tensor.name for tensor in tensors))}
    ranks = [places[tensor.name] for tensor in tensors]
    reported: set[frozenset[str]] = set()
    for entering, there, position in conflicts(*given, ranks, 2 * len(operands)):
        tensor, other = tensors[entering], tensors[there]
        pair = frozenset({tensor.name, other.name})
        if pair not in reported:
            reported.add(pair)
            _report_conflict(stage, tensor, other, stage.ops[min(position, len(stage.ops) - 1)], report)


def _report_conflict(stage: Stage, tensor: Tensor, other: Tensor, op: Op, report: Reporter) -> None:
    (start, stop), (other_start, other_stop) = (_range(each) for each in (tensor, other))
    shared = f"{max(start, other_start):#x} to {min(stop, other_stop):#x}"
    text = f"%{tensor.name} and %{other.name} are both live at '{op!r}' and share the bytes {shared}"
    source = report.module.source
    note = Note(f"the other is '{declaration_text(other)}'", source.locate(other.line) if source else None)
    if source:
        report.at_tensor("RT050", text, tensor, notes=[note])
    else:
        report.at_op("RT050", text, stage, op, tensor, notes=[note])


def _range(tensor: Tensor) -> tuple[int, int]:
    start = tensor.offset or 0
    return start, start + aligned(tensor.type.nbytes)
