"""Hypothesis strategies: small models, all plans that the compiler accepts for them, and modules and pipelines of both.

All are small enough to be checked by brute force: at most 6 layers, 4 stages, 3 chunks a stage, 3 slices, 6
micro-batches and 3 replicas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.families import FAMILIES, FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.plan import ATTENTION_MASKS, DTYPES, Plan
from ratrain.ratrain_ir.config.plan_keys import CONTEXT_LAYOUTS, runs_of_context
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS, PipelineShape
from ratrain.ratrain_ir.testing.fake_target import FakeTarget

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.lifetime import Interval
    from ratrain.ratrain_ir.module import Module

MAX_LAYERS = 6
MAX_STAGES = 4
MAX_CHUNKS = 3
MAX_SLICES = 3
MAX_MICRO_BATCHES = 6
MAX_REPLICAS = 3
MAX_CONTEXTS = 3
MAX_TOKENS = 8

PassSpec = tuple[str, dict[str, str]]
"""Name of a pass, and its options as texts."""

PipelineChoices = Sequence[tuple[str, Mapping[str, Sequence[str]]]]
"""Passes in a legal order, each with the texts that each of its options may have."""


@st.composite
def models(draw: st.DrawFn, *, min_layers: int = 1, max_layers: int = MAX_LAYERS) -> ModelConfig:
    """Generate models of a few kilobytes: any family, with its implied fields and any values of its free ones."""
    family = draw(st.sampled_from(FAMILIES))
    whole = FAMILY[family].equal_widths
    heads = draw(st.sampled_from((1, 2, 4)))
    head_dim = draw(st.sampled_from((2, 4)))
    hidden_size = heads * head_dim if whole or FAMILY[family].normed_widths else draw(st.integers(1, 12))
    layers = draw(st.integers(min_layers, max_layers))
    chosen = draw(family_choices(family, layers=layers, head_dim=head_dim, hidden_size=hidden_size))
    position = chosen.get("position", "rope")
    model = ModelConfig(
        **{
            "name": draw(st.sampled_from(("toy", "tiny-2.5_b"))),
            "family": family,
            "vocab_size": draw(st.integers(2, 40)),
            "hidden_size": hidden_size,
            "layers": layers,
            "heads": heads,
            "kv_heads": heads if whole else draw(st.sampled_from([k for k in (1, 2, 4) if heads % k == 0])),
            "head_dim": head_dim,
            "ffn_size": draw(st.integers(1, 20)),
            "norm_eps": draw(st.sampled_from((1e-5, 1e-6))),
            "rope_theta": 0.0 if position != "rope" else draw(st.sampled_from((10000.0, 1e6))),
            "tied_embeddings": not chosen.get("normalised_head") and draw(st.booleans()),
            **chosen,
        }
    )
    check_model(model)
    return model


@st.composite
def family_choices(draw: st.DrawFn, family: str, *, layers: int, head_dim: int, hidden_size: int) -> dict[str, Any]:
    """Generate the fields that a family implies, and a value for each field that it leaves free."""
    known = FAMILY[family]
    windows = _layer_windows(draw, family, layers)
    choices: dict[str, st.SearchStrategy[Any]] = {
        "activation": st.sampled_from(
            ("silu", "gelu", "gelu-tanh") if known.implied.get("gated_mlp", True) else ("gelu", "gelu-tanh", "relu2")
        ),
        "attention_scale": st.sampled_from([scalar**-0.5 for scalar in (1.0, 16.0, 144.0)]),
        "attention_softcap": st.none() | st.sampled_from((0.5, 50.0)),
        "logit_softcap": st.none() | st.sampled_from((0.5, 30.0)),
        "expert_size": st.integers(1, 9),
        "shared_expert_size": st.integers(1, 9),
        "router_normalised": st.booleans(),
        "embedding_scale": st.just(sqrt(hidden_size))
        if family in ("gemma2", "gemma3_text")
        else st.sampled_from((1.0, 12.0)),
        "residual_scale": st.sampled_from((1.0, 0.22)),
        "logit_scale": st.sampled_from((1.0, 1 / 8, 1 / 7)),
        "learned_positions": st.integers(MAX_TOKENS, 40),
        "local_rope_theta": st.sampled_from((10000.0, 500.0)) if "sliding_window" in windows else st.none(),
        "mlp_bias": st.booleans(),
        "normalised_head": st.booleans(),
        "parallel_residual": st.booleans(),
        "position": st.sampled_from(("rope", "alibi")),
        "rope_scaling": st.just("")
        | st.sampled_from([text for text in SCALINGS if text.partition(" ")[0] in known.scalings] or [""]),
        "rotary_dim": st.none() | st.integers(1, head_dim // 2 - 1).map(lambda half: 2 * half)
        if head_dim > 2
        else st.none(),
    }
    fields = {**known.implied, **windows}
    fields |= {name: draw(choices[name]) for name in sorted(known.free & choices.keys())}
    if "experts" in known.free:
        fields["experts"] = draw(st.integers(1, 5))
        fields["experts_per_token"] = draw(st.integers(1, fields["experts"]))
    if "mlp_kinds" in known.free:
        kinds = draw(st.text(st.sampled_from("de"), min_size=layers, max_size=layers))
        fields["mlp_kinds"] = kinds if len(set(kinds)) > 1 else ""
    if "o_bias" in known.free:
        fields |= dict.fromkeys(("qkv_bias", "o_bias"), draw(st.booleans()))
    return fields


SCALINGS = (
    "linear 2",
    f"dynamic 2 {MAX_TOKENS}",
    "llama3 8 1 4 8",
    "yarn 4 32 1 4 1.1 1",
    "yarn 4 8 0.5 4 1 1",
)
"""Texts of rotary scalings; the dynamic one has the positions of any generated plan."""


def _layer_windows(draw: st.DrawFn, family: str, layers: int) -> dict[str, Any]:
    """Draw the fields `sliding_window` and `layer_kinds` of a model of a family.

    A window is there if some layer has one, kinds unless all layers are full (f) or all windowed (w).
    """
    known = FAMILY[family]
    letters = "f"
    if "layer_kinds" in known.free:
        letters = draw(st.text(st.sampled_from(known.layer_letters), min_size=layers, max_size=layers))
    elif "sliding_window" in known.free:
        letters = draw(st.sampled_from(known.layer_letters))
    window = {"sliding_window": draw(st.integers(1, 8))} if "w" in letters else {}
    return window if set(letters) in ({"f"}, {"w"}) else {**window, "layer_kinds": letters}


@st.composite
def plans(
    draw: st.DrawFn,
    model: ModelConfig,
    *,
    min_stages: int = 1,
    max_stages: int = MAX_STAGES,
    min_chunks: int = 1,
    max_chunks: int = MAX_CHUNKS,
    max_slices: int = MAX_SLICES,
    max_micro_batches: int = MAX_MICRO_BATCHES,
    max_replicas: int = MAX_REPLICAS,
    max_contexts: int = MAX_CONTEXTS,
) -> Plan:
    """Generate plans for a model: stages and uneven cuts, ZeRO 0 to 2, both reduce modes, storage types, loss scales.

    A plan with several chunks a stage names a schedule for them. A plan with one chunk names none, and so fits every
    schedule of one chunk.
    """
    pp = draw(st.integers(min_stages, min(max_stages, model.layers // min_chunks)))
    unit = draw(st.sampled_from((1, 2)))  # context ranks share out slices of even lengths alone
    units = draw(st.integers(1, MAX_TOKENS // unit))
    seq_len, slices = unit * units, tuple(unit * length for length in draw(_slices(units, max_slices)))
    micro_batches = draw(st.integers(1, max(1, max_micro_batches // max(1, len(slices)))))
    chunks = draw(st.integers(min_chunks, min(max_chunks, model.layers // pp) if pp > 1 else 1))
    placements = _placements(pp, micro_batches, chunks, len(slices))
    if not placements:
        slices, placements = (), _placements(pp, micro_batches, chunks, 0)
    schedule, layout = draw(st.sampled_from(placements))
    inner = st.integers(1, max(1, model.layers - 1))
    count = pp * chunks - 1
    cuts = tuple(sorted(draw(st.sets(inner, min_size=count, max_size=count)))) if count else ()
    zero = draw(st.integers(0, 2))
    dtypes = st.sampled_from(DTYPES)
    view_dtype = draw(dtypes)
    dp, grad_dtype = draw(st.integers(1, max_replicas)), draw(dtypes)
    plan = Plan(
        pp=pp,
        dp=dp,
        cuts=cuts,
        micro_batch_size=draw(st.integers(1, 2)),
        micro_batches=micro_batches,
        seq_len=seq_len,
        slices=slices,
        zero=zero,
        reduce=draw(st.sampled_from(("last", "each-micro-batch"))) if zero == 2 else "last",
        view_dtype=view_dtype,
        grad_dtype=grad_dtype,
        grad_shard_dtype=draw(dtypes) if zero and dp > 1 else grad_dtype,
        loss_scale=1.0 if view_dtype != "f16" else draw(st.sampled_from((None, 1.0, 1024.0))),
        schedule=schedule,
        chunks=chunks,
        layout=layout,
        seed=draw(st.sampled_from((0, (1 << 63) - 1))),
        attention_mask=draw(st.sampled_from(ATTENTION_MASKS)),
    )
    plan = evolve(plan, optimizer=evolve(plan.optimizer, lr=draw(st.sampled_from((3e-4, 1.0)))))
    contexts = [(1, CONTEXT_LAYOUTS[0])]
    more = range(2, max_contexts + 1)
    contexts += [(cp, layout) for cp in more for layout in CONTEXT_LAYOUTS if _fits(plan, cp, layout)]
    cp, layout = draw(st.sampled_from(contexts))
    plan = evolve(plan, cp=cp, context_layout=layout)
    if model.experts is not None:
        factors, whole = st.sampled_from((0.0, 0.01)), not slices and cp == 1
        losses = (draw(factors), draw(factors)) if whole else (0.0, 0.0)
        plan = evolve(plan, router=RouterLosses(*losses, draw(factors)))
    check_plan(plan, model)
    return plan


def _fits(plan: Plan, cp: int, layout: str) -> bool:
    """Tell whether context ranks can share out a plan's sequences, or its slices, evenly."""
    return all(length % runs_of_context(cp, layout) == 0 for length in plan.slices or (plan.seq_len,))


