"""Texts that are read piece by piece, by one rank or by several that hold keys between them."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrainc.choices.run_choices import Generation, Prompt
from ratrain.ratrainc.running.generation import generate
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_weights
from ratrain.targets.runtime.engine import forward as forward_module
from ratrain.targets.runtime.engine.forward import ForwardModel, SoftmaxState
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.ranks.key_holders import RankHolders
from tests.end_to_end.test_generation import F32, MODELS, evaluated_logits, trained
from tests.end_to_end.toys import EXPERTS, GEMMA3, GRANITE, OLMO2, SHARED_EXPERT
from tests.targets.runtime.ranks.mpi_tools import needs_mpi
from tests.targets.runtime.ranks.rank_jobs import START
from tests.targets.runtime.ranks.thread_ranks import Board, ThreadCommunicator
from tests.targets.runtime.ranks.torch_tools import needs_torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

FAMILIES = {
    **MODELS,
    "gemma3": GEMMA3,
    "olmo2": OLMO2,
    "granite": GRANITE,
    "experts": EXPERTS,
    "shared-expert": SHARED_EXPERT,
}
TOKENS = (3, 17, 4, 5, 9, 11, 2, 2, 8, 1, 6, 40, 7, 7, 30, 2, 19, 5)


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, str]:
    """Checkpoints of trained families, made when they are asked for."""
    return {}


def model_of(family: str, checkpoints: dict[str, str], kernels: str = "fast") -> ForwardModel:
    if family not in checkpoints:
        checkpoints[family] = trained(FAMILIES[family], Path(tempfile.mkdtemp()), **F32)
    source = latest_weights(checkpoints[family])[1]
    return ForwardModel(FAMILIES[family], source, Dtype.F32, kernel_set(kernels))


def in_pieces(count: int, sizes: list[int]) -> list[slice]:
    """Cut `count` tokens into pieces of these sizes, and the rest token by token."""
    ends = [0]
    for size in [*sizes, *[1] * count]:
        ends.append(min(count, ends[-1] + size))
    return [slice(start, stop) for start, stop in pairwise(ends) if start < stop]


def read_by_ranks(count: int, models: list[ForwardModel], pieces: list[slice]) -> tuple[list[list[Any]], Board]:
    """Return what each of `count` ranks finds behind each piece."""
    board = Board()

    def read(rank: int) -> list[NDArray[np.float32]]:
        try:
            holders = RankHolders(ThreadCommunicator(board, ("holders",), rank, count))
            reading = models[rank].reading(len(TOKENS), holders)
            return [reading.read(TOKENS[piece]).copy() for piece in pieces]
        except BaseException:
            board.has_failed = True
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(read, range(count))), board


@pytest.mark.parametrize("kernels", ["reference", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(4)
def test_pieces_say_what_an_evaluation_says(family: str, kernels: str, checkpoints: dict[str, str]) -> None:
    """However a text is cut, and whichever rank keeps which keys."""
    forward = model_of(family, checkpoints, kernels)
    expected = evaluated_logits(FAMILIES[family], checkpoints[family], TOKENS, **F32)
    for sizes in ([], [3, 1, 4, 2], [len(TOKENS)]):
        reading = forward.reading(len(TOKENS))
        for piece in in_pieces(len(TOKENS), sizes):
            found = reading.read(TOKENS[piece])
            np.testing.assert_allclose(found, expected[piece.stop - 1], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("family", ["llama", "window", "gpt2", "alibi", "gemma3", "experts"])
@pytest.mark.sampled(4)
def test_ranks_say_what_one_says(
    family: str, ranks: int, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts shorter than the ranks too; all ranks find the same bits; later keys change hands every two tokens."""
    monkeypatch.setattr(forward_module, "HOLDER_RUN", 2)
    forward = model_of(family, checkpoints)
    models = [forward, *(model_of(family, checkpoints) for _ in range(ranks - 1))]
    for sizes in ([2], [7], [11, 3]):
        pieces = in_pieces(len(TOKENS), sizes)
        alone = forward.reading(len(TOKENS))
        expected = [alone.read(TOKENS[piece]).copy() for piece in pieces]
        every, _ = read_by_ranks(ranks, models, pieces)
        for found in every:
            np.testing.assert_array_equal(found, every[0])
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def test_a_later_token_moves_states_alone(checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer a rank of 4 sends two states of `heads * (head_dim + 2)` floats, however long the text is."""
    sent: list[int] = []
    send = ThreadCommunicator.isend

    def counted(self: ThreadCommunicator, data: NDArray[Any], to: int, tag: int) -> Any:
        sent.append(data.nbytes)
        return send(self, data, to, tag)

    monkeypatch.setattr(ThreadCommunicator, "isend", counted)
    model = FAMILIES["llama"]
    models = [model_of("llama", checkpoints, "reference") for _ in range(4)]
    for first in (4, 12):
        sent.clear()
        read_by_ranks(4, models, [slice(0, first), slice(first, first + 1)])
        assert sum(sent) == 4 * 2 * model.layers * model.heads * (model.head_dim + 2) * 4


def test_each_rank_keeps_its_share(checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long text a rank of 4 has a quarter of the keys, those read later among them."""
    monkeypatch.setattr(forward_module, "HOLDER_RUN", 2)
    forward, kept = model_of("llama", checkpoints), []
    for rank in range(4):
        reading = forward.reading(8 + 17, RankHolders(ThreadCommunicator(Board(), (), rank, 4)))
        reading._began = 8
        reading._make_room(2)
        kept.append(len(next(iter(reading._caches.values()))[0]))
    assert kept == [2 + 5, 2 + 4, 2 + 4, 2 + 4]
    assert sum(kept) == 8 + 17


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_merged_states_are_that_of_all_keys(seed: int, rows: int, heads: int, parts: int) -> None:
    """In any order; a part may have no keys for some queries, and peaks may lie far apart."""
    draw = np.random.default_rng(seed)
    width, states, everything = 3, [], []
    for _ in range(parts):
        keys = draw.integers(0, 4)
        scores = draw.normal(size=(heads, rows, keys)) * draw.choice([1, 60])
        values = draw.normal(size=(keys, heads, width))
        everything.append((scores, values))
        states.append(state_of(scores, values))
    scores = np.concatenate([each for each, _ in everything], axis=2)
    values = np.concatenate([each for _, each in everything])
    merged = states[0]
    for other in states[1:]:
        merged.merge(other)
    if scores.shape[2] == 0:
        assert not merged.total.any()
        assert np.isneginf(merged.peak).all()
        return
    expected = state_of(scores, values)
    for found, wanted in ((merged.peak, expected.peak), (merged.total, expected.total), (merged.acc, expected.acc)):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def state_of(scores: NDArray[np.float64], values: NDArray[np.float64]) -> SoftmaxState:
    """The state of queries with these scores [heads, rows, keys] and values [keys, heads, width], by definition."""
    _, rows, keys = scores.shape
    peak = scores.max(axis=2, initial=-np.inf)
    weights = np.exp2(scores - peak[:, :, None]) if keys else scores
    acc = np.einsum("hrk,khw->rhw", weights, values).reshape(rows, -1)
    return SoftmaxState(*(each.astype(np.float32) for each in (acc, peak, weights.sum(axis=2))))


def test_a_text_has_no_more_tokens_than_were_asked_for(checkpoints: dict[str, str]) -> None:
    reading = model_of("llama", checkpoints).reading(3)
    reading.read((1, 2))
    with pytest.raises(AssertionError):
        reading.read((1, 2))


def test_half_types(checkpoints: dict[str, str]) -> None:
    """Keys are kept in the type of views: pieces round as a whole text does."""
    model = evolve(MODELS["llama"])
    model_of("llama", checkpoints)
    source = latest_weights(checkpoints["llama"])[1]
    for dtype, bound in ((Dtype.F16, 2e-3), (Dtype.BF16, 2e-2)):
        forward = ForwardModel(model, source, dtype, kernel_set("fast"))
        whole, reading = forward.reading(len(TOKENS)).read(TOKENS).copy(), forward.reading(len(TOKENS))
        for piece in in_pieces(len(TOKENS), [5]):
            found = reading.read(TOKENS[piece])
        np.testing.assert_allclose(found, whole, rtol=0, atol=bound * np.abs(whole).max())


@needs_mpi
@pytest.mark.parametrize("engine", ["mpi", pytest.param("torch", marks=needs_torch)])
def test_processes_write_the_text_of_one(engine: str, checkpoints: dict[str, str]) -> None:
    """Three processes of a launcher: one of them prints, the same tokens as a single process."""
    model_of("llama", checkpoints)
    words = ["generate", checkpoints["llama"], "--prompt-tokens", "3,17,4,5,9", "--tokens", "7", "--json"]
    alone = generate(checkpoints["llama"], Prompt(tokens=(3, 17, 4, 5, 9)), Generation(7))
    result = START[engine](3, "-m", "ratrain", *words, "--threads", "1", "--engine", engine)
    assert result.returncode == 0, result.stderr
    assert tuple(json.loads(result.stdout)["tokens"]) == alone.tokens
    refused = START[engine](2, "-m", "ratrain", *words)
    assert refused.returncode == 1
    assert f"add --engine {engine}" in refused.stderr
