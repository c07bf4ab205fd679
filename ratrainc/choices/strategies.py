"""Strategies: named pass pipelines. Under one plan all of them compute the same training, bit for bit.

A strategy that is named after a schedule places it. If the plan has one chunk per stage and whole micro-batches, and
the schedule needs more, the strategy adapts the plan: it gets the chunks, the layout or the slices that the schedule
usually has. Chunks change no bit; slices round differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import evolve, frozen

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.placed_by import placed_by
from ratrain.passes.placement.overlap_tensor import OverlapTensorPass
from ratrain.passes.placement.place_from_file import PlaceFromFilePass
from ratrain.passes.placement.place_schedule import PlaceSchedulePass
from ratrain.passes.placement.placed_schedule import refuse_contradiction
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.config.cuts import even_work_lengths
from ratrain.ratrain_ir.config.plan_keys import runs_of_context
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail, nearest
from ratrain.ratrain_ir.support.text import Place
from ratrain.targets.machine.cost import weight_bound_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine

_MOST_SLICES = 8
"""Most slices that a strategy chooses. With 8 the bubble is an eighth of 1F1B's, so more would win little."""


@frozen
class Strategy:
    """A named pipeline of passes."""

    name: str
    passes: str
    """the pipeline; without a placement in it, the plan's schedule is placed"""
    summary: str
    zero: int | None = None
    """the ZeRO level it sets in the plan"""
    note: str = ""
    """remark to print if it runs on a given plan"""
    needs_tensor_ranks: bool = False
    """True if plans without tensor-parallel ranks are refused"""

    @property
    def schedule(self) -> str | None:
        """Schedule that it is named after; None if it takes the plan's."""
        return placed_by(self.passes)

    def check_schedule(self, plan: Plan, place: Callable[[], Place] = Place) -> None:
        """Raise `DiagnosticError` RT064 if the plan names, at `place`, another schedule than the strategy places."""
        if self.schedule is not None:
            refuse_contradiction(plan, self.schedule, f"the strategy '{self.name}'", place)

    def check_tp(self, plan: Plan) -> None:
        """Raise `DiagnosticError` RT064 if the strategy needs tensor-parallel ranks and the plan has none."""
        if self.needs_tensor_ranks and plan.tp == 1:
            text = f"the strategy '{self.name}' is about tensor-parallel ranks, and the plan has none: tp = 1"
            fail("RT064", text, help="say tp in [parallel]: 2 or 4 tensor-parallel ranks share a chip of the MT-3000")

    def applied(self, plan: Plan, model: ModelConfig, machine: Machine) -> tuple[Plan, str]:
        """Return a plan adapted to this strategy, and the pipeline for it, in which exchanges are hidden.

        Raises `DiagnosticError` RT064 as `adapted` does.
        """
        adapted = self.adapted(plan, model, machine)
        return adapted, hiding_exchanges(self.passes, adapted)

    def adapted(self, plan: Plan, model: ModelConfig, machine: Machine) -> Plan:
        """Adapt a plan to this strategy: set its ZeRO level, and add chunks or slices if the schedule needs them.

        Chunks or slices are added only if the plan has none. Raises `DiagnosticError` RT064 if the plan's own do not
        suit the schedule, if none can be added, if the strategy needs tensor-parallel ranks and the plan has none, or
        if both set the ZeRO level of blocks.
        """
        self.check_tp(plan)
        if self.zero is not None and plan.zero_blocks is not None:
            text = (
                f"the strategy '{self.name}' sets the ZeRO level of all blocks to {self.zero}, and the plan "
                f"that of '{plan.zero_blocks}'"
            )
            fail("RT064", text, help="leave zero_blocks out of the plan, or use another strategy")
        leveled = plan if self.zero is None else evolve(plan, zero=self.zero)
        if self.schedule is None or SCHEDULES[self.schedule].problem(plan.shape) is None:
            return leveled
        shaped = _shaped(leveled, self.schedule, model, machine)
        problem = SCHEDULES[self.schedule].problem(shaped.shape)
        if problem is not None:
            fail("RT064", f"the strategy '{self.name}' cannot have this plan: {problem}", help=_OTHER_SHAPE)
        try:
            check_plan(shaped, model)
        except DiagnosticError as error:
            text = f"the strategy '{self.name}' cannot have this plan: {error.diagnostics[0].message}"
            fail("RT064", text, help=error.diagnostics[0].help or _OTHER_SHAPE)
        return shaped


class _Exchanging(Protocol):
    """Numbers of ranks, of a plan or of a shape of plans."""

    @property
    def tp(self) -> int: ...
    @property
    def ep(self) -> int: ...


