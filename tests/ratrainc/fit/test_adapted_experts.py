"""Adapters of stacks of experts and of routers: PEFT's own classes on real models against the formulas, and refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.model.expert_targets import expert_targets
from ratrain.ratrainc.bridge.jobs.formats import read_job
from ratrain.ratrainc.bridge.jobs.job import Adapter, Checkpointing, Experts, Sharding
from ratrain.ratrainc.bridge.jobs.job_reader import Asked
from ratrain.ratrainc.fit.holdings.adapted_experts import ROUTER, adapted_parameters
from ratrain.ratrainc.fit.holdings.adapters import trained
from ratrain.ratrainc.fit.holdings.experts import experts_kept
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.overheads import WORKSPACE
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from tests.ratrainc.fit.jobs import expert_model, job_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.20")
peft = pytest.importorskip("peft", minversion="0.21")
# after these: the modules skip too, and a module that has skipped has no names
from tests.ratrainc.fit.test_frozen_layers import checkpoint  # noqa: E402
from tests.ratrainc.fit.test_saved_by_experts import TYPES, theirs  # noqa: E402
from tests.ratrainc.fit.test_steps import Live, steps  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
RANK = 4
STACKS = ("experts.gate_up_proj", "experts.down_proj")
ROUTERS = dict.fromkeys(FAMILIES, "gate.weight") | {"granitemoe": "router.weight"}
KINDS = {
    "bf16": {},
    "f32 adapters": {"autocast": True, "gradient_dtype": "f32"},
    "f32": {"weight_dtype": "f32", "gradient_dtype": "f32", "autocast": True},
}
"""Types of a run: pure, adapters in f32 on a bf16 base, and all in f32 under autocast."""


def tuned(job):
    """Return the model with PEFT's adapters of a job, and the second of its layers."""
    adapter, model = job.adapter, job.model
    module, _ = theirs(model, job.experts, job.weight_dtype)
    module.config.use_cache = False
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=8,
        target_modules="all-linear" if adapter.targets == ("all-linear",) else list(adapter.targets),
        target_parameters=list(adapter.target_parameters) or None,
    )
    module = peft.get_peft_model(module, config, autocast_adapter_dtype=False)
    for each in module.parameters():
        if each.requires_grad:
            each.data = each.data.to(TYPES[job.trained_dtype])
    return module, module.base_model.model.model.layers[1]


def adapted_job(model, targets, parameters=(), **fields):
    adapter = Adapter(RANK, 8.0, tuple(targets), target_parameters=tuple(parameters))
    return job_of("transformers", model, adapter=adapter, method="lora", **fields)


CASES = {
    **{f"all of {family}": (family, ("all-linear",), ()) for family in FAMILIES},
    **{f"parameters of {family}": (family, ("q_proj",), (*STACKS, ROUTERS[family])) for family in FAMILIES},
    "one stack": ("qwen3_moe", ("q_proj",), STACKS[:1]),
    "the other stack": ("olmoe", ("v_proj",), STACKS[1:]),
    "old names": ("mixtral", ("w1", "w2", "w3"), ()),
    "the old router": ("qwen3_moe", ("o_proj", "gate"), ()),
    "a shared expert": ("qwen2_moe", ("up_proj", "down_proj"), ("gate.weight",)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_block_saves_what_the_formulas_say(case: str, kind: str) -> None:
    family, targets, parameters = CASES[case]
    model = expert_model(family)
    job = adapted_job(model, targets, parameters, **KINDS[kind])
    assert refusal(job) == ""
    module, layer = tuned(job)
    part = Part(job, 0)
    assert sum(each.numel() for each in module.parameters() if each.requires_grad) == trained(part)
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}
    stored, alive = {}, []

    def pack(tensor):
        alive.append(tensor)
        if tensor.untyped_storage().data_ptr() not in own and not is_cast(tensor):
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    entry = torch.randn(2, 32, model.hidden_size, dtype=TYPES[job.weight_dtype], requires_grad=True)
    block = layer.block_sparse_moe if family == "granitemoe" else layer.mlp
    watched = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16, enabled=job.autocast), watched:
        block(entry)
    kept = [*experts_kept(part)]
    router = adapted_parameters(part).get(ROUTER)
    cast = 4 * sum(router.sides) if router and kind == "bf16" else 0  # a CPU makes a router's product in f32
    assert sum(stored.values()) == sum(nbytes for _, _, nbytes in kept) + cast, kept


