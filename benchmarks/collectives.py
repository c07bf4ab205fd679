"""What collectives are priced at, against a simulation of every message.

`python benchmarks/collectives.py [--members 64,1024] [--bytes 64MiB,64KiB]` prints, for machines with and without shared ports and
nodes, every algorithm's price beside what a simulation of its messages takes: with ports that messages share evenly, and with ports that
serve them one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ratrain.ratrain_ir.topology import grid
from ratrain.targets.machine.collective_cost import all_gathers, cheapest, reduce_scatters
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.placement import Placement

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.targets.simulator.message_rounds import message_seconds

NODES = str(Path(__file__).resolve().parent.parent / "examples" / "mt3000-nodes.toml")
MACHINES = ("mt3000", "mt3000-shared-port", NODES)
SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size_of(text: str) -> int:
    return int(text[:-3]) * SIZES[text[-3:]]


@click.command()
@click.option("--members", default="16,64,384,1024", help="Numbers of members.")
@click.option("--bytes", "sizes", default="64KiB,64MiB", help="Bytes in all, of f16 elements.")
def main(members: str, sizes: str) -> None:
    print("| machine | members | bytes | collective | algorithm | priced, ms | shared evenly | in turn |")
    print("|---|---|---|---|---|---|---|---|")
    for name in MACHINES:
        machine = load_machine(name)
        for count in map(int, members.split(",")):
            group = Placement(machine.link_groups, grid(1, count), None).members("replicas")
            for size in sizes.split(","):
                nbytes = size_of(size)
                kinds = {
                    "reduce-scatter": reduce_scatters(nbytes / 2, 2, group, machine),
                    "all-gather": all_gathers(nbytes, group, machine),
                }
                for kind, ways in kinds.items():
                    best = cheapest(ways, machine)
                    for way in ways:
                        priced = way.seconds(machine)
                        errors = [
                            priced / message_seconds(way, group, machine, in_turn=turn) - 1 for turn in (False, True)
                        ]
                        row = [machine.name, str(count), size, kind, way.name + " (taken)" * (way is best)]
                        row += [f"{priced * 1e3:.3f}", *(f"{100 * error:+.1f} %" for error in errors)]
                        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
