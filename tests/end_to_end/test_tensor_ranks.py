"""Tensor-parallel ranks train like one rank, within a bound, and bit for bit like other plans of the same tp.

Configurations are a pairwise covering array of placements, state, types and models. Every run is verified before, and checked against the
planned lives of its bytes, with freed bytes poisoned.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.targets.runtime.checkpoint.state import training_state
from tests.end_to_end.test_equivalence import covering_rows
from tests.end_to_end.tiny_runs import (
    MODEL,
    OPTIMIZER,
    instructions,
    losses,
    make_plan,
    make_program,
    same_bits,
    start,
    train,
)
from tests.end_to_end.toys import GEMMA3, GPT2, NEOX, OLMO2, SHARED_EXPERT
from tests.mutation.judge import OVERFLOWING_SCALE
from tests.mutation.subjects import WITH_STORES

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

STEPS = 3
LAYERS4 = evolve(MODEL, layers=4, ffn_size=37)
"""61 tokens and 37 rows of the MLP: neither is shared out evenly."""
MODELS = {
    "llama": LAYERS4,
    "tied": evolve(LAYERS4, tied_embeddings=True),
    "qwen2": evolve(LAYERS4, family="qwen2", qkv_bias=True),
    "qwen3": evolve(LAYERS4, family="qwen3", qk_norm="head", kv_heads=4),
    "window": evolve(LAYERS4, family="mistral", sliding_window=3),
    "capped": in_family(
        LAYERS4, "gemma2", attention_scale=0.3, embedding_scale=24**0.5, attention_softcap=2.0, logit_softcap=3.0
    ),
    "granite": evolve(
        LAYERS4, family="granite", residual_scale=0.5, embedding_scale=2.0, logit_scale=0.5, attention_scale=0.3
    ),
    "gpt2": evolve(GPT2, layers=4, ffn_size=37),
    "neox": evolve(NEOX, layers=4, ffn_size=37),
    "gemma3": evolve(GEMMA3, layers=4, ffn_size=37, layer_kinds="wfwf"),
    "olmo2": evolve(OLMO2, layers=4, ffn_size=37),
    "experts": evolve(LAYERS4, family="mixtral", experts=4, experts_per_token=2),
    "shared-expert": evolve(SHARED_EXPERT, layers=4),
    "some-layers": evolve(SHARED_EXPERT, layers=4, mlp_kinds="dede"),
    "normed-head": evolve(LAYERS4, family="baichuan", packed_qkv=True, kv_heads=4, normalised_head=True),
}
PLACEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ratrain": ("ratrain", {}),
    "blocking": ("baseline-1f1b", {}),
    "zb-h1": ("zb-h1", {}),
    "interleaved": ("interleaved", {"chunks": 2, "cuts": (1, 2, 3)}),
    "zb-v": ("zb-v", {"chunks": 2, "layout": "vee", "cuts": (1, 2, 3)}),
    "slices": ("seq1f1b", {"slices": (4, 4)}),
    "one-stage": ("ratrain", {"pp": 1, "cuts": ()}),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "placement": tuple(PLACEMENTS),
    "peers": ((2, True), (4, True), (2, False), (4, False)),
    "state": ((1, 0, "last"), (2, 0, "last"), (2, 1, "last"), (2, 2, "each-micro-batch"), (2, 3, "last")),
    "model": tuple(MODELS),
    "dtype": ("f32", "f16", "bf16"),
    "clip": ("none", "global"),
    "mask": ("causal", "document"),
    "mlp_chunk": (None, 5),
    "kernels": ("fast", "reference"),
}
BOUNDS = {"f32": 2e-6, "f16": 2e-3, "bf16": 2e-2}
"""Of the loss, of plans of one peer and of several."""
ROWS = covering_rows(FACTORS)
GATE = (
    *(("window", "blocking"), ("gpt2", "zb-v"), ("neox", "slices"), ("gemma3", "zb-v"), ("olmo2", "zb-h1")),
    *(("experts", "blocking"), ("shared-expert", "zb-h1")),
)
"""Models and placements of which the first row is a quick representative of the others."""
IN_THE_GATE = [next(row for row in ROWS if (row["model"], row["placement"]) == pair) for pair in GATE]


def keys_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a plan of a row says, apart from peers and placement."""
    dp, zero, reduce = row["state"]
    if row["placement"] == "slices" and reduce != "last":
        reduce, zero = "last", 1  # the slices of a micro-batch add to one gradient
    keys = {"dp": dp, "zero": zero, "reduce": reduce, "view_dtype": row["dtype"], "mlp_chunk": row["mlp_chunk"]}
    if MODELS[row["model"]].experts is not None:  # which take all rows at once
        keys["mlp_chunk"] = None
        if row["placement"] != "slices":
            keys["router"] = RouterLosses(0.3, 0.1)
    keys |= {"attention_mask": row["mask"], "seq_len": 8, "micro_batches": 4, "micro_batch_size": 1}
    if row["dtype"] == "f16":
        keys["loss_scale"] = 256.0
    keys["optimizer"] = evolve(OPTIMIZER, eps=1e-5, clip=row["clip"], max_norm=0.3)
    return keys


