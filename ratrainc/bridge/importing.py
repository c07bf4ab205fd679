"""Import of a plan from the settings of another framework (`import-plan`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen

from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.made_for import MadeFor
from ratrain.ratrain_ir.config.plan import KEYS, Plan
from ratrain.ratrain_ir.config.plan_checks import check_together
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.support.text import Place, Places, Source, read_text, shown
from ratrain.ratrain_ir.support.toml_text import toml_comment
from ratrain.ratrain_ir.text.plan_file import checked_plan_text
from ratrain.ratrain_ir.text.said_keys import check_said
from ratrain.ratrainc.bridge.deepspeed import DEEPSPEED
from ratrain.ratrainc.bridge.megatron import MEGATRON
from ratrain.ratrainc.bridge.megatron_arguments import named_flags
from ratrain.ratrainc.bridge.settings import Asked, Default, Framework, Left, SettingsReader
from ratrain.ratrainc.bridge.torchtitan import TORCHTITAN
from ratrain.targets.machine.machine import DEFAULT_MACHINE

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

_NOT_CARRIED = "Not carried over"
NO_MACHINE = f"no machine is named: commands take '{DEFAULT_MACHINE}' for the plan, or their --machine"
_ELSEWHERE = "Not carried over, said elsewhere or without effect"
FRAMEWORKS: dict[str, Framework] = {"megatron": MEGATRON, "deepspeed": DEEPSPEED, "torchtitan": TORCHTITAN}


@frozen
class Imported:
    """A plan that was made from the settings of another framework."""

    title: str
    """the framework's name"""
    file: str
    plan: Plan
    """without cuts if they are to be chosen for the model"""
    auto_cuts: bool
    passes: tuple[str, ...]
    """passes that express settings which no key of a plan does"""
    left: tuple[Left, ...]
    """settings that are not carried over, first those without which something else is trained"""
    defaults: dict[str, Default]
    """defaults of the framework for settings that the file leaves out, which the plan has"""
    unsaid: frozenset[str] = frozenset()
    """keys left out of the plan's file, since neither the settings nor the framework determine them"""
    unset: dict[str, str] = field(factory=dict)
    """variables that a script is taken to lack, and the text that it uses instead"""
    made_for: MadeFor | None = None
    """the machine that the plan's file names; None if none was asked for, so that commands take the default one"""

    def told(self) -> list[str]:
        """Return what to tell of settings that are not carried over: those that train something else, one a line."""
        lines = [f"not carried over: {each.key} = {shown(each.value)}: {each.why}" for each in self.left if each.trains]
        others = ", ".join(each.key for each in self.left if not each.trains)
        reasons = "reasons: in the plan's comments, and with --json"
        return lines + [f"{_ELSEWHERE.lower()} ({reasons}): {others}"] * bool(others)

    def text(self, path: str | None = None) -> str:
        """Return the plan's file, which is for `path`: it names a machine's file as seen from there.

        Raises `DiagnosticError` RT011 if it cannot be read back as the same plan.
        """
        text = plan_to_toml(self.plan)
        if self.auto_cuts:
            text = text.replace("\ncuts = []\n", '\ncuts = "auto"\n', 1)
        lines = text.splitlines(keepends=True)
        text = "".join(line for line in lines if line.partition(" = ")[0] not in self.unsaid)
        head = [f"From settings of {self.title}."]
        head += [f"Passes: {','.join(self.passes)} (--passes)."] if self.passes else []
        taken = f"Taken from {self.title}'s defaults"
        head += [
            f"{taken}: {name} = {shown(each.value)}" + (f" ({each.source})" if each.source else "")
            for name, each in self.defaults.items()
        ]
        head += [
            f"{_NOT_CARRIED if each.trains else _ELSEWHERE}: {each.key} = {shown(each.value)}: {each.why}"
            for each in self.left
        ]
        head += [f"{name} is not set: {shown(value)} (--set {name}=...)" for name, value in self.unset.items() if value]
        head += [f"${name} is not given, and empty (--set {name}=...)" for name in self.unset if name.isdigit()]
        head += [NO_MACHINE] if self.made_for is None else []
        table = "" if self.made_for is None else f"{self.made_for.text(path or 'P.toml')}\n"
        whole = "\n".join([*map(toml_comment, head), "", f"{table}{text}"])
        return checked_plan_text(whole, self.plan, left_out=self.unsaid)


