"""Options of `run` (apart from its program and `RunSettings`) and of `generate`, in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from attrs import evolve, field, frozen

from ratrain.targets.runtime.ranks.rank_layout import RankOrder, Reduction
from ratrain.targets.runtime.settings import Sampling

if TYPE_CHECKING:
    from ratrain.targets.runtime.training.training import TimedStep  # noqa: TC004 - of a type alone, and `run --help` is quick

BYTES = "bytes"
"""Tokenizer value that makes each byte a token, even if weights have a tokenizer."""

TEXT_KEY = "text"
"""Default field of a JSONL line that holds its document."""
PROMPT_KEY, COMPLETION_KEY = "prompt", "completion"
CHATS = ("answers", "last-answer")
"""Values of `train_on` of lines that are chats."""
TOKENIZERS_EOS = "tokenizer"
"""End-of-document value that stands for the tokenizer's `eos_token`."""

NO_EOS = "none"
"""End-of-text value with which only the length ends a text."""


@frozen
class DataChoice:
    """The data of a run, and the way it becomes tokens."""

    paths: tuple[str, ...] = ()
    """text, JSONL or token files, or folders of them; empty: the built-in text"""
    dtype: str | None = None
    """integer type of the tokens of a .bin file; None: the vocabulary decides"""
    tokenizer: str | None = None
    """path of a tokenizer.json, or `BYTES`; None: the tokenizer of weights or checkpoint, if any, else bytes"""
    text_key: str | None = None
    """field of a JSONL line that holds its document; None: `TEXT_KEY`"""
    train_on: Literal["all", "completion", "answers", "last-answer"] = "all"
    """tokens that count in the loss: `all`; `completion` for the completions of JSONL lines; of lines with chats the
    `answers`, or the `last-answer` of each"""
    prompt_key: str | None = None
    """with `completion`, the field of a line that holds its prompt; None: `PROMPT_KEY`"""
    completion_key: str | None = None
    """with `completion`, the field that holds the completion; None: `COMPLETION_KEY`"""
    chat_key: str | None = None
    """field of a JSONL line that holds a chat, even if `all` counts; None: `messages`, or `conversations`"""
    chat_template: str | None = None
    """file of the template that makes a text of a chat, or `CHATML`; None: the tokenizer's own"""
    eos: str | None = None
    """token that follows each document: its number, or `TOKENIZERS_EOS`; None: no token"""

    pack: Literal["cut", "whole"] = "cut"
    """documents in sequences: one after the other, cut where a sequence ends; or `whole`, as many as fit in each"""

    @property
    def of_chats(self) -> bool:
        """True if lines of JSONL are chats."""
        return self.train_on in CHATS or self.chat_key is not None


@frozen
class Ranks:
    """The processes of ranks, and their sums."""

    engine: Literal["local", "mpi", "torch"] = "local"
    """`local`: all ranks in this process; `mpi` or `torch`: each in its own, started by mpirun or torchrun"""
    order: RankOrder = "pp-first"
    """order of the ranks over the processes"""
    reduction: Reduction = "ordered"
    """sums over processes: `ordered` by rank, or `fast`, in an order that the library chooses"""


@frozen
class Prompt:
    """The beginning of a text, as words or as token numbers; or what a user says in a chat."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    chat: str | None = None
    """what a user says: the prompt is the text that the chat template makes of it, up to the answer"""


@frozen
class Generation:
    """Length of a generated text, rule by which tokens are drawn, and where tokenizer and weights come from."""

    tokens: int
    """most tokens added to the prompt"""
    sampling: Sampling = field(factory=Sampling)
    tokenizer: str | None = None
    """path of a tokenizer.json, or `BYTES`; None: the tokenizer of the run or the directory"""
    eos: str | None = None
    """token that ends a text: a number, `TOKENIZERS_EOS` or `NO_EOS`; None: as in the run's documents or config.json"""
    init: str | None = None
    """weights that the run began with, of a checkpoint that holds only what trains"""
    chat_template: str | None = None
    """file of the template of chats, or `CHATML`; None: the tokenizer's own"""
    dtype: str | None = None
    """type of weights and activations; None: the type in the run's plan, and f32 for a directory"""
    kernels: str = "fast"
    threads: int = 1


@frozen
class TrackerChoice:
    """An experiment tracker that a run writes its figures to."""

    kind: str
    """`tensorboard` or `wandb`"""
    place: str | None = None
    """TensorBoard's folder, or W&B's project; None: as in the resumed run, else a new one"""

    def __str__(self) -> str:
        return self.kind if self.place is None else f"{self.kind}:{self.place}"


@frozen
class Outputs:
    """Files and trackers that a run writes in addition to its state; None: not written."""

    log: str | None = None
    """log file with a JSON line for each step"""
    plot: str | None = None
    """picture of the losses"""
    profile: str | None = None
    """profile with the wall time of every op"""
    trackers: tuple[TrackerChoice, ...] = ()


@frozen
class Display:
    """Output of a run while it goes on."""

    quiet: bool = False
    """True: nothing on stdout"""
    live: bool = False
    """True: a dashboard, if stderr is a terminal"""
    each_step: Callable[[TimedStep], None] | None = None
    """called after every step; an exception that it raises ends the run"""


def of_a_process(outputs: Outputs, display: Display, *, speaks: bool) -> tuple[Outputs, Display]:
    """Return the outputs of this process: all, or only its part of the profile if another process reports for it."""
    if speaks:
        return outputs, display
    return evolve(outputs, log=None, plot=None, trackers=()), Display(quiet=True)
