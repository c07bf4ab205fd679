"""Columns: one stage as sequences of numbers, an entry per op, over which rules about many ops run.

    forward mlp.0 m0 (%w, %x.m0)      kind 0   micro-batch 0   operands 0 1
    forward mlp.0 m1 (%w, %x.m1)      kind 0   micro-batch 1   operands 0 2
    release (%x.m0)                   kind 1   micro-batch -   ends 1

Ops of one kind agree in everything that a rule about a single op depends on: class, fields except which of the plan's
micro-batches they name, and kind, type, memory and saved slot of each operand. Such a rule checks one op per kind,
which proves it for all. Rules about lives, bytes, values and messages are loops over the numbers.

Columns are made from a module's ops, or straight from a `.rtir` text without making ops
(`ratrain_ir.text.text_numbers`); the rules are the same. Only ops can explain a finding in words. So on the columns of
a text a rule that finds something raises `FoundError`, and the text is parsed and verified again for the message.

Cost: one visit of each op and operand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.dependence import end_byte, first_byte
from ratrain.ratrain_ir.analysis.dependence_sweep import NONE, SweptOps
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.ops.base import ENGINE_NUMBERS, BlockPieceOp, Engine, Op
from ratrain.ratrain_ir.ops.collectives import is_blocking
from ratrain.ratrain_ir.ops.compute import BackwardWeight, Forward, InputGradientOp, Release
from ratrain.ratrain_ir.ops.kinds import FIELDS, piece_of
from ratrain.ratrain_ir.ops.messages import PeerOffload, PeerReload
from ratrain.ratrain_ir.ops.numbering import Numbers, operands_of
from ratrain.ratrain_ir.ops.signatures import operand_roles
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage

Column: TypeAlias = Any
"""Integers. From ops: a list, which plain Python iterates faster. From a text: an array of int64."""


class FoundError(Exception):
    """Error of a rule that finds something in the columns of a text; the caller must parse the text for the message."""


@define(eq=False)
class Alike:
    """Facts about the ops of one kind, computed once."""

    _roles: tuple[str, ...] | None = None

    def roles(self, op: Op, module: Module) -> dict[str, Tensor]:
        """Return the operands of an op of this kind by their roles.

        Raises `SignatureError` if they do not fit the op.
        """
        if self._roles is None:
            self._roles, _ = operand_roles(op, module.model, module.plan)
        return dict(zip(self._roles, op.reads + op.writes + op.updates, strict=True))


class _Unmade(Sequence[Any]):
    """Stand-in for the ops or tensors of a text: any access raises `FoundError`."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, _: object) -> NoReturn:
        raise FoundError


@frozen(eq=False)
class StageColumns:
    """One stage of a module in columns, one entry per op unless said otherwise."""

    index: int
    kinds: Column
    """kind of each op, as an index of `examples`"""
    micro_batches: Column
    """of each op; `NONE` without one"""
    bounds: Column
    """four exclusive ends in `operands` for each op: of its reads, updates, writes and scratch; a release has none
    of these"""
    operands: Column
    """operands of all ops, op by op: tensors by number, in the order of their declarations"""
    ended_bounds: Column
    """exclusive end in `ended` of the tensors that each op releases"""
    ended: Column
    """released tensors, op by op"""
    examples: Sequence[Op]
    """first op of each kind"""
    alike: Sequence[Alike]
    """facts about each kind"""
    carried: Column
    """of each tensor, whether it lives on in the next step"""
    starts: Column
    """first byte of each tensor in the joint address space of all memories; `NONE` without an address"""
    stops: Column
    """exclusive end byte of each tensor, alignment included"""
    bytes_by_home: Mapping[Home, int]
    """bytes that the stage takes of each memory its tensors are in"""
    ops: Sequence[Op] = field(factory=_Unmade)
    tensors: Sequence[Tensor] = field(factory=_Unmade)

    def __len__(self) -> int:
        return len(self.kinds)

    def of_ops(self, of_kinds: Sequence[int]) -> Column:
        """Spread values per kind to a column per op."""
        if isinstance(self.kinds, np.ndarray):
            return np.array(of_kinds, np.int64)[self.kinds]
        return [of_kinds[kind] for kind in self.kinds]

    def ops_of(self, kinds: Collection[int]) -> Iterator[Op]:
        """Yield the ops of some kinds, in order."""
        for place in self.places(kinds).tolist() if kinds else ():
            yield self.ops[place]

    def places(self, kinds: Collection[int]) -> NDArray[np.int64]:
        """Return the positions of the ops of some kinds, ascending."""
        return np.flatnonzero(np.isin(self._kinds, list(kinds)))

    @cached_property
    def _kinds(self) -> NDArray[np.int64]:
        return np.asarray(self.kinds, np.int64)

    @cached_property
    def swept(self) -> SweptOps:
        """Same ops in the form that sweeps of dependences and shared bytes take."""
        engines, blocks = [], []
        for op in self.examples:
            engine = NONE if type(op) is Release else ENGINE_NUMBERS[op.engine]
            engines.append(engine)
            blocks.append(int(engine != NONE and op.engine is Engine.COLLECTIVE and is_blocking(op)))
        posts, awaits = self._slots()
        rows = self.of_ops(engines), self.of_ops(blocks), self.bounds, self.operands
        return SweptOps(*rows, self.starts, self.stops, posts, awaits)

    def _slots(self) -> tuple[list[int], list[int]]:
        """Number the contents kept in another stage's memory: of each op, what it sends away and what it takes back.

        `NONE` for all other ops.
        """
        posts, awaits = [NONE] * len(self), [NONE] * len(self)
        numbers: Numbers[object] = Numbers()
        offloads = [kind for kind, op in enumerate(self.examples) if isinstance(op, PeerOffload | PeerReload)]
        for place in self.places(offloads).tolist() if offloads else ():
            op: Any = self.ops[place]
            (posts if type(op) is PeerOffload else awaits)[place] = numbers[op.peer, op.block, piece_of(op)]
        return posts, awaits

    def bare_passes(self) -> Iterator[Op]:
        """Yield the forwards and backwards, which a schedule orders, as new ops without operands."""
        makes = [
            _bare(op) if isinstance(op, Forward | InputGradientOp | BackwardWeight) else None for op in self.examples
        ]
        for kind, micro_batch in zip(self._kinds.tolist(), np.asarray(self.micro_batches).tolist(), strict=True):
            make = makes[kind]
            if make is not None:
                yield make(micro_batch=micro_batch)


