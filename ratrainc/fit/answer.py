"""Answer of `fit`: whether a job fits its devices, who holds the bytes, and the ways out.

    job, capacity ──> holdings of each kind of rank ──> the fullest rank against the capacity, within the error band
                                                    ──> ways out, limits

Peaks are compared with the capacity within the error band in one place (`verdicts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from attrs import asdict, fields_dict, frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of, size_text
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.bridge.jobs.job import Adapter, Job, Note, Training
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.facts.expert_facts import experts_text
from ratrain.ratrainc.fit.bands import Band, band_of
from ratrain.ratrainc.fit.holdings.adapters import trained
from ratrain.ratrainc.fit.holdings.experts import CODE, hot_expert
from ratrain.ratrainc.fit.holdings.frozen_layers import layers_of
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.part import Part as HeldPart
from ratrain.ratrainc.fit.holdings.refusals import EXPERTS, refusal
from ratrain.ratrainc.fit.holdings.terms import RankBytes
from ratrain.ratrainc.fit.limits import Limits, limits, shares_state
from ratrain.ratrainc.fit.predicted_snapshot import predicted_memory
from ratrain.ratrainc.fit.verdicts import Verdict, compared, may_fit, most_bytes, surely_fits
from ratrain.ratrainc.fit.ways_out import Phrase, WayOut, in_line, ways_out
from ratrain.ratrainc.report.memory_snapshot import write_snapshot

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine

REFUSED = "'import-plan' refuses the file"
"""Beginning of the reason why there is no plan of ours where none can be made of the settings."""
_MOST_WAYS = 10
"""Ways out that the text shows; `--json` has all."""


_SHORT = {Verdict.FITS: "yes", Verdict.FAILS: "no", Verdict.CLOSE: "maybe", Verdict.OPEN: ""}
"""Verdicts on ways out, in their table."""


@frozen
class OurPlan:
    """Plan of this compiler for the same model, devices and batch."""

    plan: str
    """summary of its ranks and batches; empty if none fits"""
    peak_bytes: int
    """bytes of the fullest rank: placed, not estimated"""
    step_seconds: float
    """simulated"""
    command: str
    """command that makes the plan's file; of a job with adapters one that makes a plan of its settings stands before"""
    why_none: str = ""
    """reason, if none fits, or none can be made of the settings"""


