"""The end of a run: save the state before reporting an error, and report a run that trained nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Severity
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import status
from ratrain.ratrainc.console.safe_messages import show_safely

if TYPE_CHECKING:
    from ratrain.targets.runtime.training.training import TrainingRun


@contextmanager
def saved_first(run: TrainingRun) -> Iterator[None]:
    """Save the finished steps if an exception ends the block, and print where.

    An error while saving is printed as a warning; the first exception goes on.
    """
    try:
        yield
    except Exception:
        for said in _save(run):
            show_safely(said)
        raise


def _save(run: TrainingRun) -> list[Diagnostic]:
    """Save the finished steps; return warnings about it."""
    steps = run.steps_done
    try:
        with status("saving the state"):
            saved = run.save_what_is_done()
    except DiagnosticError as error:
        return [evolve(problem, severity=Severity.WARNING) for problem in error.diagnostics]
    if saved is None:
        return []
    text = f"the run ends early: '{saved}' has the state after {number_of(steps, 'step')}"
    way_out = f"go on with --resume {run.settings.saving.directory}"
    return [Diagnostic("RT093", text, help=way_out, severity=Severity.WARNING)]


def check_trained(run: TrainingRun) -> list[Diagnostic]:
    """Report updates that were skipped in every step because gradients overflowed; empty if some step had none.

    It is an error if all updates were skipped and the loss scale stays, so that later steps would do no better: nothing
    was trained. Otherwise it is a warning.
    """
    skipped = [step.report.skipped_blocks for step in run.done]
    if not skipped or not all(skipped):
        return []
    scale, plan = run.done[-1].report.loss_scale, run.program.plan
    falls = plan.has_dynamic_scale and scale > 1
    nothing = sum(skipped) == len(skipped) * run.updates_a_step
    count = number_of(len(skipped), "step") if len(skipped) > 1 else "the only step"
    if nothing:
        text = f"nothing was trained: the gradients of {count} overflowed, and every update was left out"
    else:
        text = (
            f"gradients overflowed in {count}, and {sum(skipped)} of {len(skipped) * run.updates_a_step} "
            "updates were left out"
        )
    if falls:
        text += f"; the loss scale has fallen to {scale:g}"
        way_out = "run more steps: it goes on falling until gradients fit"
    else:
        text += f"; the loss scale stays at {scale:g}"
        way_out = (
            'compile the plan with loss_scale = "dynamic", or a smaller one'
            if scale > 1
            else (
                "gradients overflow without a loss scale: lower the learning rate, or compile the plan with "
                "grad_dtype = "
                '"f32" or "bf16"'
            )
        )
    severity = Severity.ERROR if nothing and not falls else Severity.WARNING
    return [Diagnostic("RT093", text, help=way_out, severity=severity)]
