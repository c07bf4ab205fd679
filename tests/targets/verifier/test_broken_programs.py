"""Programs with a valid digest that are not sound: each fault is found before anything runs, and no file makes the reader fall over."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.plan import Optimizer
from ratrain.ratrain_ir.config.types import Dtype, StateKind, tensor_type
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import CODES, DiagnosticError
from ratrain.targets.program.instruction import Access, CountWait, Instruction
from ratrain.targets.program.program import Program, ProgramStage
from ratrain.targets.program.rtx import VERSION, parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import MODEL, make_plan, make_program, swap_neighbours

if TYPE_CHECKING:
    from ratrain.targets.program.routine import Routine, Step

SMALL = evolve(MODEL, layers=1)
TIED = evolve(MODEL, layers=2, tied_embeddings=True)


@pytest.fixture(scope="module")
def sound() -> bytes:
    """A program of two stages and two replicas with every kind of instruction, as bytes."""
    passes = "place-1f1b,bucket-grad-sync,insert-prefetch,allocate-ddr"
    return program_bytes(api.emit(api.compile(TIED, make_plan(TIED), passes=passes)))


def codes_of(program: Program) -> list[str]:
    """The codes of what is wrong with a program that went through its container."""
    with pytest.raises(DiagnosticError) as raised:
        check_program(parse_program(program_bytes(program), "broken.rtx"))
    found = [item.code for item in raised.value.diagnostics]
    assert set(found) <= set(CODES)
    return found


def stream(program: Program, engine: Engine, stage: int = 0) -> list[Instruction]:
    """One stream."""
    return program.stages[stage].streams[engine]


def first(program: Program, keyword: str, stage: int = 0) -> Instruction:
    """The first instruction of a kind on a stage."""
    return next(i for s in program.stages[stage].streams.values() for i in s if i.keyword == keyword)


def routine_of(program: Program, start: str) -> Routine:
    """The routine whose key starts like this."""
    return next(routine for routine in program.routines if routine.key.startswith(start))


def put_routine(program: Program, old: Routine, new: Routine) -> None:
    """Replace a routine."""
    program.routines[program.routines.index(old)] = new


def change_step(program: Program, start: str, at: str, **changes: Any) -> None:
    """Change the first step that calls a kernel in a routine."""
    old = routine_of(program, start)
    steps = list(old.steps)
    number = next(i for i, step in enumerate(steps) if step.kernel == at)
    steps[number] = evolve(steps[number], **changes)
    put_routine(program, old, evolve(old, steps=tuple(steps)))


def step_of(program: Program, start: str, kernel: str) -> Step:
    """The first step that calls a kernel in a routine."""
    return next(step for step in routine_of(program, start).steps if step.kernel == kernel)


def change_operands(program: Program, start: str, kernel: str, **operands: str) -> None:
    """Rebind operands of a step."""
    old = step_of(program, start, kernel)
    change_step(program, start, kernel, operands={**old.operands, **operands})


def change_options(program: Program, start: str, kernel: str, **options: Any) -> None:
    """Change options of a step."""
    old = step_of(program, start, kernel)
    change_step(program, start, kernel, options={**old.options, **options})


def tensor_number(stage: ProgramStage, name: str) -> int:
    """The number of a tensor."""
    return next(i for i, tensor in enumerate(stage.tensors) if tensor.name == name)


def change_tensor(program: Program, which: str, /, **changes: Any) -> None:
    """Change a tensor of the first stage."""
    held = program.stages[0]
    number = tensor_number(held, which)
    held.tensors[number] = evolve(held.tensors[number], **changes)


def without_steps(program: Program, start: str, kernel: str) -> None:
    """Take all calls of a kernel out of a routine."""
    old = routine_of(program, start)
    put_routine(program, old, evolve(old, steps=tuple(step for step in old.steps if step.kernel != kernel)))


def change_routine(program: Program, start: str, **changes: Any) -> None:
    """Change fields of a routine."""
    old = routine_of(program, start)
    put_routine(program, old, evolve(old, **changes))


def move_intermediate(program: Program, start: str, name: str, offset: int) -> None:
    """Move an intermediate in the workspace."""
    old = routine_of(program, start)
    items = tuple(evolve(item, offset=offset) if item.name == name else item for item in old.intermediates)
    assert items != old.intermediates
    put_routine(program, old, evolve(old, intermediates=items))


def remove(program: Program, engine: Engine, position: int, stage: int = 0) -> None:
    """Take an instruction out of a stream, and out of the counts that others wait for."""
    held = program.stages[stage]
    del held.streams[engine][position]
    for instruction in (i for s in held.streams.values() for i in s):
        waits = [
            evolve(w, count=w.count - 1) if w.engine is engine and w.count > position else w for w in instruction.waits
        ]
        instruction.waits = tuple(w for w in waits if w.count)


def position_of(program: Program, engine: Engine, title: str, stage: int = 0) -> int:
    """Where an instruction stands in its stream."""
    return next(i for i, item in enumerate(stream(program, engine, stage)) if item.title == title)


def forget_the_previous_step(program: Program) -> None:
    """Take away all waits for the step before."""
    for held in program.stages:
        for instruction in (i for s in held.streams.values() for i in s):
            instruction.waits = tuple(w for w in instruction.waits if not w.previous_step)


def drop_waits(program: Program, engine: Engine) -> None:
    """Let an engine of stage 0 wait for nothing."""
    for instruction in stream(program, engine):
        instruction.waits = ()


Fault = Callable[[Program], object]

INSTRUCTIONS: dict[str, tuple[Fault, str]] = {
    "on another engine": (
        lambda p: stream(p, Engine.COMPUTE).append(stream(p, Engine.SEND).pop()),
        "RT080",
    ),
    "a release": (lambda p: setattr(first(p, "load_input"), "keyword", "release"), "RT080"),
    "another keyword": (lambda p: setattr(first(p, "all_gather"), "keyword", "all_reduce"), "RT080"),
    "no micro-batch": (lambda p: setattr(first(p, "load_input"), "micro_batch", None), "RT080"),
    "a micro-batch it does not have": (lambda p: setattr(first(p, "update"), "micro_batch", 0), "RT080"),
    "no peer": (lambda p: setattr(first(p, "send"), "peer", None), "RT080"),
    "itself as its peer": (lambda p: setattr(first(p, "send"), "peer", 0), "RT027"),
    "another payload": (lambda p: setattr(first(p, "send"), "variant", "gradient"), "RT027"),
    "an unknown payload": (lambda p: setattr(first(p, "send"), "variant", "tied"), "RT080"),
    "an unknown part": (lambda p: setattr(first(p, "load_input"), "variant", "pictures"), "RT080"),
    "an unknown group": (lambda p: setattr(first(p, "all_reduce"), "group", "some"), "RT080"),
    "another group": (lambda p: setattr(first(p, "all_reduce_scalar"), "group", "ends"), "RT026"),
    "a group it does not have": (lambda p: setattr(first(p, "send"), "group", "replicas"), "RT080"),
    "no block": (lambda p: setattr(first(p, "forward"), "blocks", ()), "RT080"),
    "two blocks": (lambda p: setattr(first(p, "forward"), "blocks", ("embed", "head")), "RT080"),
    "a block of nothing": (lambda p: setattr(first(p, "forward"), "blocks", ("tail",)), "RT080"),
    "a block of another stage": (lambda p: setattr(first(p, "update"), "blocks", ("attention.1",)), "RT080"),
    "a block with a long number": (
        lambda p: setattr(first(p, "update"), "blocks", ("attention." + "9" * 5000,)),
        "RT080",
    ),
    "no routine": (lambda p: setattr(first(p, "forward"), "routine", None), "RT080"),
    "a routine it cannot call": (lambda p: setattr(first(p, "update"), "routine", 0), "RT080"),
    "the routine of another block": (lambda p: setattr(first(p, "forward"), "routine", 1), "RT080"),
    "adding where nothing is": (lambda p: setattr(first(p, "backward"), "accumulates", True), "RT080"),
    "an operand missing": (
        lambda p: setattr(first(p, "update"), "operands", first(p, "update").operands[:-1]),
        "RT080",
    ),
    "an operand twice": (
        lambda p: setattr(
            first(p, "update"), "operands", (*first(p, "update").operands, first(p, "update").operands[0])
        ),
        "RT080",
    ),
    "operands in another order": (
        lambda p: setattr(first(p, "update"), "operands", first(p, "update").operands[::-1]),
        "RT080",
    ),
    "another access": (
        lambda p: setattr(
            first(p, "send"), "operands", tuple(o._replace(access=Access.WRITE) for o in first(p, "send").operands)
        ),
        "RT080",
    ),
    "another role": (
        lambda p: setattr(first(p, "send"), "operands", tuple(o._replace(role="x") for o in first(p, "send").operands)),
        "RT080",
    ),
    "another tensor of the same type": (
        lambda p: setattr(
            first(p, "update"),
            "operands",
            tuple(
                o._replace(tensor=tensor_number(p.stages[0], "m1.embed")) if o.role == "m2" else o
                for o in first(p, "update").operands
            ),
        ),
        "RT031",
    ),
    "one too few": (lambda p: remove(p, Engine.HOST, 0), "RT020"),
    "one forward too few": (lambda p: remove(p, Engine.COMPUTE, 0), "RT030"),
    "one twice": (lambda p: stream(p, Engine.SEND).append(copy.copy(stream(p, Engine.SEND)[-1])), "RT040"),
    "no loss": (
        lambda p: remove(
            p, Engine.COLLECTIVE, position_of(p, Engine.COLLECTIVE, "all_reduce_scalar loss", stage=1), stage=1
        ),
        "RT030",
    ),
    "no update": (
        lambda p: remove(p, Engine.COMPUTE, position_of(p, Engine.COMPUTE, "update embed")),
        "RT020",
    ),
    "no gather": (
        lambda p: remove(p, Engine.COLLECTIVE, position_of(p, Engine.COLLECTIVE, "all_gather embed")),
        "RT024",
    ),
    "a send nobody takes": (lambda p: remove(p, Engine.RECV, 2, stage=1), "RT020"),
    "sends in another order": (lambda p: swap_neighbours(stream(p, Engine.SEND), 0), "RT041"),
    "ops in another order": (lambda p: swap_neighbours(stream(p, Engine.COMPUTE), 0), "RT020"),
    "a wait for itself": (
        lambda p: setattr(stream(p, Engine.SEND)[0], "waits", (CountWait(Engine.SEND, 1, previous_step=False),)),
        "RT042",
    ),
    "a wait for something later": (
        lambda p: setattr(
            stream(p, Engine.COMPUTE)[0],
            "waits",
            (CountWait(Engine.COLLECTIVE, len(stream(p, Engine.COLLECTIVE)), previous_step=False),),
        ),
        "RT042",
    ),
    "computing that waits for nothing": (lambda p: drop_waits(p, Engine.COMPUTE), "RT081"),
    "sends that wait for nothing": (lambda p: drop_waits(p, Engine.SEND), "RT081"),
    "receives that wait for nothing": (lambda p: drop_waits(p, Engine.RECV), "RT081"),
    "forgetting the step before": (forget_the_previous_step, "RT081"),
    "no stream at all": (lambda p: [remove(p, Engine.COMPUTE, 0) for _ in list(stream(p, Engine.COMPUTE))], "RT030"),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_faulty_instructions_are_found(sound: bytes, name: str) -> None:
    fault, code = INSTRUCTIONS[name]
    program = parse_program(sound, "sound.rtx")
    fault(program)
    assert code in codes_of(program)


TENSORS: dict[str, tuple[Fault, str]] = {
    "unaligned": (lambda p: change_tensor(p, "p.embed", offset=4), "RT051"),
    "in the bytes of another": (
        lambda p: change_tensor(
            p, "m1.embed", offset=p.stages[0].tensors[tensor_number(p.stages[0], "p.embed")].offset
        ),
        "RT050",
    ),
    "beyond the capacity": (lambda p: change_tensor(p, "p.embed", offset=20 << 30), "RT052"),
    "far beyond": (lambda p: change_tensor(p, "p.embed", offset=(1 << 50) - 64), "RT052"),
    "of another type": (lambda p: change_tensor(p, "p.embed", type=tensor_type(Dtype.F32, (64,))), "RT080"),
    "of a vast type": (lambda p: change_tensor(p, "p.embed", type=tensor_type(Dtype.F32, (1 << 47,))), "RT080"),
    "of another kind": (lambda p: change_tensor(p, "p.embed", kind=StateKind.MOMENT), "RT080"),
    "not carried": (lambda p: change_tensor(p, "p.embed", carried=False), "RT020"),
    "carried though nothing uses it": (lambda p: change_tensor(p, "tokens.m0", carried=True), "RT022"),
    "two of one name": (lambda p: change_tensor(p, "p.embed", name="m1.embed"), "RT080"),
    "a small capacity": (lambda p: setattr(p, "capacity_bytes", 4096), "RT053"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_faulty_tensors_are_found(sound: bytes, name: str) -> None:
    fault, code = TENSORS[name]
    program = parse_program(sound, "sound.rtx")
    fault(program)
    assert code in codes_of(program)


ROUTINES: dict[str, tuple[Fault, str]] = {
    "an unknown kernel": (lambda p: change_step(p, "mlp.forward", "gemm", kernel="system"), "is not a kernel"),
    "a kernel of updates": (lambda p: change_step(p, "mlp.forward", "gemm", kernel="adamw"), "is not a kernel"),
    "no kernel": (lambda p: change_step(p, "mlp.forward", "gemm", kernel="__init__"), "is not a kernel"),
    "an operand missing": (
        lambda p: change_step(p, "mlp.forward", "gemm", operands={"a": "xn", "out": "gate"}),
        "takes the operands",
    ),
    "an unknown operand": (lambda p: change_operands(p, "mlp.forward", "gemm", c="x"), "takes the operands"),
    "the scratch as operand": (lambda p: change_operands(p, "mlp.forward", "gemm", scratch="x"), "takes the operands"),
    "a name for nothing": (lambda p: change_operands(p, "mlp.forward", "gemm", a="z"), "does not name 'z'"),
    "a parameter for nothing": (lambda p: change_operands(p, "mlp.forward", "gemm", b="w.bias"), "does not name"),
    "the whole workspace": (lambda p: change_operands(p, "mlp.forward", "gemm", a="workspace"), "does not name"),
    "an option missing": (lambda p: change_step(p, "mlp.forward", "rmsnorm_forward", options={}), "takes the options"),
    "an unknown option": (
        lambda p: change_options(p, "mlp.forward", "rmsnorm_forward", delta=1.0),
        "takes the options",
    ),
    "an option of another type": (lambda p: change_options(p, "mlp.forward", "rmsnorm_forward", eps="1"), "cannot be"),
    "an option that is not finite": (
        lambda p: change_options(p, "mlp.forward", "rmsnorm_forward", eps=float("inf")),
        "cannot be",
    ),
    "an option that is no number": (
        lambda p: change_options(p, "mlp.forward", "rmsnorm_forward", eps=float("nan")),
        "cannot be",
    ),
    "a flag that is a number": (lambda p: change_options(p, "mlp.forward", "gemm", trans_b=1), "cannot be"),
    "a product that does not go": (lambda p: change_options(p, "mlp.forward", "gemm", trans_b=False), "does not give"),
    "heads that do not go": (lambda p: change_options(p, "attention.forward", "rope", heads=5), "does not fit"),
    "huge heads": (lambda p: change_options(p, "attention.forward", "rope", heads=10**30), "cannot be"),
    "a part of a sequence": (lambda p: change_options(p, "attention.forward", "rope", seq_len=7), "whole sequences"),
    "no window": (
        lambda p: change_options(p, "attention.forward", "attention_forward", window=0),
        "cannot be",
    ),
    "uneven groups": (
        lambda p: change_options(p, "attention.forward", "attention_forward", heads=6, head_dim=4, kv_heads=4),
        "'k' of 'attention_forward'",
    ),
    "a shape that does not fit": (
        lambda p: change_operands(p, "mlp.forward", "swiglu_forward", gate="xn"),
        "does not fit",
    ),
    "a type that does not fit": (lambda p: change_operands(p, "mlp.forward", "rmsnorm_forward", rstd="x"), "is f16"),
    "a table for a vector": (
        lambda p: change_operands(p, "mlp.forward", "rmsnorm_forward", gamma="w.up_proj"),
        "dimensions are expected",
    ),
    "writing what is read": (lambda p: change_operands(p, "mlp.forward", "rmsnorm_forward", xn="x"), "only reads"),
    "writing a weight": (lambda p: change_operands(p, "mlp.backward", "gemm", out="w.down_proj"), "only reads"),
    "overwriting what is added to": (
        lambda p: change_options(p, "mlp.backward-add", "gemm", accumulate=False),
        "to which the call adds",
    ),
    "reading what is not written": (lambda p: without_steps(p, "mlp.forward", "rmsnorm_forward"), "before anything"),
    "adding to what is not written": (
        lambda p: change_options(p, "mlp.backward", "gemm", accumulate=True),
        "before anything",
    ),
    "leaving a result unwritten": (lambda p: without_steps(p, "embed.forward", "embedding_forward"), "never writes"),
    "leaving padding unwritten": (lambda p: without_steps(p, "mlp.backward", "zero"), "never writes all of 'g'"),
    "an output that is an input": (
        lambda p: change_operands(p, "mlp.forward", "swiglu_forward", prod="gate"),
        "share bytes",
    ),
    "workspace too small": (lambda p: change_routine(p, "mlp.backward", workspace_bytes=64), "does not lie in"),
    "workspace too large": (lambda p: change_routine(p, "mlp.backward", workspace_bytes=1 << 40), "bytes of workspace"),
    "an intermediate outside": (lambda p: move_intermediate(p, "mlp.backward", "dprod", 1 << 40), "does not lie in"),
    "an intermediate unaligned": (lambda p: move_intermediate(p, "mlp.backward", "dprod", 2), "does not lie in"),
    "a parameter elsewhere": (
        lambda p: change_routine(
            p,
            "mlp.forward",
            parameters=tuple(
                evolve(item, offset=item.offset + 64) if item.name == "norm" else item
                for item in routine_of(p, "mlp.forward").parameters
            ),
        ),
        "norm",
    ),
    "a parameter outside": (
        lambda p: change_routine(
            p,
            "mlp.forward",
            parameters=tuple(
                evolve(item, shape=(1 << 40,)) if item.name.startswith("gap") else item
                for item in routine_of(p, "mlp.forward").parameters
            ),
        ),
        "does not lie in 'w'",
    ),
    "two formals of one name": (
        lambda p: change_routine(
            p,
            "mlp.forward",
            formals=(*routine_of(p, "mlp.forward").formals, routine_of(p, "mlp.forward").formals[0]),
        ),
        "its operands are",
    ),
    "a formal of another shape": (
        lambda p: change_routine(
            p,
            "mlp.forward",
            formals=tuple(
                evolve(item, shape=(3,)) if item.name == "x" else item for item in routine_of(p, "mlp.forward").formals
            ),
        ),
        "is not f16",
    ),
}


@pytest.mark.parametrize("name", ROUTINES)
def test_faulty_routines_are_found(sound: bytes, name: str) -> None:
    fault, words = ROUTINES[name]
    program = parse_program(sound, "sound.rtx")
    fault(program)
    with pytest.raises(DiagnosticError) as raised:
        check_program(parse_program(program_bytes(program), "broken.rtx"))
    assert {item.code for item in raised.value.diagnostics} == {"RT080"}
    assert words in raised.value.diagnostics[0].message


def test_the_sound_program_is_sound(sound: bytes) -> None:
    check_program(parse_program(sound, "sound.rtx"))
    assert program_bytes(parse_program(sound, "sound.rtx")) == sound


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"zero": 0},
        {"zero": 2, "reduce": "each-micro-batch"},
        {"zero": 3},
        {"optimizer": Optimizer(clip="global")},
        {"view_dtype": "f32"},
        {"grad_dtype": "f32"},
        {"model": evolve(MODEL, family="qwen2", qkv_bias=True, sliding_window=4)},
        {"model": evolve(MODEL, family="baichuan", packed_qkv=True, kv_heads=4, position="alibi", rope_theta=0.0)},
        {"model": evolve(MODEL, family="baichuan", packed_qkv=True, kv_heads=4, normalised_head=True)},
    ],
)
@pytest.mark.parametrize("name", ["ratrain", "full-save"])
def test_every_emitted_routine_passes(name: str, keys: dict[str, Any]) -> None:
    check_program(make_program(name=name, **keys))


# Figures and strings of a header


@pytest.mark.parametrize("odd", [0, None, False, 0.0, [], {}, "*/", "\ud800", "a b", "x" * 70_000])
def test_a_string_that_is_no_name_is_refused_when_it_is_read(sound: bytes, odd: object) -> None:
    head, columns = header_of(sound)
    head["strings"][head["strings"].index("embed")] = odd
    with pytest.raises(DiagnosticError, match="RT080"):
        parse_program(container(head, columns), "odd.rtx")


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the columns of a container."""
    length = int.from_bytes(data[12:20], "little")
    return json.loads(data[20 : 20 + length]), data[20 + length : -32]


