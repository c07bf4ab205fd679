"""The refusal of a request without a plan: what is proved, and what comes nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ratrain.ratrain_ir.support.diagnostics import Note, fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import capacity_text, size_text
from ratrain.ratrainc.planner.space.context_ranks import left_out as contexts_left_out
from ratrain.ratrainc.planner.space.tensor_ranks import left_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrainc.planner.search.answer import Answer


_MORE = 16
"""Factor of clusters that the advice lets `--smallest` try."""


def nearest_text(answer: Answer) -> str:
    """Say which oversized shape lacks least; empty if there is none."""
    nearest = answer.nearest
    if nearest is None:
        return ""
    shape, family = nearest.shape, f"{nearest.family} " if answer.request.families else ""
    lacking = size_text(int(nearest.short_bytes))
    return f"nearest: {family}{shape.summary}: stage @{nearest.stage} lacks at least {lacking}"


def _either(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def no_plan(answer: Answer) -> NoReturn:
    """Refuse with `DiagnosticError` RT053; say if it is proved that nothing fits, and what comes nearest."""
    request = answer.request
    proved = answer.proven_empty
    count = len(answer.refused)
    refused = f": the compiler refused {number_of(count, 'plan')}, the rest were not tried" if count else ""
    not_proved = f"not proved: bounds on bytes do not rule out every plan{refused}"
    notes = [Note("proved: bounds on bytes rule out every plan" if proved else not_proved)]
    notes += [Note(text) for text in (nearest_text(answer),) if text]
    notes += [
        Note(f"the compiler refused {c.plan.summary}: {c.evaluation.refusal}")
        for c in answer.refused[:3]
        if c.evaluation
    ]
    # expert ranks that are asked for go with neither
    goes = request.expert_ranks is None or 1 in request.expert_ranks
    unasked = left_out(request.setting, request.clusters) if request.peers is None and goes else ()
    if unasked:
        numbers = ",".join(map(str, unasked))
        text = f"tensor-parallel ranks that do not divide {number_of(request.clusters, 'cluster')} were not looked at"
        notes += [Note(f"{text}: '--tp {numbers}' looks at them")]
    unasked = contexts_left_out(request.setting, request.clusters, request.contexts) if goes else ()
    if unasked:
        text = f"{_either(unasked)} context ranks, which share the tokens of a sequence, were not looked at"
        notes += [Note(f"{text}: '--cp 1,{','.join(map(str, unasked))}' looks at them")]
    account = request.machine.capacity(request.clusters > 1).account
    notes += [Note(f"of a rank {account}")] if account is not None else []
    more = "more time (--seconds), or every plan (--exhaustive); else "
    fail(
        "RT053",
        f"no plan of {request.model.name} with {number_of(request.global_batch, 'sequence')} of "
        f"{number_of(request.seq_len, 'token')} "
        f"{'fits' if proved else 'was found that fits'} {number_of(request.clusters, 'cluster')} of "
        f"{capacity_text(request.machine.whole('ddr_capacity'))}",
        notes=notes,
        help=f"{'' if proved or request.exhaustive else more}use more clusters ('--clusters {_MORE * request.clusters} "
        "--smallest' in place of the batch finds the fewest that fit), shorter sequences, or another strategy",
    )
