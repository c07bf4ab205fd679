"""Documents packed into sequences: they train as if each stood alone, in the same bits whatever the layout, resumed, evaluated."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.running.training_data import open_data
from ratrain.targets.runtime.data.data import TokenStream
from ratrain.targets.runtime.data.documents import Documents
from ratrain.targets.runtime.engine.evaluation import held_out
from ratrain.targets.runtime.kernels import kernel_set
from tests.end_to_end.tiny_runs import (
    MODEL,
    OPTIMIZER,
    losses,
    make_plan,
    make_program,
    make_stream,
    packed,
    run_settings,
    same_bits,
    train,
)
from tests.end_to_end.toys import GEMMA3, GPT2, SHARED_EXPERT
from tests.program_files import prepare

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

F32_LOSS = 1e-6  # of the loss
F32_GRADIENT = 2e-6  # of the tensor's largest absolute value; sums of a few hundred terms in another order
SEQ_LEN = 10
BOUNDS = np.array([0, 3, 4, 12, 18, 26, 30, 39, 41])
"""Documents of 1 to 9 tokens; some go on in the next sequence, one begins where a sequence does."""
SEQUENCES = 4
ALONE: dict[str, Any] = {"dp": 1, "zero": 0, "view_dtype": "f32"}
DOCUMENTS: dict[str, Any] = {"attention_mask": "document", "seq_len": SEQ_LEN, "micro_batches": 2, **ALONE}
MODELS: dict[str, ModelConfig] = {
    "rotary, grouped queries": MODEL,
    "partial rotation": in_family(MODEL, "phi3", rotary_dim=4),
    "learned positions": GPT2,
    "alibi": evolve(MODEL, family="baichuan", kv_heads=4, packed_qkv=True, position="alibi", rope_theta=0.0),
    "window": evolve(MODEL, family="mistral", sliding_window=3),
    "layers of two kinds": GEMMA3,
    "experts": SHARED_EXPERT,
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("place-1f1b,recompute{policy=none},allocate-ddr", {}),
    "split": ("place-zb-h1,recompute{policy=none},allocate-ddr", {}),
    "split, recovered": ("place-zb-h1,recompute{policy=full},allocate-ddr", {}),
    "attention recovered": ("place-1f1b,recompute{policy=attention},allocate-ddr", {}),
    "layers recovered": ("place-gpipe,recompute{policy=full},allocate-ddr", {}),
    "slices": ("recompute{policy=none},allocate-ddr", {"slices": (4, 3, 3), "schedule": "seq1f1b"}),
    "slices, recovered": ("recompute{policy=full},allocate-ddr", {"slices": (1, 9), "schedule": "seq1f1b"}),
    "scores kept": ("place-1f1b,recompute{policy=none},allocate-ddr", {"attention": "scores-kept"}),
    "scores made again": ("place-1f1b,recompute{policy=none},allocate-ddr", {"attention": "scores-recomputed"}),
}

Gradients = dict[str, npt.NDArray[np.float64]]


def first_step(program: Program, stream: TokenStream, kernels: str) -> tuple[float, Gradients]:
    """The loss of a program's first step, and every gradient: the first moments that it leaves are (1 - beta1) of them."""
    run = prepare(program, stream, run_settings(1, kernels=kernels, order="sequential"), kernel_set(kernels))
    list(run.steps())
    found = {
        tensor.name: rank.views[number].astype(np.float64) / (1 - OPTIMIZER.betas[0])
        for ranks in run.engine.ranks
        for rank in ranks
        for number, tensor in enumerate(rank.stage.tensors)
        if tensor.name.startswith("m1.")
    }
    return losses(run)[0], found


def tokens_of(model: ModelConfig) -> npt.NDArray[np.uint16]:
    return np.random.default_rng(1).integers(0, model.vocab_size, SEQUENCES * SEQ_LEN + 1).astype(np.uint16)


@cache
def one_by_one(name: str) -> tuple[float, Gradients]:
    """Loss and gradients of the same documents, as far as they are in a sequence, each in a step of its own under a causal mask."""
    model, total = MODELS[name], SEQUENCES * SEQ_LEN
    tokens = tokens_of(model)
    cuts = np.union1d(BOUNDS[:-1], np.arange(0, total + 1, SEQ_LEN))
    loss, gradients = 0.0, Gradients()
    for low, high in zip(cuts.tolist(), cuts[1:].tolist(), strict=False):
        keys = {**ALONE, "pp": 1, "micro_batches": 1, "micro_batch_size": 1, "seq_len": high - low}
        stream = TokenStream("one document", tokens[low : high + 1], "one")
        mean, found = first_step(make_program(model, "full-save", **keys), stream, "reference")
        share = (high - low) / total
        loss += share * mean
        gradients = {key: gradients.get(key, 0.0) + share * value for key, value in found.items()}
    return loss, gradients


