"""Cuts of a sequence into slices: even in length or in work.

Later tokens attend to more keys, so they cost more. `model/layer_cuts.py` cuts layers into stages.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.model_flops import visible_pairs_of_layers
from ratrain.ratrain_ir.config.plan_keys import CONTEXT_LAYOUTS, ZIGZAG, runs_of_context

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.model_config import ModelConfig

_EVEN_WORK = re.compile(r"even-work ([0-9]{1,6})", re.ASCII)


def even_lengths(seq_len: int, count: int, unit: int = 1) -> tuple[int, ...]:
    """Return the lengths of `count` slices of a sequence, multiples of `unit` tokens, as `seq_len` must be.

    They differ by at most one unit; longer ones come first.
    """
    length, longer = divmod(seq_len // unit, count)
    return tuple(unit * (length + (number < longer)) for number in range(count))


def even_work_lengths(model: ModelConfig, seq_len: int, count: int, unit: int = 1) -> tuple[int, ...]:
    """Return the lengths of `count` slices of a sequence that take about equal floating-point operations in a layer.

    Queries of a slice attend to the keys of all earlier ones, so later slices are shorter. Each has at least one unit:
    the tokens that lengths, and `seq_len`, must be a multiple of, so that context ranks can share them out.
    """

    def work(tokens: int) -> float:
        pairs = sum(visible_pairs_of_layers(model, tokens)) / model.layers
        return 2.0 * (model.matrix_elements / model.layers) * tokens + 4.0 * model.q_size * pairs

    # `work` is monotone in the end of a slice, so each end is bisected: the first one with its share of the whole.
    whole = work(seq_len)
    ends = [0]
    for number in range(1, count):
        places = range(ends[-1] + unit, seq_len - unit * (count - number), unit)
        ends.append(places.start + unit * bisect_left(places, number * whole / count, key=work))
    return tuple(stop - start for start, stop in zip(ends, [*ends[1:], seq_len], strict=True))


def with_slices(values: Mapping[str, object], model: ModelConfig | None) -> dict[str, Any]:
    """Return a plan file's keys with `slices` as lengths, if the file gives a number: `4`, or `"even-work 4"`.

    Context ranks can share out each of them, if they can share out the sequence. Other values stay for the reader of
    the key to refuse. Without a model, so does even work.
    """
    said, seq_len = values.get("slices"), values.get("seq_len")
    match = _EVEN_WORK.fullmatch(said) if isinstance(said, str) else None
    count = int(match[1]) if match else said
    unit = _shared_out_by(values)
    if type(count) is not int or type(seq_len) is not int or not 1 <= count * unit <= seq_len:
        return dict(values)
    if match is None:
        return {**values, "slices": even_lengths(seq_len, count, unit)}
    return dict(values) if model is None else {**values, "slices": even_work_lengths(model, seq_len, count, unit)}


def _shared_out_by(values: Mapping[str, object]) -> int:
    """Return the runs that the context ranks of a plan file cut a slice into; 1 if its sequence has no such runs."""
    cp, layout, seq_len = values.get("cp", 1), values.get("context_layout", ZIGZAG), values.get("seq_len")
    if type(cp) is not int or type(seq_len) is not int or not 1 <= cp <= seq_len or layout not in CONTEXT_LAYOUTS:
        return 1
    unit = runs_of_context(cp, str(layout))
    return 1 if seq_len % unit else unit
