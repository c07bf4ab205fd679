"""The page that compares a program with a baseline: differences, then both charts on common axes, in one file.

Wherever a change stands, it is the program's figure minus the baseline's, and the page says so; in words it is "more"
or "less" than the baseline. In a narrow window each row of a comparison becomes a block whose values carry their names:

    step                                step
      a.rtx     b.rtx    change           a.rtx              10.15 ms
      10.15 ms  13.30 ms  ...             b.rtx (baseline)   13.30 ms
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.report import page_tables
from ratrain.ratrainc.report.report_page import (
    FINDER,
    SCRIPT,
    SCRIPTS,
    Scale,
    data_elements,
    homes_of,
    page_file,
    split_page,
    step_views,
    write_parts,
)
from ratrain.targets.simulator.bubbles import Bubbles

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.module_diff import StageDiff
    from ratrain.ratrainc.report.program_differences import Differences, Pair, Side

_LISTED = 200
"""Most ops or tensors that are listed for a stage and kind of difference; counts include all."""
_PREFIXES = ("a-", "b-")
_FIGURES = {
    "step_seconds": "step",
    "makespan_seconds": "first step, from cold",
    "tokens_per_second": "tokens/s",
    "mfu": "model-flops utilisation, %",
    "peak_bytes": "peak live",
    "arena_bytes": "arena",
    "busy_seconds": "compute busy",
    "idle_seconds": "idle",
    "exposed_tail_seconds": "exposed tail",
    "ops": "ops",
    "tensors": "tensors",
}
"""Names of figures as shown."""


def write_comparison(program: Side, baseline: Side, differences: Differences, path: str) -> int:
    """Write the page, atomically; return its bytes. Raises `DiagnosticError` RT002 if the file cannot be written."""
    return write_parts(_parts(program, baseline, differences), path)


def _parts(program: Side, baseline: Side, found: Differences) -> Iterator[str]:
    sides = (program, baseline)
    title = f"{program.name} compared with {baseline.name} (baseline)"
    head, tail = split_page(title)
    yield head
    yield f'<h1>{escape(title)}</h1>\n<p class="verdict">{escape(found.verdict)}.</p>\n'
    yield (
        f"<p>{escape(_sign(found))} All times are simulated, none is measured. Both are drawn on the same axes of "
        "seconds and bytes: what is chosen, zoomed or searched in one is in the other too.</p>\n"
    )
    yield _first(found)
    # controls are common to both charts; each chart has a finder of its own
    yield f"{page_file('controls.html').replace(FINDER, '')}"
    yield '<div class="sides">\n'
    for name, prefix in zip(_heads(found), _PREFIXES, strict=True):
        yield (
            f'<section id="{prefix}charts" aria-label="Charts of {escape(name)}">\n<h2 '
            f'id="{prefix}name">{escape(name)}</h2>\n'
        )
        yield _prefixed(page_file("finder.html") + page_file("charts.html"), prefix) + "</section>\n"
    yield "</div>\n"
    yield _stage_tables(found)
    yield _op_tables(found)
    for side, name in zip(sides, _heads(found), strict=True):
        bubbles = page_tables.bubble_tables(side.program, side.bubbles)
        yield f"<details><summary>Stages and bubbles of {escape(name)}</summary>\n"
        yield page_tables.stage_table(side.timeline, side.figures) + bubbles + "</details>\n"
    # Both charts run the same scripts. Each copy is inside a function, so that its variables are its own; prefixes keep
    # the ids of elements apart, and each copy gets the other as a peer, whose choices it follows.
    cold = [Bubbles(side.timeline, cold=True) for side in sides]
    scale = _scale(sides, cold)
    for side, from_cold, prefix in zip(sides, cold, _PREFIXES, strict=True):
        yield from data_elements(side.timeline, side.bubbles, from_cold, prefix, scale)
    body = "".join(map(page_file, (*SCRIPTS, "following.js")))
    yield tail.replace(SCRIPT, f"function report(PREFIX, PEERS, ME) {{\n{body}}}\n" + _BEGIN)


_BEGIN = """const REPORTS = [{}, {}];
report("a-", [REPORTS[1]], REPORTS[0]);
report("b-", [REPORTS[0]], REPORTS[1]);
"""


def _prefixed(html: str, prefix: str) -> str:
    """Prefix the ids of a part of the page, so that it belongs to one of the two reports."""
    return re.sub(r' (id|aria-controls)="', rf' \1="{prefix}', html)


def _scale(sides: Sequence[Side], cold: Sequence[Bubbles]) -> Scale:
    """Return the common axes: the longer of the two steps in each view, the larger of each stage's two memories."""
    views = [step_views(side.timeline, side.bubbles, bubbles) for side, bubbles in zip(sides, cold, strict=True)]
    seconds = {view.name: max(of[index].end - of[index].start for of in views) for index, view in enumerate(views[0])}
    arenas: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for side in sides:
        for index, stage in enumerate(side.program.stages):
            for home in homes_of(stage):
                sizes = stage.bytes_in(home), side.program.info.capacity_of(home)
                arenas.setdefault((index, home.value), []).append(sizes)
    return Scale(seconds, {place: _limits(sizes) for place, sizes in arenas.items()})


