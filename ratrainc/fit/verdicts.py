"""Comparison of predicted peaks with the memory of a device.

A peak is compared together with the band, the error of such answers against published runs (`bands.py`): above the
memory in any case does not fit, below it in any case fits, and in between is too close to call. A job, its ways out
and its limits are compared alike, each with the band of its own settings, so that no two answers contradict each other.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from ratrain.ratrainc.fit.bands import band_of
from ratrain.ratrainc.fit.holdings.experts import hot_expert
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.part import Part

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job


class Verdict(Enum):
    """Answers to the question of a job's fit, as far as the error of the formulas tells, the best first."""

    FITS = "fits"
    CLOSE = "too close to call"
    FAILS = "does not fit"
    OPEN = "no capacity given"

    @property
    def sure(self) -> bool | None:
        """True or false if it is known whether the job fits, else None."""
        return {Verdict.FITS: True, Verdict.FAILS: False}.get(self)

    @property
    def place(self) -> int:
        """Place in the order of answers, the best first."""
        return list(Verdict).index(self)


def most_bytes(job: Job) -> int:
    """Return the bytes of the device that the fullest rank of a job takes."""
    return max(rank.reserved_bytes for rank in holdings(job))


def compared(job: Job, peak: int, capacity: int | None) -> Verdict:
    """Compare a job's peak with the capacity, within the band; a lower bound never says that a job fits."""
    if capacity is None:
        return Verdict.OPEN
    if surely_fits(job, peak, capacity):
        return Verdict.CLOSE if job.not_understood else Verdict.FITS
    return Verdict.CLOSE if may_fit(job, peak, capacity) else Verdict.FAILS


def surely_fits(job: Job, peak: int, capacity: int) -> bool:
    """Tell whether what is understood of a job fits whatever the error, and whatever its routers of experts choose."""
    return (peak + hot_expert(Part(job, 0))) * (1 + band_of(job).error) <= capacity


def may_fit(job: Job, peak: int, capacity: int) -> bool:
    """Tell whether a job fits if the error is in its favour."""
    return peak * (1 - band_of(job).error) <= capacity
