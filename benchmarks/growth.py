"""Growth: time and memory of the commands against ops, stages, clusters and simulated ranks, with exponents.

    python benchmarks/growth.py                           all series; an hour on two cores
    python benchmarks/growth.py --series ops --most 1e5   one of them, up to so many ops
    python benchmarks/growth.py -o growth.png             and a picture (needs matplotlib)

A row is one command in a process of its own, with `--jobs 1`: CPU seconds, and its largest resident memory. What
comes after `verify-rtx` finds its receipt, and proves nothing again. The
exponent of a column is told between its two largest sizes: 1 means that twice the size takes twice as long. `ops` are those of LLaMA-2-7B on 8 stages under more and more
micro-batches; `stages` cut LLaMA-2-70B with 64 micro-batches; `ranks` are replicas of 4 stages, of which alike ones
are simulated once; `clusters` is the search of `plan --quick`.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from processes import Taken, command_cost

from ratrain.ratrainc.console.pictures import blank_figure, picture_kind, write_figure

SERIES = {
    "ops": (40, 128, 400, 1280, 4000, 12000),
    "stages": (2, 5, 10, 20, 40, 80),
    "ranks": (256, 1024, 4096, 16384, 65536, 131072),
    "clusters": (64, 256, 1024, 4096, 16384, 65536),
}
"""Values of each series: micro-batches, stages, ranks, clusters."""
_PLAN = """[parallel]
pp = {pp}
dp = {dp}
cuts = "auto"

[batch]
micro_batch_size = 1
micro_batches = {micro_batches}
seq_len = 2048

[state]
zero = 1
reduce = "last"
"""


def rows(series: str, value: int, folder: Path) -> Iterator[tuple[str, Taken]]:
    """Yield the commands of one size and what each takes."""
    if series == "clusters":
        words = ["--model", "llama-2-7b", "--clusters", str(value), "--global-batch", str(8 * value), "--jobs", "1"]
        yield "plan", command_cost(["plan", *words, "--quick"], folder)
        return
    shape = {
        "ops": {"pp": 8, "dp": 1, "micro_batches": value},
        "stages": {"pp": value, "dp": 2, "micro_batches": 64},
        "ranks": {"pp": 4, "dp": value // 4, "micro_batches": 16},
    }[series]
    model = "llama-2-70b" if series == "stages" else "llama-2-7b"
    plan, schedule, program = (str(folder / f"growth.{ending}") for ending in ("toml", "rtir", "rtx"))
    Path(plan).write_text(_PLAN.format(**shape), "utf-8")
    jobs, room = ["--jobs", "1"], ["--capacity", "4TiB"]  # so that every size has a plan that fits
    words = {
        "compile": ["compile", "--model", model, "--plan", plan, "-o", schedule, *room, *jobs],
        "verify": ["verify", schedule, *jobs],
        "emit": ["compile", schedule, "-o", program, *jobs],
        "verify-rtx": ["verify", program, *jobs],
        "simulate": ["simulate", program],
    }
    for name, command in words.items():
        yield name, command_cost(command, folder)


def ops_of(text: str) -> int:
    """Return the number of ops that `verify` says of a schedule."""
    found = re.search(r"(\d+) ops", text)
    assert found is not None
    return int(found[1])


def exponent(sizes: list[float], taken: list[float]) -> float | None:
    """Return the slope of the logarithms between the two largest sizes; None of a single one."""
    if len(sizes) < 2:
        return None
    return math.log(taken[-1] / taken[-2]) / math.log(sizes[-1] / sizes[-2])


def measured(series: str, most: float, folder: Path) -> dict[str, list[tuple[int, Taken]]]:
    """Measure a series up to a size; return (size, cost) by command, and print each row as it is there."""
    found: dict[str, list[tuple[int, Taken]]] = {}
    for value in SERIES[series]:
        taken = dict(rows(series, value, folder))
        size = ops_of(taken["verify"].text) if series == "ops" else value
        for name, each in taken.items():
            found.setdefault(name, []).append((size, each))
            memory = each.peak_bytes / (1 << 20)
            print(f"{series:9} {size:>9,} {name:9} {each.cpu:9.2f} {each.wall:9.2f} {memory:9.0f}", flush=True)
        if size >= most:
            break
    return found


def draw(found: dict[str, dict[str, list[tuple[int, Taken]]]], place: str) -> None:
    """Draw seconds and memory of each series, with logarithmic axes."""
    from matplotlib.ticker import NullFormatter, NullLocator

    figure = blank_figure(3.2 * len(found), 5.4)
    axes = figure.subplots(2, len(found), sharey="row", squeeze=False)
    for column, (series, commands) in enumerate(found.items()):
        for name, points in commands.items():
            sizes = [size for size, _ in points]
            axes[0][column].loglog(sizes, [taken.cpu for _, taken in points], marker="o", markersize=3, label=name)
            memory = [taken.peak_bytes / (1 << 20) for _, taken in points]
            axes[1][column].loglog(sizes, memory, marker="o", markersize=3, label=name)
        axes[0][column].set_title(series)
        axes[1][column].set_xlabel(series)
        axes[0][column].legend(fontsize="small")
        for axis in axes[:, column]:
            axis.grid(visible=True, alpha=0.3)
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.yaxis.set_minor_locator(NullLocator())
    axes[0][0].set_ylabel("CPU s")
    axes[1][0].set_ylabel("peak resident MiB")
    write_figure(figure, place)


def main(arguments: list[str] | None = None) -> None:
    """Print the rows and the exponents; draw them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", default=",".join(SERIES), help="names, with commas between them")
    parser.add_argument("--most", type=float, default=math.inf, help="largest size of a series")
    parser.add_argument("-o", "--output", help="picture, .svg or .png")
    chosen = parser.parse_args(arguments)
    if chosen.output is not None:
        picture_kind(chosen.output)  # before the work
    names = chosen.series.split(",")
    if unknown := [name for name in names if name not in SERIES]:
        parser.error(f"no series {unknown[0]}: there are {', '.join(SERIES)}")
    print(f"{'series':9} {'size':>9} {'command':9} {'CPU s':>9} {'wall s':>9} {'peak MiB':>9}")
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: measured(name, chosen.most, Path(scratch)) for name in names}
    print("\nexponents of CPU seconds and of memory")
    for series, commands in found.items():
        for name, points in commands.items():
            sizes = [float(size) for size, _ in points]
            both = (
                exponent(sizes, [t.cpu for _, t in points]),
                exponent(sizes, [float(t.peak_bytes) for _, t in points]),
            )
            print(f"{series:9} {name:9} " + " ".join("   -" if each is None else f"{each:4.2f}" for each in both))
    if chosen.output is not None:
        draw(found, chosen.output)


if __name__ == "__main__":
    main()
