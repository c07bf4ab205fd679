"""The report page, put together: one HTML file that needs no network.

`report.html` has three markers, which are replaced: the title, the body, and the scripts. The order of elements matters
to readers alone; scripts run last, when all data elements are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.support.files import replacing
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.report import page_tables
from ratrain.ratrainc.report.colours import kind_styles
from ratrain.ratrainc.report.page_columns import KINDS, StepView, op_elements, tensor_elements
from ratrain.ratrainc.report.summary_tables import in_slices
from ratrain.targets.program.columns import KEYWORD
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.simulator.live_curve import live_intervals

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import ProgramStage
    from ratrain.targets.simulator.figures import Figures
    from ratrain.targets.simulator.timeline import Timeline

SCRIPT = "/*ratrain-script*/"
FINDER = "<!--ratrain-finder-->\n"
_BODY = "<!--ratrain-body-->"
_TITLE = "<!--ratrain-title-->"
SCRIPTS = ("common.js", "data.js", "drawing.js", "search.js", "saving.js", "report.js")


def write_report(timeline: Timeline, figures: Figures, machine: Machine, path: str) -> int:
    """Write the page, atomically; return its bytes.

    Raises `DiagnosticError` RT002 if the file cannot be written.
    """
    return write_parts(_parts(timeline, figures, machine), path)


def write_parts(parts: Iterable[str], path: str) -> int:
    """Write the parts of a page, atomically; return its bytes.

    Raises `DiagnosticError` RT002 if the file cannot be written.
    """
    with replacing(path) as stream:
        return sum(stream.write(part.encode()) for part in parts)


def _parts(timeline: Timeline, figures: Figures, machine: Machine) -> Iterator[str]:
    program = timeline.program
    title = f"{program.name} on {program.plan.clusters} x {machine.name}"
    head, tail = split_page(title)
    yield head
    yield f"<h1>{escape(title)}</h1>\n<p>{escape(_subtitle(timeline))}</p>\n"
    yield f'<dl class="figures">{page_tables.key_figures(program, figures, machine)}</dl>\n'
    finder, charts = page_file("finder.html"), page_file("charts.html")
    controls = page_file("controls.html").replace(FINDER, finder)
    yield f'<section id="charts" aria-label="Charts">\n{controls}{charts}</section>\n'
    yield "<h2>Stages</h2>\n" + page_tables.stage_table(timeline, figures)
    # each walk through idle time is done once, for its table and for its chart
    steady, from_cold = Bubbles(timeline), Bubbles(timeline, cold=True)
    yield "<h2>Bubbles</h2>\n" + page_tables.bubble_tables(program, steady)
    cold = page_tables.bubble_tables(program, from_cold)
    yield f"<details><summary>The first step, from cold</summary>\n{cold}</details>\n"
    yield "<h2>Plan</h2>\n" + page_tables.plan_tables(program)
    yield "<h2>Machine</h2>\n" + page_tables.machine_table(machine)
    yield from data_elements(timeline, steady, from_cold)
    yield tail.replace(SCRIPT, scripts(SCRIPTS))


def split_page(title: str) -> tuple[str, str]:
    """Return the page before and after its body."""
    page = page_file("report.html").replace(_TITLE, escape(title))
    page = page.replace("/*ratrain-style*/", kind_styles() + page_file("report.css"))
    # in parts, so that a large page need not be one string in memory
    head, tail = page.split(_BODY)
    return head, tail


def scripts(names: Iterable[str]) -> str:
    """Return the scripts for a page with one report: its ids have no prefix, and no other report follows it."""
    return 'const PREFIX = "", PEERS = [];\n' + "".join(map(page_file, names))


def _subtitle(timeline: Timeline) -> str:
    plan = timeline.program.plan
    sends = "rendezvous" if timeline.rendezvous else "buffered"
    alike = "replicas" if plan.tp == 1 else "replicas and tensor-parallel ranks"
    return (
        f"All times are simulated, none is measured. {timeline.program.topology.words}, "
        f"{number_of(plan.micro_batches, 'micro-batch')} of "
        f"{plan.micro_batch_size} x {number_of(plan.seq_len, 'token')}{in_slices(plan)}; {sends} "
        f"sends; {alike} are alike, "
        "so one of each stage is shown."
    )


@frozen
class Scale:
    """The common axes of two reports."""

    seconds: dict[str, float]
    """length of the time axis, by view"""
    bytes: dict[tuple[int, str], tuple[int, int]]
    """largest arena and top of the drawing, by stage and memory"""


def step_views(timeline: Timeline, steady: Bubbles, from_cold: Bubbles) -> tuple[StepView, StepView]:
    """Return the two steps that a page shows: a steady one (the last simulated), and the first, from cold."""
    return StepView("steady", timeline, steady, timeline.steps - 1), StepView("cold", timeline, from_cold, 0)


def data_elements(
    timeline: Timeline, steady: Bubbles, from_cold: Bubbles, prefix: str = "", scale: Scale | None = None
) -> Iterator[str]:
    """Yield the data that the charts of a program are drawn from, as elements whose ids begin with `prefix`."""
    # two reports on one page have elements of the same names, told apart by a prefix
    for element in _data(timeline, step_views(timeline, steady, from_cold), scale):
        yield element.replace(' id="', f' id="{prefix}', 1)


def _data(timeline: Timeline, views: tuple[StepView, StepView], scale: Scale | None) -> Iterator[str]:
    stages = timeline.program.stages
    columns = timeline.columns
    keywords = sorted({columns.strings[number] for number in np.unique(columns.instructions[:, KEYWORD])})
    facts = {
        "engines": [engine.value for engine in ENGINES],
        "keywords": keywords,
        "kinds": [kind.value for kind in KINDS],
        "held": [kind.value for kind in KINDS if kind in {form.kind for form in columns.forms}],
        "causes": [cause.value for cause in Cause],
        "stages": [
            {
                "memories": [
                    {
                        "name": home.value,
                        "arena": stage.bytes_in(home),
                        "capacity": timeline.program.info.capacity_of(home),
                        **(
                            {}
                            if scale is None
                            else dict(zip(("most", "top"), scale.bytes[index, home.value], strict=True))
                        ),
                    }
                    for home in homes_of(stage)
                ],
                "peakLive": stage.peak_live_bytes,
                "lanes": [bool(length) for length in stage.lengths],
            }
            for index, stage in enumerate(stages)
        ],
        **({} if scale is None else {"seconds": scale.seconds}),
        "views": {view.name: {"start": view.start, "end": view.end} for view in views},
    }
    yield facts_element(facts)
    yield from op_elements(timeline, keywords)
    for view in views:
        yield from view.elements()
    for stage in range(len(stages)):
        yield from tensor_elements(timeline, stage)
        for home in homes_of(stages[stage]):
            # the intervals are those of all simulated steps, so both views take their rows from one computation
            intervals = live_intervals(timeline, stage, home)
            for view in views:
                yield view.interval_element(stage, home, intervals)


def facts_element(facts: dict[str, Any]) -> str:
    """Return the element in which a page's script finds its facts."""
    # "</script>" in a name would end the element; in JSON the escape means the same character
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="facts">{text}</script>\n'


def homes_of(stage: ProgramStage) -> list[Home]:
    """Return the memories in which a stage has anything, DDR first."""
    return [home for home in Home if home is Home.DDR or stage.bytes_in(home)]


def page_file(name: str, package: str = __package__ or "") -> str:
    """Return the text of a file of this folder, or of another package."""
    return (resources.files(package) / name).read_text(encoding="utf-8")
