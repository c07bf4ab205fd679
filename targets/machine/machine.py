"""Machine files: TOML with one table a constant, with its unit, source and certainty, or its value alone."""

from __future__ import annotations

import re
import tomllib
from functools import cached_property
from math import ceil
from typing import Any

from attrs import field, frozen

from ratrain.ratrain_ir.config.types import STORES, Home
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Location, fail, nearest
from ratrain.ratrain_ir.support.files import is_there, read_text
from ratrain.ratrain_ir.support.plugins import WAY_OUT
from ratrain.ratrain_ir.support.quantities import SCALES, QuantityError, parse_quantity, quantity_text
from ratrain.ratrain_ir.support.registry import Registry
from ratrain.ratrain_ir.support.toml_text import parse_toml
from ratrain.ratrain_ir.target import Capacity
from ratrain.targets.machine.constants import (
    ALL_UNITS,
    CERTAINTIES,
    LEAST,
    MAY_BE_ZERO,
    MOST,
    MOST_WHOLE,
    NEEDED_UNITS,
    NO_SOURCE,
    OPTIONAL_UNITS,
    STORE_UNITS,
    TILE_UNITS,
    Constant,
    is_fraction,
    is_machine_key,
    is_sound,
    is_whole,
    kind_of,
    unit_of,
)
from ratrain.targets.machine.link_groups import (
    CHIP_KEYS,
    GROUP_UNITS,
    SHORT_KEYS,
    LinkGroup,
    chip_and_system,
    named_groups,
    size_error,
)
from ratrain.targets.machine.op_table import MeasuredOp, OpTable, is_op_key
from ratrain.targets.machine.registry import DEFAULT_TARGET, TARGETS, machine_files

KERNEL_COSTS = Registry(
    "cost model",
    "ratrain.kernel_costs",
    {
        "roofline": "ratrain.targets.machine.cost:roofline_work",
        "tiles": "ratrain.targets.mt3000.tiling.select:tiled_work",
        "table": "ratrain.targets.machine.measured_kernels:measured_work",
    },
)
"""Cost models of kernels, which a machine file names by its `cost`. Another distribution registers its own in the entry
point group `ratrain.kernel_costs`."""
_PEAK_SLACK = 0.01
_HALF_FLOPS_A_CYCLE = 2 * 3 * 64
"""Operations a cycle of a core on float16: three multiply-add units of 64 lanes."""
_CONSTANT_KEYS = ("value", "unit", "certainty", "source")
_OF_SHARED_CORES = ("engine_gap", "core_sharing")
"""Constants of runs whose engines take turns on cores, as `simulate --one-core` and `--cores` time them."""
COLLECTIVES = ("ring", "pairwise", "recursive", "tree", "hierarchical")
"""Algorithms of collectives (`collective_cost`). A machine has all of them unless its file lists some."""
_JOINED = ("ring", "pairwise", "recursive")
"""Algorithms that the steps of a hierarchical one are made of."""
_USUAL_BASE = "cpu"
"""The built-in machine that help names first to start a file from."""
DEFAULT_MACHINE = "mt3000"
"""Machine of plans and programs that name none."""


