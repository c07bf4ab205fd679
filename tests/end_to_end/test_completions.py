"""Training on completions: the loss is the mean over their tokens in the global batch, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.training_data import open_data
from ratrain.targets.runtime.data.documents import Documents, bounds_of
from ratrain.targets.runtime.engine.evaluation import held_out
from ratrain.targets.runtime.engine.forward import ForwardModel
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.weights.weights import random_weights
from tests.end_to_end.tiny_runs import MODEL, losses, make_program, make_stream, run_settings, same_bits
from tests.program_files import prepare

if TYPE_CHECKING:
    from ratrain.targets.runtime.data.data import TokenStream

F32 = {"view_dtype": "f32"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"pp": 1, "dp": 1, "micro_batches": 1, "micro_batch_size": 12},
    "replicas": {"pp": 1, "dp": 4, "micro_batches": 1, "micro_batch_size": 3},
    "stages": {"pp": 3, "dp": 1, "micro_batches": 6, "micro_batch_size": 2},
    "both": {"pp": 2, "dp": 2, "micro_batches": 3, "micro_batch_size": 2},
    "whole logits": {"pp": 2, "dp": 2, "micro_batches": 3, "micro_batch_size": 2, "logits": "whole"},
    "slices": {"pp": 2, "dp": 2, "micro_batches": 3, "micro_batch_size": 2, "schedule": "seq1f1b", "slices": (4, 6)},
}


def stream_of_pairs(count: int = 2000, *, all_counted: bool = False) -> TokenStream:
    """The tokens of other tests, in documents of uneven lengths, of which most begin with a prompt; some are all prompt."""
    stream = make_stream(MODEL, count)
    random = np.random.default_rng(3)
    bounds = bounds_of(random.integers(1, 30, count))
    bounds = np.concatenate([bounds[bounds < count], [count]])
    prompts = np.zeros(len(bounds) - 1) if all_counted else random.random(len(bounds) - 1) * np.diff(bounds)
    counted = bounds[:-1] + np.round(prompts).astype(np.int64)
    return evolve(stream, documents=Documents.ending_in_answers(bounds, counted))


def trained(stream: TokenStream, steps: int = 4, *, kernels: str = "reference", **keys: Any) -> Any:
    run = prepare(make_program(**keys), stream, run_settings(steps, kernels=kernels), kernel_set(kernels))
    list(run.steps())
    return run


@pytest.fixture(scope="module")
def on_one_rank() -> list[float]:
    return losses(trained(stream_of_pairs(), **LAYOUTS["one rank"], **F32))


@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(3)
def test_every_layout_trains_the_same(layout: str, kernels: str, on_one_rank: list[float]) -> None:
    run = trained(stream_of_pairs(), kernels=kernels, **LAYOUTS[layout], **F32)
    np.testing.assert_allclose(losses(run), on_one_rank, rtol=1e-5)


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    """Against the log-probabilities of the forward routines."""
    run = trained(stream_of_pairs(), 1, **F32)
    plan, batches = run.program.plan, run.engine.batches
    forward = ForwardModel(MODEL, random_weights(MODEL, plan.seed), Dtype.F32, kernel_set("reference"))
    documents, tokens = run.stream.documents, run.stream.tokens
    terms = []
    for index in range(plan.global_batch):
        start = batches.sequence_of(0, index) * plan.seq_len
        for place in range(plan.seq_len):
            label = start + place + 1
            number = int(np.searchsorted(documents.bounds, label, "right")) - 1
            if label >= documents.counted_from[number]:
                logits = forward.reading(label - start).read(tokens[start:label].tolist()).astype(np.float64)
                terms.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[tokens[label]])
    report = run.done[0].report
    assert 0 < len(terms) < plan.tokens_per_step
    assert report.loss == pytest.approx(np.mean(terms), rel=1e-6)
    assert report.loss_tokens == len(terms)
    assert run.done[0].to_json()["loss_tokens"] == len(terms)


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_where_all_tokens_count_the_bits_are_those_of_a_plain_run(kernels: str) -> None:
    plain, pairs = (
        trained(stream, kernels=kernels) for stream in (make_stream(MODEL), stream_of_pairs(all_counted=True))
    )
    same_bits(plain, pairs)
    assert losses(plain) == losses(pairs)
    assert "loss_tokens" not in plain.done[0].to_json()


def test_an_evaluation_weighs_batches_by_what_counts() -> None:
    run = trained(stream_of_pairs(), 1, **F32)
    held = held_out(stream_of_pairs(700), run.program.plan)
    assert held.count == 5
    means = [run.engine.run_forward(held.batches, number) for number in range(held.count)]
    counts = [held.batches.counted(number) for number in range(held.count)]
    assert len(set(counts)) > 1
    assert held.loss(run.engine) == pytest.approx(np.average(means, weights=counts), rel=1e-12)


def test_a_step_without_a_token_that_counts_is_refused() -> None:
    stream = make_stream(MODEL)
    prompts = evolve(stream, documents=Documents.ending_in_answers(np.array([0, 2000]), np.array([1999])))
    with pytest.raises(DiagnosticError, match=r"RT090.*step 0 has no label in the loss"):
        trained(prompts, 1)
    with pytest.raises(DiagnosticError, match=r"RT090.*no label in the loss among the evaluated tokens"):
        held_out(prompts, make_program().plan, 2)


WIDE = evolve(MODEL, vocab_size=300)
PAIRS = [("question 1", " answer"), ("", "no prompt"), ("no answer", ""), ("last: ü", "狐")]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"prompt": prompt, "answer": answer, "completion": "?"}) for prompt, answer in PAIRS * 9]
    path.write_text("\n".join(lines))
    (tmp_path / "a.txt").write_text("text " * 99)
    return path


def test_prompts_are_left_out_of_jsonl(pairs: Path) -> None:
    choice = DataChoice((str(pairs),), train_on="completion", completion_key="answer", eos="299")
    stream, _ = open_data(make_program(WIDE), choice)
    taken = [
        [(token, False) for token in prompt.encode()] + [(token, True) for token in [*answer.encode(), 299]]
        for prompt, answer in PAIRS * 9
    ]
    expected = [pair for document in taken for pair in document]
    assert stream.documents is not None
    found = zip(stream.tokens[:].tolist(), stream.documents.is_counted(0, len(stream.tokens)).tolist(), strict=True)
    assert list(found) == expected
    facts = stream.facts()
    assert (facts["prompt_key"], facts["completion_key"]) == ("prompt", "answer")
    whole, _ = open_data(make_program(WIDE), evolve(choice, train_on="all", text_key="answer", completion_key=None))
    assert whole.counts_all


def test_what_contradicts_completions(pairs: Path) -> None:
    text = str(pairs.parent / "a.txt")
    cases: list[tuple[DataChoice, str]] = [
        (DataChoice(train_on="completion"), "the built-in text does not say"),
        (DataChoice((str(pairs), text), train_on="completion"), "a.txt' does not say"),
        (DataChoice((str(pairs),), train_on="completion", completion_key="prompt"), "are both the field"),
        (DataChoice((str(pairs),), train_on="completion", prompt_key="question"), 'has no field "question"'),
    ]
    for choice, said in cases:
        with pytest.raises(DiagnosticError) as caught:
            open_data(make_program(WIDE), choice)
        (problem,) = caught.value.diagnostics
        assert problem.code == "RT090"
        assert said in problem.message
        assert problem.help
    for words in ("--prompt-key a", "--train-on completion --text-key a"):
        assert main(["run", "x.rtx", *words.split()]) == 2
