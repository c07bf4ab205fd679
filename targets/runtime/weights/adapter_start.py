"""First values of adapters, beside weights that know none: B is zero, so the first step computes the model itself.

A is uniform within 1 / sqrt(inputs), as PEFT draws it (huggingface/peft, `LoraLayer.reset_lora_parameters`: Kaiming
uniform with a = sqrt(5)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.model.adapters import FIRST, is_adapter
from ratrain.targets.runtime.arena.tensor_file import Float32, cut
from ratrain.targets.runtime.weights.weight_source import WeightSource
from ratrain.targets.runtime.weights.weights import named_parameters, named_stream

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def with_adapters(source: WeightSource, model: ModelConfig, seed: int) -> WeightSource:
    """Return a source that has the adapters of `model` too, at their first values; the source itself if it has none."""
    if not model.training.adapts:
        return source
    return _WithAdapters(named_parameters(model), source, seed)


@frozen(eq=False)
class _WithAdapters(WeightSource):
    """Weights of a source, and adapters at their first values."""

    base: WeightSource
    seed: int

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values."""
        parameter = self.parameters[name]
        if not is_adapter(parameter.weight):
            yield from self.base.pieces(name, start, stop)
            return
        if not parameter.weight.endswith(FIRST):
            for low, high in cut(start, stop):
                yield np.zeros(high - low, np.float32)
            return
        bound = np.float32(1 / math.sqrt(parameter.shape[1]))
        generator = named_stream(self.seed, name)
        for low, high in cut(0, start):  # draw and drop, as for other weights: pieces are parts of one stream
            generator.random(high - low, np.float32)
        for low, high in cut(start, stop):
            yield (2 * generator.random(high - low, np.float32) - 1) * bound