@frozen
class Machine:
    """One compute cluster and its links, in bytes, seconds and operations per second."""

    name: str
    update_engine: Engine
    constants: dict[str, Constant]
    cost: str = "roofline"
    """source of the seconds of kernels: `tiles` (their on-chip schedules), `roofline` (a fraction of the peak), or
    `table` (measured ops; roofline for ops that were not measured)"""
    table: OpTable = field(factory=OpTable)
    target: str = DEFAULT_TARGET
    """name of the target that makes its programs, see `ratrain.targets.machine.registry`"""
    group_names: tuple[str, ...] = ()
    """names of the [[link_group]] entries, from the inside out; their constants are prefixed with them, like
    node.bandwidth"""
    collectives: tuple[str, ...] = COLLECTIVES
    """the algorithms its transport has, of `COLLECTIVES`"""
    unsaid: tuple[str, ...] = field(default=(), eq=False)
    """constants whose certainty the file does not give; they count as assumed"""

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    @cached_property
    def link_groups(self) -> tuple[LinkGroup, ...]:
        """Groups of clusters, from the inside out; without [[link_group]] chip and system, or system alone."""
        values = {name: constant.value for name, constant in self.constants.items()}
        return named_groups(self.group_names, values) if self.group_names else chip_and_system(values)

    def whole(self, name: str) -> int:
        """Return a constant that counts something, as an int."""
        return int(self.constants[name].value)

    def _optional(self, name: str, default: float) -> float:
        return self.constants[name].value if name in self.constants else default

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second that the host's cores take of the cluster's DDR; all of it by default."""
        return min(self._optional("host_bandwidth", self["ddr_bandwidth"]), self["ddr_bandwidth"])

    @property
    def host_handover(self) -> float:
        """Seconds to hand a task to the host and back; 0 by default."""
        return self._optional("host_handover", 0.0)

    @property
    def dispatch(self) -> float:
        """Seconds between kernels that are issued ahead of execution, so the least time of each; 0 by default."""
        return self._optional("dispatch", 0.0)

    @property
    def engine_gap(self) -> float:
        """Seconds between two instructions of an interpreter that runs one after another; 0 by default."""
        return self._optional("engine_gap", 0.0)

    @property
    def core_sharing(self) -> float:
        """Fraction by which an op takes longer where ranks share cores (caches, lost turns); 0 by default."""
        return self._optional("core_sharing", 0.0)

    @property
    def message_cost(self) -> float:
        """Seconds of the host's work for a message, in addition to its latency; 0 by default."""
        return self._optional("message_cost", 0.0)

    @property
    def round_skew(self) -> float:
        """Seconds that the partners of a round of a collective arrive apart; 0 by default."""
        return self._optional("round_skew", 0.0)

    @property
    def part_copy(self) -> float:
        """Seconds of the copy of one member's part, where gathers and reduce-scatters get parts one by one; else 0."""
        return self._optional("part_copy", 0.0)

    @property
    def rank_jitter(self) -> float:
        """Standard deviation of the compute times of like ranks, as a fraction of their mean; 0 by default."""
        return self._optional("rank_jitter", 0.0)

    @property
    def gemm_half_extent(self) -> float:
        """Elements of an extent at which a product runs at half its efficiency; 0 by default: full at any."""
        return self._optional("gemm_half_extent", 0.0)

    def product_peak(self, *, half_sums: bool) -> float:
        """Return the peak of products that are summed in float16, or in float32.

        A machine without `fp32_sum_peak` does both at `fp16_peak`.
        """
        return self["fp16_peak"] if half_sums else self._optional("fp32_sum_peak", self["fp16_peak"])

    @property
    def head_efficiency(self) -> float:
        """Fraction of the peak that the head's products reach; by default that of other products."""
        return self._optional("head_efficiency", self["gemm_efficiency"])

    @property
    def step_error(self) -> float | None:
        """Largest error of three in four simulated steps against published ones; None if none were compared."""
        return self.constants["step_error"].value if "step_error" in self.constants else None

    @property
    def accuracy(self) -> str:
        """Sentence on `step_error`; empty of a machine whose ops were timed, or that is no device of PyTorch."""
        if self.step_error is None:
            known = self.cost == "table" or self.target == DEFAULT_TARGET
            return "" if known else f"no published step on a machine like {self.name} was held against simulated times"
        return f"3 of 4 published steps on such machines are within {100 * self.step_error:.0f} % of simulated times"

    @property
    def stores(self) -> tuple[tuple[Home, int], ...]:
        """Memories other than DDR that a rank has, and the bytes that it may use of each."""
        keys = ((home, f"{home.value}_capacity") for home in STORES)
        return tuple((home, self.whole(key)) for home, key in keys if key in self.constants)

    def store_bandwidth(self, home: Home, *, fetches: bool) -> float:
        """Return the bytes per second from a memory other than DDR (`fetches`), or to it.

        Raises `DiagnosticError` RT065 where the machine does not have that memory.
        """
        key = f"{home.value}_{'fetch' if fetches else 'store'}"
        if key not in self.constants:
            text = f"the machine '{self.name}' has no memory '{home.value}', and there is something to be stored in it"
            way_out = (
                f"say [{home.value}_capacity], [{home.value}_store] and [{home.value}_fetch] in its file (--machine)"
            )
            fail("RT065", text, help=way_out)
        return self[key]

    def store_latency(self, home: Home) -> float:
        """Return the seconds that each transfer to or from a memory takes in addition to its bytes; 0 by default."""
        return self._optional(f"{home.value}_latency", 0.0)

    def updates_in(self, home: Home) -> bool:
        """Return whether a processor next to a memory updates state there, without a transfer."""
        return home is Home.HOST and "host_update" in self.constants

    def capacity(self, communicators: int) -> Capacity:
        """Return the DDR of a rank that is a member of `communicators` communicators, with overheads before tensors.

        A rank that is a member of none has no transport. Overheads that the file does not give are 0.
        """
        installed = self.whole("ddr_capacity")
        taken = {
            "runtime_overhead": self._optional("runtime_overhead", 0.0),
            "transport_overhead": self._optional("transport_overhead", 0.0) if communicators else 0.0,
            "transport_overhead_per_group": communicators * self._optional("transport_overhead_per_group", 0.0),
            "allocator_slack": ceil(installed * self._optional("allocator_slack", 0.0)),
        }
        return Capacity(installed, tuple((name, int(nbytes)) for name, nbytes in taken.items() if nbytes))


