"""Closed forms of Korthikanti et al. 2022 (arXiv 2205.05198), which the formulas of Megatron-LM must meet exactly.

The paper leaves the statistics of rows out; so do these tests, and everything else must agree to the byte.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from ratrain.ratrain_ir.schedules.named import most_held
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing
from ratrain.ratrainc.fit.holdings.activations import ROW_STATISTICS, kept_activations, kept_by_policy, layer_kept
from ratrain.ratrainc.fit.holdings.part import Part
from tests.ratrainc.fit.jobs import gpt, megatron

SEQ, BATCH, HIDDEN, HEADS = 128, 2, 64, 8
ALL_T = [1, 2, 4, 8]


def per_token(sharded: int, whole: int, t: int, *, sequence: bool, scores: int) -> Fraction:
    """s b h (whole + sharded / t + scores a s / (h t)), with sequence parallelism all of it over t."""
    sbh = SEQ * BATCH * HIDDEN
    inner = Fraction(whole + sharded, t) if sequence else whole + Fraction(sharded, t)
    return sbh * (inner + Fraction(scores * HEADS * SEQ, HIDDEN * t))


def layer_bytes(**fields) -> int:
    job = megatron(gpt(HIDDEN, HEADS), seq_len=SEQ, micro_batch_size=BATCH, **fields)
    return sum(each.bytes for each in kept_by_policy(Part(job, 0)) if each.name != ROW_STATISTICS)


@pytest.mark.parametrize("t", ALL_T)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_with_and_without_masks(t, sequence, dropout):
    # without dropout: no mask of each block's result (2), and of the scores only what softmax returns
    whole, scores = (10, 5) if dropout else (8, 2)
    measured = layer_bytes(tp=t, sequence_sharding=sequence, dropout=dropout)
    assert measured == per_token(24, whole, t, sequence=sequence, scores=scores)


@pytest.mark.parametrize("t", ALL_T)
def test_equation_1_and_table_2(t):
    sbh = SEQ * BATCH * HIDDEN
    scores = Fraction(5 * HEADS * SEQ, HIDDEN)
    assert layer_bytes(tp=1, dropout=0.1) == sbh * (34 + scores)
    assert layer_bytes(tp=t, dropout=0.1) == sbh * (10 + Fraction(24, t) + scores / t)
    assert layer_bytes(tp=t, sequence_sharding=True, dropout=0.1) == sbh * (Fraction(34, t) + scores / t)
    selective = {"checkpointing": Checkpointing.ATTENTION, "dropout": 0.1, "tp": t}
    assert layer_bytes(**selective) == sbh * (10 + Fraction(24, t))
    assert layer_bytes(**selective, sequence_sharding=True) == sbh * Fraction(34, t)
    assert layer_bytes(checkpointing=Checkpointing.FULL, dropout=0.1, tp=t) == 2 * sbh
    sharded = layer_bytes(checkpointing=Checkpointing.FULL, dropout=0.1, tp=t, sequence_sharding=True)
    assert sharded == 2 * sbh // t


@pytest.mark.parametrize("t", ALL_T)
def test_fused_attention_keeps_what_selective_recomputation_does(t):
    fused = layer_bytes(tp=t, attention=Attention.FLASH, dropout=0.1)
    assert fused == layer_bytes(tp=t, checkpointing=Checkpointing.ATTENTION, dropout=0.1)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_the_first_stage_keeps_as_much_as_all_layers_once(p, m):
    job = megatron(gpt(layers=16), pp=p, gradient_accumulation=m)
    part = Part(job, 0)
    layer = sum(each.bytes for each in layer_kept(part))
    assert sum(kept_activations(part, part.layers_in_flight).values()) == 16 * layer


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 4), (8, 2)])
def test_interleaving_adds_its_share(p, v):
    job = megatron(gpt(layers=32), pp=p, gradient_accumulation=4 * p, virtual_stages=v, schedule="interleaved")
    assert Part(job, 0).layers_in_flight == 32 * (1 + Fraction(p - 1, p * v))


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("p", [2, 4])
def test_layers_in_flight_are_those_of_the_schedules_actions(p, m, schedule, v):
    if m % p and v > 1:
        pytest.skip("interleaving needs a multiple of the stages")
    job = megatron(gpt(layers=32), pp=p, gradient_accumulation=m, virtual_stages=v, schedule=schedule)
    shape = PipelineShape(p, m, v)
    for stage in range(p):
        part = Part(job, stage)
        assert part.layers_in_flight == most_held(schedule, shape, stage) * (part.layers // v), stage
