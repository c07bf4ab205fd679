"""Text generation (`generate`): continue a prompt with the model of a checkpoint or of a Hugging Face directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from attrs import evolve, field, frozen
from threadpoolctl import threadpool_limits

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import is_regular, is_there
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.choices.run_choices import BYTES, NO_EOS, TOKENIZERS_EOS, Generation, Prompt
from ratrain.ratrainc.console.progress import OnProgress, Progress, unheard
from ratrain.targets.runtime.arena.tensor_file import Float32
from ratrain.targets.runtime.checkpoint.checkpoint import MANIFEST_FILE
from ratrain.targets.runtime.checkpoint.checkpoint_series import (
    facts_of,
    kept_tokenizer,
    latest_biases,
    latest_run,
)
from ratrain.targets.runtime.checkpoint.whole_weights import whole_weights
from ratrain.targets.runtime.data.chat_template import AnswerError, chat_template
from ratrain.targets.runtime.data.data import BYTE, TEXT_VOCABULARY
from ratrain.targets.runtime.data.tokenizer import Encoder, TokenizerChoice, encoder_of, names_end, tokenizer_of_weights
from ratrain.targets.runtime.engine.forward import Chooser, ForwardModel, KeyHolders, OneHolder
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.weights.companions import GENERATION_FILE, is_byte_tokenizer, read_companion
from ratrain.targets.runtime.weights.weight_source import WeightSource
from ratrain.targets.runtime.weights.weights import CONFIG_FILE, read_weights

_EOS_KEY = "eos_token_id"


@frozen
class Generated:
    """A generated text, its tokens, and the seconds it took."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """tokens after the prompt, with the one that ended the text"""
    whole: str | None
    """prompt and continuation; None without a tokenizer"""
    text: str | None
    """the continuation; None without a tokenizer"""
    ended: bool
    """True if a token ended the text, False if the most tokens asked for did"""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return {
            "prompt_tokens": list(self.prompt),
            "tokens": list(self.tokens),
            "text": self.text,
            "ended": self.ended,
            "seconds": self.seconds,
        }


@frozen
class _Origin:
    """A model with its weights, and facts about its training."""

    model: ModelConfig
    source: WeightSource
    dtype: str
    ends: frozenset[int]
    """tokens that end a text"""
    takes_bytes: bool
    """True if its run read each byte as a token"""
    tokenizer: TokenizerChoice | None
    biases: Mapping[Block, Float32] = field(factory=dict)
    """biases with which its routers choose, by block, if they do"""


@frozen
class _Language:
    """The functions from text to tokens and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    encoder: Encoder | None = None


def generate(
    path: str,
    prompt: Prompt,
    asked: Generation,
    progress: OnProgress = unheard,
    holders: KeyHolders | None = None,
) -> Generated:
    """Continue a prompt token by token; keys and values of all tokens before are kept.

    `progress` is told of each token; the first may take long, since new kernels are compiled for it. `holders` are
    ranks that have keys and values between them, each of which makes this call; without them this process has all.

    Raises `DiagnosticError` as the readers of checkpoints and weights do, and RT094 if the prompt, the tokenizer or a
    length does not fit the model, or its logits are not finite.
    """
    origin = _opened(path, asked.init)
    language = _language(path, origin, asked.tokenizer)
    prompt = _rendered(path, prompt, asked)
    tokens = _tokens_of(path, prompt, language, origin.model)
    _check_length(len(tokens), asked.tokens, origin.model)
    ends = _ends(asked.eos, origin, language)
    if prompt.chat is not None and asked.eos is None and language is not None and language.encoder is not None:
        ends |= frozenset({language.encoder.end_of_document()} if names_end(language.encoder.tokenizer.path) else ())
    start = time.perf_counter()
    with threadpool_limits(limits=1):  # kernels share their work themselves
        kernels = kernel_set(asked.kernels, asked.threads)
        dtype = Dtype(asked.dtype or origin.dtype)
        forward = ForwardModel(origin.model, origin.source, dtype, kernels, origin.biases)
        added = _continuation(forward, tokens, ends, asked, path, progress, holders or OneHolder())
    seconds = time.perf_counter() - start
    whole = None if language is None else language.decode([*tokens, *added])
    text = None if language is None or whole is None else _behind(language, tokens, added, whole)
    return Generated(tuple(tokens), tuple(added), whole, text, bool(added) and added[-1] in ends, seconds)


