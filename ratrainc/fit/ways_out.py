"""Changes of a job that lower its peak, each priced, in the words of the file that it came from.

    the fullest rank   31.2 GiB of 23.6
    way out            gradient_checkpointing: true            19.8 GiB, +31 % a token

A candidate changes a few fields of the job; it counts if the file's format can express it (`phrase`), the framework's
bytes are known with it (`refusal`), and the peak falls. Those that fit for sure stand first, then those that may; of
either the cheapest in time before others. If no single one fits for sure, pairs and then triples are tried: the three
cheapest that do are the answer, or that may if no single one may either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.quantised import NF4
from ratrain.ratrain_ir.config.training import ALL_LINEAR
from ratrain.ratrainc.bridge.jobs.hf_words import changed_job
from ratrain.ratrainc.bridge.jobs.job import FSDP, Adapter, Attention, Checkpointing, Loss, Sharding
from ratrain.ratrainc.fit.costs import slower
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.verdicts import Verdict, compared, most_bytes

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job
    from ratrain.targets.machine.machine import Machine

Phrase = Callable[["Job", str, Any], str | None]
"""Function from a job, a field and its new value to the change in the file's words; None if it has none."""
_MOST_TOGETHER = 3
_MOST_COMBINED = 3
"""Combinations that are shown where no single change fits."""


@frozen
class Change:
    """One change of a job."""

    fields: tuple[tuple[str, Any], ...]
    alters: str = ""
    """how the training itself changes; empty if it stays the same but for rounding"""

    def made(self, job: Job) -> Job:
        """Return the job with the change."""
        return evolve(job, **dict(self.fields))


