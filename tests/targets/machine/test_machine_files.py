"""Machine files with and without on-chip memory, and the listing of tiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner

from ratrain.ratrain_ir.config.accumulation import HALF_RUN
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.commands.disasm import command
from ratrain.targets.machine.constants import NO_SOURCE, TILE_UNITS
from ratrain.targets.machine.cost import kernel_work
from ratrain.targets.machine.machine import Machine, load_machine, machine_names, parse_machine
from ratrain.targets.machine.record import machine_digest
from ratrain.targets.machine.registry import machine_files
from ratrain.targets.machine.writer import machine_lines
from ratrain.targets.mt3000.tiling.core import cluster_of
from ratrain.targets.program.routine import Formal, Routine, Step
from ratrain.targets.program.rtx import write_program
from tests.end_to_end.tiny_runs import make_program

MACHINES = Path(__file__).resolve().parents[3] / "targets" / "mt3000" / "machines"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TEXT = (MACHINES / "mt3000.toml").read_text(encoding="utf-8").replace('cost = "roofline"', 'cost = "tiles"')


@pytest.mark.parametrize("name", [name for name in machine_names() if load_machine(name).target == "mt3000"])
def test_the_clock_makes_the_peak(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert machine.cost == ("roofline" if name in ("mt3000", "mt3000-shared-port", "mt3000-two-peaks") else "tiles")
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


def test_all_that_a_file_without_base_lacks_is_one_error_with_a_base_that_can_be_typed() -> None:
    with pytest.raises(DiagnosticError) as refused:
        parse_machine('name = "mine"\nddr_capacity = "94 GB"\n', file="m.toml")
    (error,) = refused.value.diagnostics
    lacking = re.findall(r"\[(\w+)\]", error.message)
    assert {"ddr_bandwidth", "link_latency", "launch"} < set(lacking)
    assert "ddr_capacity" not in lacking
    base = str(error.help).partition(" takes")[0]
    parse_machine(f'{base}\nname = "mine"\nddr_capacity = "94 GB"\n', file="m.toml")
    page = (Path(__file__).parents[3] / "docs" / "machine.md").read_text().partition("without `base` must say")[2]
    assert set(re.findall(r"`(\w+)`", page.partition("(")[0])) == {"name", "ddr_capacity", *lacking}


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


# -- figures with units, and figures of which little is said --------------------------------------------------------------

OWN = """name = "own"
ddr_capacity = "80 GB"
ddr_bandwidth = "3.35 TB/s"
fp16_peak = "989.4 TFLOP/s"
gemm_efficiency = 0.8
attention_efficiency = { value = 0.5, certainty = "measured", source = "here" }
launch = { value = "2 us" }
collective_chunk = "1 MiB"

[[link_group]]
name = "node"
clusters = 8
bandwidth = "450 GB/s"
latency = "10 us"

