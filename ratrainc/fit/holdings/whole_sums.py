"""Gradients under FSDP that wait whole for the last micro-batch, as trainers that enter `no_sync` leave them.

Of n micro-batches of a step, with G the bytes of all whole gradients:

    micro-batch     1           2 ... n - 1                 n                           step
    held            0 to G      G, and what is made now     G to 0, shards from 0       shards
    made now        a unit      a unit, then added          a unit, added, reduced

A unit is a layer, or all that is outside layers. G does not shrink with the devices: of a 7B in bf16 it is 13 GB on
every rank, where its shards are 3.3 GB over 8.

    FSDP1   the type of the gathered weights, the compute type (torch distributed/fsdp/_runtime_utils.py
            _post_backward_hook returns before the reduction; _flat_param.py prepare_gradient_for_backward keeps it)
    FSDP2   the type of the reduction, into which a unit's gradients are cast after its backward
            (fully_shard/_fsdp_param.py to_accumulated_grad_if_needed); in the same type each parameter's gradient is
            added as soon as it is made

Offloaded weights leave them on the device: they go to the host after a reduction alone (_runtime_utils.py
_post_reduce_grad_callback). tests/ratrainc/fit/test_whole_gradients.py counts them between micro-batches of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.jobs.job import Sharding
from ratrain.ratrainc.fit.holdings.adapters import head_trained, largest_trained, layer_trained, outer_trained, trained
from ratrain.ratrainc.fit.holdings.buffers import (
    MADE_BY_FSDP1,
    MADE_BY_FSDP2,
    Phase,
    in_reduction,
    of_the_layer_before,
)
from ratrain.ratrainc.fit.holdings.part import itemsize
from ratrain.ratrainc.fit.holdings.state import GRADIENTS, all_gradients, gradients
from ratrain.ratrainc.fit.holdings.terms import together

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.holdings.part import Part
    from ratrain.ratrainc.fit.holdings.terms import Bytes

WHOLE = "whole gradients of earlier micro-batches"


def waiting_gradients(part: Part, phase: Phase) -> Bytes:
    """Return the bytes of gradients in a phase before the optimizer's step, of the micro-batch that holds most."""
    passes = [_of_a_middle_one(part, phase)]
    if phase in (Phase.FIRST, Phase.END):
        passes = [_of_the_first(part, phase), _of_the_last(part, phase)]
        passes += [_of_a_middle_one(part, phase)] if part.micro_batches > 2 else []
    return max(passes, key=lambda each: sum(each.values()))


def kept_item(part: Part) -> int:
    """Return the bytes of an element of a gradient that waits."""
    return part.item if part.job.sharding is Sharding.FSDP1 else itemsize(part.job.reduce_dtype)


def _adds_at_once(part: Part) -> bool:
    """Tell whether each parameter's gradient is added as soon as it is made, and not a unit's at its end."""
    return part.job.sharding is Sharding.FSDP2 and kept_item(part) == part.item


def _made_at_once(part: Part, phase: Phase) -> int:
    """Return the bytes of gradients that are made in a phase before they are added to those that wait.

    FSDP1's are one tensor of a unit, joined of its parameters' (_flat_param.py _get_unflat_views_unaligned, whose
    backward is a cat).
    """
    joined = 2 if part.job.sharding is Sharding.FSDP1 else 1
    unit, head, outer = layer_trained(part.here), head_trained(part), joined * outer_trained(part)
    if _adds_at_once(part):
        unit = outer = largest_trained(part)
    waiting = head if phase is Phase.HEAD or not _adds_at_once(part) else 0
    made = {
        Phase.HEAD: waiting,
        Phase.NORM: waiting,
        Phase.LAST: unit + waiting,
        Phase.FIRST: unit + waiting,
        Phase.END: outer,
    }
    return part.item * made.get(phase, 0)


def _of_a_middle_one(part: Part, phase: Phase) -> Bytes:
    """Return the bytes where all units' gradients wait; at the loss and in the last layer those of the last one too.

    There its reductions have only begun: in place of the layer before there is its copy in another type.
    """
    reduced = itemsize(part.job.reduce_dtype)
    copy = reduced if reduced != kept_item(part) and phase is Phase.LAST else 0
    made = _made_at_once(part, phase) + of_the_layer_before(part, copy)
    return {WHOLE: kept_item(part) * trained(part), _made_by(part): made}


def _of_the_first(part: Part, phase: Phase) -> Bytes:
    """Return the bytes of the first micro-batch, whose gradients begin to wait."""
    missing = outer_trained(part) + (_not_yet_left(part) if phase is Phase.FIRST else 0)
    return {WHOLE: kept_item(part) * (trained(part) - missing), _made_by(part): _made_at_once(part, phase)}


def _of_the_last(part: Part, phase: Phase) -> Bytes:
    """Return the bytes of the last micro-batch: shards, what is reduced now, and gradients that still wait."""
    left = outer_trained(part) + (_not_yet_left(part) if phase is Phase.FIRST else 0)
    waiting = kept_item(part) * left
    if phase is Phase.END and part.job.sharding is Sharding.FSDP1:
        # the copy that is reduced, and the shard, are made when the new gradient is added and gone
        shard = gradients(part, outer_trained(part))
        reduced = itemsize(part.job.reduce_dtype)
        copy = reduced * outer_trained(part) if reduced != kept_item(part) else 0
        made = max(_made_at_once(part, phase), copy + shard)
        return {GRADIENTS: all_gradients(part) - shard, WHOLE: waiting, MADE_BY_FSDP1: made}
    return together([{GRADIENTS: all_gradients(part), WHOLE: waiting}, in_reduction(part, phase)])


def _not_yet_left(part: Part) -> int:
    """Return the elements that train of the layer in whose backward a moment is, and of those before it."""
    return sum(count * layer_trained(each) for each, count in part.first_layers((part.number or 0) + 1))


def _made_by(part: Part) -> str:
    return MADE_BY_FSDP1 if part.job.sharding is Sharding.FSDP1 else MADE_BY_FSDP2
