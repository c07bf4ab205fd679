"""Optimizer keys that a run overrides, and their rules when a run resumes from another run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, fail
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.checkpoint.checkpoint import contradicts

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.optimizer import Optimizer
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.settings import OptimizerKeys


@frozen
class Override:
    """Optimizer key that a run overrides: the plan's value, and the run's."""

    plan: object
    run: object


Overrides = Mapping[str, Override]
"""Overrides by key."""


def option(name: str) -> str:
    """Return the command line option of a key."""
    return "--" + name.replace("_", "-")


def overrides_of(optimizer: Optimizer, told: OptimizerKeys) -> dict[str, Override]:
    """Return the keys whose value in `told` differs from the plan's.

    Raises `DiagnosticError` RT064 for a key that the plan does not use, so that it would change nothing.
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
    """Return the overrides of a resumed run: its own, and for other keys the checkpoint's run's (`saved`).

    Raises `DiagnosticError` as `overrides_of` does, and RT092 if the plan's value of such a key has changed since, or
    if the record is malformed.
    """
    found = overrides_of(optimizer, told)
    report = Diagnostics()
    for name, kept in _recorded(optimizer, saved.get("optimizer"), checkpoint).items():
        now = getattr(optimizer, name)
        if getattr(told, name) is not None or now == kept.run:
            continue
        # Override or new plan, either may be meant: the user must say.
        if now != kept.plan:
            report.error(
                "RT092",
                f"the run of the checkpoint '{checkpoint}' was told {name} = {shown(kept.run)}, and its plan "
                f"said {shown(kept.plan)}; "
                f"this program's says {shown(now)}",
                help=f"say which holds: {option(name)} {words(kept.run)} or {option(name)} {words(now)}",
            )
        found[name] = kept
    report.check()
    return found


def words(value: object) -> str:
    """Return a value as its option takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _recorded(optimizer: Optimizer, entry: object, checkpoint: str) -> dict[str, Override]:
    """Return the overrides that a checkpoint recorded; empty if there are none."""
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
    """Return the program with these keys in its plan.

    Raises `DiagnosticError` RT064 where they contradict each other or the rest of the plan.
    """
    if not overrides:
        return program
    values: dict[str, Any] = {name: override.run for name, override in overrides.items()}
    plan = evolve(program.plan, optimizer=evolve(program.plan.optimizer, **values))
    check_plan(plan, program.model)
    return evolve(program, plan=plan)


def recorded(overrides: Overrides) -> dict[str, dict[str, Any]]:
    """Return overrides as the manifest stores them."""
    return {name: asdict(override) for name, override in overrides.items()}
