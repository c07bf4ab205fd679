"""Checkpoints written as Hugging Face model directories: what is written is what starts the next run."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import load_file, save_file

from ratrain import api
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.hf_keys import keys_of
from ratrain.ratrain_ir.config.model_fields import model_from_fields
from ratrain.ratrain_ir.config.model_files import load_model, parse_config, preset_names
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running import weight_export
from ratrain.ratrainc.running.training_data import companion_files, open_data
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.program.rtx import read_program, write_program
from ratrain.targets.runtime.arena.dtypes import BFLOAT16
from ratrain.targets.runtime.settings import Start
from ratrain.targets.runtime.weights import weight_files
from ratrain.targets.runtime.weights.weights import named_parameters, read_weights
from tests.end_to_end.tiny_runs import MODEL, make_plan, make_program, start, train
from tests.end_to_end.toys import GPT2, NEOX

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

BAICHUAN = evolve(
    MODEL, family="baichuan", kv_heads=4, packed_qkv=True, position="alibi", rope_theta=0.0, normalised_head=True
)
MODELS = {
    "llama": MODEL,
    "mistral": evolve(MODEL, family="mistral", sliding_window=4, head_dim=10),
    "qwen2": evolve(MODEL, family="qwen2", qkv_bias=True, tied_embeddings=True, sliding_window=4),
    "baichuan-alibi": BAICHUAN,
    "gpt2": GPT2,
    "gpt-neox": NEOX,
    "gpt2-untied": evolve(GPT2, tied_embeddings=False),
    "mixtral": evolve(MODEL, family="mixtral", experts=3, experts_per_token=2),
    "qwen2-moe": evolve(
        MODEL,
        family="qwen2_moe",
        qkv_bias=True,
        router_normalised=False,
        experts=3,
        experts_per_token=2,
        expert_size=20,
        shared_expert_size=12,
    ),
    "granite-moe": evolve(MODEL, family="granitemoe", experts=3, experts_per_token=2, attention_scale=0.25),
    "baichuan-rope": evolve(BAICHUAN, position="rope", rope_theta=10000.0, normalised_head=False),
}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_s_config_reads_back(name):
    model = load_model(name)
    assert parse_config(hugging_face_config(model), name=name, file="config.json") == model


@pytest.mark.parametrize("name", MODELS)
def test_every_family_travels(tmp_path: Path, name: str):
    model = MODELS[name]
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / model.name
    train(make_program(model, zero=2, reduce="each-micro-batch"), 2, save=str(checkpoint))
    assert export_weights(str(checkpoint), str(folder)).model == model
    assert load_model(str(folder)) == model
    saved = load_file(checkpoint / "state.safetensors")
    source = read_weights(str(folder), model)
    masters = [key for key in saved if key.startswith("p/")]
    assert len(masters) > 10
    for key in masters:
        assert source(key.removeprefix("p/")).tobytes() == saved[key].tobytes(), key
    if model.family == "gpt2":
        stored = load_file(folder / "model.safetensors")
        for end in ("weight", "bias"):
            parts = [saved[f"p/transformer.h.1.attn.{part}_proj.{end}"] for part in "qkv"]
            assert np.array_equal(stored[f"transformer.h.1.attn.c_attn.{end}"].T, np.concatenate(parts))
        assert stored["transformer.h.1.mlp.c_fc.weight"].shape == (model.hidden_size, model.ffn_size)
        assert ("lm_head.weight" in stored) is not model.tied_embeddings
    elif model.family == "gpt_neox":
        stored = load_file(folder / "model.safetensors")
        assert "embed_out.weight" in stored
        for end in ("weight", "bias"):
            parts = [saved[f"p/gpt_neox.layers.1.attention.{part}_proj.{end}"] for part in "qkv"]
            heads = np.stack([part.reshape(model.heads, model.head_dim, -1) for part in parts], axis=1)
            packed = stored[f"gpt_neox.layers.1.attention.query_key_value.{end}"]
            assert np.array_equal(packed.reshape(heads.shape), heads), "[heads, 3, head_dim]"
    elif model.packed_qkv:
        stored = load_file(folder / "model.safetensors")["model.layers.1.self_attn.W_pack.weight"]
        parts = [saved[f"p/model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert np.array_equal(stored, np.concatenate(parts))


# A value of any kind for every key that changes nothing: what there is in files, and what is awkward to write down.
AWKWARD = (
    512,
    None,
    True,
    0.5,
    "a text",
    [1, 2],
    [],
    {"a": {"b": [None, 1.5]}},
    'a "quoted" // text',
    "naïve\n",
    "json:x",
    1 << 70,
    [[1], "2"],
)


def inert_values(family: str) -> dict[str, Any]:
    """Every key that changes nothing in a family, with a value it may have."""
    neutral, inert = keys_of(family).neutral, keys_of(family).inert
    return {
        **{key: neutral[key][0][-1] for key in sorted(inert & neutral.keys())},
        **{key: AWKWARD[number % len(AWKWARD)] for number, key in enumerate(sorted(inert - neutral.keys()))},
    }


@pytest.mark.parametrize(("model", "series"), [(MODEL, False), (MODEL, True), (GPT2, False)], ids=str)
def test_every_key_of_a_config_comes_out_as_it_went_in(tmp_path: Path, model: ModelConfig, *, series: bool) -> None:
    """From config.json through schedule, program and checkpoint to the exported config.json."""
    inert = inert_values(model.family)
    given = {**hugging_face_config(model), **inert}
    (tmp_path / "config.json").write_text(json.dumps(given))
    model = load_model(str(tmp_path))
    module = api.compile(model, make_plan(model))
    again = parse_module(print_module(module))
    assert again.model.inert == inert
    write_program(api.emit(again), str(tmp_path / "a.rtx"))
    program = read_program(str(tmp_path / "a.rtx"))
    train(program, 1, save=str(tmp_path / "checkpoint"), save_every=1 if series else None)
    train(program, 1, resume=str(tmp_path / "checkpoint"), save=str(tmp_path / "next"))
    export_weights(str(tmp_path / "next"), str(tmp_path / "exported"))
    assert json.loads((tmp_path / "exported" / "config.json").read_text()) == given


@pytest.mark.parametrize("name", [*preset_names(), "from nothing"])
def test_nothing_is_made_up(name: str) -> None:
    """A key of the exported file is the model's own, or says what its fields say."""
    if name == "from nothing":
        model, given = MODEL, {}
    else:
        model = load_model(name)
        given = json.loads((resources.files("ratrain.ratrain_ir.config") / "presets" / f"{name}.json").read_text())
    written = hugging_face_config(model)
    known = keys_of(model.family)
    computed = {*known.read, "hidden_act", "activation_function", "torch_dtype"}
    assert written.keys() - computed == {key for key in given if key in known.inert - known.read}
    for key, value in given.items():
        if key in written:
            assert written[key] == value, key


