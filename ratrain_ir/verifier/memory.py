"""Layer 3: addresses. An independent sweep over lifetimes; it shares no code with the allocator."""

from __future__ import annotations

from bisect import bisect_left, insort

from attrs import define, field

from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.diagnostics import Note
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops import Release, Tensor
from ratrain.ratrain_ir.printer import declaration_text
from ratrain.ratrain_ir.types import ALIGNMENT_BYTES, Home, aligned
from ratrain.ratrain_ir.verifier.report import Reporter


def check_memory(module: Module, report: Reporter) -> None:
    """Run all rules of this layer; below the level `allocated` no tensor may claim an address."""
    for stage in module.stages:
        if module.level is Level.ALLOCATED:
            if check_offsets(stage, report):
                check_no_shared_byte(stage, report)
            check_capacity(module, stage, report)
        else:
            check_peak(module, stage, report)
            for tensor in stage.tensors.values():
                if tensor.offset is not None:
                    text = f"%{tensor.name} has an offset, but the module is at level {module.level.value}"
                    report.at_tensor("RT051", text, tensor)


def check_offsets(stage: Stage, report: Reporter) -> bool:
    """RT051: every tensor has an aligned offset."""
    sound = True
    for tensor in stage.tensors.values():
        if tensor.offset is None:
            report.at_tensor("RT051", f"%{tensor.name} has no offset", tensor)
            sound = False
        elif tensor.offset % ALIGNMENT_BYTES:
            text = f"the offset {tensor.offset:#x} of %{tensor.name} is not a multiple of {ALIGNMENT_BYTES}"
            report.at_tensor("RT051", text, tensor)
            sound = False
    return sound


def check_capacity(module: Module, stage: Stage, report: Reporter) -> None:
    """RT052: the arena, and what is stored in other memories, fit the capacities of the target."""
    if module.target is None:
        return
    for home in stage.homes:
        nbytes = stage.bytes_in(home)
        excess = nbytes - module.target.capacity_of(home)
        if excess > 0:
            what = "the arena" if home is Home.DDR else f"what is stored in '{home.value}'"
            text = f"{what} of stage @{stage.index} has {nbytes} bytes, {excess} more than the capacity"
            report.at_stage("RT052", text, stage)


def check_peak(module: Module, stage: Stage, report: Reporter) -> None:
    """RT053: where workspace has been sized, what is live at once fits the capacity: more than that no allocation can do."""
    if module.target is None:
        return
    for home in stage.homes:
        peak = lifetimes(stage, home).peak_bytes
        excess = peak - module.target.capacity_of(home)
        if excess > 0:
            where = "" if home is Home.DDR else f" in the memory '{home.value}'"
            text = f"stage @{stage.index} has {peak} bytes live at once{where}, {excess} more than the capacity"
            report.at_stage("RT053", text, stage)


def check_no_shared_byte(stage: Stage, report: Reporter) -> None:
    """RT050: no two tensors that are live together share a byte of a memory.

    A backward liveness sweep (what is carried is live at the end; a use makes live, a definition ends that) keeps the occupied
    ranges sorted by address, and compares every range that enters with its neighbours.
    """
    memories = {home: _Occupied(stage, report) for home in stage.homes}
    for tensor in stage.tensors.values():
        if tensor.carried:
            memories[tensor.home].enter(tensor, len(stage.ops) - 1)
    for position in range(len(stage.ops) - 1, -1, -1):
        op = stage.ops[position]
        if type(op) is Release:
            continue
        for tensor in op.operands:
            occupied = memories[tensor.home]
            if tensor not in occupied.live:
                occupied.enter(tensor, position)
        for tensor in op.writes + op.scratch:
            occupied = memories[tensor.home]
            if tensor in occupied.live and tensor not in op.reads:
                occupied.leave(tensor)


@define(eq=False)
class _Occupied:
    """Ranges of live tensors of a memory, sorted by address."""

    stage: Stage
    report: Reporter
    live: set[Tensor] = field(factory=set)
    ranges: list[tuple[int, int, str]] = field(factory=list)
    reported: set[frozenset[str]] = field(factory=set)

    def enter(self, tensor: Tensor, position: int) -> None:
        start, end, _ = entry = _range(tensor)
        at = bisect_left(self.ranges, entry)
        for other_start, other_end, name in self.ranges[max(0, at - 1) : at + 1]:
            if other_start < end and start < other_end:
                shared = f"{max(start, other_start):#x} to {min(end, other_end):#x}"
                self.conflict(tensor, self.stage.tensors[name], position, shared)
        insort(self.ranges, entry)
        self.live.add(tensor)

    def leave(self, tensor: Tensor) -> None:
        del self.ranges[bisect_left(self.ranges, _range(tensor))]
        self.live.discard(tensor)

    def conflict(self, tensor: Tensor, other: Tensor, position: int, shared: str) -> None:
        pair = frozenset({tensor.name, other.name})
        if pair in self.reported:
            return
        self.reported.add(pair)
        op = self.stage.ops[position]
        text = f"%{tensor.name} and %{other.name} are both live at '{op!r}' and share the bytes {shared}"
        source = self.report.module.source
        note = Note(f"the other is '{declaration_text(other)}'", source.locate(other.line) if source else None)
        if source:
            self.report.at_tensor("RT050", text, tensor, notes=[note])
        else:
            self.report.at_op("RT050", text, self.stage, op, tensor, notes=[note])


def _range(tensor: Tensor) -> tuple[int, int, str]:
    start = tensor.offset or 0
    return start, start + aligned(tensor.type.nbytes), tensor.name