def is_cast(tensor) -> bool:
    """Tell whether a tensor is a cast of a frozen matrix, or of a linear's adapter, which count as autocast's."""
    node = tensor.grad_fn
    if node is None:
        return tensor.dtype == torch.bfloat16 and tensor.dim() == 2 and not tensor.requires_grad
    if node.name() != "TBackward0":
        return False
    node = node.next_functions[0][0]
    return node.name() == "ToCopyBackward0" and "AccumulateGrad" in node.next_functions[0][0].name()


@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", ["all of mixtral", "all of olmoe", "one stack", "the other stack", "parameters of qwen2_moe"]
)
def test_a_step_on_one_device(case: str, kind: str, checkpointing: Checkpointing) -> None:
    family, targets, parameters = CASES[case]
    sizes = {"hidden_size": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "layers": 4, "vocab_size": 512}
    model = expert_model(family, expert_size=192, ffn_size=192, **sizes)
    fields = {"seq_len": 64, "optimizer": "adamw-foreach-off", "checkpointing": checkpointing}
    job = adapted_job(model, targets, parameters, **fields, **KINDS[kind])
    module, _ = tuned(job)
    if checkpointing is Checkpointing.FULL:
        for layer in module.base_model.model.model.layers:
            checkpoint(layer)
    live = Live()
    for each in module.parameters():
        live.add(each)
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], foreach=False)
    steps(module, optimizer, torch.randint(0, 512, (2, 64)), live, autocast=job.autocast)
    (rank,) = holdings(job)
    assert rank.peak_bytes - WORKSPACE == pytest.approx(live.peak, rel=0.05)


NAMES = ("q_proj", "o_proj", "gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj", "experts.3.up_proj", "x.w3")


@given(
    family=st.sampled_from(FAMILIES),
    targets=st.sets(st.sampled_from(NAMES)),
    parameters=st.sets(st.sampled_from((*STACKS, "gate.weight", "mlp.gate.weight"))),
    rank=st.integers(1, 64),
)
def test_names_mean_what_peft_takes_them_for(family, targets, parameters, rank) -> None:
    """`convert_peft_config_for_transformers` on a configuration with the same names."""
    conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
    model = SimpleNamespace(config=SimpleNamespace(model_type=family))
    config = peft.LoraConfig(r=rank, target_modules=sorted(targets), target_parameters=sorted(parameters))
    found = expert_targets(family, sorted(targets), sorted(parameters))
    if found.missing:
        with pytest.raises(ValueError, match=f"also targeting {found.missing}"):
            conversion.convert_peft_config_for_transformers(config, model, None)
        return
    conversion.convert_peft_config_for_transformers(config, model, None)
    assert {*found.linears} == {*config.target_modules}
    assert {*found.parameters} == {*(config.target_parameters or ())}
    assert [2 * rank] * found.doubled == [*(config.rank_pattern or {}).values()]


