"""Facts other than its state that a run's bits depend on, and warnings where a resumed run differs in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields

from ratrain.ratrain_ir.config.plan import DTYPE_KEYS, KEYS, Plan
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Note, Severity, fail
from ratrain.targets.runtime.arena.scalars import INITIAL_SCALE
from ratrain.targets.runtime.checkpoint.checkpoint_series import (
    facts_of,
)
from ratrain.targets.runtime.checkpoint.data_options import options_of_data
from ratrain.targets.runtime.checkpoint.overrides import recorded, words
from ratrain.targets.runtime.data.data import in_words
from ratrain.targets.runtime.settings import TENSOR_KERNELS, OptimizerKeys
from ratrain.targets.runtime.weights.adapters import base_digest

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.checkpoint.overrides import Overrides
    from ratrain.targets.runtime.data.data import TokenStream
    from ratrain.targets.runtime.settings import Execution, RunSettings, Start


def run_manifest(
    program: Program, stream: TokenStream, settings: RunSettings, seed: int, overrides: Overrides
) -> dict[str, Any]:
    """Return everything that must be equal for a resumed run to give the same bits.

    `program` has the overrides in its plan.
    """
    plan = json.dumps(evolve(program.plan, mapping=None).to_fields(), sort_keys=True)
    return {
        "plan": json.loads(plan),
        "ratrain": _version("ratrain"),
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "optimizer": recorded(overrides),
        "plan_hash": hashlib.sha256(plan.encode()).hexdigest(),
        "kernels": settings.execution.kernels,
        "kernel_threads": settings.execution.kernel_threads(program.plan.clusters),
        "seed": seed,
        "order": settings.order,
        "sums": settings.execution.sums,
        "data": stream.digest,
        "stream": stream.facts(),
        "eval_every": settings.evaluation.every,
        **({"base": base_digest(settings.start.weights, seed)} if program.plan.training else {}),
        **blas_facts(),
        **_torch_facts(settings.execution),
    }


def _torch_facts(execution: Execution) -> dict[str, Any]:
    """Return PyTorch's version and the device for kernels of PyTorch, and Triton's version for kernels of Triton."""
    if execution.kernels not in ("torch", *TENSOR_KERNELS):
        return {}
    triton = {"triton": _version("triton")} if execution.kernels == "torch-triton" else {}
    return {"torch": _version("torch"), "device": execution.device, **triton}


def blas_facts() -> dict[str, Any]:
    """Return which BLAS multiplies in `fast` kernels, for which core type, and that it uses one thread."""
    from ratrain.targets.runtime.kernels import openblas

    return {"blas": openblas.VERSION, "blas_core_type": openblas.core_type(), "blas_threads": 1}


_SAID_ELSEWHERE = frozenset({"plan", "optimizer", "data", "stream", "eval_every", "base"})
"""Entries that `differences` skips: the plan's hash stands for the plan and its optimizer; data has its own warning,
which names the steps between evaluations where they are held out of it."""


def check_base(start: Start, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse, with RT092, to resume beside other frozen weights than the checkpoint's run had: it holds none."""
    if saved.get("base") == now.get("base"):
        return
    text = f"the checkpoint '{start.checkpoint}' holds what trains alone, beside weights that are"
    drawn = str(saved.get("base")).startswith("drawn")
    way_out = "leave --init out, and give the same seed" if drawn else "give the weights that it began with: --init W"
    fail("RT092", f"{text} {saved.get('base')}; this run has weights that are {now.get('base')}", help=way_out)


def data_differences(start: Start, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Diagnostic]:
    """Return a warning if a run resumes with other data than the checkpoint's and was told that this is meant.

    Raises `DiagnosticError` RT092 if it was not told.
    """
    if "data" not in saved or saved["data"] == now["data"]:
        return []
    facts = facts_of(saved)
    then = in_words(facts) if facts else f"other data ({str(saved['data']).partition('-')[0]} bytes of tokens)"
    text = f"this run's data differ from the data of the checkpoint '{start.checkpoint}'"
    notes = [Note(f"then: {then}"), Note(f"now: {in_words(now['stream'])}")]
    if facts == now["stream"]:
        notes.append(Note("what is in it has changed"))
    if not start.new_data:
        said = str(options_of_data(facts, now["stream"], saved.get("eval_every"))) if facts else ""
        same = said or "give the same data, tokenizer and held-out part as then"
        seen = ", which trains on what was held out" if facts.get("part") and not now["stream"]["part"] else ""
        other = "tune on these into another folder" if start.new_data is None else f"use them with --new-data{seen}"
        fail("RT092", text, notes=notes, help=f"{same}; or {other}")
    return [Diagnostic("RT092", text, notes=notes, severity=Severity.WARNING)]


