"""Adapters and frozen parameters train the same bits however they are spread, and change nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.plan_text import plan_to_toml
from ratrain.ratrain_ir.config.quantised import BLOCK_ELEMENTS, FORMATS, FROZEN_FORMATS, LARGEST_CODE, NF4, frozen_bytes
from ratrain.ratrain_ir.config.training import WHOLE, Training
from ratrain.ratrain_ir.config.types import Dtype, StateKind
from ratrain.ratrain_ir.model.blocks import Block, block, block_chain, flat_elements, parameters
from ratrain.ratrain_ir.model.parameter_names import JOINT
from ratrain.ratrain_ir.model.sharded_blocks import frozen_elements
from ratrain.ratrain_ir.model.slots import saved_slots
from ratrain.ratrain_ir.model.trained_flops import trained_flops_per_token
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.module_patterns import ModuleNumbers
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.running.weight_export import export_adapter, export_weights
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.kernels.reference.reference_nf4 import NESTED_LEVELS, NF4_LEVELS
from ratrain.targets.runtime.weights.adapter_files import write_adapter
from ratrain.targets.runtime.weights.weight_files import write_weights
from ratrain.targets.runtime.weights.weights import named_parameters, random_weights
from tests.end_to_end.tiny_runs import (
    MODEL,
    losses,
    make_plan,
    make_program,
    same_state_of_blocks,
    start,
    state,
    train,
)
from tests.end_to_end.toys import EXPERTS, GEMMA3, GPT2, GRANITE, NEOX, OLMO2, SHARED_EXPERT, SOME_EXPERTS
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig

LORA = Training(method="lora", rank=4, alpha=8.0)
QV = evolve(LORA, rank=3, alpha=2.0, rslora=True, targets="q_proj, v_proj")
LAYERS = Training(freeze="model.embed_tokens.*, model.layers.0.*, model.layers.*.mlp.down_proj.weight")
PHI3 = in_family(MODEL, "phi3", rotary_dim=4)
BAICHUAN = in_family(MODEL, "baichuan", kv_heads=4, normalised_head=True)
INTERNLM2 = in_family(MODEL, "internlm2", qkv_bias=True, o_bias=True)
NORM = "model.layers.1.post_attention_layernorm.weight"
TRAININGS = {
    "adapters": LORA,
    "adapters of q and v": QV,
    "ranks by layer": evolve(
        LORA,
        targets=r"re:.*\.(q|k|down)_proj",
        rank_pattern=ModuleNumbers((("layers.1.self_attn.q_proj", 2),)),
        alpha_pattern=ModuleNumbers((("layers.2.mlp.down_proj", 1.5),)),
    ),
    "ends too": evolve(QV, modules_to_save="embed_tokens, lm_head"),
    "frozen layers": evolve(LAYERS, freeze="*.mlp.*, model.norm.*"),
}
ONE: dict[str, Any] = {"pp": 1, "dp": 1, "zero": 0, "micro_batches": 6, "view_dtype": "f32"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "three stages": {"pp": 3},
    "a replica a micro-batch": {"dp": 2, "micro_batches": 3, "zero": 1},
    "stages and shards": {"pp": 2, "dp": 2, "micro_batches": 3, "zero": 2},
    "gathered views": {"pp": 2, "dp": 2, "micro_batches": 3, "zero": 3},
    "recovered": {"name": "baseline-1f1b", "pp": 2},
    "everything kept": {"name": "full-save", "pp": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.sampled(3)
def test_a_layout_changes_no_bit(training: str, layout: str) -> None:
    keys = {**ONE, **LAYOUTS[layout], "training": TRAININGS[training]}
    replicas = keys["dp"] > 1
    expected = {**ONE, "training": TRAININGS[training], **({"dp": 2, "micro_batches": 3} if replicas else {})}
    one = train(make_program(**expected), 3)
    other = train(make_program(**keys), 3, check_memory=True, poison=True)
    assert losses(one) == losses(other)
    same_state_of_blocks(one, other)


@pytest.mark.parametrize("slices", [(10,), (4, 3, 3)])
def test_slices_train_adapters(slices: tuple[int, ...]) -> None:
    keys = {**ONE, "training": LORA, "slices": slices if len(slices) > 1 else ()}
    whole = train(make_program(**{**ONE, "training": LORA}), 2)
    assert losses(train(make_program(**keys), 2, poison=True)) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize(
    "peers", [{"tp": 2}, {"tp": 4, "sequence_sharding": False}, {"tp": 2, "pp": 2, "dp": 2, "zero": 2}]
)
@pytest.mark.parametrize("model", [MODEL, GEMMA3, evolve(MODEL, tied_embeddings=True)], ids=("llama", "gemma3", "tied"))
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.sampled(5)
def test_tensor_ranks_train_alike(training: str, model: ModelConfig, peers: dict[str, Any]) -> None:
    """After three steps, so that both matrices of an adapter have had gradients; replicas with as many sequences."""
    keys = {**ONE, "training": TRAININGS[training]}
    replicas = {"dp": 2, "micro_batches": 3} if "dp" in peers else {}
    one = train(make_program(model, **{**keys, **replicas}), 3)
    other = train(make_program(model, **{**keys, **replicas, **peers}), 3, check_memory=True, poison=True)
    assert losses(other) == pytest.approx(losses(one), rel=2e-6)
    mine, theirs = (training_state(run.engine, 3).blocks for run in (one, other))
    for owner in mine:
        found = named_parameters_of(other.program.trained_model, owner, theirs[owner].m1)
        for name, wanted in named_parameters_of(one.program.trained_model, owner, mine[owner].m1).items():
            np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2e-4 * np.abs(wanted).max(), err_msg=name)


def test_a_checkpoint_of_adapters_goes_on_with_other_tensor_ranks(tmp_path: Path) -> None:
    keys = {**ONE, "training": LORA}
    whole = train(make_program(**keys), 4)
    for save_every, folder in ((None, "one"), (1, "series")):
        train(make_program(**{**keys, "tp": 2}), 2, save=str(tmp_path / folder), save_every=save_every)
        rest = train(make_program(**{**keys, "pp": 2}), 2, resume=str(tmp_path / folder))
        assert losses(rest) == pytest.approx(losses(whole)[2:], rel=2e-6)


@pytest.mark.parametrize("model", [MODEL, GEMMA3, OLMO2, GRANITE], ids=lambda model: model.family)
@pytest.mark.parametrize("kernels", ["reference", "fast"])
def test_new_adapters_leave_the_loss_as_it_is(model: ModelConfig, kernels: str) -> None:
    adapters = train(make_program(model, **{**ONE, "training": LORA}), 1, kernels=kernels)
    whole = train(make_program(model, **ONE), 1, kernels=kernels)
    assert losses(adapters) == losses(whole)


@pytest.mark.parametrize("model", [MODEL, evolve(MODEL, tied_embeddings=True)], ids=("apart", "tied"))
@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_a_parameter_that_trains_alone_has_the_gradient_of_full_training(name: str, model: ModelConfig) -> None:
    others = ", ".join(each for each in named_parameters(model) if each != name)
    program = make_program(model, **{**ONE, "training": Training(freeze=others)})
    alone, whole = train(program, 1), train(make_program(model, **ONE), 1)
    found, wanted = (training_state(run.engine, 1).blocks for run in (alone, whole))
    owner, *_ = [each for each in found if name in named_parameters_of(program.trained_model, each, found[each].m1)]
    mine = named_parameters_of(program.trained_model, owner, found[owner].m1)[name]
    theirs = named_parameters_of(model, owner, wanted[owner].m1)[name]
    assert np.array_equal(mine, theirs)
    assert np.any(mine)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(
    "model",
    [GPT2, GEMMA3, OLMO2, GRANITE, NEOX, EXPERTS, SHARED_EXPERT, SOME_EXPERTS],
    ids=("gpt2", "gemma3", "olmo2", "granite", "neox", "experts", "shared expert", "layers with experts"),
)
@pytest.mark.sampled(3)
def test_half_of_the_parameters_train_as_in_full_training(model: ModelConfig, part: int) -> None:
    training = Training(freeze=", ".join([*named_parameters(model)][part::2]))
    run, whole = train(make_program(model, **{**ONE, "training": training}), 1), train(make_program(model, **ONE), 1)
    assert losses(run) == losses(whole)
    found, wanted = (training_state(each.engine, 1).blocks for each in (run, whole))
    for owner in found:
        theirs = named_parameters_of(model, owner, wanted[owner].m1)
        for name, mine in named_parameters_of(run.program.trained_model, owner, found[owner].m1).items():
            assert np.array_equal(mine, theirs[name]), name


@pytest.mark.parametrize("training", TRAININGS)
def test_frozen_parameters_never_change(training: str) -> None:
    program = make_program(**{**ONE, "view_dtype": "f16", "training": TRAININGS[training]})
    before = {name: array.copy() for name, array in state(start(program, 1)).items()}
    after = state(train(program, 2))
    frozen = [name for name in before if ".f." in name]
    assert len(frozen) > 3
    assert all(np.array_equal(before[name], after[name]) for name in frozen)
    assert any(not np.array_equal(before[name], after[name]) for name in before if ".p." in name)


def test_what_is_frozen_has_a_view_and_nothing_else() -> None:
    program = make_program(**{**ONE, "view_dtype": "f16", "training": LORA})
    plan, (stage,) = program.plan, program.stages
    held: dict[StateKind, int] = {}
    for tensor in stage.tensors:
        held[tensor.kind] = held.get(tensor.kind, 0) + tensor.type.nbytes
    adapters = sum(flat_elements(MODEL, plan, each) for each in block_chain(MODEL))
    frozen = sum(frozen_elements(MODEL, plan, each) for each in block_chain(MODEL))
    assert held[StateKind.FROZEN] == 2 * frozen
    assert held[StateKind.VIEW] == held[StateKind.GRAD] == 2 * adapters
    assert held[StateKind.MASTER] == 4 * adapters
    assert held[StateKind.MOMENT] == 8 * adapters
    assert frozen >= MODEL.parameters


def test_slots_that_only_frozen_weights_need_are_not_saved() -> None:
    plan = make_plan(**{**ONE, "training": QV})
    whole = make_plan(**ONE)
    names = [slot.name for slot in saved_slots(MODEL, plan, block("mlp", 1))]
    assert {slot.name for slot in saved_slots(MODEL, whole, block("mlp", 1))} - {*names} == {"xn", "prod"}
    assert "q_low" in [slot.name for slot in saved_slots(MODEL, plan, block("attention", 0))]
    layers = make_plan(**{**ONE, "training": LAYERS})
    assert saved_slots(MODEL, layers, block("attention", 0)) == ()


def test_nothing_runs_backward_below_what_trains() -> None:
    program = make_program(**{**ONE, "training": LAYERS})
    backwards = {
        name
        for stage in program.stages
        for stream in stage.streams.values()
        for each in stream
        if each.keyword == "backward"
        for name in each.blocks
    }
    assert backwards == {"attention.1", "mlp.1", "attention.2", "mlp.2", "head"}


@pytest.mark.parametrize("training", [LORA, TRAININGS["frozen layers"]], ids=("adapters", "frozen"))
@pytest.mark.parametrize("every", [None, 1])
def test_a_resumed_run_is_the_uninterrupted_one(training: Training, every: int | None, tmp_path: Path) -> None:
    program = make_program(training=training)
    whole = train(program, 4)
    train(program, 2, save=str(tmp_path / "kept"), save_every=every)
    other = train(make_program(pp=1, dp=2, training=training), 2, resume=str(tmp_path / "kept"))
    assert losses(whole)[2:] == pytest.approx(losses(other), rel=1e-3)
    same = train(program, 2, resume=str(tmp_path / "kept"))
    assert losses(whole)[2:] == losses(same)
    same_state_of_blocks(whole, same)
    with pytest.raises(DiagnosticError, match="drawn with seed 0; this run has weights that are drawn with seed 3"):
        start(program, 1, resume=str(tmp_path / "kept"), seed=3)
    with pytest.raises(DiagnosticError, match=r"was of a run that trains adapters|was of a run that trains"):
        start(make_program(), 1, resume=str(tmp_path / "kept"))


def test_a_plan_with_adapters_is_read_back(tmp_path: Path) -> None:
    for training in (*TRAININGS.values(), WHOLE, evolve(LAYERS, base="int4-block"), evolve(LORA, base="nf4")):
        plan = make_plan(training=training)
        (tmp_path / "plan.toml").write_text(plan_to_toml(plan))
        assert load_plan(str(tmp_path / "plan.toml"), MODEL) == plan


def rounded_to_nf4(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Round a matrix to nf4: levels, and maxima to the nearest of the nested levels, an operation at a time."""

    def nearest(blocks: Any, levels: Any) -> Any:
        middles = (levels[:-1] + levels[1:]) / np.float32(2)
        return levels[np.searchsorted(middles, blocks)]

    def blocked(flat: Any, size: int) -> tuple[Any, Any]:
        blocks = np.pad(flat, (0, -flat.size % size)).reshape(-1, size)
        largest = np.abs(blocks).max(1, keepdims=True)
        # a last short block is divided, whole ones are multiplied
        scaled = blocks * (np.float32(1) / np.maximum(largest, np.float32(1e-38)))
        if flat.size % size:
            scaled[-1] = blocks[-1] / np.maximum(largest[-1], np.float32(1e-38))
        return np.clip(scaled, -1, 1), largest

    scaled, largest = blocked(values.reshape(-1), 64)
    mean = np.float32(largest.mean(dtype=np.float64))
    rest, scale = blocked((largest - mean).reshape(-1), 256)
    maxima = (nearest(rest, NESTED_LEVELS) * np.maximum(scale, np.float32(1e-38))).reshape(-1)[: largest.size] + mean
    back = nearest(scaled, NF4_LEVELS) * maxima[:, None]
    assert np.abs(back.reshape(-1)[: values.size] - values.reshape(-1)).max() <= 0.16 * largest.max()
    return back.reshape(-1)[: values.size].reshape(values.shape)


