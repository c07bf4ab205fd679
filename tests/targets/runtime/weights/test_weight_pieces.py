"""Weights and states piece by piece: whatever part is asked for, in pieces of whatever size, its bits are those of the whole."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.model.blocks import block, block_chain
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.targets.runtime.arena import tensor_file
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_weights, load_latest
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.weights.adapter_files import adapter_parameters, read_adapter, write_adapter
from ratrain.targets.runtime.weights.weight_files import write_weights
from ratrain.targets.runtime.weights.weight_source import flat_pieces
from ratrain.targets.runtime.weights.weights import block_elements, named_parameters, random_weights, read_weights
from tests.end_to_end.tiny_runs import MODEL, make_program, train

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.runtime.weights.weight_source import WeightSource

LLAMA = ModelConfig("tiny", "llama", 96, 32, 2, 4, 2, 8, 40, 1e-5)
BAICHUAN = evolve(LLAMA, family="baichuan", kv_heads=4, packed_qkv=True, position="alibi", rope_theta=0.0)
GPT2 = in_family(BAICHUAN, "gpt2", learned_positions=9, tied_embeddings=True)
PACKED = {family: evolve(LLAMA, family=family, **FAMILY[family].implied) for family in ("phi3", "internlm2")}
NEOX = in_family(BAICHUAN, "gpt_neox")
MODELS = {"llama": LLAMA, "baichuan": BAICHUAN, "gpt2": GPT2, "gpt_neox": NEOX, **PACKED}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[WeightSource]]:
    """Of each family: weights at random, and the same in files, which hold them as they are, packed, in groups, turned."""
    found = {}
    for family, model in MODELS.items():
        path = str(tmp_path_factory.mktemp(family) / "model.safetensors")
        write_weights(path, model, random_weights(model, 3))
        found[family] = [random_weights(model, 3), read_weights(path, model)]
    return found


ADAPTERS = Training(method="lora", rank=3)
ADAPTED = {
    **{family: evolve(MODELS[family], training=ADAPTERS) for family in ("gpt2", "gpt_neox", "phi3")},
    "qwen3_moe": evolve(
        in_family(LLAMA, "qwen3_moe", experts=5, experts_per_token=2, expert_size=12),
        training=evolve(ADAPTERS, targets="v_proj, experts.gate_up_proj, experts.down_proj"),
    ),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[WeightSource]]:
    """Of each family: adapters at random, and the same in PEFT's folders."""
    found = {}
    for family, model in ADAPTED.items():
        folder, drawn = tmp_path_factory.mktemp(f"{family}-peft"), random_weights(model, 3)
        write_adapter(folder, model, drawn, None)
        found[family] = [drawn, read_adapter(str(folder), model)]
    return found


@pytest.mark.parametrize("family", ADAPTED)
@settings(max_examples=25)
@given(most=st.integers(1, 300), data=st.data())
def test_of_adapters(family: str, adapters: dict[str, list[WeightSource]], most: int, data: st.DataObject) -> None:
    drawn, stored = adapters[family]
    name = data.draw(st.sampled_from(list(adapter_parameters(ADAPTED[family]))))
    whole = drawn(name).reshape(-1)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "PIECE_ELEMENTS", most)
        pieces = [*stored.pieces(name, start, stop)]
    assert all(len(piece) <= most for piece in pieces)
    assert np.array_equal(np.concatenate([*pieces, whole[:0]]), whole[start:stop])


@pytest.mark.parametrize("family", MODELS)
@settings(max_examples=25)
@given(most=st.integers(1, 700), data=st.data())
def test_of_any_range(family: str, sources: dict[str, list[WeightSource]], most: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(named_parameters(MODELS[family]))))
    drawn = sources[family][0]
    whole = drawn(name).reshape(-1)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "PIECE_ELEMENTS", most)
        for source in sources[family]:
            pieces = list(source.pieces(name, start, stop))
            row = drawn.parameters[name].shape[-1] if family == "gpt2" else 1  # a turned matrix comes by whole rows
            assert all(piece.size <= max(most, row) for piece in pieces)
            found = np.concatenate([*pieces, np.empty(0, np.float32)])
            assert found.tobytes() == whole[start:stop].tobytes()


def test_a_stream_goes_on_from_one_piece_to_the_next() -> None:
    """A table larger than a piece of the size that runs use is as `numpy` draws it at once."""
    model = evolve(LLAMA, vocab_size=70_000)
    drawn = [piece for _, piece in flat_pieces(model, block("embed"), random_weights(model, 5), 0, 70_000 * 32)]
    words = np.frombuffer(hashlib.blake2b(b"model.embed_tokens.weight", digest_size=16).digest(), "<u4")
    seeds = np.random.SeedSequence(5, spawn_key=(1, *map(int, words)))
    whole = np.random.Generator(np.random.PCG64(seeds)).standard_normal((70_000, 32), np.float32)
    whole *= np.float32(model.initializer_range)
    assert [piece.size for piece in drawn[:2]] == [tensor_file.PIECE_ELEMENTS] * 2
    assert np.concatenate(drawn).tobytes() == whole.tobytes()


@pytest.mark.parametrize("every", [None, 1], ids=["whole", "sharded"])
def test_of_a_checkpoint(every: int | None, tmp_path: Path) -> None:
    """Its states, of any range of a block, and its masters, are what the arenas held."""
    run = train(make_program(dp=3), 2, save=str(tmp_path / "ck"), save_every=every)
    held = training_state(run.engine, 2).blocks
    read = load_latest(str(tmp_path / "ck"), MODEL, Processes()).state.blocks
    _, masters = latest_weights(str(tmp_path / "ck"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "PIECE_ELEMENTS", 1000)
        for unit in block_chain(MODEL):
            end = block_elements(MODEL, unit)
            whole = held[unit]
            assert read.updates(unit) == whole.t == 2
            for kind in ("p", "m1", "m2"):
                flat = getattr(whole, kind)
                for start, stop in ((0, end), (end // 3 + 5, end // 2 + 7), (end - 1, end), (7, 7)):
                    for blocks in (held, read):
                        assert blocks.copied(unit, kind, start, stop).tobytes() == flat[start:stop].tobytes()
            for at, piece in flat_pieces(MODEL, unit, masters, 0, end):
                assert piece.tobytes() == whole.p[at : at + piece.size].tobytes()
