"""The parallel plan: how a model is cut and replicated, what a step trains on, how state is kept, and the optimizer.

A plan file is TOML. Keys without a default are required:

    [parallel]  pp, dp, cuts = "auto", schedule (the strategy's, else "1f1b"), mapping = "chip 1x4, node 2x8" (stages x replicas; see `RankMapping`)
    [batch]     micro_batch_size, micro_batches, seq_len, seed = 0
    [state]     zero = 1 (0 where dp is 1), reduce = "last", view_dtype = "f16", grad_dtype = view_dtype,
                grad_shard_dtype = grad_dtype, loss_scale = "dynamic" (1.0 where view_dtype is "f32")
    [optimizer] lr, betas, eps, weight_decay, warmup_steps, total_steps, min_lr, clip, max_norm (see `Optimizer`)
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, fields, frozen

from ratrain.ratrain_ir.diagnostics import Location, fail, nearest
from ratrain.ratrain_ir.frontend.balance import balance_cuts
from ratrain.ratrain_ir.frontend.fields import FieldReader, Report, Value
from ratrain.ratrain_ir.frontend.rank_mapping import RankMapping
from ratrain.ratrain_ir.frontend.text import Place, Places, Source, nowhere, read_text, shown, toml_places
from ratrain.ratrain_ir.frontend.toml_text import parse_toml

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig

__all__ = [
    "Optimizer",
    "Plan",
    "balance_cuts",
    "check_plan",
    "load_plan",
    "parse_plan",
    "place_in_plan",
    "plan_to_toml",
    "plan_words",
]

DTYPES = ("f16", "f32")
REDUCTIONS = ("last", "each-micro-batch")
CLIPS = ("none", "global")

# What the compiler builds today; the rest of the language is known, and refused by name.
BUILT_SCHEDULES = ("1f1b", "gpipe", "zb-h1")

# Bounds far above any run, so that a slip of the keyboard is told from a size.
_MAX_PARALLEL = 1 << 16
_MAX_MICRO_BATCH = 1 << 16
_MAX_MICRO_BATCHES = 1 << 20
_MAX_SEQ_LEN = 1 << 20
_MAX_STEPS = 1 << 40
_MAX_SEED = (1 << 63) - 1
_MAX_LOSS_SCALE = 2.0**32
_HEAD_CHUNK = 256

_WHAT = "a plan in TOML"
_TOML_PLACE = re.compile(r"^(.*) \(at (?:line (\d+), column (\d+)|end of document)\)$", re.DOTALL)


@frozen
class Optimizer:
    """AdamW with decoupled weight decay, and the learning rate over the steps."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 0
    total_steps: int | None = None
    """Step at which the learning rate has come down to `min_lr`; None: it stays at `lr`."""
    min_lr: float = 0.0
    clip: str = "none"
    """`none`, or `global`: the norm of the whole gradient is held under `max_norm`."""
    max_norm: float = 1.0

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: linear warm-up, then a cosine down to `min_lr`, or constant."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.lr
        if step >= self.total_steps:
            return self.min_lr
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))


