"""Meaning of a tile schedule, followed symbolically: each result must be its kernel's formula, each element made once.

A term is a string that says how a buffer's contents were computed from operands, without ranges. A product of matrices
becomes:

    zero sum                          sum    = ""
    add_product sum <- strip, tile    sum    = "Σa·b"
    round_sum result <- sum           result = "round_sum(Σa·b)"       compared with the kernel's formula

One pass over the nest is enough, as terms do not depend on ranges. Rules on the loops around a buffer (`same_deal`,
`accumulators`, `once`) make sure that the ranges are right: no part of a sum is lost, counted twice or left to another
core.
"""

from __future__ import annotations

from attrs import define, evolve, field

from ratrain.targets.mt3000.tiles.micro_kernels import arguments_of
from ratrain.targets.mt3000.tiles.tile_schedule import (
    Axes,
    Barrier,
    Compute,
    Loop,
    OnChipMemory,
    Statement,
    TileLoad,
    TileSchedule,
    TileStore,
    UnsoundTilesError,
    flat,
)


def check_meaning(schedule: TileSchedule) -> None:
    """Raise `UnsoundTilesError` unless a schedule of sound structure computes its kernel."""
    _Meaning(schedule).check()


_ACCUMULATED = "Σ"
_RESULTS: dict[str, dict[str, str]] = {
    "gemm": {},
    "attention_forward": {
        "o": "divide_turned(Σsoftmax.out(k·q{documents})+v·softmax.weight(k·q{documents}) "
        "Σsoftmax.total(k·q{documents}))",
        "lse": "log_sum_exp(Σsoftmax.total(k·q{documents}) Σsoftmax.peak(k·q{documents}))",
    },
    "attention_query_gradient": {
        "delta": "row_product(do o)",
        "dq": "scale_turned(Σk·score_gradient.dscore(k·q v·do lse row_product(do o){documents}))",
    },
    "attention_key_gradient": {
        "dk": "scale_turned(Σq·score_gradient.dscore(q·k do·v lse delta{documents}))",
        "dv": "round_turned(Σdo·score_gradient.weight(q·k do·v lse delta{documents}))",
    },
}
"""Term that each result of a kernel must have: scalars before vectors; masks know the starts of documents, if there are
any. For a product of matrices see `_Meaning.check`."""


