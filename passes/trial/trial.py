"""Trials: a stage as it will look once the target has sized its workspace, before anything is final.

A pass with a byte budget asks a trial for the exact live bytes and the exact arena. A pass that looks for the shortest
order asks for seconds. Trials work on drafts (`Stage.draft`), whose lists may differ; no trial changes an op or a
tensor that others share.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs import define, field

from ratrain.passes.memory.allocation import Effort, ProblemColumns, allocate
from ratrain.passes.pass_base import PassContext
from ratrain.passes.trial.list_times import ListTimes, TimedRows
from ratrain.passes.trial.overlap import Occupancy, occupancy
from ratrain.ratrain_ir.analysis.op_rows import pays
from ratrain.ratrain_ir.config.types import Dtype, Home, StateKind, aligned, tensor_type
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import Op
from ratrain.ratrain_ir.ops.compute import Release, Update
from ratrain.ratrain_ir.ops.likeness import Forms
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.ops.state_homes import engine_of_update
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrain_ir.support.recent import Recent
from ratrain.ratrain_ir.support.time_limit import go_on

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.lifetime import Lifetimes
    from ratrain.ratrain_ir.target import WorkspaceRequest


_SCRATCH = attrgetter("scratch")


@define(eq=False)
class Trials:
    """Trials for one decision about a module's stages. Caches legalised ops and their seconds as long as it lives."""

    module: Module
    context: PassContext
    _legalised: dict[Op, Op] = field(factory=dict, init=False, repr=False)
    _workspace: dict[int, dict[str, Tensor]] = field(factory=dict, init=False, repr=False)
    """By stage index and routine key."""
    _seconds: dict[Op, float] = field(factory=dict, init=False, repr=False)
    _timed: TimedRows = field(factory=TimedRows, init=False, repr=False)
    _occupancies: Recent[tuple[object, ...], Occupancy] = field(factory=Recent, init=False, repr=False)
    """By a stage's ops and tensors: those of a choice are asked for by who makes it, then by who moves its ops."""
    _forms: Forms = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._forms = self.context.forms()

    def with_workspace(self, stage: Stage) -> Stage:
        """Return a draft of a stage whose ops have the workspace and engines that the target will ask for.

        Raises `OutOfTime` where the time for the work has passed.
        """
        go_on()
        known = list(map(self._legalised.get, stage.ops))  # a map of a method of `dict` makes no Python calls
        ops = [self.legalised(stage, op) if made is None else made for op, made in zip(stage.ops, known, strict=True)]
        draft = stage.draft(ops)
        for tensor in dict.fromkeys(chain.from_iterable(map(_SCRATCH, ops))):
            draft.tensors.setdefault(tensor.name, tensor)
        return draft

    def legalised(self, stage: Stage, op: Op) -> Op:
        """Return an op with the workspace and engine that the target will ask for; the same object in every trial."""
        legalised = self._legalised.get(op)
        if legalised is None:
            legalised = self._legalised[op] = self._made_legal(stage, op)
        return legalised

    def _made_legal(self, stage: Stage, op: Op) -> Op:
        if type(op) is Release:
            return op
        if type(op) is Update:
            engine = engine_of_update(op, self.context.target.update_engine)
            op = op if op.placement is engine else attrs.evolve(op, placement=engine)
        request, seconds = self.context.needs(self.module, stage, op, self._forms)
        workspace = workspace_of(stage, request, self._workspace.setdefault(stage.index, {}))
        if workspace:
            op = attrs.evolve(op, scratch=workspace)
        self._seconds[op] = seconds
        return op

    def op_seconds(self, stage: Stage, op: Op) -> float:
        """Return the target's seconds of an op."""
        seconds = self._seconds.get(op)
        if seconds is None:
            seconds = self._seconds[op] = self.context.op_seconds(self.module, stage, op, self._forms)
        return seconds

    def times(self, stage: Stage) -> ListTimes:
        """Return when each op of a stage would start and end in a step with all engines free at its start."""
        return self._step_times(stage, 1)[0]

    def period(self, stage: Stage) -> float:
        """Return the seconds between the ends of the second and the third step of a stage on its own."""
        _, second, third = (float(times.ends.max(initial=0.0)) for times in self._step_times(stage, 3))
        return third - second

    def _step_times(self, stage: Stage, steps: int) -> list[ListTimes]:
        places = self._timed.of(self.with_workspace(stage), self.op_seconds)
        return self._timed.times(places, steps, arrays=pays(steps * len(places)))

    def occupancy(self, stage: Stage) -> Occupancy:
        """Return the occupancy that a stage will have once its ops have their workspace."""
        key = stage.index, *stage.ops, *stage.tensors.values()

        def made() -> Occupancy:
            return occupancy(self.with_workspace(stage), self.op_seconds, timed=self._timed)

        return self._occupancies.of(key, made)

    def excess_bytes(self, occupied: Occupancy, lag: float, capacity: int) -> int:
        """Return the bytes by which an arena would exceed the capacity, with room for ops that lag by `lag` seconds.

        0 if it fits. Heuristics only, no exact search: the true minimum may be lower. The same lives are placed once
        for a pipeline: a pass asks for them again when it has chosen between orders.
        """
        lives = occupied.within(lag)
        key = lives.digest, capacity
        known = self.context.arenas
        if key not in known:
            enough = Effort(gap=max(0.0, capacity / max(1, lives.peak_bytes) - 1))
            placed = allocate(allocation_problem(lives), effort=enough, search=False, trial=True)
            known[key] = placed.arena_bytes
        return max(0, known[key] - capacity)

    def fits(self, stage: Stage, lag: float, capacity: int) -> bool:
        """Tell whether a stage's arena would stay within the capacity, with room for ops that lag by `lag` seconds.

        Cheaper than `excess_bytes` where it does not fit: it stops at the peak, or at the first tensor without room.
        """
        occupied = self.occupancy(stage).within(lag)
        if occupied.peak_bytes > capacity:
            return False
        enough = Effort(gap=capacity / max(1, occupied.peak_bytes))
        placement = allocate(
            allocation_problem(occupied),
            capacity=capacity,
            effort=enough,
            search=False,
            trial=True,
            all_or_nothing=True,
        )
        return placement.arena_bytes <= capacity


