"""Error of answers: distances between predicted and published peaks, by framework.

`benchmarks/fit_cases.py` holds predictions against the peaks of benchmarks/published, of which half of the rows of
fit-cases.csv, and all of other tables, were not looked at for any constant. A test holds these figures to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.bridge.jobs.context_ranks import code_of
from ratrain.ratrainc.bridge.jobs.job import ZERO_STAGES, Sharding
from ratrain.ratrainc.fit.holdings.styles import MEGATRON

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job

LEAST = 0.05
"""Least error that an answer admits, however near the few published peaks are."""
MANY = 10
"""Peaks from which on the error is that of nine in ten; of fewer it is the largest."""
HELD: Mapping[str, tuple[int, float]] = {
    "megatron-lm": (51, 0.032),
    "torchtitan": (6, 0.061),
    "torchtune": (5, 0.025),
    "litgpt": (1, 0.001),
    "context ranks of PyTorch": (4, 0.083),
    "adapters": (6, 0.152),
    "adapters with FSDP 1": (15, 0.349),
}
"""By framework, or by mechanism for adapters, the published peaks and the error within which they are predicted."""
RAN_OUT: Mapping[str, tuple[int, float]] = {"DeepSpeed": (1, 0.135)}
"""By mechanism, the published runs that ran out of memory on devices that have more than is predicted, and the least
error of these predictions that explains them."""
EXPERTS = "models with experts"
"""Name of peaks of such models, of which none is published with all settings that a formula reads."""
WORST = 0.104
"""Largest error of any of these peaks, adapters' peaks apart."""


@frozen
class Band:
    """Error of a framework's answers."""

    error: float
    """share of a peak"""
    text: str
    """the error, and the published peaks that tell it"""


def group_of(job: Job) -> str:
    """Return the name of the peaks by which a job is judged.

    That is its framework, its kind of adapters, experts, or the code of its context ranks.
    """
    if job.model is not None and job.model.experts is not None:
        return EXPERTS
    if job.adapter is None:
        return f"context ranks of {code_of(job).value}" if job.cp > 1 else job.framework
    return "adapters with FSDP 1" if job.sharding is Sharding.FSDP1 else "adapters"


def band_of(job: Job) -> Band:
    """Return the error of a job's framework; without a published peak under it, the worst of the others.

    It is no less than what explains runs that ran out of memory under the same mechanism.
    """
    band = _band_of_peaks(job)
    count, error = RAN_OUT.get(mechanism_of(job), (0, 0.0))
    if error <= band.error:
        return band
    runs = f"{number_of(count, 'published run')} under {mechanism_of(job)}"
    return Band(error, f"{band.text}, and {runs} ran out of memory with {error:.1%} more than predicted")


def mechanism_of(job: Job) -> str:
    """Return the name of the mechanism that shards a job's state, of those whose runs are told by `RAN_OUT`."""
    return "DeepSpeed" if job.sharding in ZERO_STAGES[1:] and job.framework not in MEGATRON else ""


def _band_of_peaks(job: Job) -> Band:
    name = group_of(job)
    held = HELD.get(name)
    if held is None:
        whose = f"under {name}" if name == job.framework else f"of {name}"
        text = f"no published peak {whose} to check against; the worst error elsewhere is {WORST:.1%}"
        return Band(WORST, text)
    count, error = held
    share = "9 in 10 of" if count >= MANY else "all" if count > 1 else "the"
    peaks = f"{share} {count} published peaks" if count > 1 else "the one published peak"
    admitted = max(LEAST, error)
    whose = f"under {name}" if name == job.framework else f"of {name}"
    return Band(admitted, f"{peaks} {whose} within {error:.1%}; counted as {admitted:.1%}")
