"""Weights of the whole model of a checkpoint, also where it holds only what trains: adapters or some parameters.

The frozen weights are those that the run began with; the checkpoint's record of the run tells them (`base_digest`).
Adapters are merged into them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.training import WHOLE
from ratrain.ratrain_ir.model.adapters import is_adapter
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_run, latest_weights
from ratrain.targets.runtime.weights.adapters import base_digest, merged
from ratrain.targets.runtime.weights.weight_source import WeightSource
from ratrain.targets.runtime.weights.weights import named_parameters, random_weights, read_weights

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.runtime.arena.tensor_file import Float32

_DRAWN = re.compile(r"drawn with seed (\d{1,20})", re.ASCII)


def whole_weights(directory: str, init: str | None = None) -> tuple[ModelConfig, WeightSource]:
    """Return model and weights of the checkpoint in a directory, or of a series' newest, without adapters.

    `init` are the weights that its run began with; needed where it holds only what trains, unless they were drawn at
    random. Raises RT002 (cannot be read), RT091 (weights not sound) and RT092: not a sound checkpoint, or other weights
    than its run began with.
    """
    model, source = latest_weights(directory)
    if not model.training:
        if init is not None:
            fail("RT092", f"the checkpoint '{directory}' holds all weights: others change nothing", help="leave it out")
        return model, source
    whole = evolve(model, training=WHOLE)
    base = _base(directory, whole, init)
    named = named_parameters(model)
    trained = frozenset(name for name, each in named.items() if each.trains and not is_adapter(each.weight))
    partly = _Partly(named_parameters(whole), base, source, trained) if trained else base
    return whole, merged(partly, model, source) if model.training.adapts else partly


def _base(directory: str, model: ModelConfig, init: str | None) -> WeightSource:
    """Return the weights that a checkpoint's run began with."""
    recorded = str(latest_run(directory).get("base"))
    drawn = _DRAWN.fullmatch(recorded)
    if init is None and drawn is not None:
        return random_weights(model, int(drawn[1]))
    text = f"the checkpoint '{directory}' holds what trains alone, beside weights that are {recorded}"
    if init is None:
        way_out = "--init W names them; 'ratrainc export-weights CKPT --init W -o DIR' writes the whole model"
        fail("RT092", text, help=way_out)
    check_beside(directory, init)
    return read_weights(init, model)


def check_beside(directory: str, init: str) -> None:
    """Raise RT092 unless the weights `init` are those beside which the run of a checkpoint trained."""
    recorded, given = str(latest_run(directory).get("base")), base_digest(init, 0)
    if given != recorded:
        text = f"the checkpoint '{directory}' was trained beside weights that are {recorded}; '{init}' is {given}"
        fail("RT092", text, help="give the weights that its run began with")


@frozen(eq=False)
class _Partly(WeightSource):
    """Weights of a base, some of which have trained."""

    base: WeightSource
    source: WeightSource
    trained: frozenset[str]

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values."""
        return (self.source if name in self.trained else self.base).pieces(name, start, stop)
