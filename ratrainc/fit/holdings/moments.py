"""The moments of a step between which a rank's peak is the maximum, with what each holds.

forward ......... loss | head | last layer ... first layer | end | step
kept   grows      all    all    all            one layer     none  none
logits            most   gradient
gradients         none (or all, if micro-batches accumulate) ...  all    all

Where layers are of two kinds, the last and the first layer of each kind are looked at, and the fuller one is meant: on
the way from a kind's last layer to its first, what is kept falls and what waits grows, as among layers alike.
"""

from __future__ import annotations

from attrs import evolve

from ratrain.ratrainc.bridge.jobs.job import Sharding
from ratrain.ratrainc.fit.holdings.activations import (
    GRADIENTS as IN_BACKWARD,
)
from ratrain.ratrainc.fit.holdings.activations import (
    head_kept,
    inside_backward,
    kept_activations,
    norm_gradients,
    recomputed,
)
from ratrain.ratrainc.fit.holdings.adapters import head_trained, largest_trained, layer_trained
from ratrain.ratrainc.fit.holdings.buffers import Phase, buffers, in_reduction
from ratrain.ratrainc.fit.holdings.logits import logit_gradient, loss_bytes
from ratrain.ratrainc.fit.holdings.overheads import WORKSPACE
from ratrain.ratrainc.fit.holdings.part import Part, itemsize
from ratrain.ratrainc.fit.holdings.state import (
    GRADIENTS,
    all_gradients,
    gradients,
    gradients_at_step,
    gradients_of_partition,
    gradients_stay,
    has_partitions,
    split,
    state,
    step_copies,
    sums_apart,
)
from ratrain.ratrainc.fit.holdings.styles import MEGATRON
from ratrain.ratrainc.fit.holdings.terms import Bytes, Moment, owners_of, together
from ratrain.ratrainc.fit.holdings.whole_sums import waiting_gradients

_OF_THE_HEAD = (Phase.LOSS, Phase.LOSS_BACK, Phase.HEAD, Phase.NORM)


def moments_of(part: Part) -> tuple[Moment, ...]:
    """Return the moments of a rank's step in order. The head's moments are on the last stage only."""
    phases = [phase for phase in Phase if part.last or phase not in _OF_THE_HEAD]
    return tuple(Moment(phase.value, owners_of(_fullest(part, phase))) for phase in phases)


def _fullest(part: Part, phase: Phase) -> Bytes:
    """Return the bytes of one moment by owner, of the kind of layer that has most."""
    accounts = [_account(evolve(part, number=number), phase) for number in _numbers(part, phase)]
    return max(accounts, key=lambda each: sum(each.values()))


def _numbers(part: Part, phase: Phase) -> list[int | None]:
    """Return the layers that are looked at in a moment: of each kind the last, or the first; None if all are alike."""
    letters = part.model.mlp_kinds
    ends = {Phase.LAST: letters.rindex, Phase.FIRST: letters.index}
    return [ends[phase](letter) for letter in sorted(set(letters))] if letters and phase in ends else [None]


def _account(part: Part, phase: Phase) -> Bytes:
    """Return the bytes of one moment by owner."""
    return together(
        [
            state(part),
            _split_gradients(part, phase),
            _activations(part, phase),
            buffers(part, phase),
            {} if part.sums_whole else in_reduction(part, phase),
            {"optimizer: copies of the step": step_copies(part) if phase is Phase.STEP else 0},
            {"workspace: cuBLAS": WORKSPACE},
        ]
    )


def _split_gradients(part: Part, phase: Phase) -> Bytes:
    """Return the bytes of held gradients, with the gradients of experts apart where they are shards."""
    if part.sums_whole and phase is not Phase.STEP:
        return waiting_gradients(part, phase)
    held = _gradients(part, phase)
    if part.model.experts is None or part.job.adapter is not None or part.job.optimizer_in_backward:
        return {GRADIENTS: held}
    own = gradients(part, part.expert_parameters)
    return split(GRADIENTS, held, own if own <= held else 0)  # less is of the head alone


def _gradients(part: Part, phase: Phase) -> int:
    """Return the bytes of held gradients, and of the one that waits to be added to them."""
    everything = all_gradients(part)
    if phase in (Phase.LOSS, Phase.LOSS_BACK):
        return everything if gradients_stay(part) else 0
    if phase is Phase.STEP:
        return gradients_at_step(part)
    # an unsharded gradient is made before it is added; Megatron-LM's product adds to the main gradient itself
    adds = part.accumulates and not part.sharded and part.job.framework not in MEGATRON and not sums_apart(part)
    table = part.head_matrix if phase is Phase.HEAD else part.embedding_parameters if phase is Phase.END else 0
    matrix = largest_trained(part) if part.job.trains_part else table or part.here.layer_matrix
    waiting = itemsize(part.job.gradient_dtype) * matrix if adds else 0
    if adds and part.job.sharding is Sharding.ZERO2 and has_partitions(part) and phase is not Phase.HEAD:
        # a partition's new gradients are whole before the earlier ones take them in (all_grad_tensors, add_)
        waiting = gradients_of_partition(part)
    if gradients_stay(part) or phase in (Phase.FIRST, Phase.END):
        return everything + waiting
    return gradients(part, head_trained(part) + _trained_behind(part))


def _trained_behind(part: Part) -> int:
    """Return the elements that train of the layers behind the one in whose backward a moment is."""
    if part.number is None:
        return 0
    until = part.first_layers(part.number + 1)
    kinds = zip(part.kinds, until, strict=True)
    return sum((count - gone) * layer_trained(each) for (each, count), (_, gone) in kinds)


def _activations(part: Part, phase: Phase) -> Bytes:
    """Return what is saved, recomputed and differentiated at a moment."""
    if phase is Phase.STEP:
        return {}
    flying, chunk = part.layers_in_flight, part.layers // part.job.virtual_stages
    if phase in _OF_THE_HEAD:
        return together([kept_activations(part, flying), head_kept(part), _of_the_head(part, phase)])
    if phase is Phase.END:
        return kept_activations(part, flying - chunk)
    left = flying if phase is Phase.LAST else flying - chunk + 1
    if part.number is not None:
        left = flying - part.layers + part.number + 1
    return together([kept_activations(part, left), recomputed(part.here), inside_backward(part.here)])


def _of_the_head(part: Part, phase: Phase) -> Bytes:
    """Return what loss, head or final norm hold in addition to what was saved for them."""
    if phase is Phase.HEAD:
        return logit_gradient(part)
    if phase is Phase.NORM:
        return {IN_BACKWARD: norm_gradients(part)}
    return loss_bytes(part, backward=phase is Phase.LOSS_BACK)
