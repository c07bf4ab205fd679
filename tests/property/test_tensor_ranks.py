"""Tensor-parallel ranks hold every element of a model once, but for copies; state split among them and joined is unchanged."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.rank_mapping import RankMapping, Tile
from ratrain.ratrain_ir.config.tensor_ranks import problems, rank_model, rank_part, share_of
from ratrain.ratrain_ir.model.blocks import Block, block_chain, flat_elements, parameters
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.targets.runtime.checkpoint.rank_state import FlatReader, rank_pieces, whole_pieces
from tests.end_to_end.toys import UNEVEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ratrain.ratrain_ir.config.model_config import ModelConfig

Shared = tuple["ModelConfig", Plan]
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "llama": {},
    "gpt2": {"learned_positions": 31},
    "gemma2": {},
    "gpt_neox": {},
}
"""Models of families, each with another part that every tensor-parallel rank has whole."""


@st.composite
def shared_models(draw: st.DrawFn) -> Shared:
    """A model of odd sizes, and a plan whose tensor-parallel ranks share it out."""
    peers = draw(st.sampled_from((2, 3, 4, 6, 8)))
    heads = peers * draw(st.integers(1, 3))
    kv_heads = draw(
        st.sampled_from([n for n in range(1, heads + 1) if not heads % n and (not n % peers or not peers % n)])
    )
    family = draw(st.sampled_from(sorted(FAMILIES)))
    model = evolve(
        UNEVEN,
        layers=1,
        hidden_size=draw(st.sampled_from((6, 8, 14))),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((2, 4))),
        ffn_size=draw(st.integers(1, 40)),
        vocab_size=draw(st.integers(2, 70).filter(lambda words: -(-words // peers) * (peers - 1) < words)),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(("none", "head"))),
        tied_embeddings=draw(st.booleans()),
    )
    if family != model.family:
        chosen = {"qkv_bias": False, "qk_norm": "none", **FAMILIES[family]}
        model = in_family(model, family, **{key: chosen[key] for key in chosen.keys() - FAMILY[family].implied.keys()})
    replicas = draw(st.integers(1, 3))
    plan = Plan(pp=1, dp=replicas, cuts=(), micro_batch_size=1, micro_batches=1, seq_len=24, tp=peers)
    assert not [*problems(model, plan)]
    return model, plan


@given(shared_models())
def test_parts_of_peers_make_up_every_parameter_once_and_padding_stands_last(shared: Shared) -> None:
    model, plan = shared
    for block in block_chain(model):
        mine = {parameter.weight: parameter.shape for parameter in parameters(rank_model(model, plan), block)}
        wholes = parameters(model, block)
        assert mine.keys() == {parameter.weight for parameter in wholes}
        for parameter in wholes:
            share = share_of(model, plan.tp, parameter.weight)
            count = np.zeros(parameter.shape, int)
            for peer in range(plan.tp):
                part = rank_part(model, plan.tp, peer, parameter.weight, parameter.shape)
                count[part] += 1
                for axis, (held, cut) in enumerate(zip(mine[parameter.weight], part, strict=True)):
                    length = cut.stop - cut.start
                    assert length == held or (axis == share.axis and cut.stop == parameter.shape[axis])
                    assert 0 <= length <= held
            assert (count == share.copies).all(), parameter.weight


def whole_of(values: NDArray[np.float32]) -> FlatReader:
    """Reads an array, in pieces of uneven lengths."""

    def read(start: int, stop: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        for low in range(start, min(stop, len(values)), 7):
            yield low, values[low : min(low + 7, stop)]

    return read


def taken(reader: FlatReader, start: int, stop: int) -> NDArray[np.float32]:
    """A range, which pieces fill once each."""
    values, count = np.zeros(stop - start, np.float32), np.zeros(stop - start, int)
    for at, piece in reader(start, stop):
        assert start <= at <= at + piece.size <= stop
        values[at - start : at - start + piece.size] = piece
        count[at - start : at - start + piece.size] += 1
    assert (count <= 1).all()
    return values


def with_data(model: ModelConfig, plan: Plan, block: Block) -> NDArray[np.float32]:
    """A block's flat tensor of a model whose every parameter has values of its own, padding between them 0."""
    values = np.zeros(flat_elements(model, evolve(plan, tp=1), block), np.float32)
    for parameter in parameters(model, block):
        values[parameter.offset : parameter.offset + parameter.elements] = 1 + np.arange(parameter.elements)
    return values


@given(shared_models(), st.data())
def test_state_to_peers_and_back_is_the_identity_in_any_ranges(shared: Shared, data: st.DataObject) -> None:
    model, plan = shared
    block = data.draw(st.sampled_from(block_chain(model)))
    values = with_data(model, plan, block)
    length = flat_elements(model, plan, block)
    peers = []
    for peer in range(plan.tp):
        read = rank_pieces(model, plan, peer, block, whole_of(values))
        cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=4))})
        shards = [taken(read, low, high) for low, high in pairwise(cuts)]
        flat = np.concatenate(shards)
        np.testing.assert_array_equal(flat, taken(read, 0, length), "a shard is a range of the whole")
        for mine, parameter in zip(parameters(rank_model(model, plan), block), parameters(model, block), strict=True):
            part = rank_part(model, plan.tp, peer, mine.weight, parameter.shape)
            expected = np.zeros(mine.shape, np.float32)
            source = values[parameter.offset : parameter.offset + parameter.elements].reshape(parameter.shape)[part]
            expected[tuple(slice(0, size) for size in source.shape)] = source
            np.testing.assert_array_equal(flat[mine.offset : mine.offset + mine.elements].reshape(mine.shape), expected)
        peers.append(flat)
    back = whole_pieces(model, block, [whole_of(flat) for flat in peers])
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    np.testing.assert_array_equal(taken(back, start, stop), values[start:stop])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_mapping_gives_every_rank_a_cluster_of_its_own(pp: int, dp: int, tp: int, data: st.DataObject) -> None:
    stages, replicas, peers = (
        data.draw(st.sampled_from([part for part in range(1, size + 1) if not size % part])) for size in (pp, dp, tp)
    )
    mapping = RankMapping((Tile("chip", stages, replicas, peers),))
    assert mapping.error(pp, dp, tp) is None
    whole = Tile("plan", pp, dp, tp)
    positions = {rank: mapping.position(*rank, whole) for rank in product(range(pp), range(dp), range(tp))}
    assert sorted(positions.values()) == [*range(pp * dp * tp)]
    clusters = mapping.tiles[0].clusters
    for rank, position in positions.items():
        assert mapping.place(position, whole) == rank
    for first in range(0, pp * dp * tp, clusters):
        on_chip = [mapping.place(position, whole) for position in range(first, first + clusters)]
        assert [len(set(axis)) for axis in zip(*on_chip, strict=True)] == [stages, replicas, peers]
