"""Rotary position embedding in one pass, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from ratrain.targets.pytorch.triton.triton_common import (
    BLOCK,
    jit,
    launch,
    load_wide,
    own_elements,
    programs,
    store_rounded,
)

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import Array
    from ratrain.targets.pytorch.device.device_rope import RotaryTurn


@jit
def turn_pairs(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    documents: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    seq_len: tl.tensor,
    sign: tl.tensor,
    packed: tl.constexpr,
    interleaved: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    pairs: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Rotate pairs in place; all heads of a token have the angles of its position, in its document if `packed`."""
    at = own_elements(block)
    inside = at < count
    # elements are numbered [token, head, pair]: one is a pair, of which no other program has a part
    token, number = at // (heads * pairs), at % (heads * pairs)
    position = first + token % seq_len
    if packed:
        position -= tl.load(documents + token, mask=inside, other=0)
    head, pair = number // pairs, number % pairs
    # `low` is the first element of the pair within its row, `apart` the distance of the second
    if interleaved:
        low, apart = head * head_dim + 2 * pair, 1
    else:
        low, apart = head * head_dim + pair, pairs
    place = x + token * (heads * head_dim) + low
    c = tl.load(cos + position * pairs + pair, mask=inside, other=0.0)
    s = tl.load(sin + position * pairs + pair, mask=inside, other=0.0) * sign
    # both are loaded before either is stored
    one, other = load_wide(place, inside), load_wide(place + apart, inside)
    store_rounded(place, one * c - other * s, inside)
    store_rounded(place + apart, other * c + one * s, inside)


def rotate(x: Array, turn: RotaryTurn, *, heads: int, head_dim: int, seq_len: int) -> None:
    """Rotate x [tokens, heads * head_dim] in place."""
    pairs = turn.width // 2
    # any tensor will do where `packed` is False: it is not read
    documents = x if turn.documents is None else turn.documents
    count = x.shape[0] * heads * pairs
    launch(
        turn_pairs,
        (programs(count, BLOCK),),
        x,
        turn.cos,
        turn.sin,
        documents,
        count,
        turn.first,
        seq_len,
        -1.0 if turn.inverse else 1.0,
        packed=turn.documents is not None,
        interleaved=turn.interleaved,
        heads=heads,
        head_dim=head_dim,
        pairs=pairs,
        block=BLOCK,
    )
