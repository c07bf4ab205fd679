"""The values that all plans of one search have in common."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.recovery.layer_choice import CHOICES, LayerChoice
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.config.cuts import even_work_lengths
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_keys import OF_HEADS, OF_KEYS, ZIGZAG, runs_of_context
from ratrain.ratrain_ir.config.tensor_ranks import rank_model, shares_heads
from ratrain.ratrainc.planner.space.layer_classes import LayerClasses, layer_classes
from ratrain.targets.machine.machine import Machine

ContextExchange = tuple[str, int]
"""Value of `Plan.context_exchange`, and the number of groups of key heads."""
WHOLE_KEYS: ContextExchange = (OF_KEYS, 1)
"""The usual exchange: keys of all heads at once."""


@frozen
class SearchSetting:
    """Model, machine, plan template and passes that profiles are made for."""

    model: ModelConfig
    machine: Machine
    template: Plan
    """dtypes, chunks, the optimizer and, if tp > 1, `sequence_sharding` of every plan, if cp > 1 `context_layout` and
    what context ranks exchange; its shape is ignored"""
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

    def context_exchanges(self, peers: int, contexts: int) -> tuple[ContextExchange, ...]:
        """Return how context ranks may exchange for attention: as a template that has several does, else all ways."""
        if contexts == 1:
            return (WHOLE_KEYS,)
        own = rank_model(self.model, self.shaped(tp=peers))
        parts = self.model.position != "alibi"
        groups = _groups_tried(own.kv_heads) if parts else (1,)
        wanted: tuple[ContextExchange, ...] = (*((OF_KEYS, number) for number in groups), (OF_HEADS, 1))
        if self.template.cp > 1:
            wanted = ((self.template.context_exchange, self.template.context_groups),)
        shares = parts and shares_heads(own, contexts)
        return tuple(each for each in wanted if (shares if each[0] == OF_HEADS else own.kv_heads % each[1] == 0))

    def shaped(self, **shape: Any) -> Plan:
        """Return the template with another shape; keys left out stand for one rank, one micro-batch and whole state.

        `micro_batch_size` stays the template's.
        """
        usual: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "cuts": (), "micro_batches": 1, "zero": 0, "reduce": "last"}
        usual |= {"cp": 1, "context_exchange": OF_KEYS, "context_groups": 1, "ep": 1}
        given = usual | {"mapping": None, "chunks": 1, "layout": "loop", "slices": ()} | shape
        rows, cp = self.shards_sequences(given["tp"]), given["cp"]
        given.setdefault("experts", self.template.experts if given["ep"] > 1 else ExpertDispatch())
        return evolve(self.template, **given, sequence_sharding=rows, context_layout=self.context_layout(cp))


def _groups_tried(heads: int) -> tuple[int, ...]:
    """Return the numbers of groups of key heads to consider: one, the fewest that divide them, and a group each head.

    More groups hold fewer bytes, and take more messages for the same ones. Between the ends both change little: two
    groups save half of what is gathered, a group each head the rest.
    """
    return tuple(sorted({1, next((number for number in range(2, heads) if heads % number == 0), heads), heads}))