@frozen(cache_hash=True)
class Plan:
    """A resolved plan: nothing in it is left to be chosen."""

    pp: int
    """Pipeline stages."""
    dp: int
    """Data-parallel replicas of the pipeline."""
    cuts: tuple[int, ...]
    """Layer index where each later stage starts: pp - 1 of them, ascending."""
    micro_batch_size: int
    """Sequences of one micro-batch of one replica."""
    micro_batches: int
    """Micro-batches of one replica in one step."""
    seq_len: int
    head_chunk: int = _HEAD_CHUNK
    """Rows of logits the head holds at a time, at most. Its weight gradient is rounded once a chunk: part of the numbers."""
    mlp_chunk: int | None = None
    """Rows an mlp block computes at a time; None: all of a micro-batch. Its weight gradients are rounded once a chunk."""
    zero: int = 1
    """ZeRO level: 0 nothing sharded, 1 master weights and moments, 2 also gradients, 3 also parameter views."""
    reduce: str = "last"
    """When gradients meet those of the other replicas: after the `last` micro-batch, or after `each-micro-batch`."""
    view_dtype: str = "f16"
    """Type of the parameters that blocks compute with."""
    grad_dtype: str = "f16"
    """Type of a block's full gradient."""
    grad_shard_dtype: str = "f16"
    """Type in which reduced gradients are accumulated; that of whole gradients where nothing is sharded."""
    loss_scale: float | None = None
    """Fixed factor of the loss; None: adapted to overflow."""
    schedule: str | None = None
    """Order of each stage's work. None: nothing is said; a placement then chooses, and of a placed module it is one of its own."""
    seed: int = 0
    """Seed of initial weights and of the order of the training data."""
    optimizer: Optimizer = Optimizer()
    mapping: RankMapping | None = None
    """What shares a chip, a node, ... of the machine; changes times, not numbers. None: replicas of a stage are neighbours."""

    @property
    def global_batch(self) -> int:
        """Sequences of one step, over all replicas."""
        return self.micro_batches * self.micro_batch_size * self.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, over all replicas."""
        return self.global_batch * self.seq_len

    @property
    def clusters(self) -> int:
        """Ranks that the plan occupies."""
        return self.pp * self.dp

    @property
    def has_dynamic_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.loss_scale is None

    def stage_layers(self, stage: int, model: ModelConfig) -> range:
        """The layers of a stage, counted from 0."""
        ends = (0, *self.cuts, model.layers)
        return range(ends[stage], ends[stage + 1])

    def reshaped(self, **changes: Any) -> Plan:
        """The plan with another shape (`dp`, `zero`, ...); where nothing is sharded any more, shards have no type of their own."""
        plan = evolve(self, **changes)
        return plan if plan.zero > 0 and plan.dp > 1 else evolve(plan, grad_shard_dtype=plan.grad_dtype)

    def to_fields(self) -> dict[str, Value]:
        """The plan as flat `field = value`, the optimizer's among them, as the IR text's header holds it."""
        flat = {key: value for key, value in asdict(self, recurse=False).items() if key not in ("optimizer", "mapping")}
        mapping = {} if self.mapping is None else {"mapping": str(self.mapping)}
        return {**flat, **mapping, **asdict(self.optimizer)}

    @classmethod
    def from_fields(
        cls, values: Mapping[str, object], *, model: ModelConfig | None = None, places: Places = nowhere
    ) -> Plan:
        """The inverse of `to_fields`; `places` finds a field in the text it was read from.

        Raises RT064 with everything that is missing, unknown, of the wrong type, out of range, contradictory, not
        built in this version or, where a model is given, contrary to the model.
        """
        report = Report(places)
        reader = FieldReader(values, report, "RT064")
        reader.refuse_unknown(_FIELDS)
        plan = _read(reader, model)
        report.check()
        return plan


_OPTIMIZER_FIELDS = tuple(attribute.name for attribute in fields(Optimizer))
_FIELDS = (*(attribute.name for attribute in fields(Plan) if attribute.name != "optimizer"), *_OPTIMIZER_FIELDS)
_SECTIONS: dict[str, tuple[str, ...]] = {
    "parallel": ("pp", "dp", "cuts", "schedule", "mapping"),
    "batch": ("micro_batch_size", "micro_batches", "seq_len", "head_chunk", "mlp_chunk", "seed"),
    "state": ("zero", "reduce", "view_dtype", "grad_dtype", "grad_shard_dtype", "loss_scale"),
    "optimizer": _OPTIMIZER_FIELDS,
}
_SECTION_OF = {key: section for section, keys in _SECTIONS.items() for key in keys}
_LABELS = {key: f"{section}.{key}" for key, section in _SECTION_OF.items()}


def check_plan(plan: Plan, model: ModelConfig) -> None:
    """Raise RT064 where a plan that was built in Python contradicts itself or the model, or is not built yet."""
    Plan.from_fields(plan.to_fields(), model=model)


def load_plan(path: str | Path, model: ModelConfig) -> Plan:
    """The plan of a TOML file. Raises RT002 (cannot be read), RT063 (not a plan), RT064 (contradictory)."""
    return parse_plan(read_text(path, "RT063", _WHAT), file=str(path), model=model)


def parse_plan(text: str, *, file: str, model: ModelConfig) -> Plan:
    """The plan of a TOML text; `cuts = "auto"` is resolved for the model.

    Raises RT063 (syntax, unknown, missing or mistyped keys) and RT064 (contradictions), all of the text at once.
    """
    source = Source(file, text)
    report = Report(toml_places(source))
    values = _flat(_toml(source), report)
    if values.get("cuts") == "auto":
        del values["cuts"]
    if values.get("loss_scale") == "dynamic":
        values["loss_scale"] = None
    reader = FieldReader(values, report, "RT063", _LABELS)
    plan = _read(reader, model, auto_cuts="cuts" not in values)
    _check_said(reader, plan)
    report.check()
    return plan


def place_in_plan(path: str | Path, key: str) -> Place:
    """Where a plan's file has a key, as far as it has it; of what can be read but once, as a pipe, only the name."""
    if not Path(path).is_file():
        return Source(str(path), "").top()
    return toml_places(Source(str(path), read_text(path, "RT063", _WHAT)))(_LABELS[key])


