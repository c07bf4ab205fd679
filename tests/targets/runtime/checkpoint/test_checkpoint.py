"""Checkpoints: what is saved is what is loaded, bit for bit; nothing broken is taken for one; saving is atomic."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.model.blocks import Block, block, block_chain, flat_elements, parameters
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.targets.runtime.arena.tensor_file import cut
from ratrain.targets.runtime.checkpoint import checkpoint, checkpoint_places
from ratrain.targets.runtime.checkpoint.checkpoint import (
    check_checkpoint_place,
    clear_leftovers,
    hold_checkpoint_place,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_weights, load_latest
from ratrain.targets.runtime.checkpoint.training_state import BlockState, BlockStates, TrainingState
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.weights.weights import block_elements
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from ratrain.targets.runtime.weights.weight_source import FlatPieces

LLAMA = ModelConfig("tiny", "llama", 96, 32, 2, 4, 2, 8, 40, 1e-5)
QWEN2 = evolve(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True)
BAICHUAN = evolve(LLAMA, family="baichuan", kv_heads=4, packed_qkv=True, position="alibi", rope_theta=0.0)
GPT2 = in_family(BAICHUAN, "gpt2", learned_positions=20, tied_embeddings=True)
MODELS = {model.family: model for model in (LLAMA, QWEN2, BAICHUAN, GPT2)}
RUN = {"seed": 7, "plan": "abc", "versions": {"numpy": "2.0"}, "threads": 1, "blas": "Haswell"}


def refusal(action, *arguments, **options) -> list:
    with pytest.raises(DiagnosticError) as caught:
        action(*arguments, **options)
    return caught.value.diagnostics


@frozen(eq=False)
class HeldStates(BlockStates):
    """States that are arrays in memory."""

    blocks: Mapping[Block, BlockState]

    def pieces(self, block: Block, kind: str, start: int, stop: int) -> FlatPieces:
        """In pieces of a few elements."""
        for low, high in cut(start, stop, 300):
            yield low, getattr(self.blocks[block], kind)[low:high]

    def updates(self, block: Block) -> int:
        return self.blocks[block].t

    def __getitem__(self, block: Block) -> BlockState:
        return self.blocks[block]


def make_state(model: ModelConfig, seed: int = 0, *, dp: int | None = None) -> TrainingState:
    """Any bits in the parameters, zeros between them; with `dp`, padded to that many shards."""
    rng = np.random.default_rng(seed)
    blocks = {}
    for number, unit in enumerate(block_chain(model)):
        size = block_elements(model, unit)
        if dp is not None:
            plan = Plan(pp=1, dp=dp, cuts=(), micro_batch_size=1, micro_batches=1, seq_len=8)
            size = flat_elements(model, plan, unit)
        arrays = []
        for _ in range(3):
            flat = np.zeros(size, np.float32)
            for view in named_parameters_of(model, unit, flat).values():
                view[...] = rng.integers(0, 1 << 32, view.shape, np.uint32).view(np.float32)
            arrays.append(flat)
        blocks[unit] = BlockState(*arrays, t=40 + number)
    if model.tied_embeddings:
        table = parameters(model, block("embed"))[0].elements
        for kind in ("p", "m1", "m2"):
            getattr(blocks[block("head")], kind)[:table] = getattr(blocks[block("embed")], kind)[:table]
    return TrainingState(41, HeldStates(model, blocks), (65536.0, 0.1))


def assert_equal(found: TrainingState, expected: TrainingState, model: ModelConfig) -> None:
    assert found.step == expected.step
    assert found.scale == expected.scale
    assert list(found.blocks) == list(block_chain(model))
    for unit, state in found.blocks.items():
        wanted = expected.blocks[unit]
        assert state.t == wanted.t
        for kind in ("p", "m1", "m2"):
            flat, want = getattr(state, kind), getattr(wanted, kind)
            assert flat.dtype == np.float32
            assert flat.shape == (block_elements(model, unit),)
            assert np.array_equal(flat.view(np.uint32), want[: len(flat)].view(np.uint32))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


@pytest.fixture
def saved(tmp_path) -> Path:
    save_checkpoint(str(tmp_path / "ck"), LLAMA, make_state(LLAMA), RUN)
    return tmp_path / "ck"


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


class TestPlace:
    def test_a_checkpoint_is_replaced(self, saved):
        later = evolve(make_state(LLAMA, 1), step=99)
        save_checkpoint(str(saved), LLAMA, later, {"seed": 8})
        found, run = load_checkpoint(str(saved), LLAMA)
        assert_equal(found, later, LLAMA)
        assert run == {"seed": 8}
        assert list(saved.parent.iterdir()) == [saved]

    def test_an_empty_directory_is_taken(self, tmp_path):
        (tmp_path / "ck").mkdir()
        save_checkpoint(f"{tmp_path}/ck/", LLAMA, make_state(LLAMA), {})
        assert load_checkpoint(str(tmp_path / "ck"), LLAMA)[0].step == 41

    def test_a_link_keeps_pointing_there(self, saved):
        link = saved.parent / "link"
        link.symlink_to(saved)
        save_checkpoint(str(link), LLAMA, evolve(make_state(LLAMA), step=50), {})
        assert link.is_symlink()
        assert load_checkpoint(str(saved), LLAMA)[0].step == 50

    @pytest.mark.parametrize("others", [["notes.txt"], ["manifest.json", "state.safetensors", "notes.txt"], ["d/f"]])
    def test_a_directory_with_other_files_is_kept(self, tmp_path, others):
        for name in others:
            path = tmp_path / "ck" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("keep me")
        before = snapshot(tmp_path)
        for problems in (
            refusal(check_checkpoint_place, str(tmp_path / "ck")),
            refusal(save_checkpoint, str(tmp_path / "ck"), LLAMA, make_state(LLAMA), {}),
        ):
            assert problems[0].code == "RT092"
            assert problems[0].help
        assert snapshot(tmp_path) == before

    def test_a_file_is_kept(self, tmp_path):
        (tmp_path / "ck").write_text("keep me")
        assert refusal(save_checkpoint, str(tmp_path / "ck"), LLAMA, make_state(LLAMA), {})[0].code == "RT092"
        assert (tmp_path / "ck").read_text() == "keep me"

    def test_good_places_pass(self, saved):
        check_checkpoint_place(str(saved))
        check_checkpoint_place(str(saved.parent / "new"))

    @pytest.mark.parametrize("place", ["no/such/place", "nul\0byte"])
    def test_places_that_cannot_be(self, tmp_path, place):
        problems = refusal(save_checkpoint, str(tmp_path / place), LLAMA, make_state(LLAMA), {})
        assert problems[0].code == "RT002"
        assert not list(tmp_path.iterdir())

    def test_links_in_a_circle(self, tmp_path):
        (tmp_path / "a").symlink_to(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        assert refusal(save_checkpoint, str(tmp_path / "a"), LLAMA, make_state(LLAMA), {})[0].code in {"RT002", "RT092"}
        assert refusal(load_checkpoint, str(tmp_path / "a"), LLAMA)[0].code == "RT002"

    def test_others_may_read_as_the_umask_says(self, tmp_path):
        before = os.umask(0o027)
        try:
            save_checkpoint(str(tmp_path / "ck"), LLAMA, make_state(LLAMA), {})
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "ck").stat().st_mode) == 0o750
        assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ck").iterdir()} == {0o640}


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for its own."""


