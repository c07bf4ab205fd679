"""What waits in the DDR of another stage comes back as it was: the same training, bit for bit, whatever goes where and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.messages import DonorAccept, DonorReturn, PeerOffload, PeerReload
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import verify
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from ratrain.targets.verifier.races import stage_races
from tests.end_to_end.tiny_runs import instructions, losses, make_plan, same_bits, train
from tests.end_to_end.toys import EXPERTS, UNEVEN
from tests.mutation.subjects import MACHINE, MODEL, SMALL
from tests.property.test_text_numbers import compare

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.program.program import Program

DEEP = evolve(UNEVEN, layers=5)
PLANS: dict[str, dict[str, Any]] = {
    "two stages": {"micro_batches": 4},
    "three stages": {"pp": 3, "dp": 1, "micro_batches": 5},
    "four stages": {"pp": 4, "micro_batches": 6},
    "zero 3 each": {"pp": 4, "zero": 3, "reduce": "each-micro-batch", "micro_batches": 6},
    "slices": {"pp": 3, "dp": 1, "zero": 0, "slices": (4, 3, 3)},
    "split": {"pp": 3, "schedule": "zb-h1", "micro_batches": 5},
    "peers": {"pp": 3, "tp": 2, "dp": 1, "sequence_sharding": False},
    "bf16": {"pp": 3, "dp": 1, "view_dtype": "bf16"},
    "chunks": {"chunks": 2, "cuts": (1, 2, 4), "schedule": "interleaved", "micro_batches": 4},
    "vee": {"chunks": 2, "cuts": (1, 2, 4), "layout": "vee", "schedule": "zb-v", "micro_batches": 4},
    "gpipe": {"pp": 3, "dp": 1, "schedule": "gpipe", "micro_batches": 4},
    "experts": {"model": evolve(EXPERTS, layers=5), "pp": 3, "micro_batches": 4},
}
POLICIES = ("none", "full", "attention")


def module_of(plan: dict[str, Any], recovery: str) -> Module:
    passes = recovery if "allocate-ddr" in recovery else f"{recovery},allocate-ddr"
    given = {"model": DEEP, **plan}
    return api.compile(given["model"], make_plan(**given), passes=passes, machine=MACHINE)


def program_of(plan: dict[str, Any], recovery: str) -> Program:
    return api.emit(module_of(plan, recovery), machine=MACHINE)


def small(passes: str, **keys: Any) -> Module:
    plan = make_plan(MODEL, **SMALL, dp=1, micro_batches=2, zero=0, **keys)
    return api.compile(MODEL, plan, passes=passes, machine=MACHINE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(12, first=1)
def test_what_another_stage_keeps_trains_the_same_bits(plan: str, policy: str) -> None:
    kept = program_of(PLANS[plan], f"recompute{{policy={policy}}}")
    lent = program_of(PLANS[plan], f"recompute{{policy={policy} store=peer}}")
    assert any(instructions(lent, "peer_offload"))
    plain = train(kept, 2)
    watched = train(parse_program(program_bytes(lent), "lent.rtx"), 2, check_memory=True, poison=True)
    assert losses(watched) == losses(plain)
    same_bits(watched, plain)


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.sampled(50)
def test_any_order_that_the_waits_allow_gives_the_same_bits(seed: int) -> None:
    lent = program_of(PLANS["three stages"], "recompute{policy=none store=peer}")
    same_bits(train(lent, 2, interleave_seed=seed, poison=True), train(lent, 2))


def test_threads_give_the_same_bits() -> None:
    lent = program_of(PLANS["three stages"], "recompute{policy=none store=peer}")
    same_bits(train(lent, 2, threads=2), train(lent, 2))


def test_what_is_on_its_way_between_stages_is_one_message_a_channel() -> None:
    """Nothing but the arenas holds remote buffers: the two ends of a message meet."""
    lent = program_of(PLANS["two stages"] | {"dp": 1}, "recompute{policy=none store=peer}")
    run = train(lent, 1)
    held = [
        sum(lent.stages[stage].tensors[each.tensor].type.nbytes for each in item.operands)
        for keyword in ("peer_offload", "donor_return", "send")
        for stage, _, _, item in instructions(lent, keyword)
    ]
    assert run.engine.peak_transport_bytes <= 4 * max(held)
    assert max(held) * len(held) > 8 * max(held)


def test_an_offload_frees_bytes_on_its_stage_and_takes_them_on_the_donor() -> None:
    kept = program_of({"pp": 4, "micro_batches": 6}, "recompute{policy=none}")
    lent = program_of({"pp": 4, "micro_batches": 6}, "recompute{policy=none store=peer}")
    before, after = ([stage.arena_bytes for stage in program.stages] for program in (kept, lent))
    assert after[0] < before[0]
    assert after[3] > before[3]
    kinds = [{tensor.kind for tensor in stage.tensors} for stage in lent.stages]
    assert [StateKind.REMOTE in each for each in kinds] == [False, False, True, True]


@pytest.mark.parametrize("level", ["placed", "allocated"])
def test_texts_say_who_keeps_what_for_whom(level: str) -> None:
    passes = "place-1f1b,recompute{policy=none store=peer}"
    module = small(passes if level == "placed" else f"{passes},allocate-ddr")
    text = print_module(module)
    assert "peer_offload attention.0 m0 @1 (" in text
    assert "accept attention.0 m0 @0" in text
    assert first_difference(module, parse_module(text, file="lent.rtir")) is None


def test_a_plan_of_one_stage_has_nobody_to_keep_anything() -> None:
    plan = make_plan(MODEL, **SMALL, pp=1)
    for name in ("recompute{store=peer}", "joint-order{store=peer}"):
        with pytest.raises(DiagnosticError, match=r"RT071.*the plan has one stage"):
            api.compile(MODEL, plan, passes=f"place-1f1b,{name},allocate-ddr")


OLD_WORDS = {
    "peer_offload ": "evict ",
    "donor_accept ": "accept ",
    "donor_return ": "give_back ",
    "peer_reload ": "take_back ",
    "    remote %": "    guest %",
}


def test_a_text_with_the_words_of_version_1_is_the_same_module() -> None:
    module = small("place-1f1b,recompute{policy=none store=peer},insert-release,legalise,allocate-ddr")
    text = old = print_module(module)
    for word, before in OLD_WORDS.items():
        assert word in text
        old = old.replace(word, before)
    version_1 = old.replace("rtir 2", "rtir 1")
    assert first_difference(parse_module(version_1), module) is None
    assert compare(version_1), "the compiled loop reads it too"
    with pytest.raises(DiagnosticError) as refused:
        parse_module(old)
    found = refused.value.diagnostics
    assert {item.code for item in found} == {"RT004"}
    for word, before in OLD_WORDS.items():
        wanted = f"did you mean '{word.strip(' %')}'?"
        assert any(item.help == wanted and before.strip(" %") in item.message for item in found), word


def errors(module: Module) -> list[str]:
    found = Diagnostics()
    verify(module, found)
    return [f"{item.code} {item.message}" for item in found.errors]


def _first(module: Module, stage: int, kind: type) -> int:
    return next(at for at, op in enumerate(module.stages[stage].ops) if type(op) is kind)


EDITS: dict[str, tuple[int, type, dict[str, Any], str]] = {
    "to itself": (
        0,
        PeerOffload,
        {"peer": 0},
        "RT027 'peer_offload attention.0 m0 @0' names @0, which is no other stage",
    ),
    "to nobody": (
        0,
        PeerOffload,
        {"peer": 7},
        "RT027 'peer_offload attention.0 m0 @7' names @7, which is no other stage",
    ),
    "another block": (1, DonorAccept, {"block": "mlp"}, "RT041 crossed messages, offload from @0 to @1"),
    "buffers of another": (1, DonorReturn, {"micro_batch": 1}, "RT034 'donor_return mlp.0 m1 @0' needs"),
    "of another piece": (0, PeerReload, {"micro_batch": 1}, "RT030 'backward mlp.0 m0' needs the input of mlp.0 m0"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_both_ends_say_is_held_against_each_other(name: str) -> None:
    stage, kind, change, expected = EDITS[name]
    module = small("place-gpipe,recompute{policy=none store=peer}")
    ops = module.stages[stage].ops
    at = _first(module, stage, kind)
    if change == {"block": "mlp"}:
        other = next(op for op in ops if type(op) is kind and op.block.kind == "mlp")
        change = {"block": other.block, "writes": other.writes}
        ops[ops.index(other)] = evolve(other, block=ops[at].block, writes=ops[at].writes)  # type: ignore[attr-defined]
    ops[at] = evolve(ops[at], **change)
    assert any(text.startswith(expected) for text in errors(module)), errors(module)


def test_an_offload_that_is_accepted_once_happens_once() -> None:
    module = small("place-1f1b,recompute{policy=none store=peer}")
    ops = module.stages[0].ops
    at = _first(module, 0, PeerOffload)
    ops.insert(at, evolve(ops[at]))
    assert any(text.startswith("RT040 'peer_offload") and "happens twice" in text for text in errors(module))


def test_buffers_that_return_in_another_order_are_refused() -> None:
    module = small("place-gpipe,recompute{policy=none store=peer}")
    at = _first(module, 1, DonorReturn)
    op = module.stages[1].ops[at]
    assert len(op.reads) > 1
    module.stages[1].ops[at] = evolve(op, reads=op.reads[::-1])
    assert any("RT034" in text and "needs remote" in text for text in errors(module))


def test_lists_that_wait_for_each_others_buffers_are_refused() -> None:
    """An offload ends with its acceptance, also where sends are buffered."""
    module = small("place-gpipe,recompute{policy=none store=peer}")
    ops = module.stages[1].ops
    accepts = [at for at, op in enumerate(ops) if type(op) is DonorAccept]
    back = _first(module, 1, DonorReturn)
    ops.insert(back, ops.pop(accepts[0]))
    assert errors(module)


@pytest.mark.parametrize("engine", [Engine.STORE, Engine.FETCH])
def test_a_wait_that_is_dropped_is_a_race(engine: Engine) -> None:
    lent = program_of({"micro_batches": 4, "dp": 1}, "recompute{policy=none store=peer}")
    dropped = 0
    for number, stage in enumerate(lent.stages):
        assert not stage_races(stage)
        for item in (item for stream in stage.streams.values() for item in stream):
            for wait in item.waits:
                if wait.engine is not engine:
                    continue
                before, item.waits = item.waits, tuple(each for each in item.waits if each is not wait)
                dropped += bool(stage_races(stage))
                assert stage_races(stage), f"@{number} {item.title}"
                item.waits = before
    assert dropped
    check_program(lent)


def test_a_donor_is_chosen_where_they_make_the_step_shorter() -> None:
    plan = {"pp": 3, "dp": 1, "micro_batches": 6}
    least = max(stage.arena_bytes for stage in program_of(plan, "recompute{policy=full}").stages)
    room = least + 4000
    plain, lent = (
        program_of(plan, f"joint-order{{budget={room} store={store}}},allocate-ddr{{capacity={room}}}")
        for store in ("nowhere", "peer")
    )
    assert seconds(lent) <= seconds(plain)
    assert max(stage.arena_bytes for stage in lent.stages) <= room
    same_bits(train(lent, 2), train(plain, 2))


def test_stages_with_fewer_layers_lend_to_those_with_more() -> None:
    """A stage keeps with one before it, too, and a donor serves several."""
    model = evolve(UNEVEN, layers=7, hidden_size=256, ffn_size=512, heads=4, kv_heads=4, head_dim=64)
    plan = make_plan(model, pp=3, dp=1, zero=0, cuts=(1, 4), micro_batches=4, seq_len=256)

    def compiled(*passes: str) -> Module:
        return api.compile(model, plan, passes=",".join(("place-1f1b", *passes)))

    full = compiled("recompute{policy=full}", "allocate-ddr{overlap=ignore}")
    budget = max(stage.arena_bytes for stage in full.stages) + 2**21
    plain, lent = (
        compiled(f"recompute{{policy=auto budget={budget}{store}}}", f"allocate-ddr{{capacity={budget}}}")
        for store in ("", " store=peer")
    )
    donors = {(stage.index, op.peer) for stage in lent.stages for op in stage.ops if isinstance(op, PeerOffload)}
    assert donors == {(1, 0), (2, 0)}
    assert max(stage.arena_bytes for stage in lent.stages) <= budget
    before, after = (api.emit(module) for module in (plain, lent))
    assert api.simulate(after).step_seconds < 0.99 * api.simulate(before).step_seconds
    same_bits(train(after, 1), train(before, 1))


def seconds(program: Program) -> float:
    return api.simulate(program, machine=MACHINE).step_seconds