@st.composite
def _slices(draw: st.DrawFn, seq_len: int, most: int) -> tuple[int, ...]:
    """Draw lengths of slices that make up a sequence; empty in about half of the cases."""
    most = min(most, seq_len)
    if most < 2 or draw(st.booleans()):
        return ()
    inner = draw(st.sets(st.integers(1, seq_len - 1), min_size=1, max_size=most - 1))
    return tuple(stop - start for start, stop in pairwise((0, *sorted(inner), seq_len)))


def _placements(stages: int, micro_batches: int, chunks: int, slices: int) -> list[tuple[str | None, str]]:
    """List the schedules, with a layout, that this number of chunks and slices allows; name None means any."""
    if chunks == 1:
        return [(None, LAYOUTS[0])]
    shapes = [PipelineShape(stages, micro_batches, chunks, layout, max(1, slices)) for layout in LAYOUTS]
    return [
        (name, shape.layout) for name, known in SCHEDULES.items() for shape in shapes if known.problem(shape) is None
    ]


@frozen
class Case:
    """A model and a plan for it: sufficient to repeat a counterexample."""

    model: ModelConfig
    plan: Plan

    def module(self) -> Module:
        """Lower to a new dataflow module of one training step; passes change it in place."""
        return lower(self.model, self.plan)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_layers: int = MAX_LAYERS,
    min_stages: int = 1,
    max_stages: int = MAX_STAGES,
    max_chunks: int = MAX_CHUNKS,
    max_slices: int = MAX_SLICES,
    max_micro_batches: int = MAX_MICRO_BATCHES,
    max_contexts: int = MAX_CONTEXTS,
) -> Case:
    """Generate a model and a plan for it.

    If there are enough layers, about half of the cases have several chunks a stage, and about half have slices.
    """
    stages, chunks = (max(2, min_stages), 2) if max_chunks > 1 and draw(st.booleans()) else (min_stages, 1)
    if stages > max_stages or stages * chunks > max_layers:
        stages, chunks = min_stages, 1
    model = draw(models(min_layers=stages * chunks, max_layers=max_layers))
    bounds = {"min_stages": stages, "max_stages": max_stages, "min_chunks": chunks, "max_chunks": max_chunks}
    bounds |= {"max_slices": max_slices, "max_micro_batches": max_micro_batches, "max_contexts": max_contexts}
    return Case(model, draw(plans(model, **bounds)))


