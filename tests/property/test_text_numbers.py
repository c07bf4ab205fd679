"""What the loop reads of a text is what the parser reads, and it reads nothing that the parser refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lark.exceptions import UnexpectedInput

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis.dependence import end_byte, first_byte
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import FIELDS
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases, for_plan
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.text.quick_syntax import UnusualTextError
from ratrain.ratrain_ir.text.text_numbers import numbered_text
from tests.property.test_fast_parser import EDITS, spoil

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.columns import StageColumns
    from ratrain.ratrain_ir.module import Module, Stage

SMALL = {"max_layers": 2, "max_stages": 2, "max_micro_batches": 2, "max_slices": 1}


def read_stages(text: str) -> tuple[Module, list[StageColumns]] | None:
    """What the loop reads of a text; None where it is for the parser."""
    try:
        found = numbered_text(text.encode(), "<text>")
        return found.module, [found.stage(index) for index in range(len(found.module.stages))]
    except (UnusualTextError, UnexpectedInput, DiagnosticError):
        return None


def compare(text: str) -> bool:
    """Whether the loop took a text; it says then what the parser says."""
    read = read_stages(text)
    if read is None:
        return False
    frame, stages = read
    module = parse_module(text)
    same = ("name", "level", "model", "plan", "target", "pipeline")
    assert all(getattr(frame, name) == getattr(module, name) for name in same)
    assert len(stages) == len(module.stages)
    for stage, numbers in zip(module.stages, stages, strict=True):
        compare_stage(stage, numbers)
    return True


def compare_stage(stage: Stage, numbers: StageColumns) -> None:
    tensors = list(stage.tensors.values())
    assert [t.carried for t in tensors] == numbers.carried.tolist()
    assert [first_byte(t) for t in tensors] == numbers.starts.tolist()
    assert [end_byte(t) for t in tensors] == numbers.stops.tolist()
    number_of = {tensor: number for number, tensor in enumerate(tensors)}
    kinds: dict[int, object] = {}
    used = ended = 0
    for position, op in enumerate(stage.ops):
        kind = int(numbers.kinds[position])
        example = numbers.examples[kind]
        assert type(example) is type(op)
        fields = [attribute.name for attribute in FIELDS[type(op)] if attribute.name != "micro_batch"]
        assert [getattr(example, name) for name in fields] == [getattr(op, name) for name in fields]
        micro_batch = getattr(op, "micro_batch", None)
        assert (-1 if micro_batch is None else micro_batch) == numbers.micro_batches[position]
        groups = (op.reads, op.updates, op.writes, op.scratch)
        if type(op) is Release:
            before, ended = ended, int(numbers.ended_bounds[position])
            assert [number_of[t] for t in op.reads] == numbers.ended[before:ended].tolist()
            groups = ((), (), (), ())
        assert numbers.ended_bounds[position] == ended
        for section, group in enumerate(groups):
            before, used = used, int(numbers.bounds[4 * position + section])
            assert [number_of[t] for t in group] == numbers.operands[before:used].tolist()
        form = [[(t.kind, t.type, t.home, t.slot * (t.kind.value == "saved")) for t in group] for group in groups]
        assert kinds.setdefault(kind, form) == form


def allocated_text(case, passes: str = "recompute,allocate-ddr") -> str:
    return print_module(PassManager(FakeTarget()).run(case.module(), for_plan(f"place-1f1b,{passes}", case.plan)))


@settings(max_examples=20)
@given(cases(max_slices=1), st.sampled_from(("recompute", "recompute{policy=attention}", "split-backward")))
def test_printed_texts_are_read(case, choice):
    passes = "allocate-ddr" if choice == "split-backward" else f"{choice},allocate-ddr"
    assert compare(allocated_text(case, passes))


@st.composite
def spoilt_texts(draw: st.DrawFn) -> str:
    """The text of a small allocated module after a few edits, most of them in its stages."""
    text = allocated_text(draw(cases(**SMALL)))
    for _ in range(draw(st.integers(1, 3))):
        at = text.find("  stage @") if draw(st.integers(0, 3)) else 0
        edit, choose = draw(st.sampled_from(EDITS)), draw(st.randoms(use_true_random=False))
        text = text[:at] + spoil(text[at:], edit, choose)
    return text


@settings(max_examples=60)
@given(spoilt_texts())
def test_spoilt_texts(text):
    """`compare` fails where the parser refuses what the loop took."""
    compare(text)


BODY = "    view %w : f16[4] carried at 0x0\n    saved %s.head.m0.lse : f32[2, 4] at 0x40\n"
HEAD, END = "  stage @0 {\n", "  }\n}\n"


def with_body(*lines: str) -> str:
    """The text of a module with one stage that has these lines."""
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.lowering import lower

    model = ModelConfig("toy", "llama", 8, 4, 2, 1, 1, 4, 4, 1e-5)
    text = print_module(lower(model, Plan(1, 1, (), 1, 3, 2, zero=0)))
    return text[: text.index(HEAD)] + HEAD + BODY + "".join(f"    {line}\n" for line in lines) + END


@pytest.mark.parametrize(
    "line",
    [
        *("release (%w)", "release", "release (%w, %w)", "release (%s.head.m0.*)", "release (%w, %s.head.m0.*)"),
        *("%w = forward head m1 (%w)", "%w += scale_update", "%w = %s.head.m0.* += backward head m0 (%w, %w) using %w"),
        *("forward head m02", "view %x-1.y : u8[1]", "moment %_ : f32[4] at 0xaBc0", "scale_update (%s.head.m0.lse)"),
    ],
)
def test_usual_lines_are_read_quickly(line):
    assert compare(with_body(line))


@pytest.mark.parametrize(
    "line",
    [
        *("release(%w)", "release (%w,%w)", "release (%w", "release (%v)", "release (%w.*)", "release () using %w", "release  (%w)"),
        *("%w = release (%w)", "release (%w) using %w", "m1 head (%w)", "forward head m1 m1 (%w)", "forward head m3", "forward head"),
        *("view %w : f16[4]", "view %x: f16[4]", "view %x : f16[4] at 0x0 // c", "view %x : f16[4] at 0x", "view %x. : f16[4]"),
        *("view %1 : f16[4]", "view %x..y : f16[4]", "view %x.* : f16[4]", "view %x : f16[0]", "view %x : f16[4] in host", "viu %x : f16[4]"),
        *("view %x : f16[4] at 0xfffffffffffffffff", "view %é : f16[4]", "view %x : f16[4] m1", "forward head m1 0x5", "head m1 forward"),
        *("%w = = forward head m1", "%w += %w = forward head m1", "%w, = forward head m1", "= forward head m1", "+= forward head m1"),
        *("forward head m1 (%w) (%w)", "forward head m1 %w", "forward head m1 using %w (%w)", "  }", "}", "stage @1 {", "\x01", "\x02", "x\x03"),
        *("forward head m1\t(%w)", "release (%w) ", "release (%w)\r"),
    ],
)  # fmt: skip
def test_unusual_lines_are_left_to_the_parser(line):
    """But for blanks at the end, which both may read."""
    text = with_body(line)
    taken = read_stages(text) is not None
    assert compare(text) == taken
    assert not taken or line != line.rstrip()


def test_declarations_stand_before_ops():
    assert read_stages(with_body("release (%w)", "view %x : f16[4]")) is None
