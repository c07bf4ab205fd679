"""Checkpoints: what is saved is what is loaded, bit for bit; nothing broken or of another model is taken for one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ratrain.ratrain_ir.model.blocks import block, block_chain, parameters
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.targets.runtime.checkpoint import checkpoint
from ratrain.targets.runtime.checkpoint.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from ratrain.targets.runtime.checkpoint.training_state import TrainingState
from tests.targets.runtime.checkpoint.training_states import (
    LLAMA,
    RUN,
    HeldStates,
    assert_equal,
    make_state,
    refusal,
    snapshot,
)
from tests.targets.runtime.weights.parameter_views import named_parameters_of

QWEN2 = evolve(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True)
BAICHUAN = evolve(LLAMA, family="baichuan", kv_heads=4, packed_qkv=True, position="alibi", rope_theta=0.0)
GPT2 = in_family(BAICHUAN, "gpt2", learned_positions=20, tied_embeddings=True)
MODELS = {model.family: model for model in (LLAMA, QWEN2, BAICHUAN, GPT2)}


def edit_manifest(folder: Path, **changes: object) -> None:
    """Change entries as a program would that writes the format, sealing it again; None removes one."""
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    manifest = {key: value for key, value in manifest.items() if value is not None and key != "manifest_sha256"}
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def replace_state(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Other tensors, with the manifest agreeing."""
    path = folder / "state.safetensors"
    save_file(tensors, path)
    content = path.read_bytes()
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(folder, files={"state.safetensors": entry})


class TestRoundTrip:
    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_every_bit(self, tmp_path, model):
        state = make_state(model)
        save_checkpoint(str(tmp_path / "ck"), model, state, RUN)
        found, run = load_checkpoint(str(tmp_path / "ck"), model)
        assert_equal(found, state, model)
        assert run == RUN
        assert sorted(snapshot(tmp_path)) == ["ck/manifest.json", "ck/state.safetensors"]

    @settings(max_examples=10)
    @given(family=st.sampled_from(list(MODELS)), dp=st.integers(1, 7), seed=st.integers(0, 99))
    def test_shard_padding_leaves_no_trace(self, family, dp, seed, tmp_path_factory):
        folder, model = tmp_path_factory.mktemp("padded"), MODELS[family]
        save_checkpoint(str(folder / "padded"), model, make_state(model, seed, dp=dp), {})
        save_checkpoint(str(folder / "plain"), model, make_state(model, seed), {})
        assert snapshot(folder / "padded") == snapshot(folder / "plain")

    @settings(max_examples=25)
    @given(
        step=st.integers(0, 1 << 40),
        scale=st.tuples(st.floats(0, 2.0**40), st.floats(0, 1e6)),
        run=st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.floats(allow_nan=False).map(abs)),
    )
    def test_numbers_and_manifest_come_back(self, step, scale, run, tmp_path_factory):
        run = {key: value for key, value in run.items() if value != np.inf}
        place = str(tmp_path_factory.mktemp("numbers") / "ck")
        save_checkpoint(place, LLAMA, evolve(make_state(LLAMA), step=step, scale=scale), run)
        found, found_run = load_checkpoint(place, LLAMA)
        assert (found.step, found.scale, found_run) == (step, scale, run)

    def test_keys_are_hugging_face_names(self, saved):
        tensors = load_file(saved / "state.safetensors")
        names = {name.partition("/")[2] for name in tensors}
        assert "model.layers.1.self_attn.k_proj.weight" in names
        assert tensors.keys() == {f"{kind}/{name}" for kind in ("p", "m1", "m2") for name in names}
        state = make_state(LLAMA).blocks[block("mlp", 1)]
        down = named_parameters_of(LLAMA, block("mlp", 1), state.m2)["model.layers.1.mlp.down_proj.weight"]
        found = tensors["m2/model.layers.1.mlp.down_proj.weight"]
        assert np.array_equal(found.view(np.uint32), down.view(np.uint32))

    def test_tied_matrix_is_stored_once(self, tmp_path):
        save_checkpoint(str(tmp_path / "ck"), QWEN2, make_state(QWEN2), {})
        assert not [name for name in load_file(tmp_path / "ck" / "state.safetensors") if "lm_head" in name]

    @pytest.mark.parametrize("kind", ["p", "m1", "m2"])
    def test_tied_copies_that_differ_are_refused(self, tmp_path, kind):
        state = make_state(QWEN2)
        getattr(state.blocks[block("head")], kind).view(np.uint32)[5] ^= 1
        (problem,) = refusal(save_checkpoint, str(tmp_path / "ck"), QWEN2, state, {})
        assert problem.code == "RT092"
        assert not list(tmp_path.iterdir())

    def test_pieces_are_asked_for_in_the_order_of_the_file(self, tmp_path):
        """States that are fetched from other ranks are asked for each element once, a block after the other."""
        state = make_state(LLAMA)
        asked: list[tuple[str, str, int, int]] = []

        class Fetching(HeldStates):
            def pieces(self, block, kind, start, stop):
                asked.append((str(block), kind, start, stop))
                return super().pieces(block, kind, start, stop)

        save_checkpoint(str(tmp_path / "ck"), LLAMA, evolve(state, blocks=Fetching(LLAMA, state.blocks)), {})
        assert asked == [
            (str(unit), kind, parameter.offset, parameter.offset + parameter.elements)
            for unit in block_chain(LLAMA)
            for kind in ("p", "m1", "m2")
            for parameter in parameters(LLAMA, unit)
        ]
        assert_equal(load_checkpoint(str(tmp_path / "ck"), LLAMA)[0], state, LLAMA)

    def test_numpy_scalars_serve(self, tmp_path):
        state = make_state(LLAMA)
        blocks = {unit: evolve(kept, t=np.int64(kept.t)) for unit, kept in state.blocks.items()}
        counted = TrainingState(np.int64(3), HeldStates(LLAMA, blocks), (np.float32(0.1), np.int64(4)))
        save_checkpoint(str(tmp_path / "ck"), LLAMA, counted, {1: "a", 10: "b", 2: "c"})
        found, run = load_checkpoint(str(tmp_path / "ck"), LLAMA)
        assert (found.step, found.scale) == (3, (float(np.float32(0.1)), 4.0))
        assert run == {"1": "a", "10": "b", "2": "c"}