@frozen(repr=False)
class Fit(Shown):
    """Answer about one job."""

    file: str
    """name of its settings file; empty if options alone describe it"""
    title: str
    """the framework's name in sentences"""
    job: Job
    ranks: tuple[RankBytes, ...]
    """bytes of each kind of rank"""
    capacity: int | None
    """bytes of a device; None if neither the file nor an option says it"""
    band: Band
    machine: str
    """name of the machine by which ways out are priced"""
    ways: tuple[WayOut, ...]
    """empty without a capacity"""
    limits: Limits | None
    """limits of what fits for sure, as far as settings are understood; None without a capacity"""
    perhaps: Limits | None
    """limits of what may fit"""
    ours: OurPlan | None = None
    """None unless it was asked for"""
    long: tuple[OurPlan, ...] = ()
    """plans with context ranks and with slices, for long sequences or context ranks; none unless they were asked for"""

    @property
    def fullest(self) -> RankBytes:
        """Rank that takes most of its device."""
        return max(self.ranks, key=lambda rank: rank.reserved_bytes)

    @property
    def peak(self) -> int:
        """Bytes of the device that the fullest rank takes: its tensors and what the process takes in addition."""
        return self.fullest.reserved_bytes

    @property
    def verdict(self) -> Verdict:
        """Compare the peak with the capacity, within the band; a lower bound never says that a job fits."""
        return compared(self.job, self.peak, self.capacity)

    def write_snapshot(self, path: str) -> int:
        """Write the predicted allocations of a step, a device for each kind of rank; return the file's bytes.

        Raises `DiagnosticError` RT002 if it cannot be written.
        """
        assert self.job.model is not None
        layers = -(-self.job.model.layers // self.job.pp)
        return write_snapshot([predicted_memory(rank, layers) for rank in self.ranks], path)

    def parts(self) -> Iterator[Part]:
        """Yield the verdict, the holders of the fullest rank's bytes, ways out, limits, and what was not carried."""
        yield from self._verdict()
        yield self._owners()
        yield from self._experts()
        if len(self.ranks) > 1:
            rows = [[each.name, str(each.ranks), size_text(each.reserved_bytes), each.moment] for each in self.ranks]
            yield TextTable("kinds of ranks", ("rank", "devices", "peak", "fullest"), rows)
        yield from self._ways()
        yield from self._unread()
        yield self._our_plan()
        if self.long:
            yield self._long_sequences()

    def _verdict(self) -> Iterator[str]:
        least = "at least " if self.job.not_understood else ""
        rank = self.fullest
        where = f"{self.file}: " if self.file else ""
        yield f"{where}{_described(self.job, self.title)}"
        need = f"{least}{size_text(self.peak)} on {rank.name if len(self.ranks) > 1 else 'each device'}"
        if self.capacity is None:
            yield f"needs {need}, {rank.moment}; --memory or --machine says what a device has"
        else:
            margin = self.capacity - self.peak
            left = f"{size_text(abs(margin))} {'spare' if margin >= 0 else 'short'}"
            fits = surely_fits(self.job, self.peak, self.capacity)
            unsure = "cannot tell, as the settings named below are not understood"
            said = unsure if fits and self.job.not_understood else self.verdict.value
            yield f"{said}: needs {need}, {rank.moment}, of {size_text(self.capacity)}: {left}"
        yield f"how far off such answers are: {self.band.text}"

    def _owners(self) -> TextTable:
        rank, total = self.fullest, self.peak
        rows = [
            [each.name, size_text(each.bytes, total), f"{100 * each.bytes / total:.1f} %"]
            for each in (*sorted(rank.owners, key=lambda one: -one.bytes), *rank.overhead)
            if each.bytes
        ]
        return TextTable(f"holders of the bytes, {rank.moment}", ("holder", "bytes", "share"), rows)

    def _experts(self) -> Iterator[str]:
        """Say what experts there are, the code that is counted, and what the routers' choices can add."""
        model = self.job.model
        if model is None or model.experts is None:
            return
        yield f"{experts_text(model)}; counted as {CODE[self.job.experts]}"
        part = HeldPart(self.job, 0)
        hot = hot_expert(part)
        adds = f"an expert that all tokens choose adds up to {size_text(hot)}" if hot else "no choice changes a byte"
        yield f"routers: {part.rows_of_experts:,} rows a layer and micro-batch, whatever they choose; {adds}"

    def _ways(self) -> Iterator[Part]:
        if self.ways:
            rows = [
                [
                    way.text,
                    size_text(way.peak_bytes),
                    _SHORT[way.verdict],
                    f"{100 * way.slower:+.0f} %",
                    ", ".join(way.alters),
                ]
                for way in self.ways[:_MOST_WAYS]
            ]
            title = f"ways out (time a token estimated on {self.machine})"
            yield TextTable(title, ("change", "peak", "fits", "time", "alters"), rows)
        elif self.limits is not None:
            yield "no change that its settings can express lowers the peak"
        if self.limits is not None:
            assert self.perhaps is not None
            known = ", as far as it is understood" if self.job.not_understood else ""
            yield f"with all else as it is{known}: {_limits_text(self.limits, self.perhaps, self.job)}"

    def _our_plan(self) -> str:
        ours, which = self.ours, "our own plan for the same devices and batch"
        if ours is None:
            return f"{which}: --exact searches, compiles and places it, in seconds to a minute"
        if not ours.plan:
            if ours.why_none.startswith(REFUSED):
                return f"{which}: none, as {ours.why_none}; {ours.command}"
            return f"{which}: none was found that fits: {ours.why_none}"
        placed, seconds = size_text(ours.peak_bytes), seconds_text(ours.step_seconds)
        return f"{which}: {ours.plan}, {placed} placed, {seconds} a step simulated on {self.machine}; {ours.command}"

    def _long_sequences(self) -> str:
        """Compare context ranks with slices for the job's sequences, and say which one and why."""
        ranks, slices = self.long
        told = "; or ".join(
            f"{each.plan}, {size_text(each.peak_bytes)} placed, {seconds_text(each.step_seconds)} a step simulated"
            if each.plan
            else f"{each.command}: none, as {each.why_none}"
            for each in self.long
        )
        which = ""
        if ranks.plan and slices.plan:
            faster, less = min(self.long, key=lambda one: one.step_seconds), min(self.long, key=lambda o: o.peak_bytes)
            quick, small = f"{faster.plan} takes less time", f"{less.plan} less memory"
            which = f": {quick}, and less memory" if faster is less else f": {quick}, {small}"
        return f"our own plans for sequences of {self.job.seq_len:,} on the same devices: {told}{which}"

    def _unread(self) -> Iterator[str]:
        for note in self.job.not_understood:
            yield f"may change memory, not understood: {note.key} = {shown(note.value)} ({note.place}): {note.why}"
        origins = self.job.origins
        assumed = [name for name in fields_dict(Job) if name in origins and origins[name].default]
        if assumed:
            whose = f"defaults of {self.title}, not in the file" if self.file else "assumed, as no option says it"
            yield f"{whose}: {', '.join(assumed)} (values and sources: --json)"
        less = [note.key for note in self.job.ignored if note.less]
        if less:
            yield f"may need less than is counted, by what these save: {', '.join(less)}"
        idle = [note.key for note in self.job.ignored if not note.less]
        if idle:
            yield f"without effect on memory: {', '.join(idle)}"

    def _experts_json(self) -> dict[str, Any] | None:
        model = self.job.model
        if model is None or model.experts is None:
            return None
        part = HeldPart(self.job, 0)
        return {"code": self.job.experts.value, "rows": part.rows_of_experts, "hot_expert_bytes": hot_expert(part)}

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `--json` prints it."""
        return {
            "fits": self.verdict.sure,
            "verdict": self.verdict.value,
            "peak_bytes": self.peak,
            "lower_bound": bool(self.job.not_understood),
            "allocated_bytes": self.fullest.peak_bytes,
            "capacity_bytes": self.capacity,
            "margin_bytes": None if self.capacity is None else self.capacity - self.peak,
            "error_band": self.band.error,
            "moment": self.fullest.moment,
            "owners": [{"name": each.name, "bytes": each.bytes} for each in self.fullest.owners],
            "overhead": [{"name": each.name, "bytes": each.bytes} for each in self.fullest.overhead],
            "experts": self._experts_json(),
            "trained_parameters": sum(trained(HeldPart(self.job, stage)) for stage in range(self.job.pp)),
            "ranks": [
                {"name": each.name, "ranks": each.ranks, "peak_bytes": each.reserved_bytes, "moment": each.moment}
                for each in self.ranks
            ],
            "ways_out": [
                {
                    "change": way.text,
                    "changes": list(way.changes),
                    "peak_bytes": way.peak_bytes,
                    "fits": way.verdict.sure,
                    "verdict": way.verdict.value,
                    "slower": way.slower,
                    "alters": list(way.alters),
                }
                for way in self.ways
            ],
            "limits": None if self.limits is None else asdict(self.limits),
            "limits_perhaps": None if self.perhaps is None else asdict(self.perhaps),
            "ours": None if self.ours is None else asdict(self.ours),
            "long": [asdict(each) for each in self.long],
            "job": _job_json(self.job),
            "not_understood": [_note_json(note) for note in self.job.not_understood],
            "ignored": [_note_json(note) for note in self.job.ignored],
        }


def answer(file: str, title: str, job: Job, capacity: int | None, machine: Machine, phrase: Phrase) -> Fit:
    """Answer about a job on devices of `capacity` bytes (None: what its file says); `phrase` says changes of it.

    Raises RT061 with the reason if its framework's bytes are not known, or the settings leave something open.
    """
    reason = refusal(job)
    if reason:
        fail("RT061", f"{file or 'the job'}: {reason}", help=_way_out(reason, job))
    capacity = job.device_bytes if capacity is None else capacity
    ranks, band = holdings(job), band_of(job)
    if capacity is None:
        return Fit(file, title, job, ranks, None, band, machine.name, (), None, None)
    room = capacity
    ways = ways_out(job, room, machine, phrase)
    return Fit(
        file,
        title,
        job,
        ranks,
        capacity,
        band,
        machine.name,
        ways,
        limits(job, lambda changed: surely_fits(changed, most_bytes(changed), room), phrase),
        limits(job, lambda changed: may_fit(changed, most_bytes(changed), room), phrase),
    )


_ASKED = {
    "model": "give it with --model (a preset, a config.json or a folder with one)",
    "devices": "give their number with --devices N",
    "seq_len": "give it with --seq-len S",
    "micro_batch_size": "give it with --micro-batch-size N",
    "gradient_accumulation": "say it in the file, or give the training's arguments with --beside FILE",
}


def _way_out(reason: str, job: Job) -> str:
    """Return what to do about a refusal: the option that gives what is open, and settings that may be the cause."""
    name = reason.partition(":")[0]
    if name == EXPERTS:
        return "'ratrainc plan' makes plans of such models, and 'ratrainc compile' says the bytes of each rank"
    if name not in _ASKED:
        return "not supported yet, and no answer is given rather than a wrong one"
    unread = [f"{note.key} ({note.place}): {note.why}" for note in job.not_understood]
    return "; ".join([_ASKED[name], *unread])


def _described(job: Job, title: str) -> str:
    """Describe a job in a line."""
    assert job.model is not None
    axes = [f"{name} {count}" for name in ("tp", "pp", "cp") if (count := getattr(job, name)) > 1]
    devices = number_of(job.devices or 1, "device")
    spread = ", ".join([devices, *axes, job.sharding.value if job.sharding.value != "none" else "not sharded"])
    sharing = f"for {job.cp} devices" if job.cp > 1 else "a device"
    batch = f"{job.micro_batch_size} x {job.seq_len} tokens {sharing} and micro-batch"
    recompute = f"recomputation {job.checkpointing.value}"
    return f"{title}, {job.model_name or job.model.name} ({_adapter_text(job)}), {spread}; {batch}; {recompute}"


def _adapter_text(job: Job) -> str:
    """Describe an adapter as PEFT's `print_trainable_parameters` does: its rank, linears, and what trains.

    Of a model with frozen layers the number of those that train.
    """
    adapter, model = job.adapter, job.model
    assert model is not None
    if adapter is None and job.thawed is None:
        return job.method
    count = trained(HeldPart(job, 0))
    if adapter is None:
        layers = f"{layers_of(HeldPart(job, 0)).trained} of {number_of(model.layers, 'layer')}"
        return f"{job.method} but {layers}; {count:,} or {100 * count / model.parameters:.2f} % train"
    base = f", frozen weights in {adapter.base_bits} bits" if adapter.base_bits else ""
    trains = f"{count:,} or {100 * count / (model.parameters + count):.2f} % train"
    targets = ", ".join((*adapter.targets, *adapter.target_parameters))
    return f"{job.method} of rank {adapter.rank} on {targets}{base}; {trains}"


def _limits_text(sure: Limits, may: Limits, job: Job) -> str:
    """Say the limits: what fits for sure, and what may fit beyond that."""
    texts = []
    few, fewer = (each.fewest_devices for each in (sure, may))
    if fewer is None and shares_state(job):
        texts.append("more devices alone will not help")
    elif fewer is not None:
        most = few if few is not None else fewer
        count = f"{number_of(most, 'device')} or more"
        perhaps = "" if few == fewer else " perhaps" if few is None else f", perhaps {fewer}"
        texts.append(f"{count}{f' with {in_line(sure.sharding)}' if sure.sharding else ''}{perhaps}{_divided(job)}")
    none = "no sequence is short enough"
    texts.append(_most("sequences of up to {} tokens", none, sure.longest_sequence, may.longest_sequence))
    none = f"no micro-batch is small enough at {job.seq_len} tokens"
    texts.append(_most("micro-batches of up to {}", none, sure.largest_micro_batch, may.largest_micro_batch))
    return "; ".join(texts)


def _most(words: str, none: str, sure: int | None, may: int | None) -> str:
    if may is None:
        return none
    text = words.format(may if sure is None else sure)
    return text if sure == may else f"{text} perhaps" if sure is None else f"{text}, perhaps {may}"


def _divided(job: Job) -> str:
    """Say which numbers of devices a job accepts whose settings fix the sequences of a step."""
    if job.whole_batch is None:
        return ""
    if not job.follows:
        return " (the settings fix their number)"
    parts = f"micro-batches of {job.micro_batch_size}"
    if job.follows == "micro_batch_size":
        parts = f"{number_of(job.gradient_accumulation or 1, 'micro-batch')} each"
    return f" (numbers that share out the {job.whole_batch} sequences of a step in {parts})"


def _note_json(note: Note) -> dict[str, Any]:
    return {"key": note.key, "value": note.value, "place": note.place, "why": note.why, "less": note.less}


def _job_json(job: Job) -> dict[str, Any]:
    """Return a job's fields with the origin of each that the file or the framework decides."""
    fields: dict[str, Any] = {}
    for name in (each for each in fields_dict(Job) if each not in _ELSEWHERE):
        value = getattr(job, name)
        origin = job.origins.get(name)
        fields[name] = {
            "value": _plain(value),
            "from": None if origin is None else origin.key,
            "place": None if origin is None else origin.place,
            "default": origin is not None and origin.default,
        }
    return fields


_ELSEWHERE = ("model", "origins", "not_understood", "ignored")
"""Fields of a job that the answer has elsewhere, or that are too long for it."""


def _plain(value: Any) -> Any:
    """Return a field's value as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Training | Adapter):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value
