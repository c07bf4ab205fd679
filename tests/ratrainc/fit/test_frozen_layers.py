"""Layers that train beside frozen ones: saved tensors and peaks of real models, what trains, and what is refused."""

from __future__ import annotations

import re
from functools import partial

import pytest
import yaml
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.jobs.formats import read_job
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Job, Loss, Sharding, Thawed
from ratrain.ratrainc.bridge.jobs.job_reader import Asked
from ratrain.ratrainc.fit.costs import slower
from ratrain.ratrainc.fit.holdings.activations import head_kept, kept_activations
from ratrain.ratrainc.fit.holdings.adapters import trained
from ratrain.ratrainc.fit.holdings.frozen_layers import layers_of
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.overheads import WORKSPACE
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.verdicts import most_bytes
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.fit.jobs import expert_model, job_of, model_of
from tests.ratrainc.fit.test_saved_tensors import Saved
from tests.ratrainc.fit.test_steps import Live, llama, model_with, steps

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
MIXED = {"autocast": True, "gradient_dtype": "f32", "reduce_dtype": "f32"}
THAWED = {
    "the last two": Thawed(2),
    "the first": Thawed(-1),
    "all": Thawed(9),
    "spread": Thawed(2, spread=True),
    "with the head": Thawed(1, extra_modules=("lm_head",)),
    "with the embedding": Thawed(1, extra_modules=("embed_tokens",)),
}


def frozen_job(model, thawed: Thawed, **fields) -> Job:
    return job_of("llama-factory", model, method="frozen", thawed=thawed, **fields)


def freeze(module, job: Job) -> None:
    """Freeze as LLaMA-Factory's `_setup_freeze_tuning`; what trains is cast to the job's type."""
    thawed = job.thawed
    numbers = thawed.numbers(job.model.layers)
    texts = [*(f".{number}." for number in numbers), *thawed.extra_modules]
    for name, param in module.named_parameters():
        if not any(text in name for text in texts):
            param.requires_grad_(False)
        elif job.trained_dtype == "f32":
            param.data = param.data.float()


COUNTED = [(name, mixed) for name in THAWED for mixed in (False, True) if not (mixed and "embedding" in name)]
"""What trains, and whether under autocast: with the embedding in f32 that is refused."""


def peak_of_steps(module, words: int, *, mixed: bool) -> int:
    """Bytes of storages that steps of AdamW hold at most, on random tokens below `words`."""
    live = Live()
    for each in module.parameters():
        live.add(each)
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], foreach=False)
    steps(module, optimizer, torch.randint(0, words, (4, 256)), live, autocast=mixed)
    return live.peak


@pytest.mark.parametrize(("name", "mixed"), COUNTED)
@pytest.mark.parametrize("attention", [Attention.SDPA, Attention.EAGER])
def test_a_model_saves_what_the_formulas_say(name, attention, mixed) -> None:
    model = model_with(96)
    job = frozen_job(model, THAWED[name], attention=attention, **(MIXED if mixed else {}))
    module = llama(model, job.seq_len, attention.value, torch.bfloat16, checkpointed=False)
    freeze(module, job)
    part = Part(job, 0)
    assert sum(each.numel() for each in module.parameters() if each.requires_grad) == trained(part)
    tokens = torch.randint(0, model.vocab_size, (job.micro_batch_size, job.seq_len))
    saved = Saved(module)

    def share(_, args, named) -> None:
        saved.parameters |= {each.untyped_storage().data_ptr() for each in named["position_embeddings"]}

    module.model.layers[0].register_forward_pre_hook(share, with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed), saved.watch():
        module(input_ids=tokens, use_cache=False)
    rows = job.micro_batch_size * job.seq_len
    first = 0 if "embedding" in name else 4 * rows * (model.hidden_size + 1)  # the lowest input asks for no gradient
    held = saved.bytes - (tokens.nbytes if "embedding" in name else 0)
    counted = sum(kept_activations(part, part.layers).values()) + sum(head_kept(part).values())
    assert held == counted - first


@pytest.mark.parametrize("name", [name for name in THAWED if "embedding" in name])
def test_a_trained_embedding_under_autocast_is_refused(name) -> None:
    assert "a stream of f32" in refusal(frozen_job(model_with(96), THAWED[name], **MIXED))


