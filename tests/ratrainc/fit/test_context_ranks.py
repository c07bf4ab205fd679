"""Context ranks of jobs: what a rank holds, what is refused, what a way out brings, and the words for it.

Exchanges are written here a second time as the steps of each code, with tensors that are made and freed, and counted.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.jobs.formats import read_job
from ratrain.ratrainc.bridge.jobs.job import Adapter, Attention, Checkpointing, Context, Job, Loss, Sharding, Training
from ratrain.ratrainc.bridge.jobs.job_reader import Asked
from ratrain.ratrainc.fit.costs import slower
from ratrain.ratrainc.fit.holdings.activations import layer_kept
from ratrain.ratrainc.fit.holdings.context import EXCHANGE, exchange_backward, exchange_forward
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.limits import limits
from ratrain.ratrainc.fit.verdicts import Verdict, most_bytes
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.fit.jobs import job_of, megatron, model_of

torch = pytest.importorskip("torch")
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402 - after the skip
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

GIB = 1 << 30
MODEL = model_of("llama", layers=4, hidden_size=256, heads=16, kv_heads=8, head_dim=16, ffn_size=704, vocab_size=512)
FORMS: dict[str, tuple[str, Context, dict[str, Any]]] = {
    "gather of ring-flash-attn": ("axolotl", Context.GATHER, {"attention": Attention.FLASH}),
    "ring of ring-flash-attn": ("axolotl", Context.RING, {"attention": Attention.FLASH}),
    "gather of PyTorch": ("torchtitan", Context.GATHER, {}),
    "ring of PyTorch": ("torchtitan", Context.RING, {}),
    "ring of TransformerEngine": ("megatron-lm", Context.RING, {"attention": Attention.FLASH}),
    "gather of TransformerEngine": ("megatron-lm", Context.GATHER, {"attention": Attention.FLASH}),
    "heads of TransformerEngine": ("megatron-lm", Context.HEADS, {"attention": Attention.FLASH}),
    "heads of DeepSpeed": ("deepspeed", Context.HEADS, {"sharding": Sharding.ZERO3, "attention": Attention.FLASH}),
}


def job(form: str, cp: int, **fields: Any) -> Job:
    framework, context, own = FORMS[form]
    usual = {"seq_len": 256, "micro_batch_size": 1, "cp": cp, "devices": cp, "sharding": Sharding.FSDP2, **own}
    if framework == "megatron-lm":
        return megatron(MODEL, context=context, **{**usual, "sharding": Sharding.DISTRIBUTED_OPTIMIZER, **fields})
    return job_of(framework, MODEL, context=context, **{**usual, **fields})


class Allocator:
    """Bytes of named tensors that are alive, and the most that were at once."""

    def __init__(self) -> None:
        self.alive: dict[str, int] = {}
        self.most = 0

    def make(self, **sizes: int) -> None:
        self.alive |= sizes
        self.most = max(self.most, sum(self.alive.values()))

    def free(self, *names: str) -> None:
        for name in names:
            del self.alive[name]


def ring_flash_ring(cp: int, q: int, k: int) -> int:
    """ring_flash_attn_backward, in elements of a rank's queries and keys: results in bf16 are counted elsewhere."""
    a = Allocator()
    a.make(next_k=2 * k, next_v=2 * k)
    if cp > 2:
        a.make(k=2 * k, v=2 * k)  # received before
    a.make(dq=4 * q, dk=4 * k, dv=4 * k)
    for _ in range(cp - 1):
        a.make(next_dk=4 * k, next_dv=4 * k)
        a.make(new_dk=4 * k, new_dv=4 * k)  # block + next: the old ones are still there
        a.free("new_dk", "new_dv")
    return a.most


def ring_flash_gather(cp: int, q: int, k: int, heads: int = 8) -> int:
    """llama3_flash_attn_varlen_backward with one head of keys at a time."""
    a = Allocator()
    head = k // heads
    a.make(kv_buffer=2 * 2 * cp * head, dkv_buffer=2 * 2 * cp * head, kv_contiguous_buffer=2 * 2 * head)
    return a.most


def engine_ring(cp: int, q: int, k: int) -> int:
    """AttnFuncWithCPAndKVP2P.backward: two buffers of keys, values and their gradients; a step's gradients."""
    a = Allocator()
    a.make(buffer_0=2 * 2 * 2 * k, buffer_1=2 * 2 * 2 * k, dq_of_a_step=2 * q)
    return a.most


