"""Shape and mask of an attention."""

from __future__ import annotations

from attrs import field, frozen, validators

_POSITIVE = validators.ge(1)


@frozen
class AttentionSpec:
    """Shape and mask of a causal attention; scores are scaled by 1/sqrt(head_dim).

    Query i sees the keys j <= i of its own sequence, with `window` only those with j > i - window. With `alibi` the
    score of (i, j) has slope_head * (j - i) added (Press et al., 2021). Query head n reads key-value head
    n // (heads / kv_heads).
    """

    batch: int = field(validator=_POSITIVE)
    seq_len: int = field(validator=_POSITIVE)
    heads: int = field(validator=_POSITIVE)
    kv_heads: int = field(validator=_POSITIVE)
    head_dim: int = field(validator=_POSITIVE)
    window: int | None = field(default=None, validator=validators.optional(_POSITIVE))
    alibi: bool = False

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    def first_key(self, query: int) -> int:
        """The first key position that a query position sees."""
        return 0 if self.window is None else max(0, query - self.window + 1)
