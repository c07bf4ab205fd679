"""The page: charts and tables of runs, in one file that needs no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.files import replacing
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import size_text
from ratrain.ratrainc.report.page_tables import table
from ratrain.ratrainc.report.report_page import SCRIPT, facts_element, page_file, scripts

if TYPE_CHECKING:
    from ratrain.ratrainc.watch.reading import GrowingLog

MARK = "ratrainc watch"
"""Text by which a page of this command is recognised."""
_HINT = """<p class="hint">Drag over a chart to zoom in; a double click shows all. Keys on a chart: + - and arrows, 0
shows all. With many steps, a line is the mean of neighbouring steps, and the shade behind it their range.</p>
"""
_LOOK = """<form id="look" class="look" aria-label="How lines are drawn" hidden="hidden">
<span class="choice"><label for="smooth">smoothing</label> <input type="range" id="smooth" min="0" max="0.99"
step="0.01" value="0" aria-describedby="look-hint" /> <output id="smooth-value" for="smooth">none</output></span>
<span class="choice"><input type="checkbox" role="switch" id="log" aria-describedby="look-hint" />
<label for="log">log axis</label></span>
<span id="look-hint" class="hint">The smooth line is a moving average, the raw one stays faint behind it; loss scale and
memory stay as they are. A log axis is for charts whose values are all above zero. The address keeps both.</span>
</form>
"""
_MOST_POINTS = 800
_SLOW = 1.2
"""Factor over the median of its stage from which a rank is slow in a step."""

CHARTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("loss", "Loss, nats a token", "number", ("loss", "eval_loss")),
    ("speed", "Tokens a second", "number", ("tokens_per_second",)),
    ("norm", "Gradient norm, before clipping", "number", ("gradient_norm",)),
    ("scale", "Loss scale", "log", ("loss_scale",)),
    ("memory", "Memory: used against planned", "bytes", ("resident_bytes", "planned_bytes")),
    ("ranks", "Slow ranks: the slowest of a stage, in times its median", "number", ("slowest",)),
    ("experts", "Experts: rows of the busiest, in times the mean", "number", ("busiest_expert",)),
    ("rate", "Learning rate", "number", ("learning_rate",)),
)
"""Charts: name, title, format of values, and the series that are drawn."""
WORDS = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "tokens_per_second": "tokens a second",
    "gradient_norm": "gradient norm",
    "loss_scale": "loss scale",
    "resident_bytes": "resident",
    "planned_bytes": "planned",
    "slowest": "slowest rank",
    "busiest_expert": "busiest expert",
    "learning_rate": "learning rate",
}
_WHY = {
    "eval_loss": "'run --eval-every N' evaluates",
    "gradient_norm": "null in every line",
    "slowest": "ranks on a device do not tell it, nor do logs of older versions; a stage of one rank has none "
    "to compare with",
    "resident_bytes": "systems other than Linux and devices do not tell it, nor do logs of older versions",
    "busiest_expert": "models without experts have none, and devices do not tell it",
    "planned_bytes": "systems other than Linux and devices do not tell it, nor do logs of older versions",
}


def write_watch_page(path: str, logs: Sequence[GrowingLog], *, reload_seconds: float | None) -> int:
    """Write the page of some logs, atomically; return its bytes.

    It reloads itself every `reload_seconds`, or never if None. Raises `DiagnosticError` RT002 if the file cannot be
    written.
    """
    text = _page(logs, reload_seconds).encode()
    with replacing(path) as stream:
        stream.write(text)
    return len(text)


def _page(logs: Sequence[GrowingLog], reload_seconds: float | None) -> str:
    names = _names(logs)
    title = " and ".join(names) if len(names) < 4 else f"{len(names)} runs"
    facts = {
        "reload": reload_seconds,
        "words": WORDS,
        "charts": [{"name": name, "title": words, "form": form, "series": keys} for name, words, form, keys in CHARTS],
        "runs": [{"name": name, "series": _series(log)} for name, log in zip(names, logs, strict=True)],
    }
    state = "a run goes on: this page is written again as the log grows" if reload_seconds else "no run writes to it"
    body = [
        f'<h1>{escape(title)}</h1>\n<p id="state">{escape(state)}</p>\n',
        *(f'<p class="problem">{escape(line)}</p>\n' for line in problems(names, logs)),
        f'<dl class="figures">{_figures(logs[0])}</dl>\n' if len(logs) == 1 else "",
        _HINT,
        _LOOK,
        (
            "<noscript><p>The charts need JavaScript. The tables below hold the last "
            'figures.</p></noscript>\n<section id="charts" aria-label="Charts">\n'
        ),
        *(_figure(name, words, keys, names, logs) for name, words, _, keys in CHARTS),
        "</section>\n<h2>Runs</h2>\n",
        table("The last step of each run", _HEAD, [_row(name, log) for name, log in zip(names, logs, strict=True)]),
        *(_slow_ranks(name, log) for name, log in zip(names, logs, strict=True)),
        facts_element(facts),
    ]
    page = page_file("report.html").replace("<!--ratrain-title-->", escape(title))
    page = page.replace(
        '<meta charset="utf-8" />', f'<meta charset="utf-8" />\n<meta name="generator" content="{MARK}" />'
    )
    page = page.replace("/*ratrain-style*/", page_file("report.css") + page_file("watch.css", __package__))
    script = scripts(["common.js"]) + page_file("watch.js", __package__)
    before, after = page.replace(SCRIPT, script).split("<!--ratrain-body-->")
    return before + "".join(body) + after


def _names(logs: Sequence[GrowingLog]) -> list[str]:
    """Return the shortest ends of the logs' paths that tell them apart."""
    parts = [Path(log.path).parts for log in logs]
    length = next((n for n in range(1, 99) if len({part[-n:] for part in parts}) == len(parts)), 99)
    return ["/".join(part[-length:]) for part in parts]


