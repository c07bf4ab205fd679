"""Function that answers whether a training run of another framework fits its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.hub_names import model_of_hub_name
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.ratrainc.bridge.jobs.formats import format_named, read_job
from ratrain.ratrainc.bridge.jobs.job_reader import Asked
from ratrain.ratrainc.bridge.jobs.option_job import option_job, option_phrase
from ratrain.ratrainc.compiling.building import chosen_machine
from ratrain.ratrainc.fit import answer

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.fit.answer import Fit
    from ratrain.targets.machine.machine import Machine

PRICED_ON = "a100-node"
"""Machine by which ways out are priced where none is named."""


def fit(
    file: str | Path | None = None,
    *,
    beside: Sequence[str | Path] = (),
    format: str | None = None,  # noqa: A002 - the name of the option
    model: str | ModelConfig | None = None,
    devices: int | None = None,
    memory: int | None = None,
    machine: str | Machine | None = None,
    seq_len: int | None = None,
    micro_batch_size: int | None = None,
    given: Mapping[str, str] | None = None,
) -> Fit:
    """Answer whether a training run fits its devices, who holds the bytes, and what would make it fit.

    `file` is a settings file of the framework that would run it; without one, `model` and `devices` describe the run.
    `beside` are further files of the same run: an accelerate file, a ds_config.json. `memory` is what a device has, in
    bytes; without it, `machine` says it, which also prices ways out. The other numbers fill in what the file leaves
    open. Raises `DiagnosticError` with everything that is wrong in the files, and RT061 if no formula is known for what
    they ask.
    """
    if file is None and (beside or format or given):
        misuse("--beside, --format and --set are about a settings file, and there is none")
    chosen = chosen_machine(machine or PRICED_ON)
    capacity = chosen.whole("ddr_capacity") if memory is None and machine is not None else memory
    config = _model(model) if isinstance(model, str) else model
    asked = Asked(
        devices=devices,
        device_bytes=capacity,
        model=config,
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
        beside=tuple(map(Path, beside)),
        given=dict(given or {}),
    )
    if file is None:
        return answer.answer("", "PyTorch", option_job(asked), capacity, chosen, option_phrase)
    job = read_job(Path(file), asked, format)
    known = format_named(job.framework)
    if given and not known.reads_script:
        misuse(f"--set is about the variables of a launch script, and {known.title}'s settings have none")
    return answer.answer(str(file), known.title, job, capacity, chosen, known.phrase)


def _model(name: str) -> ModelConfig:
    """Load a model by its name on the Hub, by a preset's name or from a file."""
    known = model_of_hub_name(name)
    return load_model(name) if known is None else known
