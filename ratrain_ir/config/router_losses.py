"""Losses that keep a router of experts balanced, as keys of a plan.

Both are taken of each layer and each micro-batch by itself, so that they depend neither on pipeline stages nor on
replicas nor on the order of micro-batches; layers add up, micro-batches and replicas are averaged. With T tokens, k of
E experts chosen for each, n_e tokens sent to expert e and p the softmax of the router:

    balance_loss * E / (k T^2) * sum over e of n_e * (sum over t of p[t, e])      balance_loss if all are equally busy
    z_loss / T * sum over t of log(sum over e of exp(logit[t, e]))^2

The first is that of Switch Transformers (Fedus et al., 2021, equations 4 to 6) as Megatron-LM scales it, the second of
ST-MoE (Zoph et al., 2022, equation 5). They act through gradients alone: the loss that a run reports is that of the
next token.
"""

from __future__ import annotations

from attrs import field, frozen

from ratrain.ratrain_ir.config.plan_keys import key, number

_MAX_FACTOR = 1000
_FACTOR = number(lambda value: 0 <= value <= _MAX_FACTOR, f"a number from 0 to {_MAX_FACTOR}")


@frozen
class RouterLosses:
    """Factors of both losses; 0 leaves a loss out."""

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

    def __bool__(self) -> bool:
        return bool(self.balance_loss or self.z_loss)
