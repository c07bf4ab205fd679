"""Function that answers whether a training run of another framework fits its devices."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.config.model_files import load_model, preset_names
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, misuse
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.bridge.jobs.formats import format_named, read_job
from ratrain.ratrainc.bridge.jobs.job_limits import check_counts
from ratrain.ratrainc.bridge.jobs.job_reader import Asked
from ratrain.ratrainc.bridge.jobs.option_job import option_job, option_phrase
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.plan_choices import PlanChoice
from ratrain.ratrainc.compiling.building import chosen_machine
from ratrain.ratrainc.fit import answer
from ratrain.ratrainc.fit.answer import REFUSED, OurPlan
from ratrain.targets.machine.machine import Machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.fit.answer import Fit

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
    exact: bool = False,
) -> Fit:
    """Answer whether a training run fits its devices, who holds the bytes, and what would make it fit.

    `file` is a settings file of the framework that would run it; without one, `model` and `devices` describe the run.
    `beside` are further files of the same run: an accelerate file, a ds_config.json. `memory` is what a device has, in
    bytes; without it, `machine` says it, which also prices ways out. The other numbers fill in what the file leaves
    open. With `exact` the answer also has a plan of ours for the same devices and batch: searched, compiled and placed
    on that machine, which takes seconds to a minute; adapters train as in the plan that `import_plan` makes of the
    file. Raises `DiagnosticError` with everything that is wrong in the files, and RT061 if no formula is known for what
    they ask.
    """
    if file is None and (beside or format or given):
        misuse("--beside, --format and --set are about a settings file, and there is none")
    chosen = chosen_machine(machine or PRICED_ON)
    capacity = chosen.whole("ddr_capacity") if memory is None and machine is not None else memory
    config = load_model(model) if isinstance(model, str) else model
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
        job = option_job(asked)
        check_counts(job)
        found = answer.answer("", "PyTorch", job, capacity, chosen, option_phrase)
    else:
        job = read_job(Path(file), asked, format)
        known = format_named(job.framework)
        if given and not known.reads_script:
            misuse(f"--set is about the variables of a launch script, and {known.title}'s settings have none")
        found = answer.answer(str(file), known.title, job, capacity, chosen, known.phrase)
    if not exact:
        return found
    assert found.job.model is not None
    named = model if isinstance(model, str) else _model_words(found.job.model, found.job.model_name)
    from ratrain.ratrainc.functions.long_sequences import long_sequence_plans

    on = chosen_machine(machine or PRICED_ON, found.capacity)
    if not found.job.trains_part:
        return evolve(found, ours=_our_plan(found, machine, named), long=long_sequence_plans(found.job, on))
    assert file is not None
    try:
        like, words = _imported(found.job.model, file, asked, format, named)
    except _NoPlanError as error:
        return evolve(found, ours=OurPlan("", 0, 0.0, error.words, f"{REFUSED}: {error.why}"))
    ours = _our_plan(found, machine, named, like, words)
    return evolve(found, ours=ours, long=long_sequence_plans(found.job, on, like.training))


def _model_words(model: ModelConfig, said: str | None) -> str:
    """Return a model's name as commands take it: of a preset that is like it, else as the file has it (`said`)."""
    presets = preset_names()
    if model.name in presets:
        return model.name
    like = (name for name in presets if evolve(load_model(name), name=model.name, inert=model.inert) == model)
    return next(like, said or model.name)


_ADDED: Mapping[str, tuple[str, Any]] = {"--steps": ("steps", 1000), "--f32-state": ("f32_state", True)}
"""Options that `import-plan` may ask for and that no answer depends on: the length of a run, by which a learning rate
comes down, and state in f32, which all plans have."""


class _NoPlanError(Exception):
    """No plan can be made of the settings."""

    def __init__(self, words: str, why: str) -> None:
        super().__init__(why)
        self.words, self.why = words, why


def _imported(model: ModelConfig, file: str | Path, asked: Asked, form: str | None, named: str) -> tuple[Plan, str]:
    """Return the plan of the settings as `import-plan` makes it, and the command that writes it to P.toml.

    `named` is the model's name in commands. Raises `_NoPlanError` with the reason if no plan can be made of them.
    """
    from ratrain.ratrainc.functions.planning import import_plan

    options: dict[str, Any] = {
        "clusters": asked.devices,
        "seq_len": asked.seq_len,
        "micro_batch_size": asked.micro_batch_size,
        "beside": asked.beside,
        "given": asked.given,
        "model": None if asked.model is None else named,
    }
    while True:
        words = _import_words(file, form, options)
        try:
            made = import_plan(form, file, **{**options, "model": asked.model})
        except DiagnosticError as error:
            helps = " ".join(each.help or "" for each in error.diagnostics)
            wanted = dict(added for option, added in _ADDED.items() if re.search(rf"{option}\b", helps))
            if wanted.keys() <= options.keys():
                first = error.diagnostics[0]
                why = f"{first.message}; {first.help}" if first.help else first.message
                raise _NoPlanError(words, why) from error
            options |= wanted
        else:
            return parse_plan(made.text(), file=_PLAN_FILE, model=model), words


_PLAN_FILE = "P.toml"


def _import_words(file: str | Path, form: str | None, options: Mapping[str, Any]) -> str:
    """Return the command that makes a plan of a settings file."""
    words = ["ratrainc", "import-plan", str(file)]
    words += ["--from", form] if form else []
    words += ["--model", options["model"]] if options["model"] is not None else []
    for option, name in (("--devices", "clusters"), ("--seq-len", "seq_len"), ("--steps", "steps")):
        words += [option, str(options[name])] if options.get(name) is not None else []
    if options["micro_batch_size"] is not None:
        words += ["--micro-batch-size", str(options["micro_batch_size"])]
    words += [word for path in options["beside"] for word in ("--beside", str(path))]
    words += [word for name, value in options["given"].items() for word in ("--set", f"{name}={value}")]
    words += ["--f32-state"] if options.get("f32_state") else []
    return shlex.join([*words, "-o", _PLAN_FILE])


def _our_plan(
    found: Fit, machine: str | Machine | None, named: str, like: Plan | None = None, first: str = ""
) -> OurPlan:
    """Plan the same batch on the same devices, quickly: closed forms choose, the winner is placed and simulated.

    `named` is the model's name in commands. `like` says what trains, and `first` is the command that writes it.
    """
    from ratrain.ratrainc.functions.planning import plan

    job = found.job
    assert job.model is not None
    assert job.micro_batch_size is not None
    assert job.gradient_accumulation is not None
    assert job.seq_len is not None
    devices = job.devices or 1
    batch = job.micro_batch_size * job.gradient_accumulation * (job.dp or 1)
    name = machine if isinstance(machine, str) else PRICED_ON
    choice = MachineChoice(name, found.capacity) if not isinstance(machine, Machine) else machine
    words = f"ratrainc plan --model {named} --clusters {devices} --global-batch {batch} --seq-len {job.seq_len}"
    words += f" --machine {name}" + (f" --capacity {found.capacity}" if found.capacity is not None else "") + " --quick"
    if like is not None:
        words = f"{first} && {words} --like {_PLAN_FILE}"
    choices = None if like is None else PlanChoice(like=like)
    try:
        planned = plan(job.model, devices, batch, seq_len=job.seq_len, machine=choice, plans=choices, quick=True)
    except DiagnosticError as error:
        return OurPlan("", 0, 0.0, words, error.diagnostics[0].message)
    best = planned.best
    return OurPlan(best.plan.summary, best.peak_bytes, best.seconds, words)
