"""The data that a run trains on and is evaluated on, as the command line chooses it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import define, evolve, field

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.choices.run_choices import (
    BYTES,
    CHATS,
    COMPLETION_KEY,
    PROMPT_KEY,
    TEXT_KEY,
    TOKENIZERS_EOS,
    DataChoice,
)
from ratrain.targets.runtime.checkpoint.checkpoint_series import kept_tokenizer
from ratrain.targets.runtime.data.chat_template import chat_template
from ratrain.targets.runtime.data.chats import PAIRS, Chats, open_chats
from ratrain.targets.runtime.data.corpus import (
    DOCUMENTS,
    TOKENS,
    data_files,
    ended,
    ended_by,
    file_identity,
    joined,
    kind_of,
    refuse_without_ends,
)
from ratrain.targets.runtime.data.data import TEXT_VOCABULARY, TokenStream, builtin_text_tokens, open_tokens
from ratrain.targets.runtime.data.jsonl import Fields, open_jsonl
from ratrain.targets.runtime.data.packing import packed_whole
from ratrain.targets.runtime.data.tokenizer import tokenizer_of_weights
from ratrain.targets.runtime.engine.evaluation import HeldOut, held_out, split_stream
from ratrain.targets.runtime.settings import Evaluation, Start

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.data.tokenizer import Encoder, TokenizerChoice


def open_data(
    program: Program, choice: DataChoice, evaluation: Evaluation | None = None, start: Start | None = None
) -> tuple[TokenStream, HeldOut | None]:
    """Open the stream to train on, and the held-out data; None if nothing is evaluated.

    `start` may bring a tokenizer. Without held-out paths the last part of the stream is held out. Raises
    `DiagnosticError` RT002 or RT090 if data or tokenizer cannot be used.
    """
    held_out_of = evaluation or Evaluation()
    plan, whole = program.plan, choice.pack == "whole"
    stream, held = open_streams(program.model.vocab_size, choice, held_out_of, start)
    if whole:
        stream = packed_whole(stream, plan.seq_len)
    if held is None:
        return stream, None
    if whole:
        held = packed_whole(held, plan.seq_len, multiple=plan.global_batch)
    return stream, held_out(held, plan, held_out_of.batches)


def open_streams(
    vocab_size: int, choice: DataChoice, held_out_of: Evaluation, start: Start | None = None
) -> tuple[TokenStream, TokenStream | None]:
    """Open the streams of documents to train on and to evaluate on, not yet packed. Raises as `open_data`."""
    files, held_files = data_files(choice.paths), data_files(held_out_of.paths)
    _refuse_unread(choice, [*files, *held_files])
    _refuse_trained_on(files, held_files)
    if choice.train_on != "all":
        _refuse_without_prompts(files, choice.train_on)
        _refuse_without_prompts(held_files if held_out_of.paths else files, choice.train_on)
    reader = _Reader(choice, start or Start(), vocab_size)
    # the token type may be meant for the held-out data alone
    stream = reader.stream(choice.paths, files, choice.dtype if files else None)
    if held_out_of.every is None:
        return stream, None
    if not held_out_of.paths:
        stream, held = split_stream(stream, held_out_of.fraction)
    else:
        of_tokens = _kinds(held_files) == {TOKENS}
        held = reader.stream(held_out_of.paths, held_files, choice.dtype if of_tokens else None)
        trained_on, held_out_parts = reader.read
        for digest in trained_on.keys() & held_out_parts.keys():
            _refuse_known(trained_on[digest], held_out_parts[digest])
    return stream, held


def companion_files(choice: DataChoice, start: Start | None = None) -> dict[str, bytes]:
    """Return the files that checkpoints keep with the model: those next to the weights it starts from, by name.

    A named tokenizer, or that of bytes, replaces theirs. Raises `DiagnosticError` RT002 if a file cannot be read.
    """
    from ratrain.targets.runtime.weights.companions import (
        byte_tokenizer_files,
        companions_in,
        files_of_tokenizer,
        replaced_companions,
    )
    from ratrain.targets.runtime.weights.weights import model_directory

    weights = None if start is None else start.weights
    directory = None if weights is None else model_directory(weights)
    companions = {} if directory is None else companions_in(directory)
    if choice.tokenizer is None:
        return companions
    if choice.tokenizer == BYTES:
        return replaced_companions(companions, byte_tokenizer_files())
    return replaced_companions(companions, files_of_tokenizer(choice.tokenizer))


def _kinds(files: Sequence[str]) -> set[str]:
    """Return the kinds of files, which decide how they are read."""
    return {kind_of(file) for file in files}


def _refuse_unread(choice: DataChoice, files: Sequence[str]) -> None:
    """Refuse, with RT090, a key or a token type that no file of the data would use."""
    if choice.dtype is not None and TOKENS not in _kinds(files):
        what = f"'{files[0]}' is read as text" if files else "the built-in text, which stands in for data, has none"
        fail(
            "RT090",
            f"a token type ({choice.dtype}) is given, but {what}",
            help=f"only a file whose name ends in {TOKENS} holds token numbers: name one with --data, or leave "
            "out --data-dtype",
        )
    if choice.train_on == "all":
        _refuse_idle_key(choice, "completion", "prompt_key", "completion_key")
    if choice.train_on != "all":
        _refuse_idle_key(choice, "all", "text_key")
    if choice.train_on == "completion":
        _refuse_idle_key(choice, "answers", "chat_key", "chat_template")
    elif not choice.of_chats:
        _refuse_idle_key(choice, "answers", "chat_template")
    elif choice.text_key is not None:
        text = f"text_key = {shown(choice.text_key)} is of texts, and chat_key = {shown(choice.chat_key)} of chats"
        fail("RT090", text, help="leave one of them out")
    for words, option, key in (("text", "--text-key", choice.text_key), ("chat", "--chat-key", choice.chat_key)):
        if key is not None and DOCUMENTS not in _kinds(files):
            fail(
                "RT090",
                f"a {words} key ({shown(key)}) is given, but none of the data is JSONL",
                help=f"only a file whose name ends in {DOCUMENTS} has keys: rename it, or leave out {option}",
            )


def _refuse_idle_key(choice: DataChoice, needed: str, *keys: str) -> None:
    """Refuse, with RT090, keys of JSONL lines that only the other choice of `train_on` reads."""
    for key in keys:
        if (name := getattr(choice, key)) is not None:
            text = (
                f"{key} = {shown(name)} changes nothing: train_on is '{choice.train_on}', and it is read "
                f"with '{needed}'"
            )
            fail("RT090", text, help=f"leave it out, or give train_on = '{needed}' (run --train-on {needed})")


def _refuse_trained_on(files: Sequence[str], held_files: Sequence[str]) -> None:
    """Refuse a file that would be both trained on and held out."""
    trained_on = {file_identity(file): file for file in files}
    for file in held_files:
        if (same := trained_on.get(file_identity(file))) is not None:
            _refuse_known(same, file)


def _refuse_known(trained_on: str, held: str) -> NoReturn:
    text = f"'{held}' is held out, and trained on as '{trained_on}': its loss would say nothing of unseen text"
    way_out = (
        "name other data with --eval-data, or leave it out: --eval-every holds out the last part of "
        "--data (--eval-fraction)"
    )
    fail("RT090", text, help=way_out)


def _refuse_without_prompts(files: Sequence[str], train_on: str) -> None:
    """Refuse, with RT090, data of which no part is told from the rest."""
    other = next((file for file in files if _kinds([file]) != {DOCUMENTS}), None)
    if not files or other is not None:
        name = "the built-in text" if other is None else f"'{other}'"
        parts, holding = ("completions", "a prompt and a completion")
        if train_on in CHATS:
            parts, holding = "answers", "a chat"
        text = f"only {parts} shall be in the loss, but {name} does not say what is one"
        fail("RT090", text, help=f"give a JSON object a line, with {holding}, in files that end in {DOCUMENTS}")


@define(eq=False, slots=False)
class _Reader:
    """A reader of data as the run's choice says, for one vocabulary."""

    choice: DataChoice
    start: Start
    vocab_size: int
    read: list[dict[str, str]] = field(factory=list, init=False)
    """names of the parts of each stream, by the digests of their tokens"""

    def stream(self, paths: Sequence[str], files: Sequence[str], dtype: str | None) -> TokenStream:
        """Return the stream of the files that the paths name; of the built-in text without any."""
        kinds = _kinds(files)
        if TOKENS in kinds:
            self._refuse_for_tokens(files, kinds)
            streams = [self._numbers(file, dtype) for file in files]
        else:
            streams = [self._text(file, dtype) for file in files or (None,)]
        self.read.append({one.digest: one.name for one in streams})
        if TOKENS in kinds and self._eos is not None:
            refuse_without_ends(streams[0].name, streams, self._eos)
        name = streams[0].name if paths == (streams[0].name,) or not paths else self._name(paths, files)
        whole = streams[0] if len(streams) == 1 else joined(name, streams)
        plain = len(streams) == 1 and DOCUMENTS not in kinds and self.choice.eos is None
        return whole if plain else evolve(whole, name=name, reading=self._reading(streams, kinds, whole))

    def _name(self, paths: Sequence[str], files: Sequence[str]) -> str:
        """Return a common name for several files."""
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return f"{paths[0]}{others} ({len(files)} files)" if len(files) > 1 else f"{paths[0]}{others}"

    def _reading(self, streams: Sequence[TokenStream], kinds: set[str], whole: TokenStream) -> dict[str, Any]:
        """Return the facts about reading that a checkpoint records."""
        reading: dict[str, Any] = {"files": [[stream.name, stream.digest] for stream in streams]}
        if DOCUMENTS in kinds and self.choice.of_chats:
            reading |= {"train_on": self.choice.train_on, "chat_template": self._chats.template.name}
        elif DOCUMENTS in kinds:
            reading |= dict(zip(self._field_keys, self._fields.names, strict=True))
        if whole.documents is not None:
            reading |= {"documents": len(whole.documents), "eos": self._eos}
        return reading

    def _refuse_for_tokens(self, files: Sequence[str], kinds: set[str]) -> None:
        if len(kinds) > 1:
            named = {kind: next(file for file in files if _kinds([file]) == {kind}) for kind in kinds}
            text = f"'{named.pop(TOKENS)}' holds token numbers, and '{next(iter(named.values()))}' text"
            fail("RT090", text, help="train on one or the other; or make token numbers of the text")
        if self.choice.tokenizer is not None:
            text = f"a tokenizer is given, but '{files[0]}' holds token numbers already"
            fail("RT090", text, help="leave out the tokenizer, or name a text file")
        if self.choice.eos == TOKENIZERS_EOS:
            text = f"--eos tokenizer needs text; '{files[0]}' holds token numbers"
            fail("RT090", text, help="name it by its number, --eos 2")

    def _numbers(self, file: str, dtype: str | None) -> TokenStream:
        """Read token numbers, cut into documents if the token that ends one is known."""
        numbers = open_tokens(file, vocab_size=self.vocab_size, dtype=dtype)
        return numbers if self._eos is None else ended_by(numbers, self._eos)

    def _text(self, file: str | None, dtype: str | None) -> TokenStream:
        """Read a text, or the documents of a JSONL file, each followed by the end token if there is one."""
        if file is not None and _kinds([file]) == {DOCUMENTS} and dtype is None:
            if self.choice.of_chats:
                size = self.vocab_size
                return open_chats(file, self._chats, vocab_size=size, eos=self._eos, encoder=self._encoder)
            return open_jsonl(file, self._fields, vocab_size=self.vocab_size, eos=self._eos, encoder=self._encoder)
        # with a tokenizer the bytes are not tokens yet, so any vocabulary can hold them
        smallest = self.vocab_size if self._encoder is None else TEXT_VOCABULARY
        text = (
            builtin_text_tokens(vocab_size=smallest)
            if file is None
            else open_tokens(file, vocab_size=smallest, dtype=dtype)
        )
        if self._encoder is not None:
            from ratrain.targets.runtime.data.tokenizer import tokenized

            text = tokenized(text, self._encoder, vocab_size=self.vocab_size)
        return text if self._eos is None else ended(text, self._eos)

    @property
    def _field_keys(self) -> tuple[str, ...]:
        """The keys under which a checkpoint records the fields."""
        return ("text_key",) if self.choice.train_on == "all" else ("prompt_key", "completion_key")

    @property
    def _fields(self) -> Fields:
        choice = self.choice
        if choice.train_on == "all":
            return Fields((TEXT_KEY if choice.text_key is None else choice.text_key,))
        prompt = PROMPT_KEY if choice.prompt_key is None else choice.prompt_key
        completion = COMPLETION_KEY if choice.completion_key is None else choice.completion_key
        if prompt == completion:
            text = f"prompt and completion are both the field {shown(prompt)}"
            fail("RT090", text, help="--prompt-key and --completion-key name two fields")
        return Fields((prompt, completion))

    @cached_property
    def _chats(self) -> Chats:
        choice, encoder = self.choice, self._encoder
        path = None if encoder is None else encoder.tokenizer.path
        if path is None and choice.tokenizer is None and self.start.weights is not None:
            path = tokenizer_of_weights(self.start.weights)  # of bytes, which has no encoder
        template = chat_template(choice.chat_template, path)
        whole, last = choice.train_on == "all", choice.train_on == "last-answer"
        named = choice.prompt_key is not None or choice.completion_key is not None
        pair = (choice.prompt_key or PROMPT_KEY, choice.completion_key or COMPLETION_KEY)
        return Chats(template, choice.chat_key, (pair,) if named else PAIRS, counts_all=whole, last_alone=last)

    @cached_property
    def _encoder(self) -> Encoder | None:
        """The tokenizer; None if a byte is a token."""
        choice = _tokenizer(self.choice.tokenizer, self.start, self.vocab_size)
        if choice is None:
            return None
        from ratrain.targets.runtime.data.tokenizer import encoder_of

        return encoder_of(choice)

    @cached_property
    def _eos(self) -> int | None:
        """Token that follows each document; None without one. Raises `DiagnosticError` RT090 if it is unknown."""
        said = self.choice.eos
        if said is None:
            return None
        if said == TOKENIZERS_EOS:
            if self._encoder is None:
                fail(
                    "RT090",
                    "--eos tokenizer needs a tokenizer; this run reads bytes",
                    help="name a token that no text has by its number, --eos 0, or a --tokenizer",
                )
            number = self._encoder.end_of_document()
        elif said.isascii() and said.isdecimal() and len(said) < 20:
            number = int(said)
        else:
            text = f"{shown(said)} is no token that could end a document"
            fail(
                "RT090",
                text,
                help=f"--eos 2 names it by its number, --eos {TOKENIZERS_EOS} takes that of the tokenizer",
            )
        if number >= self.vocab_size:
            text = f"the token at the end of documents, {number}, is outside the vocabulary of {self.vocab_size} tokens"
            fail("RT090", text, help=f"name one below {self.vocab_size}")
        return number


