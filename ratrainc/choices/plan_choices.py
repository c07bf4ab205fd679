"""What a search for a plan is told beside its model and machine, in groups of what belongs together."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen
class StepSize:
    """What a step trains on, and on how many clusters."""

    clusters: int
    seq_len: int
    """tokens of a sequence"""
    global_batch: int | None = None
    """sequences of a step; None: none are asked for, where only bytes count"""


@frozen
class PlanChoice:
    """Which plans are looked for."""

    strategy: str | None = None
    """by name; None: the default one"""
    schedules: tuple[str, ...] | None = None
    """by name, to choose from, with the memory beside DDR that plans may use: `1f1b+host`; None: that of the strategy, or where none is named those that `whole` searches have"""
    zero_levels: tuple[int, ...] = (0, 1, 2, 3)
    peers: tuple[int, ...] | None = None
    """numbers of tensor peers; None: as `like` says where it has several, else one and all that share out the model"""
    like: str | None = None
    """a plan file whose dtypes, chunks, keys of [compute] and optimizer all plans take, and its tensor peers where it has several"""
    attention: str | None = None
    """how all plans compute attention; None: as `like` says, else fused"""
    attention_mask: str | None = None
    """what tokens see in all plans; None: as `like` says, else all of their sequence before them"""
    logits: str | None = None
    """how all plans hold the head's logits; None: as `like` says, else in chunks"""


@frozen
class SearchEffort:
    """How long and how widely a search goes on."""

    seconds: float = 25.0
    """for the search; an exhaustive one takes as long as it needs"""
    jobs: int = 1
    """processes"""
    exhaustive: bool = False
    """until the bounds prove that nothing is left to gain"""


@frozen
class Questions:
    """What is asked beside the plan."""

    tokens: float | None = None
    """what training on so many takes; None: not asked"""
    robust: bool = False
    """how well the best plans withstand a slow stage and jitter"""
    robust_links: bool = False
    """what becomes of the plan under other links"""
    what_ifs: tuple[str, ...] = ()
    """changes of the machine to plan again for"""


@frozen
class Goal:
    """What the best plan is, and how many are wanted."""

    objective: str = "time"
    keep: int | None = None
    """best plans, no two of them alike; None: one"""
    explain: bool = False
    """say of all that lost what makes it slower, by mechanism"""


@frozen
class FrontChoice:
    """Whether a front is asked for in place of a plan."""

    pareto: Literal["clusters", "memory"] | None = None
    """against what the step time is set; None: nothing"""
    plot: str | None = None
    """where that is drawn"""
