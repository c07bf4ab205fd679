"""Adapters beside the weights of their model: their first values, and the weights with adapters merged into them.

B is zero at first, so the first step computes the model itself. A is uniform within 1 / sqrt(inputs), as PEFT draws it
(huggingface/peft, `LoraLayer.reset_lora_parameters`: Kaiming uniform with a = sqrt(5)). Merged weights are W + scale *
B A, in f32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.model.adapters import FIRST, SECOND, adapter_module, is_adapter, is_stack, stems_of_first
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrain_ir.support.files import is_directory, path_errors
from ratrain.targets.runtime.arena.tensor_file import PIECE_ELEMENTS, Float32, cut
from ratrain.targets.runtime.weights.weight_source import WeightSource
from ratrain.targets.runtime.weights.weights import named_parameters, named_stream

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def with_adapters(base: WeightSource, model: ModelConfig, seed: int, given: WeightSource | None = None) -> WeightSource:
    """Return a source of weights that has the adapters of `model` too; `base` itself if it has none.

    Adapters come from `given`, or are drawn anew.
    """
    if not model.training.adapts:
        return base
    adapters = given if given is not None else _NewAdapters(named_parameters(model), seed)
    return _Beside(named_parameters(model), base, adapters, whole_of_adapters=given is not None)


@frozen(eq=False)
class _Beside(WeightSource):
    """Weights of one source, and adapters of another, with what trains whole beside them if that source has it."""

    base: WeightSource
    adapters: WeightSource
    whole_of_adapters: bool

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values."""
        parameter = self.parameters[name]
        of_adapters = parameter.trains if self.whole_of_adapters else is_adapter(parameter.weight)
        source = self.adapters if of_adapters else self.base
        return source.pieces(name, start, stop)


@frozen(eq=False)
class _NewAdapters(WeightSource):
    """Adapters at their first values."""

    seed: int

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values."""
        parameter = self.parameters[name]
        if not parameter.weight.endswith(FIRST):
            for low, high in cut(start, stop):
                yield np.zeros(high - low, np.float32)
            return
        bound = np.float32(1 / math.sqrt(parameter.shape[-1]))
        generator = named_stream(self.seed, name)
        for low, high in cut(0, start):  # draw and drop, as for other weights: pieces are parts of one stream
            generator.random(high - low, np.float32)
        for low, high in cut(start, stop):
            yield (2 * generator.random(high - low, np.float32) - 1) * bound


def merged(base: WeightSource, model: ModelConfig, adapters: WeightSource) -> WeightSource:
    """Return the weights of `base` with the adapters of `model` merged into them; the result has no adapters."""
    pairs: dict[str, tuple[str, str, float]] = {}
    for owner in block_chain(model):
        own = {each.weight: each.name for each in parameters(model, owner)}
        for stem, first in stems_of_first(own).items():
            scale = model.training.scale_of(adapter_module(model, owner.kind, owner.layer, stem))
            pair = own[f"{first}{FIRST}"], own[f"{stem}{SECOND}"], scale
            pairs[own[stem if is_stack(stem) else f"{stem}_proj"]] = pair
    return _Merged(base.parameters, base, adapters, pairs)


def _product_rows(b: Float32, a: Float32, start: int, stop: int) -> Float32:
    """Return rows [start, stop) of B A; of stacks of matrices, the rows of all products one below the other."""
    if b.ndim == 2:
        return b[start:stop] @ a
    outputs = b.shape[1]
    experts = range(start // outputs, -(-stop // outputs))
    spans = [(max(start - e * outputs, 0), min(stop - e * outputs, outputs)) for e in experts]
    return np.concatenate([b[e, low:high] @ a[e] for e, (low, high) in zip(experts, spans, strict=True)])


@frozen(eq=False)
class _Merged(WeightSource):
    """Weights with adapters merged into them."""

    base: WeightSource
    adapters: WeightSource
    pairs: Mapping[str, tuple[str, str, float]]
    """names of A and B, and their scale, by the name of the weight that they stand beside"""

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values."""
        parameter = self.parameters[name]
        if name not in self.pairs:
            yield from self.base.pieces(name, start, stop)
            return
        first, second, factor = self.pairs[name]
        a, b = self.adapters(first), self.adapters(second)
        width, scale = parameter.shape[-1], np.float32(factor)
        together = max(1, PIECE_ELEMENTS // width)
        for low, high in cut(start // width, -(-stop // width), together):
            begin, end = max(start, low * width), min(stop, high * width)
            rows = scale * _product_rows(b, a, low, high)
            values = np.concatenate([*self.base.pieces(name, begin, end)])
            yield values + rows.reshape(-1)[begin - low * width : end - low * width]


@cache
def base_digest(path: str | None, seed: int) -> str:
    """Return a text that tells the weights beside which something trains: drawn with a seed, or of files by SHA-256.

    Raises RT002 where the files cannot be read.
    """
    if path is None:
        return f"drawn with seed {seed}"
    digest = hashlib.sha256()
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if is_directory(path) else [place]
    for file in files:
        with path_errors(f"cannot read '{file}'"), file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256 {digest.hexdigest()}"
