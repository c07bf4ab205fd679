"""Chats of JSONL: their text by a template, and which of it is in the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.runtime.data.chat_template import CHATML, chat_template
from ratrain.targets.runtime.data.chats import Chats, open_chats

if TYPE_CHECKING:
    from ratrain.targets.runtime.data.data import TokenStream

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wer bist du? ü狐"},
    {"role": "assistant", "content": "Ein Fuchs 狐."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still."},
]
TURN = "{{ '<' + message['role'] + '>' + message['content'] + '</s>' }}"
ASKING = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
PLAIN = "{% for message in messages %}" + TURN + "{% endfor %}" + ASKING
MARKED = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}"
    "{%- else %}{{ message['content'] + '</s>' }}{% endif %}{% endfor %}" + ASKING
)
THINKING = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '</s>' }}{% endfor %}" + ASKING
)


def opened(folder: Path, chats: list[Any], template: str | None = PLAIN, **words: Any) -> TokenStream:
    path = folder / "chats.jsonl"
    lines = [chat if isinstance(chat, dict) else {"messages": chat} for chat in chats]
    path.write_text("\n".join(map(json.dumps, lines)))
    name = CHATML
    if template is not None:
        (folder / "t.jinja").write_text(template)
        name = str(folder / "t.jinja")
    eos = words.pop("eos", None)
    return open_chats(str(path), Chats(chat_template(name, None), **words), vocab_size=300, eos=eos)


def text_of(stream: TokenStream) -> str:
    return bytes(stream.tokens[:]).decode()


def counted(stream: TokenStream) -> list[str]:
    """Return the runs of text that are in the loss."""
    assert stream.documents is not None
    assert stream.documents.answers is not None
    return [bytes(stream.tokens[low:high]).decode() for low, high in stream.documents.answers]


def test_answers_are_in_the_loss_with_what_ends_them(tmp_path: Path) -> None:
    stream = opened(tmp_path, [CHAT, CHAT[1:3]])
    assert text_of(stream) == (
        "<system>Be brief.</s><user>Wer bist du? ü狐</s><assistant>Ein Fuchs 狐.</s><user>And now?</s>"
        "<assistant>Still.</s><user>Wer bist du? ü狐</s><assistant>Ein Fuchs 狐.</s>"
    )
    assert counted(stream) == ["Ein Fuchs 狐.</s>", "Still.</s>", "Ein Fuchs 狐.</s>"]
    assert counted(opened(tmp_path, [CHAT, CHAT[1:3]], last_alone=True)) == ["Still.</s>", "Ein Fuchs 狐.</s>"]


def test_the_usual_template_needs_no_file(tmp_path: Path) -> None:
    stream = opened(tmp_path, [CHAT[1:3]], None)
    assert text_of(stream) == (
        "<|im_start|>user\nWer bist du? ü狐<|im_end|>\n<|im_start|>assistant\nEin Fuchs 狐.<|im_end|>\n"
    )
    assert counted(stream) == ["Ein Fuchs 狐.<|im_end|>\n"]


def test_forms_of_chats_are_alike(tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    other = [{"from": names[each["role"]], "value": each["content"]} for each in CHAT]
    mine, theirs = opened(tmp_path, [CHAT]), opened(tmp_path, [{"id": 3, "conversations": other}])
    assert text_of(mine) == text_of(theirs)
    assert counted(mine) == counted(theirs)
    assert counted(opened(tmp_path, [{"talk": CHAT, "messages": 3}], key="talk")) == counted(mine)
    pair = {"prompt": CHAT[1]["content"], "completion": CHAT[2]["content"], "id": 3}
    assert text_of(opened(tmp_path, [pair])) == text_of(opened(tmp_path, [CHAT[1:3]]))
    trl = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    assert text_of(opened(tmp_path, [trl])) == text_of(mine)
    assert counted(opened(tmp_path, [trl])) == counted(mine)[-1:] == counted(opened(tmp_path, [trl], MARKED))
    alpaca = {"instruction": CHAT[1]["content"], "input": "", "output": CHAT[2]["content"]}
    assert text_of(opened(tmp_path, [alpaca])) == text_of(opened(tmp_path, [CHAT[1:3]]))
    assert "<user>one\ntwo</s>" in text_of(opened(tmp_path, [alpaca | {"instruction": "one", "input": "two"}]))


def test_a_token_at_the_end_is_in_the_loss_with_the_last_answer(tmp_path: Path) -> None:
    stream = opened(tmp_path, [CHAT[1:3], CHAT[1:4]], eos=0)
    assert counted(stream) == ["Ein Fuchs 狐.</s>\0", "Ein Fuchs 狐.</s>"]


def test_all_of_a_chat_is_in_the_loss_if_asked(tmp_path: Path) -> None:
    stream = opened(tmp_path, [CHAT], counts_all=True)
    assert stream.counts_all
    assert text_of(stream) == text_of(opened(tmp_path, [CHAT]))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant"]), st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
        ),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([PLAIN, MARKED]),
)
def test_what_counts_is_what_the_assistant_says(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]], template: str
) -> None:
    chat = [{"role": role, "content": content} for role, content in turns]
    said = [f"{content}</s>" for role, content in turns if role == "assistant"]
    if not said or any(mark in content for _, content in turns for mark in "\ufdd0\ufdd1"):
        return
    stream = opened(tmp_path_factory.mktemp("chats"), [chat], template)
    assert counted(stream) == said
    assert text_of(stream) == "".join(f"<{role}>{content}</s>" for role, content in turns)


@pytest.mark.parametrize(
    ("chat", "template", "words", "reason"),
    [
        (
            {"text": "hello"},
            PLAIN,
            {},
            r"has no messages in \"messages\" or \"conversations\"; its fields are \"text\"",
        ),
        ({"messages": "hello"}, PLAIN, {}, "has no messages in"),
        ([{"content": "no role"}], PLAIN, {}, "has no role in message 1"),
        ([{"from": "narrator", "value": "x"}], PLAIN, {}, r"has a message 1 from \"narrator\""),
        (CHAT[:2], PLAIN, {}, "no message whose role is assistant"),
        (CHAT, "{{ raise_exception('roles must alternate') }}", {}, "does not take: roles must alternate"),
        (CHAT, "{{ strftime_now('%Y') }}", {}, "from day to day"),
        (CHAT, "{% for message in messages %}", {}, "line 1, is no chat template"),
        (CHAT, THINKING, {}, r"(?s)message 3, that .* writes in another way when.*--train-on last-answer"),
        ([{"role": "assistant", "content": "a \ufdd0 b"}], PLAIN, {}, "code points that are no characters"),
        ([{"role": "assistant", "content": "\ud800"}], PLAIN, {}, "half of a surrogate pair"),
        ([{"role": "assistant", "content": None}], PLAIN, {}, "the content of message 1 is no text"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], PLAIN, {}, "has tool_calls in a message, and"),
        (CHAT, "{{ messages.__class__.__mro__ }}", {}, "does not take"),
    ],
)
def test_refused(tmp_path: Path, chat: Any, template: str, words: Any, reason: str) -> None:
    with pytest.raises(DiagnosticError, match=reason):
        opened(tmp_path, [chat], template, **words)


def test_the_last_answer_of_a_template_that_rewrites_earlier_ones(tmp_path: Path) -> None:
    assert counted(opened(tmp_path, [CHAT], THINKING, last_alone=True)) == ["<think></think>Still.</s>"]


def test_templates_beside_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(DiagnosticError, match="no file beside the tokenizer"):
        chat_template(None, tokenizer)
    with pytest.raises(DiagnosticError, match="this run reads bytes"):
        chat_template(None, None)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ bos_token }}"}]
    config = {"bos_token": {"content": "<s>"}, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat_template(None, tokenizer).text([]) == "<s>"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
    assert chat_template(None, tokenizer).text([]) == "<s>!"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DiagnosticError, match="is no JSON"):
        chat_template(None, tokenizer)


def test_tools_and_json_as_templates_write_them(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    text = chat_template(str(tmp_path / "t.jinja"), None).text(CHAT[1:2], [{"name": "<ü>"}])
    assert text == '[{"name": "<ü>"}]Wer bist du? ü狐'


@pytest.mark.full
def test_texts_and_masks_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from ratrain.targets.runtime.data.tokenizer import TokenizerChoice, encoder_of

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<user>", "<assistant>"]
    )
    made.train_from_iterator([each["content"] for each in CHAT] * 9, trainer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = MARKED
    theirs.save_pretrained(tmp_path)
    encoder = encoder_of(TokenizerChoice(str(tmp_path / "tokenizer.json"), "mine"))
    for template in (MARKED, PLAIN):
        (tmp_path / "chat_template.jinja").write_text(template)
        (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
        chats = Chats(chat_template(None, str(tmp_path / "tokenizer.json")))
        stream = open_chats(str(tmp_path / "chats.jsonl"), chats, vocab_size=400, encoder=encoder)
        expected = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
        assert stream.tokens[:].tolist() == expected["input_ids"]
        assert stream.documents is not None
        mask = stream.documents.is_counted(0, len(stream.tokens))
        assert mask.tolist() == np.array(expected["assistant_masks"], bool).tolist()