def problems(names: Sequence[str], logs: Sequence[GrowingLog]) -> list[str]:
    """Return a sentence for each thing that is wrong with the logs."""
    found = []
    for name, log in zip(names, logs, strict=True):
        if log.bad_lines:
            found.append(
                f"{name}: {len(log.bad_lines)} lines cannot be read and are left out, the first is line "
                f"{log.bad_lines[0]}"
            )
        if log.half_line and not log.is_growing:
            found.append(f"{name}: the last line is half of one, as a crash leaves it, and is left out")
        lost = [step for step, loss in zip(log.steps, log.columns["loss"], strict=True) if math.isnan(loss)]
        if lost:
            found.append(f"{name}: {number_of(len(lost), 'step')} without a finite loss, the first is step {lost[0]}")
    return found


def lacking(log: GrowingLog) -> list[str]:
    """Return the series of the page for which a log has no number."""
    return [key for _, _, _, keys in CHARTS for key in keys if not _values(log, key).size]


def _ratios(log: GrowingLog) -> NDArray[np.float64]:
    """Return, for each step, the worst ratio of a stage's slowest rank to its median; nan without several ranks."""
    found = np.full(len(log.steps), np.nan)
    for row, stages in enumerate(log.ranks[1:], 1):  # the first step compiles or loads kernels
        several = [most / median for least, median, most, _ in stages if median > 0 and most > least]
        if several:
            found[row] = max(several)
    return found


def _column(log: GrowingLog, key: str) -> NDArray[np.float64]:
    return _ratios(log) if key == "slowest" else np.array(log.columns[key], np.float64)


def _values(log: GrowingLog, key: str) -> NDArray[np.float64]:
    column = _column(log, key)
    return column[np.isfinite(column)]


def _series(log: GrowingLog) -> dict[str, list[list[float]]]:
    """Return the points of each series: last step, mean, least and most of a run of neighbouring steps."""
    steps = np.array(log.steps, np.float64)
    found = {}
    for _, _, _, keys in CHARTS:
        for key in keys:
            column = _column(log, key)
            known = np.isfinite(column)
            found[key] = _points(steps[known], column[known])
    return found


