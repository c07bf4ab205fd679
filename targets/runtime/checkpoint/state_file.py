"""State file of a checkpoint: the tensors of every block, written and read in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.model.blocks import (
    Block,
    block,
    block_chain,
    parameters,
    parameters_within,
    tied_table_elements,
    trained_blocks,
    trained_parameters,
)
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, fail
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.arena.tensor_file import Float32, StoredTensor, cut
from ratrain.targets.runtime.checkpoint.training_state import STATE_KINDS, BlockStates, TrainingState
from ratrain.targets.runtime.weights.weight_source import FlatPieces, WeightSource

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

STATE_FILE = "state.safetensors"
_MOST_SHOWN = 24  # problems named one by one


@frozen(eq=False)
class StoredMasters(WeightSource):
    """Master weights of a state file."""

    stored: Mapping[str, StoredTensor]

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values."""
        return self.stored[f"p/{name}"].pieces(start, stop)


@frozen(eq=False)
class StoredStates(BlockStates):
    """Block states of a state file."""

    stored: Mapping[str, StoredTensor]
    updates_of: Mapping[str, int]

    def pieces(self, block: Block, kind: str, start: int, stop: int) -> FlatPieces:
        """Yield elements [start, stop) of a block's flat tensor of a kind, each piece with its first index."""
        for parameter, low, high in parameters_within(self.model, block, start, stop - start):
            at = start + low
            for piece in self.stored[f"{kind}/{parameter.name}"].pieces(
                at - parameter.offset, start + high - parameter.offset
            ):
                yield at, piece
                at += piece.size

    def updates(self, block: Block) -> int:
        """Return the number of updates applied to a block."""
        return self.updates_of[str(block)]


def _state_names(model: ModelConfig) -> Iterator[tuple[Block, str, list[str]]]:
    """Yield block, kind, and the names stored for them: a tied matrix with `embed`, not with `head`."""
    seen: set[str] = set()
    for owner in trained_blocks(model):
        names = [parameter.name for parameter in trained_parameters(model, owner) if parameter.name not in seen]
        seen.update(names)
        for kind in STATE_KINDS:
            yield owner, kind, names


def state_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the state file in their order, by name, with their shapes."""
    shapes = {parameter.name: parameter.shape for owner in block_chain(model) for parameter in parameters(model, owner)}
    return {f"{kind}/{name}": shapes[name] for _, kind, names in _state_names(model) for name in names}


def state_tensors(model: ModelConfig, state: TrainingState, updates: dict[str, int]) -> Iterator[Iterator[Float32]]:
    """Yield the tensors that `state_shapes` lists, each in pieces; note each block's update count in `updates`."""
    for owner, kind, names in _state_names(model):
        if str(owner) not in updates:
            updates[str(owner)] = int(state.blocks.updates(owner))
            if tied_table_elements(model) and owner is block("head"):
                _check_tied(model, state.blocks)
        for parameter in trained_parameters(model, owner):
            if parameter.name in names:
                pieces = state.blocks.pieces(owner, kind, parameter.offset, parameter.offset + parameter.elements)
                yield (piece for _, piece in pieces)


def _check_tied(model: ModelConfig, blocks: BlockStates) -> None:
    """Refuse, with RT092, copies of a tied matrix that differ in any bit: only one of them is stored."""
    table = parameters(model, block("embed"))[0]
    for kind in STATE_KINDS:
        for low, high in cut(0, table.elements):  # both blocks begin with it
            one, other = (blocks.copied(block(end), kind, low, high) for end in ("embed", "head"))
            if not np.array_equal(one.view(np.uint32), other.view(np.uint32)):
                fail(
                    "RT092", f"the two copies of {table.name} ({kind}) differ: a checkpoint would keep only one of them"
                )


def check_tensors(path: str, model: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse, with RT092, a state file whose tensors are not exactly the model's, in f32."""
    shapes = state_shapes(model)
    wrong = [f"lacks {name}" for name in shapes if name not in stored]
    wrong += [f"has {shown(name)}, which is not of this model" for name in stored if name not in shapes]
    wrong += [
        f"has {name} as {shown(stored[name].dtype)} {shown(list(stored[name].shape))}, not F32 {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and (stored[name].dtype, stored[name].shape) != ("F32", shape)
    ]
    report = Diagnostics()
    for what in wrong[:_MOST_SHOWN]:
        report.error("RT092", f"'{path}' {what}")
    if len(wrong) > _MOST_SHOWN:
        report.error("RT092", f"'{path}': {len(wrong) - _MOST_SHOWN} more tensors do not fit")
    report.check()