FAILURES = [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("bug"), Interrupted()]


def raises_after(monkeypatch, owner: object, name: str, calls: int, error: BaseException) -> None:
    """Let `owner.name` work `calls` times and then raise once."""
    original = getattr(owner, name)
    count = [0]

    def failing(*arguments, **options):
        count[0] += 1
        if count[0] == calls + 1:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


def names_written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


POINTS = [
    *(
        (owner, name, calls, old)
        for old in (False, True)
        for owner, name, calls in (
            (checkpoint, "write_tensors", 0),
            (checkpoint.HashingStream, "write", 0),
            (checkpoint.HashingStream, "write", 2),
            (checkpoint.HashingStream, "write", 20),
            (checkpoint.os, "fsync", 0),
            (checkpoint.os, "fsync", 1),
            (checkpoint.os, "fsync", 2),
            (checkpoint.json, "dumps", 0),
            (checkpoint, "move_into_place", 0),
        )
    ),
    (Path, "rename", 0, False),
    (checkpoint_places, "exchange", 0, True),
    (checkpoint.os, "fsync", 3, True),  # the new one has its place already
]
"""Where saving fails: at which call of what, and whether there is an old checkpoint."""
WITHOUT_EXCHANGE = [
    (Path, "rename", 0, True),
    (Path, "rename", 1, True),  # the old one is aside already
]


@pytest.fixture
def no_exchange(monkeypatch):
    """A system that cannot exchange two directories."""
    monkeypatch.setattr(checkpoint_places, "_renameat2", lambda: None)


