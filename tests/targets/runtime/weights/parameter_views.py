"""Parameters by name, as views of the flat tensors that ranks hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.blocks import Block, trained_parameters

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.runtime.arena.tensor_file import Float32


def named_parameters_of(model: ModelConfig, block: Block, flat: Float32) -> dict[str, Float32]:
    """Return the parameters of a block that train as views of its flat tensor, padded or not."""
    return {
        parameter.name: flat[parameter.offset : parameter.offset + parameter.elements].reshape(parameter.shape)
        for parameter in trained_parameters(model, block)
    }