@define(eq=False)
class _Meaning:
    """Terms of all buffers through one pass over the nest."""

    schedule: TileSchedule
    terms: dict[str, str] = field(factory=dict)
    results: dict[str, str] = field(factory=dict)
    outer: dict[str, set[str]] = field(factory=dict)
    """by buffer, the dimensions of loops around the place where it is made anew"""
    deals: dict[str, tuple[Loop, ...]] = field(factory=dict)
    """by buffer of a core, the loops around it that deal pieces out to cores, without their bodies"""
    axes: dict[str, Axes] = field(init=False)
    shared: set[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.shared = {buffer.name for buffer in self.schedule.buffers if buffer.memory is OnChipMemory.GSM}
        self.axes = {operand.name: operand.axes for operand in self.schedule.operands}
        self.axes |= {buffer.name: buffer.axes for buffer in self.schedule.buffers}

    def check(self) -> None:
        self.follow(self.schedule.body, ())
        expected = _RESULTS.get(self.schedule.kernel)
        if expected is None:
            raise UnsoundTilesError(f"'{self.schedule.kernel}' is no kernel with tiles")
        documents = " documents" if any(o.name == "documents" for o in self.schedule.operands) else ""
        expected = {name: term.format(documents=documents) for name, term in expected.items()}
        if self.schedule.kernel == "gemm":
            added = [o.name for o in self.schedule.operands if o.name not in ("a", "b", "out")]
            # The old `out` is added if the schedule loads it; `calls` compares that with the step's `accumulate`.
            sums = ["Σa·b", *sorted({*added, "out"} & {*self.terms.values()})]
            expected = {"out": f"round_sum({' '.join(sums)})"}
            if not {*added} <= {*self.terms.values()}:
                raise UnsoundTilesError(f"it does not add {', '.join(added)}")
        for name in sorted(expected.keys() | self.results.keys()):
            if self.results.get(name) != expected.get(name):
                raise UnsoundTilesError(f"'{name}' becomes {self.results.get(name)}, not {expected.get(name)}")

    def follow(self, body: tuple[Statement, ...], loops: tuple[Loop, ...]) -> None:
        for statement in body:
            for name in _buffers(statement):
                self.same_deal(name, loops)
            match statement:
                case Loop():
                    self.follow(statement.body, (*loops, statement))
                case TileLoad(name, source):
                    self.terms[name] = self.terms.get(source, source)
                case TileStore(name, target):
                    self.results[target] = self.term(name)
                    self.once(target, loops)
                case Compute():
                    self.compute(statement, loops)
                case _:
                    pass

    def same_deal(self, name: str, loops: tuple[Loop, ...]) -> None:
        """Raise unless a core fills, changes and reads its buffer for the same pieces, so that it has whole sums."""
        if name in self.shared:
            return
        deal = tuple(evolve(loop, body=()) for loop in loops if loop.cores > 1)
        if deal != self.deals.setdefault(name, deal):
            raise UnsoundTilesError(f"'{name}' is used for pieces that are dealt out to cores in different ways")

    def term(self, name: str) -> str:
        if name not in self.terms:
            raise UnsoundTilesError(f"'{name}' is used before anything is in it")
        return self.terms[name]

    def compute(self, compute: Compute, loops: tuple[Loop, ...]) -> None:
        self.accumulators(compute, loops)
        sources = [self.term(name) for name in compute.reads]
        match compute.kernel, compute.writes:
            case "zero", (out,):
                self.terms[out] = ""
            case "start_softmax", names:
                self.terms |= dict.fromkeys(names, "")
            case "product", (out,):
                self.terms[out] = "·".join(sources)
            case "add_product" | "add_run", (out,):  # which of the two a step has, and the runs: see `calls`
                held = self.term(out)
                factors = "·".join(sources)
                # A sum that has a term already is one that a softmax has scaled before.
                self.terms[out] = f"{held}+{factors}" if held else _ACCUMULATED + factors
            case "transpose", (out,):
                self.terms[out] = sources[0]
            case "softmax", (total, peak, out, weight):
                for part, name in (("total", total), ("peak", peak), ("out", out)):
                    if self.term(name):
                        raise UnsoundTilesError(f"'{name}' is no new softmax")
                    self.terms[name] = f"Σsoftmax.{part}({' '.join(sources)})"
                self.terms[weight] = f"softmax.weight({' '.join(sources)})"
            case "score_gradient", (weight, dscore):
                self.terms[weight] = f"score_gradient.weight({' '.join(sources)})"
                self.terms[dscore] = f"score_gradient.dscore({' '.join(sources)})"
            case "round_sum", (out,):
                self.terms[out] = f"round_sum({' '.join([sources[0], *sorted(sources[1:])])})"
            case kernel, (out,):
                self.terms[out] = f"{kernel}({' '.join(sources)})"
            case _:
                raise UnsoundTilesError(f"'{compute.kernel}' cannot be followed")

    def accumulators(self, compute: Compute, loops: tuple[Loop, ...]) -> None:
        """Raise unless sums begin and end within the same loops; only loops that cut the sum may come in between."""
        for argument, name in arguments_of(compute):
            # The loops around that cut no dimension of the buffer: those that a sum runs over, or that repeat it.
            around = {loop.dim for loop in loops} - {*flat(self.axes[name])}
            if argument.mode == "=":
                self.outer[name] = around
            elif not argument.mode and _ACCUMULATED in self.terms.get(name, "") and around != self.outer.get(name):
                raise UnsoundTilesError(f"'{name}' is begun and read in different loops")
            elif argument.mode == "~" and not around >= self.outer.get(name, set()):
                raise UnsoundTilesError(f"'{name}' is begun and added to in different loops")

    def once(self, target: str, loops: tuple[Loop, ...]) -> None:
        """Raise unless a store visits every element of an operand once, by one core."""
        if any(loop.sees or loop.dim not in flat(self.axes[target]) for loop in loops):
            raise UnsoundTilesError(f"'{target}' is stored in a loop that does not belong to it")
        # Strides and sizes must be mixed-radix digits of the core's number: then each core has a place of its own, and
        # no place is without a core.
        grid = sorted((loop.stride, loop.cores) for loop in loops if loop.cores > 1)
        reached = 1
        for stride, cores in grid:
            if stride != reached:
                raise UnsoundTilesError(f"the cores that store '{target}' form no grid")
            reached *= cores
        if reached != self.schedule.memories.cores:
            raise UnsoundTilesError(f"'{target}' is stored by {reached} of {self.schedule.memories.cores} cores")


def _buffers(statement: Statement) -> tuple[str, ...]:
    """Return the buffers that a statement by itself uses."""
    match statement:
        case Compute():
            return (*statement.writes, *statement.reads)
        case Loop() | Barrier():
            return ()
        case _:
            return (statement.buffer,)
