"""`python -m tests.mutation`: makes mutants of schedules and programs, and prints what became of them, operator by operator."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from threadpoolctl import threadpool_limits

from tests.mutation.subjects import SUBJECTS
from tests.mutation.table import OPERATORS, Mutant, mutants, table_of


def main() -> int:
    """Print the table, then every mutant that is a fault; 1 where there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--each", type=int, default=4, help="mutants of each operator and subject (default: 4)")
    parser.add_argument("--level", choices=sorted(OPERATORS), action="append", help="schedules or programs only")
    parser.add_argument("--subject", choices=sorted(SUBJECTS), action="append", help="only these subjects")
    parser.add_argument("--operator", action="append", help="only these operators")
    parser.add_argument("--show", action="store_true", help="print every mutant")
    chosen = parser.parse_args()

    def made() -> Iterator[Mutant]:
        subjects = [SUBJECTS[name] for name in chosen.subject or SUBJECTS]
        for level in chosen.level or OPERATORS:
            for found in mutants(level, chosen.each, subjects, chosen.operator):
                if chosen.show:
                    print(found)  # noqa: T201
                yield found

    start = time.perf_counter()
    with threadpool_limits(limits=1):
        table = table_of(made())
    print(table.markdown())  # noqa: T201
    print(f"\n{table.mutants} mutants in {time.perf_counter() - start:.0f} s, {len(table.faults)} faults")  # noqa: T201
    for fault in table.faults:
        print(fault)  # noqa: T201
    return 1 if table.faults else 0


if __name__ == "__main__":
    sys.exit(main())
