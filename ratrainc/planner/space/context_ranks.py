"""Numbers of context ranks to consider: a search has them of itself where sequences are long.

They divide what one sequence costs, in bytes and seconds, and exchange keys and values for it. Of short sequences
replicas, stages and slices divide a step as well, without that exchange; so a search of these has context ranks only
where they are asked for, and takes no longer. For the same reason ranks that nobody asked for have many tokens of a
sequence each, and one sequence in a micro-batch: of several, smaller micro-batches come first. Example: 131,072 tokens
on 24 clusters give 1, 2, 4 and 8; 3 ranks would cut them into 6 runs, which are not equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrainc.choices.plan_choices import LEAST_TOKENS, LONG_SEQUENCE
from ratrain.ratrainc.planner.space.asked_ranks import Problem, check_asked, problem_of
from ratrain.ratrainc.planner.space.search_setting import WHOLE_KEYS
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.ratrainc.planner.space.tilings import divisors

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.space.search_setting import SearchSetting


def choose_cp(setting: SearchSetting, clusters: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers of context ranks to choose from: `asked`, else 1, and for long sequences all possible ones.

    All of these leave each rank `LEAST_TOKENS` tokens of a sequence or more. Possible ones divide the clusters, and cut
    every sequence into equal runs. Raises `DiagnosticError` RT064 if an asked number does not, or exceeds the clusters.
    """
    if asked is None:
        tokens = setting.template.seq_len
        most = tokens // LEAST_TOKENS if tokens >= LONG_SEQUENCE else 1
        return tuple(number for number in possible(setting, clusters) if number <= most)
    check_asked(asked, clusters, "context", "cp", lambda number: _problem(setting, number))
    return tuple(sorted(asked))


def left_out(setting: SearchSetting, clusters: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Return possible numbers of context ranks that `choose_cp` leaves out unless they are asked for."""
    if asked is not None:
        return ()
    chosen = choose_cp(setting, clusters, asked)
    return tuple(number for number in possible(setting, clusters) if number not in chosen)


def possible(setting: SearchSetting, clusters: int) -> tuple[int, ...]:
    """Return the numbers of context ranks that divide the clusters and can have what every plan of a search has."""
    return tuple(number for number in divisors(clusters) if _problem(setting, number) is None)


def _problem(setting: SearchSetting, contexts: int) -> Problem | None:
    """Return why `contexts` context ranks cannot compute a template's sequences, and a way out; None if they can."""
    if contexts == 1:
        return None
    # of a template alone it may be heads: some numbers of tensor-parallel ranks need keys, and those have these
    given = setting.template
    exchange, groups = (given.context_exchange, given.context_groups) if given.cp > 1 else WHOLE_KEYS
    shape = Shape(1, 1, 1, 1, 0, "last", cp=contexts, exchange=exchange, groups=groups)
    return problem_of(check_plan, shape.plan(setting, ()), setting.model)
