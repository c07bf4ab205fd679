"""Writes `docs/schedules.md` and its pictures: `python docs/schedules.py`. Every figure on the page is simulated here."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve, frozen

from ratrain import api
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.ops.messages import Send
from ratrain.ratrain_ir.schedules.named import SCHEDULES, most_held
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.console.markdown_text import wrapped
from ratrain.ratrainc.report.picture import step_picture
from ratrain.targets.simulator.figures import step_figures
from ratrain.targets.simulator.given_times import GivenTimes

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "images" / "schedules"
STAGES, MICRO_BATCHES, SLICES = 4, 8, 4
UNIT = GivenTimes.textbook(1.0, 1.0, 1.0, 0.0)
MODEL = ModelConfig("toy", "llama", 256, 64, 16, 4, 4, 16, 128, 1e-5)
PASSES = "recompute{policy=none},bucket-grad-sync,insert-prefetch,allocate-ddr"

TEXTS = {
    "1f1b": (
        "Forward and backward take turns once the pipeline is full (PipeDream-Flush; Megatron-LM's default). A stage holds as many "
        "micro-batches as there are stages behind it, itself included."
    ),
    "1f1b-ahead": (
        "1F1B with one more forward in the warm-up of every stage, also where there is one stage, and one more micro-batch in memory. By "
        "itself it is no faster. With [expert](expert-ranks.md) or tensor-parallel ranks a forward and the backward behind it are of different "
        "micro-batches on every stage: `overlap-tensor` merges them, and each computes while the other exchanges. "
        "Merged at one pace, the two hold about what one does."
    ),
    "gpipe": "All forwards, then all backwards: the bubble of 1F1B, and every micro-batch of the step in memory. The yardstick.",
    "zb-h1": (
        "1F1B whose backwards are split: nobody waits for the half that makes the gradients of weights, so it fills idle time (Qi et al., "
        '"Zero Bubble Pipeline Parallelism", 2023). As many micro-batches are in flight as under 1F1B; what weight halves read lives longer.'
    ),
    "zb-h2": (
        "ZB-H1 with twice the warm-up (same source): no stage waits for its first gradient, and every stage holds 2 P - 1 "
        "micro-batches, so "
        "with F = B = W nothing is idle but at the ends of a step."
    ),
    "interleaved": (
        "Each stage holds several chunks of the model, and a micro-batch goes round the stages as often (Megatron-LM's virtual pipeline "
        "stages). The bubble shrinks by the number of chunks, messages multiply by it, and the first stages hold more."
    ),
    "breadth-first": (
        'All micro-batches go through a chunk before any goes through the next (Lamy-Poirier, "Breadth-First Pipeline Parallelism", '
        "2022). Under ZeRO 3 a chunk's parameters are needed once a direction; every micro-batch is in memory."
    ),
    "zb-v": (
        "Two chunks a stage, down the pipeline and up again, so that the stage that begins a micro-batch also ends it, with split "
        "backwards (Qi et al., 2024). With F = B = W nothing is idle but at the ends of a step, in 1F1B's memory."
    ),
    "v-half": (
        "The same vee with a building block that holds about half of 1F1B's activations (Qi et al., \"Pipeline Parallelism with "
        'Controllable Memory", 2024), for some bubble.'
    ),
    "v-min": "The vee that holds least: about a third of 1F1B's activations, with a larger bubble (same source).",
    "dualpipe-v": (
        "DeepSeek's DualPipe cut in half, as PyTorch has it: forwards of one direction are paired with backwards of the other. Pairs stand "
        "one after the other here; where a machine can run both at once, nothing in the order stands against it."
    ),
    "seq1f1b": (
        '1F1B over slices of a micro-batch along the sequence (Sun et al., "Seq1F1B", 2024): later slices read the keys and values of '
        "earlier ones, backward goes through the slices in descending order. Bubble and activations shrink by the number of slices while "
        'link bytes stay. `slices = "even-work 4"` makes later slices shorter, as they attend to more keys. Weights are read again for every '
        "slice, so on a machine with slow memory a slice must not be too short (on the MT-3000 not below about 190 tokens)."
    ),
}
"""What a schedule is, for every one that has a name."""


@frozen
class Row:
    """What a schedule is worth with unit times."""

    name: str
    bubble: float
    cold: float
    held: float
    """of the worst stage: micro-batches' activations of a stage"""
    messages: int
    """that a stage sends in a step, the busiest one"""


def plan_text(name: str) -> str:
    """The plan that a section shows."""
    slices = f"\nslices = {SLICES}" if name == "seq1f1b" else ""
    return (
        f'[parallel]\npp = {STAGES}\ndp = 1\nschedule = "{name}"\n\n'
        f"[batch]\nmicro_batch_size = 1\nmicro_batches = {MICRO_BATCHES}\nseq_len = 64{slices}\n"
    )


def drawn(name: str) -> Row:
    """Draw a schedule's picture; what it is worth."""
    plan = parse_plan(plan_text(name), file="plan.toml", model=MODEL)
    module = api.compile(
        MODEL, evolve(plan, view_dtype="f32", grad_dtype="f32", grad_shard_dtype="f32", loss_scale=1.0), passes=PASSES
    )
    timeline = UNIT.run(api.emit(module))
    step_picture(timeline, "").save(str(PICTURES / f"{name}.svg"))
    figures = step_figures(timeline)
    shape = plan.shape
    held = max(most_held(name, shape, stage) for stage in range(STAGES)) / (shape.chunks * shape.slices)
    sends = max(sum(type(op) is Send for op in stage.ops) for stage in module.stages)
    return Row(name, figures.bubble_fraction, timeline.makespan_seconds, held, sends)


def page(rows: list[Row]) -> str:
    """The text of the page."""
    head = (
        "# Schedules\n\nWritten by `docs/schedules.py`; all times are simulated. Each schedule is a small generator of actions "
        "(`ratrain_ir/schedules/`); `place-schedule` puts a module into any of them, and an order of your own, or one that PyTorch wrote, "
        "comes in as a file (`ratrainc compile --schedule-file`). All of them train the same, bit for bit, but for Seq1F1B, which cuts rows.\n\n"
        f"Here: {STAGES} stages, {MICRO_BATCHES} micro-batches; one micro-batch's forward through a stage takes 1, and each half of its "
        "backward too (`ratrainc simulate FILE --times 1,1,1,0`); chunks share that out, slices as well. *bubble* is the idle share of a steady "
        "step, *first step* its time from cold (24 is all work), *held* the most activations in flight on a stage, in micro-batches through all of "
        "its layers, *messages* what the busiest stage sends in a step."
    )
    table = ["| schedule | plan | bubble | first step | held | messages |", "|---|---|---|---|---|---|"]
    for row in rows:
        keys = {"seq1f1b": f"`slices = {SLICES}`"}.get(row.name, "")
        schedule = SCHEDULES[row.name]
        if schedule.chunks > 1:
            keys = f"`chunks = {schedule.chunks}`, `{schedule.layout}`"
        values = f"{100 * row.bubble:.1f} % | {row.cold:g} | {row.held:g} | {row.messages}"
        table.append(f"| [{row.name}](#{row.name}) | {keys or '-'} | {values} |")
    sections = [
        f"## {row.name}\n\n{wrapped(TEXTS[row.name])}\n\n![{SCHEDULES[row.name].title}](images/schedules/{row.name}.svg)\n"
        for row in rows
    ]
    return "\n".join([wrapped(head), "", *table, "", *sections])


def main() -> None:
    """Write the page and its pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    rows = [drawn(name) for name in SCHEDULES]
    (DOCS / "schedules.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