def may_hide_exchanges(ranks: _Exchanging) -> bool:
    """Tell whether `ratrain` hides the exchanges of a plan's ranks: of tensor-parallel and of expert ranks.

    Those of context ranks are few: hiding them was worth less than 0.01 % of a step in the plans of
    docs/long-sequences.md.
    """
    return ranks.tp > 1 or ranks.ep > 1


def hiding_exchanges(pipeline: str, ranks: _Exchanging) -> str:
    """Insert `overlap-tensor` before `joint-order` if a plan has exchanges to hide and it is missing."""
    passes = parse_pipeline(pipeline)
    at = next((at for at, p in enumerate(passes) if isinstance(p, JointOrderPass)), None)
    if not may_hide_exchanges(ranks) or at is None or any(isinstance(p, OverlapTensorPass) for p in passes):
        return pipeline
    return pipeline_text([*passes[:at], OverlapTensorPass(), *passes[at:]])


_OTHER_SHAPE = "leave chunks, layout and slices out of the plan, or use a strategy that is not named after a schedule"


def _shaped(plan: Plan, schedule: str, model: ModelConfig, machine: Machine) -> Plan:
    """Give a plan the chunks that its schedule usually has, with balanced cuts, or else slices.

    A plan that has chunks or slices stays as it is. With too few layers the cuts stay, and the check of the plan
    refuses it.
    """
    usual = SCHEDULES[schedule]
    if plan.slices or (plan.chunks > 1 and usual.chunks > 1):
        return plan
    if usual.chunks == 1:
        return _in_slices(plan, model, machine)
    count = plan.pp * usual.chunks
    cuts = balance_cuts(model, count, plan.seq_len, plan.training) if count <= model.layers else plan.cuts
    return evolve(plan, chunks=usual.chunks, layout=usual.layout, cuts=cuts)


def _in_slices(plan: Plan, model: ModelConfig, machine: Machine) -> Plan:
    """Cut the sequences of a plan into 2 to 8 slices of even work.

    As many slices are made as still have enough rows on a rank, over all sequences of a micro-batch, to compute longer
    than they read weights. All slices of a micro-batch add to one gradient, which is live as a whole from the first to
    the last. Reducing it after each micro-batch would need its shards at the same time, so under ZeRO 2 it is reduced
    once a step.
    """
    rows = weight_bound_rows(machine, Dtype(plan.view_dtype).itemsize, half_sums=plan.half_run is not None)
    count = min(max(2, int(plan.micro_batch_size * plan.seq_len / plan.cp / rows)), _MOST_SLICES)
    unit = runs_of_context(plan.cp, plan.context_layout)
    lengths: tuple[int, ...] = (plan.seq_len,)
    if count * unit <= plan.seq_len and not plan.seq_len % unit:
        lengths = even_work_lengths(model, plan.seq_len, count, unit)
    return evolve(plan, slices=lengths, reduce="last" if plan.zero == 2 else plan.reduce)


_BULK = "bucket-grad-sync{unit=stage}"
_BLOCKING_BULK = "bucket-grad-sync{unit=stage blocking=true},insert-prefetch{depth-blocks=0 blocking=true}"
# A strategy that is named after a schedule places it; the others take the plan's.
_BASELINE = f"place-1f1b,{_BLOCKING_BULK},recompute{{policy=full}},allocate-ddr"

