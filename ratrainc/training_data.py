"""What a run trains and is evaluated on, from what the command line says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain_ir.diagnostics import fail
from targets.runtime.data import TokenStream, builtin_text_tokens, open_tokens
from targets.runtime.evaluation import HeldOut, held_out, split_stream

if TYPE_CHECKING:
    from targets.program import Program


@frozen
class DataChoice:
    """Which data, and which part of it is held out."""

    path: str | None = None
    """text or token file; None: the built-in text"""
    dtype: str | None = None
    """type of the tokens of a .bin file; None: the vocabulary decides"""
    tokenizer: str | None = None
    """a tokenizer.json for text; None: a byte is a token"""
    evaluated: bool = False
    eval_path: str | None = None
    """held-out data; None: the last `eval_fraction` of the data, which is not trained on then"""
    eval_fraction: float = 0.05
    eval_batches: int | None = None
    """batches of one evaluation; None: all there are"""


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


def _open(path: str | None, choice: DataChoice, vocab_size: int) -> TokenStream:
    if choice.tokenizer is None:
        if path is None:
            return builtin_text_tokens(vocab_size=vocab_size)
        is_text = Path(path).suffix.lower() != ".bin" and path == choice.eval_path
        return open_tokens(path, vocab_size=vocab_size, dtype=None if is_text else choice.dtype)
    from targets.runtime.tokenizer import tokenized

    if path is not None and Path(path).suffix.lower() == ".bin":
        fail(
            "RT090",
            f"a tokenizer is given, but '{path}' holds token numbers already",
            help="leave out the tokenizer, or name a text file",
        )
    text = builtin_text_tokens() if path is None else open_tokens(path, vocab_size=256, dtype=choice.dtype)
    return tokenized(text, choice.tokenizer, vocab_size=vocab_size)