def container(head: dict[str, Any], columns: bytes) -> bytes:
    """A container with a digest that is right."""
    text = json.dumps(head).encode()
    body = b"RATRAINX" + struct.pack("<IQ", VERSION, len(text)) + text + columns
    return body + hashlib.sha256(body).digest()


def refused(head: dict[str, Any], columns: bytes) -> str:
    """The one message about a file with this header and these columns."""
    with pytest.raises(DiagnosticError) as raised:
        parse_program(container(head, columns), "odd.rtx")
    (found,) = raised.value.diagnostics
    assert found.code == "RT080"
    return found.message


def objects_in(value: Any) -> list[dict[str, Any]]:
    """All JSON objects within a value, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] * isinstance(value, dict) + [found for item in inner for found in objects_in(item)]


def test_a_key_that_nothing_reads_is_refused_wherever_it_stands(sound: bytes) -> None:
    head, columns = header_of(sound)
    count = len(objects_in(head))
    assert count > 200
    for at in range(0, count, 7):
        changed = copy.deepcopy(head)
        objects_in(changed)[at]["peak_live_bytes"] = 1
        with pytest.raises(DiagnosticError):  # of a step's options the kernel says which there are
            check_program(parse_program(container(changed, columns), "odd.rtx"))


def test_a_key_that_is_there_twice_is_refused(sound: bytes) -> None:
    head, columns = header_of(sound)
    text = json.dumps(head)
    for key in ("capacity_bytes", "pipeline", "workspace_bytes", "seed"):
        value = json.dumps(next(found[key] for found in objects_in(head) if key in found))
        twice = text.replace(f'"{key}": {value}', f'"{key}": 1, "{key}": {value}', 1).encode()
        body = b"RATRAINX" + struct.pack("<IQ", VERSION, len(twice)) + twice + columns
        with pytest.raises(DiagnosticError, match=f"'{key}' is there twice"):
            parse_program(body + hashlib.sha256(body).digest(), "odd.rtx")


@pytest.mark.parametrize(
    ("table", "row", "words"),
    [
        ("strings", "send_nothing", "strings that nothing refers to"),
        ("strings", "embed", "nothing refers to"),
        ("forms", ["workspace", "u8", [64], False, "ddr"], "forms of tensors that nothing refers to"),
    ],
)
def test_a_row_that_nothing_refers_to_is_refused(sound: bytes, table: str, row: object, words: str) -> None:
    head, columns = header_of(sound)
    assert words in refused(head | {table: [*head[table], row]}, columns)


def test_on_chip_schedules_that_nothing_has_are_refused(sound: bytes) -> None:
    head, columns = header_of(sound)
    assert "has none" in refused(head | {"on_chip": "nonsense"}, columns)


def test_a_shape_of_no_dimension_is_refused(sound: bytes) -> None:
    head, columns = header_of(sound)
    head["routines"][0]["parameters"][0]["shape"] = []
    assert "no dimension" in refused(head, columns)


def order_of(head: dict[str, Any], columns: bytes) -> tuple[list[int], int]:
    """The list order of a file, and where it begins in its columns."""
    end = len(columns) - head["names"]
    start = end - 4 * head["columns"]["order"]
    return list(struct.unpack(f"<{head['columns']['order']}i", columns[start:end])), start


@pytest.mark.parametrize("engine", [-1, 1, 8])
def test_a_list_order_of_other_engines_is_refused(sound: bytes, engine: int) -> None:
    head, columns = header_of(sound)
    order, start = order_of(head, columns)
    assert order[0] != engine
    changed = columns[:start] + struct.pack("<i", engine) + columns[start + 4 :]
    refused(head, changed)


def test_a_list_order_against_the_waits_is_refused(sound: bytes) -> None:
    head, columns = header_of(sound)
    order, start = order_of(head, columns)
    own = sum(head["stages"][0]["streams"])
    backwards = struct.pack(f"<{own}i", *order[own - 1 :: -1])
    program = parse_program(container(head, columns[:start] + backwards + columns[start + 4 * own :]), "odd.rtx")
    with pytest.raises(DiagnosticError, match="list order of stage @0 stands against its waits"):
        check_program(program)
