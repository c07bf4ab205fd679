"""The most that fits: the fewest devices, the longest sequence and the largest micro-batch of a job.

Bytes grow with a sequence and a micro-batch, and fall with devices that share out state; so each limit is found by
doubling until the answer changes, and bisection in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrainc.bridge.jobs.context_ranks import length_divisor
from ratrain.ratrainc.bridge.jobs.hf_words import changed_job
from ratrain.ratrainc.bridge.jobs.job import Sharding
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.ways_out import Phrase, most_bytes

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job

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


def limits(job: Job, capacity: int, phrase: Phrase) -> Limits:
    """Find the limits of a job whose bytes are known.

    Devices that share out nothing are counted as if they did, if `phrase` has words for it.
    """
    assert job.model is not None

    def fits(changed: Job) -> bool:
        return not refusal(changed) and most_bytes(changed) <= capacity

    positions = job.model.learned_positions or _LONGEST
    step = math.lcm(_STEP, length_divisor(job))
    longest = _last(lambda count: fits(evolve(job, seq_len=count * step)), positions // step)
    largest = _last(lambda size: fits(evolve(job, micro_batch_size=size)), _LARGEST)
    shared, words = _shared(job, phrase)
    return Limits(_fewest_devices(shared, fits), words, longest and longest * step, largest)


def _shared(job: Job, phrase: Phrase) -> tuple[Job, str]:
    """Return a job whose devices share out the state, and the change in words if that is one."""
    if job.sharding in (Sharding.NONE, Sharding.DDP):
        for sharding in (Sharding.FSDP2, Sharding.ZERO3, Sharding.FSDP1):
            changed = changed_job(evolve(job, devices=max(2, job.devices or 1)), "sharding", sharding)
            words = phrase(changed, "sharding", sharding)
            if words is not None and not refusal(changed):
                return changed, words
    return job, ""


def _fewest_devices(job: Job, fits: Callable[[Job], bool]) -> int | None:
    if not shares_state(job):
        return None
    ranks = job.model_ranks

    def enough(replicas: int) -> bool:
        return fits(evolve(job, devices=replicas * ranks))

    most = _MOST_DEVICES // ranks
    high = 1
    while high <= most and not enough(high):
        high *= 2
    if high > most:
        return None
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high * ranks


def shares_state(job: Job) -> bool:
    """Tell whether more devices would leave less state on each."""
    return job.sharding not in (Sharding.NONE, Sharding.DDP) and job.shard_size is None


def _last(fits: Callable[[int], bool], most: int) -> int | None:
    """Return the largest count up to `most` that fits, where every smaller one fits too; None if 1 does not."""
    if most < 1 or not fits(1):
        return None
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
