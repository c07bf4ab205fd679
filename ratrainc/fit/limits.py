"""The most that fits: the fewest devices, the longest sequence and the largest micro-batch of a job.

Bytes grow with a sequence and a micro-batch, and fall with devices that share out state; so each limit is found by
doubling until the answer changes, and bisection in between. Where the settings fix the sequences of a step, only what
shares them out is tried: 128 sequences in micro-batches of 8 go over 1, 2, 4, 8 or 16 data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrainc.bridge.jobs.context_ranks import length_divisor
from ratrain.ratrainc.bridge.jobs.hf_words import changed_job
from ratrain.ratrainc.bridge.jobs.job import UNSHARDED, Sharding
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.planner.space.tilings import divisors

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job
    from ratrain.ratrainc.fit.ways_out import Phrase

_STEP = 64
"""Tokens of which a proposed sequence is a multiple."""
_LONGEST = 1 << 22
_LARGEST = 1 << 14
_MOST_DEVICES = 1 << 16


@frozen
class Limits:
    """The most that fits on devices of a capacity, all other settings unchanged."""

    fewest_devices: int | None
    """None if no number of them is enough, or their number changes no byte"""
    sharding: str
    """the change, in the words of the file, that lets devices share out the state; empty if they do so already"""
    longest_sequence: int | None
    """tokens, a multiple of 64 and of what context ranks need; None if not even the shortest fits"""
    largest_micro_batch: int | None
    """sequences; None if not even one fits"""


def limits(job: Job, enough: Callable[[Job], bool], phrase: Phrase) -> Limits:
    """Find the limits of a job whose bytes are known; `enough` tells whether a job that differs in them fits.

    Devices that share out nothing are counted as if they did, if `phrase` has words for it.
    """
    assert job.model is not None

    def fits(changed: Job) -> bool:
        return not refusal(changed) and enough(changed)

    positions = job.model.learned_positions or _LONGEST
    step = math.lcm(_STEP, length_divisor(job))
    longest = _last(lambda length: fits(evolve(job, seq_len=length)), range(step, positions + 1, step))
    largest = _last(lambda size: fits(_of_size(job, size)), _sizes(job))
    shared, words = _shared(job, phrase)
    return Limits(_fewest_devices(shared, fits), words, longest, largest)


def _sizes(job: Job) -> Sequence[int]:
    """Return the micro-batches that the settings accept with all else as it is, in ascending order."""
    if job.whole_batch is None:
        return range(1, _LARGEST + 1)
    if job.follows != "gradient_accumulation":
        return [job.micro_batch_size or 1]
    return [each for each in divisors(job.whole_batch // (job.dp or 1)) if each <= _LARGEST]


def _of_size(job: Job, size: int) -> Job:
    changed = evolve(job, micro_batch_size=size)
    return changed if job.whole_batch is None else _shared_out(changed)


def _shared_out(job: Job) -> Job:
    """Return the job with what follows from its whole batch and its other sizes, which divide it."""
    assert job.whole_batch is not None
    if not job.follows:
        return job
    other = job.micro_batch_size if job.follows == "gradient_accumulation" else job.gradient_accumulation
    return changed_job(job, job.follows, job.whole_batch // ((other or 1) * (job.dp or 1)))


def _replicas(job: Job) -> Sequence[int]:
    """Return the numbers of data-parallel ranks that the settings accept, in ascending order."""
    most = _MOST_DEVICES // job.model_ranks
    if job.whole_batch is None:
        return range(1, most + 1)
    if not job.follows:
        return [job.dp or 1]
    other = job.micro_batch_size if job.follows == "gradient_accumulation" else job.gradient_accumulation
    return [each for each in divisors(job.whole_batch // (other or 1)) if each <= most]


def _shared(job: Job, phrase: Phrase) -> tuple[Job, str]:
    """Return a job whose devices share out the state, and the change in words if that is one."""
    if job.sharding in UNSHARDED:
        for sharding in (Sharding.FSDP2, Sharding.ZERO3, Sharding.FSDP1):
            changed = changed_job(evolve(job, devices=max(2, job.devices or 1)), "sharding", sharding)
            words = phrase(changed, "sharding", sharding)
            if words is not None and not refusal(changed):
                return _reducing_each(changed, words, phrase)
    return job, ""


def _reducing_each(job: Job, words: str, phrase: Phrase) -> tuple[Job, str]:
    """Add to a change that shares out state one that shares out gradients too, where they would wait whole."""
    more = phrase(job, "reduces_each", True) if job.sums_whole else None
    return (job, words) if more is None else (evolve(job, reduces_each=True), f"{words}\n{more}")


def _fewest_devices(job: Job, fits: Callable[[Job], bool]) -> int | None:
    if not shares_state(job):
        return None
    replicas = _replicas(job)

    def enough(count: int) -> bool:
        changed = evolve(job, devices=count * job.model_ranks)
        return fits(changed if job.whole_batch is None else _shared_out(changed))

    found = _first(enough, replicas)
    return found and found * job.model_ranks


def shares_state(job: Job) -> bool:
    """Tell whether more devices would leave less state on each."""
    return job.sharding not in UNSHARDED and job.shard_size is None


def _last(fits: Callable[[int], bool], values: Sequence[int]) -> int | None:
    """Return the last of ascending values that fits, where every one before it fits too; None if the first does not."""
    if not values or not fits(values[0]):
        return None
    low, high = 1, 2
    while high <= len(values) and fits(values[high - 1]):
        low, high = high, 2 * high
    high = min(high, len(values) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(values[middle - 1]) else (low, middle)
    return values[low - 1]


def _first(fits: Callable[[int], bool], values: Sequence[int]) -> int | None:
    """Return the first of ascending values that fits, where every one after it fits too; None if none does."""
    low, high = 0, 1
    while not fits(values[high - 1]):
        if high == len(values):
            return None
        low, high = high, min(2 * high, len(values))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(values[middle - 1]) else (middle, high)
    return values[high - 1]
