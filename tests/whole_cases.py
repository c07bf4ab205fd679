"""Whole configurations for hypothesis: a model of any family, a plan with any keys, a pipeline, a machine.

Widths are odd on purpose (3 heads, 257 words, 33 tokens, fewer micro-batches than stages): what rounds, pads or counts by slice shows
itself there. A key that the plan's own check refuses beside the others is left out again, so that every draw is a plan the compiler takes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen
from hypothesis import strategies as st

from ratrain.passes.idle_options import without_idle_options
from ratrain.ratrain_ir.config.accumulation import HALF_RUNS
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.families import FAMILIES, FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.plan import (
    ATTENTION_MASKS,
    ATTENTIONS,
    DEFAULT_HEAD_CHUNK,
    DTYPES,
    LOGITS,
    Optimizer,
    Plan,
)
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.quantised import FORMATS
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.strategies import family_choices
from ratrain.ratrainc.choices.strategies import STRATEGIES
from tests.mutation.subjects import MACHINE, WITH_STORES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.targets.machine.machine import Machine

PIPELINES = (
    *dict.fromkeys(item.passes for item in STRATEGIES if item.schedule is None),
    *(f"recompute{{policy={policy}}},allocate-ddr" for policy in ("none", "full", "attention", "mlp")),
    *(f"recompute{{policy=none store={home}}},allocate-ddr" for home in ("host", "file", "peer")),
    "recompute{policy=full placement=forward-side},bucket-grad-sync{unit=layer},insert-prefetch,allocate-ddr",
    "offload-state{home=host},insert-prefetch,recompute{policy=mlp},allocate-ddr",
    "offload-state{home=file what=moments},insert-prefetch,bucket-grad-sync{bytes=16KiB},allocate-ddr",
    "overlap-tensor,recompute{policy=attention},allocate-ddr",
)
"""Pipelines of strategies, and others that move what these leave alone. The plan's schedule is placed by default."""
MACHINES: dict[str, Machine | str] = {
    "small staging": MACHINE,
    "stores": WITH_STORES,
    "tiles": "mt3000-tiles",
    "pytorch": "cpu",
}


@frozen
class WholeCase:
    """All that is needed to repeat a counterexample."""

    model: ModelConfig
    plan: Plan
    passes: str
    machine: str
    """a name in `MACHINES`"""


@st.composite
def whole_cases(draw: st.DrawFn, families: Sequence[str] = FAMILIES) -> WholeCase:
    """Draw a model, a plan for it, a pipeline and a machine; the compiler may still refuse what they make together."""
    model = draw(odd_models(families))
    plan = draw(odd_plans(model))
    passes = draw(st.sampled_from(PIPELINES))
    away = any(home in passes for home in ("=host", "=file"))
    machine = "stores" if away else draw(st.sampled_from(sorted(MACHINES)))
    return WholeCase(model, plan, without_idle_options(passes, plan, model), machine)


@st.composite
def odd_models(draw: st.DrawFn, families: Sequence[str] = FAMILIES) -> ModelConfig:
    """Draw a model of a family, with what it leaves free, and sizes that nothing divides."""
    family = draw(st.sampled_from(families))
    whole = FAMILY[family].equal_widths
    heads, head_dim = draw(st.sampled_from((1, 2, 3, 4, 6))), draw(st.sampled_from((2, 4, 6)))
    as_wide = whole or FAMILY[family].normed_widths
    hidden_size = heads * head_dim if as_wide else draw(st.sampled_from((8, 12, 17, 24)))
    layers = draw(st.integers(1, 5))
    chosen = draw(family_choices(family, layers=layers, head_dim=head_dim, hidden_size=hidden_size))
    if chosen.get("learned_positions"):
        chosen["learned_positions"] = 33
    kv_heads = heads if whole else draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
    model = ModelConfig(
        **{
            "name": "odd",
            "family": family,
            "vocab_size": draw(st.sampled_from((5, 61, 64, 257))),
            "hidden_size": hidden_size,
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn_size": draw(st.sampled_from((7, 16, 33))),
            "norm_eps": 1e-5,
            "rope_theta": 10000.0 if chosen.get("position", "rope") == "rope" else 0.0,
            "tied_embeddings": not chosen.get("normalised_head") and draw(st.booleans()),
            **chosen,
        }
    )
    check_model(model)
    return model


