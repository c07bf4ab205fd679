"""Machine files with and without on-chip memory, and the listing of tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner

from ratrain.ratrain_ir.diagnostics import DiagnosticError
from ratrain.ratrainc.commands.disasm import command
from ratrain.targets.machine.machine import TILE_UNITS, load_machine, machine_names, parse_machine
from ratrain.targets.mt3000.tiling.core import cluster_of
from ratrain.targets.program.rtx import write_program
from tests.end_to_end.tiny_runs import make_program

MACHINES = Path(__file__).resolve().parents[3] / "targets" / "mt3000" / "machines"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TEXT = (MACHINES / "mt3000.toml").read_text(encoding="utf-8").replace('cost = "roofline"', 'cost = "tiles"')


@pytest.mark.parametrize("name", machine_names())
def test_the_clock_makes_the_peak(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert machine.cost == ("roofline" if name in ("mt3000", "mt3000-shared-port") else "tiles")
    cluster = cluster_of(machine)
    assert cluster.cores * cluster.clock * 384 == pytest.approx(machine["fp16_peak"], rel=0.01)
    assert all(machine.constants[key].source for key in TILE_UNITS)


def test_what_a_file_does_not_say_is_as_on_its_base() -> None:
    text = 'base = "mt3000"\nname = "larger"\n[ddr_capacity]\nvalue = 34359738368\nunit = "bytes"\ncertainty = "assumed"\nsource = "none"\n'
    larger, base = parse_machine(text, file="m.toml"), load_machine("mt3000")
    assert {key for key in base.constants if larger.constants[key] != base.constants[key]} == {"ddr_capacity"}
    assert (larger.name, larger.cost, larger.update_engine) == ("larger", base.cost, base.update_engine)


@pytest.mark.parametrize("base", machine_names())
def test_every_built_in_machine_can_be_a_base(base: str) -> None:
    machine = load_machine(base)
    assert parse_machine(f'base = "{base}"\nname = "other"\n', file="m.toml") == evolve(machine, name="other")


def without(text: str, key: str) -> str:
    """The file without one table."""
    start = text.index(f"[{key}]")
    end = text.find("\n[", start + 1)
    return text[:start] + (text[end + 1 :] if end >= 0 else "")


@pytest.mark.parametrize("key", sorted(TILE_UNITS))
def test_only_tiles_need_the_memory_levels(key: str) -> None:
    parse_machine(without(TEXT, key).replace('cost = "tiles"', 'cost = "roofline"'), file="m.toml")
    with pytest.raises(DiagnosticError, match=rf"the machine needs \[{key}\]"):
        parse_machine(without(TEXT, key), file="m.toml")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('cost = "tiles"', 'cost = "guess"', "cost is one of roofline, tiles"),
        ("value = 878.9e6", "value = 1.2e9", "24 cores at this clock make 1.106e[+]13 flop/s"),
        ("value = 65536", "value = 655.5", "must be a whole number"),
        ('name = "mt3000"', 'base = "mt30"', "base is a machine that is built in"),
    ],
)
def test_wrong_constants_are_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(DiagnosticError, match=reason):
        parse_machine(TEXT.replace(old, new), file="m.toml")


def test_tiles_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "tiny.rtx"
    write_program(make_program(machine="mt3000-tiles"), str(file))
    result = CliRunner().invoke(command, [str(file), "--tiles", "--limit", "25"])
    assert result.exit_code == 0, result.output
    for text in ("tiles gemm m=20 n=24 k=24", "tiles attention_key_gradient", "gsm: ", "move ddr a -> gsm a_panel.0"):
        assert text in result.output
    assert "bytes, channel 0" in result.output
    assert "wait channel" in result.output
    assert "barrier of all cores" in result.output
    assert "more than 25 events" in result.output


def test_an_uneven_machine_is_slower_and_nothing_else() -> None:
    """The example differs from the mt3000 by the spread of its ranks alone."""
    uneven, even = load_machine(str(EXAMPLES / "mt3000-uneven.toml")), load_machine("mt3000")
    assert uneven.constants.keys() - even.constants.keys() == {"rank_jitter"}
    assert uneven["rank_jitter"] == 0.01
    assert all(uneven[name] == even[name] for name in even.constants)
