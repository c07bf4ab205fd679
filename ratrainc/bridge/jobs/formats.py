"""Settings files that `fit` reads: which format a file is of, and its job.

A file is recognised by what it says, not by its name: `train.yaml` may be of any framework.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve

from ratrain.ratrain_ir.config.model_files import model_of_hub_name
from ratrain.ratrain_ir.support.diagnostics import fail, nearest
from ratrain.ratrain_ir.support.text import Source, read_text, shown
from ratrain.ratrainc.bridge.importing import FRAMEWORKS, framework_of
from ratrain.ratrainc.bridge.jobs import accelerate, axolotl, llama_factory
from ratrain.ratrainc.bridge.jobs.deepspeed_job import DEEPSPEED_JOB
from ratrain.ratrainc.bridge.jobs.hf_trainer import TRANSFORMERS, TRL
from ratrain.ratrainc.bridge.jobs.job_limits import check_counts
from ratrain.ratrainc.bridge.jobs.llm_foundry_job import LLM_FOUNDRY
from ratrain.ratrainc.bridge.jobs.megatron_bridge_job import MEGATRON_BRIDGE
from ratrain.ratrainc.bridge.jobs.megatron_job import MEGATRON_JOB
from ratrain.ratrainc.bridge.jobs.nanotron_job import NANOTRON
from ratrain.ratrainc.bridge.jobs.torchtitan_job import TORCHTITAN_JOB
from ratrain.ratrainc.bridge.jobs.torchtune_job import TORCHTUNE

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job
    from ratrain.ratrainc.bridge.jobs.job_reader import Asked, SettingsFormat

FORMATS: tuple[SettingsFormat, ...] = (
    axolotl.FORMAT,
    llama_factory.FORMAT,
    TORCHTUNE,
    NANOTRON,
    TORCHTITAN_JOB,
    MEGATRON_JOB,
    MEGATRON_BRIDGE,
    DEEPSPEED_JOB,
    LLM_FOUNDRY,
    accelerate.FORMAT,
    TRL,
    TRANSFORMERS,
)
"""Formats in the order in which they are tried."""
FILE = "a settings file of a training run"


def recognised(path: Path, text: str) -> SettingsFormat | None:
    """Return the format that a file is of; None if it is of none of them."""
    return next((each for each in FORMATS if each.recognises(path, text)), None)


def read_job(path: Path, asked: Asked, name: str | None = None) -> Job:
    """Read a settings file as a job; `name` is its format, which is found out without one.

    accelerate's file may be given first, and the training's settings after it. Raises `DiagnosticError` RT002, RT004
    and RT063 with all errors of the files.
    """
    text = read_text(path, "RT063", FILE)
    known = format_named(name) if name else recognised(path, text)
    if known is None:
        return _refuse(path, text)
    if known is accelerate.FORMAT and name is None:
        for other in asked.beside:
            found = recognised(other, text_of := read_text(other, "RT063", FILE))
            if found not in (None, accelerate.FORMAT) and found is not None:
                beside = (path, *(each for each in asked.beside if each != other))
                return _checked(found.read(other, text_of, evolve(asked, beside=beside)), asked)
    return _checked(known.read(path, text, asked), asked)


def _checked(job: Job, asked: Asked) -> Job:
    """Return the job; refuse counts out of range, and a --model that contradicts the model that the file names."""
    check_counts(job)
    named = model_of_hub_name(job.model_name) if job.model_name else None
    if asked.model is None or named is None:
        return job
    for size in ("layers", "hidden_size", "ffn_size", "heads", "kv_heads", "vocab_size"):
        ours, theirs = getattr(asked.model, size), getattr(named, size)
        if ours != theirs:
            text = f"--model {asked.model.name} has {size} {ours}, and {job.model_name}, which the file names, {theirs}"
            fail("RT064", f"{job.origins['model_name'].place}: {text}", help="leave the option out, or the setting")
    return job


def format_named(name: str) -> SettingsFormat:
    """Return a format by its framework's name. Raises RT004 for an unknown name."""
    found = next((each for each in FORMATS if each.name == name), None)
    if found is None:
        names = [each.name for each in FORMATS]
        fail("RT004", f"no settings format is called {shown(name)}", help=nearest(name, names) or ", ".join(names))
    return found


def _refuse(path: Path, text: str) -> NoReturn:
    """Refuse a file of no known format, with the command or format that is nearest to it."""
    top = Source(str(path), text).top().location
    formats = f"formats are {', '.join(each.name for each in FORMATS)}; name one with --format"
    if "model_type" in text and "hidden_size" in text:
        fail("RT063", "this is a model's configuration, not settings of a run", top, help="ratrainc model FILE")
    if "ratrain" in text[:200] or text.lstrip().startswith(("module", "[parallel]")):
        fail(
            "RT063", "this is a file of ratrain's own, not settings of a framework", top, help="ratrainc plan, compile"
        )
    if (likely := framework_of(text)) is not None:
        title = FRAMEWORKS[likely].title
        name = next(each.name for each in FORMATS if each.name.startswith(likely))
        help_text = f"if they are, say --format {name}; ratrainc import-plan --from {likely} makes a plan of them"
        fail("RT063", f"this may be {title}'s settings, but has none that tells a run", top, help=help_text)
    fail("RT063", "this is no settings file that is known here", top, help=formats)
