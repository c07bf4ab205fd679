"""`ratrainc compile`."""

from __future__ import annotations

import click

from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrainc.choices.machine_choice import MachineChoice, stated
from ratrain.ratrainc.commands.words import completing
from ratrain.ratrainc.commands.words.options import (
    InputFile,
    Result,
    in_groups,
    json_option,
    misuse_of_command,
    model_option,
    plan_option,
    processes_option,
    refuse_idle,
    result_option,
    target_options,
    verbose_option,
)
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc compile --model llama-2-7b --plan examples/llama-2-7b-256.toml -o 7b.rtir
  ratrainc compile --model examples/tiny.json --plan examples/tiny.toml --strategy full-save -o tiny.rtx
  ratrainc compile --model llama-2-7b --plan examples/llama-2-7b-8.toml --capacity 20GiB
  ratrainc compile --model llama-2-7b --plan P.toml --passes "place-1f1b,recompute{policy=mlp},allocate-ddr"
  ratrainc schedule --kind gpipe --stages 2 --micro-batches 4 -o s.csv
  ratrainc compile --model examples/tiny.json --plan examples/tiny.toml --schedule-file s.csv -o s.rtir
  ratrainc compile --model llama-2-7b --plan P.toml --zero-blocks auto -o 7b.rtir
  ratrainc compile --model llama-2-7b --plan P.toml --capacity 12GiB --suggest Q.toml    if P does not fit, Q does
  ratrainc compile edited.rtir -o edited.rtx
"""


@click.command(epilog=_EPILOG)
@click.argument("schedule", type=InputFile("schedule"), required=False, metavar="[FILE.rtir]")
@model_option(required=False)
@plan_option
@target_options
@click.option(
    "--strategy",
    metavar="S",
    shell_complete=completing.strategy,
    help="A named pipeline; 'ratrainc strategies' lists them.",
)
@click.option(
    "--passes", metavar="PIPELINE", shell_complete=completing.passes, help="A pipeline of passes instead of a strategy."
)
@click.option(
    "--schedule-file",
    type=InputFile("table"),
    metavar="F.csv",
    help="Place the schedule of this table (CSV of torch.distributed.pipelining). What the plan leaves out of "
    "pp, micro_batches, chunks, "
    "layout and slices is as in the table.",
)
@click.option(
    "--zero-blocks",
    "zero_blocks",
    type=click.Choice(["auto"]),
    help="Choose which blocks keep their views whole (level 2) where the plan says zero = 3: by simulated steps "
    "of several choices. "
    "What was chosen is said, and stands in the schedule's plan.",
)
@result_option(
    "-o --output",
    Result("schedule", ".rtir", ".rtx"),
    "X.rtir|X.rtx",
    "Write the schedule (.rtir) or the program (.rtx).",
)
@click.option(
    "--advice/--no-advice", default=True, show_default=True, help="When it does not fit, try changes that do."
)
@result_option(
    "--suggest",
    Result("plan", ".toml"),
    "P.toml",
    "When it does not fit, write the plan that was found to fit here; when it does, nothing is written here.",
)
@click.option("--verify-each", is_flag=True, help="Verify after every pass and name the one that broke the module.")
@processes_option()
@verbose_option
@json_option
@in_groups(target=MachineChoice)
@paused_gc()
def command(
    schedule: str | None,
    model: str | None,
    plan: str | None,
    target: MachineChoice,
    strategy: str | None,
    passes: str | None,
    schedule_file: str | None,
    zero_blocks: str | None,
    output: str | None,
    advice: bool,
    suggest: str | None,
    verify_each: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Compile a model and a plan into a schedule or a program, and show what each stage needs.

    Given a schedule (.rtir) instead, verify it, allocate it if it is not yet, and emit its program.
    """
    _check_usage(schedule, model, plan, strategy, output)
    if not advice:
        refuse_idle("writes what advice finds: it does not go with --no-advice", "suggest")
    from ratrain import api
    from ratrain.ratrainc.commands.words.loading import checked_schedule
    from ratrain.ratrainc.compiling.building import compiled
    from ratrain.ratrainc.console.console import print_json, show_refusal, spinner, status
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.facts.module_figures import module_figures
    from ratrain.ratrainc.report.summary_tables import module_parts, show_inserted

    if schedule is not None:
        with spinner(f"compiling {schedule}", "reading and verifying it") as progress:
            module, machine = checked_schedule(schedule, target.machine)
            wanted = passes if passes is not None else "" if module.target is not None else "allocate-ddr"
            if not wanted:
                refuse_idle("has no pass to follow: the schedule is allocated already", "verify_each")
            if wanted:
                runs = api.run_passes(module, wanted, machine=machine, verify_each=verify_each, progress=progress)
            else:  # it was proved for this machine when it was read
                runs = []
                api.make_for(module, api.machine_for(module, machine))
    else:
        assert model is not None
        assert plan is not None
        target = target.for_plan(plan, stated)
        with misuse_of_command(), spinner(f"compiling {model}", "lowering it") as progress:
            made = compiled(
                model,
                plan,
                machine := target.load(),
                strategy=strategy,
                passes=passes,
                schedule_file=schedule_file,
                choose_levels=zero_blocks is not None,
                verify_each=verify_each,
                asking=target if advice else None,
                suggest=suggest,
                progress=progress,
                refused=None if as_json else show_refusal,
            )
        module, runs = made.module, made.runs
        if made.given:
            echo(f"the strategy '{strategy}' gives the plan {made.given}", err=True)
        if made.levels:
            echo(made.levels, err=True)
    peaks = runs[-1].peaks if runs else None
    with status(f"writing {output}"):
        if output is not None and output.endswith(".rtx"):
            program = api.emit(module, machine=machine)
            peaks = [stage.peak_live_bytes for stage in program.stages]
            api.save(program, output)
        elif output is not None:
            api.save(module, output, machine=machine)
    if as_json:
        print_json(
            module_figures(module, api.machine_for(module, machine), peaks)
            | {"output": output, "passes": [run.text for run in runs]}
        )
        return
    if verbose:
        show_inserted(runs)
    show(module_parts(module, api.machine_for(module, machine), peaks))
    if suggest is not None:
        echo(f"{plan} fits: {suggest} is not written", err=True)
    if output:
        echo(f"wrote {output}")


def _check_usage(
    schedule: str | None,
    model: str | None,
    plan: str | None,
    strategy: str | None,
    output: str | None,
) -> None:
    if schedule is None and (model is None or plan is None):
        raise click.UsageError("give --model and --plan, or a schedule file (.rtir)")
    if schedule is not None and (model is not None or plan is not None or strategy is not None):
        raise click.UsageError(
            "a schedule file already holds model, plan and order: leave --model, --plan, --strategy out"
        )
    if schedule is not None:
        refuse_idle("goes with --model and --plan: a schedule (.rtir) has its order", "schedule_file")
        refuse_idle(
            "goes with --model and --plan: a schedule file's plan is not changed", "advice", "suggest", "zero_blocks"
        )
        refuse_idle("goes with --model and --plan: a schedule file carries its machine", "target_capacity")
    if output is not None and not output.endswith((".rtir", ".rtx")):
        raise click.UsageError(f"the output '{output}' must end in .rtir (schedule) or .rtx (program)")
