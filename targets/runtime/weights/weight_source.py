"""Weights as a model's parameters are filled with: in pieces, so that no tensor has to be in memory twice to get to its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from ratrain.ratrain_ir.model.blocks import Block, Parameter, parameters_within
from ratrain.targets.runtime.arena.tensor_file import Float32, joined

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

FlatPieces: TypeAlias = Iterator[tuple[int, Float32]]
"""Part of a block's flat tensor, ascending: where each piece begins in the whole tensor, and its elements. What is between them is zero."""


@frozen(eq=False)
class WeightSource(ABC):
    """Where the values of a model's parameters come from, in f32, by their Hugging Face names as `blocks.parameters` has them."""

    parameters: Mapping[str, Parameter]
    """those it has, by name"""

    @abstractmethod
    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Elements [start, stop) of a parameter's flat values, at most `PIECE_ELEMENTS` at a time, each piece an array of its own."""

    def __call__(self, name: str) -> Float32:
        """All values of a parameter, in its shape."""
        parameter = self.parameters[name]
        return joined(self.pieces(name, 0, parameter.elements), parameter.elements).reshape(parameter.shape)


def flat_pieces(model: ModelConfig, block: Block, source: WeightSource, start: int, stop: int) -> FlatPieces:
    """Elements [start, stop) of a block's flat tensor, from a source."""
    for parameter, low, high in parameters_within(model, block, start, stop - start):
        at = start + low
        for piece in source.pieces(parameter.name, at - parameter.offset, start + high - parameter.offset):
            yield at, piece
            at += piece.size
