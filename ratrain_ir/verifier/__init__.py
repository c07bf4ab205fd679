"""Verifier: proves that a module is sound at its level. Rules are named functions with stable codes, in layers.

1. structure (`structure`): ops are legal at the level RT026; blocks and micro-batches exist RT027; operands have the
   right kinds and types RT025; each tensor is defined once, before its use, and released RT020 - RT023, RT028.
2. dataflow (`dataflow`): a symbolic run of every stage. Each micro-batch's forward, backward (whole, or both halves)
   and recovery happens exactly once on the right values RT030, RT032; gradients gather every micro-batch in ascending
   order and are reduced and applied exactly once RT031; carried tensors hold the next step's values at the end RT024.
3. memory (`memory`): offsets are valid RT051, no byte is shared RT050, the arena fits the capacity RT052, and so do the
   live bytes RT053.
4. communication (`communication`): sends match receives, in order RT040, RT041; collectives agree RT043; order and
   bound are those of the claimed schedule RT044; the program makes progress with buffered and with rendezvous sends,
   across the step's end RT042.
5. workspace (`workspace`), if a target is given: each op of a module that names its target has the workspace that its
   routine needs RT025.

Errors in one layer stop the later ones, which would report consequences only. All errors of a layer are reported.

Each rule is written once, over an op of each kind or over columns (`analysis.columns`). A large text is proved from
columns that are read from it without making ops (`prove_text`). If anything is wrong there, the text is parsed, and the
findings are reported from its ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.columns import FoundError, StageColumns
from ratrain.ratrain_ir.module import Level, Stage
from ratrain.ratrain_ir.ops.messages import OFFLOAD_OPS
from ratrain.ratrain_ir.process_pool import each, each_stage
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.loops import at_any_size
from ratrain.ratrain_ir.verifier.communication import check_communication, check_stage_claim
from ratrain.ratrain_ir.verifier.memory import check_memory
from ratrain.ratrain_ir.verifier.reporter import Reporter, refuser
from ratrain.ratrain_ir.verifier.stage_ends import StageEnds, stage_ends
from ratrain.ratrain_ir.verifier.structure import check_structure
from ratrain.ratrain_ir.verifier.symbolic_traces import check_dataflow
from ratrain.ratrain_ir.verifier.workspace import check_workspace

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.target import Target
    from ratrain.ratrain_ir.text.text_numbers import NumberedText

LAYERS: tuple[Callable[[Module, Reporter, Sequence[Stage]], None], ...] = (
    check_structure,
    check_dataflow,
    check_memory,
)
"""Layers that look at each stage alone; they come before the rules about all stages together."""
_BYTES_OF_AN_OP = 150
"""Approximate bytes of text of an op, with its share of declarations."""


def verify(module: Module, diagnostics: Diagnostics, target: Target | None = None) -> None:
    """Report everything that is wrong with a module.

    With `target`, the one that the module names, also check the workspace of each op (layer 5).
    """
    # Stages are only proved or refused at first, one by one, so that what is known of one need not be kept. If one
    # is refused, all are checked again below, in order, for the messages. The first stage is proved in this process,
    # which loads the loops that forked processes then have.
    first, *others = module.stages
    found = [prove_stage(module, first, target)]
    found += each_stage(lambda stage: prove_stage(module, stage, target), others) if found[0] is not None else []
    reporter, ends = Reporter(module, diagnostics), [each for each in found if each is not None]
    if len(ends) == len(module.stages):
        check_communication(module, reporter, ends, claimed=True)
        return
    for layer in LAYERS:
        layer(module, reporter, module.stages)
        if diagnostics.errors:
            return
    ends = [stage_ends(module, stage, reporter.columns(stage)) for stage in module.stages]
    check_communication(module, reporter, ends)
    if target is not None and not diagnostics.errors:
        check_workspace(module, target, reporter, module.stages)


def check(module: Module, target: Target | None = None) -> None:
    """Raise `DiagnosticError` unless the module is sound."""
    diagnostics = Diagnostics()
    verify(module, diagnostics, target)
    diagnostics.check()


def is_provable(module: Module) -> bool:
    """Tell whether the text of a module can be proved from columns: it must be allocated and without slices."""
    return module.level is Level.ALLOCATED and module.target is not None and not module.plan.slices


def prove_text(module: Module, text: NumberedText, target: Target | None) -> int | None:
    """Prove that the text of a module that `is_provable` is sound on a target; return its number of ops.

    Return None if there is no target, something may be wrong, or stages keep bytes for each other: the text must then
    be parsed and verified. Raises `UnusualTextError` while it is read.
    """
    if target is None:
        return None

    def proved(index: int) -> StageEnds | None:
        with at_any_size():  # reading the text has loaded the compiled loops already
            columns = text.stage(index)
            if any(isinstance(op, OFFLOAD_OPS) for op in columns.examples):
                return None
            return prove_stage(module, module.stages[index], target, columns)

    # the first stage is proved here, which loads the loops for the processes too
    found = [proved(0), *each(proved, range(1, len(module.stages)), work=text.nbytes // _BYTES_OF_AN_OP)]
    ends = [each for each in found if each is not None]
    if len(ends) < len(found):
        return None
    try:
        check_communication(module, refuser(module), ends, claimed=True)
    except FoundError:
        return None
    return sum(stage.events.count for stage in ends)


def prove_stage(
    module: Module, stage: Stage, target: Target | None, columns: StageColumns | None = None
) -> StageEnds | None:
    """Check a stage alone; return its ends, or None if a rule about one stage finds anything.

    With `columns`, which are allocated, the ops of the stage need not exist.
    """
    report = refuser(module)
    ordered = stage
    if columns is not None:
        report.know(stage, columns)
        ordered = Stage(stage.index, {}, list(columns.bare_passes()))
    try:
        for layer in LAYERS:
            layer(module, report, [stage])
        if target is not None:
            check_workspace(module, target, report, [stage])
        if module.level is not Level.DATAFLOW:
            check_stage_claim(module, ordered, report)
        return stage_ends(module, stage, report.columns(stage))
    except FoundError:
        return None
