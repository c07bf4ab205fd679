"""The values that all plans of one search have in common."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.recovery.rewriting import CHOICES, LayerChoice
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.config.cuts import even_work_lengths
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_keys import CONTEXT_EXCHANGES, OF_KEYS, ZIGZAG, runs_of_context
from ratrain.ratrain_ir.config.tensor_ranks import rank_model, shares_heads
from ratrain.ratrainc.planner.space.layer_classes import LayerClasses, layer_classes
from ratrain.targets.machine.machine import Machine


@frozen
class SearchSetting:
    """Model, machine, plan template and passes that profiles are made for."""

    model: ModelConfig
    machine: Machine
    template: Plan
    """dtypes, chunks, the optimizer and, if tp > 1, `sequence_sharding` of every plan, if cp > 1 `context_layout`; its
    shape is ignored"""
    passes: str
    """pipeline of the strategy"""

    @property
    def classes(self) -> LayerClasses:
        """Classes of the model's layers under what the template trains."""
        return layer_classes(self.model, self.shaped())

    @property
    def _recovering(self) -> list[RecomputePass | JointOrderPass]:
        return [p for p in parse_pipeline(self.passes) if isinstance(p, RecomputePass | JointOrderPass)]

    @property
    def choices(self) -> tuple[LayerChoice, ...]:
        """Choices of recovery for a layer that the pipeline allows; everything is kept if no pass recovers."""
        passes = (p.recovery if isinstance(p, JointOrderPass) else p for p in self._recovering)
        return next((p.choices for p in passes), CHOICES["none"])

    @property
    def may_keep_gathered(self) -> bool:
        """True if the pipeline may keep tensors that ranks gathered for a forward until its backward."""
        return any(p.policy == "auto" and p.gathered == "auto" for p in self._recovering)

    def slice_lengths(self, count: int, contexts: int) -> tuple[int, ...]:
        """Return the tokens of each of `count` slices of even work, which context ranks share out; empty for one."""
        unit = runs_of_context(contexts, self.template.context_layout)
        return even_work_lengths(self.model, self.template.seq_len, count, unit) if count > 1 else ()

    def shards_sequences(self, peers: int) -> bool:
        """Return True if `peers` tensor-parallel ranks share out the rows of activations; a single one has all rows."""
        return peers == 1 or self.template.sequence_sharding

    def context_layout(self, contexts: int) -> str:
        """Return which tokens each of `contexts` context ranks has; the usual ones for a single rank, which has all."""
        return self.template.context_layout if contexts > 1 else ZIGZAG

    def context_exchanges(self, peers: int, contexts: int) -> tuple[str, ...]:
        """Return what context ranks may exchange for attention: what a template that has several does, else all."""
        if contexts == 1:
            return (OF_KEYS,)
        wanted = (self.template.context_exchange,) if self.template.cp > 1 else CONTEXT_EXCHANGES
        own = rank_model(self.model, self.shaped(tp=peers))
        shares = shares_heads(own, contexts) and self.model.position != "alibi"
        return tuple(each for each in wanted if each == OF_KEYS or shares)

    def shaped(self, **shape: Any) -> Plan:
        """Return the template with another shape; keys left out stand for one rank, one micro-batch and whole state.

        `micro_batch_size` stays the template's.
        """
        usual: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "cuts": (), "micro_batches": 1, "zero": 0, "reduce": "last"}
        given = usual | {"cp": 1, "ep": 1, "mapping": None, "chunks": 1, "layout": "loop", "slices": ()} | shape
        rows, cp = self.shards_sequences(given["tp"]), given["cp"]
        given.setdefault("context_exchange", OF_KEYS)
        return evolve(self.template, **given, sequence_sharding=rows, context_layout=self.context_layout(cp))
