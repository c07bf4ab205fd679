"""Tables of the page, as HTML that needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.plan_text import plan_words
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrainc.console.console import capacity_text, seconds_text, size_text
from ratrain.ratrainc.report.time_report import causes_by_length, longest_wait
from ratrain.targets.machine.capacity import capacity_of

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.bubbles import Bubbles
    from ratrain.targets.simulator.figures import Figures
    from ratrain.targets.simulator.timeline import Timeline


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False, stacks: bool = False
) -> str:
    """Return a table; the first cell of a row names it. With `words`, cells are texts and stand to the left.

    With `stacks`, every cell carries the name of its column too: in a narrow window a row becomes a block of values
    below each other, each with its name, and nothing has to be scrolled sideways.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    names = [f' data-label="{escape(column)}"' if stacks else "" for column in columns[1:]]
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{name}>{escape(cell)}</td>" for name, cell in zip(names, row[1:], strict=True))
        + "</tr>\n"
        for row in rows
    )
    style = ("words" if words else "numbers") + " stacks" * stacks
    return (
        f'<div class="{style}" tabindex="0"><table><caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def key_figures(program: Program, figures: Figures, machine: Machine) -> str:
    """Return the figures of the whole step."""
    pairs = [
        ("step", seconds_text(figures.step_seconds)),
        ("from cold", seconds_text(figures.makespan_seconds)),
        ("tokens/s", f"{figures.tokens_per_second:,.0f}"),
        (
            f"model-flops utilisation{' (active parameters)' * bool(program.model.experts)}",
            f"{100 * figures.mfu:.1f} %",
        ),
        ("clusters", f"{program.plan.clusters:,}"),
        ("ops a step", f"{sum(stage.instructions for stage in program.stages):,}"),
        ("largest arena", size_text(max(stage.arena_bytes for stage in program.stages))),
        ("capacity", capacity_text(program.capacity_bytes)),
        *((name, size_text(nbytes)) for name, nbytes in capacity_of(machine, program.topology).overheads),
    ]
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)


def stage_table(timeline: Timeline, figures: Figures) -> str:
    """Return the times, bytes, ops and tensors of each stage."""
    ops, tensors = timeline.columns.lengths.sum(axis=1), timeline.columns.tensor_counts
    rows = [
        [
            f"@{index}",
            f"{ops[index]:,}",
            f"{tensors[index]:,}",
            seconds_text(stage.busy_seconds),
            f"{100 * stage.idle_seconds / figures.step_seconds:.1f} %",
            seconds_text(stage.exposed_tail_seconds),
            size_text(stage.peak_bytes),
            size_text(stage.arena_bytes),
            size_text(timeline.program.capacity_bytes - stage.arena_bytes),
        ]
        for index, stage in enumerate(figures.stages)
    ]
    columns = ("stage", "ops", "tensors", "compute busy", "idle", "exposed tail", "peak live", "arena", "headroom")
    return table("Stages in the steady step (times are simulated)", columns, rows)


def bubble_tables(program: Program, bubbles: Bubbles) -> str:
    """Return busy and idle seconds of all compute engines, then, folded, of every engine."""
    stages = range(len(program.stages))
    kind = "first step, from cold" if bubbles.cold else "steady step"
    title = f"{kind}, {seconds_text(bubbles.window_seconds)} (simulated): busy, and idle by cause"
    compute = _bubble_table(f"Compute engines, {title}", bubbles, [(stage, Engine.COMPUTE) for stage in stages])
    places = [
        (stage, engine)
        for stage in stages
        for engine, length in zip(ENGINES, program.stages[stage].lengths, strict=True)
        if length
    ]
    every = _bubble_table(f"All engines, {title}", bubbles, places)
    return f"{compute}<details><summary>All engines of all stages</summary>\n{every}</details>\n"


def _bubble_table(caption: str, bubbles: Bubbles, places: Sequence[tuple[int, Engine]]) -> str:
    idle = [bubbles.idle_seconds(stage, engine) for stage, engine in places]
    causes = causes_by_length(idle)
    rows = []
    for (stage, engine), row in zip(places, idle, strict=True):
        busy = bubbles.busy_seconds(stage, engine)
        share = f"{100 * busy / bubbles.window_seconds:.1f} %" if bubbles.window_seconds else "-"
        cells = [seconds_text(row[cause]) if cause in row else "-" for cause in causes]
        rows.append(
            [f"@{stage} {engine.value}", seconds_text(busy), share, *cells, longest_wait(bubbles, stage, engine)]
        )
    columns = ("engine", "busy", "share", *(cause.value for cause in causes), "longest for")
    return table(caption, columns, rows)


def plan_tables(program: Program) -> str:
    """Return the plan by keys of its file, and the model by fields."""
    words = plan_words(program.plan)
    plan = [[key, value] for key, value in words.items()]
    absent = ", ".join(key for key in program.plan.to_fields() if key not in words)
    left_out = f"<p>Left out, as in a plan file: {escape(absent)}.</p>\n" if absent else ""
    model = [[name, _field_text(value)] for name, value in program.model.to_fields().items()]
    passes = f"<p>Passes: <code>{escape(program.pipeline)}</code></p>\n"
    return (
        passes
        + table("Plan, in the words of a plan file", ("key", "value"), plan, words=True)
        + left_out
        + table("Model", ("field", "value"), model, words=True)
    )


def _field_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def machine_table(machine: Machine) -> str:
    """Return the constants of the machine, with their sources."""
    rows = [
        [name, f"{constant.value:,.12g}", constant.unit, constant.certainty, constant.source]
        for name, constant in machine.constants.items()
    ]
    title = f"Machine {machine.name}; UpdateShard runs on the {machine.update_engine.value} engine"
    return table(title, ("constant", "value", "unit", "certainty", "source"), rows, words=True)