class TestDamage:
    @pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
    def test_missing_file(self, saved, name):
        (saved / name).unlink()
        (problem,) = refusal(load_checkpoint, str(saved), LLAMA)
        assert problem.code == "RT002"
        assert name in problem.message

    @pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
    @pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
    def test_truncated(self, saved, name, keep):
        content = (saved / name).read_bytes()
        (saved / name).write_bytes(content[: int(len(content) * keep)])
        (problem,) = refusal(load_checkpoint, str(saved), LLAMA)
        assert problem.code == "RT092"
        assert name in problem.message

    @pytest.mark.parametrize("name", ["manifest.json", "state.safetensors"])
    def test_one_flipped_bit(self, saved, name):
        content = (saved / name).read_bytes()
        # In the manifest only bits inside its values, as white space may change without harm.
        for position in [content.index(b"65536.0"), len(content) - 80] if name == "manifest.json" else [3, 40, -1, -9]:
            broken = bytearray(content)
            broken[position] ^= 1
            (saved / name).write_bytes(broken)
            (problem,) = refusal(load_checkpoint, str(saved), LLAMA)
            assert problem.code == "RT092"
            assert name in problem.message

    @settings(max_examples=40)
    @given(content=st.binary(max_size=60) | st.sampled_from([b"{}", b"[]", b"null", b"[" * 100_000, b"1" * 5000]))
    def test_noise_for_a_manifest(self, content, tmp_path_factory):
        folder = tmp_path_factory.mktemp("noise")
        (folder / "manifest.json").write_bytes(content)
        (problem,) = refusal(load_checkpoint, str(folder), LLAMA)
        assert problem.code == "RT092"

    def test_not_a_directory(self, tmp_path):
        (tmp_path / "ck").write_text("x")
        assert refusal(load_checkpoint, str(tmp_path / "ck"), LLAMA)[0].code == "RT002"
        assert refusal(load_checkpoint, str(tmp_path / "nothing"), LLAMA)[0].code == "RT002"
        assert refusal(load_checkpoint, "nul\0byte", LLAMA)[0].code == "RT002"

    def test_a_manifest_that_goes_on_for_ever(self, saved, monkeypatch):
        monkeypatch.setattr(checkpoint, "_MAX_MANIFEST", 100)
        assert refusal(load_checkpoint, str(saved), LLAMA)[0].code == "RT092"

    @pytest.mark.parametrize("version", [0, 2, "1", None])
    def test_another_version(self, saved, version):
        edit_manifest(saved, version=version)
        (problem,) = refusal(load_checkpoint, str(saved), LLAMA)
        assert problem.code == "RT092"
        assert "version" in problem.message

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("format", "other"),
            ("model", None),
            ("model", []),
            ("model", {"layers": 3}),
            ("step", None),
            ("step", -1),
            ("step", 1.5),
            ("step", True),
            ("scale", None),
            ("scale", [1.0]),
            ("scale", [1.0, "2"]),
            ("updates", None),
            ("updates", {"embed": 1}),
            ("updates", [1]),
            ("files", None),
            ("files", {}),
            ("files", {"state.safetensors": {}}),
            ("files", {"state.safetensors": {"bytes": 1, "sha256": "0"}}),
            ("run", None),
            ("run", [1]),
        ],
    )
    def test_entries_that_cannot_be(self, saved, key, value):
        edit_manifest(saved, **{key: value})
        (problem,) = refusal(load_checkpoint, str(saved), LLAMA)
        assert problem.code == "RT092"

    @pytest.mark.parametrize("t", [-1, 1.0, "3", None, True])
    def test_updates_that_cannot_be(self, saved, t):
        updates = {str(unit): 1 for unit in block_chain(LLAMA)}
        edit_manifest(saved, updates={**updates, "head": t})
        assert "updates" in refusal(load_checkpoint, str(saved), LLAMA)[0].message

    def test_edits_of_these_tests_are_sound(self, saved):
        """The helpers change nothing but what they are told to."""
        edit_manifest(saved, step=7)
        assert load_checkpoint(str(saved), LLAMA)[0].step == 7
        replace_state(saved, load_file(saved / "state.safetensors"))
        assert_equal(load_checkpoint(str(saved), LLAMA)[0], evolve(make_state(LLAMA), step=7), LLAMA)