def _continuation(
    forward: ForwardModel,
    prompt: Sequence[int],
    ends: frozenset[int],
    asked: Generation,
    path: str,
    progress: OnProgress,
    holders: KeyHolders,
) -> list[int]:
    chooser = Chooser(asked.sampling)
    reading = forward.reading(len(prompt) + asked.tokens - 1, holders)  # the last token is never read
    added: list[int] = []
    while len(added) < asked.tokens and not (added and added[-1] in ends):
        logits = reading.read(added[-1:] or prompt)
        if not np.isfinite(logits).all():
            fail(
                "RT094",
                f"the logits behind {len(prompt) + len(added)} tokens are not finite: '{path}' has weights that "
                "have diverged, or that "
                "do not fit the type of its activations",
                help="--dtype f32 has room for larger values",
            )
        chosen = np.array([chooser.choose(logits)])
        holders.from_rank(chosen, 0)  # processors may differ in a bit of a logit; all ranks go on with one token
        added.append(int(chosen[0]))
        progress(Progress(len(added), asked.tokens, "tokens"))
    return added


def _behind(language: _Language, prompt: Sequence[int], added: Sequence[int], whole: str) -> str:
    """Return the text of the added tokens.

    It is cut from the whole text, because a tokenizer may join tokens across the border. If the prompt alone decodes
    differently, the added tokens are decoded alone.
    """
    before = language.decode(prompt)
    return whole[len(before) :] if whole.startswith(before) else language.decode(added)


def _rendered(path: str, prompt: Prompt, asked: Generation) -> Prompt:
    """Return a chat's prompt as a text: what the user says, and the words that ask for an answer.

    Raises `DiagnosticError` RT002 and RT090 where there is no template, RT094 where it does not take the chat.
    """
    if prompt.chat is None:
        return prompt
    tokenizer = None if asked.tokenizer == BYTES else asked.tokenizer
    if asked.tokenizer is None:
        folder = Path(path)
        kept = None if is_there(folder / CONFIG_FILE) and not is_there(folder / MANIFEST_FILE) else kept_tokenizer(path)
        tokenizer = tokenizer_of_weights(path) if kept is None else kept[0]
    template = chat_template(asked.chat_template, tokenizer)
    try:
        return evolve(prompt, text=template.text([{"role": "user", "content": prompt.chat}], asks=True))
    except AnswerError as error:
        fail("RT094", f"the prompt {error}", help="--chat-template FILE.jinja names another template")


def _opened(path: str, init: str | None) -> _Origin:
    folder = Path(path)
    if is_there(folder / CONFIG_FILE) and not is_there(folder / MANIFEST_FILE):
        if init is not None:
            fail("RT094", f"'{path}' holds a whole model: other weights change nothing", help="leave --init out")
        model = load_model(str(folder))
        tokenizer_path = tokenizer_of_weights(path)
        takes_bytes = tokenizer_path is not None and is_byte_tokenizer(tokenizer_path)
        tokenizer = None if tokenizer_path is None or takes_bytes else TokenizerChoice(tokenizer_path, tokenizer_path)
        source = read_weights(path, model)
        return _Origin(model, source, Dtype.F32.value, _ends_of_directory(folder, model), takes_bytes, tokenizer)
    tuned = next((name for name in ("best", "last") if is_there(folder / name / MANIFEST_FILE)), None)
    if tuned is not None and not is_there(folder / MANIFEST_FILE):
        text = f"'{path}' is a folder of 'ratrainc finetune', which holds several checkpoints"
        fail("RT094", text, help=f"name one: {folder / tuned}")
    model, source = whole_weights(path, init)
    run = latest_run(path)
    plan, facts = run.get("plan"), facts_of(run)
    dtype = plan.get("view_dtype") if isinstance(plan, dict) else None
    known = dtype if dtype in {item.value for item in Dtype} else Dtype.F32.value
    eos, kept = facts.get("eos"), kept_tokenizer(path)
    tokenizer = None if kept is None else TokenizerChoice(*kept)
    ends = frozenset({eos} if isinstance(eos, int) else ())
    takes_bytes, biases = facts.get("token") == BYTE, latest_biases(path)
    return _Origin(model, source, known, ends, takes_bytes=takes_bytes, tokenizer=tokenizer, biases=biases)


