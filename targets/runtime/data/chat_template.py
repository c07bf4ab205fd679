"""Chat templates: Jinja programs that turn the messages of a chat into the text that a model is trained on.

The answers of a chat are the parts of that text that the assistant wrote. A template may mark them itself
(`{% generation %}`). Else a chat is rendered up to before each answer, with the words that ask for one, and up to after
it; both texts begin the whole one, and the answer is between their ends:

    <user> Hello <assistant> Hi <end>       the whole chat
    <user> Hello <assistant>                before the answer
                             Hi <end>       the answer, with what ends it

Templates run as in transformers (`utils/chat_template_utils.py`): in Jinja's sandbox, with `raise_exception`, loop
controls, and a `tojson` that escapes nothing. There is no `strftime_now`: tokens would differ from day to day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import is_regular, read_text
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2.parser import Parser

Chat = Sequence[Mapping[str, Any]]
"""Messages, each with a role and a content."""
Spans = list[tuple[int, int]]
"""First character of each answer in a text, and the one after its last."""

ASSISTANT = "assistant"
CHATML = "chatml"
"""Template that needs no file: each message between `<|im_start|>` with its role and `<|im_end|>`."""
TEMPLATE_FILE, _CONFIG, _SPECIAL_TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_DEFAULT = "default"
_OF_TOOLS = ("tool_calls", "function_call")
"""Keys of messages that a template either writes or drops in silence."""
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Marks of an answer in a rendered text: code points that Unicode keeps out of any text (noncharacters)."""
_MARKS = re.compile(f"([{_OPEN}{_CLOSE}])")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHER_TEMPLATE = "--chat-template FILE.jinja names another template"


class AnswerError(Exception):
    """A chat whose answers a template does not tell from the rest; the message says why."""


