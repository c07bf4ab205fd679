"""Functions that list models, machines, strategies, passes and examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from ratrain.passes.pass_base import default_text, values_text
from ratrain.passes.registry import PASSES, pass_class
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.strategies import STRATEGIES, Strategy
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.facts.model_facts import ModelFacts
from ratrain.ratrainc.facts.model_facts import model_facts as facts_of
from ratrain.ratrainc.running.examples import copy_examples, example_names, example_path, example_summary
from ratrain.targets.machine.machine import Machine, load_machine, machine_names

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

__all__ = ["copy_examples", "example_path", "examples", "machine", "machines", "model_facts", "passes", "strategies"]


def model_facts(model: str | ModelConfig, seq_len: int | None = None) -> ModelFacts:
    """Describe a model: parameters by block, operations and bytes of a token, bytes kept by layers, unusual features.

    `model` is a preset's name, the path of a `config.json` or a configuration. Raises `DiagnosticError` RT061 with
    every key of a configuration that is not supported.
    """
    return facts_of(load_model(model) if isinstance(model, str) else model, seq_len)


def machine(name: str | None = None) -> Machine:
    """Load a machine by its name or the path of its file; None is the default machine.

    Raises `DiagnosticError` if there is no machine of that name, or the file does not describe one.
    """
    return load_machine(name)


def machines() -> list[Machine]:
    """Load every machine that is built in or brought by a plugin."""
    return [load_machine(name) for name in machine_names()]


def strategies() -> tuple[Strategy, ...]:
    """Return the named pipelines of passes."""
    return STRATEGIES


_LONG = 60
"""Longest list of an option's values, in characters, that is shown inside braces. Longer ones become words, so that a
narrow terminal can break the line between them.
"""


@frozen(repr=False)
class PassList(Shown):
    """The passes, with what each does and its options."""

    passes: tuple[dict[str, Any], ...]

    def parts(self) -> Iterator[Part]:
        """Yield a text for each pass, then one for each of its options."""
        for each in self.passes:
            yield f"{each['name']}\n    {each['summary']}"
            for option in each["options"]:
                name, values = option["name"], option["values"]
                told = f"{{{name}={values}}}" if len(values) < _LONG else f"{{{name}=...}}: {values.replace('|', ', ')}"
                yield f"    {told}, default {option['default']}"

    def to_json(self) -> dict[str, Any]:
        """Return the list as `--json` prints it."""
        return {"passes": list(self.passes)}


def passes() -> PassList:
    """Return every registered pass with its summary and options."""
    found: list[dict[str, Any]] = []
    for name in PASSES.names():
        try:
            cls = pass_class(name)
        except DiagnosticError as error:  # one bad plugin must not hide the others
            summary = f"It cannot be used: {error.diagnostics[0].message}."
            found.append({"name": name, "summary": summary, "options": []})
            continue
        options = [
            {
                "name": attribute.name.replace("_", "-"),
                "values": values_text(attribute),
                "default": default_text(attribute),
                "required": attribute.default is attrs.NOTHING,
            }
            for attribute in attrs.fields(cls)
        ]
        summary = (cls.__doc__ or "It has no description.").strip().splitlines()[0]
        found.append({"name": name, "summary": summary, "options": options})
    return PassList(tuple(found))


def examples() -> dict[str, str]:
    """Return the summaries of the example models, plans and machines of the package, by name.

    `example_path` gives the path of one.
    """
    return {name: example_summary(name) for name in example_names()}
