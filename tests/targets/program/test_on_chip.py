"""On-chip schedules of a form that the program has never heard of: stored, checked and handed on by the form's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from attrs import evolve, frozen

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.registry import Registry
from ratrain.ratrainc.cli import main
from ratrain.targets.machine import cost
from ratrain.targets.machine import machine as machine_files
from ratrain.targets.machine.cost import routine_work
from ratrain.targets.machine.machine import load_machine, parse_machine
from ratrain.targets.machine.record import check_on_machine
from ratrain.targets.machine.resource_work import ResourceWork
from ratrain.targets.machine.writer import machine_lines
from ratrain.targets.mt3000.kernels.tiled import Tiled
from ratrain.targets.mt3000.tile_form import TileForm
from ratrain.targets.mt3000.tiles.calls import tiles_of
from ratrain.targets.program import on_chip
from ratrain.targets.program.on_chip import OnChipForm, on_chip_form
from ratrain.targets.program.rtx import parse_program, program_bytes, write_program
from ratrain.targets.runtime import kernels
from ratrain.targets.runtime.kernels import OnChipKernels, kernel_set
from ratrain.targets.runtime.kernels.reference.reference import ReferenceKernels
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import losses, make_program, train
from tests.end_to_end.toys import UNEVEN

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.program.program import Program


@frozen
class Strips:
    """An on-chip schedule of a machine that nobody has."""

    form: ClassVar[str] = "strips"
    rows: int

    def to_json(self) -> Any:
        return {"rows": self.rows}


class StripForm(OnChipForm):
    title: ClassVar[str] = "strip schedules"

    def from_json(self, data: Any) -> Strips:
        return Strips(data["rows"])

    def step_problem(self, step, types) -> str | None:
        return None if all(strips.rows % 2 == 0 for strips in step.on_chip.values()) else "strips have even numbers"

    def cores(self, schedule) -> int:
        return 1

    def fits(self, schedule, constants) -> bool:
        return schedule.rows <= constants["cores"]


class Plain(ReferenceKernels):
    """A kernel set of a plugin."""

    name = "plain"


def one_second(routine, step, machine) -> ResourceWork:
    """A cost model of a plugin: every kernel takes a second."""
    return ResourceWork(1.0)


def with_name(registry: Registry, name: str, attribute: str) -> Registry:
    """The registry with one more name, for something of this module."""
    return Registry(registry.what, registry.group, registry.places() | {name: f"{__name__}:{attribute}"})


@pytest.fixture
def strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_chip, "FORMS", with_name(on_chip.FORMS, "strips", "StripForm"))
    on_chip_form.cache_clear()


def with_strips(rows: int) -> Program:
    """A program with strips in each product of its routines."""
    program = make_program()
    for number, routine in enumerate(program.routines):
        steps = tuple(
            evolve(step, on_chip={"gemm": Strips(rows)}) if step.kernel == "gemm" else step for step in routine.steps
        )
        program.routines[number] = evolve(routine, steps=steps)
    return program


@pytest.mark.usefixtures("strips")
def test_schedules_of_another_form_survive_the_container() -> None:
    program = with_strips(4)
    data = program_bytes(program)
    assert b'"on_chip":"strips","tiles":[{"rows":4}]' in data
    again = parse_program(data, "a.rtx")
    assert again.routines == program.routines
    check_program(again)
    check_on_machine(again, "a.rtx")
    assert program_bytes(again) == data


def test_the_first_form_is_not_named() -> None:
    assert b'"on_chip"' not in program_bytes(make_program(machine="mt3000-tiles"))
    assert b'"tiles":[],' in program_bytes(make_program())


@pytest.mark.usefixtures("strips")
def test_a_form_judges_its_schedules() -> None:
    with pytest.raises(DiagnosticError, match=r"RT080.*strips have even numbers"):
        check_program(with_strips(3))
    with pytest.raises(DiagnosticError, match=r"RT080.*the strip schedules in 'a.rtx' are for other on-chip memories"):
        check_on_machine(with_strips(100), "a.rtx")


def test_a_form_that_is_not_known_is_refused_by_name() -> None:
    data = program_bytes(with_strips(4))
    on_chip_form.cache_clear()
    with pytest.raises(DiagnosticError, match=r"RT080.*of the form 'strips'; the forms known here are tiles"):
        parse_program(data, "a.rtx")


@pytest.mark.usefixtures("strips")
def test_schedules_of_several_forms_in_a_step_are_refused() -> None:
    program = make_program(machine="mt3000-tiles")
    for at, routine in enumerate(program.routines):
        steps = [evolve(s, on_chip={**s.on_chip, "more": Strips(2)}) if s.on_chip else s for s in routine.steps]
        program.routines[at] = evolve(routine, steps=tuple(steps))
    with pytest.raises(DiagnosticError, match=r"RT080.*of several forms: strips, tiles"):
        check_program(program)


def test_tiles_do_not_fit_a_machine_without_on_chip_memory() -> None:
    program = make_program(machine="mt3000-tiles")
    schedule = next(s for r in program.routines for step in r.steps for s in step.on_chip.values())
    machine = load_machine("mt3000")
    assert TileForm().fits(schedule, machine)
    assert not TileForm().fits(schedule, {"ddr_capacity": 1.0})


def test_only_a_set_that_executes_schedules_is_bound_to_them() -> None:
    assert isinstance(kernel_set("tiled"), OnChipKernels)
    assert not any(isinstance(kernel_set(name), OnChipKernels) for name in ("fast", "reference"))
    program = make_program(machine="mt3000-tiles")
    step = next(step for routine in program.routines for step in routine.steps if step.on_chip)
    bound = Tiled().bound_to(step.on_chip | {"more": Strips(2)})
    assert bound.tiles == tiles_of(step.on_chip) == step.on_chip


def test_a_kernel_set_of_a_plugin_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KERNEL_SETS", with_name(kernels.KERNEL_SETS, "plain", "Plain"))
    assert kernel_set("plain", 4) is kernel_set("plain")
    program = make_program()
    assert losses(train(program, 1, kernels="plain")) == losses(train(program, 1, kernels="reference"))


def test_a_kernel_set_of_a_plugin_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "t.rtx")
    write_program(make_program(evolve(UNEVEN, vocab_size=256)), path)
    words = ["run", path, "--steps", "1", "--kernels", "plain", "--json"]
    assert main(words) == 2
    assert "'plain' is not one of 'auto', 'fast', 'reference', 'tiled', 'torch'" in capsys.readouterr().err
    monkeypatch.setattr(kernels, "KERNEL_SETS", with_name(kernels.KERNEL_SETS, "plain", "Plain"))
    assert main(words) == 0


def test_a_kernel_set_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        DiagnosticError, match=r"RT004.*'quick' is not a kernel set; the sets are fast, reference, tiled, torch"
    ):
        kernel_set("quick")


def test_a_cost_model_of_a_plugin_is_found_by_the_word_of_the_machine_file(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = evolve(load_machine("mt3000"), cost="one-second")
    text = "\n".join(machine_lines(machine))
    with pytest.raises(DiagnosticError, match=r"RT065.*cost is one of roofline, tiles, table, got 'one-second'"):
        parse_machine(text, file="m.toml")
    with pytest.raises(DiagnosticError, match=r"RT065.*cost is one of roofline, tiles, table, got \['tiles'\]"):
        parse_machine(text.replace('"one-second"', '["tiles"]'), file="m.toml")
    for module in (cost, machine_files):
        monkeypatch.setattr(module, "KERNEL_COSTS", with_name(machine_files.KERNEL_COSTS, "one-second", "one_second"))
    routine = make_program().routines[0]
    assert routine_work(routine, parse_machine(text, file="m.toml")) == ResourceWork(float(len(routine.steps)))
