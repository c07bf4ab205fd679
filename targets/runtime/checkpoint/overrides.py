"""Keys of the optimizer that a run is told in place of its plan's, and what a resumed run makes of those of the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, fail
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.checkpoint.checkpoint import contradicts

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Optimizer
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.settings import OptimizerKeys


@frozen
class Override:
    """A key of the optimizer: what the plan says, and what holds instead."""

    plan: object
    run: object


Overrides = Mapping[str, Override]
"""By the name of the key."""


def option(name: str) -> str:
    """The option of a key."""
    return "--" + name.replace("_", "-")


def overrides_of(optimizer: Optimizer, told: OptimizerKeys) -> dict[str, Override]:
    """What a run is told that its plan does not say anyway.

    Raises `DiagnosticError` RT064 for a key that would change nothing, as the plan does not use it.
    """
    said = {name: value for name, value in asdict(told, recurse=False).items() if value is not None}
    if "max_norm" in said and optimizer.clip == "none":
        fail(
            "RT064",
            f"max_norm {said['max_norm']:g} would change nothing: the plan does not clip",
            help='leave out --max-norm, or compile the plan with clip = "global", which adds the norm to the program',
        )
    return {
        name: Override(getattr(optimizer, name), value)
        for name, value in said.items()
        if value != getattr(optimizer, name)
    }


def resumed_overrides(
    optimizer: Optimizer, told: OptimizerKeys, saved: Mapping[str, Any], checkpoint: str
) -> dict[str, Override]:
    """Those of a run that goes on from a checkpoint: what it is told, and what the checkpoint's run (`saved`) was told beside that.

    Raises `DiagnosticError` as `overrides_of` does, and RT092 where the plan has got another value of such a key since, or the
    record is not one of this program.
    """
    found = overrides_of(optimizer, told)
    report = Diagnostics()
    for name, kept in _recorded(optimizer, saved.get("optimizer"), checkpoint).items():
        now = getattr(optimizer, name)
        if getattr(told, name) is not None or now == kept.run:
            continue
        if now != kept.plan:
            report.error(
                "RT092",
                f"the run of the checkpoint '{checkpoint}' was told {name} = {shown(kept.run)}, and its plan said {shown(kept.plan)}; "
                f"this program's says {shown(now)}",
                help=f"say which holds: {option(name)} {words(kept.run)} or {option(name)} {words(now)}",
            )
        found[name] = kept
    report.check()
    return found


def words(value: object) -> str:
    """A value as its option takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _recorded(optimizer: Optimizer, entry: object, checkpoint: str) -> dict[str, Override]:
    """What a checkpoint's run recorded; nothing where it was told nothing, or an older version wrote it."""
    if entry is None:
        return {}
    names = set(asdict(optimizer))
    pairs: dict[str, Any] = entry if isinstance(entry, dict) and entry.keys() <= names else {"": None}
    if not all(isinstance(pair, dict) and pair.keys() == {"plan", "run"} for pair in pairs.values()):
        contradicts(checkpoint, "optimizer")
    return {name: Override(_value(pair["plan"]), _value(pair["run"])) for name, pair in pairs.items()}


def _value(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def overridden(program: Program, overrides: Overrides) -> Program:
    """The program under a plan with these keys.

    Raises `DiagnosticError` RT064 where they contradict each other, or what else the plan says.
    """
    if not overrides:
        return program
    values: dict[str, Any] = {name: override.run for name, override in overrides.items()}
    plan = evolve(program.plan, optimizer=evolve(program.plan.optimizer, **values))
    check_plan(plan, program.model)
    return evolve(program, plan=plan)


def recorded(overrides: Overrides) -> dict[str, dict[str, Any]]:
    """Overrides as a manifest has them."""
    return {name: asdict(override) for name, override in overrides.items()}
