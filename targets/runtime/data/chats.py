"""Documents from chats: a JSONL line with messages becomes a text by a template; its answers are in the loss.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}
    {"prompt": "Hello", "completion": "Hi"}
    {"instruction": "Say hello", "input": "in German", "output": "Hallo"}       what is said: the first two, a line each

The whole text is tokenised at once, as a model that is used sees it; a token is in the loss if its first character is
in an answer. A field `tools` is given to the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.data.chat_template import ASSISTANT, AnswerError, ChatTemplate, has_marks
from ratrain.targets.runtime.data.data import TokenStream, check_text_vocabulary, checked_stream, digest_of
from ratrain.targets.runtime.data.documents import Documents, Positions, bounds_of, end_tokens
from ratrain.targets.runtime.data.jsonl import TOGETHER, Line, are_messages, lines_of, object_in, refuse_line
from ratrain.targets.runtime.data.token_file import text_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.targets.runtime.data.chat_template import Chat, Spans
    from ratrain.targets.runtime.data.tokenizer import Encoder

MESSAGES_KEYS = ("messages", "conversations")
"""Fields of a line that hold a chat, of which a line has one."""
_ROLE_FORMS = (("role", "content"), ("from", "value"))
"""Keys of a message, as OpenAI and as ShareGPT write them."""
_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
"""Roles of ShareGPT under their other names."""
_KNOWN_FROM = ("user", "system", ASSISTANT, "tool")
PAIRS = (("prompt", "completion"), ("instruction", "output"))
"""Fields of a line with a question and an answer: TRL's, and Alpaca's."""
_MORE = {"instruction": ("input",)}
"""Fields whose text follows a question's, where they are not empty."""
_FORMS = (
    'a chat is like {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}; '
    "--chat-key names another field"
)


