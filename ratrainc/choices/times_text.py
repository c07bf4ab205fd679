"""Times of ops as text: four numbers, or a small TOML table with `KIND = TIME` a line."""

from __future__ import annotations

from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.support.files import read_text
from ratrain.ratrain_ir.support.text import Source, toml_places
from ratrain.ratrain_ir.support.toml_text import toml_data
from ratrain.targets.simulator.given_times import KINDS, GivenTimes

MOST_TIME = 1e15
"""Largest time of an op; sums over a step then stay far from the largest float."""
_TEXTBOOK_TIMES = 4


def load_times(path: str) -> GivenTimes:
    """Load the times of a TOML file.

    Raises `DiagnosticError` RT002 if it cannot be read or is not TOML. Raises RT005 with every unknown kind of op and
    every value that is not a time, and if both a whole backward and one of its halves are given, or no time is above 0.
    """
    source = Source(path, read_text(path, "table of op times"))
    values = toml_data(source, "RT002")
    report = Report(toml_places(source))
    reader = FieldReader(values, report, "RT005")
    reader.refuse_unknown(KINDS)
    given = [kind for kind in KINDS if kind in values]
    times = {kind: reader.number(kind, _is_time, f"a number from 0 to {MOST_TIME:g}") for kind in given}
    halves = [half for half in ("backward_input", "backward_weight") if half in times]
    if "backward" in times and halves:
        text = f"'backward' is the time of both halves, and '{halves[0]}' is given too"
        reader.contradiction("RT005", "backward", text, help="give the halves alone: a whole backward takes both")
    if reader.good(*given) and not any(times.values()):
        report.error("RT005", "", "no kind of op takes any time", help="write, for example, forward = 1.0")
    report.check()
    return GivenTimes(times)


def textbook_times(text: str) -> GivenTimes:
    """Parse `T_F,T_B,T_W,T_comm` (see `GivenTimes.textbook`). Raises ValueError with the reason."""
    words = text.split(",")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ValueError(f"'{text}' is not T_F,T_B,T_W,T_comm in numbers") from None
    if len(numbers) != _TEXTBOOK_TIMES:
        raise ValueError(f"'{text}' has {len(numbers)} of the four numbers T_F,T_B,T_W,T_comm")
    if not all(map(_is_time, numbers)) or not any(numbers[:3]):
        raise ValueError(f"'{text}': times are numbers from 0 to {MOST_TIME:g}, and not all of T_F, T_B, T_W are 0")
    return GivenTimes.textbook(*numbers)


def _is_time(value: float) -> bool:
    return 0 <= value <= MOST_TIME
