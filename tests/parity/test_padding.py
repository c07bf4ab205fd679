"""The padding token's row of the embedding against the classes of `transformers`, which give it no gradient where tokens are looked up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.program.rtx import read_program, write_program
from tests.end_to_end.tiny_runs import make_plan, start, train
from tests.parity.test_families import (
    GPT2,
    GRADIENT,
    LOSS,
    NEOX,
    NO_DROPOUT,
    SIZES,
    drawn,
    gradients,
    program_of,
    reference,
    sequences,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.parity,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the packages that transformers imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PADDING = 7
NO_HEAD_DIM = {**SIZES, "head_dim": None}
WINDOWS = {**SIZES, "sliding_window": 5, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": {**SIZES, "sliding_window": 6},
    "qwen2": NO_HEAD_DIM,
    "qwen3": SIZES,
    "gemma2": WINDOWS,
    "gemma3_text": {**WINDOWS, "sliding_window_pattern": 3},
    "phi3": NO_HEAD_DIM,
    "olmo2": NO_HEAD_DIM,
    "granite": NO_HEAD_DIM,
    "smollm3": NO_HEAD_DIM,
    "gpt_neox": NEOX,
    "gpt2": {**GPT2, **NO_DROPOUT, "initializer_range": 0.1},
}
LEARNS = ("gpt_neox", "gpt2")
"""Families whose classes do not tell their embedding of a padding token."""
TABLES = ("model.embed_tokens.weight", "gpt_neox.embed_in.weight", "transformer.wte.weight")


def saved(family: str, folder: Path, **keys: Any) -> Any:
    """A model of `transformers` with random weights, the padding token's row among them, saved in a folder."""
    import transformers

    given = {key: value for key, value in {**FAMILIES[family], **keys}.items() if value is not None or key in keys}
    model = drawn(transformers.AutoConfig.for_model(family, **given))
    if family not in LEARNS and keys["pad_token_id"] is not None:
        table = model.get_input_embeddings().weight.data
        table[keys["pad_token_id"]] = table.mean(0)  # it is drawn as zeros
    model.save_pretrained(folder)
    return model


def assert_gradients(folder: Path, network: Any, **keys: Any) -> dict[str, Any]:
    """The gradients of a first step are those of `transformers`, in norm too."""
    model = load_model(str(folder))
    program = program_of(model, tp=keys.pop("tp", 1))
    assert PADDING in sequences(program, 0)[:, :-1]
    run = start(program, 1, init=str(folder), order="sequential", **keys)
    (step,) = run.steps()
    loss, wanted = reference(network, program)
    assert step.report.loss == pytest.approx(loss, rel=LOSS)
    norm = np.sqrt(sum((gradient**2).sum() for gradient in wanted.values()))
    assert step.report.gradient_norm == pytest.approx(norm, rel=1e-5)
    if program.plan.tp == 1:
        found = gradients(run, model)
        for name, gradient in wanted.items():
            atol = GRADIENT * np.abs(gradient).max()
            np.testing.assert_allclose(found[name], gradient, rtol=0, atol=atol, err_msg=name)
    return wanted


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_a_padding_token_are_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    network = saved(family, tmp_path, pad_token_id=PADDING, tie_word_embeddings=tied)
    wanted = assert_gradients(tmp_path, network)
    row = next(wanted[name] for name in TABLES if name in wanted)[PADDING]
    assert row.any() == (tied or family in LEARNS)  # of a tied matrix the head's part counts


@pytest.mark.parametrize("kernels", ["reference", "torch-device"])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_other_kernel_sets(kernels: str, tied: bool, tmp_path: Path) -> None:
    network = saved("llama", tmp_path, pad_token_id=PADDING, tie_word_embeddings=tied)
    assert_gradients(tmp_path, network, kernels=kernels)


@pytest.mark.parametrize("padding", [PADDING, PADDING - 61])
@pytest.mark.parametrize("tp", [2, 4])
def test_gradients_of_tensor_peers(tp: int, padding: int, tmp_path: Path) -> None:
    network = saved("llama", tmp_path, pad_token_id=padding)
    assert_gradients(tmp_path, network, tp=tp)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2"])
def test_a_class_has_a_padding_token_where_the_key_is_absent_and_none_where_it_is_null(
    family: str, tmp_path: Path
) -> None:
    saved(family, tmp_path, pad_token_id=None)
    assert load_model(str(tmp_path)).padding_token is None
    config = json.loads((tmp_path / "config.json").read_text())
    del config["pad_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    import transformers

    assert load_model(str(tmp_path)).padding_token == transformers.AutoConfig.from_pretrained(tmp_path).pad_token_id


def test_the_padding_token_survives_texts_programs_checkpoints_and_export(tmp_path: Path) -> None:
    """Check that only weight decay changes its row of an untied embedding, over steps, a resume and an export."""
    import transformers
    from safetensors.numpy import load_file

    first, exported, checkpoint = tmp_path / "first", tmp_path / "exported", str(tmp_path / "checkpoint")
    saved("llama", first, pad_token_id=PADDING)
    model = load_model(str(first))
    keys = {"seq_len": 20, "micro_batches": 2, "dp": 1, "cuts": (2,), "view_dtype": "f32", "zero": 0}
    module = api.compile(model, make_plan(model, **keys))
    text = print_module(module)
    assert f"padding_token = {PADDING}" in text
    assert parse_module(text).model == model
    write_program(api.emit(module), str(tmp_path / "p.rtx"))
    program = read_program(str(tmp_path / "p.rtx"))
    assert program.model.padding_token == PADDING
    train(program, 2, init=str(first), order="sequential", save=checkpoint)
    train(program, 2, resume=checkpoint, order="sequential", save=checkpoint)
    export_weights(checkpoint, str(exported))
    assert transformers.AutoConfig.from_pretrained(exported).pad_token_id == PADDING
    before, after = (load_file(folder / "model.safetensors")[TABLES[0]] for folder in (first, exported))
    moved = (before != after).any(axis=1)
    assert moved[np.arange(61) != PADDING].any()
    np.testing.assert_allclose(after[PADDING], before[PADDING], rtol=4 * 5e-3 * 0.1 + 1e-6)
