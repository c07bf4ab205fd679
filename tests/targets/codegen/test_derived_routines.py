"""A program's routines are those of its model and plan: no step, option or header field says one thing while another runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve, fields

from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch, RouterLosses
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Optimizer, Plan
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.model.blocks import parse_block
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.codegen.derivation import derivation_problem, form_of
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import MODEL, make_program
from tests.end_to_end.toys import EXPERTS, GPT2, NEOX, SHARED_EXPERT, SOME_EXPERTS

if TYPE_CHECKING:
    from ratrain.targets.codegen.routines import RoutineForm
    from ratrain.targets.program.program import Program
    from ratrain.targets.program.routine import Routine, Step

GROUPED = evolve(MODEL, family="qwen2", layers=2, qkv_bias=True, sliding_window=4)
ALIBI = evolve(MODEL, family="baichuan", layers=2, packed_qkv=True, kv_heads=4, position="alibi", rope_theta=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "rotary, biases, window, all kept": {"model": GROUPED, "name": "full-save"},
    "rotary, recovered": {"model": evolve(MODEL, layers=2), "name": "baseline-1f1b"},
    "whole scores and logits": {"name": "ratrain", "attention": "scores-kept", "logits": "whole"},
    "scores made again, split": {"name": "zb-h1", "attention": "scores-recomputed"},
    "alibi, chunks of rows": {"model": ALIBI, "name": "ratrain", "mlp_chunk": 7},
    "gpt2, chunks of rows": {"model": evolve(GPT2, layers=2), "name": "ratrain", "mlp_chunk": 7},
    "gpt2, split backward": {"model": evolve(GPT2, layers=2), "name": "zb-h1"},
    "side by side, chunks of rows": {"model": evolve(NEOX, layers=2), "name": "ratrain", "mlp_chunk": 7},
    "side by side, split backward": {"model": evolve(NEOX, layers=2), "name": "zb-h1"},
    "split backward": {"model": evolve(MODEL, layers=2), "name": "zb-h1"},
    "experts, recovered": {"model": evolve(EXPERTS, layers=2), "name": "ratrain"},
    "experts in the second layer": {"model": evolve(SOME_EXPERTS, layers=2, mlp_kinds="de"), "name": "ratrain"},
    "experts of ranks, rows dropped": {
        "model": evolve(EXPERTS, layers=2),
        "name": "ratrain",
        "ep": 2,
        "experts": ExpertDispatch("capacity", 2.0),
    },
    "shared expert, losses of routers, split backward": {
        "model": evolve(SHARED_EXPERT, layers=2),
        "name": "zb-h1",
        "router": RouterLosses(0.1, 0.01),
    },
}


@cache
def program_of(kind: str) -> Program:
    """A program of two stages, made once; whoever changes it takes a copy."""
    return make_program(**{"cuts": (1,), **KINDS[kind]})


def calls(kind: str) -> Iterator[tuple[Routine, RoutineForm]]:
    """Each routine of a program, with the form of an op that calls it."""
    program = program_of(kind)
    seen: set[int] = set()
    for stage in program.stages:
        for stream in stage.streams.values():
            for instruction in stream:
                if instruction.routine is not None and instruction.routine not in seen:
                    seen.add(instruction.routine)
                    unit = parse_block(instruction.blocks[0])
                    assert unit is not None
                    yield (
                        program.routines[instruction.routine],
                        form_of(unit, instruction, stage, program.model, program.plan),
                    )


def changed_steps(routine: Routine) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Every way in which one step can be left out, repeated, exchanged with the next or computed otherwise."""
    steps = routine.steps
    for at, step in enumerate(steps):
        before, after = steps[:at], steps[at + 1 :]
        yield f"without step {at + 1}", before + after
        yield f"step {at + 1} twice", (*before, step, step, *after)
        if after and after[0] != step:
            yield f"step {at + 1} after the next", (*before, after[0], step, *after[1:])
        for option, value in step.options.items():
            other = (not value) if isinstance(value, bool) else 2 if value is None else value + 1
            yield f"{option} of step {at + 1}", (*before, evolve(step, options={**step.options, option: other}), *after)
        for name in step.operands:
            less = {key: reference for key, reference in step.operands.items() if key != name}
            if any(operand.name == name and operand.optional for operand in KERNELS[step.kernel].operands):
                yield f"{name} of step {at + 1} left out", (*before, evolve(step, operands=less), *after)
            for reference in {*step.operands.values()} - {step.operands[name]}:
                operands = {**step.operands, name: reference}
                yield f"{name} of step {at + 1} is {reference}", (*before, evolve(step, operands=operands), *after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_routine_with_any_other_step_is_not_that_of_its_op(kind: str) -> None:
    program = program_of(kind)
    count = 0
    for routine, form in calls(kind):
        assert derivation_problem(routine, form, program.model, program.plan) is None
        for what, steps in changed_steps(routine):
            problem = derivation_problem(evolve(routine, steps=steps), form, program.model, program.plan)
            assert problem is not None, f"{routine.key}, {what}"
            assert problem.startswith("step ") or "chunks" in problem
            count += 1
    assert count > 100


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_types_are_those_of_the_op(kind: str) -> None:
    program = program_of(kind)
    for routine, form in calls(kind):
        for what in ("formals", "parameters", "intermediates"):
            for at, item in enumerate(getattr(routine, what)):
                items = list(getattr(routine, what))
                for other in ([*items[:at], *items[at + 1 :]], [*items, evolve(item, name="more")]):
                    changed = evolve(routine, **{what: tuple(other)})
                    assert derivation_problem(changed, form, program.model, program.plan) is not None
                items[at] = evolve(item, shape=(*item.shape, 1))
                changed = evolve(routine, **{what: tuple(items)})
                assert derivation_problem(changed, form, program.model, program.plan) is not None


def test_the_place_of_an_intermediate_is_free() -> None:
    program = program_of("rotary, recovered")
    for routine, form in calls("rotary, recovered"):
        moved = tuple(evolve(item, offset=item.offset + 64) for item in routine.intermediates)
        assert derivation_problem(evolve(routine, intermediates=moved), form, program.model, program.plan) is None


# Headers. What may be changed in a header of a program is what runs, or is told, as the header says.

MODEL_FIELDS_OF_WORDS = {"name", "family", "packed_qkv", "inert"}
"""Names of the model and of its exported weights, and what its config.json said beside: no number depends on them."""
PLAN_FIELDS_OF_THE_RUN = {"gather_quantised", "reduce_quantised", "seed", "mapping", "schedule"}
"""Read by the run and the simulation alone, and the claim about the order, which the rules of schedules hold."""

MODEL_CHANGES: dict[str, Any] = {
    "vocab_size": 999,
    "hidden_size": 64,
    "layers": 3,
    "heads": 8,
    "kv_heads": 1,
    "head_dim": 16,
    "ffn_size": 100,
    "norm_eps": 1e-3,
    "position": "alibi",
    "rope_theta": 20000.0,
    "sliding_window": 3,
    "qkv_bias": True,
    "tied_embeddings": True,
    "normalised_head": True,
    "learned_positions": 30,
    "norm": "layer",
    "norm_placement": "both",
    "norm_unit_offset": True,
    "parallel_residual": True,
    "qk_norm": "head",
    "o_bias": True,
    "mlp_bias": True,
    "activation": "gelu",
    "gated_mlp": False,
    "rotary_dim": 2,
    "rope_interleaved": True,
    "rope_scaling": "linear 2",
    "local_rope_theta": 50.0,
    "layer_kinds": "fn",
    "attention_scale": 0.3,
    "attention_softcap": 5.0,
    "logit_softcap": 5.0,
    "embedding_scale": 2.0,
    "residual_scale": 0.5,
    "logit_scale": 0.5,
    "padding_token": 3,
}
EXPERT_CHANGES: dict[str, Any] = {
    "experts": 6,
    "experts_per_token": 2,
    "expert_size": 24,
    "shared_expert_size": 36,
    "router_normalised": False,
    "mlp_kinds": "de",
}
"""Of a model with experts."""
PLAN_CHANGES: dict[str, Any] = {
    "chunks": 2,
    "layout": "vee",
    "slices": (5, 5),
    "pp": 1,
    "dp": 3,
    "cuts": (),
    "micro_batch_size": 1,
    "micro_batches": 4,
    "seq_len": 20,
    "head_chunk": 5,
    "mlp_chunk": 5,
    "zero": 0,
    "reduce": "each-micro-batch",
    "view_dtype": "f32",
    "grad_dtype": "f32",
    "grad_shard_dtype": "f32",
    "loss_scale": 8.0,
    "attention": "scores-kept",
    "attention_mask": "document",
    "logits": "whole",
    "tp": 2,
    "cp": 2,
    "context_layout": "contiguous",
    "context_exchange": "heads",
    "context_groups": 2,
    "ep": 3,
    "sequence_sharding": False,
    "zero_blocks": ZeroLevels.parse("mlp.* 0"),
    "shard_group": 3,
    "view_group": 3,
    "accumulate": "f16-runs",
    "router": RouterLosses(0.1),
    "experts": ExpertDispatch("capacity"),
    "training": Training(method="lora"),
}


def judged(program: Program) -> list[str]:
    """The codes with which a program is refused on its way through a file."""
    try:
        check_program(parse_program(program_bytes(program), "changed.rtx"))
    except DiagnosticError as error:
        return [item.code for item in error.diagnostics]
    return []


def test_the_tables_of_fields_are_complete() -> None:
    known = MODEL_CHANGES.keys() | EXPERT_CHANGES.keys() | MODEL_FIELDS_OF_WORDS
    assert {f.name for f in fields(ModelConfig)} - {
        "initializer_range",
        "training",
        "layer_numbers",
        "expert_ranks",
    } == known
    assert {f.name for f in fields(Plan)} == PLAN_CHANGES.keys() | PLAN_FIELDS_OF_THE_RUN | {"optimizer"}


@pytest.mark.parametrize("field", MODEL_CHANGES)
def test_a_header_with_another_model_is_refused(field: str) -> None:
    program = program_of("rotary, recovered")
    assert getattr(program.model, field) != MODEL_CHANGES[field]
    assert judged(evolve(program, model=evolve(program.model, **{field: MODEL_CHANGES[field]})))


@pytest.mark.parametrize("field", [*EXPERT_CHANGES, *sorted(MODEL_CHANGES.keys() - {"ffn_size"})])
@pytest.mark.sampled(3)
def test_a_header_with_another_model_with_experts_is_refused(field: str) -> None:
    """All but `ffn_size`, which no number depends on once `expert_size` is given."""
    program = program_of("shared expert, losses of routers, split backward")
    value = {**MODEL_CHANGES, "qkv_bias": False, **EXPERT_CHANGES}[field]
    assert getattr(program.model, field) != value
    assert judged(evolve(program, model=evolve(program.model, **{field: value})))


@pytest.mark.parametrize("losses", [(0.0, 0.01), (0.1, 0.0), (0.1, 0.02), (0.1 + 2**-40, 0.01), (-0.1, 0.01)])
def test_a_header_with_other_losses_of_routers_is_refused(losses: tuple[float, float]) -> None:
    program = program_of("shared expert, losses of routers, split backward")
    assert judged(evolve(program, plan=evolve(program.plan, router=RouterLosses(*losses))))


@pytest.mark.parametrize("field", PLAN_CHANGES)
def test_a_header_with_another_plan_is_refused(field: str) -> None:
    program = make_program(model=evolve(MODEL, layers=2), cuts=(1,), zero=2)
    assert getattr(program.plan, field) != PLAN_CHANGES[field]
    assert judged(evolve(program, plan=evolve(program.plan, **{field: PLAN_CHANGES[field]})))


def test_another_split_of_equal_rows_is_refused() -> None:
    program = make_program(model=evolve(MODEL, layers=2), cuts=(1,), micro_batch_size=2, seq_len=10)
    assert judged(evolve(program, plan=evolve(program.plan, micro_batch_size=1, seq_len=20))) == ["RT080"] * 6


def test_what_the_run_reads_may_be_changed() -> None:
    program = program_of("rotary, recovered")
    optimizer = Optimizer(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, warmup_steps=1)
    assert not judged(evolve(program, plan=evolve(program.plan, optimizer=optimizer, seed=3)))
    clipped = evolve(program.plan, optimizer=evolve(optimizer, clip="global"))
    assert judged(evolve(program, plan=clipped)), "the norm is computed by instructions"


def test_a_routine_that_nothing_calls_is_refused() -> None:
    program = program_of("rotary, recovered")
    stray = evolve(program.routines[0], key="stray")
    assert judged(evolve(program, routines=[*program.routines, stray])) == ["RT080"]


def test_the_difference_is_named() -> None:
    program = program_of("rotary, recovered")
    other = evolve(program, model=evolve(program.model, rope_theta=20000.0))
    with pytest.raises(DiagnosticError) as raised:
        check_program(other)
    message = raised.value.diagnostics[0].message
    assert "theta 10000.0" in message
    assert "the model and the plan make it 'rope'" in message
    assert "theta 20000.0" in message


def test_a_number_alone_makes_no_work() -> None:
    program = make_program(model=ALIBI, cuts=(1,), mlp_chunk=7)
    huge = evolve(program.plan, seq_len=1 << 20, micro_batch_size=1 << 16, mlp_chunk=1)
    assert judged(evolve(program, plan=huge))