def trained(row: dict[str, Any], peers: tuple[int, bool], placement: str = "", **settings: Any) -> TrainingRun:
    """A run of a row under a number of peers, with every check."""
    strategy, own = PLACEMENTS[placement or row["placement"]]
    keys = {**keys_of(row), **own, "tp": peers[0]}
    if peers[0] > 1:
        keys["sequence_sharding"] = peers[1]
    program = make_program(MODELS[row["model"]], strategy, **keys)
    return train(program, STEPS, kernels=row["kernels"], check_memory=True, poison=True, **settings)


def whole(run: TrainingRun) -> dict[str, bytes]:
    """Masters and moments of the whole model, bit for bit, whatever its peers, stages and replicas."""
    blocks = training_state(run.engine, STEPS).blocks
    return {f"{b} {kind}": np.asarray(getattr(blocks[b], kind)).tobytes() for b in blocks for kind in ("p", "m1", "m2")}


@pytest.mark.parametrize(
    "row",
    [row if row in IN_THE_GATE else pytest.param(row, marks=pytest.mark.full) for row in ROWS],
    ids=lambda row: "-".join(str(value) for value in row.values()),
)
@pytest.mark.sampled(4)
def test_peers_train_as_one_and_alike_under_all_placements(row: dict[str, Any]) -> None:
    found = trained(row, row["peers"])
    one = trained(row, (1, True))
    assert losses(found) == pytest.approx(losses(one), rel=BOUNDS[row["dtype"]])
    assert losses(one)[0] != losses(one)[-1]
    if row["placement"] != "slices":  # slices round otherwise
        peers, sharding = row["peers"]
        # the gradient of a norm of what blocks add is a sum over peers where they share out rows, and one peer's where not
        other = trained(row, (peers, sharding if MODELS[row["model"]].has_post_norm else not sharding), "blocking")
        assert losses(found) == losses(other)
        assert whole(found) == whole(other)


def peer_program(**keys: Any) -> Program:
    defaults: dict[str, Any] = {"tp": 2, "seq_len": 8, "micro_batches": 4, "model": MODELS["tied"]}
    return make_program(name="ratrain", **(defaults | keys))


@pytest.mark.parametrize("clip", [pytest.param("none", marks=pytest.mark.full), "global"])
@pytest.mark.full
def test_a_step_that_overflows_is_skipped_by_all_peers(clip: str) -> None:
    """The first steps of a dynamic scale that is too high; as many blocks are skipped on each peer as with one."""
    optimizer = evolve(OPTIMIZER, clip=clip, max_norm=0.3)
    runs = [start(peer_program(tp=tp, optimizer=optimizer, loss_scale=None), 6, poison=True) for tp in (1, 2, 4)]
    for run in runs:
        for rank in chain.from_iterable(run.engine.ranks):
            rank.fill("scale", "", (OVERFLOWING_SCALE, 0.0))
        list(run.steps())
    one = [step.report.skipped_blocks for step in runs[0].done]
    assert any(one)
    assert not all(one)
    for run in runs[1:]:
        tp = run.engine.program.plan.tp
        assert [step.report.skipped_blocks for step in run.done] == [tp * blocks for blocks in one]
        assert run.engine.loss_scale == runs[0].engine.loss_scale
        assert losses(run) == pytest.approx(losses(runs[0]), rel=BOUNDS["f16"])


