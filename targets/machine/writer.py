"""Machine files as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import checked, write_text
from ratrain.ratrain_ir.support.toml_text import parse_toml, toml_key, toml_value
from ratrain.targets.machine.link_groups import GROUP_UNITS
from ratrain.targets.machine.machine import COLLECTIVES, parse_machine
from ratrain.targets.machine.registry import DEFAULT_TARGET

if TYPE_CHECKING:
    from ratrain.targets.machine.constants import Constant
    from ratrain.targets.machine.machine import Machine


def machine_lines(machine: Machine) -> Iterator[str]:
    """Yield the lines of a machine's file, a constant or an op each, without line ends.

    `parse_machine` reads them back as an equal machine. Raises `DiagnosticError` RT065 for a constant that is not
    finite.
    """
    yield f"name = {toml_value(machine.name)}"
    yield f"update_engine = {toml_value(machine.update_engine.value)}"
    yield f"cost = {toml_value(machine.cost)}"
    if machine.target != DEFAULT_TARGET:
        yield f"target = {toml_value(machine.target)}"
    if machine.collectives != COLLECTIVES:
        yield f"collectives = {toml_value(machine.collectives)}"
    for name, constant in machine.constants.items():
        if "." not in name:
            yield _constant_line(name, constant)
    if machine.table.ops:
        yield "op = ["
        for op in machine.table.ops:
            yield f"  {toml_value({'key': op.key, 'size': op.size, 'seconds': op.seconds})},"
        yield "]"
    for group in machine.group_names:
        yield "[[link_group]]"
        yield f"name = {toml_value(group)}"
        for key in GROUP_UNITS:
            if f"{group}.{key}" in machine.constants:
                yield _constant_line(key, machine.constants[f"{group}.{key}"])


def _constant_line(key: str, constant: Constant) -> str:
    words = {"value": constant.value, "unit": constant.unit, "certainty": constant.certainty, "source": constant.source}
    try:
        return f"{toml_key(key)} = {toml_value(words)}"
    except ValueError:
        fail("RT065", f"'{key}' is {constant.value!r}: a machine file has finite numbers")


def write_machine(machine: Machine, path: str) -> None:
    """Write a machine's file, atomically.

    Raises `DiagnosticError` RT065 where its constants contradict each other, RT002 where the file cannot be written,
    and RT011 where the text is not read back as the machine.
    """
    write_text(path, machine_text(machine, path))


def machine_text(machine: Machine, file: str) -> str:
    """Return a machine's file as text that reads back as the machine.

    Raises `DiagnosticError` RT065 and RT011 as `write_machine` does.
    """
    lines = list(machine_lines(machine))
    text = "\n".join(lines) + "\n"
    checked(text, "machine file", _check_toml)
    back = parse_machine(text, file=file)

    def compare(_text: str) -> None:
        again = list(machine_lines(back))  # constants may come in another order
        for line in (*sorted(set(lines) - set(again)), *sorted(set(again) - set(lines))):
            fail("RT065", f"'{line.partition(' =')[0].strip()}' is read back as something else", source=line)

    return checked(text, "machine file", compare)


def _check_toml(text: str) -> None:
    """Raise `DiagnosticError` RT065 for a text that is not TOML."""
    try:
        parse_toml(text)
    except (ValueError, RecursionError) as error:
        fail("RT065", f"this is not TOML: {error}")