def machine_names() -> list[str]:
    """Return the names of the machine files that come with the targets, sorted."""
    return sorted(machine_files())


def load_machine(name_or_path: str | None) -> Machine:
    """Load a machine by the name of a built-in file or by the path of one; None is the MT-3000.

    Raises `DiagnosticError` RT065 or RT002 with everything that is wrong with the file, RT004 where there is neither.
    """
    name = name_or_path or DEFAULT_MACHINE
    if name in machine_names():
        return parse_machine(_built_in_text(name), file=f"{name}.toml")
    if not name.endswith(".toml") and not is_there(name):
        known = ", ".join(machine_names())
        fail("RT004", f"'{name}' is neither a machine ({known}) nor a file", help=nearest(name, machine_names()))
    return parse_machine(read_text(name, "machine file"), file=name)


def _built_in_text(name: str) -> str:
    return machine_files()[name].read_text(encoding="utf-8")


def _built_in(name: str) -> dict[str, Any]:
    """Return the keys of a built-in machine file, merged with its base's keys."""
    data = tomllib.loads(_built_in_text(name))
    base = data.pop("base", None)
    return data if base is None else _built_in(base) | data


def parse_machine(text: str, *, file: str) -> Machine:
    """Return the machine a TOML text describes.

    Keys it leaves out come from its `base`, a built-in machine, if it names one.

    Raises `DiagnosticError` RT065 with everything that is wrong with it.
    """
    try:
        data = parse_toml(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # a ValueError that is no TOMLDecodeError: a number with too many digits
        match = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        place = Location(file, int(match[1]), int(match[2])) if match else Location(file, 1)
        lines = text.split("\n")
        fail("RT065", f"this is not TOML: {error}", place, source=lines[min(place.line, len(lines)) - 1])
    return _Reader(file, text.split("\n")).machine_on_base(data)


def optional_constants(machine: Machine) -> list[str]:
    """Return the optional constants that simulated times, or the capacity of plans without stores, depend on."""
    named = [key for key in OPTIONAL_UNITS if key not in _OF_SHARED_CORES and key not in STORE_UNITS]
    return named + [f"{group}.{key}" for group in machine.group_names for key in GROUP_UNITS]


def _measured_op(entry: Any) -> MeasuredOp | None:
    """Return an entry of a table of ops, or None if it is not one."""
    if not isinstance(entry, dict) or entry.keys() != {"key", "size", "seconds"}:
        return None
    key, size, seconds = entry["key"], entry["size"], entry["seconds"]
    numbers = all(isinstance(v, int | float) and 0 <= v <= MOST for v in (size, seconds))
    return MeasuredOp(key, float(size), float(seconds)) if is_op_key(key) and numbers else None


class _Reader:
    """Reader of the tables of a machine file, which collects everything that is wrong."""

    def __init__(self, file: str, lines: list[str]) -> None:
        self.file = file
        self.lines = lines
        self.diagnostics = Diagnostics()
        self.unsaid: list[str] = []
        self.missing: list[str] = []
        self.has_base = False

    def error(self, key: str, message: str, help: str | None = None) -> None:  # noqa: A002
        line = self.line_of(key)
        place = Location(self.file, line, 1, max(1, len(self.lines[line - 1])))
        self.diagnostics.error("RT065", message, place, help=help, source=self.lines[line - 1])

    def line_of(self, key: str) -> int:
        """Return the line of a constant, counted from 1; for a group's constant, the one after the group's name."""
        group, _, kind = key.rpartition(".")
        start = self.line_matching(rf"\s*name\s*=\s*[\"']{re.escape(group)}[\"']", 1) if group else 1
        return self.line_matching(rf"\s*\[*(link_group\.)?{re.escape(kind)}\b", start, start)

    def line_matching(self, pattern: str, first: int, default: int = 1) -> int:
        """Return the first line from `first` on that matches, or `default`."""
        return next((i for i in range(first, len(self.lines) + 1) if re.match(pattern, self.lines[i - 1])), default)

    def machine_on_base(self, data: dict[str, Any]) -> Machine:
        base = data.pop("base", None)
        if base is None:
            return self.machine(data)
        if base not in machine_names():
            text = f"base is a machine that is built in ({', '.join(machine_names())}), got {base!r}"
            self.error("base", text, nearest(str(base), machine_names()))
            self.diagnostics.check()
        self.has_base = True
        below = _built_in(base)
        if "name" not in data:
            below.pop("name")
        if "link_group" in data:
            below = {key: value for key, value in below.items() if key not in SHORT_KEYS}
        return self.machine(below | data)

    def machine(self, data: dict[str, Any]) -> Machine:
        name, engine = data.get("name"), data.get("update_engine", "compute")
        if not isinstance(name, str) or not re.fullmatch(r"[\w.\-]+", name):
            self.error("name", "a machine needs a name of letters, digits, '.', '-' and '_'")
        if engine not in ("compute", "host"):
            self.error("update_engine", f"update_engine is 'compute' or 'host', got {engine!r}")
        for key in data:
            if not is_machine_key(key):
                self.error(key, f"'{key}' is not a constant of a machine", nearest(key, ALL_UNITS))
        target = data.get("target", DEFAULT_TARGET)
        if not isinstance(target, str) or TARGETS.place(target) is None:
            self.error("target", f"target is one of {', '.join(TARGETS.names())}, got {target!r}", WAY_OUT)
        cost = data.get("cost", "roofline")
        if not isinstance(cost, str) or KERNEL_COSTS.place(cost) is None:
            self.error("cost", f"cost is one of {', '.join(KERNEL_COSTS.names())}, got {cost!r}")
        wanted = NEEDED_UNITS | TILE_UNITS if cost == "tiles" else NEEDED_UNITS
        for home in STORES:
            keys = [f"{home.value}_{name}" for name in ("capacity", "store", "fetch")]
            if any(key.startswith(f"{home.value}_") and key in STORE_UNITS for key in data):
                wanted = wanted | {key: STORE_UNITS[key] for key in keys}
        if "link_group" in data:
            wanted = {key: unit for key, unit in wanted.items() if key not in SHORT_KEYS}
        constants = {key: self.constant(key, data.get(key)) for key in ALL_UNITS if key in wanted or key in data}
        table = self.table(data.get("op", []), cost)
        groups = self.groups(data, constants)
        collectives = self.collectives(data.get("collectives", list(COLLECTIVES)))
        self.report_missing()
        self.diagnostics.check()
        if cost == "tiles":
            self.check_clock(constants)
        machine = Machine(
            str(name), Engine(engine), constants, cost, table, target, groups, collectives, tuple(self.unsaid)
        )
        capacity = machine.capacity(0)
        if not capacity.left:
            self.error("ddr_capacity", f"overheads leave nothing of the memory: {capacity.account}")
            self.diagnostics.check()
        wrong = size_error(machine.link_groups)
        if wrong is not None:
            self.error(f"{wrong[0]}.clusters", wrong[1])
            self.diagnostics.check()
        return machine

    def report_missing(self) -> None:
        """Report all constants that the file lacks as one error, and where they could come from."""
        if not self.missing:
            return
        names = ", ".join(f"[{key}]" for key in self.missing)
        way_out = "write each with value, unit, certainty and source"
        if not self.has_base and any(key in NEEDED_UNITS for key in self.missing):
            others = ", ".join(name for name in machine_names() if name != _USUAL_BASE)
            way_out = f'base = "{_USUAL_BASE}" takes from there what the file does not say (or {others}); or {way_out}'
        self.error(self.missing[0], f"the machine needs {names}", way_out)

    def groups(self, data: dict[str, Any], constants: dict[str, Constant]) -> tuple[str, ...]:
        """Return the names of the [[link_group]] entries; put their values among the constants."""
        entries = data.get("link_group", [])
        if not isinstance(entries, list) or ("link_group" in data and not entries):
            self.error("link_group", "groups of clusters are written as [[link_group]] entries")
            return ()
        names: list[str] = []
        for entry in entries:
            name = entry.get("name") if isinstance(entry, dict) else None
            if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_\-]*", name) or name in names:
                self.error(
                    "link_group", f"a [[link_group]] has a name of its own, of small letters, got {name!r}"[:200]
                )
                return ()
            names.append(name)
            for key in sorted(entry.keys() - {"name", *GROUP_UNITS}):
                self.error(f"{name}.{key}", f"'{key}' is not a key of a [[link_group]]", nearest(key, GROUP_UNITS))
            for key in GROUP_UNITS:
                if key in entry or key in ("bandwidth", "latency"):
                    constants[f"{name}.{key}"] = self.constant(f"{name}.{key}", entry.get(key))
        if not names and ("clusters_per_chip" not in constants or constants["clusters_per_chip"].value == 1):
            for key in CHIP_KEYS:
                if key in data:
                    self.error(key, f"[{key}] changes nothing: no clusters share a chip", "say [clusters_per_chip]")
        for key in SHORT_KEYS:
            if names and key in data:
                self.error(key, f"the file has [[link_group]] entries: they say what [{key}] would", "leave it out")
        return tuple(names)

    def collectives(self, names: Any) -> tuple[str, ...]:
        """Return the algorithms of collectives that a file names, in the order of `COLLECTIVES`."""
        known = ", ".join(COLLECTIVES)
        if not isinstance(names, list) or not names:
            self.error("collectives", f"collectives is a list of one or more of {known}, got {names!r}"[:200])
            return COLLECTIVES
        for name in names:
            if name not in COLLECTIVES:
                self.error(
                    "collectives",
                    f"{name!r} is no way to do a collective ({known})"[:200],
                    nearest(str(name), COLLECTIVES),
                )
        if len(set(map(str, names))) < len(names):
            self.error("collectives", "collectives names a way twice")
        if names == ["hierarchical"] or set(map(str, names)) == {"hierarchical", "tree"}:
            text = "a hierarchical collective is built of other ways, level by level"
            self.error("collectives", text, f"name one or more of {', '.join(_JOINED)} too")
        return tuple(name for name in COLLECTIVES if name in names)

    def table(self, entries: Any, cost: Any) -> OpTable:
        """Return the measured ops of a file with cost = "table"."""
        if (cost == "table") != bool(entries):
            self.error("op", 'cost = "table" goes with a list of [[op]], and no other cost does')
            return OpTable()
        ops = []
        for entry in entries if isinstance(entries, list) else [None]:
            op = _measured_op(entry)
            if op is None:
                self.error("op", f"an [[op]] has a key, a size in bytes and seconds, got {entry!r}"[:200])
                return OpTable()
            ops.append(op)
        return OpTable(tuple(ops))

    def check_clock(self, constants: dict[str, Constant]) -> None:
        """Check that the peak is what the cores compute at their clock."""
        peak = constants["cores"].value * constants["clock"].value * _HALF_FLOPS_A_CYCLE
        stated = constants["fp16_peak"].value
        if abs(peak - stated) > _PEAK_SLACK * stated:
            text = (
                f"{constants['cores'].value:g} cores at this clock make {peak:.4g} flop/s, [fp16_peak] says "
                f"{stated:.4g}"
            )
            self.error("clock", text, help="change one of them: a core makes 384 flop a cycle")
            self.diagnostics.check()

    def constant(self, key: str, entry: Any) -> Constant:
        """Return a constant from its table with a value, or from the value alone."""
        empty = Constant(1.0, "", "", "")
        if entry is None:
            self.missing.append(key)
            return empty
        if isinstance(entry, list):
            self.error(key, f"the machine needs [{key}] with value, unit, certainty and source")
            return empty
        table = entry if isinstance(entry, dict) else {"value": entry}
        value = self.number(key, table.get("value"))
        if isinstance(value, str):
            return empty
        if not is_sound(value, key):
            least, most = ("1", MOST_WHOLE) if is_whole(key) else (f"{LEAST:g}", f"{MOST:g}")
            zero = "0, or " if kind_of(key) in MAY_BE_ZERO else ""
            given = table.get("value")
            self.error(key, f"value of [{key}] must be {zero}a number from {least} to {most}, got {given!r}")
            return empty
        if is_whole(key) and value != int(value):
            self.error(key, f"value of [{key}] must be a whole number, got {table.get('value')!r}")
        for name in sorted(table.keys() - {*_CONSTANT_KEYS}):
            self.error(key, f"'{name}' is not a key of [{key}]", nearest(name, _CONSTANT_KEYS))
        if is_fraction(key) and value > 1:
            self.error(key, f"value of [{key}] is a fraction, got {value!r}")
        self.check_unit(key, table)
        return Constant(float(value), unit_of(key), *self.origin(key, table))

    def number(self, key: str, value: Any) -> Any:
        """Return a text with a unit as a number; other values unchanged. Record an error if it has another unit."""
        if not isinstance(value, str):
            return value
        unit = unit_of(key)
        if unit not in SCALES:
            self.error(key, f"value of [{key}] is a number ({unit}), got {value!r}", "write it without quotes")
            return value
        try:
            return parse_quantity(value, unit)
        except QuantityError as error:
            self.error(key, f"value of [{key}]: {error}", error.help)
            return value

    def check_unit(self, key: str, table: dict[str, Any]) -> None:
        """Check the unit of a constant.

        It may be left out where the value has one, or where the unit can be written in one way only.
        """
        unit, given = unit_of(key), table.get("unit")
        if given is None and (isinstance(table.get("value"), str) or unit not in SCALES):
            return
        if given is None:
            example = f'"{quantity_text(table["value"], unit)}"'
            self.error(key, f"value of [{key}] has no unit", f"write {example} if {unit} are meant, or unit = '{unit}'")
        elif given != unit:
            self.error(key, f"unit of [{key}] is '{unit}', got {given!r}")

    def origin(self, key: str, table: dict[str, Any]) -> tuple[str, str]:
        """Return the certainty of a constant and its source.

        Without a certainty it is assumed. Only an assumed constant may be without a source.
        """
        certainty, source = table.get("certainty", "assumed"), table.get("source")
        if "certainty" not in table:
            self.unsaid.append(key)
        if certainty not in CERTAINTIES:
            self.error(key, f"certainty of [{key}] is one of {', '.join(CERTAINTIES)}, got {certainty!r}")
        if source is None and certainty == "assumed":
            return certainty, NO_SOURCE
        if not isinstance(source, str) or not source:
            self.error(key, f"[{key}] must say its source", "only assumed constants may leave it out")
        return str(certainty), str(source)
