"""`ratrainc compile`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from ratrain.ratrainc.commands import completing
from ratrain.ratrainc.commands.options import (
    Result,
    Source,
    in_groups,
    json_option,
    model_option,
    output_file,
    plan_option,
    refuse_idle,
    target_options,
    verbose_option,
)
from ratrain.ratrainc.machine_choice import MachineChoice
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.ratrain_ir.diagnostics import DiagnosticError
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.ratrain_ir.frontend.plan import Plan
    from ratrain.ratrain_ir.frontend.text import Place
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrainc.levers import Setting
    from ratrain.ratrainc.strategies import Strategy
    from ratrain.targets.machine.machine import Machine

_EPILOG = """\b
Examples:
  ratrainc compile --model llama-2-7b --plan examples/llama-2-7b-256.toml -o 7b.rtir
  ratrainc compile --model examples/tiny.json --plan examples/tiny.toml --strategy full-save -o tiny.rtx
  ratrainc compile --model llama-2-7b --plan examples/llama-2-7b-8.toml --capacity 20GiB
  ratrainc compile --model llama-2-7b --plan P.toml --passes "place-1f1b,recompute{policy=mlp},allocate-ddr"
  ratrainc compile --model llama-2-7b --plan P.toml --schedule-file zbv.csv -o zbv.rtir
  ratrainc compile --model llama-2-7b --plan P.toml --zero-blocks auto -o 7b.rtir
  ratrainc compile edited.rtir -o edited.rtx
"""


@click.command(epilog=_EPILOG)
@click.argument("schedule", type=Source("schedule"), required=False, metavar="[FILE.rtir]")
@model_option(required=False)
@plan_option(required=False)
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
    type=Source("table"),
    metavar="F.csv",
    help="Place the schedule of this table (CSV of torch.distributed.pipelining). What the plan leaves out of pp, micro_batches, chunks, "
    "layout and slices is as in the table.",
)
@click.option(
    "--zero-blocks",
    "zero_blocks",
    type=click.Choice(["auto"]),
    help="Choose which blocks keep their views whole (level 2) where the plan says zero = 3: by simulated steps of several choices. "
    "What was chosen is said, and stands in the schedule's plan.",
)
@click.option(
    "-o",
    "--output",
    type=Result("schedule", ".rtir", ".rtx"),
    callback=output_file,
    metavar="X.rtir|X.rtx",
    help="Write the schedule (.rtir) or the program (.rtx).",
)
@click.option(
    "--advice/--no-advice", default=True, show_default=True, help="When it does not fit, try changes that do."
)
@click.option("--verify-each", is_flag=True, help="Verify after every pass and name the one that broke the module.")
@verbose_option
@json_option
@in_groups(target=MachineChoice)
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
    verify_each: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Compile a model and a plan into a schedule or a program, and show what each stage needs.

    Given a schedule (.rtir) instead, verify it, allocate it if it is not yet, and emit its program.
    """
    _check_usage(schedule, model, plan, strategy, passes, output)
    from ratrain import api
    from ratrain.ratrain_ir.diagnostics import DiagnosticError
    from ratrain.ratrainc.commands.loading import checked_schedule, saying_passes
    from ratrain.ratrainc.console import print_json, status
    from ratrain.ratrainc.strategies import DEFAULT_STRATEGY, Strategy
    from ratrain.ratrainc.strategies import strategy as named

    chosen = named(strategy or DEFAULT_STRATEGY)
    pipeline = chosen.passes if passes is None else passes
    if schedule_file is not None:
        pipeline = _placed_by(schedule_file, pipeline, strategy if passes is None else "--passes")
    if schedule is not None:
        with status(f"compiling {schedule}: reading and verifying it") as tell:
            module, machine = checked_schedule(schedule, target.machine)
            wanted = passes if passes is not None else "" if module.target is not None else "allocate-ddr"
            if not wanted:
                refuse_idle("has no pass to follow: the schedule is allocated already", "verify_each")
            at_work = saying_passes(tell, f"compiling {schedule}")
            runs = api.run_passes(module, wanted, machine=machine, verify_each=verify_each, before_pass=at_work)
    else:
        assert model is not None
        assert plan is not None
        with status(f"compiling {model}: lowering it") as tell:
            config, resolved = _resolved(model, plan, schedule_file)
            _check_schedule(resolved, plan, chosen, passes)
            machine = target.load()
            if passes is None:
                resolved = _adapted(chosen, resolved, config, machine)
            if zero_blocks is not None:
                resolved = _with_chosen_levels(config, resolved, pipeline, machine, tell)
            module = api.lowered(config, resolved)
            at_work = saying_passes(tell, f"compiling {model}")
            try:
                runs = api.run_passes(module, pipeline, machine=machine, verify_each=verify_each, before_pass=at_work)
            except DiagnosticError as error:
                from ratrain.ratrainc.levers import Setting
                from ratrain.ratrainc.timed_plan import DOES_NOT_FIT

                if advice and {d.code for d in error.diagnostics} & DOES_NOT_FIT:
                    tell(f"{model} does not fit: trying changes that do")
                    setting = Setting(config, resolved, pipeline, machine)
                    asking = None if passes is not None else _planner_command(model, plan, resolved, strategy, target)
                    named_or_own = chosen if passes is None else Strategy("--passes", passes, "as given")
                    raise _with_advice(error, setting, named_or_own, asking) from None
                raise
    with status(f"writing {output}"):
        written = _write(module, output, machine)
    if as_json:
        print_json(
            summary(module, api.machine_for(module, machine))
            | {"output": written, "passes": [run.text for run in runs]}
        )
        return
    from ratrain.ratrainc.reports import show_inserted, show_module

    if verbose:
        show_inserted(runs)
    show_module(module, api.machine_for(module, machine))
    if written:
        echo(f"wrote {written}")


