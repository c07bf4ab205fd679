"""The Python API: what the command line does, for notebooks and scripts.

from ratrain import api
module = api.compile("llama-2-7b", "plan.toml")
program = api.emit(module)
figures = api.simulate(program)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.passes.manager import AfterPass, BeforePass, PassManager, PassRun
from ratrain.ratrain_ir.diagnostics import Diagnostics
from ratrain.ratrain_ir.frontend.model_fields import check_model
from ratrain.ratrain_ir.frontend.model_files import load_model
from ratrain.ratrain_ir.frontend.plan_text import check_plan, load_plan
from ratrain.ratrain_ir.gc import paused_gc
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.module import Level, Module, TargetInfo
from ratrain.ratrain_ir.parser import read_module
from ratrain.ratrain_ir.verifier import verify as verify_module
from ratrain.ratrain_ir.verifier.memory import check_capacity
from ratrain.ratrain_ir.verifier.report import Reporter
from ratrain.ratrain_ir.verifier.workspace import check_workspace
from ratrain.ratrainc.strategies import DEFAULT_STRATEGY, strategy
from ratrain.targets.codegen.emitter import emit as emit_module
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.record import check_carried, check_on_machine, compiled_for, target_info
from ratrain.targets.program.rtx import read_program
from ratrain.targets.simulator.figures import Figures, simulated
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.ratrain_ir.frontend.plan import Plan
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.timeline import Timeline


def resolved(model: str | ModelConfig, plan: str | Plan) -> tuple[ModelConfig, Plan]:
    """The checked model (preset name, config.json or `ModelConfig`) and plan (TOML file or `Plan`).

    Raises `DiagnosticError` for whatever is wrong with either.
    """
    config = load_model(model) if isinstance(model, str) else model
    check_model(config)
    resolved_plan = load_plan(plan, config) if isinstance(plan, str | Path) else plan
    check_plan(resolved_plan, config)
    return config, resolved_plan


def lowered(model: str | ModelConfig, plan: str | Plan) -> Module:
    """The dataflow module of a model and a plan, given as in `resolved`.

    Raises `DiagnosticError` for whatever is wrong with either.
    """
    config, resolved_plan = resolved(model, plan)
    with paused_gc():
        return lower(config, resolved_plan)


def compile(  # noqa: A001 - the name the documentation promises
    model: str | ModelConfig,
    plan: str | Plan,
    *,
    machine: str | Machine | None = None,
    passes: str | None = None,
    verify_each: bool = False,
    after_pass: AfterPass | None = None,
) -> Module:
    """Lower a model and a plan, run a pipeline (the default strategy's), verify the result.

    Raises `DiagnosticError` where the inputs are wrong or the plan does not fit the machine.
    """
    module = lowered(model, plan)
    pipeline = strategy(DEFAULT_STRATEGY).passes if passes is None else passes
    run_passes(module, pipeline, machine=machine, verify_each=verify_each, after_pass=after_pass)
    return module


def run_passes(
    module: Module,
    passes: str,
    *,
    machine: str | Machine | None = None,
    verify_each: bool = False,
    after_pass: AfterPass | None = None,
    before_pass: BeforePass | None = None,
) -> list[PassRun]:
    """Run a pipeline over a module in place, then verify it.

    Raises `DiagnosticError` where a pass refuses or the result is not sound.
    """
    chosen = machine_for(module, machine)
    manager = PassManager(target_of(chosen), verify_each, after_pass, before_pass)
    with paused_gc():
        make_for(module, chosen)
        manager.run(module, passes)
        check(module, machine=chosen)
    return manager.runs


def check(module: Module, *, machine: str | Machine | None = None) -> None:
    """Raise `DiagnosticError` unless a module is sound; one that names its target, on that machine or on the one given.

    What is sound can be emitted and run.
    """
    diagnostics = Diagnostics()
    with paused_gc():
        if module.target is None:
            verify_module(module, diagnostics)
        else:
            chosen = machine_for(module, machine)
            there = evolve(module, target=_info_on(module, module.target, chosen))
            verify_module(there, diagnostics)
            diagnostics.check()
            check_workspace(there, target_of(chosen), Reporter(there, diagnostics))
    diagnostics.check()


def emit(module: Module, *, machine: str | Machine | None = None) -> Program:
    """The program of a module, for the machine it was made for unless another is given; one that is not allocated yet is allocated first.

    Raises `DiagnosticError` where it is not sound or does not fit.
    """
    chosen = machine_for(module, machine)
    if module.level is not Level.ALLOCATED:
        run_passes(module, "allocate-ddr", machine=chosen)
    with paused_gc():
        make_for(module, chosen)
        return emit_module(module, target_of(chosen))


def _info_on(module: Module, own: TargetInfo, machine: Machine) -> TargetInfo:
    """What a module that has a target says on a machine; the same where that is the one it was made for."""
    info = target_info(machine, module.topology)
    if own.digest == info.digest:
        return own
    if not own.digest and own.name == info.name:  # a text that does not say more of its machine than the name
        return evolve(info, capacity_bytes=min(own.capacity_bytes, info.capacity_bytes))
    return info


def make_for(module: Module, machine: Machine) -> None:
    """Let a module that has a target be for this machine from now on; whether its workspace is large enough there, `emit` finds out.

    Raises `DiagnosticError` RT052 where an arena does not fit there.
    """
    own = module.target
    if own is None or (info := _info_on(module, own, machine)) is own:
        return
    module.target = info
    if module.level is Level.ALLOCATED:
        diagnostics = Diagnostics()
        for stage in module.stages:
            check_capacity(module, stage, Reporter(module, diagnostics))
        diagnostics.check()


def simulate(
    program: Program, *, machine: str | Machine | None = None, rendezvous: bool = False, sharing: bool = True
) -> Figures:
    """Simulated times of a program on a machine: the one it was compiled for unless another is given.

    Without `sharing`, DDR and link carry whatever overlaps at full speed.
    """
    return simulate_with_timeline(program, machine=machine, rendezvous=rendezvous, sharing=sharing)[0]


def simulate_with_timeline(
    program: Program, *, machine: str | Machine | None = None, rendezvous: bool = False, sharing: bool = True
) -> tuple[Figures, Timeline]:
    """`simulate`, and when each instruction starts and ends."""
    given = load_machine(machine) if isinstance(machine, str) else machine
    chosen = given or machine_of(program)
    with paused_gc():
        return simulated(program, chosen, rendezvous=rendezvous, sharing=sharing)


def load(path: str, *, machine: str | Machine | None = None) -> Program:
    """A program from a `.rtx`, or from a `.rtir`, which is verified and emitted first, for `machine` where one is given.

    Raises `DiagnosticError` where the file, or that of the machine, is not sound.
    """
    if isinstance(machine, str):
        machine = load_machine(machine)
    if path.endswith(".rtir"):
        module = load_schedule(path)
        check(module, machine=machine)
        return emit(module, machine=machine)
    with paused_gc():
        program = read_program(path)
    check_carried(program.info, program.topology, path)
    check_on_machine(program, path)
    return program


def load_schedule(path: str) -> Module:
    """A module from a `.rtir`, not yet verified.

    Raises `DiagnosticError` where it cannot be read, or carries a machine that its target contradicts.
    """
    with paused_gc():
        module = read_module(path)
    if module.target is not None:
        assert module.source is not None
        check_carried(module.target, module.topology, path, module.source.line(module.target.line))
    return module


def machine_for(module: Module, machine: str | Machine | None) -> Machine:
    """The machine to use for a module: the one given, else the one it was compiled for.

    Raises `DiagnosticError` RT065 when that one is not known here.
    """
    if isinstance(machine, Machine):
        return machine
    return load_machine(machine) if machine or module.target is None else compiled_for(module.target)


def machine_of(program: Program) -> Machine:
    """The machine a program was compiled for.

    Raises `DiagnosticError` RT065 when that one is not known here.
    """
    return compiled_for(program.info)
