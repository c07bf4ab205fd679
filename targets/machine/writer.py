"""Machine files as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.files import write_lines
from ratrain.targets.machine.link_groups import GROUP_UNITS
from ratrain.targets.machine.machine import COLLECTIVES, parse_machine
from ratrain.targets.registry import DEFAULT_TARGET

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Constant, Machine


def machine_lines(machine: Machine) -> Iterator[str]:
    """The lines of a machine's file, a constant or an op each; `parse_machine` reads them back as an equal machine."""
    yield f"name = {_quoted(machine.name)}"
    yield f"update_engine = {_quoted(machine.update_engine.value)}"
    yield f"cost = {_quoted(machine.cost)}"
    if machine.target != DEFAULT_TARGET:
        yield f"target = {_quoted(machine.target)}"
    if machine.collectives != COLLECTIVES:
        yield f"collectives = [{', '.join(map(_quoted, machine.collectives))}]"
    for name, constant in machine.constants.items():
        if "." not in name:
            yield _constant_line(name, constant)
    if machine.table.ops:
        yield "op = ["
        for op in machine.table.ops:
            yield f"  {{ key = {_quoted(op.key)}, size = {op.size!r}, seconds = {op.seconds!r} }},"
        yield "]"
    for group in machine.group_names:
        yield "[[link_group]]"
        yield f"name = {_quoted(group)}"
        for key in GROUP_UNITS:
            if f"{group}.{key}" in machine.constants:
                yield _constant_line(key, machine.constants[f"{group}.{key}"])


def _constant_line(key: str, constant: Constant) -> str:
    words = f"unit = {_quoted(constant.unit)}, certainty = {_quoted(constant.certainty)}"
    return f"{key} = {{ value = {constant.value!r}, {words}, source = {_quoted(constant.source)} }}"


def write_machine(machine: Machine, path: str) -> None:
    """Write a machine's file, atomically.

    Raises `DiagnosticError` RT065 where its constants contradict each other, RT002 where the file cannot be written.
    """
    lines = list(machine_lines(machine))
    parse_machine("\n".join(lines), file=path)
    write_lines(path, lines)


def _quoted(text: str) -> str:
    """A TOML basic string: as JSON writes it, but that all that cannot be shown is escaped too; what is not Unicode becomes '?'."""
    sound = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(sound, ensure_ascii=False))