@pytest.mark.parametrize(("name", "mixed"), COUNTED)
@pytest.mark.parametrize("checkpointing", list(Checkpointing)[:2])
def test_a_step_on_one_device(name, checkpointing, mixed) -> None:
    model = model_with(4096)
    fields = {"seq_len": 256, "micro_batch_size": 4, "optimizer": "adamw-foreach-off", "checkpointing": checkpointing}
    job = frozen_job(model, THAWED[name], **fields, **(MIXED if mixed else {}))
    module = llama(model, job.seq_len, "sdpa", torch.bfloat16, checkpointed=False)
    freeze(module, job)
    if checkpointing is Checkpointing.FULL:
        for layer in module.model.layers:
            if any(each.requires_grad for each in layer.parameters()):
                checkpoint(layer)
    peak = peak_of_steps(module, 4096, mixed=mixed)
    (rank,) = holdings(job)
    assert rank.peak_bytes - WORKSPACE == pytest.approx(peak, rel=0.04)


def checkpoint(layer) -> None:
    plain = layer.forward

    def forward(states, *args, **named):
        states.requires_grad_(True)
        return torch.utils.checkpoint.checkpoint(partial(plain, **named), states, *args, use_reentrant=True)

    layer.forward = forward


NAMES = ["the last two", "the first", "spread", "with the head"]


@given(
    name=st.sampled_from(NAMES),
    sharding=st.sampled_from([Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP1]),
    checkpointing=st.sampled_from([Checkpointing.NONE, Checkpointing.FULL]),
    loss=st.sampled_from([Loss.UPCAST, Loss.FUSED]),
    accumulation=st.integers(1, 3),
)
def test_fewer_layers_that_train_never_take_more(name, sharding, checkpointing, loss, accumulation) -> None:
    fields = {"sharding": sharding, "checkpointing": checkpointing, "loss": loss, "devices": 4}
    fields |= {"gradient_accumulation": accumulation, "master_dtype": "f32" if "ZERO" in sharding.name else None}
    model = model_with(4096, layers=4)
    some = frozen_job(model, THAWED[name], **fields)
    assert refusal(some) == ""
    whole = evolve(some, thawed=None, method="full")
    assert most_bytes(some) <= most_bytes(whole)
    (rank,) = holdings(some)
    assert sum(each.bytes for each in rank.owners) == rank.peak_bytes
    assert slower(whole, some, load_machine("a100-node")) <= 0


@given(st.integers(1, 12), st.integers(1, 12))
def test_layers_below_the_lowest_that_trains_are_not_in_the_backward(count, layers) -> None:
    model = model_of("llama", layers=layers)
    last, first = (layers_of(Part(frozen_job(model, Thawed(each)), 0)) for each in (count, -count))
    assert (last.trained, last.above) == (min(count, layers), 0)
    assert (first.trained, first.above) == (min(count, layers), layers - min(count, layers))


NAMED = {
    "the last two": (r"model.layers.[23].", (2, 3), False),
    "one in the middle": ("^model.layers.1.", (1,), False),
    "with the head": (("model.layers.[12].", "^lm_head.weight$"), (1, 2), True),
    "with the embedding": (("model.layers.3.", "model.embed_tokens.weight$[:32]"), (3,), True),
    "the head's name alone": (("model.layers.2.", "model.lm_head"), (2,), True),
}
"""Expressions of axolotl, the layers that they choose, and whether all layers are in the backward."""


def read_by(expressions, tmp_path, model, **fields):
    """Return the job of a file of axolotl with `unfrozen_parameters`, with the sizes of a test."""
    file = tmp_path / "train.yaml"
    names = [expressions] if isinstance(expressions, str) else list(expressions)
    settings = {"base_model": "some/model", "sequence_len": 256, "micro_batch_size": 4, "learning_rate": 1e-5}
    file.write_text(yaml.safe_dump({**settings, "bf16": True, "flash_attention": True, "unfrozen_parameters": names}))
    job = read_job(file, Asked(devices=1, model=model))
    assert "unfrozen_parameters" not in {note.key for note in job.not_understood}
    return evolve(job, attention=Attention.SDPA, loss=Loss.UPCAST, optimizer="adamw-foreach-off", **fields)


def unfreeze(module, expressions) -> None:
    """Freeze as axolotl's freeze_layers_except and setup_model_and_tokenizer."""
    names = [expressions] if isinstance(expressions, str) else list(expressions)
    patterns = [re.compile(re.sub(r"\[\d*:\d*\]$", "", each).replace(".", r"\.")) for each in names]
    for name, param in module.named_parameters():
        param.requires_grad_(any(each.match(name) for each in patterns))
    if any(each in name for name in names for each in ("lm_head", "embed_tokens")):
        module.enable_input_require_grads()


