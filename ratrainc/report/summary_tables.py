"""Tables about modules, programs and simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.chunk_actions import most_in_flight_on
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.hf_keys import DROPOUT
from ratrain.ratrain_ir.config.tensor_ranks import trained_model
from ratrain.ratrain_ir.config.types import STORES
from ratrain.ratrain_ir.model.blocks import trained_words
from ratrain.ratrain_ir.ops.compute import Forward, Recompute
from ratrain.ratrain_ir.process_pool import each_stage
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.console.console import capacity_text, say, seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, TextTable
from ratrain.ratrainc.facts.expert_facts import NOT_COUNTED, dropped_rows_note, expert_rows_note, experts_text
from ratrain.targets.machine.capacity import capacity_of

if TYPE_CHECKING:
    from ratrain.passes.manager import PassRun
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.routing import Routing
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.figures import Figures, StepFigures


def in_slices(plan: Plan) -> str:
    """Return the number of slices of a sequence, for a title; empty if sequences are whole."""
    return f" in {number_of(len(plan.slices), 'slice')}" if plan.slices else ""


def show_inserted(runs: Sequence[PassRun]) -> None:
    """Print the passes that were added because another needs them, except placements, which follow from the plan."""
    for run in runs:
        if run.inserted_for and not run.text.startswith("place-"):
            say(f"inserted pass '{run.text}', which '{run.inserted_for}' needs")


def module_parts(module: Module, machine: Machine, peaks: Sequence[int] | None = None) -> Iterator[Part]:
    """Yield the needs of each stage of a module, and the capacity of the machine it is for.

    `peaks` are the most live bytes by stage, if they are known already.
    """
    plan = module.plan
    capacity = module.target.capacity_bytes if module.target else None
    if peaks is None:
        peaks = each_stage(lambda stage: lifetimes(stage).peak_bytes, module.stages)
    rows = []
    for stage, peak in zip(module.stages, peaks, strict=True):
        arena = stage.arena_bytes
        rows.append(
            [
                f"@{stage.index}",
                ", ".join(f"{first} - {last}" for first, last in module.topology.ends_of_chunks(stage.index)),
                size_text(peak),
                size_text(arena) if arena else "-",
                size_text(capacity - arena) if capacity and arena else "-",
                str(most_in_flight_on(module, stage)),
                str(len(stage.ops)),
            ]
        )
    model = module.model
    title = (
        f"{model.name}: {model.parameters / 1e6:,.2f} M parameters, {module.topology.words}, "
        f"{number_of(plan.micro_batches, 'micro-batch')} of {plan.micro_batch_size} x "
        f"{number_of(plan.seq_len, 'token')}{in_slices(plan)}, "
        f"{module.level.value}"
    )
    yield TextTable(title, ("stage", "blocks", "peak live", "arena", "headroom", "in flight", "ops"), rows)
    if trained := trained_words(trained_model(model, plan)):
        yield trained
    if model.experts is not None:
        yield experts_text(model)
        yield expert_rows_note(model, plan, machine)
    if capacity is not None:
        yield f"capacity of a stage on {machine.name}: {capacity_text(capacity)}"
        account = capacity_of(machine, module.topology).account
        if account is not None:
            yield f"  {account}"
        if recomputed := _recomputed_text(module):
            yield recomputed
        assert module.target is not None
        for home in STORES:
            most = max(stage.bytes_in(home) for stage in module.stages)
            if most:
                words = f"at most {size_text(most)} of {size_text(module.target.capacity_of(home))} on a stage"
                yield f"stored in the memory '{home.value}': {words}"
    dropout = [f"{key} {shown(model.inert[key])}" for key in DROPOUT.get(model.family, ()) if model.inert.get(key)]
    if dropout:
        yield f"{', '.join(dropout)} of its config.json: without effect, training here has no dropout"


def _recomputed_text(module: Module) -> str:
    """Return how many forwards of blocks are recomputed for their backwards; empty if none."""
    counts = []
    for stage in module.stages:
        ops = [op for op in stage.ops if isinstance(op, Forward | Recompute) and op.block.layer is not None]
        again = sum(isinstance(op, Recompute) for op in ops)
        counts.append((again, len(ops) - again, stage.index))
    again, forwards = sum(count for count, _, _ in counts), sum(count for _, count, _ in counts)
    if not again:
        return ""
    most, of, stage_index = max(counts)
    where = f", most on @{stage_index}: {most:,} of {of:,}" if len(counts) > 1 else ""
    return f"recomputed for their backwards: {again:,} of {forwards:,} forwards of blocks{where}"


def figures_parts(
    program: Program, figures: Figures, machine: Machine, routing: Routing | None = None
) -> Iterator[Part]:
    """Yield the figures of a simulation on a machine, with the routing that it assumed."""
    yield _stage_table(f"{program.name} on {program.plan.clusters} x {machine.name} (simulated)", figures, seconds_text)
    yield f"step (simulated): {seconds_text(figures.step_seconds)}, from cold {seconds_text(figures.makespan_seconds)}"
    utilisation = f"model-flops utilisation {100 * figures.mfu:.1f} %"
    counted = f" ({NOT_COUNTED})" if program.model.experts else ""
    yield f"tokens/s (simulated): {figures.tokens_per_second:,.1f}, {utilisation}{counted}"
    if note := expert_rows_note(program.model, program.plan, machine, routing):
        yield note
    if dropped := dropped_rows_note(program.model, program.plan, routing):
        yield dropped
    if machine.accuracy:
        yield machine.accuracy
    yield from collectives_parts(figures)


def collectives_parts(figures: Figures) -> Iterator[Part]:
    """Yield the algorithm of each kind of collective, if there are any."""
    if figures.collectives:
        kinds = [f"{kind} {', '.join(names)}" for kind, names in figures.collectives.items()]
        yield f"collectives, as priced: {'; '.join(kinds)}"


def given_times_parts(program: Program, figures: StepFigures) -> Iterator[Part]:
    """Yield the figures of a simulation with given times, in their unit."""
    yield _stage_table(f"{program.name} with the given times, in their unit (simulated)", figures, _time_text)
    step, cold = _time_text(figures.step_seconds), _time_text(figures.makespan_seconds)
    yield f"step (simulated): {step}, from cold {cold}; bubble fraction {figures.bubble_fraction:.4f}"


def _time_text(time: float) -> str:
    return f"{time:.6g}"


def _stage_table(title: str, figures: StepFigures, time_text: Callable[[float], str]) -> TextTable:
    rows = [
        [
            f"@{index}",
            time_text(stage.busy_seconds),
            time_text(stage.idle_seconds),
            f"{100 * figures.stage_bubble_fraction(stage):.1f} %",
            size_text(stage.peak_bytes),
            size_text(stage.arena_bytes),
        ]
        for index, stage in enumerate(figures.stages)
    ]
    return TextTable(title, ("stage", "compute busy", "idle", "idle share", "peak live", "arena"), rows)
