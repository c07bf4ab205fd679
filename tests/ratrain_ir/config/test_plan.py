"""The plan front end: what a plan.toml means, how a model is cut, and everything a plan can get wrong."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.accumulation import ACCUMULATIONS
from ratrain.ratrain_ir.config.cuts import balance_cuts, head_flops, layer_flops
from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import DTYPES, KEYS, Optimizer, Plan
from ratrain.ratrain_ir.config.plan_keys import CONTEXT_LAYOUTS, runs_of_context
from ratrain.ratrain_ir.config.plan_text import check_plan, load_plan, parse_plan, plan_from_fields, plan_to_toml
from ratrain.ratrain_ir.config.quantised import FORMATS
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError

EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL = ModelConfig("test", "llama", 256, 64, 8, 4, 2, 16, 176, 1e-5)
BASE = """\
[parallel]
pp = 4
dp = 2

[batch]
micro_batch_size = 1
micro_batches = 8
seq_len = 32
"""


def parse(text: str, model: ModelConfig = MODEL) -> Plan:
    return parse_plan(text, file="plan.toml", model=model)


def refusal(action, *arguments, **options) -> list:
    with pytest.raises(DiagnosticError) as caught:
        action(*arguments, **options)
    assert caught.value.diagnostics
    return caught.value.diagnostics


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
    work = [2 * MODEL.matrix_elements_per_layer * n + 4 * MODEL.q_size * p for n, p in zip(by_work, pairs, strict=True)]
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


# -- cuts --------------------------------------------------------------------------------------------------------------


def stage_costs(model: ModelConfig, cuts: tuple[int, ...], seq_len: int) -> list[int]:
    ends = (0, *cuts, model.layers)
    costs = [(end - start) * layer_flops(model, seq_len) for start, end in itertools.pairwise(ends)]
    return [*costs[:-1], costs[-1] + head_flops(model, seq_len)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.data(), st.sampled_from([2, 256, 1000, 5000, 40_000]), st.sampled_from([1, 16, 512]))
def test_cuts_are_the_best_of_all(layers, data, vocab, seq_len):
    model = evolve(MODEL, layers=layers, vocab_size=vocab)
    pp = data.draw(st.integers(1, layers))
    cuts = balance_cuts(model, pp, seq_len)

    def badness(candidate: tuple[int, ...]) -> tuple[int, int]:
        costs = stage_costs(model, candidate, seq_len)
        return max(costs), sum(cost * cost for cost in costs)

    assert badness(cuts) == min(badness(other) for other in itertools.combinations(range(1, layers), pp - 1))
    sizes = [b - a for a, b in itertools.pairwise((0, *cuts))]
    assert sizes == sorted(sizes)


def test_layer_flops():
    # weights: 64 * (64 + 2 * 32 + 64) + 3 * 64 * 176 = 46080 multiply-adds a token; 3 tokens see 1 + 2 + 3 tokens
    assert layer_flops(MODEL, 3) == 2 * 46080 * 3 + 4 * 64 * 6
    windowed = evolve(MODEL, family="mistral", sliding_window=2)
    assert layer_flops(windowed, 3) == 2 * 46080 * 3 + 4 * 64 * 5
    assert layer_flops(evolve(windowed, sliding_window=9), 3) == layer_flops(MODEL, 3)
    assert head_flops(MODEL, 3) == 2 * 64 * 256 * 3


@pytest.mark.parametrize(
    ("pp", "seq_len", "phrase"), [(9, 8, "8 layers cannot fill 9"), (0, 8, "at least 1"), (1, 0, "1")]
)
def test_impossible_cuts(pp, seq_len, phrase):
    (error,) = refusal(balance_cuts, MODEL, pp, seq_len)
    assert error.code == "RT064"
    assert phrase in error.message


# -- what is wrong -----------------------------------------------------------------------------------------------------


def changed(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new)


REFUSED = [
    # RT063: syntax, keys, types
    (changed("pp = 4", "pp = "), "RT063", "not valid TOML", 2),
    (changed("pp = 4", "pp = 4\npp = 5"), "RT063", "not valid TOML", 3),
    (changed("[batch]", "[batch"), "RT063", "not valid TOML", 5),
    (BASE + "[parallel]\n", "RT063", "not valid TOML", 9),
    (BASE + 'x = "', "RT063", "not valid TOML", 9),
    (BASE + "a = " + "9" * 5000, "RT063", "not usable TOML", 1),
    (BASE + "a = " + "[" * 100_000, "RT063", "nested too deeply", 1),
    (changed("pp = 4\n", ""), "RT063", "'parallel.pp' is missing", 1),
    (changed("seq_len = 32\n", ""), "RT063", "'batch.seq_len' is missing", 5),
    (changed("pp = 4", "pp = 0"), "RT063", "'parallel.pp' is 0", 2),
    (changed("pp = 4", "pp = true"), "RT063", "'parallel.pp' is true", 2),
    (changed("pp = 4", "pp = 4.0"), "RT063", "'parallel.pp' is 4.0", 2),
    (changed("pp = 4", 'pp = "4"'), "RT063", "'parallel.pp' is \"4\"", 2),
    (changed("dp = 2", "dp = -2"), "RT063", "'parallel.dp' is -2", 3),
    (changed("dp = 2", "dp = 0x" + "f" * 6000), "RT063", "a number of 24000 bits", 3),
    (changed("micro_batches = 8", "micro_batches = 0"), "RT063", "'batch.micro_batches' is 0", 7),
    (changed("micro_batch_size = 1", "micro_batch_size = [1]"), "RT063", "'batch.micro_batch_size' is [1]", 6),
    (changed("seq_len = 32", "seq_len = 100000000"), "RT063", "'batch.seq_len' is 100000000", 8),
    (changed("seq_len = 32", "seq_len = 1979-05-27"), "RT063", "'batch.seq_len' is datetime.date", 8),
    (changed("dp = 2", 'dp = 2\ncuts = "even"'), "RT063", "'parallel.cuts' is \"even\"", 4),
    (changed("dp = 2", "dp = 2\ncuts = [2, 4, 6.5]"), "RT063", "'parallel.cuts' is [2, 4, 6.5]", 4),
    (changed("dp = 2", "dp = 2\ncuts = [true, 4, 6]"), "RT063", "'parallel.cuts' is [True, 4, 6]", 4),
    (changed("dp = 2", "dp = 2\nschedule = 1"), "RT063", "'parallel.schedule' is 1", 4),
    (changed("dp = 2", "dp = 2\nep = 2"), "RT063", '"ep" is not known in [parallel]', 4),
    (changed("[batch]", "[bach]\na = 1\n[batch]"), "RT063", 'the section "bach" is not known', 5),
    ("batch = 3\n" + BASE[: BASE.index("[batch]")], "RT063", "'batch' is 3: a section is expected", 1),
    ("seed = 3\n" + BASE, "RT063", 'the key "seed" is not known at the top', 1),
    (BASE + "[state]\nlr = 1e-3\n", "RT063", '"lr" is not known in [state]', 10),
    (BASE + "[state]\nzero = 4\n", "RT063", "'state.zero' is 4", 10),
    (BASE + "[state]\nzero = true\n", "RT063", "'state.zero' is true", 10),
    (BASE + '[state]\nreduce = "first"\n', "RT063", "'state.reduce' is \"first\"", 10),
    (BASE + '[state]\nview_dtype = "f8"\n', "RT063", "'state.view_dtype' is \"f8\"", 10),
    (BASE + "[state]\nloss_scale = 0\n", "RT063", "'state.loss_scale' is 0", 10),
    (BASE + "[state]\nloss_scale = inf\n", "RT063", "'state.loss_scale' is inf", 10),
    (BASE + '[state]\nloss_scale = "big"\n', "RT063", "'state.loss_scale' is \"big\"", 10),
    (changed("seq_len = 32", "seq_len = 32\nseed = -1"), "RT063", "'batch.seed' is -1", 9),
    (BASE + "[optimizer]\nlr = -1e-3\n", "RT063", "'optimizer.lr' is -0.001", 10),
    (BASE + "[optimizer]\nlr = nan\n", "RT063", "'optimizer.lr' is nan", 10),
    (BASE + '[optimizer]\nlr = "3e-4"\n', "RT063", "'optimizer.lr' is \"3e-4\"", 10),
    (BASE + "[optimizer]\nbetas = [0.9, 1.0]\n", "RT063", "'optimizer.betas' is [0.9, 1.0]", 10),
    (BASE + "[optimizer]\nbetas = [-0.1, 0.9]\n", "RT063", "'optimizer.betas' is [-0.1, 0.9]", 10),
    (BASE + "[optimizer]\nbetas = [0.9]\n", "RT063", "'optimizer.betas' is [0.9]", 10),
    (BASE + "[optimizer]\nbetas = 0.9\n", "RT063", "'optimizer.betas' is 0.9", 10),
    (BASE + "[optimizer]\neps = 0.0\n", "RT063", "'optimizer.eps' is 0.0", 10),
    (BASE + "[optimizer]\nweight_decay = false\n", "RT063", "'optimizer.weight_decay' is false", 10),
    (BASE + "[optimizer]\nwarmup_steps = 1.5\n", "RT063", "'optimizer.warmup_steps' is 1.5", 10),
    (BASE + "[optimizer]\ntotal_steps = 0\n", "RT063", "'optimizer.total_steps' is 0", 10),
    (BASE + "[optimizer]\nmax_norm = 0\n", "RT063", "'optimizer.max_norm' is 0", 10),
    (BASE + "[optimizer]\nmax_norm = 1.0\n", "RT064", "max_norm changes nothing", 10),
    (BASE + '[optimizer]\nclip = "none"\nmax_norm = 2.0\n', "RT064", "max_norm changes nothing", 11),
    (BASE + '[optimizer]\nclip = "value"\n', "RT063", "'optimizer.clip' is \"value\"", 10),
    # RT064: contradictions, and what this version does not build
    (changed("pp = 4", "pp = 9"), "RT064", "9 stages need at least 9 layers, but test has 8", 2),
    (changed("dp = 2", "dp = 2\ncuts = [2, 4]"), "RT064", "2 cuts are given, but 4 stages have 3", 4),
    (changed("dp = 2", "dp = 2\ncuts = []"), "RT064", "0 cuts are given", 4),
    (changed("dp = 2", "dp = 2\ncuts = [2, 2, 6]"), "RT064", "do not ascend", 4),
    (changed("dp = 2", "dp = 2\ncuts = [4, 2, 6]"), "RT064", "do not ascend", 4),
    (changed("dp = 2", "dp = 2\ncuts = [2, 4, 8]"), "RT064", "cannot start at layer 8", 4),
    (changed("dp = 2", "dp = 2\ncuts = [0, 4, 6]"), "RT064", "cannot start at layer 0", 4),
    (changed("dp = 2", "dp = 2\ncuts = [-1, 4, 6]"), "RT064", "cannot start at layer -1", 4),
    (changed("dp = 2", 'dp = 2\nschedule = "chimera"'), "RT064", 'does not build the schedule "chimera"', 4),
    (changed("dp = 2", 'dp = 2\nschedule = "seq1f1b"'), "RT064", "Seq1F1B cannot be placed: it has two slices", 4),
    (changed("seq_len = 32", "seq_len = 32\nslices = 1"), "RT064", "one slice of 32 tokens changes nothing", 9),
    (changed("seq_len = 32", "seq_len = 32\nslices = 33"), "RT063", "'batch.slices' is 33", 9),
    (changed("seq_len = 32", "seq_len = 32\nslices = 0"), "RT063", "'batch.slices' is 0", 9),
    (
        changed("seq_len = 32", "seq_len = 32\nslices = [16, 15]"),
        "RT064",
        "[16, 15] do not make up a sequence of 32",
        9,
    ),
    (
        changed("seq_len = 32", "seq_len = 32\nslices = [33, -1]"),
        "RT064",
        "[33, -1] do not make up a sequence of 32",
        9,
    ),
    (changed("seq_len = 32", 'seq_len = 32\nslices = "even-work"'), "RT063", "'batch.slices' is \"even-work\"", 9),
    (
        changed("seq_len = 32", 'seq_len = 32\nslices = 2\n[compute]\nattention = "scores-kept"'),
        "RT064",
        "holds the scores of whole sequences, which slices do not have",
        11,
    ),
    (
        changed("seq_len = 32", "seq_len = 32\nslices = [12, 20]\nmlp_chunk = 21"),
        "RT064",
        "mlp_chunk 21 is more than the 20 rows of the longest slice",
        10,
    ),
    (
        changed("dp = 2", 'dp = 2\nschedule = "zb-v"\nlayout = "loop"'),
        "RT064",
        "its chunks lie in a vee, not in a loop",
        4,
    ),
    (BASE + '[state]\nreduce = "each-micro-batch"\n', "RT064", "but zero = 1 keeps them whole", 10),
    (BASE + '[state]\nreduce = "each-micro-batch"\nzero = 0\n', "RT064", "but zero = 0 keeps them whole", 10),
    (
        BASE + '[state]\ngrad_shard_dtype = "f32"\nzero = 0\n',
        "RT064",
        "with zero = 0 there are no shards to be f32",
        10,
    ),
    (
        BASE.replace("dp = 2", "dp = 1") + '[state]\ngrad_shard_dtype = "f32"\nzero = 1\n',
        "RT064",
        "with dp = 1 there are no shards to be f32",
        10,
    ),
    *(
        (BASE + f'[state]\nzero_blocks = "{levels}"\n', code, phrase, 10)
        for levels, code, phrase in [
            ("embed", "RT063", "blocks and their ZeRO levels"),
            ("embed 4", "RT063", "blocks and their ZeRO levels"),
            ("embed.0 3", "RT063", "blocks and their ZeRO levels"),
            ("mlp 3", "RT063", "blocks and their ZeRO levels"),
            ("mlp.3-2 3", "RT063", "blocks and their ZeRO levels"),
            ("mlp.01 3", "RT063", "blocks and their ZeRO levels"),
            ("embed 3,head 3", "RT063", "blocks and their ZeRO levels"),
            ("embed 3, embed 0", "RT064", "embed has two levels"),
            ("mlp.* 3, mlp.* 0", "RT064", "mlp.* has two levels"),
            ("mlp.0-4 3, mlp.4 0", "RT064", "mlp.4 has two levels"),
            ("mlp.6-8 3", "RT064", "names layer 8, but"),
            ("mlp.0 1", "RT064", "'mlp.0 1' changes nothing: mlp.0 has level 1 without it"),
            ("mlp.* 3, mlp.0 3", "RT064", "'mlp.0 3' changes nothing: mlp.0 has level 3 without it"),
            ("mlp.0 2", "RT064", 'with reduce = "last" level 2 is as level 1'),
        ]
    ),
    (
        BASE.replace("dp = 2", "dp = 1") + '[state]\nzero_blocks = "embed 1"\n',
        "RT064",
        "with one replica level 1 is as level 0",
        10,
    ),
    (BASE + "[state]\nshard_group = 1\n", "RT063", "'state.shard_group' is 1", 10),
    (BASE + "[state]\nshard_group = 3\n", "RT064", "groups of 3 replicas do not make up dp = 2", 10),
    (BASE + "[state]\nshard_group = 2\n", "RT064", "changes nothing with dp = 2", 10),
    (
        BASE.replace("dp = 2", "dp = 4") + "[state]\nshard_group = 2\nzero = 0\n",
        "RT064",
        "with zero = 0 and dp = 4 nothing is sharded",
        10,
    ),
    (BASE + "[state]\nview_group = 1\n", "RT063", "'state.view_group' is 1", 10),
    (BASE + "[state]\nzero = 3\nview_group = 2\n", "RT064", "as many replicas share all shards", 11),
    (
        BASE.replace("dp = 2", "dp = 4") + "[state]\nview_group = 2\n",
        "RT064",
        "with zero = 1 every replica has whole",
        10,
    ),
    (
        BASE.replace("dp = 2", "dp = 4") + "[state]\nzero = 3\nview_group = 3\n",
        "RT064",
        "groups of 3 replicas do not make up the 4 that have all shards",
        11,
    ),
    (
        BASE.replace("dp = 2", "dp = 8") + "[state]\nzero = 3\nshard_group = 2\nview_group = 4\n",
        "RT064",
        "groups of 4 replicas do not make up the 2 that have all shards",
        12,
    ),
    (BASE + '[numerics]\ngather_quantised = "nf4"\n', "RT063", "'numerics.gather_quantised' is \"nf4\"", 10),
    (BASE + '[numerics]\nreduce_quantised = "nf4"\n', "RT063", "'numerics.reduce_quantised' is \"nf4\"", 10),
    (BASE + '[numerics]\ngather_quantised = "int8"\n', "RT063", "'numerics.gather_quantised' is \"int8\"", 10),
    (
        BASE + '[numerics]\nreduce_quantised = "int4-block"\n',
        "RT063",
        "'numerics.reduce_quantised' is \"int4-block\"",
        10,
    ),
    *(
        (
            BASE + f'[numerics]\n{name} = "int8-block"\n[state]\nzero = 0\n',
            "RT064",
            f"{name} changes nothing: with zero = 0",
            10,
        )
        for name in ("gather_quantised", "reduce_quantised")
    ),
    (
        BASE.replace("dp = 2", "dp = 1") + '[numerics]\ngather_quantised = "int4-block"\n[state]\nzero = 3\n',
        "RT064",
        "with zero = 3 and dp = 1 nothing is sharded",
        10,
    ),
    (BASE + '[numerics]\naccumulate = "f16"\n', "RT063", "'numerics.accumulate' is \"f16\"", 10),
    *(
        (
            BASE + f'[numerics]\naccumulate = "f16-runs"\n[state]\nview_dtype = "{dtype}"\n',
            "RT064",
            f"sums products of f16, but {dtype} parameter views are multiplied",
            10,
        )
        for dtype in ("bf16", "f32")
    ),
    (BASE + '[state]\nview_dtype = "f32"\nloss_scale = 2.0\n', "RT064", "loss scale is 2.0", 11),
    (BASE + '[state]\nview_dtype = "f32"\nloss_scale = "dynamic"\n', "RT064", "loss scale is dynamic", 11),
    (BASE + '[state]\nview_dtype = "bf16"\nloss_scale = 2.0\n', "RT064", "but bf16 parameter views are not scaled", 11),
    (BASE + '[state]\nview_dtype = "bf16"\nloss_scale = "dynamic"\n', "RT064", "loss scale is dynamic", 11),
    (BASE + "[optimizer]\ntotal_steps = 9\nmin_lr = 1e-3\n", "RT064", "is above lr 0.0003", 11),
    (BASE + "[optimizer]\nmin_lr = 1e-5\n", "RT064", "is never reached", 10),
    (BASE + "[optimizer]\nwarmup_steps = 9\ntotal_steps = 8\n", "RT064", "9 warm-up steps do not fit into 8", 10),
]


@pytest.mark.parametrize(("text", "code", "phrase", "line"), REFUSED, ids=range(len(REFUSED)))
def test_refusal(text, code, phrase, line):
    errors = refusal(parse, text)
    first = next(error for error in errors if phrase in error.message)
    assert {error.code for error in errors} == {code}
    assert (first.location.file, first.location.line) == ("plan.toml", line)
    if code == "RT064":
        assert len(errors) == 1
        assert first.help
    first.render().encode()


def test_a_key_in_the_wrong_place_is_not_missing_too():
    """Keys without sections are each told their own, and no more."""
    errors = refusal(parse, "\n".join(line for line in BASE.splitlines() if not line.startswith("[")))
    assert errors
    assert all("belongs in [" in (error.help or "") for error in errors)
    assert not [error for error in errors if "is missing" in error.message]


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        (changed("seq_len", "seq_length"), "did you mean 'seq_len'?"),
        (BASE + "[optimiser]\n", "did you mean 'optimizer'?"),
        (BASE + "[state]\nlr = 1e-3\n", "'lr' belongs in [optimizer]"),
        ("seed = 3\n" + BASE, "'seed' belongs in [batch]"),
        (BASE + "[state]\nweight_decy = 0\n", "did you mean 'weight_decay'?"),
        (BASE + "[state]\nxyz = 0\n", "known are zero, reduce"),
        (changed("pp = 4", 'pp = "4"'), "write 4, without quotes"),
        (BASE + '[state]\nreduce = "each-microbatch"\n', "did you mean 'each-micro-batch'?"),
    ],
)
def test_way_out(text, way_out):
    assert any(way_out in (error.help or "") for error in refusal(parse, text))


def test_all_errors_at_once():
    text = changed("pp = 4", "pp = 99") + '[state]\nzero = 1\nreduce = "each-micro-batch"\nwhat = 1\n'
    assert [error.code for error in refusal(parse, text + '[optimizer]\nlr = "x"\n')] == [
        "RT063",
        "RT063",
        "RT064",
        "RT064",
    ]


def test_place_of_an_error():
    (error,) = refusal(parse, BASE + "[optimizer]\n  betas = [0.9, 1.5]   # too much\n")
    head, line, caret = error.render().split("\n")[:3]
    assert head.startswith("plan.toml:10:3: error[RT063]: 'optimizer.betas' is [0.9, 1.5]: a list of two numbers")
    assert line == "    betas = [0.9, 1.5]   # too much"
    assert caret == "    ^" + "~" * (len("betas = [0.9, 1.5]") - 1)
    (error,) = refusal(parse, "state = { zero = 7, reduce = 'last' }\n" + BASE)
    assert (error.location.line, error.location.column, error.location.length) == (1, 11, len("zero = 7"))


@pytest.mark.parametrize(
    ("content", "code", "phrase"),
    [
        (None, "RT002", "cannot be read"),
        (b"", "RT063", "empty"),
        (b"[parallel]\n# \xff\xfe\n", "RT063", "byte 0xff is not UTF-8"),
        (bytes(range(256)), "RT063", "is not UTF-8"),
        (b"#" * ((1 << 20) + 1), "RT063", "larger than"),
        (b"# nothing\n", "RT063", "is missing"),
    ],
)
def test_broken_file(tmp_path, content, code, phrase):
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_bytes(content)
    errors = refusal(load_plan, path, MODEL)
    assert {error.code for error in errors} == {code}
    assert phrase in errors[0].message


def test_windows_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_plan(path, MODEL) == parse(BASE)
    (error,) = refusal(load_plan, tmp_path, MODEL)
    assert error.code == "RT002"


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("fp16", "f16"), ("FP16", "f16"), ("float16", "f16"), ("half", "f16"), ("F16", "f16")),
        *(
            ("bfloat16", "bf16"),
            ("BF16", "bf16"),
            ("bf-16", "bf16"),
            ("fp32", "f32"),
            ("float", "f32"),
            ("single", "f32"),
        ),
    ],
)
@pytest.mark.parametrize("key", ["view_dtype", "grad_dtype"])
def test_other_names_of_types_lead_to_theirs(key, name, meant):
    with pytest.raises(DiagnosticError) as refused:
        parse(f'{BASE}[state]\n{key} = "{name}"\n')
    assert refused.value.diagnostics[0].help == f"did you mean '{meant}'?"


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"pp": 0}, "'pp' is 0"),
        ({"pp": 9, "cuts": tuple(range(1, 9))}, "9 stages need"),
        ({"cuts": (2, 4)}, "2 cuts are given"),
        ({"cuts": "auto"}, "'cuts' is \"auto\""),
        ({"cuts": (2, 4, 8)}, "cannot start at layer 8"),
        ({"reduce": "each-micro-batch"}, "keeps them whole"),
        ({"view_dtype": "f32"}, "f32 parameter views are not scaled"),
        ({"schedule": "chimera"}, "does not build the schedule"),
        ({"betas": (0.9, 1)}, "'betas' is (0.9, 1)"),
        ({"total_steps": 4, "warmup_steps": 5}, "5 warm-up steps"),
        ({"loss_scale": "adapted"}, "'loss_scale' is \"adapted\""),
        ({"optimizer": 1}, '"optimizer" is not a known field'),
    ],
)
def test_wrong_fields(change, phrase):
    errors = refusal(plan_from_fields, {**parse(BASE).to_fields(), **change}, model=MODEL)
    assert {error.code for error in errors} == {"RT064"}
    assert phrase in errors[0].message


def test_check_plan():
    plan = parse(BASE)
    check_plan(plan, MODEL)
    errors = refusal(check_plan, evolve(plan, cuts=(1, 2, 8), seq_len=0), MODEL)
    assert [error.code for error in errors] == ["RT064", "RT064"]
    assert errors[0].location is None


TOML_VALUES = st.sampled_from(
    [
        "1",
        "-1",
        "0",
        "3",
        "true",
        "1.5",
        "nan",
        '"last"',
        '"f32"',
        '"auto"',
        "[]",
        "[1, 2]",
        "[[1]]",
        "{ a = 1 }",
        "07:30:00",
        "'",
    ]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_any_text_reads_or_is_diagnosed(data):
    lines = plan_to_toml(parse(BASE)).split("\n")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        key = lines[at].partition("=")[0]
        lines[at] = data.draw(TOML_VALUES.map(f"{key}= {{}}".format) | st.text(max_size=6) | st.just(""))
    try:
        check_plan(parse("\n".join(lines)), MODEL)
    except DiagnosticError as error:
        diagnostics = error.diagnostics
    else:
        diagnostics = []
    assert {diagnostic.code for diagnostic in diagnostics} <= {"RT063", "RT064"}
    "".join(diagnostic.render() for diagnostic in diagnostics).encode()


def test_a_key_of_very_many_parts_is_refused_at_once() -> None:
    """The library would take minutes for it."""
    with pytest.raises(DiagnosticError, match="RT063") as caught:
        parse_plan("[parallel]\n" + "a." * 100_000 + "b = 1", file="p.toml", model=MODEL)
    assert "more than 1000 dots" in caught.value.diagnostics[0].message


# -- a plan and its model ----------------------------------------------------------------------------------------------


DYNAMIC = evolve(MODEL, rope_scaling="dynamic 2 32")


def test_dynamic_scaling_has_no_longer_sequences() -> None:
    assert parse(BASE, DYNAMIC).seq_len == 32
    (error,) = refusal(parse, changed("seq_len = 32", "seq_len = 33"), DYNAMIC)
    assert (error.code, error.location.line) == ("RT064", 8)
    assert "33 tokens are longer than the 32 positions of test, beyond which dynamic NTK" in error.message
    assert "max_position_embeddings" in error.help
    assert parse(changed("seq_len = 32", "seq_len = 33"), evolve(MODEL, rope_scaling="linear 2")).seq_len == 33


@pytest.mark.parametrize("attention", ["scores-kept", "scores-recomputed"])
def test_score_matrices_do_not_go_with_capped_scores(attention: str) -> None:
    text = BASE + f'[compute]\nattention = "{attention}"\n'
    assert parse(text).attention == attention
    capped = evolve(
        MODEL,
        **FAMILY["gemma2"].implied,
        family="gemma2",
        attention_scale=0.25,
        embedding_scale=8.0,
        attention_softcap=50.0,
    )
    assert parse(BASE, capped).attention == "fused"
    (error,) = refusal(parse, text, capped)
    assert error.code == "RT064"
    assert f'attention = "{attention}" does not cap scores, as test does at 50' in error.message
    assert error.help == 'use attention = "fused"'