def _check_usage(
    schedule: str | None,
    model: str | None,
    plan: str | None,
    strategy: str | None,
    passes: str | None,
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
        refuse_idle("goes with --model and --plan: a schedule file's plan is not changed", "advice", "zero_blocks")
        refuse_idle("goes with --model and --plan: a schedule file carries its machine", "target_capacity")
    if strategy is not None and passes is not None:
        raise click.UsageError("--strategy and --passes exclude each other")
    if output is not None and not output.endswith((".rtir", ".rtx")):
        raise click.UsageError(f"the output '{output}' must end in .rtir (schedule) or .rtx (program)")


def _placed_by(schedule_file: str, passes: str, title: str | None) -> str:
    """The pipeline with the order of a table in place of the plan's."""
    from ratrain.ratrainc.schedule_file import placed_by_table

    try:
        return placed_by_table(passes, schedule_file)
    except ValueError as placing:
        named = title if title == "--passes" else f"the strategy '{title}'"
        raise click.UsageError(
            f"{named} places the schedule by '{placing}', --schedule-file by '{schedule_file}': leave one of them out"
        ) from None


def _resolved(model: str, plan: str, schedule_file: str | None) -> tuple[ModelConfig, Plan]:
    """The checked model and plan; of the shape of a table where one is given."""
    from ratrain import api

    if schedule_file is None:
        return api.resolved(model, plan)
    from ratrain.ratrain_ir.frontend.model_fields import check_model
    from ratrain.ratrain_ir.frontend.model_files import load_model
    from ratrain.ratrainc.schedule_file import load_plan_for_table

    config = load_model(model)
    check_model(config)
    return config, load_plan_for_table(plan, config, schedule_file)


def _adapted(chosen: Strategy, plan: Plan, config: ModelConfig, machine: Machine) -> Plan:
    """The plan under a strategy; chunks and slices that it gives the plan are said."""
    from ratrain.ratrain_ir.frontend.plan_text import changes_text

    adapted = chosen.adapted(plan, config, machine)
    if adapted.shape != plan.shape:
        echo(f"the strategy '{chosen.name}' gives the plan {changes_text(plan, adapted)}", err=True)
    return adapted


def _with_chosen_levels(
    model: ModelConfig, plan: Plan, pipeline: str, machine: Machine, tell: Callable[[str], None]
) -> Plan:
    """The plan with the levels of blocks that were chosen, which are said."""
    from attrs import evolve

    from ratrain.ratrainc.level_choice import choose_levels

    choice = choose_levels(model, plan, pipeline, machine, lambda words: tell(f"choosing levels: {words}"))
    echo(choice.words, err=True)
    return evolve(plan, zero_blocks=choice.levels)


def _check_schedule(plan: Plan, path: str, chosen: Strategy, passes: str | None) -> None:
    """The plan's schedule and the one that strategy or passes name are the same."""
    from ratrain.passes.pipeline_text import pass_text
    from ratrain.passes.placement.placed_by import placed_by, placement_in
    from ratrain.passes.placement.placed_schedule import refuse_contradiction
    from ratrain.ratrain_ir.frontend.plan_text import place_in_plan

    def place() -> Place:
        return place_in_plan(path, "schedule")

    if passes is None:
        chosen.check_schedule(plan, place)
    elif (first := placement_in(passes)) is not None and (schedule := placed_by(passes)) is not None:
        refuse_contradiction(plan, schedule, f"'{pass_text(first)}' in --passes", place)


_DOES_NOT_FIT = {"RT052", "RT053"}


def _with_advice(error: DiagnosticError, setting: Setting, strategy: Strategy, asking: str | None) -> DiagnosticError:
    """The refusal with what would fit."""
    import attrs

    from ratrain.ratrain_ir.diagnostics import DiagnosticError
    from ratrain.ratrainc.advice import advice

    *others, last = error.diagnostics
    notes = advice(setting, strategy, asking)
    return DiagnosticError([*others, attrs.evolve(last, notes=(*last.notes, *notes))])


def _planner_command(model: str, plan: str, resolved: Plan, strategy: str | None, target: MachineChoice) -> str:
    """The command that asks the planner for a plan in place of one, for the same clusters and step."""
    words = ["ratrainc", "plan", "--model", model, "--clusters", str(resolved.clusters)]
    words += ["--global-batch", str(resolved.global_batch), "--seq-len", str(resolved.seq_len), "--like", plan]
    words += ["--strategy", strategy] if strategy is not None else []
    return shlex.join([*words, *target.words, "-o", "P.toml"])


def _write(module: Module, output: str | None, machine: Machine | None) -> str | None:
    from ratrain import api

    if output is None:
        return None
    if output.endswith(".rtx"):
        from ratrain.targets.program.rtx import write_program

        write_program(api.emit(module, machine=machine), output)
    else:
        from ratrain.ratrain_ir.files import write_lines
        from ratrain.ratrain_ir.printer import module_lines

        write_lines(output, module_lines(module))
    return output


def summary(module: Module, machine: Machine) -> dict[str, Any]:
    """The figures of a compiled module for a machine, as `--json` prints them."""
    from ratrain.ratrain_ir.analysis.lifetime import lifetimes

    stages = []
    for stage in module.stages:
        peak = lifetimes(stage).peak_bytes
        figures = {"peak_live_bytes": peak, "arena_bytes": stage.arena_bytes, "ops": len(stage.ops)}
        stages.append({**figures, **stored_figures(stage)})
    return {
        "name": module.name,
        "level": module.level.value,
        "pipeline": module.pipeline,
        **capacity_figures(module, machine),
        "stages": stages,
    }


def stored_figures(stage: Stage) -> dict[str, Any]:
    """What a stage stores in other memories, where it does."""
    from ratrain.ratrain_ir.types import STORES

    stored = {home.value: stage.bytes_in(home) for home in STORES if stage.bytes_in(home)}
    return {"stored_bytes": stored} if stored else {}


def capacity_figures(module: Module, machine: Machine) -> dict[str, Any]:
    """What a rank of a module has for its tensors and, where something takes bytes before them, what takes how many."""
    from ratrain.targets.machine.capacity import capacity_of

    if module.target is None:
        return {"capacity_bytes": None}
    overheads = dict(capacity_of(machine, module.topology).overheads)
    return {"capacity_bytes": module.target.capacity_bytes} | ({"overhead_bytes": overheads} if overheads else {})