class TestOtherModel:
    @pytest.mark.parametrize(
        "change", [{"layers": 3}, {"vocab_size": 97}, {"norm_eps": 1e-6}, {"rope_theta": 5e5}, {"kv_heads": 4}]
    )
    def test_the_field_is_named(self, saved, change):
        ((name, value),) = change.items()
        (problem,) = refusal(load_checkpoint, str(saved), evolve(LLAMA, **change))
        assert problem.code == "RT092"
        assert f"{name} = {getattr(LLAMA, name)}" in problem.message
        assert str(value) in problem.message

    def test_all_fields_at_once(self, saved):
        problems = refusal(load_checkpoint, str(saved), evolve(LLAMA, layers=1, ffn_size=8, norm_eps=0.1))
        assert len(problems) == 3

    def test_the_name_may_differ(self, saved):
        assert load_checkpoint(str(saved), evolve(LLAMA, name="renamed"))[0].step == 41

    def test_wrong_tensors_are_named(self, saved):
        tensors = load_file(saved / "state.safetensors")
        del tensors["m1/model.norm.weight"]
        tensors["m3/model.norm.weight"] = np.zeros(32, np.float32)
        tensors["p/model.norm.weight"] = np.zeros((32, 1), np.float32)
        tensors["p/lm_head.weight"] = np.zeros((96, 32), np.float16)
        replace_state(saved, tensors)
        problems = refusal(load_checkpoint, str(saved), LLAMA)
        assert {problem.code for problem in problems} == {"RT092"}
        text = "\n".join(problem.message for problem in problems)
        assert len(problems) == 4
        assert "lacks m1/model.norm.weight" in text
        assert '"m3/model.norm.weight"' in text
        assert "[32, 1], not F32 [32]" in text
        assert '"F16"' in text

    def test_another_set_of_tensors_is_summed_up(self, saved):
        replace_state(saved, {"x": np.zeros(1, np.float32)})
        problems = refusal(load_checkpoint, str(saved), LLAMA)
        assert len(problems) == 25
        assert "more tensors" in problems[-1].message


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_device_in_place_of_a_file_is_not_read(saved: Path, name: str) -> None:
    (saved / name).unlink()
    (saved / name).symlink_to("/dev/zero")
    with pytest.raises(DiagnosticError, match=r"RT002.*it is not a regular file"):
        load_checkpoint(str(saved), LLAMA)


def test_a_run_that_ended_before_its_first_save_is_begun_again(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_manifest(str(tmp_path))
    (problem,) = caught.value.diagnostics
    assert problem.code == "RT002"
    assert "begin without --resume" in (problem.help or "")
