"""Everything a plan can get wrong: each is told with its place and a way out, and any text is read or diagnosed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.plan_text import check_plan, plan_from_fields, plan_to_toml
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import load_plan, parse_plan
from tests.ratrain_ir.config.base_plan import BASE, MODEL, changed, parse, refusal

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

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
    (changed("dp = 2", "dp = 2\nxp = 2"), "RT063", '"xp" is not known in [parallel]', 4),
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


GROUPS = 'cp = 2\ncontext_groups = {groups}\ncontext_exchange = "{exchange}"'


@pytest.mark.parametrize(
    ("text", "model", "said", "way_out"),
    [
        ("context_groups = 2", MODEL, "changes nothing with one context rank (cp = 1)", "use cp = 2 or more"),
        (GROUPS.format(groups=2, exchange="heads"), MODEL, "ranks gather no keys", 'context_exchange = "keys"'),
        ("cp = 2\ncontext_groups = 3", MODEL, "2 key heads of a rank cannot be cut into 3 equal groups", "use 2"),
        ("cp = 2\ntp = 2\ncontext_groups = 2", MODEL, "1 key head of a rank", "leave it out"),
        ("cp = 2\ncontext_groups = 2", evolve(MODEL, position="alibi", rope_theta=0.0), "a slope", "leave it out"),
        (
            "cp = 2\ncontext_groups = 2\n[batch]\nslices = 2",
            MODEL,
            "saves nothing with slices: gathered keys of all groups wait for later slices",
            "leave one of them out",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_groups_of_heads_that_change_nothing_or_do_not_go_are_refused(
    text: str, model: ModelConfig, said: str, way_out: str
) -> None:
    head, _, batch = text.partition("\n[batch]\n")
    plan = BASE.replace("dp = 2", f"dp = 2\n{head}").replace("seq_len = 32", f"seq_len = 32\n{batch}")
    (error,) = [
        each for each in refusal(parse, plan, model) if "context_groups" in plan.split("\n")[each.location.line - 1]
    ]
    assert error.code == "RT064"
    assert said in error.message
    assert way_out in error.help