class TestAtomic:
    @pytest.mark.usefixtures("no_exchange")
    @pytest.mark.parametrize("error", FAILURES, ids=["disk full", "bug", "interrupt"])
    @pytest.mark.parametrize(("owner", "name", "calls", "old"), WITHOUT_EXCHANGE)
    def test_a_failing_rename_leaves_the_old_checkpoint(self, tmp_path, monkeypatch, old, error, owner, name, calls):
        self.test_a_failure_leaves_the_old_checkpoint(tmp_path, monkeypatch, old, error, owner, name, calls)

    @pytest.mark.parametrize("error", FAILURES, ids=["disk full", "bug", "interrupt"])
    @pytest.mark.parametrize(("owner", "name", "calls", "old"), POINTS)
    def test_a_failure_leaves_the_old_checkpoint(self, tmp_path, monkeypatch, old, error, owner, name, calls):
        place = tmp_path / "ck"
        if old:
            save_checkpoint(str(place), LLAMA, make_state(LLAMA), RUN)
        before = snapshot(tmp_path)
        with monkeypatch.context() as patched:
            raises_after(patched, owner, name, calls, error)
            with pytest.raises((DiagnosticError, type(error))) as caught:
                save_checkpoint(str(place), LLAMA, make_state(LLAMA, 1), RUN)
        if isinstance(error, OSError):
            assert caught.value.diagnostics[0].code == "RT002"
            assert "No space left" in caught.value.diagnostics[0].message
        assert snapshot(tmp_path) == before
        assert names_written(tmp_path) == ({"ck"} if old else set())
        if old:
            assert_equal(load_checkpoint(str(place), LLAMA)[0], make_state(LLAMA), LLAMA)

    @pytest.mark.parametrize("exchanging", [True, False])
    def test_at_every_moment_there_is_a_whole_checkpoint(self, tmp_path, monkeypatch, exchanging):
        """A machine that stops before any rename or removal leaves the old or the new one, if not at its place then beside."""
        place = tmp_path / "ck"
        save_checkpoint(str(place), LLAMA, make_state(LLAMA), RUN)
        later = evolve(make_state(LLAMA, 1), step=42)
        seen: list[dict[str, int]] = []
        if not exchanging:
            monkeypatch.setattr(checkpoint_places, "_renameat2", lambda: None)

        def look(original):
            def looking(*arguments, **options):
                steps = {}
                for path in tmp_path.glob("ck*"):
                    state, _ = load_checkpoint(str(path), LLAMA)
                    steps[re.sub("-.{8}", "", path.name)] = state.step
                seen.append(steps)
                return original(*arguments, **options)

            return looking

        monkeypatch.setattr(Path, "rename", look(Path.rename))
        monkeypatch.setattr(shutil, "rmtree", look(shutil.rmtree))
        save_checkpoint(str(place), LLAMA, later, RUN)
        if exchanging:
            assert seen == [{"ck": 42, "ck.tmp": 41}]
        else:
            assert seen == [{"ck": 41, "ck.tmp": 42}, {"ck.tmp.old": 41, "ck.tmp": 42}, {"ck": 42, "ck.tmp.old": 41}]

    def test_written_before_it_is_renamed(self, tmp_path, monkeypatch):
        """Both files and their directory are synced before the directory gets its name, and that name afterwards."""
        events: list[str] = []
        real_fsync, real_rename, real_exchange = os.fsync, Path.rename, checkpoint_places.exchange

        def fsync(handle: int) -> None:
            events.append(Path(f"/proc/self/fd/{handle}").readlink().name.partition(".tmp-")[0])
            real_fsync(handle)

        def rename(path: Path, target: Path) -> Path:
            events.append("rename")
            return real_rename(path, target)

        def exchange(one: Path, other: Path) -> bool:
            events.append("rename")
            return real_exchange(one, other)

        monkeypatch.setattr(checkpoint.os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", rename)
        monkeypatch.setattr(checkpoint_places, "exchange", exchange)
        for _ in range(2):
            events.clear()
            save_checkpoint(str(tmp_path / "ck"), LLAMA, make_state(LLAMA), {})
            assert events == ["state.safetensors", "manifest.json", "ck", "rename", tmp_path.name]

    def test_what_an_interrupted_save_left_is_named(self, saved):
        aside = saved.rename(saved.with_name("ck.old-ab12cd34"))
        (problem,) = refusal(load_checkpoint, str(saved), LLAMA)
        assert problem.code == "RT002"
        assert str(aside) in problem.help
        assert refusal(load_checkpoint, str(saved.with_name("other")), LLAMA)[0].help is None

    def test_an_old_one_that_cannot_be_removed_does_no_harm(self, saved, monkeypatch):
        monkeypatch.setattr(checkpoint.os, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError))
        save_checkpoint(str(saved), LLAMA, evolve(make_state(LLAMA), step=50), {})
        assert load_checkpoint(str(saved), LLAMA)[0].step == 50


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