@frozen(eq=False)
class Chats:
    """Rules by which chats become documents."""

    template: ChatTemplate
    key: str | None = None
    """field with the messages; None: the one of `MESSAGES_KEYS` that a line has"""
    pairs: tuple[tuple[str, str], ...] = PAIRS
    """fields that may hold question and answer, of a line without messages"""
    counts_all: bool = False
    """True if every token is in the loss"""
    last_alone: bool = False
    """True if only the last answer of a chat is in the loss"""

    def pair_in(self, held: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return the fields of a line that hold question and answer, as texts or as messages; None if it has none."""
        for pair in self.pairs:
            if all(isinstance(held.get(each), str) or are_messages(held.get(each)) for each in pair):
                return pair
        return None

    def document(self, path: str, line: Line) -> tuple[str, Spans]:
        """Return the text of a line's chat, and its answers. Raises RT090 with the line."""
        held = object_in(path, line)
        chat, first = self._messages(path, line, held)
        try:
            if self.counts_all:
                text = self.template.text(chat, held.get("tools"))
                spans = [(0, len(text))]
            else:
                text, spans = self.template.with_answers(
                    chat, held.get("tools"), first=first, last_alone=self.last_alone
                )
            text.encode()
        except AnswerError as error:
            refuse_line(path, line, str(error), way_out=_way_out(str(error)))
        except UnicodeEncodeError:
            refuse_line(path, line, "has half of a surrogate pair, which is no text")
        return text, spans

    def _messages(self, path: str, line: Line, held: Mapping[str, Any]) -> tuple[Chat, int]:
        """Return the messages of a line, and the number of the first whose answer may count."""
        keys = MESSAGES_KEYS if self.key is None else (self.key,)
        name = next((key for key in keys if key in held), None)
        first = 0
        if name is None and self.key is None and (pair := self.pair_in(held)) is not None:
            question, answer = (held[each] for each in pair)
            if isinstance(question, str):
                more = (held[each] for each in _MORE.get(pair[0], ()) if isinstance(held.get(each), str) and held[each])
                question = [{"role": "user", "content": "\n".join((question, *more))}]
            first = len(question)
            answer = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer
            held, name = {"messages": [*question, *answer]}, "messages"
        if name is None or not are_messages(held[name]):
            has = f"; its fields are {', '.join(map(shown, held)) or 'none'}" if name is None else ""
            refuse_line(path, line, f"has no messages in {' or '.join(map(shown, keys))}{has}", way_out=_FORMS)
        if has_marks(json.dumps(held[name], ensure_ascii=False)):
            refuse_line(path, line, "has code points that are no characters (U+FDD0, U+FDD1)")
        return [self._message(path, line, message, place) for place, message in enumerate(held[name], 1)], first

    @staticmethod
    def _message(path: str, line: Line, message: Mapping[str, Any], place: int) -> Mapping[str, Any]:
        form = next((form for form in _ROLE_FORMS if isinstance(message.get(form[0]), str)), None)
        if form is None:
            refuse_line(path, line, f"has no role in message {place}", way_out=_FORMS)
        role, content = form
        if role == "role":
            return message
        said = _ROLES.get(message[role], message[role])
        if said not in _KNOWN_FROM:
            known = ", ".join(map(shown, (*_ROLES, *_KNOWN_FROM)))
            refuse_line(path, line, f"has a message {place} from {shown(said)}", way_out=f"known are {known}")
        others = {key: value for key, value in message.items() if key not in (role, content)}
        return {**others, "role": said, "content": message.get(content)}


def open_chats(
    path: str, chats: Chats, *, vocab_size: int, eos: int | None = None, encoder: Encoder | None = None
) -> TokenStream:
    """Tokenise the chats of a JSONL file, or of the array in it, in their order, each followed by `eos` if given.

    Without an encoder a token is a byte. Raises `DiagnosticError` RT002 (cannot be read) and RT090, with the line.
    """
    if encoder is None:
        check_text_vocabulary(path, vocab_size)
    end = end_tokens(eos, np.uint32 if encoder is not None else np.uint8)
    tokens: list[NDArray[Any]] = [end[:0]]
    lengths: list[int] = []
    answers: list[Positions] = [np.empty((0, 2), np.int64)]
    begin = 0
    for batch in _batches(path, chats):
        for (_, spans), (ids, starts) in zip(batch, _encoded(path, [text for text, _ in batch], encoder), strict=True):
            places = np.searchsorted(starts, np.array(spans, np.int64).reshape(-1, 2), "left")
            if len(end) and len(places) and places[-1, 1] == len(ids):
                places[-1, 1] += len(end)  # the end of the last answer belongs to it
            answers.append(places[places[:, 0] < places[:, 1]] + begin)
            tokens += [ids, end]
            lengths.append(len(ids) + len(end))
            begin += lengths[-1]
    if not begin:
        fail("RT090", f"'{path}' has no document: all its lines are empty", help="name a file with a chat a line")
    bounds = bounds_of(np.array(lengths, np.int64))
    documents = Documents(bounds, None if chats.counts_all else np.concatenate(answers))
    whole = np.concatenate(tokens)
    if encoder is None:
        return TokenStream(path, whole, digest_of(whole, documents), documents=documents)
    stream = checked_stream(f"{path} by {encoder.tokenizer.path}", whole, vocab_size, encoder.token)
    return encoder.named(stream, path, documents, digest_of(whole, documents))


def _batches(path: str, chats: Chats) -> Iterator[list[tuple[str, Spans]]]:
    """Yield chats as texts with their answers, grouped for one call of the tokenizer."""
    batch: list[tuple[str, Spans]] = []
    size = 0
    for line in lines_of(path, text_bytes(path)):
        if not line.content.strip():
            continue
        batch.append(chats.document(path, line))
        size += len(batch[-1][0])
        if size >= TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(path: str, texts: list[str], encoder: Encoder | None) -> Iterator[tuple[NDArray[Any], Positions]]:
    """Yield the tokens of each text, and the character that each of them begins at."""
    if encoder is not None:
        yield from encoder.with_starts(path, texts)
        return
    for text in texts:
        sizes = np.array([len(character.encode()) for character in text], np.int64)
        yield np.frombuffer(text.encode(), np.uint8), np.repeat(np.arange(len(text)), sizes)


def _way_out(problem: str) -> str:
    if "writes in another way" in problem:
        return (
            "'ratrainc run --train-on last-answer' counts the last answer of each chat alone; or mark answers in the "
            "template with "
            "{% generation %} ... {% endgeneration %}, --chat-template FILE.jinja"
        )
    if "strftime_now" in problem:
        return "its text would differ from day to day: write the date into a copy of it, --chat-template FILE.jinja"
    return _FORMS if ASSISTANT in problem else "mend the chat, or name another template: --chat-template FILE.jinja"
