"""Table of all named schedules, with the properties that the planner uses.

A schedule of one's own joins it in two ways: a module that is given to `--plugin` calls `SCHEDULES.register`, or an
installed distribution names it in the entry point group `ratrain.schedules`. Its functions are those of others: what
they raise is told as the fault of the plugin, and an order is checked before it is placed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from math import inf
from typing import Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.schedules.action import Action, Order, most_in_flight, with_backwards_from
from ratrain.ratrain_ir.schedules.building_block import schedule_v_half, schedule_v_min
from ratrain.ratrain_ir.schedules.interleaved import (
    breadth_first_problem,
    interleaved_problem,
    schedule_breadth_first,
    schedule_interleaved,
)
from ratrain.ratrain_ir.schedules.one_chunk import (
    schedule_1f1b,
    schedule_1f1b_ahead,
    schedule_gpipe,
    schedule_zb_h1,
    schedule_zb_h2,
)
from ratrain.ratrain_ir.schedules.seq1f1b import schedule_seq1f1b, seq1f1b_problem
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.schedules.vee import schedule_dualpipe_v, schedule_zb_v, vee_problem
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.support.plugins import place_of
from ratrain.ratrain_ir.support.registry import Registry


def default_schedule(shape: PipelineShape) -> str:
    """Return the schedule that is used where neither plan nor strategy names one.

    It is 1F1B, or the one made for slices or chunks if the shape has them.
    """
    if shape.slices > 1:
        return "seq1f1b"
    if shape.chunks > 1:
        return "zb-v" if shape.layout == "vee" else "interleaved"
    return "1f1b"


def one_chunk_whole(shape: PipelineShape) -> str | None:
    """Explain why a shape does not suit a schedule of one chunk a stage without slices; None if it does."""
    if shape.chunks > 1:
        return f"it has one chunk a stage, not {shape.chunks}"
    if shape.slices > 1:
        return f"it has whole micro-batches, not {shape.slices} slices of each"
    return None


@frozen
class Schedule:
    """A named schedule: its order on each stage, and properties that planner and checks use."""

    title: str
    """its name in a sentence"""
    actions: Callable[[PipelineShape, int], Order]
    """returns the order of a stage whose chunks all have a backward"""
    problem: Callable[[PipelineShape], str | None] = one_chunk_whole
    """explains why it cannot be made for a shape; None if it can"""
    chunks: int = 1
    """chunks a stage if the plan does not say"""
    layout: str = "loop"
    """layout of the chunks if the plan does not say, one of `LAYOUTS`"""
    held: float = 1.0
    """micro-batches that the first stage holds, as a share of 1F1B's; rough: it only orders the search"""
    bubble: float = 1.0
    """idle time, as a share of the time through all other stages over chunks * slices; rough, like `held`"""

    def order(self, shape: PipelineShape, stage: int) -> Order:
        """Return the order of a stage without the backwards of chunks that only go forward.

        Such chunks are the first ones, so nobody waits for what is left out: the rest is as sound as the whole.
        """
        return with_backwards_from(shape.forward_only, self.actions(shape.trained_whole, stage))