def _ends_of_directory(folder: Path, model: ModelConfig) -> frozenset[int]:
    """Return the `eos_token_id` of generation_config.json, else of config.json: none, one or several tokens.

    Raises `DiagnosticError` RT094 if generation_config.json is not JSON.
    """
    said = model.inert.get(_EOS_KEY)
    if is_regular(folder / GENERATION_FILE):
        try:
            held = json.loads(read_companion(folder, GENERATION_FILE))
        except (ValueError, RecursionError):
            fail("RT094", f"'{folder / GENERATION_FILE}' is no JSON", help="put it right, or remove it")
        said = held.get(_EOS_KEY, said) if isinstance(held, dict) else said
    return frozenset(token for token in (said if isinstance(said, list | tuple) else [said]) if isinstance(token, int))


def _language(path: str, origin: _Origin, named: str | None) -> _Language | None:
    """Return the functions between text and tokens; None if neither a tokenizer nor bytes are known to fit.

    `named` is a tokenizer's path, `BYTES`, or None for the origin's own. Raises `DiagnosticError` RT094 for bytes and a
    vocabulary of fewer than 256 tokens.
    """
    holds_bytes = origin.model.vocab_size >= TEXT_VOCABULARY
    if named == BYTES or (named is None and origin.takes_bytes and holds_bytes):
        if not holds_bytes:
            fail(
                "RT094",
                f"a byte is no token of '{path}': its vocabulary has {origin.model.vocab_size} tokens, a byte "
                f"{TEXT_VOCABULARY} values",
                help="give the prompt's tokens by their numbers: --prompt-tokens 1,2,3",
            )
        return _Language(lambda text: list(text.encode(errors="replace")), _text_of_bytes)
    choice = origin.tokenizer if named is None else TokenizerChoice(named, named)
    if choice is None:
        return None
    encoder = encoder_of(choice)
    return _Language(lambda text: encoder("the prompt", [text])[0].tolist(), encoder.text, encoder)


def _text_of_bytes(tokens: Sequence[int]) -> str:
    """Decode bytes; tokens beyond 255, such as the end of a document, are left out."""
    return bytes(token for token in tokens if token < TEXT_VOCABULARY).decode(errors="replace")


def _tokens_of(path: str, prompt: Prompt, language: _Language | None, model: ModelConfig) -> list[int]:
    tokens = list(prompt.tokens or ())
    if prompt.text is not None:
        if language is None:
            fail(
                "RT094",
                f"nothing says how '{path}' makes tokens of text: no tokenizer is with it",
                help="name one with --tokenizer, say --tokenizer bytes for one token a byte, or give numbers: "
                "--prompt-tokens 1,2,3",
            )
        tokens = language.encode(prompt.text)
    if not tokens:
        fail(
            "RT094",
            "the prompt has no token, and the first token has nothing to follow",
            help="give a prompt of a word or more",
        )
    outside = next((token for token in tokens if not 0 <= token < model.vocab_size), None)
    if outside is not None:
        text = f"the prompt's token {outside} is outside the vocabulary of {model.vocab_size} tokens of '{path}'"
        way_out = (
            "use the tokenizer of this model" if prompt.tokens is None else f"use numbers below {model.vocab_size}"
        )
        fail("RT094", text, help=way_out)
    return tokens


def _check_length(prompt: int, added: int, model: ModelConfig) -> None:
    """Refuse, with RT094, more tokens than learned positions; the last token is never read, so it needs none."""
    most = model.learned_positions
    if most is not None and prompt + added - 1 > most:
        text = (
            f"{number_of(added, 'token')} behind a prompt of {prompt} are more than the {most} "
            f"learned positions of {model.name}"
        )
        if prompt > most:
            fail("RT094", text, help="shorten the prompt")
        fail("RT094", text, help=f"ask for {number_of(most - prompt + 1, 'token')} at most, or shorten the prompt")


def _ends(said: str | None, origin: _Origin, language: _Language | None) -> frozenset[int]:
    """Return the tokens that end a text."""
    if said is None:
        return origin.ends
    if said == NO_EOS:
        return frozenset()
    if said == TOKENIZERS_EOS:
        if language is None or language.encoder is None:
            _no_end(said, "there is no tokenizer")
        return frozenset({language.encoder.end_of_document()})
    if not (said.isascii() and said.isdecimal() and int(said[:20]) < origin.model.vocab_size):
        _no_end(said, f"the vocabulary has {origin.model.vocab_size} tokens")
    return frozenset({int(said)})


def _no_end(said: str, why: str) -> NoReturn:
    way_out = (
        f"--eos 2 names a token by its number, --eos {TOKENIZERS_EOS} takes the tokenizer's, --eos {NO_EOS} goes on"
    )
    fail("RT094", f"{shown(said)} is no token that could end a text: {why}", help=way_out)
