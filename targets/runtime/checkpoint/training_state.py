"""State of a training run as checkpoints hold it: whole blocks, independent of ranks, read piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.model.blocks import Block, trained_blocks
from ratrain.targets.runtime.arena.tensor_file import Float32
from ratrain.targets.runtime.weights.weights import block_elements

if TYPE_CHECKING:
    from ratrain.targets.runtime.weights.weight_source import FlatPieces

STATE_KINDS = ("p", "m1", "m2")
"""Names of a block's state tensors, as in `BlockState`."""


@frozen(eq=False)
class BlockState:
    """Optimizer state of one block; each array is flat f32, up to the end of the block's last parameter.

    Arrays may be longer (padding of shards) when they are saved; loaded ones have `weights.block_elements`.
    """

    p: Float32
    """Master weights."""
    m1: Float32
    """Adam's running mean of gradients."""
    m2: Float32
    """Adam's running mean of squared gradients."""
    t: int
    """Updates applied: steps whose gradient did not overflow."""


@frozen(eq=False)
class BlockStates(Mapping[Block, BlockState], ABC):
    """States of a model's blocks, in memory or in files. Indexing copies a whole block; `pieces` may return views."""

    model: ModelConfig

    @abstractmethod
    def pieces(self, block: Block, kind: str, start: int, stop: int) -> FlatPieces:
        """Yield elements [start, stop) of a block's flat tensor of a kind, each piece with its first index.

        The flat tensor ends with the block's last parameter.
        """

    @abstractmethod
    def updates(self, block: Block) -> int:
        """Return the number of updates applied to a block."""

    def copied(self, block: Block, kind: str, start: int, stop: int) -> Float32:
        """Copy elements [start, stop) of a block's flat tensor of a kind; elements that no piece covers are zero."""
        whole = np.zeros(stop - start, np.float32)
        for at, piece in self.pieces(block, kind, start, stop):
            whole[at - start : at - start + piece.size] = piece
        return whole

    def __getitem__(self, block: Block) -> BlockState:
        elements = block_elements(self.model, block)
        p, m1, m2 = (self.copied(block, kind, 0, elements) for kind in STATE_KINDS)
        return BlockState(p, m1, m2, self.updates(block))

    def __iter__(self) -> Iterator[Block]:
        return iter(trained_blocks(self.model))

    def __len__(self) -> int:
        return len(trained_blocks(self.model))


@frozen(eq=False)
class TrainingState:
    """All that the next step depends on other than model, plan and data."""

    step: int
    """Steps done."""
    blocks: BlockStates
    scale: tuple[float, float]
    """Loss scale and steps since it last changed, as `LossScale` carries them."""
    biases: Mapping[Block, Float32] = field(factory=dict)
    """Biases with which routers choose, by block; empty where they choose without."""
