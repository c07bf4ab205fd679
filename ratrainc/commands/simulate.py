"""`ratrainc simulate`."""

from __future__ import annotations

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
    from ratrain.ratrainc.functions.timing import CoresStep
    from ratrain.targets.simulator.given_times import GivenTimes

_EPILOG = """\b
Examples:
  ratrainc simulate 7b.rtx
  ratrainc simulate 7b.rtir --json
  ratrainc simulate 7b.rtx --trace 7b.json                     then open it in Perfetto
  ratrainc simulate 7b.rtx --no-sharing                        what the overlap costs
  ratrainc simulate 7b.rtx --machine my-machine.toml --rendezvous
  ratrainc simulate 30b-a3b.rtx --routing one-hot              routers send all tokens to the same experts
  ratrainc simulate 7b.rtx --times 1,1,1,0                     a textbook case: (M + P - 1)(T_F + T_B + T_W) under 1F1B
  ratrainc simulate zb.rtx --times 18.522,18.086,9.337,0.601   times of a pipeline that was measured: its bubble
  ratrainc simulate zb.rtx --times times.toml

\b
T_F is one micro-batch's forward on one stage, spread evenly over its attention and mlp blocks; T_B the half of its
backward that makes the gradient of the stage's input; T_W the half that makes the gradients of its parameters (a whole
backward takes T_B + T_W); T_comm a message between stages. Other ops, embedding and head too, take no time. A file can
give a time to each kind of op:
  forward = 18.522        as T_F; recompute, backward, or backward_input and backward_weight likewise
  backward_input = 18.086
  backward_weight = 9.337
  send = 0.601            one op; also recv, load_input, scale_update
  update = 0.2            one op; also the collectives reduce_scatter, all_reduce, all_gather, all_reduce_scalar
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("program"), metavar="FILE.rtx|FILE.rtir")
@machine_option
@rendezvous_option
@sharing_option
@click.option(
    "--routing",
    metavar="balanced|one-hot|hot-rank|FILE.json",
    help="How many rows each expert gets: as many as any other [default]; all go to the same experts; all go to one "
    "rank's experts (ep); or the shares that a file gives. Bytes are the same under each.",
)
@times_option("In place of a machine: what ops take, in any unit. Prints times in that unit, and the bubble.")
@click.option(
    "--one-core",
    is_flag=True,
    help="All engines of all ranks take turns on one core, as in 'run --threads 1': only the step time, the sum "
    "of all ops.",
)
@click.option(
    "--cores",
    type=click.IntRange(min=1),
    metavar="N",
    help="The engines of a rank share a core, and all ranks N cores, as processes over MPI do: only the step time.",
)
@result_option("--trace", Result("trace", ".json"), "out.json", "Write a timeline for Perfetto or chrome://tracing.")
@json_option
def command(
    file: str,
    machine: str | None,
    rendezvous: bool,
    sharing: bool,
    routing: str | None,
    times: str | GivenTimes | None,
    one_core: bool,
    cores: int | None,
    trace: str | None,
    as_json: bool,
) -> None:
    """Time a program on a machine, from its own instruction streams. All figures are simulated.

    `ratrainc explain FILE --time` shows where the time goes.
    """
    from ratrain import api
    from ratrain.ratrainc.commands.words.loading import checked_program
    from ratrain.ratrainc.console.console import print_json, status
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.report.simulation import StepSimulation

    if sum((one_core, cores is not None, trace is not None)) > 1:
        raise click.UsageError("--one-core and --cores give a step time alone: they exclude each other and --trace")
    if one_core or cores is not None:
        why = "is for engines that run side by side: --one-core and --cores take turns"
        refuse_idle(why, "rendezvous", "sharing", "routing")
    if times is not None:
        refuse_idle("is for the times of a machine: --times gives them", "one_core", "cores", "routing")
        refuse_machine_of_given_times(file)
    given = loaded_times(times)
    with status(f"simulating {file}"):
        program, chosen = checked_program(file, machine)
    found: StepSimulation | CoresStep
    with status(f"simulating {file}"):
        if one_core or cores is not None:
            found = api.simulate_on_cores(program, cores, machine=chosen)
        elif given is not None:
            found = api.simulate_given(program, given, rendezvous=rendezvous)
        else:
            options = {"rendezvous": rendezvous, "sharing": sharing}
            found = api.simulate(program, machine=chosen, **options, routing=routing)
    if trace is not None:
        assert isinstance(found, StepSimulation)
        api.write_trace(found, trace)
    if as_json:
        print_json(found.to_json())
    else:
        show(found.parts())
