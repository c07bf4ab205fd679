"""`ratrainc simulate`."""

from __future__ import annotations

import click

from ratrainc.commands.options import json_option, machine_option, rendezvous_option, sharing_option

_EPILOG = """\b
Examples:
  ratrainc simulate 7b.rtx
  ratrainc simulate 7b.rtir --json
  ratrainc simulate 7b.rtx --trace 7b.json                     then open it in Perfetto
  ratrainc simulate 7b.rtx --no-sharing                        what the overlap costs
  ratrainc simulate 7b.rtx --machine my-machine.toml --rendezvous
"""


@click.command(epilog=_EPILOG)
@click.argument("file", metavar="FILE.rtx|FILE.rtir")
@machine_option
@rendezvous_option
@sharing_option
@click.option(
    "--one-core",
    is_flag=True,
    help="All engines of all ranks take turns on one core, as in 'run --threads 1': only the step time, the sum of all ops.",
)
@click.option("--trace", metavar="out.json", help="Write a timeline for Perfetto or chrome://tracing.")
@json_option
def command(
    file: str,
    machine: str | None,
    rendezvous: bool,
    sharing: bool,
    one_core: bool,
    trace: str | None,
    as_json: bool,
) -> None:
    """Time a program on a machine, from its own streams. All figures are simulated.

    `ratrainc explain FILE --time` says where the time goes.
    """
    from ratrain_ir.files import check_writable
    from ratrainc import api
    from ratrainc.console import print_json, status
    from targets.mt3000.machine import load_machine
    from targets.program_verifier import check_program

    if one_core and trace is not None:
        raise click.UsageError("--one-core is a sum: it has no timeline to trace")
    if trace is not None:
        check_writable(trace)
    chosen = load_machine(machine) if machine else None
    with status(f"simulating {file}"):
        program = api.load(file, machine=chosen)
        check_program(program)
    if one_core:
        from targets.mt3000.simulation import one_core_step_seconds

        used = chosen or api.machine_of(program)
        seconds = one_core_step_seconds(program, used)
        tokens = program.plan.tokens_per_step / seconds
        if as_json:
            print_json({"one_core_step_seconds": seconds, "tokens_per_second": tokens, "machine": used.name})
        else:
            click.echo(f"{seconds:.6g} s a step on one core, {tokens:,.0f} tokens/s (simulated on {used.name})")
        return
    with status(f"simulating {file}"):
        figures, timeline = api.simulate_with_timeline(program, machine=chosen, rendezvous=rendezvous, sharing=sharing)
    if trace is not None:
        from ratrainc.trace import write_trace

        write_trace(timeline, trace)
    if as_json:
        print_json(figures.to_json() | {"machine": chosen.name if chosen else program.target})
        return
    from ratrainc.reports import show_figures

    show_figures(program, figures, chosen.name if chosen else program.target)