@st.composite
def pass_specs(draw: st.DrawFn, choices: PipelineChoices) -> list[PassSpec]:
    """Generate a selection of passes of a table, in its order, each with some options; for `pipeline_of`."""
    specs: list[PassSpec] = []
    for name, options in choices:
        if draw(st.booleans()):
            specs.append(
                (name, {key: draw(st.sampled_from(texts)) for key, texts in options.items() if draw(st.booleans())})
            )
    return specs


def pipeline_of(specs: Sequence[PassSpec]) -> str:
    """Return the pipeline string of a list of pass specifications."""
    return ",".join(_pass_text(name, options) for name, options in specs)


def for_plan(pipeline: str, plan: Plan) -> str:
    """Adapt a pipeline to a plan.

    If the plan has chunks or slices, placements of whole micro-batches are replaced by `place-schedule`.
    """
    if plan.chunks == 1 and len(plan.slices) < 2:
        return pipeline
    return re.sub(r"place-[\w-]+(\{[^}]*\})?", "place-schedule", pipeline)


def pipelines(choices: PipelineChoices) -> st.SearchStrategy[str]:
    """Generate pipeline strings of passes of a table."""
    return pass_specs(choices).map(pipeline_of)


def targets() -> st.SearchStrategy[FakeTarget]:
    """Generate targets that run updates on either engine, and have any machine text or none."""
    return st.builds(FakeTarget, update_engine=st.sampled_from((Engine.COMPUTE, Engine.HOST)), machine=machine_texts())


