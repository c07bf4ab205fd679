"""Numbers of tensor-parallel ranks to consider, and the shapes that can have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.tensor_ranks import norms_over_ranks, problems
from ratrain.ratrain_ir.model.checked_training import check_training
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.planner.space.asked_ranks import Problem, check_asked, problem_of
from ratrain.ratrainc.planner.space.tilings import divisors

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.strategies import Strategy
    from ratrain.ratrainc.planner.space.search_setting import SearchSetting
    from ratrain.ratrainc.planner.space.space import Shape


def choose_tp(
    setting: SearchSetting, clusters: int, asked: Sequence[int] | None, strategy: Strategy
) -> tuple[int, ...]:
    """Return the numbers of tensor-parallel ranks to choose from: `asked`, else all that are possible.

    Possible ones divide the clusters and share out the model. A strategy that is about tensor-parallel ranks has at
    least two. Raises `DiagnosticError` RT064 if an asked number does not share out the model or exceeds the clusters,
    or if none is left.
    """
    known = {number: _problem(setting, number) for number in asked or divisors(clusters)}
    check_asked(asked or (), clusters, "tensor-parallel", "tp", known.__getitem__)
    numbers = tuple(number for number in sorted(known) if known[number] is None)
    if not strategy.needs_tensor_ranks:
        return numbers
    several = tuple(number for number in numbers if number > 1)
    if not several:
        reason = next((known[number] for number in sorted(known) if number > 1), None)
        why = f": {reason[0]}" if reason is not None else ""
        none = f"{setting.model.name} has none on {clusters} clusters{why}"
        text = f"the strategy '{strategy.name}' is about tensor-parallel ranks, and {none}"
        fail("RT064", text, help="use other clusters, or another strategy; give --tp 2 or more, or leave it out")
    return several


def left_out(setting: SearchSetting, clusters: int) -> tuple[int, ...]:
    """Return numbers of tensor-parallel ranks that share out the model but do not divide the clusters, up to `_MOST`.

    `choose_tp` has them only where they are asked for: some clusters then stay idle.
    """
    several = range(2, min(clusters, _MOST) + 1)
    return tuple(number for number in several if clusters % number and _problem(setting, number) is None)


_MOST = 64


def _problem(setting: SearchSetting, peers: int) -> Problem | None:
    """Return why `peers` tensor-parallel ranks cannot divide the model, and a way out; None if they can.

    Rows of activations are not looked at.
    """
    plan = setting.shaped(tp=peers, micro_batch_size=peers)
    return next(problems(setting.model, plan), None) or problem_of(check_training, setting.model, plan)


def with_whole_rows(setting: SearchSetting, space: Sequence[Shape]) -> list[Shape]:
    """Return the shapes whose tensor-parallel ranks share out the rows of an activation evenly.

    Of these, tensor-parallel ranks that norm whole queries and keys together are not context ranks too.
    Raises `DiagnosticError` RT064 if there is none.
    """
    whole = {key: _shares_rows(setting, *key) for key in {(s.tp, s.cp, s.micro_batch_size, s.slices) for s in space}}
    left = [shape for shape in space if whole[shape.tp, shape.cp, shape.micro_batch_size, shape.slices]]
    if not left and space[0].cp > 1 and norms_over_ranks(setting.model, setting.shaped(tp=space[0].tp)):
        text = f"{setting.model.name} norms queries and keys over the heads of all tensor-parallel ranks"
        fail("RT064", f"{text}, so they do not go with context ranks", help="use --cp 1, or --tp 1")
    if not left:
        fail(
            "RT064",
            f"no micro-batch of {setting.template.seq_len} tokens a sequence has rows "
            f"that {space[0].tp} tensor-parallel ranks share out evenly",
            help="use another --seq-len or --tp, or --like a plan with sequence_sharding = false",
        )
    return left


def _shares_rows(setting: SearchSetting, tp: int, cp: int, micro_batch_size: int, slices: int) -> bool:
    if tp == 1:
        return True
    lengths = setting.slice_lengths(slices, cp)
    plan = setting.shaped(tp=tp, cp=cp, micro_batch_size=micro_batch_size, slices=lengths)
    if cp > 1 and norms_over_ranks(setting.model, plan):
        return False
    return next(problems(setting.model, plan), None) is None