class Schedules(Mapping[str, Schedule]):
    """Schedules by name: the project's own, then those of plugins and of other distributions."""

    def __init__(self, own: Mapping[str, Schedule]) -> None:
        self._own = dict(own)
        self._added: dict[str, Schedule] = {}
        self._others = Registry("schedule", "ratrain.schedules", {})

    def register(self, name: object, schedule: object) -> None:
        """Add a schedule under a name of lower-case letters, digits and dashes.

        Raises `DiagnosticError` RT072 if the name is taken or no such name, or `schedule` is no `Schedule`.
        """
        if not isinstance(schedule, Schedule):
            text = f"the schedule '{name}' is registered as {schedule!r}: a ratrain.ratrain_ir.schedules.named.Schedule"
            fail("RT072", f"{text} is expected")
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            fail("RT072", f"{name!r} is no name of a schedule: lower-case letters, digits and dashes are expected")
        if name in ("all", "none"):
            text = f"'{name}' is a reserved word and cannot name a schedule{_file_of(schedule)}"
            fail("RT072", text, help="register it under another name: options and files have this word for all or none")
        if name in self._own:
            text = f"the schedule '{name}'{_file_of(schedule)} has the name of one that is built in"
            fail("RT072", text, help="register it under another name")
        known = self._added.get(name)
        if known is not None and _place(known) != _place(schedule):
            fail(
                "RT072",
                f"the schedule '{name}' of {_place(schedule)} has the name of {_place(known)}",
                help="rename it",
            )
        actions, problem = _ordering(name, schedule.actions), _guarded(name, schedule.problem)
        self._added[name] = evolve(schedule, actions=actions, problem=problem)

    def is_own(self, name: str) -> bool:
        """Tell whether a schedule is one of the project's own, whose orders need no check."""
        return name in self._own

    def __getitem__(self, name: str) -> Schedule:
        """Return a schedule. Raises KeyError for an unknown name, `DiagnosticError` RT072 for one of no use."""
        if name in self._own:
            return self._own[name]
        known = self._others.place(name)  # which loads the plugins that the environment names
        if name not in self._added and known is not None:
            self.register(name, self._others.load(name))
        return self._added[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names, the project's own first."""
        others = self._others.names()
        return iter(dict.fromkeys((*self._own, *self._added, *others)))

    def __len__(self) -> int:
        """Count the schedules."""
        return len(list(iter(self)))


def _place(schedule: Schedule) -> str:
    """Return the function that makes the orders of a schedule, as `module:name`."""
    return f"{schedule.actions.__module__}:{getattr(schedule.actions, '__qualname__', schedule.title)}"


def _file_of(schedule: Schedule) -> str:
    """Return the place of the function that makes the orders, as ` (file:line)`; empty if it is not known."""
    code = getattr(schedule.actions, "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _ordering(name: str, function: Callable[[PipelineShape, int], Order]) -> Callable[[PipelineShape, int], Order]:
    """Return a plugin's function of orders whose errors, and whose results that are no orders, are told as RT072."""
    guarded = _guarded(name, function)

    @wraps(function)
    def call(shape: PipelineShape, stage: int) -> Order:
        found = guarded(shape, stage)
        if not isinstance(found, list | tuple):
            text = f"the schedule '{name}' is wrong: of stage {stage} it gives {found!r}, which is no list of Action"
            fail("RT072", text, help="its function returns the list of actions of the stage")
        wrong = [each for each in found if not isinstance(each, Action)]
        if wrong:
            fail("RT072", f"the schedule '{name}' is wrong: stage {stage} has {wrong[0]!r}, which is no Action")
        return list(found)

    return call


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a plugin whose errors are told as RT072, with their place."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except DiagnosticError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises is told, in words
            fail("RT072", f"the schedule '{name}' failed: {type(error).__name__}: {error}{place_of(error, '')}")

    return call


SCHEDULES = Schedules(
    {
        "1f1b": Schedule("1F1B", schedule_1f1b),
        "gpipe": Schedule("GPipe", schedule_gpipe, held=inf),
        # one micro-batch more, but merged passes hold about what one does
        "1f1b-ahead": Schedule("1F1B one ahead", schedule_1f1b_ahead),
        "zb-h1": Schedule("ZB-H1", schedule_zb_h1, bubble=0.5),
        "zb-h2": Schedule("ZB-H2", schedule_zb_h2, held=2.0, bubble=0.1),
        "interleaved": Schedule(
            "interleaved 1F1B", schedule_interleaved, problem=interleaved_problem, chunks=2, held=1.5
        ),
        "breadth-first": Schedule(
            "breadth-first", schedule_breadth_first, problem=breadth_first_problem, chunks=2, held=inf
        ),
        "zb-v": Schedule("ZB-V", schedule_zb_v, problem=vee_problem, chunks=2, layout="vee", bubble=0.1),
        "v-half": Schedule(
            "V-Half", schedule_v_half, problem=vee_problem, chunks=2, layout="vee", held=0.5, bubble=0.6
        ),
        "v-min": Schedule("V-Min", schedule_v_min, problem=vee_problem, chunks=2, layout="vee", held=1 / 3),
        "dualpipe-v": Schedule(
            "DualPipe-V", schedule_dualpipe_v, problem=vee_problem, chunks=2, layout="vee", held=1.5, bubble=0.3
        ),
        "seq1f1b": Schedule("Seq1F1B", schedule_seq1f1b, problem=seq1f1b_problem),
    }
)
"""Every schedule that a plan may name."""


@cache
def most_held(schedule: str | None, shape: PipelineShape, stage: int) -> int:
    """Return the most passes through a chunk that are in flight on a stage under a named schedule.

    A pass of a micro-batch (or slice) is in flight from the start of its forward until the gradient of its input is
    made; in a chunk that only goes forward none is. Nothing is known about an order without a name (None): all passes
    may be in flight.
    """
    if schedule is None:
        chunks = sum(chunk >= shape.forward_only for chunk in shape.chunks_of(stage))
        return shape.micro_batches * chunks * shape.slices
    order = SCHEDULES[schedule].order(shape, stage)
    return most_in_flight(((action.kind, action.chunk) for action in order), shape.forward_only)
