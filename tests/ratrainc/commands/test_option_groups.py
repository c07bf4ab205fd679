"""Options of a command that come to it as the fields of one object."""

from __future__ import annotations

from typing import Any

import attrs
import click
import pytest
from attrs import frozen
from click.testing import CliRunner

from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs, Ranks, of_a_process
from ratrain.ratrainc.commands.training.run import command as run_command
from ratrain.ratrainc.commands.words.options import in_groups
from ratrain.targets.runtime.settings import Evaluation, Execution, OptimizerKeys, RunSettings, Saving, Start, Watch


@frozen
class Inner:
    depth: int
    width: int = 7


@frozen
class Outer:
    name: str
    inner: Inner
    rest: str = "kept"


def made(**groups: type) -> click.Command:
    @click.command()
    @click.option("--depth", "outer_inner_depth", type=int, default=1)
    @click.option("--name", "outer_name", default="n")
    @click.option("--other")
    @in_groups(**groups)
    def command(**parameters: Any) -> None:
        """What it does."""
        click.echo(repr(parameters))

    return command


def test_options_become_the_fields_of_their_group_and_groups_of_each_other() -> None:
    command = made(outer_inner=Inner, outer=Outer)
    assert command.help == "What it does."
    said = CliRunner().invoke(command, ["--depth", "3", "--other", "x"]).output
    group = Outer("n", Inner(3))
    assert eval(said, {"Outer": Outer, "Inner": Inner}) == {"outer": group, "other": "x"}


def test_an_option_without_a_field_is_an_error() -> None:
    error = CliRunner().invoke(made(outer=Outer), []).exception
    assert isinstance(error, TypeError)
    assert "inner_depth" in str(error)


GROUPS = {
    "settings_optimizer": OptimizerKeys,
    "settings_start": Start,
    "settings_saving": Saving,
    "settings_evaluation": Evaluation,
    "settings_execution": Execution,
    "settings_watch": Watch,
    "settings": RunSettings,
    "data": DataChoice,
    "ranks": Ranks,
    "outputs": Outputs,
    "display": Display,
}
TOLD_OTHERWISE = {
    *(f"settings_execution_{name}" for name in ("threads", "sums", "kernels_reason")),
    *("display_quiet", "display_each_step"),
}
"""Fields that follow from the program, the engine or --json, or are for callers from Python."""


@pytest.mark.parametrize("group", GROUPS)
def test_every_field_of_a_group_has_its_option_of_run_and_its_default(group: str) -> None:
    usual = run_command.make_context("run", ["x.rtx"]).params
    for field in attrs.fields(GROUPS[group]):
        name = f"{group}_{field.name}"
        if name not in GROUPS and name not in TOLD_OTHERWISE:
            assert name in usual, name
            if field.default is not attrs.NOTHING:
                assert usual[name] == field.default, name


def test_a_process_that_does_not_speak_writes_only_its_part_of_the_profile() -> None:
    outputs, display = Outputs("log", "plot", "profile"), Display(live=True)
    assert of_a_process(outputs, display, speaks=True) == (outputs, display)
    assert of_a_process(outputs, display, speaks=False) == (Outputs(profile="profile"), Display(quiet=True))