def engine_gather(cp: int, q: int, k: int) -> int:
    """AttnFuncWithCPAndKVAllGather.backward on the rank with the last chunk."""
    a = Allocator()
    a.make(k_ag=2 * cp * k, v_ag=2 * cp * k, dk=2 * cp * k, dv=2 * cp * k)
    a.make(dk_of_a_step=2 * cp * k, dv_of_a_step=2 * cp * k)
    return a.most


def heads(cp: int, q: int, k: int) -> int:
    """The gradient of the result by head, and those of query, key and value before their all-to-all."""
    a = Allocator()
    a.make(dout=2 * q, dq=2 * q, dk=2 * k, dv=2 * k)
    return a.most


STEPS = {
    "gather of ring-flash-attn": ring_flash_gather,
    "ring of ring-flash-attn": ring_flash_ring,
    "ring of TransformerEngine": engine_ring,
    "gather of TransformerEngine": engine_gather,
    "heads of TransformerEngine": heads,
    "heads of DeepSpeed": heads,
}


@pytest.mark.parametrize("form", STEPS)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_backward_holds_what_its_steps_make(form: str, cp: int) -> None:
    tokens = 256 // cp
    counted = STEPS[form](cp, tokens * MODEL.heads * MODEL.head_dim, tokens * MODEL.kv_heads * MODEL.head_dim)
    assert exchange_backward(Part(job(form, cp), 0)) == counted


class Peak(TorchDispatchMode):
    """Most bytes of storages that were alive at once, of those that are made under it."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given = [each.untyped_storage() for each in given]
        self.seen = {each._cdata for each in self.given}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if type(each) is torch.Tensor and each.untyped_storage()._cdata not in self.seen:
                self._made(each.untyped_storage())
        return results

    def _made(self, storage) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        self.seen.add(address)
        self.now += nbytes
        self.most = max(self.most, self.now)

        def freed() -> None:
            self.seen.discard(address)
            self.now -= nbytes

        weakref.finalize(storage, freed)


def of_torch(form: str, part: Part, rank: int) -> tuple[int, int, bool]:
    """Run PyTorch's exchange as one of several ranks that receive nothing: peaks, and if the result lies by head."""
    code = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    rows, width = part.tokens, part.model.head_dim
    query, key, value = (
        torch.zeros(1, rows, heads, width, dtype=torch.bfloat16).transpose(1, 2)
        for heads in (part.heads, part.model.kv_heads, part.model.kv_heads)
    )

    def forward(query, key, value, **_):
        return torch.empty_like(query), torch.zeros(query.shape[:3])

    def backward(query, key, value, **_):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=part.job.cp)
    before = code._cp_options.rotate_method
    try:
        group = torch.distributed.group.WORLD
        code._cp_options.rotate_method = code._RotateMethod["ALL_GATHER" if "gather" in form else "ALL_TO_ALL"]
        with Peak(query, key, value) as there:
            out, sums, *_ = code._templated_ring_attention(group, 2, forward, query, key, value, is_causal=True)
        gradient = torch.zeros_like(out)
        with Peak(query, key, value, out, sums, gradient) as back:
            code._templated_ring_attention_backward(
                group, 2, backward, gradient, "grad_out", query, key, value, out, sums, is_causal=True
            )
    finally:
        code._cp_options.rotate_method = before
        torch.distributed.destroy_process_group()
    return there.most, back.most, out.is_contiguous()


@pytest.mark.parametrize("form", ["gather of PyTorch", "ring of PyTorch"])
@pytest.mark.parametrize("kv_heads", [4, 8, 16])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_exchange_of_pytorch_holds_what_its_own_code_makes(form: str, kv_heads: int, cp: int) -> None:
    """Leave out what other formulas count, the attention's result and gradients, and sums of rows."""
    part = Part(evolve(job(form, cp), model=evolve(MODEL, kv_heads=kv_heads)), 0)
    first, last = (of_torch(form, part, rank) for rank in (0, cp - 1))
    forward = exchange_forward(part) + part.item * part.tokens * part.query
    backward = exchange_backward(part) + part.item * part.tokens * (part.query + 2 * part.key)
    assert forward == pytest.approx(max(first[0], last[0]), rel=0.1)
    assert backward == pytest.approx(max(first[1], last[1]), rel=0.1)
    assert (first[2], last[2]) == (True, False)  # a copy on the first rank, which the projection reads


