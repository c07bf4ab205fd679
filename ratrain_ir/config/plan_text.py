"""Plans as text: as a TOML file, and from the fields of the IR text's header. `text/plan_file.py` reads files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.plan import KEYS, Plan
from ratrain.ratrain_ir.config.plan_checks import check_together
from ratrain.ratrain_ir.config.plan_keys import table_of
from ratrain.ratrain_ir.support.text import Places, nowhere

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def plan_from_fields(
    values: Mapping[str, object], *, model: ModelConfig | None = None, places: Places = nowhere
) -> Plan:
    """Return the plan of a header's fields: the inverse of `Plan.to_fields`. `places` finds a field in the text.

    Raises RT064 with all fields that are missing, unknown, mistyped, out of range, contradictory, not built in this
    version, or contrary to the model if one is given.
    """
    report = Report(places)
    reader = FieldReader(KEYS.without_words(values), report, "RT064")
    reader.refuse_unknown(KEYS.keys)
    plan = KEYS.read(reader)
    check_together(reader, plan, model, auto_cuts=False)
    report.check()
    return plan


def check_plan(plan: Plan, model: ModelConfig) -> None:
    """Raise RT064 if a plan built in Python contradicts itself or the model, or is not built in this version."""
    plan_from_fields(plan.to_fields(), model=model)


def plan_to_toml(plan: Plan) -> str:
    """Return a TOML text that `parse_plan` reads back as an equal plan, with every key that has an effect."""
    words = plan_words(plan)
    blocks = []
    for section, names in table_of(type(plan)).sections.items():
        lines = [f"{name} = {words[name]}" for name in names if name in words]
        if lines:
            blocks.append("\n".join([f"[{section}]", *lines]) + "\n")
    return "\n".join(blocks)


def changes_text(before: Plan, after: Plan) -> str:
    """Return the keys whose values differ, with their later values, as in a plan's file."""
    known = plan_words(before)
    return ", ".join(f"{key} = {value}" for key, value in plan_words(after).items() if known.get(key) != value)


def plan_words(plan: Plan) -> dict[str, str]:
    """Return each key of a plan file with its value as TOML text, in the file's order; left-out keys are absent."""
    return table_of(type(plan)).words(plan)