def check(name: str, way: str, kernels: str) -> None:
    passes, keys = WAYS[way]
    model = MODELS[name]
    program = api.emit(api.compile(model, make_plan(model, **DOCUMENTS, **keys), passes=passes))
    stream = TokenStream("packed", tokens_of(model), "packed", documents=Documents(BOUNDS))
    loss, gradients = first_step(program, stream, kernels)
    expected, expected_gradients = one_by_one(name)
    assert loss == pytest.approx(expected, rel=F32_LOSS)
    assert gradients.keys() == expected_gradients.keys()
    for key, value in expected_gradients.items():
        room = F32_GRADIENT * np.abs(value).max()
        np.testing.assert_allclose(gradients[key], value, rtol=0, atol=room, err_msg=key)


COVERING = [
    ("rotary, grouped queries", "whole", "reference"),
    ("rotary, grouped queries", "split, recovered", "fast"),
    ("rotary, grouped queries", "scores made again", "reference"),
    ("partial rotation", "layers recovered", "fast"),
    ("learned positions", "slices", "reference"),
    ("learned positions", "split", "fast"),
    ("alibi", "scores kept", "fast"),
    ("alibi", "slices, recovered", "fast"),
    ("window", "slices", "fast"),
    ("window", "attention recovered", "reference"),
    ("layers of two kinds", "slices, recovered", "reference"),
]


@pytest.mark.parametrize(("name", "way", "kernels"), COVERING)
@pytest.mark.sampled(3)
def test_packed_documents_train_as_each_alone(name: str, way: str, kernels: str) -> None:
    check(name, way, kernels)


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_any_packed_documents_train_as_each_alone(name: str, way: str, kernels: str) -> None:
    check(name, way, kernels)


def test_the_mask_makes_a_difference() -> None:
    keys = {key: value for key, value in DOCUMENTS.items() if key != "attention_mask"}
    stream = TokenStream("packed", tokens_of(MODEL), "packed", documents=Documents(BOUNDS))
    loss, _ = first_step(make_program(**keys), stream, "reference")
    assert loss != pytest.approx(one_by_one("rotary, grouped queries")[0], rel=1e3 * F32_LOSS)


# The same bits


def test_layouts_and_engines_train_the_same_bits() -> None:
    keys: dict[str, Any] = {"attention_mask": "document", "model": GPT2, "zero": 2}
    expected = train(make_program(**keys), 3)
    same_bits(expected, train(make_program(name="baseline-1f1b", **keys), 3, poison=True, check_memory=True))
    same_bits(expected, train(make_program(name="zb-h1", **keys), 3, interleave_seed=1, poison=True))


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    program = make_program(attention_mask="document")
    whole = train(program, 6, order="documents")
    place = str(tmp_path / "checkpoint")
    train(program, 3, order="documents", save=place)
    rest = train(program, 3, order="documents", resume=place)
    assert losses(rest) == losses(whole)[3:]
    same_bits(rest, whole)


def test_an_evaluation_is_under_the_same_mask() -> None:
    """The loss on data held out is that of a step on the same data, before its update."""
    program = make_program(attention_mask="document")
    stream = packed(make_stream(count=61 * program.plan.seq_len))
    run = prepare(program, stream, run_settings(1, order="sequential"), kernel_set("fast"))
    evaluated = held_out(stream, program.plan, 1).loss(run.engine)
    list(run.steps())
    assert evaluated == losses(run)[0]


# Where documents start is said by the data


def run_on(program: Program, *paths: Path, **keys: Any) -> TrainingRun:
    stream, _ = open_data(program, DataChoice(tuple(map(str, paths)), **keys))
    run = prepare(program, stream, run_settings(2), kernel_set("fast"))
    list(run.steps())
    return run


def test_data_that_do_not_say_where_documents_start_are_refused(tmp_path: Path) -> None:
    program = make_program(attention_mask="document")
    path = tmp_path / "tokens.bin"
    make_stream().tokens[:].astype("<u2").tofile(path)
    with pytest.raises(DiagnosticError) as caught:
        run_on(program, path)
    (problem,) = caught.value.diagnostics
    assert problem.code == "RT090"
    assert 'attention_mask = "document"' in problem.message
    assert "does not say where they start" in problem.message
    assert problem.help is not None
    assert "--eos 2" in problem.help
    assert "JSONL" in problem.help
    assert len(losses(run_on(program, path, eos="5"))) == 2
    assert len(losses(run_on(make_program(), path))) == 2


def test_held_out_data_need_to_say_it_too() -> None:
    program = make_program(attention_mask="document")
    with pytest.raises(DiagnosticError, match="does not say where they start"):
        held_out(make_stream(), program.plan)
