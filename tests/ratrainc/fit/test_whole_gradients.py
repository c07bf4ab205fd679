"""Gradients that wait whole for the last micro-batch, counted in PyTorch's FSDP 1 and 2, against the formulas.

A small LLaMA runs as rank 0 of four in a process group that only pretends to communicate; its earlier micro-batches do
not reduce, as trainers have it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrainc.bridge.jobs.job import WAITS, Checkpointing, Job, Sharding
from ratrain.ratrainc.fit.costs import slower
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.overheads import WORKSPACE
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.whole_sums import WHOLE, kept_item
from ratrain.ratrainc.fit.verdicts import most_bytes
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.fit.jobs import job_of, model_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.ratrainc.fit.test_steps import Live, llama, model_with  # noqa: E402 - after the skip, which is theirs too

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
RANKS = 4
WITHIN = 0.05


@pytest.fixture
def mesh():
    """Rank 0 of four, alone."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=fake.FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    torch.distributed.destroy_process_group()


def wrapped(job: Job, mesh):
    """A module under the job's FSDP, and the context of a micro-batch that reduces or does not."""
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecision,
        MixedPrecisionPolicy,
        ShardingStrategy,
        fully_shard,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    checkpointed = job.checkpointing is Checkpointing.FULL
    module = llama(job.model, job.seq_len, "sdpa", torch.float32, checkpointed)
    types = {"param_dtype": DTYPES[job.compute_dtype], "reduce_dtype": DTYPES[job.reduce_dtype]}
    if job.sharding is Sharding.FSDP1:
        strategy = ShardingStrategy.FULL_SHARD if job.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP
        module = FullyShardedDataParallel(
            module,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({type(module.model.layers[0])}),
            mixed_precision=MixedPrecision(**types),
            device_id=torch.device("cpu"),
        )
        return module, lambda reduces: nullcontext() if reduces else module.no_sync()
    shares = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**types)}
    for layer in module.model.layers:
        fully_shard(layer, reshard_after_forward=job.reshard_after_forward, **shares)
    fully_shard(module, **shares)

    @contextmanager
    def context(reduces):
        module.set_requires_gradient_sync(reduces)
        yield

    return module, context


def waiting(module) -> int:
    """Bytes of unsharded gradients that the module holds."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    held = []
    for each in module.modules():
        if isinstance(each, FullyShardedDataParallel):
            held.append(each._handle.flat_param.grad)
        elif isinstance(each, FSDPModule):
            for param in each._get_fsdp_state()._fsdp_param_group.fsdp_params:
                own = getattr(param, "_unsharded_param", None)
                held += [param.unsharded_accumulated_grad, None if own is None else own.grad]
    return sum(each.numel() * each.itemsize for each in held if each is not None)


def run(job: Job, module, context, live: Live) -> list[int]:
    """Run two steps; return the bytes that wait after each micro-batch but a step's last."""
    tokens = torch.randint(0, job.model.vocab_size, (job.micro_batch_size, job.seq_len))
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    held = []
    with live:
        for _ in range(2):
            for index in range(job.gradient_accumulation):
                last = index == job.gradient_accumulation - 1
                with context(last):
                    loss = module(input_ids=tokens, labels=tokens).loss
                    loss.backward()
                    del loss
                if not last:
                    held.append(waiting(module))
            optimizer.step()
            optimizer.zero_grad()
    return held


def sharded(kind: Sharding, vocab: int, **fields) -> Job:
    usual = {"seq_len": 64, "weight_dtype": "f32", "gradient_dtype": "f32", "devices": RANKS, "micro_batch_size": 1}
    usual |= {"gradient_accumulation": 3, "optimizer": "adamw-foreach-off", "sharding": kind}
    return job_of("transformers", model_with(vocab, layers=6), **{**usual, **fields})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Sharding.FSDP1, Sharding.FSDP2])
