"""Keys of a plan about experts: losses or a bias that keep routers balanced, and what expert ranks send to each other.

Both losses are taken of each layer and each micro-batch by itself, so that they depend neither on pipeline stages nor
on replicas nor on the order of micro-batches; layers add up, micro-batches and replicas are averaged. With T tokens,
k of E experts chosen for each, n_e tokens sent to expert e and p the softmax of the router:

    balance_loss * E / (k T^2) * sum over e of n_e * (sum over t of p[t, e])      balance_loss if all are equally busy
    z_loss / T * sum over t of log(sum over e of exp(logit[t, e]))^2

The first is that of Switch Transformers (Fedus et al., 2021, equations 4 to 6) as Megatron-LM scales it, the second of
ST-MoE (Zoph et al., 2022, equation 5). They act through gradients alone: the loss that a run reports is that of the
next token.

With `bias_update` each layer has a number b for each expert, 0 at the start, and a token goes to the experts with the
largest p + b; its weights come of the logits alone (Wang et al., 2024, arXiv 2408.15664, algorithm 1). Once a step

    b_e += bias_update * sign(mean of n - n_e)      n_e: tokens sent to e, of all micro-batches and replicas

Expert ranks (`parallel.ep`) send all rows and balance them, or each sends to an expert no more than a capacity of C
rows, the first ones in the order of tokens, and drops the others (GShard, Lepikhin et al., 2020, section 2.2):

    C = ceil(capacity_factor * T k / E)      8 tokens, 2 of 4 experts, factor 1.25: 5 rows where the mean is 4
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from attrs import field, frozen

from ratrain.ratrain_ir.config.plan_keys import key, number, number_or_none, word

_MAX_FACTOR = 1000
_MAX_UPDATE = 1
_FACTOR = number(lambda value: 0 <= value <= _MAX_FACTOR, f"a number from 0 to {_MAX_FACTOR}")
_MAX_CAPACITY = 1 << 16
_CAPACITY = number_or_none(lambda value: 0 < value <= _MAX_CAPACITY, f"a number above 0, of {_MAX_CAPACITY} at most,")

BALANCED = "balanced"
OF_CAPACITY = "capacity"
DISPATCHES = (BALANCED, OF_CAPACITY)


@frozen
class RouterLosses:
    """Factors of both losses, and the step of the bias; 0 leaves each out. True if there is a loss."""

    balance_loss: float = field(
        default=0.0,
        metadata=key(
            "experts",
            "how much each layer's router is trained to keep its experts equally busy in a micro-batch",
            _FACTOR,
            in_header_if_default=False,
            not_in_file=lambda own: own.balance_loss == 0,
        ),
    )
    z_loss: float = field(
        default=0.0,
        metadata=key(
            "experts",
            "how much each layer's router is trained to have small logits",
            _FACTOR,
            in_header_if_default=False,
            not_in_file=lambda own: own.z_loss == 0,
        ),
    )
    bias_update: float = field(
        default=0.0,
        metadata=key(
            "experts",
            "how far a bias for each expert, with which routers choose, moves each step towards equally busy experts",
            number(lambda value: 0 <= value <= _MAX_UPDATE, f"a number from 0 to {_MAX_UPDATE}"),
            in_header_if_default=False,
            not_in_file=lambda own: own.bias_update == 0,
        ),
    )

    def __bool__(self) -> bool:
        return bool(self.balance_loss or self.z_loss)


@frozen
class ExpertDispatch:
    """Rows that an expert rank sends, of its tokens: all of them, or some to each expert."""

    dispatch: str = field(
        default=BALANCED,
        metadata=key(
            "experts",
            "what expert ranks send each other: all rows, `balanced`, so that each rank computes as many; or to each "
            "expert as many as its `capacity`, while the others are dropped",
            word(DISPATCHES),
            in_header_if_default=False,
            not_in_file=lambda own: own.dispatch == BALANCED,
        ),
    )
    capacity_factor: float | None = field(
        default=None,
        metadata=key(
            "experts",
            "the capacity of an expert for the rows of a rank, in times their mean; left out, it is the mean; from "
            "experts / experts_per_token on no row is dropped",
            _CAPACITY,
            in_header_if_default=False,
        ),
    )

    def capacity(self, tokens: int, choices: int, experts: int) -> int | None:
        """Return the most rows that a rank sends to one expert, of the choices of its tokens; None: all there are.

        The factor counts as it is written in decimals, so that 1.1 times 10 rows are 11.
        """
        if self.dispatch == BALANCED:
            return None
        factor = Fraction(str(1 if self.capacity_factor is None else self.capacity_factor))
        return min(tokens, ceil(factor * tokens * choices / experts))