def machine_texts() -> st.SearchStrategy[str]:
    """Generate texts whose lines do not end in blanks: what a module may carry of its machine."""
    odd = st.sampled_from(("", "|", "}", "  }", "stage @0 {", "// no comment", 'source = "\u2028 \\" }"', "\t  x"))
    line = odd | st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12)
    lines = st.lists(line.map(lambda text: text.rstrip(" \t\r")), min_size=1, max_size=4)
    return st.just("") | lines.map("\n".join)


@st.composite
def allocation_problems(draw: st.DrawFn, *, max_buffers: int = 24, unit: int = 64) -> dict[str, Any]:
    """Generate arguments of an allocation problem.

    They are `sizes` (multiples of `unit`), `intervals` (disjoint and ascending for each buffer) and `positions`.
    """
    positions = draw(st.integers(1, 30))
    count = draw(st.integers(0, max_buffers))
    intervals = [draw(_intervals(positions)) for _ in range(count)]
    sizes = [unit * draw(st.integers(0 if unit == 1 else 1, 20)) for _ in range(count)]
    return {"sizes": sizes, "intervals": intervals, "positions": positions}


@st.composite
def _intervals(draw: st.DrawFn, positions: int) -> tuple[Interval, ...]:
    """Draw one or two half-open intervals inside [0, positions); touching ones are two lives of one buffer."""
    if draw(st.integers(0, 4)) == 0:
        return ((0, positions),)
    ends = sorted(draw(st.lists(st.integers(0, positions), min_size=2, max_size=4)))
    intervals = tuple((a, b) for a, b in zip(ends[::2], ends[1::2], strict=False) if a < b)
    return intervals or ((ends[0], ends[0] + 1),) if ends[0] < positions else ((positions - 1, positions),)


def _pass_text(name: str, options: Mapping[str, str]) -> str:
    return name + (f"{{{' '.join(f'{key}={value}' for key, value in options.items())}}}" if options else "")
