"""Load what `finetune` writes in PEFT and transformers; hold its held-out loss to the one that was said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrainc.choices.finetune_choice import Adapting, FinetuneChoice, Judging, Schedule
from ratrain.ratrainc.choices.run_choices import DataChoice, Display
from ratrain.ratrainc.running.finetuning import finetune

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.parity,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHATS = [
    [
        {"role": "user", "content": f"What is {a} and {b}?"},
        {"role": "assistant", "content": f"It is {a + b}."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Quite sure."},
    ]
    for a, b in np.random.default_rng(0).integers(0, 90, (60, 2)).tolist()
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little model with a tokenizer, as transformers saves them."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special)
    made.train_from_iterator([each["content"] for chat in CHATS for each in chat], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def held_out_loss(network: Any, folder: Path, chats: list[Any]) -> float:
    """Mean loss over the answers of chats, each alone, as transformers renders and masks them."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    losses = []
    for chat in chats:
        told = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = torch.tensor([told["input_ids"]]), torch.tensor(told["assistant_masks"], dtype=torch.bool)
        with torch.no_grad():
            logits = network(tokens).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")[mask[1:]])
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("form", ["adapter", "merged", "full"])
def test_what_was_written_has_the_loss_that_was_said(model: Path, form: str, tmp_path: Path) -> None:
    import transformers

    data, held = CHATS[:48], CHATS[48:]
    for name, chats in (("train", data), ("held", held)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    choice = FinetuneChoice(
        str(model),
        str(tmp_path / "out"),
        DataChoice((str(tmp_path / "train.jsonl"),)),
        Adapting(rank=4),
        Schedule(steps=12, lr=0.01, decay="linear"),
        Judging((str(tmp_path / "held.jsonl"),), every=4),
        dtype="f32",
    )
    if form == "full":
        choice = evolve(choice, adapting=Adapting(whole=True))
    done = finetune(evolve(choice, merge=form == "merged"), Display(quiet=True))
    said = [step.eval_loss for step in done.run.steps if step.eval_loss is not None]
    assert said[-1] < 0.9 * held_out_loss(transformers.AutoModelForCausalLM.from_pretrained(model), model, held)
    if form == "adapter":
        peft = pytest.importorskip("peft")
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        network = peft.PeftModel.from_pretrained(base, str(done.exported))
    else:
        network = transformers.AutoModelForCausalLM.from_pretrained(str(done.exported))
    assert held_out_loss(network.eval(), model, held) == pytest.approx(min(said), rel=2e-6)