def _tokenizer(named: str | None, start: Start, vocab_size: int) -> TokenizerChoice | None:
    """Return the named tokenizer, else the one of the checkpoint or weights; None if a byte is a token.

    Raises `DiagnosticError` RT090 if weights that are not a model of bytes come without a tokenizer.
    """
    from ratrain.targets.runtime.data.tokenizer import TokenizerChoice
    from ratrain.targets.runtime.weights.companions import is_byte_tokenizer

    if named is not None:
        return None if named == BYTES else TokenizerChoice(named, named)
    if start.checkpoint is not None:
        kept = kept_tokenizer(start.checkpoint)
        return None if kept is None else TokenizerChoice(*kept, found="kept in the checkpoint")
    if start.weights is None:
        return None
    path = tokenizer_of_weights(start.weights)
    if path is None and vocab_size != TEXT_VOCABULARY:
        fail(
            "RT090",
            f"the data is text, and '{start.weights}' has no tokenizer.json: what a token was to these weights, "
            f"of {vocab_size:,} "
            "tokens, is not known",
            help="name their tokenizer with --tokenizer TOKENIZER.json, give token numbers (*.bin), or say "
            "--tokenizer bytes for one "
            "token a byte",
        )
    return None if path is None or is_byte_tokenizer(path) else TokenizerChoice(path, path, found="of the weights")
