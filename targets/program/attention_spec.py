"""Shape and mask of attention: over whole sequences, or of a block of queries to a block of keys."""

from __future__ import annotations

from math import sqrt
from typing import TypeAlias

from attrs import asdict, field, frozen, validators

Position: TypeAlias = int
"""Place in a sequence, from 0."""


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head (Press et al., "Train Short, Test Long", 2021, and its published code).

    A power of two n has 2^(-8/n), 2^(-16/n), ...; any other count takes the slopes of the power of two below it, then
    every second slope of the power of two above it.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    return slopes + [2.0 ** (-8.0 * (2 * i + 1) / (2 * below)) for i in range(heads - below)]


_POSITIVE = validators.ge(1)
_NOT_NEGATIVE = validators.ge(0)


class _Attention:
    """Common part of attention specs: groups of heads that share keys and values, and the first key a query sees."""

    __slots__ = ()

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scale: float | None
    softcap: float | None
    alibi: bool
    all_heads: int | None
    first_head: int | None

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")

    @property
    def slopes(self) -> list[float]:
        """ALiBi's factor of distances by head; 0 without ALiBi.

        The heads may be a run of `all_heads`, from `first_head` on, as a tensor-parallel rank has it.
        """
        if not self.alibi:
            return [0.0] * self.heads
        first = self.first_head or 0
        return alibi_slopes(self.all_heads or self.heads)[first : first + self.heads]

    @property
    def multiplier(self) -> float:
        """Factor of the products of queries and keys: `scale`, by default 1/sqrt(head_dim)."""
        return 1 / sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    def first_seen(self, query: int) -> int:
        """Return the first key position that a query position sees."""
        return 0 if self.window is None else max(0, query - self.window + 1)


@frozen
class AttentionBlockSpec(_Attention):
    """Shape and mask of causal attention of some queries to some keys of each sequence.

    Scores are scaled by `scale`, by default 1/sqrt(head_dim); with `softcap` each score s is then softcap * tanh(s /
    softcap).

    Row t of the queries has position first_query + t % queries in its sequence, row t of the keys first_key + t % keys.
    The query at i sees the keys at j <= i of its own sequence, with `window` only keys at j > i - window. With `alibi`
    the score of (i, j) has slope_head * (j - i) added (Press et al., 2021), by `slopes`. Query head n reads key-value
    head n // (heads / kv_heads).

    A kernel may be given `documents`, one number for each row t of the queries, for sequences that several documents
    are packed into: the query sees no key at j < documents[t], where its document starts. The kernel raises IndexError
    where that is negative or behind the query.
    """

    batch: int = field(validator=_POSITIVE)
    queries: int = field(validator=_POSITIVE)
    keys: int = field(validator=_POSITIVE)
    first_query: Position = field(validator=_NOT_NEGATIVE)
    first_key: Position = field(validator=_NOT_NEGATIVE)
    heads: int = field(validator=_POSITIVE)
    kv_heads: int = field(validator=_POSITIVE)
    head_dim: int = field(validator=_POSITIVE)
    window: int | None = field(default=None, validator=validators.optional(_POSITIVE))
    alibi: bool = False
    scale: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    softcap: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    all_heads: int | None = field(default=None, validator=validators.optional(_POSITIVE))
    first_head: int | None = field(default=None, validator=validators.optional(_NOT_NEGATIVE))


@frozen
class AttentionSpec(_Attention):
    """Shape and mask of attention over whole sequences: an `AttentionBlockSpec` with all queries and all keys."""

    batch: int = field(validator=_POSITIVE)
    seq_len: int = field(validator=_POSITIVE)
    heads: int = field(validator=_POSITIVE)
    kv_heads: int = field(validator=_POSITIVE)
    head_dim: int = field(validator=_POSITIVE)
    window: int | None = field(default=None, validator=validators.optional(_POSITIVE))
    alibi: bool = False
    scale: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    softcap: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    all_heads: int | None = field(default=None, validator=validators.optional(_POSITIVE))
    first_head: int | None = field(default=None, validator=validators.optional(_NOT_NEGATIVE))

    @property
    def block(self) -> AttentionBlockSpec:
        """Equal attention as one block of all queries and all keys."""
        fields = asdict(self)
        length = fields.pop("seq_len")
        return AttentionBlockSpec(queries=length, keys=length, first_query=0, first_key=0, **fields)
