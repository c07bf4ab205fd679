"""The text is exact: what is printed parses to an equal module, at every level, and prints the same again."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.types import Dtype, Home, StateKind, tensor_type
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.module import Level, Module, TargetInfo
from ratrain.ratrain_ir.ops.base import field_texts
from ratrain.ratrain_ir.ops.kinds import FIELDS, OP_CLASSES, read_fields
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.invariants import text_round_trip_is_exact
from ratrain.ratrain_ir.testing.strategies import cases, for_plan, pipelines, targets
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import module_texts, print_module

PASSES = (
    ("place-zb-h1", {}),
    ("recompute", {"policy": ("full", "attention", "mlp")}),
    ("bucket-grad-sync", {"bytes": ("1B", "1KiB"), "blocking": ("true",)}),
    ("insert-prefetch", {"blocking": ("true",)}),
    ("insert-release", {}),
    ("legalise", {}),
    ("allocate-ddr", {}),
)


@settings(max_examples=30)
@given(cases(), pipelines(PASSES), targets())
def test_what_is_printed_reads_back_equal(case, pipeline, target):
    module = PassManager(target).run(case.module(), for_plan(pipeline, case.plan))
    text_round_trip_is_exact(module)
    assert "".join(f"{text}\n" for text in module_texts(module)) == print_module(module)


@settings(max_examples=15)
@given(cases(max_layers=2, max_micro_batches=2), st.data())
def test_layout_and_comments_do_not_matter(case, data):
    """Blank lines, comments, spaces at both ends and Windows line ends change nothing."""
    module = case.module()
    lines = print_module(module).splitlines()
    ends = st.sampled_from(("", "", "", "  ", "\r", " // of: no (consequence)", "\n", "\n// 1\n\n", "\t\r"))
    starts = st.sampled_from(("", "", "   ", "\t"))
    spoilt = [data.draw(starts) + line + data.draw(ends) for line in lines]
    assert first_difference(module, parse_module("\n".join(spoilt))) is None


@pytest.mark.parametrize("start", ["", "\n", "// a comment\n", "\n\n  // two\n // lines\n"])
@pytest.mark.parametrize("end", ["", "\n\n", "// the end", "\n  // the end\n"])
def test_a_file_may_begin_and_end_with_comments(start, end):
    module = toy()
    assert first_difference(module, parse_module(start + print_module(module) + end)) is None


@pytest.mark.parametrize("cls", OP_CLASSES.values(), ids=str)
def test_the_fields_of_every_op_read_back(cls):
    """The codec of each field, over the values the field may have, given by the text of a module that has them all."""
    seen = {type(op): op for op in every_op()}
    assert cls in seen, f"no module here has a '{cls.keyword}'"
    values = read_fields(cls, field_texts(seen[cls]))
    for attribute in FIELDS[cls]:
        assert values.get(attribute.name, attribute.default) == getattr(seen[cls], attribute.name)


def every_op():
    """Yield ops of every kind: sharded and unsharded plans, tied, recovered, stored, offloaded, with tp 1 and more, with cp, with ep."""
    model = ModelConfig("toy", "llama", 16, 8, 2, 2, 1, 4, 8, 1e-5, tied_embeddings=True)
    normed = attrs.evolve(model, norm_placement="post", qk_norm="whole")
    both = attrs.evolve(model, norm_placement="both")
    shapes = ((model, 0, "last", 1), (both, 1, "last", 2), (normed, 1, "last", 2), (model, 2, "each-micro-batch", 1))
    ways = [(*shape, "host") for shape in shapes] + [(*shapes[0], "peer")]
    for shown, zero, reduce, tp, store in ways:
        module = lower(shown, Plan(2, 2, (1,), 1, 2, 4, zero=zero, reduce=reduce, tp=tp))
        target = FakeTarget(stores=((Home.HOST, 1 << 40),))
        PassManager(target).run(module, f"place-zb-h1,recompute{{policy=attention store={store}}},allocate-ddr")
        for stage in module.stages:
            yield from stage.ops
    for slices in ((), (4, 4)):
        for stage in lower(model, Plan(2, 2, (1,), 1, 2, 8, cp=2, slices=slices)).stages:
            yield from stage.ops
    experts = attrs.evolve(model, family="mixtral", experts=4, experts_per_token=2)
    of_ranks = (
        (model, {"cp": 2, "context_exchange": "heads"}),
        (attrs.evolve(model, kv_heads=2), {"cp": 2, "context_groups": 2}),
        (experts, {"ep": 2}),
        (experts, {"ep": 2, "experts": ExpertDispatch("capacity", 0.5)}),
    )
    for shown, keys in of_ranks:
        for stage in lower(shown, Plan(2, 2, (1,), 1, 2, 8, **keys)).stages:
            yield from stage.ops


# -- equality: what the round trips rely on ------------------------------------------------------------------------------


def toy(level: str = "dataflow") -> Module:
    model = ModelConfig("toy", "llama", 16, 8, 2, 2, 1, 4, 8, 1e-5)
    module = lower(model, Plan(2, 2, (1,), 1, 2, 4))
    return PassManager(FakeTarget()).run(module, "allocate-ddr") if level == "allocated" else module


def rename(module):
    module.name = "other"


def relevel(module):
    module.level = Level.PLACED


def retarget(module):
    module.target = TargetInfo("fake", 1)


def repipe(module):
    module.pipeline = "x"


def remodel(module):
    module.model = attrs.evolve(module.model, norm_eps=1e-6)


def replan(module):
    module.plan = attrs.evolve(module.plan, seed=1)


def drop_stage(module):
    module.stages.pop()


def drop_op(module):
    module.stages[1].ops.pop()


def drop_tensor(module):
    module.stages[0].tensors.popitem()


def swap_ops(module):
    ops = module.stages[1].ops
    ops[0], ops[1] = ops[1], ops[0]


def other_micro_batch(module):
    module.stages[1].ops[0].micro_batch = 1


def other_kind(module):
    next(iter(module.stages[1].tensors.values())).kind = StateKind.SAVED


def other_type(module):
    next(iter(module.stages[1].tensors.values())).type = tensor_type(Dtype.F32, (1,))


def carry(module):
    module.stages[1].tensors["loss"].carried = True


def place(module):
    module.stages[1].tensors["loss"].offset = 64


def reread(module):
    op = module.stages[1].ops[1]
    op.reads = op.reads[::-1]


def forget_read(module):
    op = module.stages[1].ops[1]
    op.reads = op.reads[:1]


def rewrite(module):
    op = module.stages[1].ops[1]
    op.writes = op.writes[::-1]


def update(module):
    op = module.stages[1].ops[1]
    op.updates = op.reads


def scratch(module):
    op = module.stages[1].ops[1]
    op.scratch = op.reads


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (rename, "name: toy and other"),
        (relevel, "level: dataflow and placed"),
        (retarget, "target: None and "),
        (repipe, "pipeline: "),
        (remodel, "model / norm_eps: 1e-05 and 1e-06"),
        (replan, "plan / seed: 0 and 1"),
        (drop_stage, "number of stages: 2 and 1"),
        (drop_op, "stage 1 / number of ops: "),
        (drop_tensor, "stage 0 / number of tensors: "),
        (swap_ops, "stage 1 / op 0 / kind: recv and forward"),
        (other_micro_batch, "stage 1 / op 0 / micro_batch: 0 and 1"),
        (other_kind, "stage 1 / tensor 0 / kind: "),
        (other_type, "stage 1 / tensor 0 / type: "),
        (carry, "stage 1 / tensor "),
        (place, "stage 1 / tensor "),
        (reread, "stage 1 / op 1 / reads 0: %x.attention.1.m0 and %w.attention.1"),
        (forget_read, "stage 1 / op 1 / number of reads: 2 and 1"),
        (rewrite, "stage 1 / op 1 / writes 0: "),
        (update, "stage 1 / op 1 / number of updates: 0 and 2"),
        (scratch, "stage 1 / op 1 / number of scratch: 0 and 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_difference_is_found_at_its_place(change, path):
    module, changed = toy(), toy()
    assert first_difference(module, changed) is None
    change(changed)
    difference = first_difference(module, changed)
    assert difference is not None
    assert difference.startswith(path)


def test_where_a_module_came_from_is_no_difference():
    module = toy("allocated")
    read = parse_module(print_module(module), file="elsewhere.rtir")
    assert read.source is not None
    assert read.stages[0].ops[0].line > 0
    assert first_difference(module, read) is None