class _Generation(Extension):
    """The block `{% generation %}`, which puts marks around what it holds."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `_marked` with the block's body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @staticmethod
    def _marked(caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


@frozen(eq=False)
class ChatTemplate:
    """A compiled template, its name for messages, its text, and the special tokens that it may name."""

    name: str
    compiled: Any
    source: str
    special_tokens: Mapping[str, str]

    def text(self, chat: Chat, tools: object = None, *, asks: bool = False) -> str:
        """Return the text of a chat; `asks` adds the words after which an answer follows.

        Raises `AnswerError` with what the template says of a chat that it does not take.
        """
        return self._rendered(chat, tools, asks=asks).replace(_OPEN, "").replace(_CLOSE, "")

    def with_answers(
        self, chat: Chat, tools: object = None, *, first: int = 0, last_alone: bool = False
    ) -> tuple[str, Spans]:
        """Return the text of a chat and its answers from message `first` on, or the last of them alone.

        Raises `AnswerError`.
        """
        before = [number for number, message in enumerate(chat[:first]) if message.get("role") == ASSISTANT]
        places = [number for number, message in enumerate(chat) if message.get("role") == ASSISTANT and number >= first]
        if not places:
            raise AnswerError(f"has no message whose role is {ASSISTANT}")
        if _GENERATION.search(self.source) is not None:
            text, answers = _unmarked(self._rendered(chat, tools))
            return text, answers[-1:] if last_alone else answers[len(before) :]
        text = self.text(chat, tools)
        wanted = places[-1:] if last_alone else places
        return text, [self._answer(chat, tools, text, place) for place in wanted]

    def _answer(self, chat: Chat, tools: object, text: str, place: int) -> tuple[int, int]:
        before = self.text(chat[:place], tools, asks=True)
        after = text if place + 1 == len(chat) else self.text(chat[: place + 1], tools)
        if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
            what = f"has an answer, message {place + 1}, that {self.name} writes in another way when the chat goes on"
            raise AnswerError(what)
        return len(before), len(after)

    def _rendered(self, chat: Chat, tools: object, *, asks: bool = False) -> str:
        said = next((key for key in _OF_TOOLS if any(each.get(key) for each in chat)), None)
        if said is not None and said not in self.source:
            raise AnswerError(f"has {said} in a message, and {self.name} leaves them out")
        try:
            text = self.compiled.render(
                messages=chat, tools=tools, documents=None, add_generation_prompt=asks, **self.special_tokens
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            other = next((n for n, each in enumerate(chat, 1) if not isinstance(each.get("content"), str)), None)
            why = str(error) if other is None else f"the content of message {other} is no text"
            raise AnswerError(f"is a chat that {self.name} does not take: {why}") from None
        return str(text)


def has_template(tokenizer: str) -> bool:
    """Tell whether there is a template beside a tokenizer.json."""
    if is_regular(Path(tokenizer).with_name(TEMPLATE_FILE)):
        return True
    return isinstance(_config(Path(tokenizer).with_name(_CONFIG)).get("chat_template"), str | list)


def chat_template(named: str | None, tokenizer: str | None) -> ChatTemplate:
    """Load a template: of a file, `CHATML`, or the one beside a tokenizer.json.

    Raises RT002 and RT090 where there is none, or it is no template.
    """
    tokens = {} if tokenizer is None else _special_tokens(Path(tokenizer))
    if named == CHATML:
        return _compiled(f"the template {CHATML}", _CHATML, tokens)
    if named is not None:
        return _compiled(f"'{named}'", read_text(named, "chat template"), tokens)
    if tokenizer is None:
        text = "chats become text by the template of a tokenizer, and this run reads bytes"
        fail("RT090", text, help=f"name a --tokenizer that has one; {_OTHER_TEMPLATE}, {CHATML} the usual one")
    place = Path(tokenizer).with_name(TEMPLATE_FILE)
    if is_regular(place):
        return _compiled(f"'{place}'", read_text(str(place), "chat template"), tokens)
    place = Path(tokenizer).with_name(_CONFIG)
    said = _config(place).get("chat_template")
    if isinstance(said, list):  # several with names, as of models with tools
        named_ones = {each.get("name"): each.get("template") for each in said if isinstance(each, dict)}
        said = named_ones.get(_DEFAULT)
    if not isinstance(said, str):
        text = f"no file beside the tokenizer '{tokenizer}' has a chat template: it is of a model that had no chats"
        way_out = f"--chat-template {CHATML} writes the usual one; {_OTHER_TEMPLATE}"
        fail("RT090", text, help=f"{way_out}; or give prompts and completions")
    return _compiled(f"the template of '{place}'", said, tokens)


def _compiled(name: str, text: str, tokens: Mapping[str, str]) -> ChatTemplate:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse_chat
    try:
        compiled = environment.from_string(text)
    except TemplateSyntaxError as error:
        fail("RT090", f"{name}, line {error.lineno}, is no chat template: {error.message}", help=_OTHER_TEMPLATE)
    return ChatTemplate(name, compiled, text, tokens)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse_chat(message: object) -> None:
    raise TemplateError(str(message))


def _unmarked(text: str) -> tuple[str, Spans]:
    """Return a text without its marks, and what stood between them."""
    parts: list[str] = []
    answers: Spans = []
    length = begin = 0
    for part in _MARKS.split(text):
        if part == _OPEN:
            begin = length
        elif part == _CLOSE:
            answers.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), [(low, high) for low, high in answers if low < high]


def has_marks(text: str) -> bool:
    """Tell whether a text has the marks that answers get."""
    return _MARKS.search(text) is not None


def _special_tokens(tokenizer: Path) -> dict[str, str]:
    """Return the tokens that the files beside a tokenizer name, as `bos_token`."""
    found: dict[str, str] = {}
    for file in (_SPECIAL_TOKENS, _CONFIG):
        for name, token in _config(tokenizer.with_name(file)).items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
    return found


def _config(place: Path) -> dict[str, Any]:
    if not is_regular(place):
        return {}
    try:
        held = json.loads(read_text(str(place), "tokenizer"))
    except (ValueError, RecursionError):
        fail("RT090", f"'{place}' is no JSON", help=f"put the file of the tokenizer back; {_OTHER_TEMPLATE}")
    if not isinstance(held, dict):
        fail("RT090", f"'{place}' holds {shown(held)}, and no object", help=_OTHER_TEMPLATE)
    return held
