"""Weights: random ones, the flat layout of blocks, and files that are written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.blocks import block, block_chain, flat_elements, parameters
from ratrain.targets.runtime.weights.weight_files import write_weights
from ratrain.targets.runtime.weights.weight_source import flat_pieces
from ratrain.targets.runtime.weights.weights import (
    block_elements,
    named_parameters,
    random_weights,
    read_weights,
    stored_layout,
)
from tests.targets.runtime.weights.model_tensors import GPT2, LLAMA, MODELS, QWEN2, hugging_face, refusal
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def make_plan(pp: int = 1, dp: int = 1) -> Plan:
    cuts = tuple(range(1, pp))
    return Plan(pp=pp, dp=dp, cuts=cuts, micro_batch_size=1, micro_batches=1, seq_len=8)


def all_named(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    source = random_weights(model, seed)
    return {name: source(name) for name in named_parameters(model)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_models_of_these_tests_are_sound(model):
    check_model(model)


class TestRandom:
    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_shapes_types_and_constants(self, model):
        source = random_weights(model, 3)
        for name, parameter in named_parameters(model).items():
            values = source(name)
            assert values.dtype == np.float32
            assert values.shape == parameter.shape
            if parameter.weight == "norm":
                assert (values == 1).all()
            elif name.endswith(".bias"):
                assert (values == 0).all()
            else:
                assert len(np.unique(values)) > 0.9 * values.size

    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_deviations(self, model):
        """64 * 512 samples: the deviation of the sample is within 5 of its standard errors, which are 1/256 of it.

        Of the classes of these families in `transformers`, GPT-2's alone draws what writes to the residual stream narrower.
        """
        wide = evolve(model, hidden_size=512, heads=4, kv_heads=4, head_dim=16, ffn_size=64, vocab_size=64, layers=8)
        source = random_weights(wide, 1)
        for name, parameter in named_parameters(wide).items():
            if parameter.elements != 64 * 512:
                continue
            is_residual = parameter.weight in {"o_proj", "down_proj"}
            deviation = 0.02 / 4 if model.family == "gpt2" and is_residual else 0.02
            values = source(name).astype(np.float64)
            assert abs(values.std() / deviation - 1) < 5 / 256, name
            assert abs(values.mean()) < 5 * deviation / 181, name

    def test_function_of_seed_and_name(self):
        name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
        first = random_weights(LLAMA, 5)
        one = first(name)
        backwards = {key: first(key) for key in reversed(named_parameters(LLAMA))}
        assert np.array_equal(one, backwards[name])
        assert np.array_equal(one, random_weights(evolve(LLAMA, layers=7, vocab_size=128), 5)(name))
        assert not np.array_equal(one, first(other))
        assert not np.array_equal(one, random_weights(LLAMA, 6)(name))


def flat_of(model, plan, unit, source) -> np.ndarray:
    """A block's whole flat tensor, as arenas hold it."""
    flat = np.zeros(flat_elements(model, plan, unit), np.float32)
    for at, piece in flat_pieces(model, unit, source, 0, flat.size):
        flat[at : at + piece.size] = piece
    return flat


class TestFlat:
    @settings(max_examples=30)
    @given(family=st.sampled_from(list(MODELS)), dp=st.integers(1, 5), pp=st.integers(1, 2))
    def test_flat_tensors_hold_parameters_and_zeros(self, family, dp, pp):
        model, plan = MODELS[family], make_plan(pp, dp)
        source = random_weights(model, 0)
        for unit in block_chain(model):
            flat = flat_of(model, plan, unit, source)
            assert flat.dtype == np.float32
            assert flat.shape == (flat_elements(model, plan, unit),)
            named = named_parameters_of(model, unit, flat)
            assert list(named) == [parameter.name for parameter in parameters(model, unit)]
            for name, view in named.items():
                assert np.array_equal(view, source(name))
                assert np.shares_memory(view, flat)
                view[...] = 0
            assert not flat.any()

    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_block_elements_ends_with_the_last_parameter(self, model):
        for unit in block_chain(model):
            flat = np.zeros(block_elements(model, unit), np.float32)
            views = list(named_parameters_of(model, unit, flat).values())
            views[-1].reshape(-1)[-1] = 1
            assert flat[-1] == 1

    @pytest.mark.parametrize("model", [QWEN2, GPT2], ids=["qwen2", "gpt2"])
    def test_tied_matrices_lie_alike(self, model):
        plan = make_plan(2, 4)
        embed, head = (flat_of(model, plan, block(kind), random_weights(model, 0)) for kind in ("embed", "head"))
        assert embed.shape == head.shape
        assert np.array_equal(embed[: 96 * 32], head[: 96 * 32])


class TestWrite:
    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_round_trip(self, tmp_path, model):
        named = all_named(model)
        path = str(tmp_path / "w.safetensors")
        write_weights(path, model, named.__getitem__)
        source = read_weights(path, model)
        for name, values in named.items():
            assert np.array_equal(source(name), values)

    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_the_format_s_own_library_reads_it(self, tmp_path, model):
        tensors = hugging_face(model)
        save_file(tensors, tmp_path / "in.safetensors")
        source = read_weights(str(tmp_path / "in.safetensors"), model)
        write_weights(str(tmp_path / "out.safetensors"), model, source)
        found = load_file(tmp_path / "out.safetensors")
        assert found.keys() == tensors.keys()
        for name, values in tensors.items():
            assert found[name].dtype == np.float32
            assert np.array_equal(found[name], values)
        header = (tmp_path / "out.safetensors").read_bytes()
        assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["format"] == "pt"

    def test_from_flat_tensors(self, tmp_path):
        plan = make_plan(2, 3)
        source = random_weights(QWEN2, 9)
        named: dict[str, np.ndarray] = {}
        for unit in block_chain(QWEN2):
            named |= named_parameters_of(QWEN2, unit, flat_of(QWEN2, plan, unit, source))
        write_weights(str(tmp_path / "w"), QWEN2, named.__getitem__)
        found = load_file(tmp_path / "w")
        assert "lm_head.weight" not in found
        assert all(np.array_equal(found[name], source(name)) for name in stored_layout(QWEN2))

    def test_failure_leaves_the_old_file(self, tmp_path):
        path = tmp_path / "w.safetensors"
        write_weights(str(path), LLAMA, random_weights(LLAMA, 1))
        before = path.read_bytes()
        partial = all_named(LLAMA, 2)
        del partial["model.norm.weight"]
        with pytest.raises(KeyError):
            write_weights(str(path), LLAMA, partial.__getitem__)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_place_that_cannot_be_written(self, tmp_path):
        (problem,) = refusal(write_weights, str(tmp_path / "no" / "w"), LLAMA, random_weights(LLAMA, 0))
        assert problem.code == "RT002"


def test_the_models_initializer_range_is_the_deviation_of_its_matrices():
    usual, wide = all_named(LLAMA), all_named(evolve(LLAMA, initializer_range=0.2))
    assert LLAMA.initializer_range == 0.02
    for name, parameter in named_parameters(LLAMA).items():
        if parameter.weight == "norm":
            assert np.array_equal(wide[name], usual[name])
        else:
            np.testing.assert_allclose(wide[name], 10 * usual[name], rtol=1e-6)
    matrix = usual["model.embed_tokens.weight"]
    assert abs(float(matrix.std()) / 0.02 - 1) < 4 / np.sqrt(2 * matrix.size)
