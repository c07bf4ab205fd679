"""The verifier: what a module must satisfy at its level. Rules are named functions with stable codes, in layers.

1. structure (`structure`): legality at the level RT026; blocks and micro-batches that exist RT027; operand kinds and types RT025;
   single definition, definition before use, releases RT020 - RT023, RT028.
2. dataflow (`dataflow`): a symbolic run of every stage. Each micro-batch's forward, backward (whole, or both halves) and recovery
   happens exactly once on the right values RT030, RT032; gradients gather every micro-batch in ascending order and are reduced
   and applied exactly once RT031; carried tensors hold the next step's values at the end RT024.
3. memory (`memory`): offsets RT051, no shared byte RT050, arena within the capacity RT052; what is live at once, RT053.
4. communication (`communication`): sends match receives, in order RT040, RT041; collectives agree RT043; the order and bound of the
   schedule that is claimed RT044; the
   program makes progress with buffered and with rendezvous sends, across the step's end RT042.
5. workspace (`workspace`), where a target is given: each op of a module that names its target has what its routine needs RT025.

Errors in one layer stop the later ones, whose findings would be noise. All errors of a layer are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.side_by_side import each_stage, processes_for
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.verifier.communication import check_communication
from ratrain.ratrain_ir.verifier.memory import check_memory
from ratrain.ratrain_ir.verifier.report import FoundError, Reporter, refuser
from ratrain.ratrain_ir.verifier.structure import check_structure
from ratrain.ratrain_ir.verifier.symbolic_traces import check_dataflow
from ratrain.ratrain_ir.verifier.workspace import check_workspace

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.target import Target

LAYERS: tuple[Callable[[Module, Reporter, Sequence[Stage]], None], ...] = (
    check_structure,
    check_dataflow,
    check_memory,
)
"""What is asked of each stage alone, before what is asked of them all."""


def verify(module: Module, diagnostics: Diagnostics, target: Target | None = None) -> None:
    """Report everything that is wrong with a module; with the target it names, also what its routines lack."""
    reporter = Reporter(module, diagnostics)
    ops = sum(len(stage.ops) for stage in module.stages)
    if processes_for(len(module.stages), work=ops) > 1 and _stages_are_sound(module, target):
        check_communication(module, reporter)
        return
    for layer in LAYERS:
        layer(module, reporter, module.stages)
        if diagnostics.errors:
            return
    check_communication(module, reporter)
    if target is not None and not diagnostics.errors:
        check_workspace(module, target, reporter, module.stages)


def _stages_are_sound(module: Module, target: Target | None) -> bool:
    """Whether no rule about one stage finds anything in any, each looked at by itself, side by side."""
    report = refuser(module)

    def is_sound(stage: Stage) -> bool:
        try:
            for layer in LAYERS:
                layer(module, report, [stage])
            if target is not None:
                check_workspace(module, target, report, [stage])
        except FoundError:
            return False
        return not report.diagnostics.items

    first, *others = module.stages
    # the first one loads the loops, for processes beside this one too
    return is_sound(first) and all(each_stage(is_sound, others))


def check(module: Module, target: Target | None = None) -> None:
    """Raise `DiagnosticError` unless the module is sound."""
    diagnostics = Diagnostics()
    verify(module, diagnostics, target)
    diagnostics.check()
