"""Compilation of a model and a plan to a module and a program, and their files."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.passes.idle_options import refuse_deciding_twice, refuse_idle_options
from ratrain.passes.manager import AfterPass, PassManager, PassRun
from ratrain.passes.pipeline_text import parse_pipeline, pass_text
from ratrain.passes.placed_by import placed_by, placement_in
from ratrain.passes.placement.foreign_table import read_foreign_table, shape_keys, shape_of_table
from ratrain.passes.placement.place_from_file import PlaceFromFilePass
from ratrain.passes.placement.placed_schedule import refuse_contradiction
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import changes_text, check_plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.module import Level, Module
from ratrain.ratrain_ir.ops.memory import fetches_parameters
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics, Note, ToldError, fail, misuse
from ratrain.ratrain_ir.support.files import read_bytes
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrain_ir.text.plan_file import load_plan, place_in_plan
from ratrain.ratrain_ir.text.printer import write_module
from ratrain.ratrain_ir.verifier.memory import check_capacity
from ratrain.ratrain_ir.verifier.reporter import Reporter
from ratrain.ratrainc.choices.machine_choice import MachineChoice, resized
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, STRATEGIES, Strategy, hiding_exchanges
from ratrain.ratrainc.choices.strategies import strategy as strategy_named
from ratrain.ratrainc.compiling.opening import load_schedule, machine_for, machine_of, program_in
from ratrain.ratrainc.compiling.soundness import check, info_on
from ratrain.ratrainc.console.progress import OnProgress, Progress, telling, unheard
from ratrain.targets.codegen.emitter import emit as emit_module
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.program.rtx import program_bytes, write_program
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.choices.levers import CompileSetting
    from ratrain.targets.program.program import Program


def resolved(model: str | ModelConfig, plan: str | Path | Plan) -> tuple[ModelConfig, Plan]:
    """Load and check a model (preset name, config.json or `ModelConfig`) and a plan (TOML file or `Plan`).

    Raises `DiagnosticError` with everything that is wrong with either.
    """
    config = load_model(model) if isinstance(model, str) else model
    check_model(config)
    resolved_plan = load_plan(plan, config) if isinstance(plan, str | Path) else plan
    check_plan(resolved_plan, config)
    return config, resolved_plan


def lowered(model: str | ModelConfig, plan: str | Path | Plan) -> Module:
    """Lower a model and a plan, given as in `resolved`, to a dataflow module.

    Raises `DiagnosticError` with everything that is wrong with either.
    """
    config, resolved_plan = resolved(model, plan)
    with paused_gc():
        return lower(config, resolved_plan)


def chosen_machine(machine: str | Machine | None, capacity: int | None = None) -> Machine:
    """Load the machine (name, path or object; the default one if None). `capacity` overrides its bytes of DDR.

    Raises `DiagnosticError` if there is no machine of that name, or the file does not describe one.
    """
    loaded = machine if isinstance(machine, Machine) else load_machine(machine)
    return loaded if capacity is None else resized(loaded, capacity)


@frozen
class Compiled:
    """A module compiled from a model and a plan, with its machine, pass runs and adaptations of the plan."""

    module: Module
    machine: Machine
    runs: list[PassRun]
    given: str
    """description of the chunks and slices that the strategy added to the plan; empty if none"""
    levels: str
    """description of the blocks chosen to keep their views whole; empty if no choice was asked for"""


def compile(  # noqa: A001 - the name the documentation promises
    model: str | ModelConfig,
    plan: str | Path | Plan,
    *,
    machine: str | Machine | None = None,
    capacity: int | None = None,
    strategy: str | None = None,
    passes: str | None = None,
    schedule_file: str | None = None,
    choose_levels: bool = False,
    verify_each: bool = False,
    advice: bool = False,
    after_pass: AfterPass | None = None,
    progress: OnProgress | None = None,
) -> Module:
    """Lower a model and a plan, run a pipeline (a strategy's, or `passes`), verify the result.

    Without `machine` it is the one that the plan's file was made for, else the default one. `capacity` overrides its
    bytes of DDR. `schedule_file` is a table (CSV) whose order is placed. With
    `choose_levels`, simulated steps choose the blocks that keep their views whole under ZeRO 3. With `advice`, a
    refusal for bytes lists changes that would fit, each of which is tried. `progress` hears the pass at work. Raises
    `DiagnosticError` if the inputs are wrong or the plan does not fit the machine.
    """
    if isinstance(machine, Machine):
        chosen = MachineChoice(machine.name, capacity)
        on = chosen_machine(machine, capacity)
    else:
        chosen = MachineChoice(machine, capacity).for_plan(plan)
        on = chosen_machine(chosen.machine, chosen.capacity)
    return compiled(
        model,
        plan,
        on,
        strategy=strategy,
        passes=passes,
        schedule_file=schedule_file,
        choose_levels=choose_levels,
        verify_each=verify_each,
        asking=chosen if advice else None,
        after_pass=after_pass,
        progress=progress,
    ).module


def compiled(
    model: str | ModelConfig,
    plan: str | Path | Plan,
    machine: Machine,
    *,
    strategy: str | None = None,
    passes: str | None = None,
    schedule_file: str | None = None,
    choose_levels: bool = False,
    verify_each: bool = False,
    asking: MachineChoice | None = None,
    suggest: str | None = None,
    after_pass: AfterPass | None = None,
    progress: OnProgress | None = None,
    refused: Callable[[DiagnosticError], None] | None = None,
    said: bool = True,
) -> Compiled:
    """Compile as `compile` does, and return the pass runs and adaptations too.

    `refused` hears of a plan that does not fit before advice is looked for.

    `asking` is the machine as commands in the advice name it; None: no advice. `suggest` is the file to which advice
    writes a plan that fits. With `said`, options of `passes` that change nothing are refused.
    """
    if strategy is not None and passes is not None:
        misuse("a strategy and passes of your own exclude each other")
    chosen = strategy_named(strategy or DEFAULT_STRATEGY)
    pipeline = chosen.passes if passes is None else passes
    # A table is placed first, so that the passes see its order. It may also give the shape that the plan leaves out.
    if schedule_file is not None:
        pipeline = _placed_by(schedule_file, pipeline, strategy if passes is None else "--passes")
    config, given_plan = _resolved_for_table(model, plan, schedule_file)
    _check_schedule(given_plan, plan, chosen, passes)
    # The plan is adapted before anything is lowered: chunks and slices change the blocks and their cuts. Passes of the
    # user's own leave it as given.
    adapted = given_plan
    if passes is None:
        adapted, pipeline = evolve(chosen, passes=pipeline).applied(given_plan, config, machine)
    given = changes_text(given_plan, adapted) if adapted.shape != given_plan.shape else ""
    if passes is not None and said:
        _refuse_idle_options(passes, adapted, config)
    # Levels are chosen last, since each candidate is compiled with the final plan and pipeline.
    levels = ""
    if choose_levels:
        from ratrain.ratrainc.choices import level_choice

        def hear(words: str) -> None:
            (progress or unheard)(Progress(0, None, f"choosing levels: {words}"))

        choice = level_choice.choose_levels(config, adapted, pipeline, machine, hear)
        adapted, levels = evolve(adapted, zero_blocks=choice.levels), choice.words
    with paused_gc():
        module = lower(config, adapted)
    try:
        runs = _run(
            module, pipeline, machine=machine, verify_each=verify_each, after_pass=after_pass, progress=progress
        )
    except DiagnosticError as error:
        if asking is None:
            raise
        from ratrain.ratrainc.choices.levers import CompileSetting

        planner = whole = None
        if isinstance(model, str) and isinstance(plan, str):
            planner = _planner_command(model, plan, adapted, chosen.name, asking) if passes is None else None
            whole = _planner_command(model, plan, adapted, None, asking)
        named_or_own = chosen if passes is None else Strategy("--passes", passes, "as given")
        setting = CompileSetting(config, adapted, pipeline, machine)
        where = None if suggest is None else (suggest, str(model), asking)
        raise _advised(error, module, setting, named_or_own, (planner, whole), where, progress, refused) from None
    return Compiled(module, machine, runs, given, levels)


def _refuse_idle_options(passes: str, plan: Plan, model: ModelConfig, *, fetched: bool = False) -> None:
    """Raise `DiagnosticError` RT073 for options that change nothing; `fetched`: the module fetches views already.

    The passes of a strategy are exempt, as they are written for any plan.
    """
    if passes not in {known for each in STRATEGIES for known in (each.passes, hiding_exchanges(each.passes, plan))}:
        refuse_idle_options(passes, plan, model, fetched=fetched)
        refuse_deciding_twice(parse_pipeline(passes))


def _placed_by(schedule_file: str, passes: str, title: str | None) -> str:
    """Return the pipeline that places a table's order and then runs `passes`.

    Raises `DiagnosticError` if these place a schedule too.
    """
    placing = placement_in(passes)
    if placing is not None:
        named = title if title == "--passes" else f"the strategy '{title}'"
        misuse(
            f"{named} places the schedule by '{placing.name}', --schedule-file by '{schedule_file}': "
            "leave one of them out"
        )
    own = pass_text(PlaceFromFilePass(schedule_file))
    return f"{own},{passes}" if passes.strip() else own


def _resolved_for_table(
    model: str | ModelConfig, plan: str | Path | Plan, schedule_file: str | None
) -> tuple[ModelConfig, Plan]:
    """Load and check the model and plan; a table, if given, says the keys of shape that the plan leaves out."""
    if schedule_file is None or isinstance(plan, Plan):
        return resolved(model, plan)
    config = load_model(model) if isinstance(model, str) else model
    check_model(config)
    shape = shape_keys(shape_of_table(read_foreign_table(schedule_file)))
    return config, load_plan(plan, config, shape=shape)


def _check_schedule(plan: Plan, path: str | Path | Plan, chosen: Strategy, passes: str | None) -> None:
    """Raise `DiagnosticError` RT064 if the plan's schedule differs from the one that the strategy or passes place."""

    def place() -> Place:
        return Place() if isinstance(path, Plan) else place_in_plan(path, "schedule")

    if passes is None:
        chosen.check_schedule(plan, place)
    elif (first := placement_in(passes)) is not None and (schedule := placed_by(passes)) is not None:
        refuse_contradiction(plan, schedule, f"'{pass_text(first)}' in --passes", place)


def _advised(
    error: DiagnosticError,
    module: Module,
    setting: CompileSetting,
    strategy: Strategy,
    commands: tuple[str | None, str | None],
    suggest: tuple[str, str, MachineChoice] | None,
    progress: OnProgress | None,
    refused: Callable[[DiagnosticError], None] | None,
) -> DiagnosticError:
    """Add notes about changes that fit to a refusal for bytes; write the best of them if `suggest` names a file.

    `refused` hears of the refusal before anything is tried.
    """
    from ratrain.ratrainc.choices.timed_plan import DOES_NOT_FIT
    from ratrain.ratrainc.memory.advice import advice

    *others, last = error.diagnostics
    if not {problem.code for problem in error.diagnostics} & DOES_NOT_FIT:
        return error
    if refused is not None:
        refused(error)
    hear = progress or unheard

    def tick(text: str) -> None:
        hear(Progress(0, None, f"it does not fit; trying {text}"))

    found = advice(setting, strategy, [lifetimes(stage).peak_bytes for stage in module.stages], commands, tick)
    notes = list(found.notes)
    if suggest is not None:
        path, model, machine = suggest
        if found.suggestion is None:
            notes.append(Note(f"nothing is written to {path}: no plan was found that fits"))
        else:
            found.suggestion.save(path, model, machine)
            notes.append(Note(f"wrote {path}, a plan that fits: {found.suggestion.how}"))
    advised = [*others, evolve(last, notes=(*last.notes, *notes))]
    return DiagnosticError(advised) if refused is None else ToldError(advised, notes)


def _planner_command(model: str, plan: str, resolved: Plan, strategy: str | None, machine: MachineChoice) -> str:
    """Return the command that asks the planner for another plan with the same clusters and step."""
    words = ["ratrainc", "plan", "--model", model, "--clusters", str(resolved.clusters)]
    words += ["--global-batch", str(resolved.global_batch), "--seq-len", str(resolved.seq_len), "--like", plan]
    words += ["--strategy", strategy] if strategy is not None else []
    return shlex.join([*words, *machine.words, "-o", "P.toml"])


def run_passes(
    module: Module,
    passes: str,
    *,
    machine: str | Machine | None = None,
    verify_each: bool = False,
    after_pass: AfterPass | None = None,
    progress: OnProgress | None = None,
) -> list[PassRun]:
    """Run a pipeline over a module in place, then verify it. `progress` hears the present pass.

    Raises `DiagnosticError` if an option changes nothing, a pass refuses or the result is not sound.
    """
    fetched = any(fetches_parameters(op) for stage in module.stages for op in stage.ops)
    _refuse_idle_options(passes, module.plan, module.model, fetched=fetched)
    return _run(module, passes, machine=machine, verify_each=verify_each, after_pass=after_pass, progress=progress)


def _run(
    module: Module,
    passes: str,
    *,
    machine: str | Machine | None,
    verify_each: bool,
    after_pass: AfterPass | None,
    progress: OnProgress | None,
) -> list[PassRun]:
    chosen = machine_for(module, machine)
    manager = PassManager(target_of(chosen), verify_each, after_pass, None if progress is None else telling(progress))
    with paused_gc():
        # A module with a target gets this machine's, before the first pass reads its capacity.
        make_for(module, chosen)
        manager.run(module, passes)
        check(module, machine=chosen)
    return manager.runs


def emit(module: Module, *, machine: str | Machine | None = None) -> Program:
    """Emit the program of a module, for the machine it was made for or for the given one; allocate it first if needed.

    Raises `DiagnosticError` if the module is not sound or does not fit.
    """
    chosen = machine_for(module, machine)
    if module.level is not Level.ALLOCATED:
        run_passes(module, "allocate-ddr", machine=chosen)
    with paused_gc():
        make_for(module, chosen)
        return emit_module(module, target_of(chosen))


def make_for(module: Module, machine: Machine) -> None:
    """Change the target of a module that has one to this machine; `emit` checks that its workspace suffices there.

    Raises `DiagnosticError` RT052 if an arena does not fit there.
    """
    own = module.target
    if own is None or (info := info_on(module, own, machine)) is own:
        return
    module.target = info
    if module.level is Level.ALLOCATED:
        diagnostics = Diagnostics()
        for stage in module.stages:
            check_capacity(module, stage, stage.bytes_by_home, Reporter(module, diagnostics))
        diagnostics.check()


def load(path: str, *, machine: str | Machine | None = None) -> Program:
    """Load a program from a `.rtx`, or verify and emit a `.rtir`, for `machine` if one is given.

    Raises `DiagnosticError` if the file, or the machine's file, is not sound.
    """
    if isinstance(machine, str):
        machine = load_machine(machine)
    if path.endswith(".rtir"):
        module = load_schedule(path)
        check(module, machine=machine)
        return emit(module, machine=machine)
    return program_in(read_bytes(path, "program"), path)


def save(what: Module | Program, path: str, *, machine: str | Machine | None = None) -> None:
    """Write a module as a schedule (.rtir) or, allocated and emitted, as a program (.rtx); write a program as .rtx.

    Raises `DiagnosticError` RT002 if the file cannot be written.
    """
    is_program = path.endswith(".rtx")
    if not is_program and not (path.endswith(".rtir") and isinstance(what, Module)):
        misuse(f"the output '{path}' must end in .rtx (program), or of a module in .rtir (schedule)")
    if isinstance(what, Module) and not is_program:
        with paused_gc():
            write_module(what, path)
    else:
        write_program(emit(what, machine=machine) if isinstance(what, Module) else what, path)


def source_module(program: Program, file: str) -> Module:
    """Compile the module of a program again from its model, plan and passes.

    Raises `DiagnosticError` RT002 if that does not give this very program.
    """
    made_for = machine_of(program)
    # the plan of a placed module names the order that its pipeline made; the placement of that name makes it again
    is_placed = bool(program.pipeline) and placed_by(program.pipeline) is not None
    plan = evolve(program.plan, schedule=None) if is_placed else program.plan
    way_out = "give the .rtir that it was compiled from"
    try:
        module = compiled(program.model, plan, made_for, passes=program.pipeline, said=False).module
        module.name = program.name
        again = emit(module, machine=made_for)
    except DiagnosticError as error:
        why = error.diagnostics[0].message
        fail("RT002", f"what '{file}' was made from cannot be made again: {why}", help=way_out)
    if program_bytes(again) != program_bytes(program):
        why = "its model, plan and passes give another program: its schedule was edited, or compiled by another version"
        fail("RT002", f"what '{file}' was made from cannot be made again: {why}", help=way_out)
    return module