def plan_to_toml(plan: Plan) -> str:
    """A TOML text that `parse_plan` reads back as an equal plan; every key is written out that changes something."""
    words = plan_words(plan)
    blocks = []
    for section, keys in _SECTIONS.items():
        lines = [f"{key} = {words[key]}" for key in keys if key in words]
        blocks.append("\n".join([f"[{section}]", *lines]) + "\n")
    return "\n".join(blocks)


def plan_words(plan: Plan) -> dict[str, str]:
    """Each key of a plan file with its value as the file has it, in the file's order; keys that the file would leave out are not there."""
    values: dict[str, object] = {
        **plan.to_fields(),
        "loss_scale": "dynamic" if plan.loss_scale is None else plan.loss_scale,
    }
    if plan.micro_batch_size * plan.seq_len < plan.head_chunk == _HEAD_CHUNK:
        values["head_chunk"] = None
    return {key: _toml_value(values[key]) for key in _SECTION_OF if values.get(key) is not None}


def _toml_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _toml(source: Source) -> dict[str, Any]:
    """The parsed TOML text; RT063 at the place the parser stopped."""
    try:
        return parse_toml(source.text)
    except tomllib.TOMLDecodeError as error:
        match = _TOML_PLACE.match(str(error))
        message = match[1] if match else str(error)
        last = len(source.lines)
        at_place = match and match[2]
        place = (
            source.at(int(match[2]), int(match[3]))
            if match and at_place
            else source.at(last, len(source.lines[-1]) + 1)
        )
        fail("RT063", f"the file is not valid TOML: {message}", place.location, source=place.source)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0]
        fail("RT063", f"the file is not usable TOML: {reason}", Location(source.file, 1))


def _flat(data: Mapping[str, Any], report: Report) -> dict[str, object]:
    """The known keys of all sections in one mapping; everything else is reported."""
    values: dict[str, object] = {}
    sections = ", ".join(f"[{section}]" for section in _SECTIONS)
    for section, table in data.items():
        if section not in _SECTIONS:
            home = _SECTION_OF.get(section)
            near = f"'{section}' belongs in [{home}]" if home else nearest(section, _SECTIONS)
            kind = "section" if isinstance(table, Mapping) else "key"
            report.error(
                "RT063",
                section,
                f"the {kind} {shown(section)} is not known at the top of a plan",
                help=near or f"the sections are {sections}",
            )
        elif not isinstance(table, Mapping):
            report.error("RT063", section, f"'{section}' is {shown(table)}: a section is expected", help=f"[{section}]")
        else:
            for key, value in table.items():
                if key in _SECTIONS[section]:
                    values[key] = value
                else:
                    _unknown_key(section, key, report)
    return values