def import_plan(framework: str, path: str | Path, asked: Asked) -> Imported:
    """Convert a framework's file to a plan. Raises `DiagnosticError` RT002, RT063 and RT064 with all its errors."""
    known = FRAMEWORKS[framework]
    text = read_text(path, "RT063", known.file)
    try:
        return imported(known, str(path), text, asked)
    except DiagnosticError:
        likely = framework_of(text)
        if likely in (None, framework):
            raise
        message = f"this looks like {FRAMEWORKS[likely].title}'s settings, and {known.file} is expected"
        fail("RT063", message, Source(str(path), text).top().location, help=f"--from {likely}")


_SECTION = re.compile(r"^\[[\w.]+\]\s*(#.*)?$", re.MULTILINE)


def framework_of(text: str) -> str | None:
    """Return the name of the framework whose settings a text looks like; None if it looks like none's."""
    if re.match(r"\s*\{\s*[\w\"'/#]+.*:", text):
        return "deepspeed"
    if _SECTION.search(text):
        return "torchtitan"
    return "megatron" if len(named_flags(text) & MEGATRON.rules.keys()) > 1 else None


def imported(framework: Framework, file: str, text: str, asked: Asked) -> Imported:
    """Convert a text of a framework's settings to a plan; `file` is its name in messages.

    Raises `DiagnosticError` RT063 and RT064 with all its errors.
    """
    top = Source(file, text).top()
    reader = SettingsReader(framework, framework.settings_of(file, text, asked), top, asked)
    framework.read(reader)
    reader.leave_rest()
    reader.report.check()
    plan, auto = _plan(reader)
    passes, defaults = tuple(reader.passes), dict(reader.defaults)
    left = tuple(sorted(reader.left, key=lambda each: not each.trains))
    return Imported(framework.title, file, plan, auto, passes, left, defaults, frozenset(reader.unsaid), reader.unset)


def _plan(reader: SettingsReader) -> tuple[Plan, bool]:
    """Make the plan from the keys that were put, by the rules of plan files; and whether its cuts are open."""

    def place(label: str) -> Place:
        return reader.places.get(label.rpartition(".")[2], reader.top)

    return plan_of_values(reader.values, place)


def plan_of_values(given: Mapping[str, Any], place: Places, model: ModelConfig | None = None) -> tuple[Plan, bool]:
    """Make a plan from keys by name, by the rules of plan files; and tell whether its cuts are open.

    `place` finds a key in the file that it came from. Raises `DiagnosticError` RT063 and RT064 with all errors, those
    against the model too if one is given.
    """
    report = Report(place)
    values = KEYS.without_words(dict(given))
    auto = "cuts" not in values and values.get("pp") != 1
    fields = FieldReader(values, report, "RT063", KEYS.labels)
    plan = KEYS.read(fields, {} if "cuts" in values else {"cuts": ()})
    check_together(fields, plan, model, auto_cuts=auto)
    check_said(fields, plan)
    report.check()
    return plan, auto


def imported_json(made: Imported, output: str | None) -> dict[str, Any]:
    """Return the plan by its keys, and the settings that it leaves out, as `--json` prints them."""
    fields = {key: value for key, value in made.plan.to_fields().items() if key not in made.unsaid}
    return {
        "from": made.title,
        "plan": {**fields, "cuts": "auto"} if made.auto_cuts else fields,
        "passes": list(made.passes),
        "made_for": None if made.made_for is None else asdict(made.made_for),
        "defaults": {name: each.value for name, each in made.defaults.items()},
        "unset": made.unset,
        "not_carried": [
            {"key": each.key, "value": shown(each.value), "why": each.why, "changes_training": each.trains}
            for each in made.left
        ],
        "output": output,
    }