@st.composite
def odd_plans(draw: st.DrawFn, model: ModelConfig) -> Plan:
    """Draw a plan: sizes first, then each other key in turn, kept where the plan with it is sound."""
    pp = draw(st.integers(1, min(3, model.layers)))
    seq_len = draw(
        st.sampled_from((1, 4, 7, 8)) if "dynamic" in model.rope_scaling else st.sampled_from((1, 8, 13, 33))
    )
    dtype = draw(st.sampled_from(DTYPES))
    plan = Plan(
        pp=pp,
        dp=draw(st.integers(1, 4)),
        cuts=tuple(sorted(draw(st.sets(st.integers(1, max(1, model.layers - 1)), min_size=pp - 1, max_size=pp - 1)))),
        micro_batch_size=draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(1, 5)),
        seq_len=seq_len,
        zero=0,
        view_dtype=dtype,
        grad_dtype=dtype,
        grad_shard_dtype=dtype,
        loss_scale=None if dtype == "f16" else 1.0,
        optimizer=Optimizer(lr=1e-2, warmup_steps=1),
    )
    check_plan(plan, model)
    for name, values in _choices(model, plan).items():
        if draw(st.booleans()):
            plan = _kept(plan, model, {name: draw(values)})
    return draw(_scheduled(model, plan))


def _choices(model: ModelConfig, plan: Plan) -> dict[str, st.SearchStrategy[Any]]:
    """Values of every key beside the sizes, in an order in which one makes room for the next."""
    rows = plan.micro_batch_size * plan.seq_len
    dtypes = st.sampled_from(DTYPES)
    return {
        "tp": st.sampled_from((2, 3, 4)),
        "sequence_sharding": st.just(value=False),
        "zero": st.integers(1, 3),
        "reduce": st.just("each-micro-batch"),
        "grad_dtype": dtypes,
        "grad_shard_dtype": dtypes,
        "slices": _lengths(plan.seq_len),
        "attention_mask": st.sampled_from(ATTENTION_MASKS),
        "attention": st.sampled_from(ATTENTIONS),
        "logits": st.sampled_from(LOGITS),
        "mlp_chunk": st.integers(1, rows),
        "head_chunk": st.integers(1, min(rows, DEFAULT_HEAD_CHUNK)),
        "shard_group": st.just(2),
        "view_group": st.just(2),
        "gather_quantised": st.sampled_from(sorted(FORMATS)),
        "reduce_quantised": st.just("int8-block"),
        "accumulate": st.just(HALF_RUNS),
        "loss_scale": st.sampled_from((1.0, 1024.0)),
        "optimizer": st.just(evolve(plan.optimizer, clip="global", max_norm=0.5)),
        "router": st.sampled_from((RouterLosses(0.1), RouterLosses(0.0, 0.01, 0.01), RouterLosses(1000.0, 0.5, 1.0))),
    }


def _kept(plan: Plan, model: ModelConfig, changes: dict[str, Any]) -> Plan:
    """The plan with changes, or as it was where it is not sound with them."""
    changed = evolve(plan, **changes)
    if "grad_dtype" in changes:
        changed = evolve(changed, grad_shard_dtype=changes["grad_dtype"])
    try:
        check_plan(changed, model)
    except DiagnosticError:
        return plan
    return changed


@st.composite
def _lengths(draw: st.DrawFn, seq_len: int) -> tuple[int, ...]:
    """Draw lengths of two to four slices of a sequence."""
    if seq_len == 1:
        return ()
    inner = draw(st.sets(st.integers(1, seq_len - 1), min_size=1, max_size=min(3, seq_len - 1)))
    return tuple(stop - start for start, stop in pairwise((0, *sorted(inner), seq_len)))


@st.composite
def _scheduled(draw: st.DrawFn, model: ModelConfig, plan: Plan) -> Plan:
    """Draw a schedule that the plan can have, with the chunks and the layout that it usually has."""
    name = draw(st.sampled_from((None, *SCHEDULES)))
    if name is None:
        return plan
    usual = SCHEDULES[name]
    count = plan.pp * usual.chunks
    if count > model.layers:
        return plan
    inner = st.integers(1, max(1, model.layers - 1))
    cuts = tuple(sorted(draw(st.sets(inner, min_size=count - 1, max_size=count - 1))))
    return _kept(plan, model, {"schedule": name, "chunks": usual.chunks, "layout": usual.layout, "cuts": cuts})