def _unknown_key(section: str, key: str, report: Report) -> None:
    home = _SECTION_OF.get(key)
    known = _SECTIONS[section]
    help_text = f"'{key}' belongs in [{home}]" if home else nearest(key, known)
    if help_text is None and (elsewhere := nearest(key, _SECTION_OF)):
        help_text = elsewhere
    message = f"the key {shown(key)} is not known in [{section}]"
    report.error("RT063", f"{section}.{key}", message, help=help_text or f"known are {', '.join(known)}")


def _read(reader: FieldReader, model: ModelConfig | None, *, auto_cuts: bool = False) -> Plan:
    """The plan that a reader's fields describe; to be used after its report is checked."""
    dp = reader.integer("dp", 1, _MAX_PARALLEL)
    view_dtype = reader.word("view_dtype", DTYPES, default="f16")
    grad_dtype = reader.word("grad_dtype", DTYPES, default=view_dtype)
    plan = Plan(
        pp=reader.integer("pp", 1, _MAX_PARALLEL),
        dp=dp,
        cuts=() if auto_cuts else reader.integers("cuts", "a list of layer indices"),
        micro_batch_size=reader.integer("micro_batch_size", 1, _MAX_MICRO_BATCH),
        micro_batches=reader.integer("micro_batches", 1, _MAX_MICRO_BATCHES),
        seq_len=reader.integer("seq_len", 1, _MAX_SEQ_LEN),
        head_chunk=reader.integer("head_chunk", 1, _MAX_SEQ_LEN, default=_HEAD_CHUNK),
        mlp_chunk=reader.integer_or_none("mlp_chunk", 1, _MAX_SEQ_LEN * _MAX_MICRO_BATCH),
        zero=reader.integer("zero", 0, 3, default=min(1, dp - 1)),
        reduce=reader.word("reduce", REDUCTIONS, default="last"),
        view_dtype=view_dtype,
        grad_dtype=grad_dtype,
        grad_shard_dtype=reader.word("grad_shard_dtype", DTYPES, default=grad_dtype),
        loss_scale=_loss_scale(reader, view_dtype),
        schedule=_schedule(reader),
        mapping=_mapping(reader),
        seed=reader.integer("seed", 0, _MAX_SEED, default=0),
        optimizer=_optimizer(reader),
    )
    if model is not None and reader.good("pp") and plan.pp > model.layers:
        reader.bad.add("pp")
        reader.contradiction(
            "RT064",
            "pp",
            f"{plan.pp} stages need at least {plan.pp} layers, but {model.name} has {model.layers}",
            help=f"use pp = {model.layers} or fewer, and more replicas (dp) for the other clusters",
        )
    if plan.mapping is not None and reader.good("pp", "dp") and (wrong := plan.mapping.error(plan.pp, plan.dp)):
        reader.contradiction("RT064", "mapping", wrong, help="tiles are written stages x replicas, from the inside out")
    if not auto_cuts:
        _check_cuts(reader, plan, model)
    elif model is not None and reader.good("pp", "seq_len"):
        plan = evolve(plan, cuts=balance_cuts(model, plan.pp, plan.seq_len))
    _check_state(reader, plan)
    return plan


