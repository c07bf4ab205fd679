"""Import of a plan from any settings file that `fit` reads: by a reader of plans, or by the job that the file makes.

Megatron-LM, DeepSpeed and torchtitan have readers of their own, which know more of a plan than a job does. For the
others the file becomes a `Job`, and the job a plan (`plan_of_job.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail, misuse
from ratrain.ratrain_ir.support.text import Source, read_text
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, Imported, framework_of, import_plan, plan_of_values
from ratrain.ratrainc.bridge.job_plans.adapter_keys import check_trained
from ratrain.ratrainc.bridge.job_plans.plan_of_job import plan_of_job
from ratrain.ratrainc.bridge.jobs.formats import FILE, FORMATS, format_named, read_job, recognised
from ratrain.ratrainc.bridge.jobs.job import ADAPTER, THAWED
from ratrain.ratrainc.bridge.jobs.job_reader import Asked as JobAsked
from ratrain.ratrainc.bridge.settings import Default

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job
    from ratrain.ratrainc.bridge.settings import Asked

_OWN_READERS = {"megatron-lm": "megatron", "deepspeed": "deepspeed", "torchtitan": "torchtitan"}
"""Readers of plans for formats of `fit` that have one."""
BY_JOBS = tuple(each.name for each in FORMATS if each.name not in _OWN_READERS)
"""Formats whose plans are made of their jobs."""
_SHOWN = (
    *("seq_len", "micro_batch_size", "gradient_accumulation", "sharding", "reshard_after_forward", "compute_dtype"),
    *("gradient_dtype", "reduce_dtype", "checkpointing", "attention", "optimizer", "lr", "betas", "eps"),
    *("weight_decay", "max_grad_norm", "scheduler", "decay_style", "min_lr", "warmup_steps", "steps", "packing"),
)
"""Fields of a job whose defaults decide keys of the plan, or passes."""


_FROM_CALLERS = (
    *("pp", "micro_batch_size", "global_batch", "dtype", "lr", "weight_decay", "max_norm", "warmup_steps", "steps"),
)
"""Options for numbers that DeepSpeed's files leave to the program that calls it."""


def import_settings(framework: str | None, path: str | Path, asked: Asked) -> Imported:
    """Convert a settings file to a plan; without `framework` its content says the format.

    Raises `DiagnosticError` for an option that the format has no use for, and with all errors of the files.
    """
    known = (*FRAMEWORKS, *BY_JOBS)
    if framework not in (None, *known):
        misuse(f"there is no framework '{framework}' here; there are {', '.join(known)}")
    kind = kind_of(path) if framework is None else framework
    own = FRAMEWORKS.get(kind)
    takes = {"deepspeed": _FROM_CALLERS, "megatron": (), "torchtitan": ()}
    numbers = takes.get(kind, tuple(name for name in _FROM_CALLERS if name not in ("pp", "dtype")))
    for name in _FROM_CALLERS:
        if getattr(asked, name) is not None and name not in numbers:
            option = f"--{name.replace('_', '-')}"
            misuse(f"{option} is for --from deepspeed, whose files may leave it open: here the file of {kind} says it")
    script = format_named(kind).reads_script if own is None else own.script
    if asked.given and not script:
        misuse("--set is for --from megatron or megatron-bridge: the other formats are no scripts")
    if own is None:
        return import_job(framework, path, asked)
    if asked.beside:
        other = ": name the training's arguments first, and the ds_config with --beside" if kind == "deepspeed" else ""
        misuse(f"--beside is for files of trainers, like train.yaml; --from {kind} takes one file{other}")
    if asked.f32_state:
        misuse(f"--f32-state is for files of trainers, like train.yaml; --from {kind} refuses other state, or names it")
    if asked.model is not None:
        misuse(f"--model is for files of trainers, like train.yaml; of a file of {kind} no key of a plan depends on it")
    return import_plan(kind, path, asked)


def kind_of(path: str | Path) -> str:
    """Return the reader of a file by its content: a name in `FRAMEWORKS` or `BY_JOBS`.

    Raises RT063 if no reader is known for it.
    """
    text = read_text(path, "RT063", FILE)
    found = recognised(Path(path), text)
    name = framework_of(text) if found is None else _OWN_READERS.get(found.name, found.name)
    if name is None:
        names = ", ".join((*FRAMEWORKS, *BY_JOBS))
        message = "this is no settings file that is known here"
        fail("RT063", message, Source(str(path), text).top().location, help=f"name its framework with --from: {names}")
    return name


def import_job(name: str | None, path: str | Path, asked: Asked) -> Imported:
    """Convert a settings file to a plan, by its job; without `name` its content says the format.

    Raises `DiagnosticError` RT002, RT063 and RT064 with what is wrong in the file.
    """
    of_job = JobAsked(
        devices=asked.clusters,
        seq_len=asked.seq_len,
        micro_batch_size=asked.micro_batch_size,
        model=asked.model,
        beside=asked.beside,
        given=asked.given,
    )
    try:
        job = read_job(Path(path), of_job, name)
    except DiagnosticError:
        _refuse_other_format(name, path)
        raise
    title, top = format_named(job.framework).title, Source(str(path), "").top()
    made = plan_of_job(job, title, top, asked)
    plan, auto = plan_of_values(made.values, lambda label: made.places.get(label.rpartition(".")[2], top), job.model)
    check_trained(made, plan)
    left = tuple(sorted(made.left, key=lambda each: not each.trains))
    return Imported(
        title,
        str(path),
        plan,
        auto,
        tuple(made.passes),
        left,
        {**_defaults(job), **made.defaults},
        frozenset(made.unsaid),
    )


def _refuse_other_format(name: str | None, path: str | Path) -> None:
    """Raise RT063 if a file that cannot be read as the format `name` is of another one."""
    text = read_text(path, "RT063", FILE)
    found = recognised(Path(path), text)
    if name is not None and found is not None and found.name != name:
        message = f"this looks like settings of {found.title}, and those of {format_named(name).title} are expected"
        way_out = f"--from {_OWN_READERS.get(found.name, found.name)}, or no --from"
        fail("RT063", message, Source(str(path), text).top().location, help=way_out)


def _defaults(job: Job) -> dict[str, Default]:
    """Return the framework's defaults that decide keys of the plan, by the names and in the words of a job."""
    found = {}
    for name in _SHOWN:
        origin = job.origins.get(name)
        if origin is not None and origin.default and not origin.key.startswith("--"):
            holder: Any = job if hasattr(job, name) else job.training
            value = getattr(holder, name)
            plain = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
            found[name] = Default(plain, origin.place)
    for name, origin in job.origins.items():
        beginning = next((each for each in (ADAPTER, THAWED) if name.startswith(each)), None)
        if beginning is not None and origin.default:
            value = getattr(getattr(job, beginning[:-1]), name.removeprefix(beginning))
            found[origin.key] = Default(list(value) if isinstance(value, tuple) else value, origin.place)
    return found