def scale_that_starts_anew(saved: object, plan: Plan) -> list[Diagnostic]:
    """Return a warning if a checkpoint's loss scale does not apply to this run, which then starts it anew.

    It does not apply if dtypes differ, or if one of the two scales is fixed and the other dynamic.
    """
    if not isinstance(saved, dict) or not {"loss_scale", *DTYPE_KEYS} <= saved.keys():
        return []
    if not isinstance(saved["loss_scale"], int | float | None):
        return []
    types = [
        f"{key} {saved[key]} then, {getattr(plan, key)} now" for key in DTYPE_KEYS if saved[key] != getattr(plan, key)
    ]
    if not types and (saved["loss_scale"] is None) == (plan.loss_scale is None):
        return []
    if saved["loss_scale"] == plan.loss_scale == 1.0:  # neither run scales its loss, as with f32 and bf16
        return []
    was, is_now = (
        "dynamic" if scale is None else f"fixed at {scale:g}" for scale in (saved["loss_scale"], plan.loss_scale)
    )
    start = INITIAL_SCALE if plan.loss_scale is None else plan.loss_scale
    text = f"the loss scale starts anew at {start:g}: it was {was}, and is {is_now} now"
    return [Diagnostic("RT092", text, notes=[Note(words) for words in types], severity=Severity.WARNING)]


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[Diagnostic]:
    """Return a warning for each recorded fact that has changed since the checkpoint was written."""
    warnings = []
    for key, value in now.items():
        if key in _SAID_ELSEWHERE or key not in saved or saved[key] == value:
            continue
        if key == "plan_hash":
            warnings += _plan_differences(saved.get("plan"), now["plan"])
            continue
        text = f"the checkpoint was written with {key} = {saved[key]}, this run has {value}: not bit for bit the same"
        warnings.append(Diagnostic("RT092", text, severity=Severity.WARNING))
    return warnings


def _plan_differences(saved: object, now: dict[str, Any]) -> list[Diagnostic]:
    """Return a warning for each changed key that a run may set, and one for other keys, with both values of each.

    Older checkpoints hold no keys: the words then say so, and there are no notes.
    """
    text, end = "the checkpoint was written with another plan", ": not bit for bit the same"
    if not isinstance(saved, dict):
        return [Diagnostic("RT092", f"{text}, whose keys it does not have{end}", severity=Severity.WARNING)]
    then: dict[str, Any] = {**_UNSAID, **saved}
    today: dict[str, Any] = {**_UNSAID, **now}
    changed = [key for key in {**today, **then} if then.get(key) != today.get(key)]
    before, after = KEYS.with_words(then), KEYS.with_words(today)
    told = {
        key: f"{key} {_value(after.get(key))} from now on ({_value(before.get(key))} in the checkpoint)"
        for key in changed
        if key in _OF_A_RUN
    }
    warnings = [
        Diagnostic("RT092", f"{said}: steps differ from the first run's", severity=Severity.WARNING, key=key)
        for key, said in told.items()
    ]
    others = [key for key in changed if key not in told]
    if others or not changed:
        notes = [Note(f"plan: {key} = {before.get(key)} then, {after.get(key)} now") for key in others]
        said = f"{text}: {', '.join(others) or 'it says the same in other words'}{end}"
        warnings.append(Diagnostic("RT092", said, notes=notes, severity=Severity.WARNING))
    return warnings


def _value(value: object) -> str:
    return words(tuple(value) if isinstance(value, list) else value)


_OF_A_RUN = frozenset(key.name for key in fields(OptimizerKeys))
"""Keys of a plan that options of a run take the place of: another value makes no other plan."""


_UNSAID = {
    key.name: list(key.default) if isinstance(key.default, tuple) else key.default
    for key in fields(Plan)
    if key.name in KEYS.own and not KEYS.own[key.name].in_header_if_default
}
"""Values of keys that a plan's header leaves out because they are the default."""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