def _loss_scale(reader: FieldReader, view_dtype: str) -> float | None:
    """The fixed loss scale, or None for a dynamic one; without f16 there is nothing to scale."""
    default = 1.0 if view_dtype == "f32" else None
    if reader.values.get("loss_scale", default) is None:
        scale = None
    else:
        expected = f'a number from 2**-32 to {_MAX_LOSS_SCALE:.0f}, or "dynamic"'
        bounds = (1 / _MAX_LOSS_SCALE, _MAX_LOSS_SCALE)  # f32 holds any of these, and their inverse
        scale = reader.number("loss_scale", lambda value: bounds[0] <= value <= bounds[1], expected, default=default)
    if view_dtype == "f32" and reader.good("view_dtype", "loss_scale") and scale != 1.0:
        reader.contradiction(
            "RT064",
            "loss_scale",
            f"the loss scale is {'dynamic' if scale is None else scale}, but f32 parameter views are not scaled",
            help='remove loss_scale (or write 1.0), or use view_dtype = "f16"',
        )
    return scale


def _schedule(reader: FieldReader) -> str | None:
    """The name of the schedule, if one is said; names this version does not build are refused like those that do not exist."""
    name = reader.values.get("schedule")
    if name is None:
        return None
    if isinstance(name, str) and name not in BUILT_SCHEDULES:
        reader.contradiction(
            "RT064",
            "schedule",
            f"this version does not build the schedule {shown(name)}",
            help=f"use {' or '.join(shown(built) for built in BUILT_SCHEDULES)}",
        )
        return name
    return reader.word("schedule", BUILT_SCHEDULES)


def _mapping(reader: FieldReader) -> RankMapping | None:
    if reader.values.get("mapping") is None:
        return None
    expected = "tiles of stages x replicas from the inside out, like 'chip 1x4, node 2x8',"
    return RankMapping.parse(reader.text("mapping", lambda text: RankMapping.parse(text) is not None, expected))


def _optimizer(reader: FieldReader) -> Optimizer:
    base = Optimizer()
    rate = "a number from 0 to 1000"
    beta1, beta2 = reader.numbers(
        "betas",
        2,
        lambda value: 0 <= value < 1,
        "a list of two numbers, each at least 0 and below 1",
        default=base.betas,
    )
    optimizer = Optimizer(
        lr=reader.number("lr", lambda value: 0 <= value <= 1000, rate, default=base.lr),
        betas=(beta1, beta2),
        # the smallest normal f32 is 1.2e-38: a smaller eps would be zero where it is used
        eps=reader.number("eps", lambda value: 1e-30 <= value <= 1, "a number from 1e-30 to 1", default=base.eps),
        weight_decay=reader.number("weight_decay", lambda value: 0 <= value <= 1000, rate, default=base.weight_decay),
        warmup_steps=reader.integer("warmup_steps", 0, _MAX_STEPS, default=base.warmup_steps),
        total_steps=reader.integer_or_none("total_steps", 1, _MAX_STEPS),
        min_lr=reader.number("min_lr", lambda value: 0 <= value <= 1000, rate, default=base.min_lr),
        clip=reader.word("clip", CLIPS, default=base.clip),
        max_norm=reader.number("max_norm", lambda value: 0 < value <= 1e30, "a number above 0", default=base.max_norm),
    )
    _check_learning_rate(reader, optimizer)
    return optimizer


def _check_learning_rate(reader: FieldReader, optimizer: Optimizer) -> None:
    total = optimizer.total_steps
    if reader.good("lr", "min_lr") and optimizer.min_lr > optimizer.lr:
        reader.contradiction(
            "RT064",
            "min_lr",
            f"min_lr {optimizer.min_lr} is above lr {optimizer.lr}: the learning rate would rise at the end",
            help="lower min_lr, or raise lr",
        )
    if reader.good("min_lr", "total_steps") and optimizer.min_lr > 0 and total is None:
        reader.contradiction(
            "RT064",
            "min_lr",
            f"min_lr {optimizer.min_lr} is never reached: without total_steps the learning rate stays at lr",
            help="give total_steps, or remove min_lr",
        )
    if reader.good("warmup_steps", "total_steps") and total is not None and optimizer.warmup_steps > total:
        reader.contradiction(
            "RT064",
            "warmup_steps",
            f"{optimizer.warmup_steps} warm-up steps do not fit into {total} steps in total",
            help="lower warmup_steps, or raise total_steps",
        )


