"""The rules for a text whose stages are numbers (`ratrain.ratrain_ir.text.text_numbers`): whether they find nothing.

Each stage is proved by itself, on an op of each kind and in sweeps; of it is left what the rules across stages ask. These only accept too: where
anything is found, or left to the rules on objects, nobody knows what; `verify` does, of the module that the parser makes. Allocated schedules without
slices, whose stages have neither guests nor other memories, are proved so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.dependence import ENGINE_INDEX, StageNumbers
from ratrain.ratrain_ir.analysis.dependence_sweep import SweptOps
from ratrain.ratrain_ir.analysis.progress import StageEvents, cycle_of, hop_of, meeting_stages, stage_edges
from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import BlockPieceOp, Direction, Engine, Op
from ratrain.ratrain_ir.ops.collectives import is_blocking
from ratrain.ratrain_ir.ops.compute import BackwardWeight, Forward, InputGradientOp, Release
from ratrain.ratrain_ir.ops.messages import GUEST_OPS, MessageOp
from ratrain.ratrain_ir.side_by_side import each
from ratrain.ratrain_ir.support.loops import at_any_size
from ratrain.ratrain_ir.topology import Hop
from ratrain.ratrain_ir.verifier.alike import Alike
from ratrain.ratrain_ir.verifier.communication import check_stage_claim, collective_name
from ratrain.ratrain_ir.verifier.lives_sweep import compiled_sweep as compiled_lives
from ratrain.ratrain_ir.verifier.memory_sweep import conflicts
from ratrain.ratrain_ir.verifier.report import FoundError, Reporter, refuser
from ratrain.ratrain_ir.verifier.structure import check_op
from ratrain.ratrain_ir.verifier.symbolic_traces import NumberedOps, is_sound
from ratrain.ratrain_ir.verifier.workspace import check_op_workspace

if TYPE_CHECKING:
    from ratrain.ratrain_ir.target import Target
    from ratrain.ratrain_ir.text.text_numbers import NumberedText, StageNumbersOfText

Int64s = NDArray[np.int64]
NONE = -1
_BYTES_OF_AN_OP = 150
"""About so many, with the declarations that it has."""
T = TypeVar("T", bound=Hashable)


@frozen(eq=False)
class SoundStage:
    """A stage that was found sound by itself, as the rules across stages know it."""

    events: StageEvents
    sent: Mapping[Hop, Int64s]
    """by channel the micro-batches that are sent, in order"""
    received: Mapping[Hop, Int64s]
    met: Mapping[tuple[int, ...], Sequence[str]]
    """by the stages that meet what their collectives combine, in order"""


def is_provable(module: Module) -> bool:
    """Whether stages of a module can be proved as numbers at all."""
    return module.level is Level.ALLOCATED and module.target is not None and not module.plan.slices


def sound_ops(module: Module, text: NumberedText, target: Target | None) -> int | None:
    """How many ops the text of a module has of which `is_provable`, on a target; None where something may be wrong.

    Raises `UnusualTextError` as it is read.
    """
    if target is None:
        return None

    def proved(index: int) -> SoundStage | None:
        with at_any_size():  # the compiler is there: the text was read by it
            return proved_stage(module, index, text.stage(index), target)

    # the first one loads the loops, for processes beside this one too
    found = [proved(0), *each(proved, range(1, len(module.stages)), work=text.nbytes // _BYTES_OF_AN_OP)]
    sound = [stage for stage in found if stage is not None]
    return sum(stage.events.count for stage in sound) if len(sound) == len(found) and stages_agree(sound) else None


def proved_stage(module: Module, index: int, text: StageNumbersOfText, target: Target) -> SoundStage | None:
    """A stage of a module of which `is_provable`, if no rule about it alone finds anything."""
    stage, report = Stage(index), refuser(module)
    swept = _swept(text)
    try:
        _check_ops(module, stage, text.examples, target, report)
        if not (_lives_are_sound(text) and _is_complete(module, stage, text) and _bytes_are_sound(module, text, swept)):
            return None
        check_stage_claim(module, Stage(index, {}, list(_passes(text))), report)
    except FoundError:
        return None
    return _summary(module, stage, text, swept)


def stages_agree(stages: Sequence[SoundStage]) -> bool:
    """Whether no rule across stages finds anything."""
    return (
        _messages_match(stages)
        and _collectives_match(stages)
        and cycle_of([stage.events for stage in stages], rendezvous=True) is None
    )


def _check_ops(module: Module, stage: Stage, examples: Iterable[Op], target: Target, report: Reporter) -> None:
    """What is asked of each op alone, asked of one of each kind."""
    owned = frozenset(module.topology.stage_blocks[stage.index])
    for op in examples:
        if isinstance(op, GUEST_OPS):
            raise FoundError
        check_op(module, stage, owned, op, report)
        if type(op) is not Release:
            check_op_workspace(module, stage, op, target, report)


def _lives_are_sound(text: StageNumbersOfText) -> bool:
    live = np.zeros(len(text.carried), np.bool_)
    return bool(compiled_lives()(text.bounds, text.operands, text.ended_bounds, text.ended, text.carried, live))


def _is_complete(module: Module, stage: Stage, text: StageNumbersOfText) -> bool:
    """The symbolic run."""
    works = np.array([type(op) is not Release for op in text.examples], np.bool_)
    kinds = np.where(works[text.kinds], text.kinds, NONE)
    examples = [(op, Alike()) for op in text.examples]
    return is_sound(
        module, stage, NumberedOps(kinds, text.micro_batches, text.bounds, text.operands, examples, text.carried)
    )


def _bytes_are_sound(module: Module, text: StageNumbersOfText, swept: SweptOps) -> bool:
    """Addresses, and that no two tensors that are live together share a byte, nor any lies beyond the capacity."""
    if not len(text.offsets):
        return True
    if text.offsets.min() < 0 or (text.offsets % ALIGNMENT_BYTES).any():
        return False
    assert module.target is not None
    if max(swept.stops) > module.target.capacity_bytes:
        return False
    operands: Any = np.concatenate((text.operands, np.flatnonzero(text.carried)))
    bounds: Any = np.concatenate((text.bounds, np.full(4, len(operands))))
    ranks: Any = np.zeros(len(text.offsets), np.int64)
    return not conflicts(bounds, operands, swept.starts, swept.stops, ranks, 1)


def _swept(text: StageNumbersOfText) -> SweptOps:
    engines = np.array([NONE if type(op) is Release else ENGINE_INDEX[op.engine] for op in text.examples], np.int64)
    blocks = np.array([op.engine is Engine.COLLECTIVE and is_blocking(op) for op in text.examples], np.int64)
    nothing: Any = np.full(len(text.kinds), NONE)
    stops: Any = text.offsets + -(-text.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    found: Any = text
    return SweptOps(
        *(
            engines[found.kinds],
            blocks[found.kinds],
            found.bounds,
            found.operands,
            found.offsets,
            stops,
            nothing,
            nothing,
        )
    )


def _passes(text: StageNumbersOfText) -> Iterator[Op]:
    """The ops that a schedule puts into an order, without their operands."""
    makes = [_bare(op) if isinstance(op, Forward | InputGradientOp | BackwardWeight) else None for op in text.examples]
    for kind, micro_batch in zip(text.kinds.tolist(), text.micro_batches.tolist(), strict=True):
        make = makes[kind]
        if make is not None:
            yield make(micro_batch=micro_batch)


def _bare(op: BlockPieceOp) -> Callable[..., Op]:
    """What makes ops like one, but for their operands, of any micro-batch."""
    return partial(type(op), block=op.block, slice=op.slice)


def _summary(module: Module, stage: Stage, text: StageNumbersOfText, swept: SweptOps) -> SoundStage:
    topology = module.topology
    sends: dict[Hop, list[int]] = {}
    recvs: dict[Hop, list[int]] = {}
    meetings: dict[tuple[int, ...], list[int]] = {}
    for kind, op in enumerate(text.examples):
        if isinstance(op, MessageOp):
            hop = hop_of(op, stage, topology)
            assert hop is not None  # the structure of a sound module
            ends = sends if op.direction is Direction.OUT else recvs
            ends.setdefault(hop, []).append(kind)
        if group := meeting_stages(op, stage, topology):
            meetings.setdefault(group, []).append(kind)
    met, sent, received = _places(text, meetings), _places(text, sends), _places(text, recvs)
    return SoundStage(
        StageEvents(len(text.kinds), *stage_edges(StageNumbers(swept, [])), met, sent, received),
        {hop: text.micro_batches[places] for hop, places in sent.items()},
        {hop: text.micro_batches[places] for hop, places in received.items()},
        {
            key: [collective_name(text.examples[kind]) for kind in text.kinds[places].tolist()]
            for key, places in met.items()
        },
    )


def _places(text: StageNumbersOfText, kinds: Mapping[T, list[int]]) -> dict[T, Int64s]:
    """The positions of ops of some kinds."""
    return {key: np.flatnonzero(np.isin(text.kinds, each)) for key, each in kinds.items()}


def _messages_match(stages: Sequence[SoundStage]) -> bool:
    """RT040, RT041: what is received is what is sent, once, in its order."""
    sent = {hop: pieces for stage in stages for hop, pieces in stage.sent.items()}
    received = {hop: pieces for stage in stages for hop, pieces in stage.received.items()}
    return sent.keys() == received.keys() and all(
        np.array_equal(pieces, received[hop]) and len(np.unique(pieces)) == len(pieces) for hop, pieces in sent.items()
    )


def _collectives_match(stages: Sequence[SoundStage]) -> bool:
    """RT043: all that meet have the same collectives in the same order."""
    return all(
        stages[member].met.get(key) == names for stage in stages for key, names in stage.met.items() for member in key
    )
