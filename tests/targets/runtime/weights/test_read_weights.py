"""Reading weights: Hugging Face files of every supported family, folders of them, tied heads, and broken files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.runtime.arena.tensor_file import open_tensors
from ratrain.targets.runtime.weights.weights import named_parameters, read_weights
from tests.targets.runtime.weights.model_tensors import BAICHUAN, GPT2, LLAMA, MODELS, QWEN2, hugging_face, refusal


def raw_file(entries: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file put together by hand: name -> dtype, shape, bytes."""
    header, body = {}, b""
    for name, (dtype, shape, content) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def with_header(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


class TestRead:
    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_names_of_every_family(self, tmp_path, model):
        tensors = hugging_face(model)
        save_file(tensors, tmp_path / "w.safetensors")
        source = read_weights(str(tmp_path / "w.safetensors"), model)
        for name in named_parameters(model):
            values = source(name)
            assert values.dtype == np.float32
            if model.family == "gpt2":
                part, _, rest = name.split(".")[-2].partition("_")
                stored = name.replace(f"{part}_proj", "c_attn") if part in {"q", "k", "v"} else name
                expected = tensors[stored].T if rest in {"proj", "fc"} else tensors[stored]
                first = 32 * "qkv".index(part) if part in {"q", "k", "v"} else 0
                assert np.array_equal(values, expected[first : first + len(values)])
            elif model.packed_qkv and name.split(".")[-2] in {"q_proj", "k_proj", "v_proj"}:
                layer, part = name.split(".")[2], "qkv".index(name.split(".")[-2][0])
                packed = tensors[f"model.layers.{layer}.self_attn.W_pack.weight"]
                assert np.array_equal(values, packed[part * 32 : (part + 1) * 32])
            else:
                assert np.array_equal(values, tensors[name])

    def test_every_f16(self, tmp_path):
        """All finite halves widen exactly; numpy's own cast is the oracle, and subnormals are among them."""
        bits = np.arange(1 << 16, dtype=np.uint16)
        bits = bits[(bits & 0x7C00) != 0x7C00]
        model = evolve(LLAMA, vocab_size=len(bits) // 32)
        tensors = dict.fromkeys(["lm_head.weight", "model.embed_tokens.weight"], bits.view(np.float16).reshape(-1, 32))
        path = tmp_path / "w.safetensors"
        save_file({**hugging_face(LLAMA), **tensors}, path)
        read = read_weights(str(path), model)("lm_head.weight")
        assert np.array_equal(read, tensors["lm_head.weight"].astype(np.float32))
        assert read.reshape(-1)[1] == np.float32(2.0**-24)

    def test_every_bf16(self, tmp_path):
        """A bf16 with bits b is the f32 with bits b << 16: all finite ones, in every bit."""
        bits = np.arange(1 << 16, dtype=np.uint32)
        bits = bits[(bits & 0x7F80) != 0x7F80]
        model = evolve(LLAMA, vocab_size=len(bits) // 32)
        entries = {name: ("F32", list(values.shape), values.tobytes()) for name, values in hugging_face(LLAMA).items()}
        table = ("BF16", [len(bits) // 32, 32], bits.astype("<u2").tobytes())
        entries = {"model.embed_tokens.weight": table, **entries, "lm_head.weight": table}
        entries["model.embed_tokens.weight"] = table
        path = tmp_path / "w.safetensors"
        path.write_bytes(raw_file(entries))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            read = read_weights(str(path), model)(name)
            assert np.array_equal(read.reshape(-1).view(np.uint32), bits << 16)
        assert read.reshape(-1)[0x3F80] == 1.0

    def test_infinite_and_missing_numbers_are_refused_when_read(self, tmp_path):
        tensors = hugging_face(LLAMA)
        tensors["model.norm.weight"][3] = np.inf
        tensors["lm_head.weight"][1, 1] = np.nan
        path = tmp_path / "w.safetensors"
        save_file(tensors, path)
        source = read_weights(str(path), LLAMA)
        for name in ("model.norm.weight", "lm_head.weight"):
            (problem,) = refusal(source, name)
            assert problem.code == "RT091"
            assert name in problem.message
        assert source("model.embed_tokens.weight").any()

    def test_tensors_need_not_be_aligned(self, tmp_path):
        entries = {"pad.rotary_emb.inv_freq": ("U8", [3], b"abc")}
        tensors = hugging_face(LLAMA)
        entries |= {name: ("F32", list(values.shape), values.tobytes()) for name, values in tensors.items()}
        path = tmp_path / "w.safetensors"
        path.write_bytes(raw_file(entries))
        source = read_weights(str(path), LLAMA)
        assert all(np.array_equal(source(name), values) for name, values in tensors.items())

    def test_published_gpt2_names_and_masks(self, tmp_path):
        """The published files name the tensors of `GPT2Model`, and hold its causal mask; both mean the same weights."""
        tensors = hugging_face(GPT2)
        bare = {name.removeprefix("transformer."): values for name, values in tensors.items()}
        mask = np.tril(np.ones((1, 1, 9, 9), np.float32))
        for layer in range(2):
            bare |= {f"h.{layer}.attn.bias": mask, f"h.{layer}.attn.masked_bias": np.array(-1e4, np.float32)}
        save_file(tensors, tmp_path / "whole.safetensors")
        save_file(bare, tmp_path / "bare.safetensors")
        whole, same = (read_weights(str(tmp_path / f"{name}.safetensors"), GPT2) for name in ("whole", "bare"))
        assert all(np.array_equal(whole(name), same(name)) for name in named_parameters(GPT2))

    def test_rotary_tables_are_ignored(self, tmp_path):
        tensors = hugging_face(LLAMA)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float64)
        save_file(tensors, tmp_path / "w.safetensors")
        assert read_weights(str(tmp_path / "w.safetensors"), LLAMA)("model.norm.weight").shape == (32,)

    def test_all_mismatches_at_once(self, tmp_path):
        tensors = hugging_face(LLAMA)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = np.ones(33, np.float32)
        tensors["model.layers.0.mlp.down_proj.weight"] = np.ones((40, 32), np.float32)
        tensors["lm_head.weight"] = np.ones((96, 32), np.int32)
        tensors["model.layers.2.input_layernorm.weight"] = np.ones(32, np.float32)
        save_file(tensors, tmp_path / "w.safetensors")
        problems = refusal(read_weights, str(tmp_path / "w.safetensors"), LLAMA)
        assert {problem.code for problem in problems} == {"RT091"}
        messages = [problem.message for problem in problems]
        expected = [
            ("lacks", "model.layers.1.mlp.up_proj.weight", "[40, 32]"),
            ("model.norm.weight", "[33]", "[32]"),
            ("model.layers.0.mlp.down_proj.weight", "[40, 32]", "[32, 40]"),
            ("lm_head.weight", "I32", "BF16"),
            ("model.layers.2.input_layernorm.weight", "no parameter"),
        ]
        assert len(messages) == len(expected)
        for words in expected:
            assert any(all(word in message for word in words) for message in messages), words

    def test_a_wrong_model_is_summed_up(self, tmp_path):
        save_file(hugging_face(LLAMA), tmp_path / "w.safetensors")
        problems = refusal(read_weights, str(tmp_path / "w.safetensors"), evolve(LLAMA, layers=50))
        assert len(problems) == 25
        assert f"{48 * 9 - 24} more" in problems[-1].message

    def test_packed_names_belong_to_packed_models(self, tmp_path):
        model = evolve(LLAMA, kv_heads=4)
        save_file(hugging_face(BAICHUAN), tmp_path / "w.safetensors")
        problems = refusal(read_weights, str(tmp_path / "w.safetensors"), model)
        assert sum("lacks" in problem.message for problem in problems) == 6
        assert sum("W_pack" in problem.message for problem in problems) == 2

    def test_missing_head_may_be_a_tied_model(self, tmp_path):
        tensors = hugging_face(LLAMA)
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "w.safetensors")
        (problem,) = refusal(read_weights, str(tmp_path / "w.safetensors"), LLAMA)
        assert "tie_word_embeddings" in problem.help


class TestTied:
    def test_head_equal_to_the_embedding_is_ignored(self, tmp_path):
        tensors = hugging_face(QWEN2)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        save_file(tensors, tmp_path / "w.safetensors")
        source = read_weights(str(tmp_path / "w.safetensors"), QWEN2)
        assert np.array_equal(source("model.embed_tokens.weight"), tensors["lm_head.weight"])

    def test_equal_in_another_type(self, tmp_path):
        tensors = hugging_face(QWEN2)
        half = tensors["model.embed_tokens.weight"].astype(np.float16)
        tensors |= {"lm_head.weight": half, "model.embed_tokens.weight": half.astype(np.float32)}
        save_file(tensors, tmp_path / "w.safetensors")
        read_weights(str(tmp_path / "w.safetensors"), QWEN2)

    @pytest.mark.parametrize("head", ["one element", "shape", "type"])
    def test_another_head_is_refused(self, tmp_path, head):
        tensors = hugging_face(QWEN2)
        table = tensors["model.embed_tokens.weight"]
        other = table.copy()
        other[95, 31] += 1
        tensors["lm_head.weight"] = {"one element": other, "shape": table[:95], "type": table.astype(np.int32)}[head]
        save_file(tensors, tmp_path / "w.safetensors")
        (problem,) = refusal(read_weights, str(tmp_path / "w.safetensors"), QWEN2)
        assert problem.code == "RT091"
        assert "tied" in problem.message


def write_shards(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    names = sorted(tensors)
    files = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    write_index(folder, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return weight_map


def write_index(folder: Path, index: object) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)


class TestDirectories:
    def test_single_file(self, tmp_path):
        tensors = hugging_face(LLAMA)
        save_file(tensors, tmp_path / "model.safetensors")
        assert np.array_equal(read_weights(str(tmp_path), LLAMA)("lm_head.weight"), tensors["lm_head.weight"])

    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_shards(self, tmp_path, model):
        tensors = hugging_face(model)
        write_shards(tmp_path, tensors)
        source = read_weights(str(tmp_path), model)
        save_file(tensors, tmp_path / "whole.safetensors")
        whole = read_weights(str(tmp_path / "whole.safetensors"), model)
        assert all(np.array_equal(source(name), whole(name)) for name in named_parameters(model))

    def test_index_and_shards_disagree(self, tmp_path):
        weight_map = write_shards(tmp_path, hugging_face(LLAMA))
        first, second = "lm_head.weight", "model.norm.weight"
        files = {"a-1.safetensors": "a-2.safetensors", "a-2.safetensors": "a-1.safetensors"}
        weight_map[first] = files[weight_map[first]]
        del weight_map[second]
        write_index(tmp_path, {"weight_map": weight_map})
        problems = refusal(read_weights, str(tmp_path), LLAMA)
        assert {problem.code for problem in problems} == {"RT091"}
        assert sum("lm_head" in problem.message for problem in problems) == 2  # lacking here, unexpected there
        assert sum("model.norm" in problem.message for problem in problems) == 1

    def test_missing_shard(self, tmp_path):
        write_shards(tmp_path, hugging_face(LLAMA))
        (tmp_path / "a-2.safetensors").unlink()
        (problem,) = refusal(read_weights, str(tmp_path), LLAMA)
        assert problem.code == "RT002"
        assert "a-2.safetensors" in problem.message

    @pytest.mark.parametrize(
        "index",
        [
            "",
            "{",
            "[" * 100_000,
            "[]",
            "{}",
            {"weight_map": []},
            {"weight_map": {}},
            {"weight_map": {"a": 1}},
            {"weight_map": {"a": "../b.safetensors"}},
            {"weight_map": {"a": "/etc/passwd"}},
            {"weight_map": {"a": ".."}},
            {"weight_map": {"a": "b\0"}},
            {"weight_map": {"a": ""}},
        ],
    )
    def test_broken_index(self, tmp_path, index):
        write_index(tmp_path, index)
        (problem,) = refusal(read_weights, str(tmp_path), LLAMA)
        assert problem.code == "RT091"
        assert "index.json" in problem.message

    def test_no_weights(self, tmp_path):
        (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
        (problem,) = refusal(read_weights, str(tmp_path), LLAMA)
        assert problem.code == "RT091"
        assert "converted" in problem.help

    @pytest.mark.parametrize("path", ["nowhere.safetensors", "nul\0byte"])
    def test_no_file(self, tmp_path, path):
        assert refusal(read_weights, str(tmp_path / path), LLAMA)[0].code == "RT002"


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class TestBrokenFiles:
    GOOD = save({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)})

    def test_the_file_that_is_broken_below_is_sound(self, tmp_path):
        (tmp_path / "w").write_bytes(self.GOOD)
        found = open_tensors(str(tmp_path / "w"), "RT091")
        assert found["a"].values(0, 6).tolist() == [0, 1, 2, 3, 4, 5]
        assert found["b"].shape == (2, 2)

    @pytest.mark.parametrize("cut", range(0, len(GOOD), 3))
    def test_truncated(self, tmp_path, cut):
        (tmp_path / "w").write_bytes(self.GOOD[:cut])
        assert refusal(open_tensors, str(tmp_path / "w"), "RT091")[0].code == "RT091"

    def test_trailing_bytes(self, tmp_path):
        (tmp_path / "w").write_bytes(self.GOOD + b"x")
        assert refusal(open_tensors, str(tmp_path / "w"), "RT092")[0].code == "RT092"

    @settings(max_examples=60)
    @given(content=st.binary(max_size=200))
    def test_noise(self, content, tmp_path_factory):
        path = tmp_path_factory.mktemp("noise") / "w"
        path.write_bytes(content)
        assert refusal(open_tensors, str(path), "RT091")[0].code == "RT091"

    @settings(max_examples=150)
    @given(position=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
    def test_one_changed_byte_is_refused_or_read(self, position, value, tmp_path_factory):
        content = bytearray(self.GOOD)
        content[position] = value
        path = tmp_path_factory.mktemp("flip") / "w"
        path.write_bytes(content)
        try:
            found = open_tensors(str(path), "RT091")
        except DiagnosticError as error:
            codes = {problem.code for problem in error.diagnostics}
        else:
            codes = {"RT091"} if sum(tensor.stop - tensor.start for tensor in found.values()) == 32 else set()
        assert codes == {"RT091"}

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"PK\x03\x04" + bytes(100), "pickle"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "LFS"),
            (b"", "incomplete"),
        ],
    )
    def test_other_kinds_of_files_are_recognised(self, tmp_path, content, words):
        (tmp_path / "w").write_bytes(content)
        (problem,) = refusal(open_tensors, str(tmp_path / "w"), "RT091")
        assert words in problem.help

    @pytest.mark.parametrize(
        "content",
        [
            with_header(b"{"),
            with_header(b"\xff\xff"),
            with_header(b"[" * 100_000),
            with_header([1]),
            with_header({"a": 1}, bytes(4)),
            with_header({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
            with_header({"a": {**entry(), "more": 1}}, bytes(4)),
            with_header({"a": entry(dtype=4)}, bytes(4)),
            with_header({"a": entry(shape=1)}, bytes(4)),
            with_header({"a": entry(shape=[-1])}, bytes(4)),
            with_header({"a": entry(shape=[1.0])}, bytes(4)),
            with_header({"a": entry(shape=[True])}, bytes(4)),
            with_header({"a": entry(shape=[10**30])}, bytes(4)),
            with_header({"a": entry(shape=[2**61] * 400)}, bytes(4)),
            with_header({"a": entry(offsets=[0])}, bytes(4)),
            with_header({"a": entry(offsets=[0, 4, 8])}, bytes(4)),
            with_header({"a": entry(offsets=[4, 0])}, bytes(4)),
            with_header({"a": entry(offsets="04")}, bytes(4)),
            with_header({"a": entry(shape=[2])}, bytes(4)),
            with_header({"a": entry(dtype="F16")}, bytes(4)),
            with_header({"a": entry(offsets=[4, 8])}, bytes(8)),
            with_header({"a": entry(), "b": entry()}, bytes(4)),
            with_header({"a": entry(), "b": entry(offsets=[8, 12])}, bytes(12)),
            with_header({"a": entry(), "b": entry(shape=[2], offsets=[2, 10])}, bytes(10)),
            with_header(
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
                bytes(4),
            ),
        ],
    )
    def test_headers_that_contradict_themselves(self, tmp_path, content):
        (tmp_path / "w").write_bytes(content)
        (problem,) = refusal(open_tensors, str(tmp_path / "w"), "RT091")
        assert problem.code == "RT091"
        assert len(problem.message) < 400 + len(str(tmp_path))

    def test_types_of_the_future_can_stand_beside(self, tmp_path):
        (tmp_path / "w").write_bytes(raw_file({"a": ("F4", [3], b"xy"), "b": ("F32", [1], b"\0\0\x80\x3f")}))
        assert open_tensors(str(tmp_path / "w"), "RT091")["b"].values(0, 1).tolist() == [1.0]
