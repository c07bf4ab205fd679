"""`pad_token_id`: which families read it, what it may be, and the texts it goes through; keys of old files, and what is suggested for unknown ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.families import FAMILIES
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.hf_keys import CALLED_ELSEWHERE, CLASS_DEFAULTS, keys_of
from ratrain.ratrain_ir.config.model_fields import model_from_fields
from ratrain.ratrain_ir.config.model_files import load_model, preset_names
from tests.ratrain_ir.config.family_configs import (
    BAICHUAN,
    GEMMA2,
    GEMMA3,
    GPT2,
    GRANITE,
    GRANITEMOE,
    INTERNLM2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    NEOX,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
    parse,
    refusal,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, BAICHUAN, GEMMA2, GEMMA3, PHI3, OLMO2, GRANITE, INTERNLM2, SMOLLM3, GPT2, NEOX)
ALL += (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITEMOE)
CONFIGS = {parse(config).family: config for config in ALL}
LEARNS = ("gpt2", "gpt_neox")
PADS = [family for family in CONFIGS if family not in LEARNS]
ABSENT = {
    name: {key: value for key, value in config.items() if key != "pad_token_id"} for name, config in CONFIGS.items()
}


def again(model: ModelConfig) -> ModelConfig:
    """A model read back from the fields of its text."""
    return model_from_fields(model.to_fields())


def test_all_families_are_tried() -> None:
    assert {*CONFIGS} == {*FAMILIES}


@pytest.mark.parametrize("family", PADS)
def test_the_padding_token_goes_through_texts_and_export(family: str) -> None:
    for token, row in ((3, 3), (0, 0), (-1, CONFIGS[family]["vocab_size"] - 1), (None, None)):
        model = parse({**ABSENT[family], "pad_token_id": token})
        assert (model.padding_token, model.padding_row) == (token, row)
        assert ("padding_token" in model.to_fields()) == (token is not None)
        for other in (again(model), parse(hugging_face_config(model))):
            assert (other.padding_token, other.inert.get("pad_token_id")) == (token, None)
        assert hugging_face_config(model)["pad_token_id"] == token


@pytest.mark.parametrize("family", LEARNS)
def test_families_whose_class_learns_the_row_keep_the_key_as_it_came(family: str) -> None:
    model = parse({**ABSENT[family], "pad_token_id": 3})
    assert model.padding_token is None
    assert model.inert["pad_token_id"] == 3
    assert hugging_face_config(again(model))["pad_token_id"] == 3
    fields = model.to_fields() | {"padding_token": 3}
    assert "padding_token" in refusal(model_from_fields, fields)[0].message


@pytest.mark.parametrize("family", CONFIGS)
def test_an_absent_key_means_what_the_class_assumes_where_that_is_a_token(family: str) -> None:
    assumed = CLASS_DEFAULTS.get(family, {}).get("padding_token")
    for vocab_size in (64, 200_000):
        model = parse({**ABSENT[family], "vocab_size": vocab_size, "normalised_head": family == "baichuan"})
        assert model.padding_token == (assumed if assumed is not None and assumed < vocab_size else None)


def test_presets_say_nothing_of_it() -> None:
    models = [load_model(name) for name in preset_names()]
    assert {each.padding_token for each in models if "padding_token" not in CLASS_DEFAULTS.get(each.family, {})} == {
        None
    }


@given(st.sampled_from(PADS), st.integers(-1000, 1000) | st.integers())
def test_a_token_outside_the_vocabulary_is_refused(family: str, token: int) -> None:
    data, vocab = {**ABSENT[family], "pad_token_id": token}, CONFIGS[family]["vocab_size"]
    if -vocab <= token < vocab:
        assert parse(data).padding_token == token
        return
    (error,) = refusal(parse, data)
    assert error.code in ("RT060", "RT062")
    assert "'pad_token_id'" in error.message
    if error.code == "RT062":
        assert error.help == "write null: then the rows of all tokens are trained"
        assert parse({**data, "pad_token_id": None}).padding_token is None


@pytest.mark.parametrize("token", [True, 1.5, "0", [0]])
def test_what_is_no_token_is_refused(token: object) -> None:
    (error,) = refusal(parse, {**LLAMA, "pad_token_id": token})
    assert error.code == "RT060"


def test_texts_from_before_train_the_row_as_they_did() -> None:
    model = parse({**LLAMA, "pad_token_id": None})
    old = model_from_fields(model.to_fields() | {"config.pad_token_id": 3})
    assert old.padding_token is None
    assert hugging_face_config(old)["pad_token_id"] == 3
    both = model.to_fields() | {"config.pad_token_id": 3, "padding_token": 3}
    assert "mean the same" in refusal(model_from_fields, both)[0].message


# Keys of old files.

OF_OLD_FILES = {
    "_num_labels": 1,
    "num_labels": 2,
    "output_past": True,
    "xla_device": True,
    "use_return_dict": True,
    "eos_token_ids": [0],
    "cls_token_id": 1,
    "mask_token_id": 1,
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": False,
}
OF_GPT2 = {"n_special": 0, "predict_special_tokens": True}


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_of_old_files_that_change_nothing_are_kept(family: str) -> None:
    keys = OF_OLD_FILES | (OF_GPT2 if family == "gpt2" else {})
    model = parse({**CONFIGS[family], **keys})
    assert model == parse(CONFIGS[family])
    exported = hugging_face_config(again(model))
    assert {key: exported[key] for key in keys} == keys


def test_special_tokens_behind_the_vocabulary_are_refused() -> None:
    (error,) = refusal(parse, {**GPT2, "n_special": 2})
    assert "special tokens behind the vocabulary" in error.message


def test_a_second_name_of_gemmas_window_is_held_against_it() -> None:
    data = {**GEMMA2, "sliding_window": 3, "sliding_window_size": 3}
    assert parse(data) == parse({**GEMMA2, "sliding_window": 3})
    assert hugging_face_config(again(parse(data)))["sliding_window_size"] == 3
    (error,) = refusal(parse, {**data, "sliding_window_size": 5})
    assert error.message.startswith("'sliding_window_size' is 5, but the window is 3")
    absent = {key: value for key, value in data.items() if key != "sliding_window"}
    assert refusal(parse, absent)  # 4096 is what the class reads then
    assert refusal(parse, {**GEMMA3, "sliding_window_size": 3})


@pytest.mark.parametrize(
    ("key", "meant"),
    [("rope_thetta", "rope_theta"), ("num_hiden_layers", "num_hidden_layers"), ("num_lables", "num_labels")],
)
def test_a_slip_of_the_keyboard_is_suggested(key: str, meant: str) -> None:
    assert f"did you mean '{meant}'?" in refusal(parse, {**LLAMA, key: 3})[0].help


@pytest.mark.parametrize("key", ["num_labelled", "num_banks", "output_router", "n_shards", "hidden_noise", "attn_mode"])
def test_a_key_that_is_only_a_little_alike_is_not_suggested(key: str) -> None:
    assert (
        refusal(parse, {**LLAMA, key: 3})[0].help
        == "look up what it means: remove it only if the model computes the same without it"
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_names_of_other_programs_are_told_by_their_meaning(family: str) -> None:
    known = keys_of(family)
    for name, means in CALLED_ELSEWHERE.items():
        if name not in known.read and (means in known.renamed or means in known.read):
            wanted = known.renamed[means][0] if means in known.renamed else means
            errors = refusal(parse, {**CONFIGS[family], name: 3})
            assert any(f"did you mean '{wanted}'?" in (error.help or "") for error in errors)