def _bare(op: BlockPieceOp) -> Callable[..., Op]:
    """Return a maker of ops like one, without operands; it takes `micro_batch`."""
    return partial(type(op), block=op.block, slice=op.slice)


@define(eq=False)
class _Forms(dict[Tensor, int]):
    """Number of each tensor's form: kind, type, memory and, if saved, slot.

    Rules about one op depend on nothing else.
    """

    numbers: dict[object, int] = field(factory=dict)

    def __missing__(self, tensor: Tensor) -> int:
        kind = tensor.kind
        form = kind, tensor.type, tensor.home, tensor.slot if kind is StateKind.SAVED else None
        number = self[tensor] = self.numbers.setdefault(form, len(self.numbers))
        return number


def stage_columns(module: Module, stage: Stage) -> StageColumns:
    """Make the columns of a stage from its ops."""
    kind_keys: Numbers[object] = Numbers()
    key_of = _Keys(module.plan.micro_batches)
    examples: list[Op] = []
    kinds: list[int] = []
    micro_batches: list[int] = []
    ended_bounds: list[int] = []
    ended: list[Tensor] = []
    for op in stage.ops:
        kind = kind_keys[key_of(op)]
        if kind == len(examples):  # `Numbers` gives a new key the next number
            examples.append(op)
        kinds.append(kind)
        if type(op) is Release:
            # A release reads no bytes: its operands stand apart, so that no rule takes them for accesses.
            micro_batches.append(NONE)
            ended += op.reads
        else:
            micro_batch = getattr(op, "micro_batch", None)
            micro_batches.append(NONE if micro_batch is None else micro_batch)
        ended_bounds.append(len(ended))
    touched, bounds = operands_of(stage.ops)
    # declared tensors first, then the undeclared ones that ops touch
    known = list(dict.fromkeys(chain(stage.tensors.values(), touched, ended)))
    number = dict(zip(known, count())).__getitem__
    starts, stops = (list(map(end, known)) for end in (first_byte, end_byte))
    if stops and max(stops) > _FARTHEST:  # beyond any capacity; int64 columns could overflow
        starts, stops = ([min(address, _FARTHEST) for address in each] for each in (starts, stops))
    return StageColumns(
        stage.index,
        *(kinds, micro_batches, bounds, list(map(number, touched)), ended_bounds, list(map(number, ended))),
        examples,
        [Alike() for _ in examples],
        [tensor.carried for tensor in known],
        starts,
        stops,
        stage.bytes_by_home,
        stage.ops,
        known,
    )


@frozen
class _Keys:
    """Maker of keys that are equal for ops of one kind."""

    micro_batches: int
    """of the plan; ops of a micro-batch that it does not have get kinds of their own"""
    form: Callable[[Tensor], int] = field(init=False, factory=lambda: _Forms().__getitem__)

    def __call__(self, op: Op) -> object:
        kind, form = type(op), self.form
        if kind is Release:  # it may end tensors of any form: they are no part of the key
            return (kind, *map(form, op.scratch))
        micro_batch_of, own_fields = _FIELDS[kind]
        micro_batch = micro_batch_of(op)
        return (
            kind,
            # None and all valid micro-batches give True; an invalid one gives its number, so a kind of its own
            micro_batch is None or (micro_batch < self.micro_batches or micro_batch),
            own_fields(op),
            tuple(map(form, op.reads)),
            tuple(map(form, op.writes)),
            tuple(map(form, op.updates)),
            tuple(map(form, op.scratch)),
        )


def _readers(kind: type[Op]) -> tuple[Callable[[Op], int | None], Callable[[Op], object]]:
    """Return readers of an op's micro-batch, and of its other fields, for ops of a class."""
    names = [attribute.name for attribute in FIELDS[kind]]
    others = [name for name in names if name != _MICRO_BATCH]
    return attrgetter(_MICRO_BATCH) if _MICRO_BATCH in names else _nothing, attrgetter(*others) if others else _nothing


def _nothing(_: object) -> None:
    return None


_FARTHEST = 1 << 62
_MICRO_BATCH = "micro_batch"
_FIELDS = {kind: _readers(kind) for kind in FIELDS}
