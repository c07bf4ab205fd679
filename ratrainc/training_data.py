"""What a run trains and is evaluated on, from what the command line says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.files import is_regular
from ratrain.targets.runtime.checkpoint_series import kept_tokenizer
from ratrain.targets.runtime.data import TEXT_VOCABULARY, TokenStream, builtin_text_tokens, open_tokens
from ratrain.targets.runtime.evaluation import HeldOut, held_out, split_stream

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.tokenizer import TokenizerChoice


BYTES = "bytes"
"""In place of a tokenizer: a byte is a token, whatever else there is."""


@frozen
class DataChoice:
    """Which data, and which part of it is held out."""

    path: str | None = None
    """text or token file; None: the built-in text"""
    dtype: str | None = None
    """type of the tokens of a .bin file; None: the vocabulary decides"""
    tokenizer: str | None = None
    """a tokenizer.json for text; `BYTES`: a byte is a token; None: the tokenizer of weights or checkpoint, if any, else bytes"""
    evaluated: bool = False
    eval_path: str | None = None
    """held-out data; None: the last `eval_fraction` of the data, which is not trained on then"""
    eval_fraction: float = 0.05
    eval_batches: int | None = None
    """batches of one evaluation; None: all there are"""
    weights: str | None = None
    """what the run starts from: a directory may have a tokenizer"""
    resume: str | None = None
    """the checkpoint that the run goes on from, which keeps the tokenizer of its run"""


def open_data(program: Program, choice: DataChoice) -> tuple[TokenStream, HeldOut | None]:
    """The stream to train on, and what to evaluate on.

    Raises `DiagnosticError` RT002 and RT090 where data or tokenizer cannot be used.
    """
    vocab = program.model.vocab_size
    stream = _open(choice.path, choice, vocab)
    if not choice.evaluated:
        return stream, None
    if choice.eval_path is None:
        stream, held = split_stream(stream, choice.eval_fraction)
    else:
        held = _open(choice.eval_path, choice, vocab)
    return stream, held_out(held, program.plan, choice.eval_batches)


def tokenizer_files(choice: DataChoice) -> dict[str, bytes]:
    """The tokenizer that belongs to the run's model, for its checkpoints: the one named, or that of its weights.

    Raises `DiagnosticError` RT002 where it cannot be read.
    """
    from ratrain.targets.runtime.tokenizer import TOKENIZER_FILE, files_of_tokenizer

    if choice.tokenizer not in (None, BYTES):
        return files_of_tokenizer(choice.tokenizer)
    beside = Path(choice.weights or "") / TOKENIZER_FILE
    return files_of_tokenizer(str(beside)) if choice.weights is not None and is_regular(beside) else {}


def _open(path: str | None, choice: DataChoice, vocab_size: int) -> TokenStream:
    if path is not None and Path(path).suffix.lower() == ".bin":
        if choice.tokenizer is not None:
            fail(
                "RT090",
                f"a tokenizer is given, but '{path}' holds token numbers already",
                help="leave out the tokenizer, or name a text file",
            )
        return open_tokens(path, vocab_size=vocab_size, dtype=choice.dtype)
    dtype = None if path == choice.eval_path else choice.dtype  # it may be that of the other file
    tokenizer = _tokenizer(choice)
    smallest = vocab_size if tokenizer is None else TEXT_VOCABULARY
    text = (
        builtin_text_tokens(vocab_size=smallest)
        if path is None
        else open_tokens(path, vocab_size=smallest, dtype=dtype)
    )
    if tokenizer is None:
        return text
    from ratrain.targets.runtime.tokenizer import tokenized

    return tokenized(text, tokenizer, vocab_size=vocab_size)


def _tokenizer(choice: DataChoice) -> TokenizerChoice | None:
    """What makes tokens of a text; None: a byte is a token."""
    from ratrain.targets.runtime.tokenizer import TokenizerChoice, tokenizer_beside

    if choice.tokenizer is not None:
        return None if choice.tokenizer == BYTES else TokenizerChoice(choice.tokenizer, choice.tokenizer)
    if choice.resume is not None:
        kept = kept_tokenizer(choice.resume)
        return None if kept is None else TokenizerChoice(*kept, found="kept in the checkpoint")
    beside = None if choice.weights is None else tokenizer_beside(choice.weights)
    return None if beside is None else TokenizerChoice(beside, beside, found="of the weights")