def test_weights_bring_what_the_program_does_not_say(tmp_path: Path) -> None:
    weights, checkpoint = tmp_path / "weights", tmp_path / "checkpoint"
    train(make_program(), 1, save=str(checkpoint))
    export_weights(str(checkpoint), str(weights))
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps({**config, "eos_token_id": 7, "max_position_embeddings": 512}))
    longer = make_program(evolve(MODEL, inert={"max_position_embeddings": 1024}))
    train(longer, 1, init=str(weights), save=str(checkpoint))
    train(longer, 1, resume=str(checkpoint), save=str(tmp_path / "next"))
    export_weights(str(tmp_path / "next"), str(tmp_path / "exported"))
    assert load_model(str(tmp_path / "exported")).inert == {"eos_token_id": 7, "max_position_embeddings": 1024}


@pytest.mark.parametrize("key", ["hidden_size", "novelty", "mlp_bias"])
def test_no_other_key_is_carried(key: str) -> None:
    with pytest.raises(DiagnosticError, match=f"RT062.*config.{key}"):
        model_from_fields({**MODEL.to_fields(), f"config.{key}": 3})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(make_program(), 1, save=str(tmp_path / "checkpoint"))
    assert main(["export-weights", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "a" / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == MODEL.parameters
    assert main(["export-weights", str(tmp_path / "none"), "-o", str(tmp_path / "c")]) == 1
    assert "RT002" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


SHARD = 4096


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "baichuan-alibi"])
def test_weights_above_a_size_are_several_files(tmp_path: Path, name: str):
    model, place = MODELS[name], str(tmp_path / "checkpoint")
    train(make_program(model), 1, save=place)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    export_weights(place, str(whole))
    files = export_weights(place, str(cut), most_shard_bytes=SHARD).files
    assert sorted(files) == sorted(contents(cut))
    stored, index = (
        load_file(whole / "model.safetensors"),
        json.loads((cut / "model.safetensors.index.json").read_text()),
    )
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards == [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    held = {file: load_file(cut / file) for file in shards}
    assert {tensor: file for file in shards for tensor in held[file]} == index["weight_map"]
    for file, tensors in held.items():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= SHARD or len(tensors) == 1
        assert all(np.array_equal(tensor, stored[key]) for key, tensor in tensors.items()), file
    assert sum(map(len, held.values())) == len(stored)
    assert index["metadata"] == {
        "total_parameters": model.parameters,
        "total_size": sum(tensor.nbytes for tensor in stored.values()),
    }
    sources = [read_weights(str(folder), model) for folder in (whole, cut)]
    for parameter in named_parameters(model):
        assert np.array_equal(sources[0](parameter), sources[1](parameter))


def test_an_export_replaces_one_of_other_files(tmp_path: Path):
    place, folder = str(tmp_path / "checkpoint"), tmp_path / "exported"
    train(make_program(), 1, save=place)
    exports = {}
    for size in (10**9, SHARD, 3 * SHARD):
        export_weights(place, str(tmp_path / str(size)), most_shard_bytes=size)
        exports[size] = contents(tmp_path / str(size))
    for size in (10**9, SHARD, 3 * SHARD, SHARD, 10**9):
        export_weights(place, str(folder), most_shard_bytes=size)
        assert contents(folder) == exports[size]


def test_an_export_that_ends_early_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files of two trainings that have the same names are not read as one model."""
    first, second, folder = str(tmp_path / "first"), str(tmp_path / "second"), tmp_path / "exported"
    train(make_program(), 1, save=first)
    train(make_program(), 2, save=second)
    export_weights(first, str(folder), most_shard_bytes=SHARD)
    write = weight_files.write_tensors

    def failing(stream: Any, shapes: Any, *rest: Any) -> None:
        if "model.norm.weight" in shapes:
            raise OSError(28, "No space left on device")
        write(stream, shapes, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "write_tensors", failing)
        with pytest.raises(DiagnosticError, match="RT002"):
            export_weights(second, str(folder), most_shard_bytes=SHARD)
    with pytest.raises(DiagnosticError, match="holds no weights"):
        read_weights(str(folder), MODEL)
    export_weights(second, str(folder), most_shard_bytes=SHARD)
    export_weights(second, str(tmp_path / "anew"), most_shard_bytes=SHARD)
    assert contents(folder) == contents(tmp_path / "anew")


WIDE = evolve(MODEL, vocab_size=300)


@pytest.mark.parametrize("inert", [{}, {"eos_token_id": [7, 8], "pad_token_id": None}])
def test_how_text_is_generated_goes_with_the_weights(tmp_path: Path, inert: dict[str, Any]):
    train(make_program(evolve(WIDE, inert=inert)), 1, save=str(tmp_path / "checkpoint"))
    export_weights(str(tmp_path / "checkpoint"), str(tmp_path / "exported"))
    found = contents(tmp_path / "exported").get("generation_config.json")
    assert (found and json.loads(found)) == ({"_from_model_config": True, "eos_token_id": [7, 8]} if inert else None)


def test_a_model_of_bytes_comes_with_a_tokenizer_of_bytes(tmp_path: Path):
    """What was exported is taken for bytes again, without a package that reads tokenizers."""
    train(make_program(WIDE), 1, save=str(tmp_path / "checkpoint"))
    export_weights(str(tmp_path / "checkpoint"), str(tmp_path / "exported"))
    vocabulary = json.loads((tmp_path / "exported" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert (vocabulary["a"], vocabulary["é"], vocabulary["Ġ"]) == (ord("a"), 0xE9, ord(" "))
    program, start = make_program(WIDE), Start(str(tmp_path / "exported"))
    assert open_data(program, DataChoice(), start=start)[0].token == "a byte"


def test_parts_of_a_tokenizer_that_is_not_there_are_not_kept(tmp_path: Path):
    folder, checkpoint = tmp_path / "weights", str(tmp_path / "checkpoint")
    train(make_program(WIDE), 1, save=checkpoint)
    export_weights(checkpoint, str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "generation_config.json").write_text("{}")
    files = companion_files(DataChoice(), Start(str(folder)))
    assert files == {"generation_config.json": b"{}"}


@pytest.mark.parametrize(("size", "several"), [("5GB", False), ("2KiB", True)])
def test_the_command_cuts_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str, *, several: bool
):
    train(make_program(), 1, save=str(tmp_path / "checkpoint"))
    words = ["export-weights", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "out"), "--max-shard-size", size]
    assert main([*words, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert ("model.safetensors.index.json" in files) is several
    for refused in "much", "0":
        assert main([*words[:-1], refused]) == 2


@pytest.mark.parametrize("name", ["llama", "baichuan-alibi", "gpt2"])
def test_an_export_in_bf16_is_the_nearest_and_starts_a_run_in_bf16_where_it_was(tmp_path: Path, name: str) -> None:
    model, wide, narrow = MODELS[name], tmp_path / "wide", tmp_path / "narrow"
    checkpoint = str(tmp_path / "checkpoint")
    run = train(make_program(model, view_dtype="bf16", pp=1, dp=1), 2, save=checkpoint)
    export_weights(checkpoint, str(wide))
    assert main(["export-weights", checkpoint, "-o", str(narrow), "--dtype", "bf16"]) == 0
    assert json.loads((narrow / "config.json").read_text())["torch_dtype"] == "bfloat16"
    exact, found = (load_file(folder / "model.safetensors") for folder in (wide, narrow))
    assert found.keys() == exact.keys()
    for key, values in exact.items():
        assert found[key].dtype == BFLOAT16
        assert found[key].tobytes() == values.astype(BFLOAT16).tobytes(), key
    ((before,),), ((after,),) = run.engine.ranks, start(run.program, 1, init=str(narrow)).engine.ranks
    for unit in block_chain(model):
        assert after.carried("w", str(unit)).tobytes() == before.carried("w", str(unit)).tobytes()


def test_weights_do_not_go_into_a_checkpoint(tmp_path: Path):
    place = str(tmp_path / "checkpoint")
    train(make_program(), 1, save=place)
    with pytest.raises(DiagnosticError, match="RT092"):
        export_weights(place, place)
    train(make_program(), 1, save=place)


def test_only_what_an_export_wrote_is_replaced(tmp_path: Path):
    place, folder = str(tmp_path / "checkpoint"), tmp_path / "exported"
    train(make_program(), 1, save=place)
    export_weights(place, str(folder))
    (folder / "README.md").write_text("mine")
    export_weights(place, str(folder))
    assert (folder / "README.md").read_text() == "mine"
    elsewhere = tmp_path / "config.json"
    (folder / "config.json").rename(elsewhere)
    (folder / "config.json").symlink_to(elsewhere)
    elsewhere.write_text("precious")
    with pytest.raises(DiagnosticError, match=r"RT091.*config.json' is a link"):
        export_weights(place, str(folder))
    assert elsewhere.read_text() == "precious"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_the_model_of_somebody_else_is_not_replaced(tmp_path: Path, name: str):
    place, folder = str(tmp_path / "checkpoint"), tmp_path / "theirs"
    train(make_program(), 1, save=place)
    folder.mkdir()
    if name == "model.safetensors":
        save_file({"a": np.zeros(1, np.float32)}, folder / name, {"format": "pt"})
    else:
        (folder / name).write_text("{}")
    content = (folder / name).read_bytes()
    with pytest.raises(DiagnosticError, match=f"RT091.*did not write \\('{name}'"):
        export_weights(place, str(folder))
    assert (folder / name).read_bytes() == content
    assert [entry.name for entry in folder.iterdir()] == [name]


def test_another_model_is_refused_tensor_by_tensor(tmp_path: Path):
    train(make_program(), 1, save=str(tmp_path / "checkpoint"))
    export_weights(str(tmp_path / "checkpoint"), str(tmp_path / "exported"))
    with pytest.raises(DiagnosticError) as caught:
        read_weights(str(tmp_path / "exported"), evolve(MODEL, family="qwen2", qkv_bias=True, ffn_size=48))
    text = str(caught.value)
    assert 'lacks "model.layers.0.self_attn.q_proj.bias", shape [24]' in text
    assert '"model.layers.0.mlp.gate_proj.weight" has shape [40, 24], but the model\'s is [48, 24]' in text


@pytest.mark.parametrize("folder", ["new", "new/within/new", "there"])
@pytest.mark.parametrize("broken", ["write_weight_files", "hugging_face_config"])
def test_an_export_that_fails_leaves_no_folder(
    broken: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the disk is full, nor where the configuration would not be read as the model."""
    train(make_program(), 1, save=str(tmp_path / "checkpoint"))
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.iterdir())

    def full(*_words: Any) -> None:
        fail("RT002", "no space left")

    def another(model: ModelConfig, dtype: Any) -> dict[str, Any]:
        return hugging_face_config(evolve(model, ffn_size=model.ffn_size + 1), dtype)

    monkeypatch.setattr(weight_export, broken, full if broken == "write_weight_files" else another)
    with pytest.raises(DiagnosticError) as caught:
        export_weights(str(tmp_path / "checkpoint"), str(tmp_path / folder))
    for word in ["no space left"] if broken == "write_weight_files" else ["RT011", "ffn_size"]:
        assert word in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
