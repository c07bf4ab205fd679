"""`ratrainc report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.words.given_times import loaded_times, refuse_machine_of_given_times, times_option
from ratrain.ratrainc.commands.words.options import (
    InputFile,
    Result,
    json_option,
    machine_option,
    refuse_idle,
    rendezvous_option,
    result_option,
    sharing_option,
)

if TYPE_CHECKING:
    from ratrain.ratrainc.report.simulation import Simulation, StepSimulation
    from ratrain.targets.simulator.given_times import GivenTimes

_EPILOG = """\b
Examples:
  ratrainc report 7b.rtx -o 7b.html
  ratrainc report 7b.rtir -o 7b.html --machine my-machine.toml
  ratrainc report after.rtx --against before.rtx -o both.html  both on one page; before.rtx is the baseline: every
                                                               change is after.rtx minus before.rtx
  ratrainc report 7b.rtx -o 7b.svg                             a still picture of the first step, for a page or a slide
  ratrainc report 7b.rtx -o 7b.svg --times 1,1,1,0             the same with textbook times
  ratrainc report 7b.rtx -o 7b.pickle                          every tensor of every stage for PyTorch's memory viewer
"""


_ENDINGS = (".html", ".htm", ".svg", ".pickle")


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("program"), metavar="FILE.rtx|FILE.rtir")
@result_option(
    "-o --output",
    Result("page", *_ENDINGS),
    "report.html|picture.svg|memory.pickle",
    "The page, the picture or the memory snapshot to write.",
    required=True,
)
@click.option(
    "--against",
    type=InputFile("program"),
    metavar="FILE.rtx|FILE.rtir",
    help="Compare with this program, the baseline: one page of both, side by side on common axes, and every change as "
    "FILE minus baseline (negative: FILE has less; of seconds: FILE is faster).",
)
@machine_option
@rendezvous_option
@sharing_option
@json_option
@times_option("Of a picture, in place of a machine: what ops take, in any unit.")
def command(
    file: str,
    output: str,
    against: str | None,
    machine: str | None,
    rendezvous: bool,
    sharing: bool,
    times: str | GivenTimes | None,
    as_json: bool,
) -> None:
    """Draw a program's schedule: an HTML page that needs no network, a still picture (.svg), or its memory (.pickle).

    The page shows when every op runs on every engine, where every tensor lies in DDR and when, the live bytes against
    the capacity, idle time by cause, the plan and the machine. The picture shows the compute engine of each stage in
    the first step, from cold. A .pickle is a memory snapshot, predicted: PyTorch's memory viewer opens it
    (pytorch.org/memory_viz), a device a stage. All times are simulated.
    """
    ending = Path(output).suffix.lower()
    if ending not in ("", *_ENDINGS):
        raise click.UsageError(f"no page is written as {ending}: name a {' or '.join(_ENDINGS)}")
    from ratrain import api
    from ratrain.ratrainc.commands.words.loading import checked_program
    from ratrain.ratrainc.console.console import print_json, say, size_text, status

    if against is not None:
        if ending in (".svg", ".pickle"):
            raise click.UsageError("--against goes with a page alone: name a file that ends with .html")
        refuse_idle("is for pictures, of one program", "times")
        _compare(file, against, output, machine, rendezvous=rendezvous, sharing=sharing, as_json=as_json)
        return
    if times is not None:
        if ending != ".svg":
            raise click.UsageError("--times goes with a picture: name a file that ends with .svg")
        refuse_machine_of_given_times(file)
    if ending == ".pickle":
        from ratrain.ratrainc.report.memory_snapshot import refuse_other_file

        refuse_other_file(output)
    given = loaded_times(times)
    found: StepSimulation
    with status(f"simulating {file}"):
        program, chosen = checked_program(file, machine)
        if given is not None:
            found = api.simulate_given(program, given, rendezvous=rendezvous)
        else:
            found = api.simulate(program, machine=chosen, rendezvous=rendezvous, sharing=sharing)
    with status(f"writing {output}"):
        written = api.report(found, output)
    if as_json:
        print_json({"output": output, "kind": written.kind, "bytes": written.size})
    else:
        say(f"wrote {output}, {size_text(written.size)}")


def _compare(
    file: str, against: str, output: str, machine: str | None, *, rendezvous: bool, sharing: bool, as_json: bool
) -> None:
    """Write the page of a program and its baseline, and print the differences."""
    from ratrain import api
    from ratrain.ratrainc.commands.words.loading import checked_program
    from ratrain.ratrainc.console.console import print_json, say, size_text, status
    from ratrain.ratrainc.report.comparison_page import in_words
    from ratrain.ratrainc.report.program_differences import names_of

    def simulated(path: str) -> Simulation:
        with status(f"simulating {path}"):
            program, chosen = checked_program(path, machine)
            return api.simulate(program, machine=chosen, rendezvous=rendezvous, sharing=sharing)

    one, other = simulated(file), simulated(against)
    with status(f"writing {output}"):
        written = api.report_against(one, other, output, names=names_of(file, against))
    if as_json:
        print_json({"output": output, **written.to_json()})
        return
    for line in in_words(written.differences):
        say(line)
    say(f"wrote {output}, {size_text(written.size)}")