STRATEGIES = (
    Strategy(
        "ratrain",
        "joint-order,allocate-ddr",
        "gradients reduced in buckets, and shards updated, as soon as they are final; views gathered in the "
        "next forward's order; "
        "only what does not fit is recomputed, in the pipeline's idle windows where there are any; all of it "
        "decided together",
    ),
    Strategy(
        "ratrain-no-fsr",
        "joint-order{policy=full placement=inline},allocate-ddr",
        "ratrain without forward-side recovery: everything is recovered inline, right before each backward",
    ),
    Strategy(
        "ratrain-inline",
        "joint-order{placement=inline},allocate-ddr",
        "ratrain that keeps what fits too, and recovers the rest inline, right before each backward",
    ),
    Strategy(
        "ratrain-no-update-prefetch",
        "joint-order{state=blocking-bulk},allocate-ddr",
        "ratrain with all updates before all gathers, for which compute waits, as in the baseline",
    ),
    Strategy(
        "ratrain-no-layerwise",
        "joint-order{reduction=blocking-bulk},allocate-ddr",
        "ratrain with each stage's gradients reduced at once, while compute waits, as in the baseline",
    ),
    Strategy(
        "zb-h1",
        "place-zb-h1,joint-order,allocate-ddr",
        "ratrain in ZB-H1 order: backwards are split, and their weight halves fill the pipeline's idle time",
    ),
    Strategy(
        "interleaved",
        "place-schedule{kind=interleaved},joint-order,allocate-ddr",
        "ratrain in interleaved 1F1B order: two chunks of the model a stage, unless the plan says more, make "
        "the bubble half as long, "
        "for twice the messages and more activations",
    ),
    Strategy(
        "zb-v",
        "place-schedule{kind=zb-v},joint-order,allocate-ddr",
        "ratrain in ZB-V order: two chunks a stage in a vee, and backwards split, leave hardly a bubble with "
        "the activations of 1F1B",
    ),
    Strategy(
        "v-half",
        "place-schedule{kind=v-half},joint-order,allocate-ddr",
        "ratrain in V-Half order: two chunks a stage in a vee, and backwards split, with half the activations of 1F1B",
    ),
    Strategy(
        "seq1f1b",
        "place-schedule{kind=seq1f1b},joint-order,allocate-ddr",
        "ratrain in Seq1F1B order: micro-batches in slices along the sequence make bubble and activations "
        "smaller, with the same bytes in messages",
    ),
    Strategy(
        "baseline-1f1b",
        _BASELINE,
        "full recomputation inside backward; reduction in bulk after the whole backward, then updates, then "
        "gathers; compute waits "
        "for every reduction and gather",
    ),
    Strategy(
        "baseline-1f1b-overlapped",
        f"place-1f1b,{_BULK},recompute{{policy=full}},allocate-ddr",
        "baseline-1f1b in which compute waits only for what it reads",
    ),
    Strategy(
        "tuned-1f1b",
        _BASELINE,
        "baseline-1f1b on the best plan for it, which 'ratrainc plan' and 'ratrainc compare --plan auto' find",
        note="on a given plan tuned-1f1b is baseline-1f1b: its passes are the same, only the plan is its own",
    ),
    Strategy(
        "full-save",
        f"{_BLOCKING_BULK},recompute{{policy=none}},allocate-ddr",
        "baseline-1f1b that keeps every activation instead of recomputing it",
    ),
    Strategy(
        "tp-heavy",
        f"place-1f1b,{_BLOCKING_BULK},recompute{{policy=auto gathered=again}},allocate-ddr",
        "baseline-1f1b for plans with tensor-parallel ranks: compute waits for their exchanges; the bytes that the "
        "ranks save keep activations, and only what does not fit is recomputed, inline",
        needs_tensor_ranks=True,
    ),
    Strategy(
        "zero3",
        "bucket-grad-sync{bytes=1GB},insert-prefetch,recompute{policy=auto},allocate-ddr",
        "views sharded too, each gathered one block ahead of every use, and gradients reduced in buckets, both "
        "during compute; only what does not fit is recomputed, inline (ZeRO 3)",
        zero=3,
    ),
    Strategy(
        "zero3-blocking",
        "bucket-grad-sync{bytes=1GB blocking=true},insert-prefetch{depth-blocks=0 "
        "blocking=true},recompute{policy=full},allocate-ddr",
        "zero3 without overlap and with full recomputation: views are gathered right before every use, and "
        "compute waits for gathers "
        "and reductions",
        zero=3,
    ),
)

DEFAULT_STRATEGY = "ratrain"


def strategy(name: str) -> Strategy:
    """Return the strategy with a name; for the name of a schedule, `ratrain` in its order.

    Raises `DiagnosticError` RT004 if there is none.
    """
    known = {item.name: item for item in STRATEGIES}
    if name in known:
        return known[name]
    if name not in SCHEDULES:
        others = [schedule for schedule in SCHEDULES if schedule not in known]
        text = (
            f"'{name}' is not a strategy; the strategies are {', '.join(known)}, and the schedules {', '.join(others)}"
        )
        fail("RT004", text, help=nearest(name, (*known, *others)))
    return _in_order(name, PlaceSchedulePass(name), f"{SCHEDULES[name].title} order")


def table_strategy(path: str) -> Strategy:
    """Return `ratrain` in the order of a table (CSV), for plans that have its shape.

    No search can have it: bounds are for schedules that are known under every shape.
    """
    return _in_order(path, PlaceFromFilePass(path), "the order of this table")


def _in_order(name: str, placement: Pass, title: str) -> Strategy:
    passes = pipeline_text([placement, *parse_pipeline(strategy(DEFAULT_STRATEGY).passes)])
    return Strategy(name, passes, f"{DEFAULT_STRATEGY} in {title}")
