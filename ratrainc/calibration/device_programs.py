"""Programs to time a device with: the user's, and small ones of two model families with all usual kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import DTYPE_KEYS, Plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

USUAL_DTYPE = "bf16"
"""Default type that blocks compute with."""
_VOCABULARY = 4096
_HEAD_DIM = 64
_ROUNDED = 32
"""The width of an MLP is rounded up to a multiple of this number."""
_LAYERS = 2
_MICRO_BATCHES = 2
"""Two, so that gradients are first written and then added to."""


@frozen
class UsualSize:
    """A model of a preset's family, and the size of its micro-batch."""

    preset: str
    hidden: int
    seq_len: int
    sequences: int

    def model(self) -> ModelConfig:
        """Make the model: two layers, with a small vocabulary."""
        model = load_model(self.preset)
        heads = self.hidden // _HEAD_DIM
        width = model.ffn_size * self.hidden // model.hidden_size
        return evolve(
            model,
            name=f"{model.family}-{self.hidden}",
            hidden_size=self.hidden,
            layers=_LAYERS,
            heads=heads,
            kv_heads=heads,
            head_dim=_HEAD_DIM,
            ffn_size=-(-width // _ROUNDED) * _ROUNDED,
            vocab_size=_VOCABULARY,
            learned_positions=None if model.learned_positions is None else self.seq_len,
        )

    def plan(self, dtype: str) -> Plan:
        """Make a plan of one rank whose views and gradients have a type."""
        types: dict[str, Any] = dict.fromkeys(DTYPE_KEYS, dtype)
        scale = None if dtype == "f16" else 1.0
        plan = Plan(1, 1, (), self.sequences, _MICRO_BATCHES, self.seq_len)
        return evolve(plan, loss_scale=scale, **types)


_OF_A_HOST = (
    UsualSize("llama-2-7b", 256, 128, 2),
    UsualSize("llama-2-7b", 512, 256, 1),
    UsualSize("llama-2-7b", 768, 256, 1),
    UsualSize("gpt2", 256, 128, 2),
    UsualSize("gpt2", 512, 256, 1),
)
_OF_A_GPU = (
    UsualSize("llama-2-7b", 1024, 1024, 2),
    UsualSize("llama-2-7b", 2048, 2048, 2),
    UsualSize("llama-2-7b", 4096, 4096, 1),
    UsualSize("gpt2", 768, 1024, 4),
    UsualSize("gpt2", 2048, 2048, 2),
)


def usual_programs(machine: Machine, dtype: str, *, on_host: bool) -> list[Program]:
    """Compile the usual programs of one rank; a GPU gets larger ones, so that it is busy."""
    return [compiled(size.model(), size.plan(dtype), machine) for size in (_OF_A_HOST if on_host else _OF_A_GPU)]


def compiled(model: ModelConfig, plan: Plan, machine: Machine) -> Program:
    """Compile a plan for a machine to a program. Raises `DiagnosticError` if it does not fit, or either is wrong."""
    from ratrain.ratrainc.compiling import building

    return building.emit(building.compile(model, plan, machine=machine))
