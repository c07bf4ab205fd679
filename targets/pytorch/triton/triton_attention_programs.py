"""Attention in fused kernels, program by program: scores stay on the chip (Dao, "FlashAttention-2", 2023).

    attend             a program a tile of queries of a head:   o and lse, by a running softmax
    row_deltas         a program some rows of a head:           delta = rowsum(do * o)
    gradients_of_keys  a program a tile of keys that heads share:  dk and dv, over all queries that see it
    gradients_of_queries  a program a tile of queries of a head:   dq, over all keys that it sees

Each result is one program's alone, which sums in order, so nothing is added atomically. Scores, sums and the softmax
are float32. Where keys and values have 16 bits, probabilities and their gradients are rounded to that type before they
are multiplied, as FlashAttention does, so that the matrix units multiply them. Scores are in units of ln 2.
"""

from __future__ import annotations

import triton.language as tl

from ratrain.targets.pytorch.device.device_attention import LN2, LOG2_E
from ratrain.targets.pytorch.triton.triton_common import jit, load_wide, rounded_to_bfloat16, store_rounded, tanh

_LN2 = tl.constexpr(LN2)
_LOG2_E = tl.constexpr(LOG2_E)


@jit
def load_factor(pointer: tl.tensor, inside: tl.tensor, whole: tl.constexpr) -> tl.tensor:
    """Load a factor of a product as it is stored; as float32 if it is `whole`, as the interpreter needs it."""
    if whole:
        return load_wide(pointer, inside)
    return tl.load(pointer, mask=inside, other=0.0)


@jit
def as_factor(value: tl.tensor, stored: tl.tensor, whole: tl.constexpr) -> tl.tensor:
    """Round float32 to the type behind a pointer; if it is `whole`, as float32 with those values."""
    if not whole:
        rounded = value.to(stored.dtype.element_ty)
    elif stored.dtype.element_ty == tl.bfloat16:
        rounded = rounded_to_bfloat16(value)
    else:
        rounded = value.to(stored.dtype.element_ty).to(tl.float32)
    return rounded


