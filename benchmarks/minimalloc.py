"""Place the published MiniMalloc problems at their capacity: placed or not, seconds, bound and arena.

    python benchmarks/minimalloc.py                all eleven: as published, reversed, relabelled, glued to the next one
    python benchmarks/minimalloc.py A D --seed 7   two of them, with other labels
    python benchmarks/minimalloc.py --folder DIR   other files NAME.CAPACITY.csv
    python benchmarks/minimalloc.py --json         one JSON object on stdout

Reversed: each life [a, b) becomes [end - b, end - a). Relabelled: the lines are shuffled, and buffers numbered anew.
Glued: the next problem's lives begin where this one's end, under the larger capacity. Every placement is checked. The
compiled loops are run once before.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import asdict, frozen

sys.path.insert(0, str(Path(__file__).parent))
from processes import handed_back

from ratrain.passes.memory.allocation import AllocationProblem, Effort, allocate, check_allocation
from ratrain.ratrainc.memory.allocation_csv import read_problem

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "minimalloc"
PUBLISHED = "[A-K].*.csv"
COLUMNS = f"{'problem':10} {'form':10} {'buffers':>8} {'bound/cap':>9} {'arena/cap':>9} {'placed':>6} {'CPU s':>8}"


def reversed_in_time(problem: AllocationProblem) -> AllocationProblem:
    """The same buffers from the end to the beginning."""
    end = problem.positions
    lives = [tuple((end - b, end - a) for a, b in reversed(spans)) for spans in problem.intervals]
    return AllocationProblem(problem.sizes, lives, end)


def relabelled(problem: AllocationProblem, seed: int) -> AllocationProblem:
    """The same buffers in another order."""
    order = list(range(len(problem.sizes)))
    random.Random(seed).shuffle(order)
    return AllocationProblem(
        [problem.sizes[i] for i in order], [problem.intervals[i] for i in order], problem.positions
    )


def glued(one: AllocationProblem, other: AllocationProblem) -> AllocationProblem:
    """One problem, and after it in time the other."""
    later = [tuple((a + one.positions, b + one.positions) for a, b in spans) for spans in other.intervals]
    return AllocationProblem([*one.sizes, *other.sizes], [*one.intervals, *later], one.positions + other.positions)


def forms(
    problem: AllocationProblem, capacity: int, following: tuple[AllocationProblem, int], seed: int
) -> Iterator[tuple[str, AllocationProblem, int]]:
    """A problem as it is published, and in other forms."""
    yield "published", problem, capacity
    yield "reversed", reversed_in_time(problem), capacity
    yield "relabelled", relabelled(problem, seed), capacity
    yield "glued", glued(problem, following[0]), max(capacity, following[1])


@frozen
class Placed:
    """One placed problem; bound and arena are shares of the capacity, seconds of CPU."""

    problem: str
    form: str
    buffers: int
    bound: float
    arena: float
    fits: bool
    seconds: float

    @classmethod
    def of(cls, name: str, form: str, problem: AllocationProblem, capacity: int) -> Placed:
        """Place one problem and check the placement."""
        begin = time.process_time()
        found = allocate(problem, capacity=capacity)
        seconds = time.process_time() - begin
        assert not check_allocation(problem, found.offsets), name
        fits = found.arena_bytes <= capacity
        bound, arena = found.lower_bound_bytes / capacity, found.arena_bytes / capacity
        return cls(name, form, len(problem.sizes), bound, arena, fits, seconds)

    def line(self) -> str:
        """Return the row of the table."""
        return (
            f"{self.problem:10} {self.form:10} {self.buffers:8} {self.bound:9.4f} {self.arena:9.4f} "
            f"{'yes' if self.fits else 'NO':>6} {self.seconds:8.2f}"
        )


def warm_up() -> None:
    """Run the loops of the search once, so that the table holds no compiling."""
    lives = ((0, 3), (7, 9), (4, 6), (3, 4), (5, 7), (2, 5), (3, 4), (4, 7), (6, 8))  # 10 bytes live, 11 needed
    short = AllocationProblem([4, 5, 3, 5, 2, 3, 1, 3, 5], [(life,) for life in lives], 9)
    allocate(short, effort=Effort(gap=0))


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of problems; all when none is given")
    parser.add_argument("--folder", type=Path, help="a folder with files NAME.CAPACITY.csv")
    parser.add_argument("--seed", type=int, default=1, help="of the labels")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or FOLDER
    paths = {
        path.name.partition(".")[0]: path for path in sorted(folder.glob("*.*.csv" if chosen.folder else PUBLISHED))
    }
    unknown = [name for name in chosen.names if name not in paths]
    if unknown or not paths:
        sys.exit(f"no {', '.join(unknown) or 'NAME.CAPACITY.csv'} in {folder}: it has {', '.join(paths) or 'none'}")
    problems = [
        (name, read_problem(str(paths[name])).problem, int(paths[name].stem.partition(".")[2]))
        for name in chosen.names or paths
    ]
    with handed_back(chosen.json) as figures:
        warm_up()
        print(COLUMNS)
        rows = []
        for at, (name, problem, capacity) in enumerate(problems):
            _, after, room = problems[(at + 1) % len(problems)]
            for form in forms(problem, capacity, (after, room), chosen.seed):
                rows.append(Placed.of(name, *form))
                print(rows[-1].line(), flush=True)
        placed, slowest = sum(row.fits for row in rows), max(row.seconds for row in rows)
        print(f"{placed} of {len(rows)} placed; the slowest took {slowest:.2f} CPU s")
        figures |= {"placed": placed, "slowest_seconds": slowest, "forms": [asdict(row) for row in rows]}


if __name__ == "__main__":
    main()
