"""States of a tiny model to save, what is found of them again, and what refuses a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.blocks import Block, block, block_chain, flat_elements, parameters
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.runtime.arena.tensor_file import cut
from ratrain.targets.runtime.checkpoint.training_state import BlockState, BlockStates, TrainingState
from ratrain.targets.runtime.weights.weights import block_elements
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from ratrain.targets.runtime.weights.weight_source import FlatPieces


LLAMA = ModelConfig("tiny", "llama", 96, 32, 2, 4, 2, 8, 40, 1e-5)


RUN = {"seed": 7, "plan": "abc", "versions": {"numpy": "2.0"}, "threads": 1, "blas": "Haswell"}


def refusal(action, *arguments, **options) -> list:
    with pytest.raises(DiagnosticError) as caught:
        action(*arguments, **options)
    return caught.value.diagnostics


@frozen(eq=False)
class HeldStates(BlockStates):
    """States that are arrays in memory."""

    blocks: Mapping[Block, BlockState]

    def pieces(self, block: Block, kind: str, start: int, stop: int) -> FlatPieces:
        """In pieces of a few elements."""
        for low, high in cut(start, stop, 300):
            yield low, getattr(self.blocks[block], kind)[low:high]

    def updates(self, block: Block) -> int:
        return self.blocks[block].t

    def __getitem__(self, block: Block) -> BlockState:
        return self.blocks[block]


def make_state(model: ModelConfig, seed: int = 0, *, dp: int | None = None) -> TrainingState:
    """Any bits in the parameters, zeros between them; with `dp`, padded to that many shards."""
    rng = np.random.default_rng(seed)
    blocks = {}
    for number, unit in enumerate(block_chain(model)):
        size = block_elements(model, unit)
        if dp is not None:
            plan = Plan(pp=1, dp=dp, cuts=(), micro_batch_size=1, micro_batches=1, seq_len=8)
            size = flat_elements(model, plan, unit)
        arrays = []
        for _ in range(3):
            flat = np.zeros(size, np.float32)
            for view in named_parameters_of(model, unit, flat).values():
                view[...] = rng.integers(0, 1 << 32, view.shape, np.uint32).view(np.float32)
            arrays.append(flat)
        blocks[unit] = BlockState(*arrays, t=40 + number)
    if model.tied_embeddings:
        table = parameters(model, block("embed"))[0].elements
        for kind in ("p", "m1", "m2"):
            getattr(blocks[block("head")], kind)[:table] = getattr(blocks[block("embed")], kind)[:table]
    return TrainingState(41, HeldStates(model, blocks), (65536.0, 0.1))


def assert_equal(found: TrainingState, expected: TrainingState, model: ModelConfig) -> None:
    assert found.step == expected.step
    assert found.scale == expected.scale
    assert list(found.blocks) == list(block_chain(model))
    for unit, state in found.blocks.items():
        wanted = expected.blocks[unit]
        assert state.t == wanted.t
        for kind in ("p", "m1", "m2"):
            flat, want = getattr(state, kind), getattr(wanted, kind)
            assert flat.dtype == np.float32
            assert flat.shape == (block_elements(model, unit),)
            assert np.array_equal(flat.view(np.uint32), want[: len(flat)].view(np.uint32))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