def _check_cuts(reader: FieldReader, plan: Plan, model: ModelConfig | None) -> None:
    """There are pp - 1 cuts, ascending, and each leaves every stage at least one layer."""
    if not reader.good("pp", "cuts"):
        return
    auto = 'or leave the choice to cuts = "auto"'
    if len(plan.cuts) != plan.pp - 1:
        reader.contradiction(
            "RT064",
            "cuts",
            f"{len(plan.cuts)} cuts are given, but {plan.pp} stages have {plan.pp - 1}",
            help=f"name the layer where each stage but the first starts, {auto}",
        )
    if any(later <= earlier for earlier, later in zip(plan.cuts, plan.cuts[1:], strict=False)):
        reader.contradiction(
            "RT064",
            "cuts",
            f"the cuts {shown(list(plan.cuts))} do not ascend: a stage would have no layer",
            help=f"write them in ascending order, {auto}",
        )
    for cut in plan.cuts:
        if cut < 1 or (model is not None and cut >= model.layers):
            bounds = "at 1 or later" if model is None else f"at 1 to {model.layers - 1}"
            reader.contradiction(
                "RT064",
                "cuts",
                f"a stage cannot start at layer {shown(cut)}: later stages start {bounds}",
                help=f"layers count from 0 and the first stage starts at 0, {auto}",
            )


def _check_said(reader: FieldReader, plan: Plan) -> None:
    """Keys that were written, though as the plan stands they change nothing."""
    rows = plan.micro_batch_size * plan.seq_len
    sized = reader.good("micro_batch_size", "seq_len")
    if sized and reader.good("head_chunk") and plan.head_chunk > rows and "head_chunk" in reader.values:
        _report_chunk(reader, "head_chunk", plan.head_chunk, rows)
    if sized and reader.good("mlp_chunk") and plan.mlp_chunk is not None and plan.mlp_chunk > rows:
        _report_chunk(reader, "mlp_chunk", plan.mlp_chunk, rows)
    if "max_norm" in reader.values and reader.good("max_norm") and "clip" not in reader.values:
        text = 'max_norm changes nothing without clip = "global"'
        reader.contradiction("RT064", "max_norm", text, help='write clip = "global", or remove max_norm')


def _report_chunk(reader: FieldReader, key: str, chunk: int, rows: int) -> None:
    text = f"{key} {chunk} is more than the {rows} rows of a micro-batch (micro_batch_size * seq_len): it would change nothing"
    reader.contradiction("RT064", key, text, help=f"leave it out, or write fewer than {rows}")


def _check_state(reader: FieldReader, plan: Plan) -> None:
    if reader.good("zero", "reduce", "dp") and plan.reduce == "each-micro-batch" and plan.zero < 2:
        reader.contradiction(
            "RT064",
            "reduce",
            f'reduce = "each-micro-batch" needs sharded gradients, but zero = {plan.zero} keeps them whole',
            help='use zero = 2, or reduce = "last"',
        )
    sharded = plan.zero > 0 and plan.dp > 1
    if reader.good("zero", "dp", "grad_dtype", "grad_shard_dtype") and not sharded:
        _check_unsharded(reader, plan)


def _check_unsharded(reader: FieldReader, plan: Plan) -> None:
    """Without shards a gradient is reduced where it is, in its own type: another one for shards would change nothing."""
    if plan.grad_shard_dtype == plan.grad_dtype:
        return
    why = f"zero = {plan.zero}" if plan.dp > 1 else f"dp = {plan.dp}"
    reader.contradiction(
        "RT064",
        "grad_shard_dtype",
        f"gradients are reduced in {plan.grad_dtype}, their grad_dtype: with {why} there are no shards to be {plan.grad_shard_dtype}",
        help=f'remove grad_shard_dtype, use grad_dtype = "{plan.grad_shard_dtype}", or shard (zero = 1 or more, dp = 2 or more)',
    )