@pytest.mark.parametrize("checkpointing", list(Checkpointing)[:2])
@pytest.mark.parametrize("name", NAMED)
def test_a_step_of_layers_that_expressions_choose(name, checkpointing, tmp_path) -> None:
    model = model_with(512)
    expressions, chosen, whole = NAMED[name]
    job = read_by(expressions, tmp_path, model, checkpointing=checkpointing)
    assert refusal(job) == ""
    part = Part(job, 0)
    assert job.thawed.chosen == chosen
    assert layers_of(part).above == (model.layers if whole else model.layers - min(chosen)) - len(chosen)
    module = llama(model, job.seq_len, "sdpa", torch.bfloat16, checkpointed=checkpointing is Checkpointing.FULL)
    unfreeze(module, expressions)
    assert sum(each.numel() for each in module.parameters() if each.requires_grad) == trained(part)
    peak = peak_of_steps(module, 512, mixed=True)
    (rank,) = holdings(job)
    counted = 0 if whole else 4 * 4 * 256 * (model.hidden_size + 1)  # of the lowest input, which asks for no gradient
    assert rank.peak_bytes - counted - WORKSPACE == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    ("expressions", "said"),
    [
        ("model.layers.2[0-9]+.mlp.down_proj", "model.layers.20.mlp.down_proj.weight trains without"),
        (("model.layers.3.", "model.norm"), "model.norm.weight trains without the rest"),
        ("lm_head", "no layer is left to train"),
    ],
)
def test_what_expressions_choose_that_is_not_counted_is_refused(expressions, said, tmp_path) -> None:
    assert said in refusal(read_by(expressions, tmp_path, load_model("llama-3-8b")))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"unfrozen_parameters": ["(a"]}, "is no regular expression"),
        ({"unfrozen_parameters": ["a[3:2]"]}, "has no rows"),
        ({"unfrozen_parameters": 3}, "expressions of names are expected"),
        ({"unfrozen_parameters": ["a"], "adapter": "lora", "lora_target_linear": True}, "would freeze the adapter"),
    ],
)
def test_expressions_that_say_nothing_are_refused_by_their_setting(more, said, tmp_path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({"base_model": "some/model", "learning_rate": 1e-5, "micro_batch_size": 1, **more}))
    with pytest.raises(DiagnosticError, match=said):
        api.fit(file, devices=1, model="llama-3-8b", seq_len=64, memory=1 << 40)


REFUSED = {
    "parts of layers": (model_of("llama"), Thawed(1, ("mlp",)), {}, "parts of a layer"),
    "all norms": (model_of("llama"), Thawed(1, extra_modules=("norm",)), {}, "norm that trains"),
    "a tied head": (model_of("llama", tied_embeddings=True), Thawed(1, extra_modules=("lm_head",)), {}, "lm_head"),
    "parts that are not equal": (model_of("llama", layers=3), Thawed(2, spread=True), {}, "2 equal parts"),
    "no layer": (model_of("llama"), Thawed(0), {}, "no layer"),
    "experts": (expert_model("mixtral"), Thawed(1), {}, "names of experts"),
    "a stream of f32": (model_of("llama"), Thawed(1, extra_modules=("embed_tokens",)), MIXED, "stream of f32"),
    "two types": (model_of("llama"), Thawed(1), {"gradient_dtype": "f32"}, "mixed precision"),
    "another framework": (model_of("llama"), Thawed(1), {"framework": "trl"}, "which parts train"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_not_read_is_refused_by_name(name: str) -> None:
    model, thawed, fields, text = REFUSED[name]
    job = evolve(frozen_job(model, thawed), **fields)
    assert text in refusal(job)
    with pytest.raises(DiagnosticError, match="RT061"):
        holdings(job)


FREEZE = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: freeze
freeze_trainable_layers: 2
cutoff_len: 512
per_device_train_batch_size: 1
learning_rate: 1.0e-5
bf16: true
dataset: a
"""


def test_a_plan_of_ours_trains_the_same_layers(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.yaml"
    file.write_text(FREEZE.replace("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B") + "max_steps: 100\n")
    found = api.fit(file, devices=2, memory=20 << 30, exact=True)
    assert "frozen but 2 of 24 layers; 29,824,768 or 6.04 % train" in str(found)
    assert found.ours is not None
    assert "import-plan" in found.ours.command
    assert "partly frozen" in found.ours.plan
    assert 0 < found.ours.peak_bytes < 20 << 30


TYPES = {
    "mixed": ("", ("bf16", "bf16", "f32")),
    "pure": ("pure_bf16: true\n", ("bf16", "bf16", "bf16")),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_file_says_what_trains_and_its_types(name: str, tmp_path) -> None:
    more, types = TYPES[name]
    file = tmp_path / "train.yaml"
    file.write_text(FREEZE.replace("bf16: true\n", more or "bf16: true\n"))
    job = read_job(file, Asked(devices=1))
    assert (job.weight_dtype, job.compute_dtype, job.trained_dtype) == types
    assert not job.not_understood
    part = Part(job, 0)
    assert trained(part) == 2 * load_model("llama-3-8b").layer_parameters(0)
    assert refusal(job) == ""