def _limits(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the largest arena, and the top of the drawing: a capacity is drawn if it is under 1.5 times that arena."""
    most = max(arena for arena, _ in sizes)
    # a capacity far above the arena would leave the tensors too small to see
    return most, max([most, *(capacity for _, capacity in sizes if capacity < 1.5 * most)])


def _heads(found: Differences) -> tuple[str, str]:
    """Return the names of program and baseline as they stand over columns and charts."""
    return found.names[0], f"{found.names[1]} (baseline)"


def _columns(found: Differences) -> tuple[str, str, str]:
    """Return the heads of the columns of values: the program, the baseline, and the change from the baseline."""
    return *_heads(found), f"{found.names[0]} minus baseline"


def _sign(found: Differences) -> str:
    """Say what a change is, and what its sign means."""
    program, baseline = found.names
    return (
        f"{baseline} is the baseline. Every change is {program} minus {baseline}: more (+) means that {program} has "
        f"more of it than the baseline, less (-) that it has less."
    )


def _first(found: Differences) -> str:
    """Return the summary of differences as HTML."""
    cannot = "".join(f'<p class="problem">{escape(words)}.</p>\n' for words in found.cannot)
    named = [(_whole(key), pair, _form(key)) for key, pair in found.figures.items()]
    figures = _pair_table("Figures of the steady step (seconds are simulated)", found, named)
    causes = [(cause, pair, seconds_text) for cause, pair in found.causes.items()]
    causes.sort(key=lambda row: -abs(row[1].change or 0.0))
    idle = _pair_table("Idle seconds of all compute engines, by cause", found, causes)
    settings = [[key, own or "-", other or "-"] for key, (own, other) in found.settings.items()]
    heads = ("setting", *_heads(found))
    told = page_tables.table("Settings that differ", heads, settings, words=True, stacks=True) if settings else ""
    ops = "".join(f"<li>{escape(_in_short(stage))}</li>\n" for stage in found.ops if not stage.is_empty)
    same = "<p>Ops, their order, tensors and addresses are the same.</p>\n" if found.ops and not ops else ""
    from_baseline = f"<p>Ops and tensors of {escape(found.names[0])}, compared with the baseline:</p>\n"
    listed = f'{from_baseline}<ul class="ops">\n{ops}</ul>\n' if ops else same
    return f'<h2>What differs</h2>\n{cannot}<div class="first">\n{figures}<div>{idle}{listed}{told}</div></div>\n'


def _whole(key: str) -> str:
    """Return the name of a figure of the whole program."""
    return _FIGURES[key] + (", largest of the stages" if key.endswith("bytes") else "")


def _form(key: str) -> Callable[[float], str]:
    """Return the function that formats a figure."""
    if key.endswith("seconds") or key.startswith("idle: "):
        return seconds_text
    if key.endswith("bytes"):
        return lambda count: size_text(int(count))
    return (lambda share: f"{100 * share:.1f}") if key == "mfu" else (lambda count: f"{count:,.0f}")


def _pair_table(caption: str, found: Differences, rows: Sequence[tuple[str, Pair, Callable[[float], str]]]) -> str:
    cells = [
        [name, *("-" if value is None else form(value) for value in (pair.program, pair.baseline)), _change(pair, form)]
        for name, pair, form in rows
    ]
    return page_tables.table(caption, ("", *_columns(found)), cells, stacks=True)


def _change(pair: Pair, form: Callable[[float], str]) -> str:
    """Say how much more or less than the baseline the program has, with its share of the baseline."""
    if pair.change is None or pair.baseline is None:
        return "-"
    if pair.change == 0:
        return "same"
    percent = "" if pair.share is None else f"{100 * pair.share:+.1f}"
    share = f" ({percent} %)" if percent.strip("+-.0") else ""
    return f"{form(abs(pair.change))} {'more' if pair.change > 0 else 'less'}{share}"


def _in_short(stage: StageDiff) -> str:
    """Count the ops and tensors of a stage that differ, in words."""
    counts = [
        (len(stage.added), "ops added"),
        (len(stage.dropped), "ops removed"),
        (len(stage.moved), "ops moved"),
        (len(stage.changed), "ops with other operands"),
        (len(stage.new_tensors) - len(stage.resized), "tensors new"),
        (len(stage.gone_tensors) - len(stage.resized), "tensors gone"),
        (sum(item.after > item.before for item in stage.resized), "tensors bigger"),
        (sum(item.after < item.before for item in stage.resized), "tensors smaller"),
        (stage.readdressed, "tensors at another address"),
        (len(stage.released), "tensors released elsewhere"),
    ]
    return f"@{stage.stage}: " + ", ".join(f"{count:,} {words}" for count, words in counts if count)


def _stage_tables(found: Differences) -> str:
    rows: list[tuple[str, Pair, Callable[[float], str]]] = []
    for index, stage in enumerate(found.stages):
        for key, pair in stage.items():
            if pair.change != 0:
                form = _form(key)
                rows.append((f"@{index} {_FIGURES.get(key, key)}", pair, form))
    if not rows:
        return "<h2>Stages</h2>\n<p>All figures of all stages are the same.</p>\n"
    return "<h2>Stages</h2>\n" + _pair_table(
        "What differs of each stage in the steady step (seconds are simulated)", found, rows
    )


def _op_tables(found: Differences) -> str:
    parts = []
    for stage in found.ops:
        if stage.is_empty:
            continue
        rows = [
            *_some("op added", stage.added),
            *_some("op removed", stage.dropped),
            *_some("op moved", [f"{move.op}: from place {move.before} to {move.after}" for move in stage.moved]),
            *_some("other operands", stage.changed),
            *_some(
                "tensor resized",
                [f"%{item.tensor}: from {item.before:,} to {item.after:,} bytes" for item in stage.resized],
            ),
            *_some("tensor new", stage.new_tensors),
            *_some("tensor gone", stage.gone_tensors),
        ]
        caption = f"Stage @{stage.stage}, from the baseline; places are counted in list order, without releases"
        listed = page_tables.table(caption, ("what", "which"), rows, words=True, stacks=True)
        parts.append(f"<details><summary>{escape(_in_short(stage))}</summary>\n{listed}</details>\n")
    return "<h2>Ops and tensors</h2>\n" + "".join(parts) if parts else ""


def _some(what: str, items: Sequence[str]) -> list[list[str]]:
    rows = [[what, item] for item in items[:_LISTED]]
    return rows + ([[what, f"... and {len(items) - _LISTED:,} more"]] if len(items) > _LISTED else [])


def in_words(found: Differences) -> Iterator[str]:
    """Yield the differences, one a line."""
    program, baseline = found.names
    yield f"{program} compared with {baseline} (baseline); changes are {program} minus {baseline}, seconds simulated"
    yield found.verdict
    lines = list(_lines(found))
    yield from lines or ["nothing differs"]


def _lines(found: Differences) -> Iterator[str]:
    yield from (f"cannot be compared: {words}" for words in found.cannot)
    for key, (own, other) in found.settings.items():
        yield f"{key}: {own or '-'}; baseline: {other or '-'}"
    for key, pair in found.figures.items():
        yield from _line(_whole(key), pair, _form(key))
    for cause, pair in sorted(found.causes.items(), key=lambda item: -abs(item[1].change or 0.0)):
        yield from _line(f"idle, {cause}", pair, seconds_text)
    yield from (f"from the baseline, {_in_short(stage)}" for stage in found.ops if not stage.is_empty)


def _line(name: str, pair: Pair, form: Callable[[float], str]) -> Iterator[str]:
    if pair.program is not None and pair.baseline is not None and pair.change:
        yield f"{name}: {form(pair.program)}, baseline {form(pair.baseline)}: {_change(pair, form)}"