@jit
def added_product(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Add a @ b to total; float32 factors are multiplied by the matrix units in three parts of tf32."""
    return tl.dot(a, b, total, input_precision="tf32x3")


@jit
def slope_of(slopes: tl.tensor, head: tl.tensor, biased: tl.constexpr) -> tl.tensor:
    """Load ALiBi's slope of a head, in units of ln 2 a position; 0 if scores are not biased."""
    if biased:
        return tl.load(slopes + head) * _LOG2_E
    return 0.0


@jit
def shows(
    query: tl.tensor,
    key: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    window: tl.tensor,
    windowed: tl.constexpr,
    packed: tl.constexpr,
) -> tl.tensor:
    """Compare positions: True where a query sees a key."""
    seen = (key <= query) & (key < end)
    if windowed:
        seen = seen & (key > query - window)
    if packed:
        seen = seen & (key >= start)
    return seen


@jit
def attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    o: tl.tensor,
    lse: tl.tensor,
    total_of_rows: tl.tensor,
    documents: tl.tensor,
    slopes: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
    biased: tl.constexpr,
    windowed: tl.constexpr,
    packed: tl.constexpr,
    partial: tl.constexpr,
    accumulate: tl.constexpr,
    whole: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Attend with a tile of queries to all keys that one of them sees.

    If it is `partial`, `o` receives the weighted values as they are, `lse` the peak (units of ln 2) and `total_of_rows`
    the weight, after those they hold if it is to `accumulate`.
    """
    # the last tiles see most keys: they begin first
    head, sequence, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(2) - 1 - tl.program_id(2)
    row = tile * rows + tl.arange(0, rows)
    there = row < queries
    element = tl.arange(0, width)
    within = element < head_dim
    place = (sequence * queries + row)[:, None] * (heads * head_dim) + head * head_dim + element[None, :]
    inside = there[:, None] & within[None, :]
    query = load_factor(q + place, inside, whole)
    position = first_query + row
    stop = tl.minimum(tl.maximum(tl.minimum(tile * rows + rows, queries) + first_query - first_key, 0), keys)
    start = 0
    if windowed:
        start = tl.maximum(tile * rows + first_query - window + 1 - first_key, 0)
    begins = position
    if packed:
        begins = tl.load(documents + sequence * queries + row, mask=there, other=2147483647)
        start = tl.maximum(tl.min(begins, axis=0) - first_key, start)
    start = start // columns * columns
    # tiles of keys before this one are seen whole by every query, and need no mask
    seen_whole = start
    if not (windowed or packed):
        seen_whole = tl.minimum(tl.maximum(tile * rows + first_query + 1 - first_key, 0), keys) // columns * columns
    slope = slope_of(slopes, head, biased)
    line = head * (tl.num_programs(1) * queries).to(tl.int64) + sequence * queries + row
    if accumulate:
        acc = tl.load(o + place, mask=inside, other=0.0)
        peak = tl.load(lse + line, mask=there, other=float("-inf"))
        total = tl.load(total_of_rows + line, mask=there, other=0.0)
    else:
        acc = tl.zeros((rows, width), tl.float32)
        peak = tl.full((rows,), float("-inf"), tl.float32)
        total = tl.zeros((rows,), tl.float32)
    shared = sequence * keys * (heads // group * head_dim) + head // group * head_dim
    for masked in tl.static_range(2):
        low = seen_whole if masked else start
        high = stop if masked else seen_whole
        for first in range(low, high, columns):
            column = first + tl.arange(0, columns)
            present = column < keys
            at = shared + column[:, None] * (heads // group * head_dim) + element[None, :]
            reach = present[:, None] & within[None, :]
            key = load_factor(k + at, reach, whole)
            score = added_product(query, tl.trans(key), tl.zeros((rows, columns), tl.float32)) * scale
            if capped:
                score = tanh(score) * cap
            if biased:
                score += slope * (first_key + column[None, :] - position[:, None]).to(tl.float32)
            if masked:
                seen = shows(
                    position[:, None],
                    first_key + column[None, :],
                    begins[:, None],
                    first_key + keys,
                    window,
                    windowed,
                    packed,
                )
                score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(peak, tl.max(score, axis=1))
            # a query that has seen no key yet has no peak: 0 keeps its weights at 2^-inf = 0
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(peak - base)
            weight = tl.exp2(score - base[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            value = load_factor(v + at, reach, whole)
            acc = added_product(as_factor(weight, v, whole), value, acc * shrink[:, None])
            peak = higher
    if partial:
        tl.store(o + place, acc, mask=inside)
        tl.store(lse + line, peak, mask=there)
        tl.store(total_of_rows + line, total, mask=there)
    else:
        store_rounded(o + place, acc / total[:, None], inside)
        tl.store(lse + line, peak * _LN2 + tl.log(total), mask=there)


@jit
def row_deltas(
    o: tl.tensor,
    do: tl.tensor,
    delta: tl.tensor,
    count: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    """Compute delta[heads, count] = rowsum(do * o) of some rows of a head."""
    row, head = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.program_id(1)
    element = tl.arange(0, width)
    inside = (row < count)[:, None] & (element < head_dim)[None, :]
    place = row[:, None] * (heads * head_dim) + head * head_dim + element[None, :]
    product = load_wide(do + place, inside) * load_wide(o + place, inside)
    tl.store(delta + head.to(tl.int64) * count + row, tl.sum(product, axis=1), mask=row < count)


@jit
def gradients_of_keys(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    do: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    documents: tl.tensor,
    slopes: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    multiplier: tl.tensor,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
    biased: tl.constexpr,
    windowed: tl.constexpr,
    packed: tl.constexpr,
    adds: tl.constexpr,
    whole: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Compute the gradients of a tile of keys and values, over the queries of all heads that share them.

    Matrices are [keys, queries], so that a sum over queries multiplies them as they are.
    """
    shared_head, sequence, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    column = tile * columns + tl.arange(0, columns)
    present = column < keys
    element = tl.arange(0, width)
    within = element < head_dim
    place = (
        (sequence * keys + column)[:, None] * (heads // group * head_dim) + shared_head * head_dim + element[None, :]
    )
    inside = present[:, None] & within[None, :]
    key, value = load_factor(k + place, inside, whole), load_factor(v + place, inside, whole)
    key_position = first_key + column
    of_key = tl.zeros((columns, width), tl.float32)
    of_value = tl.zeros((columns, width), tl.float32)
    start = tl.maximum(first_key + tile * columns - first_query, 0) // rows * rows
    stop = queries
    if windowed:
        last = first_key + tl.minimum(tile * columns + columns, keys) - 1
        stop = tl.minimum(tl.maximum(last + window - first_query, 0), queries)
    for member in range(group):
        head = shared_head * group + member
        slope = slope_of(slopes, head, biased)
        line = head * (tl.num_programs(1) * queries).to(tl.int64) + sequence * queries
        for first in range(start, stop, rows):
            row = first + tl.arange(0, rows)
            there = row < queries
            position = first_query + row
            begins = position
            if packed:
                begins = tl.load(documents + sequence * queries + row, mask=there, other=2147483647)
            at = (sequence * queries + row)[:, None] * (heads * head_dim) + head * head_dim + element[None, :]
            reach = there[:, None] & within[None, :]
            query = load_factor(q + at, reach, whole)
            of_row = load_factor(do + at, reach, whole)
            score = added_product(key, tl.trans(query), tl.zeros((columns, rows), tl.float32)) * scale
            if capped:
                score = tanh(score)
                slope_of_cap = 1 - score * score
                score *= cap
            if biased:
                score += slope * (key_position[:, None] - position[None, :]).to(tl.float32)
            seen = shows(
                position[None, :],
                key_position[:, None],
                begins[None, :],
                first_key + keys,
                window,
                windowed,
                packed,
            )
            # rows behind the last have an infinite lse, and so the probability 0
            log = tl.load(lse + line + row, mask=there, other=float("inf")) * _LOG2_E
            weight = tl.exp2(tl.where(seen, score, float("-inf")) - log[None, :])
            of_value = added_product(as_factor(weight, do, whole), of_row, of_value)
            of_weight = added_product(value, tl.trans(of_row), tl.zeros((columns, rows), tl.float32))
            # softmax's derivative: ds = p * (dp - delta) with delta = rowsum(do * o), then the cap's
            of_score = weight * (of_weight - tl.load(delta + line + row, mask=there, other=0.0)[None, :])
            if capped:
                of_score *= slope_of_cap
            of_key = added_product(as_factor(of_score, q, whole), query, of_key)
    of_key *= multiplier
    if adds:
        of_key += load_wide(dk + place, inside)
        of_value += load_wide(dv + place, inside)
    store_rounded(dk + place, of_key, inside)
    store_rounded(dv + place, of_value, inside)


@jit
def gradients_of_queries(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    do: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dq: tl.tensor,
    documents: tl.tensor,
    slopes: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    multiplier: tl.tensor,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
    biased: tl.constexpr,
    windowed: tl.constexpr,
    packed: tl.constexpr,
    adds: tl.constexpr,
    whole: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Compute the gradient of a tile of queries, over the keys that one of them sees."""
    head, sequence, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(2) - 1 - tl.program_id(2)
    row = tile * rows + tl.arange(0, rows)
    there = row < queries
    element = tl.arange(0, width)
    within = element < head_dim
    place = (sequence * queries + row)[:, None] * (heads * head_dim) + head * head_dim + element[None, :]
    inside = there[:, None] & within[None, :]
    query, of_row = load_factor(q + place, inside, whole), load_factor(do + place, inside, whole)
    line = head * (tl.num_programs(1) * queries).to(tl.int64) + sequence * queries + row
    log = tl.load(lse + line, mask=there, other=float("inf")) * _LOG2_E
    difference = tl.load(delta + line, mask=there, other=0.0)
    position = first_query + row
    stop = tl.minimum(tl.maximum(tl.minimum(tile * rows + rows, queries) + first_query - first_key, 0), keys)
    start = 0
    if windowed:
        start = tl.maximum(tile * rows + first_query - window + 1 - first_key, 0)
    begins = position
    if packed:
        begins = tl.load(documents + sequence * queries + row, mask=there, other=2147483647)
        start = tl.maximum(tl.min(begins, axis=0) - first_key, start)
    start = start // columns * columns
    slope = slope_of(slopes, head, biased)
    of_query = tl.zeros((rows, width), tl.float32)
    shared = sequence * keys * (heads // group * head_dim) + head // group * head_dim
    for first in range(start, stop, columns):
        column = first + tl.arange(0, columns)
        present = column < keys
        at = shared + column[:, None] * (heads // group * head_dim) + element[None, :]
        reach = present[:, None] & within[None, :]
        key = load_factor(k + at, reach, whole)
        score = added_product(query, tl.trans(key), tl.zeros((rows, columns), tl.float32)) * scale
        if capped:
            score = tanh(score)
            slope_of_cap = 1 - score * score
            score *= cap
        if biased:
            score += slope * (first_key + column[None, :] - position[:, None]).to(tl.float32)
        seen = shows(
            position[:, None],
            first_key + column[None, :],
            begins[:, None],
            first_key + keys,
            window,
            windowed,
            packed,
        )
        weight = tl.exp2(tl.where(seen, score, float("-inf")) - log[:, None])
        value = load_factor(v + at, reach, whole)
        of_weight = added_product(of_row, tl.trans(value), tl.zeros((rows, columns), tl.float32))
        of_score = weight * (of_weight - difference[:, None])
        if capped:
            of_score *= slope_of_cap
        of_query = added_product(as_factor(of_score, k, whole), key, of_query)
    of_query *= multiplier
    if adds:
        of_query += load_wide(dq + place, inside)
    store_rounded(dq + place, of_query, inside)