@pytest.mark.parametrize("base", FROZEN_FORMATS)
@pytest.mark.parametrize("kernels", ["reference", "fast"])
def test_a_packed_base_trains_as_its_unpacked_values_do(base: str, kernels: str, tmp_path: Path) -> None:
    """Oracle: weights rounded to blocks by numpy, saved, and stored as views; all bits are equal."""
    drawn = random_weights(MODEL, 0)

    def rounded(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        values = drawn(name)
        if not name.endswith("_proj.weight"):
            return values
        if base == NF4:
            return rounded_to_nf4(values)
        bits = FORMATS[base]
        flat = np.pad(values.reshape(-1), (0, -values.size % BLOCK_ELEMENTS)).reshape(-1, BLOCK_ELEMENTS)
        scale = np.abs(flat).max(1, keepdims=True) / np.float32(LARGEST_CODE[bits])
        back = np.rint(flat / scale) * scale
        assert np.abs(back - flat).max() <= scale.max() / 2 * (1 + 1e-6)
        return back.astype(np.float32).reshape(-1)[: values.size].reshape(values.shape)

    write_weights(str(tmp_path / "w.safetensors"), MODEL, rounded)
    training = evolve(LORA, base=base)
    found = train(make_program(**{**ONE, "training": training}), 3, kernels=kernels, check_memory=True, poison=True)
    plain = make_program(**{**ONE, "training": LORA})
    wanted = train(plain, 3, kernels=kernels, init=str(tmp_path / "w.safetensors"), seed=0)
    assert losses(found) == losses(wanted)
    same_state_of_blocks(found, wanted)
    recovered = train(make_program(**{**ONE, "training": training, "name": "baseline-1f1b", "mlp_chunk": 7}), 1)
    assert losses(recovered)[0] == pytest.approx(losses(found)[0], rel=1e-5)


def test_a_packed_base_has_its_bytes_and_a_transient_of_one_matrix() -> None:
    for base in FROZEN_FORMATS:
        program = make_program(**{**ONE, "training": evolve(LORA, base=base)})
        (stage,) = program.stages
        packed = {t.name: t.type for t in stage.tensors if t.kind is StateKind.FROZEN and t.type.dtype is Dtype.U8}
        sizes = [(MODEL.q_size, 24), (MODEL.kv_size, 24), (MODEL.kv_size, 24), (24, MODEL.q_size)]
        wanted = sum(-(-frozen_bytes(a * b, base) // 64) * 64 for a, b in sizes)
        assert packed["fq.attention.1"].nbytes == wanted
        assert packed.keys() == {f"fq.{kind}.{layer}" for kind in ("attention", "mlp") for layer in range(3)}
        forward = next(each for each in program.routines if each.key == "mlp.forward")
        whole = [each for each in forward.intermediates if each.name.endswith("_unpacked")]
        assert len({each.offset for each in whole}) < len(whole) == 3


RANKS = ModuleNumbers((("q_proj", 2),))
REFUSED: dict[str, tuple[ModelConfig, dict[str, Any], str]] = {
    "a target without a match": (MODEL, {"training": evolve(LORA, targets="q_proj, wq")}, "is named 'wq'"),
    "packed queries": (GPT2, {"training": evolve(LORA, targets="c_attn, q_proj")}, "is a part of c_attn"),
    "packed queries by head": (NEOX, {"training": QV}, "'q_proj': in gpt_neox that is a part of query_key_value"),
    "packed gates": (PHI3, {"training": evolve(LORA, targets="mlp.gate_proj")}, "is a part of gate_up_proj"),
    "a part of experts": (EXPERTS, {"training": evolve(QV, targets="up_proj")}, "a part of experts.gate_up_proj"),
    "experts by an ambiguous name": (SHARED_EXPERT, {"training": evolve(QV, targets="down_proj")}, "and another"),
    "their parts by one": (SHARED_EXPERT, {"training": evolve(QV, targets="up_proj")}, "experts.gate_up_proj, and"),
    "a pattern without a match": (MODEL, {"training": Training(freeze="model.layer.*")}, "no parameter of toy"),
    "nothing left": (MODEL, {"training": Training(freeze="*")}, "left to train"),
    "a base without a matrix": (MODEL, {"training": Training(freeze="*norm*", base="int8-block")}, "no matrix"),
    "a module that is not there": (MODEL, {"training": evolve(LORA, modules_to_save="wte")}, "is named 'wte'"),
    "a module with an adapter": (MODEL, {"training": evolve(LORA, modules_to_save="q_proj")}, "which gets an adapter"),
    "one side of a tied table": (
        evolve(MODEL, tied_embeddings=True),
        {"training": evolve(LORA, modules_to_save="lm_head")},
        "which are one table",
    ),
    "a router that is saved": (EXPERTS, {"training": evolve(QV, modules_to_save="gate")}, "do not train whole here"),
    "experts that are saved": (EXPERTS, {"training": evolve(QV, modules_to_save="experts")}, "do not train whole"),
    "a packed layer that is saved": (
        GPT2,
        {"training": evolve(LORA, targets="c_fc", modules_to_save="c_attn")},
        "do not train whole here",
    ),
    "an expression without a match": (MODEL, {"training": evolve(LORA, targets="re:q_proj")}, "matches no linear"),
    "an expression of more": (MODEL, {"training": evolve(LORA, targets="re:.*(q_proj|norm)")}, "layernorm too"),
    "an expression of blocks": (MODEL, {"training": evolve(LORA, targets="re:.*mlp.*")}, "layers.0.mlp too"),
    "an expression of the head": (MODEL, {"training": evolve(LORA, targets="re:.*")}, "too, which has no adapter"),
    "an expression of a part": (GPT2, {"training": evolve(LORA, targets="re:.*q_proj")}, "matches no linear"),
    "a rank of no layer": (MODEL, {"training": evolve(LORA, rank_pattern=ModuleNumbers((("wq", 2),)))}, "named 'wq'"),
    "a rank of a layer without an adapter": (
        MODEL,
        {"training": evolve(LORA, targets="v_proj", rank_pattern=RANKS)},
        "rank_pattern: no layer with an adapter is named 'q_proj'",
    ),
    "two alphas of a layer": (
        MODEL,
        {"training": evolve(LORA, alpha_pattern=ModuleNumbers((("q_proj", 2), ("0.*", 3))))},
        "layers.0.self_attn.q_proj is named by 'q_proj' and '0.*'",
    ),
    "norms over tensor ranks": (OLMO2, {"training": LORA, "tp": 2}, "tensor-parallel ranks take together"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_built_is_refused_by_name(what: str) -> None:
    model, keys, message = REFUSED[what]
    with pytest.raises(DiagnosticError) as caught:
        make_program(model, **keys)
    (found,) = caught.value.diagnostics
    assert (found.code, found.help is not None) == ("RT064", True)
    assert message.replace("'", '"') in found.message.replace("'", '"')


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (Training(rank=4), "rank"),
        (Training(alpha=4.0), "alpha"),
        (Training(rslora=True), "rslora"),
        (Training(targets="q_proj"), "targets"),
        (Training(rank_pattern=RANKS), "rank_pattern"),
        (Training(alpha_pattern=RANKS), "alpha_pattern"),
        (Training(modules_to_save="lm_head"), "modules_to_save"),
        (evolve(LORA, freeze="*"), "freeze"),
        (Training(base="int8-block"), "base"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(training: Training, message: str) -> None:
    with pytest.raises(DiagnosticError, match=message):
        make_plan(training=training)


@pytest.mark.parametrize("targets", ["", " , ", "q_proj,,v_proj"])
def test_targets_without_names_are_refused(targets: str) -> None:
    with pytest.raises(DiagnosticError, match="names with commas between them"):
        make_plan(training=evolve(LORA, targets=targets))


def test_adapters_are_exported_for_the_model_beside_which_they_trained(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_weights(str(tmp_path / f"{seed}.safetensors"), MODEL, random_weights(MODEL, seed))
    one, other, kept = (str(tmp_path / name) for name in ("1.safetensors", "2.safetensors", "kept"))
    train(make_program(training=LORA), 1, init=one, save=kept)
    export_adapter(kept, str(tmp_path / "peft"), one)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"] == one
    for export in (export_adapter, lambda place, to, init: export_weights(place, to, init=init)):
        with pytest.raises(DiagnosticError, match="was trained beside weights that are sha256"):
            export(kept, str(tmp_path / "wrong"), other)
    with pytest.raises(DiagnosticError, match="holds what trains alone"):
        export_weights(kept, str(tmp_path / "wrong"))
    export_weights(kept, str(tmp_path / "whole"), init=one)


def test_backwards_in_halves_are_refused() -> None:
    with pytest.raises(DiagnosticError, match="backwards in halves"):
        make_program(name="zb-h1", schedule="zb-h1", training=LORA)


def test_a_program_that_updates_what_is_frozen_is_refused() -> None:
    module = api.compile(MODEL, make_plan(**{**ONE, "training": LAYERS}), passes="place-1f1b,allocate-ddr")
    text = print_module(module)
    wrong = text.replace("update attention.1 ", "update attention.0 ", 1)
    assert wrong != text
    with pytest.raises(DiagnosticError, match="no parameter of attention"):
        api.verify(parse_module(wrong, file="wrong.rtir"))


PACKED = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "phi3": "qkv_proj, gate_up_proj", "baichuan": "W_pack"}


@pytest.mark.parametrize("model", [GPT2, NEOX, PHI3, BAICHUAN, INTERNLM2], ids=lambda model: model.family)
@pytest.mark.parametrize("alone", [True, False], ids=("packed layers", "all"))
def test_packed_layers_train_as_they_are_spread(model: ModelConfig, *, alone: bool) -> None:
    training = evolve(LORA, targets=PACKED.get(model.family, "wqkv")) if alone else LORA
    keys = {**ONE, "training": training, "view_dtype": "f16", "micro_batches": 4}
    one = train(make_program(model, **keys), 3)
    assert losses(one)[0] == losses(train(make_program(model, **{**keys, "training": WHOLE}), 1))[0]
    assert losses(one)[2] != losses(one)[0]
    other = make_program(model, **{**keys, "pp": 2, "name": "baseline-1f1b"})
    other_run = train(other, 3, check_memory=True, poison=True)
    assert losses(other_run) == losses(one)
    same_state_of_blocks(one, other_run)


@pytest.mark.parametrize("model", [GPT2, NEOX, PHI3, BAICHUAN, INTERNLM2], ids=lambda model: model.family)
def test_packed_layers_train_alike_over_ranks_and_in_chunks(model: ModelConfig) -> None:
    keys = {**ONE, "training": LORA}
    whole = train(make_program(model, **keys), 3)
    cut = train(make_program(model, **{**keys, "mlp_chunk": 7, "tp": 2}), 3, poison=True)
    assert losses(cut) == pytest.approx(losses(whole), rel=2e-6)
    few_bits = train(make_program(model, **{**keys, "training": evolve(LORA, base="int8-block")}), 1, poison=True)
    assert losses(few_bits)[0] == pytest.approx(losses(whole)[0], rel=1e-2)


ATTENTION = evolve(LORA, targets="q_proj, k_proj, v_proj, o_proj")
BESIDE_EXPERTS = {
    "attention": (EXPERTS, ATTENTION),
    "all": (SHARED_EXPERT, LORA),
    "all of routed": (EXPERTS, LORA),
    "routers": (EXPERTS, evolve(QV, targets="gate")),
    "routers by numbers": (
        SHARED_EXPERT,
        evolve(LORA, targets=r"re:.*[01]\.(mlp\.gate|self_attn\.o_proj)", rank_pattern=ModuleNumbers((("gate", 2),))),
    ),
    "routed": (EXPERTS, evolve(LORA, targets="v_proj, experts.gate_up_proj, experts.down_proj")),
    "gates": (SHARED_EXPERT, evolve(QV, targets="experts.gate_up_proj")),
    "some layers": (SOME_EXPERTS, LORA),
    "down": (SHARED_EXPERT, evolve(QV, targets="o_proj, experts.down_proj, shared_expert.down_proj")),
    "shared expert": (SHARED_EXPERT, evolve(QV, targets="shared_expert.down_proj, shared_expert_gate")),
}


@pytest.mark.parametrize("what", BESIDE_EXPERTS)
def test_adapters_beside_experts_train_as_they_are_spread(what: str) -> None:
    model, training = BESIDE_EXPERTS[what]
    keys = {**ONE, "training": training, "view_dtype": "f16", "micro_batches": 4}
    one = train(make_program(model, **keys), 3)
    assert losses(one)[0] == losses(train(make_program(model, **{**keys, "training": WHOLE}), 1))[0]
    assert losses(one)[2] != losses(one)[0]
    for other in ({"pp": 2, "name": "baseline-1f1b"}, {"pp": 3}, {"name": "full-save"}):
        run = train(make_program(model, **{**keys, **other}), 3, check_memory=True, poison=True)
        assert losses(run) == losses(one)
        same_state_of_blocks(one, run)


@pytest.mark.parametrize(
    "training",
    [LORA, QV, *(BESIDE_EXPERTS[what][1] for what in ("gates", "down", "routers"))],
    ids=("all", "q and v", "gates", "down", "routers"),
)
def test_adapters_beside_a_shared_expert_train_alike_over_ranks(training: Training) -> None:
    keys = {**ONE, "training": training, "router": RouterLosses(0.1, 0.01)}
    whole = train(make_program(SHARED_EXPERT, **keys), 3)
    cut = train(make_program(SHARED_EXPERT, **{**keys, "tp": 2}), 3, poison=True)
    assert losses(cut) == pytest.approx(losses(whole), rel=2e-6)
    base = evolve(training, base="int8-block")
    few_bits = train(make_program(SHARED_EXPERT, **{**keys, "training": base}), 1, poison=True)
    assert losses(few_bits)[0] == pytest.approx(losses(whole)[0], rel=1e-2)


@pytest.mark.parametrize("what", BESIDE_EXPERTS)
def test_adapters_beside_experts_go_on_from_a_checkpoint_and_from_a_folder(what: str, tmp_path: Path) -> None:
    model, training = BESIDE_EXPERTS[what]
    program = make_program(model, **{**ONE, "training": training})
    whole = train(program, 4)
    train(program, 2, save=str(tmp_path / "kept"))
    rest = train(program, 2, resume=str(tmp_path / "kept"))
    assert losses(rest) == losses(whole)[2:]
    same_state_of_blocks(whole, rest)
    export_adapter(str(tmp_path / "kept"), str(tmp_path / "peft"))
    export_weights(str(tmp_path / "kept"), str(tmp_path / "whole"))
    first = train(program, 1, init_adapter=str(tmp_path / "peft"))
    merged = train(make_program(model, **ONE), 1, init=str(tmp_path / "whole"))
    assert losses(merged) == pytest.approx(losses(first), rel=2e-6)
    assert losses(first) != losses(whole)[:1]


def test_products_of_frozen_experts_are_not_saved() -> None:
    for model, training, dropped in (
        (EXPERTS, ATTENTION, {"prod"}),
        (SHARED_EXPERT, QV, {"prod", "shared_prod"}),
        (SHARED_EXPERT, LORA, {"prod"}),
        (SHARED_EXPERT, evolve(QV, targets="experts.down_proj"), {"shared_prod"}),
        (SHARED_EXPERT, Training(freeze="*.mlp.experts.down_proj.weight"), {"prod"}),
    ):
        plan, whole = (make_plan(model, **{**ONE, "training": each}) for each in (training, WHOLE))
        names, of_all = ({slot.name for slot in saved_slots(model, each, block("mlp", 1))} for each in (plan, whole))
        assert of_all - names == dropped


JOINT_A = {stem: f"{joint}_lora_a" for joint, stems in JOINT.items() for stem in stems}


def gradients_in_family(model: ModelConfig, place: Path) -> dict[tuple[Block, str], Any]:
    """Gradients of adapters, by block and short name; every parameter is drawn by these, and A of q, k, v alike."""
    program = make_program(model, **{**ONE, "training": LORA})
    trained = program.trained_model
    owners = {each.name: (owner, each) for owner in block_chain(model) for each in parameters(trained, owner)}

    def drawn(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        owner, each = owners[name]
        stem, _, matrix = each.weight.rpartition("_lora_")
        short = JOINT_A.get(stem, each.weight) if matrix == "a" else each.weight
        random = np.random.default_rng(crc32(f"{owner} {short}".encode()))
        return (0.2 * random.standard_normal(each.shape)).astype(np.float32)

    place.mkdir()
    write_weights(str(place / "w.safetensors"), model, drawn)
    write_adapter(place, trained, drawn, None)
    run = train(program, 1, init=str(place / "w.safetensors"), init_adapter=str(place), kernels="reference")
    found = training_state(run.engine, 1).blocks
    return {
        (owner, owners[name][1].weight): gradient
        for owner in found
        for name, gradient in named_parameters_of(trained, owner, found[owner].m1).items()
    }


@pytest.mark.parametrize(
    "model",
    [in_family(MODEL, "phi3"), in_family(MODEL, "baichuan", kv_heads=4), INTERNLM2],
    ids=lambda model: model.family,
)
def test_an_a_that_parts_share_has_the_sum_of_their_gradients(model: ModelConfig, tmp_path: Path) -> None:
    """Oracle: the same model in a family whose files pack nothing, with the same A beside each part."""
    packed = gradients_in_family(model, tmp_path / "packed")
    plain = gradients_in_family(evolve(model, family="llama", packed_qkv=False), tmp_path / "plain")
    wanted: dict[tuple[Block, str], Any] = {}
    for (owner, weight), gradient in plain.items():
        short = JOINT_A.get(weight.removesuffix("_lora_a"), weight)
        key = (owner, short if (owner, short) in packed else weight)
        wanted[key] = wanted.get(key, 0) + gradient
    assert packed.keys() == wanted.keys()
    assert any(weight == "qkv_lora_a" for _, weight in packed)
    for key, gradient in packed.items():
        np.testing.assert_allclose(gradient, wanted[key], rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=str(key))


def test_operations_of_a_token_are_those_that_are_needed() -> None:
    """All of the model; its head alone; adapters of its last matrix alone."""
    head, matrices = MODEL.vocab_size * MODEL.hidden_size, MODEL.matrix_elements
    scores = MODEL.layers * 4 * 5.5 * MODEL.q_size
    adapter = LORA.rank * (MODEL.hidden_size + MODEL.ffn_size)
    for training, wanted in (
        (WHOLE, 6 * (matrices + head) + 3 * scores),
        (Training(freeze="model.*"), 2 * (matrices + head) + 2 * head + scores),
        (evolve(LORA, targets="2.mlp.down_proj"), 2 * (matrices + head) + 2 * head + 4 * adapter + scores),
    ):
        plan = make_plan(**{**ONE, "training": training})
        assert trained_flops_per_token(MODEL, plan) == pytest.approx(wanted, rel=1e-12)