def workspace_of(stage: Stage, request: WorkspaceRequest | None, made: dict[str, Tensor]) -> Tensors:
    """Return the workspace that an op asks for, or () if none; `made` holds the stage's workspaces by routine key."""
    if request is None or request.nbytes == 0:
        return ()
    if request.key not in made:
        name, type_ = stage.free_name(f"ws.{request.key}"), tensor_type(Dtype.U8, (request.nbytes,))
        made[request.key] = Tensor(name, StateKind.WORKSPACE, type_)
    return (made[request.key],)


def step_seconds_at_own_addresses(module: Module, context: PassContext) -> float:
    """Return the simulated seconds of a step of a placed module if no bytes were used twice.

    That is the time of its order alone.
    """
    trials = Trials(module, context)
    apart = at_own_addresses(attrs.evolve(module, stages=[trials.with_workspace(stage) for stage in module.stages]))
    info = attrs.evolve(context.target.info(module), capacity_bytes=max(stage.arena_bytes for stage in apart.stages))
    return context.target.step_seconds(attrs.evolve(apart, level=Level.ALLOCATED, target=info))


def at_own_addresses(module: Module) -> Module:
    """Return a copy of a module in which no two tensors share bytes, whatever arena that takes."""
    copy = copy_module(module)
    for stage in copy.stages:
        ends = dict.fromkeys(Home, 0)
        for tensor in stage.tensors.values():
            tensor.offset = ends[tensor.home]
            ends[tensor.home] += aligned(tensor.type.nbytes)
    return copy


def allocation_problem(lives: Lifetimes, *, apart: bool = False) -> ProblemColumns:
    """Return the placement problem of a stage's tensors in one memory, in declaration order.

    With `apart`, a received tensor never shares bytes with a sent one.
    """
    stage, counts = lives.stage, lives.counts
    placed = counts > 0
    sizes, sides = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
    sizes[placed] = lives.sizes[np.cumsum(counts)[placed] - 1]
    if apart:
        received = {tensor for op in stage.ops if type(op) is Recv for tensor in op.writes}
        sent = {tensor for op in stage.ops if type(op) is Send for tensor in op.reads}
        sides[:] = [-1 if tensor in sent else int(tensor in received) for tensor in lives.tensors]
    return ProblemColumns(sizes, sides, counts, lives.starts, lives.stops)
