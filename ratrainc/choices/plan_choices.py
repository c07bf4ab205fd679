"""Options of a search for a plan, apart from model and machine, in groups."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from ratrain.ratrain_ir.config.plan import Plan

LONG_SEQUENCE = 1 << 15
"""Tokens of a sequence from which on a search has context ranks that nobody asked for."""
LEAST_TOKENS = LONG_SEQUENCE // 8
"""Least tokens of a sequence that such a context rank has."""


@frozen
class StepSize:
    """The sequences of a step, and the number of clusters."""

    clusters: int
    seq_len: int
    """tokens of a sequence"""
    global_batch: int | None = None
    """sequences of a step; None if only bytes count"""


@frozen
class PlanChoice:
    """Restrictions on the plans that are searched."""

    strategy: str | None = None
    """name of a strategy; None: the default one"""
    schedules: tuple[str, ...] | None = None
    """names of schedules to choose from, each with the memory that plans may use in addition to DDR (`1f1b+host`);
    None: the strategy's schedule, or without a strategy all usual ones
    """
    zero_levels: tuple[int, ...] = (0, 1, 2, 3)
    peers: tuple[int, ...] | None = None
    """numbers of tensor-parallel ranks; None: `tp` of `like` if above 1, else 1 and all that divide the model"""
    contexts: tuple[int, ...] | None = None
    """numbers of context ranks; None: `cp` of `like` if above 1, else 1, and for long sequences all possible ones"""
    expert_ranks: tuple[int, ...] | None = None
    """numbers of replicas that share out experts; None: `ep` of `like` if above 1, else 1 and all that divide these"""
    like: str | Plan | None = None
    """plan, or its file, whose types, sums, chunks, optimizer and keys of [compute] and [train] all plans take, and
    `tp`, `cp` and `ep` if they are above 1
    """
    dtype: str | None = None
    """type of views and gradients of all plans: `bf16`, `f16` or `f32`; None: as in `like`, else that of the machine's
    target, bf16 on GPUs
    """
    attention: str | None = None
    """`compute.attention` of all plans; None: as in `like`, else fused"""
    attention_mask: str | None = None
    """`compute.attention_mask` of all plans; None: as in `like`, else causal"""
    logits: str | None = None
    """`compute.logits` of all plans; None: as in `like`, else chunked"""


@frozen
class SearchEffort:
    """Limits of a search."""

    seconds: float = 25.0
    """seconds of search; an exhaustive search ignores them"""
    jobs: int = 1
    """number of processes"""
    exhaustive: bool = False
    """search until the bounds prove that nothing is left to gain"""


@frozen
class Questions:
    """Further questions about the plan."""

    tokens: float | None = None
    """tokens of a whole training, to price it; None: not asked"""
    robust: bool = False
    """time the best plans with a slow stage and with jitter"""
    robust_links: bool = False
    """time the plan with other link constants"""
    what_ifs: tuple[str, ...] = ()
    """changes of the machine to plan again for"""


@frozen
class Goal:
    """The objective, and the number of plans wanted."""

    objective: str = "time"
    keep: int | None = None
    """number of best plans to keep, no two alike; None: one"""
    explain: bool = False
    """explain by mechanism why each rejected plan is slower"""


@frozen
class FrontChoice:
    """Request for a Pareto front in place of one plan."""

    pareto: Literal["clusters", "memory"] | None = None
    """what the step time is traded against: `clusters` or `memory`; None: no front"""
    plot: str | None = None
    """file to draw the front in"""