def _points(steps: NDArray[np.float64], values: NDArray[np.float64]) -> list[list[float]]:
    count = min(len(steps), _MOST_POINTS)
    points = []
    for part, where in zip(np.array_split(values, count or 1), np.array_split(steps, count or 1), strict=True):
        if len(part):
            points.append(
                [round(float(where[-1])), *(float(f"{number:.6g}") for number in (part.mean(), part.min(), part.max()))]
            )
    return points


def _figure(name: str, title: str, keys: Sequence[str], names: Sequence[str], logs: Sequence[GrowingLog]) -> str:
    missing = []
    for key in keys:
        without = [own for own, log in zip(names, logs, strict=True) if not _values(log, key).size]
        if without:
            whose = "the log has" if len(logs) == 1 else f"{', '.join(without)}:"
            why = f" ({_WHY[key]})" if key in _WHY else ""
            missing.append(f"{whose} no {WORDS[key]}{why}")
    notes = "".join(f'<p class="lacks">{escape(line)}</p>\n' for line in missing)
    return (
        f'<figure id="{name}"><figcaption>{escape(title)} <span class="axis"></span> '
        '<ul class="legend"></ul></figcaption>\n'
        f'<div class="chart" tabindex="0" role="img" aria-label="{escape(title)} by step"></div>\n{notes}</figure>\n'
    )


_HEAD = (
    "run",
    "steps",
    "last step",
    "loss",
    "held-out loss",
    "tokens/s",
    "gradient norm",
    "loss scale",
    "skipped",
    "resident",
    "planned",
)


def _row(name: str, log: GrowingLog) -> list[str]:
    """Return the last figures of a run; a dash for a figure that it does not have."""
    last = {key: (float(_values(log, key)[-1]) if _values(log, key).size else None) for key in log.columns}

    def word(key: str, form: str) -> str:
        value = last[key]
        return "-" if value is None else format(value, form)

    sizes = [
        ("-" if last[key] is None else size_text(int(last[key] or 0))) for key in ("resident_bytes", "planned_bytes")
    ]
    skipped = int(np.nansum(_column(log, "skipped_blocks")))
    return [
        name,
        f"{len(log.steps):,}",
        str(log.steps[-1]) if log.steps else "-",
        word("loss", ".4f"),
        word("eval_loss", ".4f"),
        word("tokens_per_second", ",.0f"),
        word("gradient_norm", ".3g"),
        word("loss_scale", "g"),
        str(skipped),
        *sizes,
    ]


def _figures(log: GrowingLog) -> str:
    pairs = zip(_HEAD[1:], _row("", log)[1:], strict=True)
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)


def slow_ranks(log: GrowingLog) -> list[tuple[str, int, float]]:
    """Return the ranks that took over 1.2 times the median of their stage, as (rank, such steps, worst ratio)."""
    steps, worst = Counter[str](), dict[str, float]()
    for stages in log.ranks[1:]:
        for least, median, most, rank in stages:
            if most > least and median > 0 and most > _SLOW * median:
                steps[rank] += 1
                worst[rank] = max(worst.get(rank, 0.0), most / median)
    return [(rank, count, worst[rank]) for rank, count in steps.most_common()]


def _slow_ranks(name: str, log: GrowingLog) -> str:
    found = slow_ranks(log)
    if not found:
        return ""
    rows = [[rank, str(count), f"{worst:.2f}"] for rank, count, worst in found[:64]]
    return table(
        f"{name}: ranks that computed more than {_SLOW} times as long as the median of their stage",
        ("rank", "steps", "at worst, times"),
        rows,
    )


def summary(log: GrowingLog) -> dict[str, Any]:
    """Return the facts about a log as `--json` prints them."""
    values = {key: _values(log, key) for key in log.columns}
    return {
        "log": log.path,
        "steps": len(log.steps),
        "last_step": log.steps[-1] if log.steps else None,
        "last": {key: float(found[-1]) if found.size else None for key, found in values.items()},
        "lacks": lacking(log),
        "bad_lines": len(log.bad_lines),
        "slow_ranks": [{"rank": rank, "steps": count, "worst": worst} for rank, count, worst in slow_ranks(log)],
    }