@pytest.mark.parametrize("form", FORMS)
def test_one_context_rank_is_a_job_without(form: str) -> None:
    one = job(form, 1)
    part = Part(one, 0)
    assert exchange_forward(part) == exchange_backward(part) == 0
    assert holdings(one) == holdings(evolve(one, context=Context.GATHER))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([Checkpointing.NONE, Checkpointing.FULL]),
)
def test_a_rank_keeps_its_part_of_a_sequence_and_shares_state_as_before(form: str, cp: int, policy) -> None:
    """As many devices hold as much state each; of activations a rank keeps what a shorter sequence alone would."""
    ranks = job(form, cp, devices=8, checkpointing=policy)
    alone = evolve(ranks, cp=1, seq_len=256 // cp)
    for moment, other in zip(holdings(ranks)[0].moments, holdings(alone)[0].moments, strict=True):
        own = {each.name: each.bytes for each in moment.owners}
        exchanged, attention = own.pop(EXCHANGE, 0), own.pop("activations: attention", 0)
        rest = {each.name: each.bytes for each in other.owners}
        before = rest.pop("activations: attention", 0)
        # of two layers' gradients the fuller moment counts, which depends on what the layer keeps
        waiting = "buffers of FSDP2: whole gradients"
        assert own.pop(waiting, 0) <= rest.pop(waiting, 0)
        assert own == rest
        assert exchanged >= 0
        assert attention >= before
    extra = sum(each.bytes for each in layer_kept(Part(ranks, 0))) - sum(
        each.bytes for each in layer_kept(Part(alone, 0))
    )
    copies = form.startswith("heads") or "PyTorch" in form
    assert extra == (2 * 256 // cp * MODEL.heads * MODEL.head_dim if copies else 0)


def test_heads_of_keys_are_repeated_where_there_are_more_ranks() -> None:
    """16 ranks of 8 heads of keys: each has one head of whole sequences, twice an equal share."""
    part = Part(job("heads of DeepSpeed", 16), 0)
    kept = {each.name: each.bytes for each in layer_kept(part) if each.owner == "activations: attention"}
    assert kept["key"] == kept["value"] == 2 * 256 * MODEL.head_dim
    assert kept["query"] == kept["output by head"] == 2 * 256 * MODEL.head_dim


def test_more_context_ranks_never_hold_more_of_a_long_sequence() -> None:
    for form in FORMS:
        peaks = [most_bytes(job(form, cp, devices=8, seq_len=1 << 15, loss=Loss.UPCAST)) for cp in (2, 4, 8)]
        assert peaks == sorted(peaks, reverse=True), form


REFUSED: dict[str, tuple[Job, str]] = {
    "a length": (job("gather of PyTorch", 4, seq_len=252), "seq_len: 252 tokens are not a multiple of 8"),
    "a length of rings": (
        job_of("nanotron", MODEL, cp=4, devices=4, seq_len=250, context=Context.RING, attention=Attention.FLASH),
        "seq_len: 250 tokens are not a multiple of 4: nanotron needs 1 equal run",
    ),
    "heads": (job("heads of DeepSpeed", 32), "cp: 16 heads do not share out evenly over 32 context ranks"),
    "heads of keys": (job("heads of TransformerEngine", 16), "cp: 8 heads of keys do not share out evenly over 16"),
    "heads of a tensor-parallel rank": (
        job("heads of TransformerEngine", 8, tp=4, devices=32),
        "cp: 4 heads do not share out evenly over 8",
    ),
    "kept scores": (job("ring of TransformerEngine", 2, attention=Attention.EAGER), "attention: context ranks go"),
    "axolotl's kernels": (job("ring of ring-flash-attn", 2, attention=Attention.SDPA), "need flash attention"),
    "axolotl's FSDP 1": (job("ring of ring-flash-attn", 2, sharding=Sharding.FSDP1), "need FSDP 2"),
    "axolotl's packing": (
        job("gather of ring-flash-attn", 2, micro_batch_size=2, training=Training(packing=True)),
        "micro_batch_size: axolotl's context ranks need 1",
    ),
    "axolotl's stride": (
        job("gather of ring-flash-attn", 2, sizes={"heads_k_stride": 3}),
        "heads_k_stride: 3 does not",
    ),
    "accelerate's mechanism": (
        job_of("trl", MODEL, cp=2, devices=2, sharding=Sharding.ZERO3),
        "accelerate's context ranks need FSDP 2",
    ),
    "accelerate's kernels": (
        job_of("trl", MODEL, cp=2, devices=2, sharding=Sharding.FSDP2, attention=Attention.FLASH),
        "PyTorch's fused attention",
    ),
    "accelerate's heads": (
        job_of("trl", MODEL, cp=2, devices=2, sharding=Sharding.FSDP2, context=Context.HEADS),
        "heads are exchanged by DeepSpeed alone",
    ),
    "a framework without": (job_of("litgpt", MODEL, cp=2, devices=2), "cp: litgpt has no context ranks"),
    "devices": (job("gather of PyTorch", 4, devices=6), "devices: 6 are not a multiple of tp x pp x cp = 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_framework_would_stop_at_is_refused(name: str) -> None:
    wrong, reason = REFUSED[name]
    assert reason in refusal(wrong)


@pytest.mark.parametrize("form", FORMS)
def test_the_longest_sequence_is_one_that_context_ranks_can_cut(form: str) -> None:
    whole = job(form, 1, devices=96)
    cut = evolve(whole, cp=6 if whole.context is not Context.HEADS else 8)
    one, several = (limits(each, lambda one: most_bytes(one) <= 16 * GIB, lambda *_: None) for each in (whole, cut))
    assert one.longest_sequence is not None
    assert several.longest_sequence is not None
    assert several.longest_sequence > one.longest_sequence
    assert not refusal(evolve(cut, seq_len=several.longest_sequence))
    assert several.fewest_devices is None or several.fewest_devices % cut.cp == 0


def test_a_rank_with_one_run_waits_for_the_last() -> None:
    """The last of 4 ranks has 1.75 times the mean of the scores: more time than halves of early and late runs."""
    machine = load_machine("h100-node")
    long = {"seq_len": 1 << 17, "devices": 8}
    one, two = (slower(job(form, 1, **long), job(form, 4, **long), machine) for form in list(FORMS)[1:4:2])
    assert one > two > -0.01


AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
sequence_len: 131072
micro_batch_size: 1
gradient_accumulation_steps: 1
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: true
attn_implementation: sdpa
gradient_checkpointing: true
fsdp_version: 2
fsdp_config: {transformer_layer_cls_to_wrap: LlamaDecoderLayer, reshard_after_forward: true}
"""


EACH = "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}"


def test_context_ranks_are_a_way_out_in_the_words_of_the_file(tmp_path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(AXOLOTL)
    found = api.fit(file, devices=8, memory=79 * GIB)
    way = next(each for each in found.ways if "context_parallel_size: 8" in each.changes)
    assert way.changes == (
        "context_parallel_size: 8",
        "attn_implementation: flash_attention_2",
        "gradient_accumulation_steps: 8",
        EACH,
    )
    assert way.verdict is Verdict.FITS
    assert not way.alters
    file.write_text(
        AXOLOTL.replace("attn_implementation: sdpa", "attn_implementation: flash_attention_2")
        .replace("steps: 1", "steps: 8")
        .replace("micro", "context_parallel_size: 8\nmicro", 1)
        + EACH
    )
    after = api.fit(file, devices=8, memory=79 * GIB)
    assert after.peak == way.peak_bytes
    assert "8 devices, cp 8, fsdp2; 1 x 131072 tokens for 8 devices and micro-batch" in repr(after)
    assert "context ranks of ring-flash-attn" in after.band.text


NANOTRON = """model:
  dtype: bfloat16
  model_config: {is_qwen2_config: true, attention_bias: true, num_attention_heads: 16, num_hidden_layers: 4%s}
optimizer:
  accumulate_grad_in_fp32: true
  learning_rate_scheduler: {learning_rate: 0.001}
  zero_stage: 1
parallelism: {dp: 8, pp: 1, tp: 1%s}
tokens: {batch_accumulation_per_replica: %d, micro_batch_size: 1, sequence_length: 65536, train_steps: 100}
"""


def test_nanotron_takes_context_ranks_from_one_with_their_kernel(tmp_path) -> None:
    file = tmp_path / "nano.yaml"
    file.write_text(NANOTRON % ("", "", 1))
    before = api.fit(file, memory=79 * GIB)
    way = next(each for each in before.ways if any("context_parallel_size: 4" in change for change in each.changes))
    assert "_attn_implementation: llama3_ring_attention" in way.text
    kernel = ", _attn_implementation: llama3_ring_attention, ring_attn_heads_k_stride: 1"
    text = NANOTRON % (kernel, ", context_parallel_size: 4", 4)
    file.write_text(text.replace("dp: 8", "dp: 2"))
    assert api.fit(file, memory=79 * GIB).peak == way.peak_bytes < before.peak


@pytest.mark.parametrize("more", [", _use_qkv_packed: false", ", _attn_implementation: sdpa", "llama"])
def test_nanotron_is_not_told_of_context_ranks_that_its_code_lacks(more: str, tmp_path) -> None:
    file = tmp_path / "nano.yaml"
    text = NANOTRON % ("" if more == "llama" else more, "", 1)
    file.write_text(text.replace("qwen2", "llama") if more == "llama" else text)
    assert not any("context_parallel_size" in way.text for way in api.fit(file, memory=79 * GIB).ways)


def test_a_file_that_its_framework_would_stop_at_is_refused_with_a_way_on(tmp_path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(AXOLOTL + "context_parallel_size: 8\n")
    with pytest.raises(DiagnosticError, match="need flash attention") as caught:
        api.fit(file, devices=8, memory=79 * GIB)
    assert "flash_attention_2" in caught.value.diagnostics[0].message


def test_adapters_go_with_context_ranks() -> None:
    adapter = Adapter(rank=16, alpha=32.0, targets=("all-linear",))
    tuned = job("gather of ring-flash-attn", 4, method="lora", adapter=adapter)
    assert refusal(tuned) == ""
    assert most_bytes(tuned) < most_bytes(job("gather of ring-flash-attn", 4))


ARGUMENTS = "--tensor-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 8 --seq-length 64 --num-layers 2 "
MEGATRON = f"torchrun --nproc_per_node 8 pretrain_gpt.py {ARGUMENTS} --hidden-size 64 --num-attention-heads 8 "
WORDS: dict[str, tuple[str, str, Context, bool]] = {
    "axolotl packs": ("axolotl", f"{AXOLOTL}context_parallel_size: 2\nsample_packing: true\n", Context.GATHER, False),
    "axolotl does not pack": ("axolotl", f"{AXOLOTL}context_parallel_size: 2\n", Context.RING, False),
    "axolotl, by name": (
        "axolotl",
        f"{AXOLOTL}context_parallel_size: 2\nring_attn_func: varlen_llama3\nheads_k_stride: 2\n",
        Context.GATHER,
        False,
    ),
    "Megatron-LM": ("megatron-lm", f"{MEGATRON} --context-parallel-size 2", Context.RING, False),
    "Megatron-LM's heads": (
        "megatron-lm",
        f"{MEGATRON} --context-parallel-size 2 --cp-comm-type a2a",
        Context.HEADS,
        False,
    ),
    "Megatron-LM, two in one": (
        "megatron-lm",
        f"{MEGATRON} --context-parallel-size 4 --cp-comm-type a2a+p2p",
        Context.RING,
        True,
    ),
    "one rank": ("megatron-lm", f"{MEGATRON} --cp-comm-type all_gather", Context.GATHER, False),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_file_says_the_form(name: str, tmp_path) -> None:
    framework, text, form, open_ = WORDS[name]
    file = tmp_path / "file"
    file.write_text(text)
    read = read_job(file, Asked(devices=8), framework)
    assert read.context is form
    assert any("cp-comm-type" in each.key for each in read.not_understood) is open_
    assert read.sizes.get("heads_k_stride") == (2 if "stride" in text else None)
    told = {each.key for each in (*read.ignored, *read.not_understood)}
    assert ("cp-comm-type" in told) is (name in ("one rank", "Megatron-LM, two in one"))  # without effect, or open


def test_a_name_that_axolotl_does_not_have_is_refused(tmp_path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"{AXOLOTL}context_parallel_size: 2\nring_attn_func: batch_zigzag\n")
    with pytest.raises(DiagnosticError, match="one of varlen_llama3, batch_ring"):
        api.fit(file, devices=8, memory=GIB)


def test_exact_compares_context_ranks_with_slices(tmp_path) -> None:
    from ratrain.ratrainc.functions.long_sequences import long_sequence_plans

    model = load_model("tinyllama-1.1b")
    long = job_of("torchtitan", model, cp=2, devices=4, seq_len=4096, sharding=Sharding.FSDP2)
    ranks, slices = long_sequence_plans(long, load_machine("h100-node"))
    assert (ranks.plan, slices.plan) == ("cp 2", "4 slices through 2 stages")
    assert ranks.peak_bytes > 0 < slices.step_seconds
    assert long_sequence_plans(evolve(long, cp=1), load_machine("h100-node")) == ()
    short, none = long_sequence_plans(evolve(long, seq_len=4095), load_machine("h100-node"))
    assert "context ranks" in short.why_none
    assert none.plan
