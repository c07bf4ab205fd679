"""`generate`: what a model says is what the program that trained it would say, and what is refused."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.run_choices import Generation, Prompt
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.generation import generate
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.runtime.checkpoint.checkpoint_series import latest_weights
from ratrain.targets.runtime.data.data import Batches, TokenStream
from ratrain.targets.runtime.engine.forward import Chooser, ForwardModel
from ratrain.targets.runtime.engine.rank import resolve
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import Sampling
from ratrain.targets.runtime.weights.weight_source import WeightSource
from tests.end_to_end.tiny_runs import MODEL, make_program, start, train
from tests.end_to_end.toys import GPT2, NEOX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.runtime.arena.tensor_file import Float32

MODELS = {
    "llama": MODEL,
    "window": evolve(MODEL, family="mistral", sliding_window=4),
    "qwen2-tied": evolve(MODEL, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "gpt2": GPT2,
    "side-by-side": NEOX,
    "alibi": evolve(
        MODEL, family="baichuan", packed_qkv=True, kv_heads=4, position="alibi", rope_theta=0.0, normalised_head=True
    ),
}
PROMPT = (3, 17, 4)
F32 = {"view_dtype": "f32"}


def trained(model: ModelConfig, place: Path, **keys: Any) -> str:
    """A checkpoint of a model that was trained for some steps."""
    directory = str(place / "ckpt")
    train(make_program(model, **keys), 4, save=directory, kernels="reference", lr=0.02)
    return directory


def logits_of(forward: ForwardModel, tokens: tuple[int, ...]) -> Any:
    """The logits behind tokens that are read at once."""
    return forward.reading(len(tokens)).read(tokens).copy()


def evaluated_logits(model: ModelConfig, checkpoint: str, tokens: tuple[int, ...], **keys: Any) -> Any:
    """The logits, [tokens, vocabulary], of an evaluation of these tokens by a program of two stages."""
    plan = {"dp": 1, "micro_batches": 1, "micro_batch_size": 1, "seq_len": len(tokens)} | keys
    program = make_program(model, **plan)
    run = start(program, 1, resume=checkpoint, new_data=True, kernels="reference")
    stream = TokenStream("said", np.array([*tokens, 0], np.uint16), "said")
    run.engine.run_forward(Batches(stream, program.plan, "sequential", 0), 0)
    (rank,) = run.engine.ranks[-1]
    head = next(
        item for item in rank.stage.streams[Engine.COMPUTE] if item.keyword == "forward" and item.blocks == ("head",)
    )
    assert head.routine is not None
    routine = program.routines[head.routine]
    return resolve(routine, "logits", rank.by_role(head)).copy()


def test_a_checkpoint_in_bf16(tmp_path: Path) -> None:
    checkpoint = trained(MODEL, tmp_path, view_dtype="bf16", grad_dtype="bf16", grad_shard_dtype="bf16", loss_scale=1.0)
    whole = (*PROMPT, *generate(checkpoint, Prompt(tokens=PROMPT), Generation(6)).tokens)
    logits = logits_of(
        ForwardModel(MODEL, latest_weights(checkpoint)[1], Dtype.BF16, kernel_set("reference")), whole[:-1]
    )
    assert int(logits.argmax()) == whole[-1]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.sampled(3)
def test_the_likeliest_token_is_that_of_the_evaluation(family: str, kernels: str, tmp_path: Path) -> None:
    model = MODELS[family]
    checkpoint = trained(model, tmp_path, **F32)
    made = generate(checkpoint, Prompt(tokens=PROMPT), Generation(11, kernels=kernels))
    assert made.prompt == PROMPT
    assert len(made.tokens) == 11
    whole = (*made.prompt, *made.tokens)
    logits = evaluated_logits(model, checkpoint, whole, **F32)
    assert logits.shape == (len(whole), model.vocab_size)
    said = logits.argmax(axis=1).tolist()
    assert said[len(PROMPT) - 1 : -1] == list(made.tokens)
    forward = ForwardModel(model, latest_weights(checkpoint)[1], Dtype.F32, kernel_set(kernels))
    for length in (1, 3, 4, 5, len(whole)):
        np.testing.assert_allclose(logits_of(forward, whole[:length]), logits[length - 1], rtol=2e-4, atol=2e-5)


def test_a_checkpoint_goes_on_in_the_type_it_was_trained_in(tmp_path: Path) -> None:
    checkpoint = trained(MODEL, tmp_path)
    whole = (*PROMPT, *generate(checkpoint, Prompt(tokens=PROMPT), Generation(6)).tokens)
    source = latest_weights(checkpoint)[1]
    logits = evaluated_logits(MODEL, checkpoint, whole)[-1]
    f16, f32 = (
        np.abs(logits_of(ForwardModel(MODEL, source, dtype, kernel_set("reference")), whole) - logits).max()
        for dtype in (Dtype.F16, Dtype.F32)
    )
    assert f16 < f32
    assert f16 < 1e-5


def test_exported_weights_say_the_same(tmp_path: Path) -> None:
    checkpoint = trained(MODEL, tmp_path, **F32)
    export_weights(checkpoint, str(tmp_path / "hf"))
    for sampling in (Sampling(), Sampling(temperature=1.5, top_p=0.9, seed=3)):
        asked = Generation(20, sampling)
        one, other = (generate(str(path), Prompt(tokens=PROMPT), asked) for path in (checkpoint, tmp_path / "hf"))
        assert one.tokens == other.tokens
        assert other.text is None  # nothing says what makes tokens of text


@pytest.mark.parity
@pytest.mark.parametrize("family", [family for family in MODELS if family != "alibi"])
@pytest.mark.sampled(3)
def test_transformers_says_the_same(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    model = MODELS[family]
    export_weights(trained(model, tmp_path, **F32), str(tmp_path / "hf"))
    made = generate(str(tmp_path / "hf"), Prompt(tokens=PROMPT), Generation(14))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True).float()
    with torch.no_grad():
        ids = theirs.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=14, eos_token_id=None, pad_token_id=0
        )
    assert tuple(ids[0].tolist()) == (*PROMPT, *made.tokens)


class TestSampling:
    LOGITS = np.log(np.array([0.05, 0.4, 0.05, 0.3, 0.2], np.float32))

    def drawn(self, count: int = 4000, **keys: Any) -> Any:
        chooser = Chooser(Sampling(**{"temperature": 1.0, **keys}))
        return np.bincount([chooser.choose(self.LOGITS) for _ in range(count)], minlength=5) / count

    def test_without_a_temperature_the_first_of_the_likeliest(self) -> None:
        assert Chooser(Sampling()).choose(np.array([1, 3, 3, 2], np.float32)) == 1

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_draws_have_the_distribution(self, temperature: float) -> None:
        expected = np.exp(self.LOGITS.astype(np.float64) / temperature)
        np.testing.assert_allclose(self.drawn(temperature=temperature), expected / expected.sum(), atol=0.03)

    @pytest.mark.parametrize(
        ("top_p", "kept"), [(0.01, [1]), (0.4, [1]), (0.41, [1, 3]), (0.85, [1, 3, 4]), (0.9, [1, 3, 4])]
    )
    def test_top_p_keeps_the_likeliest(self, top_p: float, kept: list[int]) -> None:
        share = self.drawn(top_p=top_p)
        assert np.flatnonzero(share).tolist() == kept
        expected = np.exp(self.LOGITS[kept]) / np.exp(self.LOGITS[kept]).sum()
        np.testing.assert_allclose(share[kept], expected, atol=0.03)

    def test_a_seed_draws_the_same_again(self) -> None:
        one, same, other = ([self.drawn(30, seed=seed)] for seed in (1, 1, 2))
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run on bytes, in which token 256 ends every document."""
    place = tmp_path_factory.mktemp("texts")
    config = {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    (place / "m.json").write_text(json.dumps(config))
    (place / "p.toml").write_text(
        "[parallel]\npp = 1\ndp = 1\n[batch]\nmicro_batch_size = 4\nmicro_batches = 2\nseq_len = 16\n"
        "[optimizer]\nlr = 0.02\n"
    )
    (place / "d.jsonl").write_text('{"text": "abc"}\n' * 400)
    given = f"--model {place}/m.json --plan {place}/p.toml -o {place}/x.rtx"
    assert main(f"compile {given}".split()) == 0
    words = f"run {place}/x.rtx --data {place}/d.jsonl --eos 256 --steps 40 --save {place}/ckpt --threads 1"
    assert main(words.split()) == 0
    return place


class TestTexts:
    def said(self, place: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        capsys.readouterr()
        assert main(["generate", str(place), *words]) == 0
        return capsys.readouterr().out

    def test_a_text_ends_where_documents_end(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.said(place / "ckpt", capsys, "--prompt", "a") == "abc\n"
        assert self.said(place / "ckpt", capsys, "--prompt", "a", "--eos", "none", "--tokens", "6") == "abcabc\n"
        found = json.loads(self.said(place / "ckpt", capsys, "--prompt", "a", "--json"))
        assert found["tokens"] == [98, 99, 256]
        assert (found["text"], found["ended"], found["prompt_tokens"]) == ("bc", True, [97])
        found = json.loads(self.said(place / "ckpt", capsys, "--prompt-tokens", "97,98", "--tokens", "1", "--json"))
        assert (found["tokens"], found["ended"]) == ([99], False)

    def refused(self, place: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        assert main(["generate", *words]) == 1
        said = capsys.readouterr().err
        assert "help:" in said
        return said

    def test_what_is_refused(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        ckpt, out = str(place / "ckpt"), str(place / "hf")
        export_weights(ckpt, out)
        (place / "hf" / "generation_config.json").write_text('{"eos_token_id": [255, 256]}')
        assert self.said(place / "hf", capsys, "--prompt", "a") == "abc\n"
        (place / "hf" / "generation_config.json").write_text("{")
        assert "is no JSON" in self.refused(place, capsys, out, "--prompt", "a")
        (place / "hf" / "generation_config.json").unlink()
        (place / "hf" / "tokenizer.json").unlink()
        assert "no tokenizer is with it" in self.refused(place, capsys, out, "--prompt", "a")
        assert main(["generate", out, "--prompt", "a", "--tokenizer", "bytes"]) == 0
        cases: list[tuple[tuple[str, ...], str]] = [
            (("--prompt", ""), "has no token"),
            (("--prompt-tokens", "1,257"), "token 257 is outside the vocabulary of 257"),
            (("--prompt", "a", "--eos", "257"), "is no token that could end a text"),
            (("--prompt", "a", "--eos", "tokenizer"), "there is no tokenizer"),
        ]
        for words, expected in cases:
            said = self.refused(place, capsys, ckpt, *words)
            assert "RT094" in said
            assert expected in said
        for words in ((), ("--prompt", "a", "--prompt-tokens", "1"), ("--prompt-tokens", "1;2")):
            assert main(["generate", ckpt, *words]) == 2

    def test_a_place_without_a_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["generate", str(tmp_path), "--prompt", "a"]) == 1
        assert "RT002" in capsys.readouterr().err


def test_more_tokens_than_learned_positions(tmp_path: Path) -> None:
    checkpoint = trained(GPT2, tmp_path, **F32)
    most = GPT2.learned_positions
    assert most is not None
    assert len(generate(checkpoint, Prompt(tokens=PROMPT), Generation(most - 2)).tokens) == most - 2
    with pytest.raises(DiagnosticError, match=r"RT094.*21 learned positions[\s\S]*ask for 19 tokens at most"):
        generate(checkpoint, Prompt(tokens=PROMPT), Generation(most - 1))
    with pytest.raises(DiagnosticError, match="shorten the prompt"):
        generate(checkpoint, Prompt(tokens=PROMPT * 8), Generation(1))


def test_weights_too_large_for_f16_are_said(tmp_path: Path) -> None:
    checkpoint = trained(MODEL, tmp_path, **F32)
    model, source = latest_weights(checkpoint)

    class Enlarged(WeightSource):
        def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
            return (1e5 * piece for piece in source.pieces(name, start, stop))

    forward = ForwardModel(model, Enlarged(source.parameters), Dtype.F16, kernel_set("reference"))
    assert not np.isfinite(logits_of(forward, PROMPT)).all()
    export_weights(checkpoint, str(tmp_path / "hf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardModel, "head", lambda _: np.array([np.nan, 1.0], np.float32))
        with pytest.raises(DiagnosticError, match=r"RT094.*not finite[\s\S]*--dtype f32"):
            generate(str(tmp_path / "hf"), Prompt(tokens=PROMPT), Generation(1))


def test_the_first_token_is_waited_for_in_words_of_what_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line before any token is done speaks of kernels; then tokens are counted."""
    told: list[str] = []

    @contextmanager
    def status(title: str) -> Iterator[Any]:
        told.append(title)
        yield told.append

    monkeypatch.setattr("ratrain.ratrainc.console.console.status", status)
    words = ["generate", trained(MODEL, tmp_path), "--prompt-tokens", "3,17,4", "--tokens", "2", "--eos", "none"]
    assert main([*words, "--kernels", "reference"]) == 0
    assert told == [
        "generating: new kernels are compiled",
        "generating, 1 of 2 tokens at most",
        "generating, 2 of 2 tokens at most",
    ]


def test_a_chat_is_the_prompt_that_its_template_makes(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing else: the tokens are those of the rendered text; what is printed is the answer."""
    folder = tmp_path / "hf"
    export_weights(str(place / "ckpt"), str(folder))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}>")
    asked = ["--tokens", "5", "--eos", "none"]
    capsys.readouterr()
    assert main(["generate", str(folder), "--chat", "who?", *asked, "--json"]) == 0
    chat = json.loads(capsys.readouterr().out)
    assert main(["generate", str(folder), "--prompt", "[who?]>", *asked, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert chat["prompt_tokens"] == plain["prompt_tokens"] == list(b"[who?]>")
    assert chat["tokens"] == plain["tokens"]
    assert main(["generate", str(folder), "--chat", "who?", *asked]) == 0
    assert "[who?]" not in capsys.readouterr().out
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    assert main(["generate", str(folder), "--chat", "who?", *asked]) == 1
    assert "does not take: no users here" in " ".join(capsys.readouterr().err.split())
    assert main(["generate", str(folder), "--chat", "who?", "--prompt", "x", *asked]) == 2
    assert main(["generate", str(folder), "--prompt", "x", "--init", str(folder)]) == 1