@pytest.mark.full
@pytest.mark.parametrize("model", ["tied", "gemma3", "neox", "olmo2", "shared-expert"])
@pytest.mark.parametrize("sharding", [True, False])
def test_no_order_of_work_changes_a_bit(sharding: bool, model: str) -> None:
    optimizer = evolve(OPTIMIZER, clip="global", max_norm=0.3)
    program = peer_program(model=MODELS[model], sequence_sharding=sharding, optimizer=optimizer)
    plain = train(program, 2)
    for seed in range(20):
        same_bits(train(program, 2, interleave_seed=seed, poison=True), plain)
    same_bits(train(program, 2, threads=4, poison=True), plain)


@pytest.mark.parametrize(
    "model",
    [
        *("tied", "shared-expert"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "gemma3", "neox", "olmo2")),
    ],
)
def test_a_checkpoint_of_peers_goes_on_with_any_number_of_them(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"view_dtype": "f32", "model": MODELS[model], "optimizer": evolve(OPTIMIZER, eps=1e-5)}
    saved = str(tmp_path / "saved")
    before = train(peer_program(**keys), 3, save=saved)
    through = start(peer_program(**keys), 5)
    list(through.steps())
    for tp in (1, 2, 4):
        run = start(peer_program(**keys, tp=tp), 2, resume=saved)
        assert whole(run) == whole(before), "what a checkpoint says does not ask how many peers read it"
        list(run.steps())
        if tp == 2:
            same_bits(run, through)
        assert losses(run) == pytest.approx(losses(through)[3:], rel=BOUNDS["f32"])


REWRITINGS = (
    "recompute{policy=full}",
    "recompute{policy=attention}",
    "recompute{policy=norms}",
    "recompute{policy=auto budget=60KiB}",
    "recompute{policy=none store=host}",
    "recompute{policy=full store=host}",
    "overlap-tensor{pieces=merged halves=split},recompute{policy=full}",
)
OVER_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows-shared": ("place-1f1b", {}),
    "whole-rows": ("place-1f1b", {"sequence_sharding": False, "tp": 4}),
    "slices": ("place-schedule", {"slices": (4, 4), "schedule": "seq1f1b", "attention_mask": "document"}),
    "halves": ("place-zb-h1", {"attention": "scores-kept"}),
}


@pytest.mark.parametrize("rewriting", REWRITINGS)
@pytest.mark.parametrize("plan", OVER_HEADS)
@pytest.mark.sampled(8)
def test_norms_over_heads_keep_their_bits_whatever_is_recovered_stored_or_merged(plan: str, rewriting: str) -> None:
    """What their sums were is kept: a recovery makes the same of it, without a collective."""
    placement, own = OVER_HEADS[plan]
    keys = {"tp": 2, "dp": 1, "zero": 0, "view_dtype": "f32", "seq_len": 8, "micro_batches": 4, **own}
    runs, exchanges = [], set()
    for passes in (placement, f"{placement},{rewriting}"):
        module = api.compile(
            MODELS["olmo2"], make_plan(MODELS["olmo2"], **keys), passes=f"{passes},allocate-ddr", machine=WITH_STORES
        )
        program = api.emit(module, machine=WITH_STORES)
        exchanges.add(sum(1 for _ in instructions(program, "reduce_sums")))
        runs.append(train(program, 2, check_memory=True, poison=True))
    assert losses(runs[0]) == losses(runs[1])
    assert whole(runs[0]) == whole(runs[1])
    assert len(exchanges) == 1
