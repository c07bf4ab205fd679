"""The plan front end: what a plan.toml means, how a model is cut, and its fields and text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.accumulation import ACCUMULATIONS
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import DTYPES, KEYS, Optimizer, Plan
from ratrain.ratrain_ir.config.plan_keys import CONTEXT_LAYOUTS, runs_of_context
from ratrain.ratrain_ir.config.plan_text import plan_from_fields, plan_to_toml
from ratrain.ratrain_ir.config.quantised import FORMATS
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.text.plan_file import load_plan
from tests.ratrain_ir.config.base_plan import BASE, MODEL, parse, refusal

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

EXAMPLES = Path(__file__).parents[3] / "examples"


# -- what is right -----------------------------------------------------------------------------------------------------


def test_defaults():
    plan = parse(BASE)
    assert plan == Plan(pp=4, dp=2, cuts=(2, 4, 6), micro_batch_size=1, micro_batches=8, seq_len=32)
    assert plan.optimizer == Optimizer(3e-4, (0.9, 0.95), 1e-8, 0.1, 0, None, 0.0, "none", 1.0)
    assert (plan.global_batch, plan.tokens_per_step, plan.clusters) == (16, 512, 8)
    assert [list(plan.chunk_layers(stage, MODEL)) for stage in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_slices_by_number_of_even_work_and_by_length():
    def lengths(said: str, model: ModelConfig = MODEL) -> tuple[int, ...]:
        plan = parse(BASE.replace("seq_len = 32", f"seq_len = 4096\nslices = {said}"), model)
        assert parse(plan_to_toml(plan), model) == plan
        return plan.slices

    assert lengths("3") == (1366, 1365, 1365)
    assert lengths("[4000, 96]") == (4000, 96)
    by_work = lengths('"even-work 4"')
    assert sum(by_work) == 4096
    assert list(by_work) == sorted(by_work, reverse=True), "later slices attend to more keys, so they are shorter"
    pairs = [sum(range(sum(by_work[:n]) + 1, sum(by_work[: n + 1]) + 1)) for n in range(4)]
    work = [2 * MODEL.layer_matrix_elements(0) * n + 4 * MODEL.q_size * p for n, p in zip(by_work, pairs, strict=True)]
    assert max(work) / min(work) == pytest.approx(1, abs=0.01)
    windowed = evolve(MODEL, family="mistral", sliding_window=1)
    assert lengths('"even-work 4"', windowed) == (1024,) * 4, "with a window of one token all slices do the same"


@given(st.integers(1, 6), st.sampled_from(CONTEXT_LAYOUTS), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_context_ranks_can_share_out_slices_that_are_given_by_number(cp, layout, count, more, even):
    length = runs_of_context(cp, layout) * (count + more)
    said = f"cp = {cp}" + f'\ncontext_layout = "{layout}"' * (cp > 1)
    text = BASE.replace("dp = 2", f"dp = 2\n{said}")
    slices = count if even else f'"even-work {count}"'
    plan = parse(text.replace("seq_len = 32", f"seq_len = {length}" + f"\nslices = {slices}" * (count > 1)), MODEL)
    lengths = plan.slices or (length,)
    assert (sum(lengths), len(lengths)) == (length, count)
    assert all(each > 0 and each % (plan.cp * plan.context_runs) == 0 for each in lengths)


@pytest.mark.parametrize(("words", "good"), [(3, False), (4, True), (5, False), (6, False), (7, True), (256, True)])
def test_every_tensor_parallel_rank_has_words(words, good):
    model, text = evolve(MODEL, vocab_size=words), BASE.replace("dp = 2", "dp = 2\ntp = 4")
    if good:
        assert parse(text, model).tp == 4
        return
    (error,) = refusal(parse, text, model)
    assert (error.code, error.help) == ("RT064", "use another tp")
    assert "leave a rank without any" in error.message


def test_zero_default_needs_replicas():
    assert parse(BASE).zero == 1
    assert parse(BASE.replace("dp = 2", "dp = 1")).zero == 0
    assert parse(BASE.replace("dp = 2", "dp = 1") + "[state]\nzero = 2\n").zero == 2


def test_dtypes_follow():
    f32 = parse(BASE + '[state]\nview_dtype = "f32"\n')
    assert (f32.grad_dtype, f32.grad_shard_dtype, f32.loss_scale) == ("f32", "f32", 1.0)
    mixed = parse(BASE + '[state]\ngrad_dtype = "f32"\n')
    assert (mixed.view_dtype, mixed.grad_dtype, mixed.grad_shard_dtype, mixed.loss_scale) == ("f16", "f32", "f32", None)
    assert parse(BASE + '[state]\nview_dtype = "f32"\nloss_scale = 1\n').loss_scale == 1.0
    assert parse(BASE + "[state]\nloss_scale = 1024\n").loss_scale == 1024.0
    assert parse(BASE + '[state]\nloss_scale = "dynamic"\n').loss_scale is None
    bf16 = parse(BASE + '[state]\nview_dtype = "bf16"\n')
    assert (bf16.grad_dtype, bf16.grad_shard_dtype, bf16.loss_scale) == ("bf16", "bf16", 1.0)


@pytest.mark.parametrize("key", ["view_dtype", "grad_dtype", "grad_shard_dtype"])
def test_a_loss_scale_goes_with_f16_wherever_it_is(key):
    types = dict.fromkeys(("view_dtype", "grad_dtype", "grad_shard_dtype"), "bf16") | {key: "f16"}
    state = "".join(f'{name} = "{dtype}"\n' for name, dtype in types.items())
    assert parse(f"{BASE}[state]\n{state}loss_scale = 2\n").loss_scale == 2.0


def test_every_key():
    plan = parse("""
        state = { zero = 2, reduce = "each-micro-batch", grad_shard_dtype = "f32" }
        parallel.pp = 3
        parallel.dp = 2
        parallel.cuts = [1, 5]
        parallel.schedule = "1f1b"
        [batch]
        micro_batch_size = 2
        micro_batches = 3
        seq_len = 16
        head_chunk = 8
        mlp_chunk = 6
        seed = 7
        [optimizer]
        lr = 1
        betas = [0, 0.5]
        eps = 1e-6
        weight_decay = 0
        warmup_steps = 2
        total_steps = 10
        min_lr = 0.1
        clip = "global"
        max_norm = 2
    """)
    optimizer = Optimizer(1.0, (0.0, 0.5), 1e-6, 0.0, 2, 10, 0.1, "global", 2.0)
    assert plan == Plan(
        3,
        2,
        (1, 5),
        2,
        3,
        16,
        1,
        "zigzag",
        "keys",
        1,
        1,
        8,
        6,
        2,
        "each-micro-batch",
        "f16",
        "f16",
        "f32",
        None,
        "1f1b",
        7,
        optimizer,
    )
    assert type(plan.optimizer.lr) is float


def test_examples():
    tiny = load_model(str(EXAMPLES / "tiny.json"))
    plan = load_plan(EXAMPLES / "tiny.toml", tiny)
    assert (tiny.name, tiny.vocab_size, tiny.parameters) == ("tiny", 256, 791680)
    assert (plan.pp, plan.dp, plan.cuts, plan.global_batch, plan.tokens_per_step) == (2, 2, (2,), 16, 2048)
    big = load_plan(str(EXAMPLES / "llama-2-7b-256.toml"), load_model("llama-2-7b"))
    assert (big.clusters, big.global_batch, big.cuts, big.zero) == (256, 2048, (16,), 1)


def test_learning_rate():
    constant = Optimizer(lr=0.5)
    assert {constant.learning_rate(step) for step in (0, 1, 10**9)} == {0.5}
    warm = Optimizer(lr=1.0, warmup_steps=4, total_steps=12, min_lr=0.2)
    assert [warm.learning_rate(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert warm.learning_rate(8) == pytest.approx(0.6, abs=1e-12)
    assert warm.learning_rate(6) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)), abs=1e-12)
    assert warm.learning_rate(12) == warm.learning_rate(99) == 0.2
    assert Optimizer(lr=1.0, warmup_steps=2, total_steps=2).learning_rate(2) == 0.0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 20), st.integers(1, 40), st.floats(0, 1))
def test_learning_rate_rises_then_falls(warmup, decay, least):
    optimizer = Optimizer(lr=1.0, warmup_steps=warmup, total_steps=warmup + decay, min_lr=least)
    rates = [optimizer.learning_rate(step) for step in range(warmup + decay + 1)]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[-1] == least


# -- fields and text ---------------------------------------------------------------------------------------------------


@st.composite
def levels(draw, usual: int) -> ZeroLevels:
    """Levels of blocks of which each differs from what it would be without."""
    text = []
    for kind in ("embed", "head"):
        text += [f"{kind} 3"] * draw(st.booleans())
    for kind in ("attention", "mlp"):
        all_of_kind = draw(st.booleans())
        text += [f"{kind}.* 3"] * all_of_kind
        first, last = sorted(draw(st.tuples(*[st.integers(0, MODEL.layers - 1)] * 2)))
        layers = f"{first}" if first == last else f"{first}-{last}"
        text += [f"{kind}.{layers} {usual if all_of_kind else 3}"] * draw(st.booleans())
    return ZeroLevels.parse(", ".join(text or ["embed 3"]))


@st.composite
def plans(draw) -> Plan:
    pp = draw(st.integers(1, MODEL.layers))
    cuts = draw(st.lists(st.integers(1, MODEL.layers - 1), min_size=pp - 1, max_size=pp - 1, unique=True).map(sorted))
    zero = draw(st.integers(0, 2))
    dp = draw(st.integers(1, 4096))
    view_dtype, grad_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    each = zero == 2 and draw(st.booleans())
    lr = draw(st.floats(0, 1))
    warmup = draw(st.integers(0, 1000))
    total = draw(st.none() | st.integers(max(1, warmup), 10**6))
    below_one = st.floats(0, 1, exclude_max=True)
    clip = draw(st.sampled_from(["none", "global"]))
    return Plan(
        pp=pp,
        dp=dp,
        cuts=tuple(cuts),
        micro_batch_size=draw(st.integers(1, 64)),
        micro_batches=draw(st.integers(1, 4096)),
        seq_len=draw(st.integers(1, 1 << 20)),
        zero=zero,
        reduce="each-micro-batch" if each else "last",
        zero_blocks=draw(st.none() | levels(2 if zero else 0)),
        shard_group=draw(st.sampled_from([None, *(g for g in range(2, dp) if dp % g == 0 and zero)])),
        gather_quantised=draw(st.sampled_from([None, *FORMATS])) if zero and dp > 1 else None,
        reduce_quantised=draw(st.sampled_from([None, "int8-block"])) if zero and dp > 1 else None,
        accumulate=draw(st.sampled_from(ACCUMULATIONS)) if view_dtype == "f16" else "f32",
        view_dtype=view_dtype,
        grad_dtype=grad_dtype,
        grad_shard_dtype=draw(st.sampled_from(DTYPES)) if zero and dp > 1 else grad_dtype,
        loss_scale=1.0 if view_dtype != "f16" else draw(st.none() | st.floats(2**-20, 2**32)),
        seed=draw(st.integers(0, 2**63 - 1)),
        optimizer=Optimizer(
            lr=lr,
            betas=(draw(below_one), draw(below_one)),
            eps=draw(st.floats(1e-30, 1)),
            weight_decay=draw(st.floats(0, 10)),
            warmup_steps=warmup,
            total_steps=total,
            min_lr=0.0 if total is None else draw(st.floats(0, lr)),
            clip=clip,
            max_norm=1.0 if clip == "none" else draw(st.floats(1e-3, 1e3)),
        ),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(plans())
def test_round_trips(plan):
    assert plan_from_fields(plan.to_fields(), model=MODEL) == plan
    assert plan_from_fields(plan.to_fields()) == plan
    assert parse(plan_to_toml(plan)) == plan


def test_a_section_of_which_nothing_is_said_is_left_out():
    assert "[numerics]" not in plan_to_toml(parse(BASE))


def test_fields_are_flat():
    values = parse(BASE).to_fields()
    assert list(values)[:6] == ["pp", "dp", "cuts", "micro_batch_size", "micro_batches", "seq_len"]
    assert "optimizer" not in values
    assert (values["cuts"], values["betas"], values["loss_scale"]) == ((2, 4, 6), (0.9, 0.95), None)


@pytest.mark.parametrize("scale", [None, 1.0, 1024.0])
def test_the_ir_text_has_the_words_of_the_file(scale):
    """A scale that is adapted is no scale of none; texts that said `none` for it mean what they meant."""
    plan = evolve(parse(BASE), loss_scale=scale)
    said = KEYS.with_words(plan.to_fields())
    assert said["loss_scale"] == ("dynamic" if scale is None else scale)
    assert said["total_steps"] is None
    assert plan_from_fields(said) == plan_from_fields(plan.to_fields()) == plan
