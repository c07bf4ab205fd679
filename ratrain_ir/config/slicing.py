"""Cuts of a sequence into slices, even in length or in work. Later tokens attend to more keys, so they cost more."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.model_flops import visible_pairs_of_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.model_config import ModelConfig

_EVEN_WORK = re.compile(r"even-work ([0-9]{1,6})", re.ASCII)


def even_lengths(seq_len: int, count: int) -> tuple[int, ...]:
    """Return the lengths of `count` slices of a sequence. They differ by at most one token; longer ones come first."""
    length, longer = divmod(seq_len, count)
    return tuple(length + (number < longer) for number in range(count))


def even_work_lengths(model: ModelConfig, seq_len: int, count: int) -> tuple[int, ...]:
    """Return the lengths of `count` slices of a sequence that take about equal floating-point operations in a layer.

    Queries of a slice attend to the keys of all earlier ones, so later slices are shorter. Each has at least one token.
    """

    def work(tokens: int) -> float:
        pairs = sum(visible_pairs_of_layers(model, tokens)) / model.layers
        return 2.0 * model.matrix_elements_per_layer * tokens + 4.0 * model.q_size * pairs

    # `work` is monotone in the end of a slice, so each end is bisected: the first one with its share of the whole.
    whole = work(seq_len)
    ends = [0]
    for number in range(1, count):
        least, most = ends[-1] + 1, seq_len - (count - number)
        ends.append(least + bisect_left(range(least, most), number * whole / count, key=work))
    return tuple(stop - start for start, stop in zip(ends, [*ends[1:], seq_len], strict=True))


def with_slices(values: Mapping[str, object], model: ModelConfig | None) -> dict[str, Any]:
    """Return a plan file's keys with `slices` as lengths, if the file gives a number: `4`, or `"even-work 4"`.

    Other values stay for the reader of the key to refuse. Without a model, so does even work.
    """
    said, seq_len = values.get("slices"), values.get("seq_len")
    match = _EVEN_WORK.fullmatch(said) if isinstance(said, str) else None
    count = int(match[1]) if match else said
    if type(count) is not int or type(seq_len) is not int or not 1 <= count <= seq_len:
        return dict(values)
    if match is None:
        return {**values, "slices": even_lengths(seq_len, count)}
    return dict(values) if model is None else {**values, "slices": even_work_lengths(model, seq_len, count)}
