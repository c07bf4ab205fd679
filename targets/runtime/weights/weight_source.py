"""Sources of a model's weights, read in pieces so that no tensor is in memory twice on its way into an arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from ratrain.ratrain_ir.model.blocks import Block, Held, Parameter, parameters_within
from ratrain.targets.runtime.arena.tensor_file import Float32, joined

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

FlatPieces: TypeAlias = Iterator[tuple[int, Float32]]
"""Part of a block's flat tensor, ascending: (index of the first element in the whole tensor, elements). Elements
between pieces are zero."""


@frozen(eq=False)
class WeightSource(ABC):
    """Source of a model's parameters in f32, by their Hugging Face names as in `blocks.parameters`."""

    parameters: Mapping[str, Parameter]
    """its parameters, by name"""

    @abstractmethod
    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values.

        Pieces are new arrays of at most `PIECE_ELEMENTS` elements.
        """

    def __call__(self, name: str) -> Float32:
        """Return all values of a parameter, in its shape."""
        parameter = self.parameters[name]
        return joined(self.pieces(name, 0, parameter.elements), parameter.elements).reshape(parameter.shape)


def flat_pieces(
    model: ModelConfig, block: Block, source: WeightSource, start: int, stop: int, held: Held = Held.TRAINED
) -> FlatPieces:
    """Yield elements [start, stop) of a block's flat tensor from a source: of what trains, or of plain frozen ones."""
    for parameter, low, high in parameters_within(model, block, start, stop - start, held):
        at = start + low
        for piece in source.pieces(parameter.name, at - parameter.offset, start + high - parameter.offset):
            yield at, piece
            at += piece.size