[[link_group]]
name = "system"
bandwidth = { value = 50e9, unit = "bytes/s" }
latency = { value = 2e-5, unit = "s", certainty = "fitted", source = "runs" }
"""


def test_a_figure_may_be_its_value_alone_with_its_unit() -> None:
    machine = parse_machine(OWN, file="own.toml")
    assert {key: constant.value for key, constant in machine.constants.items()} == {
        "ddr_capacity": 80e9,
        "ddr_bandwidth": 3.35e12,
        "fp16_peak": 989.4e12,
        "gemm_efficiency": 0.8,
        "attention_efficiency": 0.5,
        "launch": 2e-6,
        "collective_chunk": 1048576,
        "node.clusters": 8,
        "node.bandwidth": 450e9,
        "node.latency": 10e-6,
        "system.bandwidth": 50e9,
        "system.latency": 2e-5,
    }


def test_what_says_no_certainty_is_assumed_and_is_known_to_be() -> None:
    machine = parse_machine(OWN, file="own.toml")
    said = {"attention_efficiency", "system.latency"}
    assert set(machine.unsaid) == machine.constants.keys() - said
    assert all(machine.constants[key].certainty == "assumed" for key in machine.unsaid)
    assert machine.constants["ddr_capacity"].source == NO_SOURCE
    assert machine.constants["system.latency"].certainty == "fitted"


def test_a_file_with_units_is_the_machine_of_one_with_bare_numbers() -> None:
    """What goes along in schedules is written in bare numbers: the same machine, with nothing left unsaid."""
    machine = parse_machine(OWN, file="own.toml")
    written = parse_machine("\n".join(machine_lines(machine)), file="own.toml")
    assert written == machine
    assert machine_digest(written) == machine_digest(machine)
    assert not written.unsaid


@pytest.mark.parametrize(
    ("old", "new", "line", "message", "help_text"),
    [
        ('"80 GB"', '"80 GB/s"', 2, r"value of \[ddr_capacity\]: '80 GB/s' is in bytes/s, not in bytes", "write 80 GB"),
        ('"450 GB/s"', '"450 GB"', 13, r"\[node.bandwidth\]: '450 GB' is in bytes, not in bytes/s", "write 450 GB/s"),
        ('"450 GB/s"', '"400 Gb/s"', 13, r"\[node.bandwidth\]: '400 Gb/s' counts bits", "that is 50 GB/s"),
        ('"3.35 TB/s"', "3.35e12", 3, r"value of \[ddr_bandwidth\] has no unit", 'write "3.35 TB/s" if bytes/s are meant'),
        ('{ value = "2 us" }', '"2 GB"', 7, r"\[launch\]: '2 GB' is in bytes, not in s", "25 us"),
        ('"989.4 TFLOP/s"', '"989.4 TB/s"', 4, r"\[fp16_peak\]: '989.4 TB/s' is in bytes/s, not in flop/s", "TFLOP/s"),
        ("= 0.8", '= "0.8"', 5, r"value of \[gemm_efficiency\] is a number", "without quotes"),
        ('"80 GB"', '"80.5 B"', 2, r"\[ddr_capacity\] must be a whole number, got '80.5 B'", None),
        ('"80 GB"', '"0 GB"', 2, r"\[ddr_capacity\] must be a number from 1 to \d+, got '0 GB'", None),
        ('value = "2 us"', 'value = "2 us", unit = "us"', 7, r"unit of \[launch\] is 's', got 'us'", None),
        ('value = "2 us"', 'value = "2 us", certainty = "stated"', 7, r"\[launch\] must say its source", "only assumed constants"),
        ('value = "2 us"', 'value = "2 us", certainty = "sure", source = "me"', 7, r"certainty of \[launch\] is one of", None),
        ('value = "2 us"', 'unit = "s"', 7, r"value of \[launch\] must be 0, or a number from", None),
        ('{ value = "2 us" }', "[2e-6]", 7, r"the machine needs \[launch\] with value", None),
    ],
)  # fmt: skip
def test_a_wrong_unit_is_refused_with_its_place_and_the_right_spelling(
    old: str, new: str, line: int, message: str, help_text: str | None
) -> None:
    with pytest.raises(DiagnosticError, match=message) as refused:
        parse_machine(OWN.replace(old, new, 1), file="own.toml")
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.location is not None
    assert (diagnostic.code, diagnostic.location.file, diagnostic.location.line) == ("RT065", "own.toml", line)
    assert help_text is None or help_text in str(diagnostic.help)


@pytest.mark.parametrize("name", machine_names())
def test_a_built_in_machine_says_how_sure_each_figure_is_and_where_it_comes_from(name: str) -> None:
    machine = load_machine(name)
    assert not machine.unsaid
    assert all(len(constant.source) > 5 and constant.source != NO_SOURCE for constant in machine.constants.values())
    assert machine_files()[name].read_text(encoding="utf-8").startswith("#")


def test_a_machine_with_one_peak_prices_both_sums_alike() -> None:
    plain, two = load_machine("mt3000"), load_machine("mt3000-two-peaks")
    assert plain.product_peak(half_sums=True) == plain.product_peak(half_sums=False) == plain["fp16_peak"] == 8.1e12
    assert (two.product_peak(half_sums=True), two.product_peak(half_sums=False)) == (8.1e12, 4.05e12)
    assert two.constants["fp32_sum_peak"].certainty == "assumed"
    assert evolve(two, name="mt3000", constants=plain.constants) == plain
    assert {key for key in two.constants if two.constants[key] != plain.constants.get(key)} == {"fp32_sum_peak"}


@pytest.mark.parametrize("cost", ["roofline", "tiles"])
def test_sums_decide_what_products_cost(cost: str) -> None:
    """Of routines of a large model: with one peak only what a run's end costs a tile; with two, products in f32 twice as much."""
    text = f'base = "mt3000-two-peaks"\nname = "m"\ncost = "{cost}"\nlaunch = {{ value = 0, unit = "s" }}\n'
    two = parse_machine(text, file="m.toml")
    one = evolve(two, constants={key: value for key, value in two.constants.items() if key != "fp32_sum_peak"})
    formals = tuple(Formal(name, Dtype.F16, (4096, 4096)) for name in ("a", "b", "out"))

    def seconds(machine: Machine, **options: int) -> float:
        step = Step("gemm", {formal.name: formal.name for formal in formals}, options)
        return kernel_work(Routine("r", formals, (), (), 0, (step,)), step, machine).seconds

    in_f32, in_f16 = seconds(one), seconds(one, half_run=HALF_RUN)
    assert seconds(two, half_run=HALF_RUN) == in_f16
    if cost == "roofline":
        assert in_f16 == in_f32 == 2 * 4096**3 / (0.7 * 8.1e12)
        assert seconds(two) == 2 * in_f32
    else:
        assert in_f32 < in_f16 < 1.2 * in_f32
        assert 1.7 * in_f32 < seconds(two) < 2.1 * in_f32