class TestLeftovers:
    """What interrupted saves have left is said and cleared; what is not proved to be theirs stays."""

    def test_only_what_saves_write_is_cleared(self, saved):
        copy = shutil.copytree
        gone = [copy(saved, saved.with_name(name)) for name in ("ck.tmp-ab12cd34", "ck.tmp-ab12cd34.old")]
        half = saved.with_name("ck.tmp-half_way")
        half.mkdir()
        (half / "state.safetensors").write_bytes(b"half")
        mine = [
            saved.with_name(name) for name in ("ck.tmp-notes", "ck.tmp-ab12cd34.olds", "ck.old", "ck2.tmp-ab12cd34")
        ]
        foreign = saved.with_name("ck.tmp-ff12cd34")
        for path in [*mine, foreign]:
            copy(saved, path)
        (foreign / "notes.txt").write_text("keep me")
        earlier = copy(saved, saved.with_name("ck.old-20260101"))
        with hold_checkpoint_place(str(saved)) as lock:
            said = clear_leftovers(str(saved), lock)
        assert sorted(saved.parent.iterdir()) == sorted([saved, *mine, foreign, earlier])
        assert [str(path) in text.message for path, text in zip([*gone, half, earlier], said, strict=True)] == [
            True
        ] * 4
        assert "removed" in said[0].message
        assert "if you do not want it" in said[-1].message

    def test_nothing_is_cleared_before_a_checkpoint_stands(self, saved):
        aside = saved.rename(saved.with_name("ck.tmp-ab12cd34.old"))
        with hold_checkpoint_place(str(saved)) as lock:
            (said,) = clear_leftovers(str(saved), lock)
        assert "kept" in said.message
        assert aside.exists()
        save_checkpoint(str(saved), LLAMA, evolve(make_state(LLAMA), step=50), {})
        assert list(saved.parent.iterdir()) == [saved]

    def test_half_of_one_is_cleared_before_a_checkpoint_stands(self, saved):
        """It would fill the disk for ever; what may be whole, also of a later version, stays."""
        whole, later, half, torn = (saved.with_name(f"ck.tmp-ab12cd3{number}") for number in range(4))
        for path in (whole, later, half, torn):
            shutil.copytree(saved, path)
        (later / "manifest.json").write_text('{"version": 99}')
        (half / "manifest.json").unlink()
        (torn / "manifest.json").write_text('{"version": 1, ')
        shutil.rmtree(saved)
        with hold_checkpoint_place(str(saved)) as lock:
            said = clear_leftovers(str(saved), lock)
        assert sorted(saved.parent.iterdir()) == sorted([whole, later])
        assert [("kept" in text.message, "removed" in text.message) for text in said] == [(True, False)] * 2 + [
            (False, True)
        ] * 2

    def test_the_newest_whole_one_is_used_and_said(self, saved):
        old = saved.rename(saved.with_name("ck.old-ab12cd34"))
        (saved.with_name("ck.tmp-00000000")).mkdir()
        found = load_latest(str(saved), LLAMA, Processes())
        assert (found.state.step, found.directory) == (41, str(old))
        newer = saved.with_name("ck.tmp-ab12cd34")
        save_checkpoint(str(newer), LLAMA, evolve(make_state(LLAMA, 1), step=42), RUN)
        found = load_latest(str(saved), LLAMA, Processes())
        assert (found.state.step, found.directory) == (42, str(newer))
        assert "is not there" in found.warnings[0].message
        assert str(newer) in found.warnings[0].message
        model, weights = latest_weights(str(saved))
        assert (
            weights(parameters(model, block("embed"))[0].name).tobytes()
            == found.state.blocks[block("embed")].p[: parameters(model, block("embed"))[0].elements].tobytes()
        )
        state = newer / "state.safetensors"
        state.write_bytes(state.read_bytes()[:-1])
        assert load_latest(str(saved), LLAMA, Processes()).directory == str(old)


class TestModes:
    @pytest.mark.parametrize("exchanging", [True, False])
    def test_those_of_what_is_replaced_are_kept(self, saved, monkeypatch, exchanging):
        if not exchanging:
            monkeypatch.setattr(checkpoint_places, "_renameat2", lambda: None)
        saved.chmod(0o700)
        (saved / "state.safetensors").chmod(0o600)
        (saved / "manifest.json").chmod(0o640)
        save_checkpoint(str(saved), LLAMA, evolve(make_state(LLAMA), step=50), {})
        assert load_checkpoint(str(saved), LLAMA)[0].step == 50
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (saved, *saved.iterdir())}
        assert modes == {"ck": 0o700, "state.safetensors": 0o600, "manifest.json": 0o640}


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