@frozen
class WayOut:
    """One or several changes together, with what they bring."""

    changes: tuple[str, ...]
    """in the words of the job's file"""
    peak_bytes: int
    """bytes of the device that the fullest rank then takes"""
    slower: float
    """share by which a trained token takes longer, estimated (costs.py)"""
    verdict: Verdict
    alters: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Changes in one line."""
        return "; ".join(map(in_line, self.changes))


def in_line(words: str) -> str:
    """Return settings, a line each, in one line."""
    return words.replace("\n", ", ")


def ways_out(job: Job, capacity: int, machine: Machine, phrase: Phrase) -> tuple[WayOut, ...]:
    """Return changes that lower the peak, the best verdict for `capacity` bytes first, then the lowest cost."""
    now = most_bytes(job)
    priced: list[tuple[Change, WayOut]] = []
    for change in candidates(job):
        found = _priced(job, (change,), capacity, machine, phrase)
        if found is not None and found.peak_bytes < now:
            priced.append((change, found))
    single = [way for _, way in priced]
    best = min((way.verdict for way in single), key=lambda each: each.place, default=Verdict.FAILS)
    if best is not _best(job):
        together = list(_together(job, [change for change, _ in priced], capacity, machine, phrase))
        single += [way for way in together if way.verdict.place < best.place]
    return tuple(sorted(single, key=lambda way: (way.verdict.place, bool(way.alters), way.slower, way.peak_bytes)))


def _best(job: Job) -> Verdict:
    """Return the best verdict that a change of a job can have: one with settings that are not understood never fits."""
    return Verdict.CLOSE if job.not_understood else Verdict.FITS


def _together(job: Job, changes: Sequence[Change], capacity: int, machine: Machine, phrase: Phrase) -> Iterator[WayOut]:
    """Yield the cheapest combinations that fit, of the fewest changes with which any does; without one, that may."""
    may = list[WayOut]()
    for count in range(2, _MOST_TOGETHER + 1):
        found = [
            way
            for chosen in combinations(changes, count)
            if _are_apart(chosen) and (way := _priced(job, chosen, capacity, machine, phrase)) is not None
        ]
        sure = [way for way in found if way.verdict is _best(job)]
        may = may or [way for way in found if way.verdict is Verdict.CLOSE]
        if sure:
            yield from _cheapest(sure)
            return
    yield from _cheapest(may)


def _cheapest(ways: Sequence[WayOut]) -> list[WayOut]:
    return sorted(ways, key=lambda way: (len(way.alters), way.slower, way.peak_bytes))[:_MOST_COMBINED]


def _are_apart(changes: Sequence[Change]) -> bool:
    """Tell whether no two changes set the same field."""
    names = [name for change in changes for name, _ in change.fields]
    return len(set(names)) == len(names)


def _priced(job: Job, changes: Sequence[Change], capacity: int, machine: Machine, phrase: Phrase) -> WayOut | None:
    """Price changes together; None if the file cannot express one, or the bytes with them are not known."""
    changed, words = job, list[str]()
    for change in changes:
        for name, value in change.fields:
            said = phrase(changed, name, value)
            if said is None:
                return None
            words.append(said)
            changed = changed_job(changed, name, value)
    if refusal(changed):
        return None
    peak = most_bytes(changed)
    alters = tuple(dict.fromkeys(change.alters for change in changes if change.alters))
    verdict = compared(changed, peak, capacity)
    return WayOut(tuple(dict.fromkeys(words)), peak, slower(job, changed, machine), verdict, alters)


_NEXT_SHARDING = {
    Sharding.NONE: (),
    Sharding.DDP: (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP2),
    Sharding.ZERO1: (Sharding.ZERO2, Sharding.ZERO3),
    Sharding.ZERO2: (Sharding.ZERO3,),
}
"""Mechanisms that share out more of the state, by the present one."""
_IN_8_BITS = {"adamw": "adamw-8bit", "adamw-fused": "adamw-8bit", "adamw-foreach-off": "adamw-8bit"}


def candidates(job: Job) -> Iterator[Change]:
    """Yield the changes that may lower a job's peak."""
    assert job.micro_batch_size is not None
    assert job.gradient_accumulation is not None
    assert job.seq_len is not None
    if job.loss in (Loss.UPCAST, Loss.WHOLE):
        yield Change((("loss", Loss.FUSED),))
    if job.attention is Attention.EAGER:
        yield Change((("attention", Attention.SDPA),))
        yield Change((("attention", Attention.FLASH),))
    if job.checkpointing is not Checkpointing.FULL:
        yield Change((("checkpointing", Checkpointing.FULL),))
    if job.checkpointing is Checkpointing.NONE:
        yield Change((("checkpointing", Checkpointing.ATTENTION),))
        yield Change((("checkpointing", Checkpointing.OPS),))
    for part in _smaller_batches(job.micro_batch_size):
        more = job.gradient_accumulation * (job.micro_batch_size // part)
        if job.optimizer_in_backward:  # gradients are gone before another micro-batch could add to them
            yield Change((("micro_batch_size", part),), "fewer sequences a step")
        else:
            yield from _accumulating(job, ("micro_batch_size", part), ("gradient_accumulation", more))
    if job.sums_whole:
        yield Change((_REDUCES_EACH,))
        whole = job.micro_batch_size * job.gradient_accumulation
        yield Change((("micro_batch_size", whole), ("gradient_accumulation", 1)))
    for level in _NEXT_SHARDING.get(job.sharding, ()) if (job.dp or 1) > 1 else ():
        yield Change((("sharding", level),))
    if job.optimizer in _IN_8_BITS:
        yield Change((("optimizer", _IN_8_BITS[job.optimizer]),), "moments in 8 bits")
    yield from _adapters(job)
    if not job.offload_activations:
        yield Change((("offload_activations", True),))
    yield from _offloads(job)
    yield from _context_ranks(job)
    if job.seq_len >= 2 * _SHORTEST:
        yield Change((("seq_len", job.seq_len // 2),), "the training: sequences half as long")


_REDUCES_EACH = ("reduces_each", True)


def _accumulating(job: Job, *fields: tuple[str, Any]) -> Iterator[Change]:
    """Yield a change after which micro-batches accumulate; where gradients would then first wait whole, one without."""
    change = Change(fields)
    yield change
    if change.made(job).sums_whole and not job.sums_whole:
        yield Change((*fields, _REDUCES_EACH))


def _context_ranks(job: Job) -> Iterator[Change]:
    """Yield more context ranks in the place of data-parallel ones, each with as many sequences a step as before.

    Only where all of them share out the state, or none: a group's size would say another thing.
    """
    assert job.gradient_accumulation is not None
    dp = job.dp or 1
    if job.shard_size not in (None, job.replicas, job.dp):
        return
    for times in (each for each in range(2, dp + 1) if dp % each == 0 and each & (each - 1) == 0):
        fields: list[tuple[str, Any]] = [("cp", job.cp * times)]
        if job.framework == "axolotl" and job.attention is not Attention.FLASH:
            fields.append(("attention", Attention.FLASH))
        if job.optimizer_in_backward:  # gradients are gone before another micro-batch could add to them
            yield Change(tuple(fields), "fewer sequences a step")
        else:
            yield from _accumulating(job, *fields, ("gradient_accumulation", job.gradient_accumulation * times))


def _adapters(job: Job) -> Iterator[Change]:
    """Yield adapters in place of a full fine-tuning; for a job with one, frozen weights in 4 bits and a lower rank.

    A lower rank is proposed only where it counts: adapters and what trains them are mostly under 2 % of a peak.
    """
    adapter, quantised = job.adapter, "frozen weights in 4 bits"
    if adapter is None and job.model is not None and job.model.experts is not None:
        if job.method == "full":  # adapters of stacks would hold a second copy of them
            yield Change((("adapter", evolve(PROPOSED, targets=OF_ATTENTION)),), f"{INSTEAD}, of attention alone")
        return
    if adapter is None:
        if job.method == "full":
            yield Change((("adapter", PROPOSED),), INSTEAD)
            yield Change((("adapter", _in_4_bits(PROPOSED)),), f"{INSTEAD}, {quantised}")
        return
    if adapter.base_bits != 4:
        yield Change((("adapter", _in_4_bits(adapter)),), quantised)
    if adapter.rank > PROPOSED.rank:
        lower = Change((("adapter", evolve(adapter, rank=PROPOSED.rank)),), f"adapters of rank {PROPOSED.rank}")
        if most_bytes(lower.made(job)) < _WORTH * most_bytes(job):
            yield lower


def _in_4_bits(adapter: Adapter) -> Adapter:
    return evolve(adapter, base_bits=4, double_quantised=True, quantisation=NF4)


PROPOSED = Adapter(rank=16, alpha=32.0, targets=(ALL_LINEAR,))
"""Adapter that is proposed: rank and targets of many published recipes (axolotl examples/llama-3/lora-8b.yml has 32 on
all linears); a default of no framework."""
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Targets that are proposed for a model with experts."""
INSTEAD = "another training: low-rank adapters in place of the weights"
_WORTH = 0.98
"""Share of the peak below which a lower rank is worth a proposal."""


def _offloads(job: Job) -> Iterator[Change]:
    """Yield what may go to the host: FSDP offloads parameters with their optimizer state, other mechanisms either."""
    left = [(name, True) for name in ("offload_optimizer", "offload_parameters") if not getattr(job, name)]
    if job.sharding in FSDP:
        if left:
            yield Change(tuple(left))
    else:
        yield from (Change((each,)) for each in left)


_SHORTEST = 128
"""Tokens below which no shorter sequence is proposed."""


def _smaller_batches(size: int) -> list[int]:
    """Return the proper divisors of a micro-batch that are tried, largest first: halves down to 1."""
    found = []
    while size % 2 == 0:
        size //= 2
        found.append(size)
    return [*found, 1] if size > 1 else found
