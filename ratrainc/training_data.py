"""What a run trains and is evaluated on, from what the command line says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.targets.runtime.checkpoint_series import kept_tokenizer
from ratrain.targets.runtime.data import TEXT_VOCABULARY, TokenStream, builtin_text_tokens, open_tokens
from ratrain.targets.runtime.evaluation import HeldOut, held_out, split_stream
from ratrain.targets.runtime.settings import Evaluation, Start

if TYPE_CHECKING:
    from ratrain.ratrainc.run_choices import DataChoice
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.tokenizer import TokenizerChoice


BYTES = "bytes"
"""In place of a tokenizer: a byte is a token, whatever else there is."""


def open_data(
    program: Program, choice: DataChoice, evaluation: Evaluation | None = None, start: Start | None = None
) -> tuple[TokenStream, HeldOut | None]:
    """The stream to train on, and what to evaluate on; what a run starts from may have a tokenizer.

    Raises `DiagnosticError` RT002 and RT090 where data or tokenizer cannot be used.
    """
    held_out_of, vocab = evaluation or Evaluation(), program.model.vocab_size
    tokenizer = partial(_tokenizer, choice.tokenizer, start or Start(), vocab)
    stream = _open(choice.path, choice, held_out_of, tokenizer, vocab)
    if held_out_of.every is None:
        return stream, None
    if held_out_of.path is None:
        stream, held = split_stream(stream, held_out_of.fraction)
    else:
        held = _open(held_out_of.path, choice, held_out_of, tokenizer, vocab)
    return stream, held_out(held, program.plan, held_out_of.batches)


def companion_files(choice: DataChoice, start: Start | None = None) -> dict[str, bytes]:
    """The files that belong beside the run's model, for its checkpoints: those beside the weights it starts from.

    Of tokenizers it is the one that was named, of bytes too. Raises `DiagnosticError` RT002 where one cannot be read.
    """
    from ratrain.targets.runtime.companions import (
        byte_tokenizer_files,
        companions_in,
        files_of_tokenizer,
        replaced_companions,
    )
    from ratrain.targets.runtime.weights import model_directory

    weights = None if start is None else start.weights
    directory = None if weights is None else model_directory(weights)
    beside = {} if directory is None else companions_in(directory)
    if choice.tokenizer is None:
        return beside
    if choice.tokenizer == BYTES:
        return replaced_companions(beside, byte_tokenizer_files())
    return replaced_companions(beside, files_of_tokenizer(choice.tokenizer))


def _open(
    path: str | None,
    choice: DataChoice,
    evaluation: Evaluation,
    tokenizer_of_text: Callable[[], TokenizerChoice | None],
    vocab_size: int,
) -> TokenStream:
    if path is not None and Path(path).suffix.lower() == ".bin":
        if choice.tokenizer is not None:
            fail(
                "RT090",
                f"a tokenizer is given, but '{path}' holds token numbers already",
                help="leave out the tokenizer, or name a text file",
            )
        return open_tokens(path, vocab_size=vocab_size, dtype=choice.dtype)
    dtype = None if path == evaluation.path else choice.dtype  # it may be that of the other file
    tokenizer = tokenizer_of_text()
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


def _tokenizer(named: str | None, start: Start, vocab_size: int) -> TokenizerChoice | None:
    """What makes tokens of a text: what was named, or what the run starts from has; None: a byte is a token.

    Raises `DiagnosticError` RT090 where weights that are no model of bytes come without a tokenizer: somebody has to say what a token is.
    """
    from ratrain.targets.runtime.companions import is_byte_tokenizer
    from ratrain.targets.runtime.tokenizer import TokenizerChoice, tokenizer_beside

    if named is not None:
        return None if named == BYTES else TokenizerChoice(named, named)
    if start.checkpoint is not None:
        kept = kept_tokenizer(start.checkpoint)
        return None if kept is None else TokenizerChoice(*kept, found="kept in the checkpoint")
    if start.weights is None:
        return None
    beside = tokenizer_beside(start.weights)
    if beside is None and vocab_size != TEXT_VOCABULARY:
        fail(
            "RT090",
            f"the data is text, and '{start.weights}' has no tokenizer.json: what a token was to these weights, of {vocab_size:,} "
            "tokens, is not known",
            help="name their tokenizer with --tokenizer TOKENIZER.json, give token numbers (*.bin), or say --tokenizer bytes for one "
            "token a byte",
        )
    return (
        None if beside is None or is_byte_tokenizer(beside) else TokenizerChoice(beside, beside, found="of the weights")
    )
