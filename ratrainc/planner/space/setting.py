"""What the plans of one search have in common."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.slicing import even_work_lengths
from ratrain.targets.machine.machine import Machine


@frozen
class Setting:
    """What a profile is made for."""

    model: ModelConfig
    machine: Machine
    template: Plan
    """dtypes, chunks, the optimizer and, where there are tensor peers, `sequence_sharding` of every plan; its shape does not matter"""
    policy: str
    """of `recompute`"""
    may_keep_gathered: bool = True
    """whether what tensor peers gathered for a forward may serve its backward too"""

    def slice_lengths(self, count: int) -> tuple[int, ...]:
        """Tokens of each of so many slices of even work; none where micro-batches pass whole."""
        return even_work_lengths(self.model, self.template.seq_len, count) if count > 1 else ()

    def shards_sequences(self, peers: int) -> bool:
        """Whether so many tensor peers share out the rows of activations between blocks; one has nobody to share with."""
        return peers == 1 or self.template.sequence_sharding

    def shaped(self, **shape: Any) -> Plan:
        """The template with another shape: one tensor peer, one chunk a stage and whole micro-batches unless it says otherwise."""
        usual: dict[str, Any] = {"tp": 1, "chunks": 1, "layout": "loop", "slices": ()}
        said = usual | shape
        return evolve(self.template, **said, sequence_sharding=self.shards_sequences(said["tp"]))