@pytest.mark.parametrize("reduced", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("vocab", "fields"),
    [
        (1024, {}),
        (1024, {"gradient_accumulation": 2}),
        (1024, {"checkpointing": Checkpointing.FULL}),
        (8192, {}),
        (8192, {"gradient_accumulation": 2}),
        (1024, {"reshard_after_forward": False}),
    ],
)
def test_whole_gradients_wait_and_the_peak_has_them(mesh, kind, reduced, vocab, fields) -> None:
    job = sharded(kind, vocab, reduce_dtype=reduced, **fields)
    module, context = wrapped(job, mesh)
    live = Live()
    for each in module.parameters():
        live.add(each.to_local() if hasattr(each, "to_local") else each)
    held = run(job, module, context, live)
    assert held == [kept_item(Part(job, 0)) * job.model.parameters] * len(held)
    (rank,) = holdings(job)
    moments = 2 * 4 * job.model.parameters // RANKS
    seen = live.peak + (moments if kind is Sharding.FSDP2 else 0)  # those inside DTensor ops are not seen
    assert rank.peak_bytes - WORKSPACE == pytest.approx(seen, rel=WITHIN)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduced", ["bf16", "f32"])
def test_a_step_of_one_micro_batch_under_fsdp1_is_fullest_where_its_root_is_reduced(mesh, reduced) -> None:
    job = sharded(Sharding.FSDP1, 8192, reduce_dtype=reduced, gradient_accumulation=1)
    module, context = wrapped(job, mesh)
    live = Live()
    for each in module.parameters():
        live.add(each)
    assert run(job, module, context, live) == []
    (rank,) = holdings(job)
    assert rank.moment == "at the end of the backward"
    assert rank.peak_bytes - WORKSPACE == pytest.approx(live.peak, rel=0.001)


JOBS = {
    "micro_batches": st.integers(1, 8),
    "devices": st.sampled_from([4, 8, 64]),
    "kind": st.sampled_from([Sharding.FSDP1, Sharding.FSDP2]),
    "reduced": st.sampled_from(["bf16", "f32"]),
    "framework": st.sampled_from(["axolotl", "trl", "litgpt", "torchtune", "llm-foundry", "pytorch"]),
    "checkpointing": st.sampled_from([Checkpointing.NONE, Checkpointing.FULL]),
}


def drawn(micro_batches, devices, kind, reduced, framework, checkpointing) -> Job:
    sizes = {"seq_len": 128, "gradient_accumulation": micro_batches, "devices": devices}
    types = {"weight_dtype": "f32", "gradient_dtype": "f32", "reduce_dtype": reduced}
    return job_of(framework, model_of("llama", layers=8), sharding=kind, checkpointing=checkpointing, **sizes, **types)


@given(**JOBS)
def test_gradients_wait_where_several_micro_batches_do_and_their_framework_lets_them(**fields) -> None:
    job = drawn(**fields)
    waits = fields["framework"] in WAITS and fields["micro_batches"] > 1
    (rank,) = holdings(job)
    held = [sum(each.bytes for each in moment.owners if each.name == WHOLE) for moment in rank.moments]
    assert any(held) == waits == job.sums_whole
    if waits:  # all of them at some moment, whatever the number of devices, and none at the optimizer's step
        assert max(held) == kept_item(Part(job, 0)) * job.model.parameters
        assert held[-1] == 0


@given(**JOBS)
def test_a_reduction_after_each_micro_batch_never_takes_more(**fields) -> None:
    job = drawn(**fields)
    assert most_bytes(evolve(job, reduces_each=True)) <= most_bytes(job)
    assert most_bytes(evolve(job, gradient_accumulation=1)) <= most_bytes(job)


def test_reductions_of_each_micro_batch_cost_time() -> None:
    job = drawn(8, 64, Sharding.FSDP1, "bf16", "trl", Checkpointing.FULL)
    assert slower(job, evolve(job, reduces_each=True), load_machine("a100-node")) > 0
    torchtune = evolve(job, framework="torchtune")
    assert slower(torchtune, evolve(torchtune, reduces_each=True), load_machine("a100-node")) == 0


def test_offloaded_weights_leave_whole_gradients_on_the_device() -> None:
    job = sharded(Sharding.FSDP1, 1024, offload_parameters=True)
    (rank,) = holdings(job)
    assert WHOLE in {each.name for each in rank.owners}
