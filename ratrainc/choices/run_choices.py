"""What a run is told beside its program and its `RunSettings`, and what `generate` is, in groups of what belongs together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from attrs import evolve, field, frozen

from ratrain.targets.runtime.ranks.rank_layout import RankOrder, Reduction
from ratrain.targets.runtime.settings import Sampling

if TYPE_CHECKING:
    from ratrain.targets.runtime.training.training import TimedStep  # noqa: TC004 - of a type alone, and `run --help` is quick

BYTES = "bytes"
"""In place of a tokenizer: a byte is a token, whatever else there is."""

TEXT_KEY = "text"
"""The field of a JSONL line that is its document where nobody says another."""
PROMPT_KEY, COMPLETION_KEY = "prompt", "completion"
TOKENIZERS_EOS = "tokenizer"
"""In place of a token's number: the one that the tokenizer has for the end of a document."""

NO_EOS = "none"
"""In place of a token that ends a text: nothing ends it but its length."""


@frozen
class DataChoice:
    """Which data a run trains on, and what makes tokens of them."""

    paths: tuple[str, ...] = ()
    """texts, JSONL, or token files, and folders of them; none: the built-in text"""
    dtype: str | None = None
    """type of the tokens of a .bin file; None: the vocabulary decides"""
    tokenizer: str | None = None
    """a tokenizer.json for text; `BYTES`: a byte is a token; None: the tokenizer of weights or checkpoint, if any, else bytes"""
    text_key: str | None = None
    """the field of a JSONL line that is its document; None: `TEXT_KEY`"""
    train_on: Literal["all", "completion"] = "all"
    """which tokens are in the loss: all, or those of the completions of JSONL lines"""
    prompt_key: str | None = None
    """with `completion`, the field of a line that is its prompt; None: `PROMPT_KEY`"""
    completion_key: str | None = None
    """the field that is its completion; None: `COMPLETION_KEY`"""
    eos: str | None = None
    """what follows each document: a token's number, or `TOKENIZERS_EOS`; None: nothing"""


@frozen
class Ranks:
    """Where ranks run, and how they meet."""

    engine: Literal["local", "mpi", "torch"] = "local"
    """all in this process, or each in its own that mpirun or torchrun started"""
    order: RankOrder = "pp-first"
    """of the processes"""
    reduction: Reduction = "ordered"
    """sums over processes: in rank order, or as the library likes that moves the bytes"""


@frozen
class Prompt:
    """What a text begins with: words, or tokens."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None


@frozen
class Generation:
    """How a text is made."""

    tokens: int
    """the most that are added to the prompt"""
    sampling: Sampling = field(factory=Sampling)
    tokenizer: str | None = None
    """a tokenizer.json, or `BYTES`; None: that of the run or the directory"""
    eos: str | None = None
    """the token that ends a text: a number, `TOKENIZERS_EOS` or `NO_EOS`; None: that of the run's documents or of config.json"""
    dtype: str | None = None
    """of weights and activations; None: that of the run's plan, and f32 for a directory"""
    kernels: str = "fast"
    threads: int = 1


@frozen
class TrackerChoice:
    """A tracker of experiments that a run writes its figures to."""

    kind: str
    """`tensorboard` or `wandb`"""
    place: str | None = None
    """TensorBoard's folder, or the project of W&B; None: as the resumed run, else one of its own"""

    def __str__(self) -> str:
        return self.kind if self.place is None else f"{self.kind}:{self.place}"


@frozen
class Outputs:
    """Files and trackers that a run writes beside its state; None: not written."""

    log: str | None = None
    """a JSON line a step"""
    plot: str | None = None
    """the losses as a picture"""
    profile: str | None = None
    """the wall time of every op"""
    trackers: tuple[TrackerChoice, ...] = ()


@frozen
class Display:
    """What a run shows as it goes on."""

    quiet: bool = False
    """no words on stdout"""
    live: bool = False
    """a dashboard, where this is a terminal"""
    each_step: Callable[[TimedStep], None] | None = None
    """hears of every step when it is done; what it raises ends the run"""


def of_a_process(outputs: Outputs, display: Display, *, speaks: bool) -> tuple[Outputs, Display]:
    """What a process of a run writes and shows itself: all, or, where another one speaks for it, only its part of the profile."""
    if speaks:
        return outputs, display
    return evolve(outputs, log=None, plot=None, trackers=()), Display(quiet=True)