FILES = {
    "axolotl": (
        {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "learning_rate": 1e-5, "micro_batch_size": 1, "bf16": True},
        "lora_target_parameters",
    ),
    "trl": (
        {
            "model_name_or_path": "some/model",
            "use_peft": True,
            "lora_r": 8,
            "lora_dropout": 0.0,
            "max_length": 512,
            "dataset_name": "a",
            "per_device_train_batch_size": 1,
            "dtype": "bfloat16",
        },
        "lora_target_parameters",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_name_parameters(name: str, tmp_path) -> None:
    settings, key = FILES[name]
    if name == "axolotl":
        settings = {**settings, "base_model": "some/model", "sequence_len": 512, "flash_attention": True}
    model, file = load_model("olmoe-1b-7b"), tmp_path / "train.yaml"
    sums = []
    for parameters in ((STACKS[:1]), STACKS, (*STACKS, "gate.weight")):
        file.write_text(yaml.safe_dump({**settings, key: [*parameters]}))
        job = read_job(file, Asked(devices=1, model=model), name)
        assert job.framework == name
        assert refusal(job) == ""
        assert key not in {note.key for note in job.not_understood}
        assert job.adapter.targets == ()  # PEFT's defaults are for files without parameters
        sums.append(trained(Part(job, 0)))
    stacks = model.experts * 8 * (2 * model.hidden_size + 3 * model.expert_width)
    router = 8 * (model.hidden_size + model.experts)
    assert sums[1:] == [model.layers * stacks, model.layers * (stacks + router)]
    assert sums[0] < sums[1]


ALL = ("all-linear",)
REFUSED = {
    "dropout": ("olmoe", ALL, {}, {"dropout": 0.05}, "PEFT stops where adapters of stacks or routers have dropout"),
    "half of a stack": ("mixtral", ("w1", "w2"), {}, {}, "w3 is missing in the targets"),
    "a loop": ("olmoe", ALL, {"experts": Experts.EAGER}, {}, "read with grouped products, not 'eager'"),
    "shards of FSDP": ("olmoe", ALL, {"sharding": Sharding.FSDP2, "devices": 2}, {}, "what fsdp2 does with parameters"),
    "shards of ZeRO-3": ("olmoe", ALL, {"sharding": Sharding.ZERO3, "devices": 2}, {}, "what zero3 does"),
    "4 bits": ("olmoe", ALL, {}, {"base_bits": 4}, "bitsandbytes quantises linears"),
    "an expression": ("olmoe", (".*_proj",), {}, {}, "'.*_proj' touches experts"),
    "a router's module": ("qwen2_moe", ("gate",), {}, {}, "the target 'gate' names no linear"),
    "another parameter": ("olmoe", (), {}, {"target_parameters": ("norm.weight",)}, "the parameter 'norm.weight' is"),
    "nothing": ("olmoe", (), {}, {}, "no linear is left"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_not_read_is_refused_by_name(name: str) -> None:
    family, targets, fields, parts, said = REFUSED[name]
    job = adapted_job(expert_model(family), targets, **fields)
    assert said in refusal(evolve(job, adapter=evolve(job.adapter, **parts)))


@pytest.mark.parametrize("framework", ["axolotl", "llama-factory"])
@pytest.mark.parametrize("family", FAMILIES)
def test_frameworks_that_list_linears_find_neither_stacks_nor_routers(family: str, framework: str) -> None:
    job = evolve(adapted_job(expert_model(family), ALL), framework=framework)
    module, _ = theirs(job.model, job.experts, "bf16")
    listed = {name.rpartition(".")[2] for name, each in module.named_modules() if isinstance(each, torch.nn.Linear)}
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=RANK, target_modules=sorted(listed - {"lm_head"})))
    count = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert refusal(job) == ""
    assert trained(Part(job, 0)) == count


@pytest.mark.parametrize("sharding", [Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2])
def test_replicas_hold_stacks_whole(sharding: Sharding) -> None:
    model = load_model("olmoe-1b-7b")
    fields = {"devices": 4, "seq_len": 1024}
    job = adapted_job(model, ALL, sharding=sharding, **fields, master_dtype="f32" if "ZERO" in sharding.name else None)
    assert refusal(job) == ""
    held = {each.name: each.bytes for each in holdings(job)[0].owners}
    assert held["frozen weights of experts"] == 2 * model.expert_parameters
    alone = adapted_job(model, ("q_proj",), sharding=sharding, **fields, master_dtype=job.master_dtype)
    assert holdings(job)[0].peak_bytes - holdings(alone)[0].peak_bytes > 2 * model.expert_parameters
