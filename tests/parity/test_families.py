"""Every family against its class in `transformers`: loss and every gradient of tiny models with random weights, in f32."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.tensor_ranks import shares_heads
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.data.data import Batches
from ratrain.targets.runtime.weights.weights import stored_layout
from tests.end_to_end.tiny_runs import make_program, make_stream, start, state, train
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

pytestmark = [
    pytest.mark.parity,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the packages that transformers imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SEQ_LEN = 20
BETA1 = 0.9
LOSS, HELD_OUT, GRADIENT = 2e-6, 1e-6, 3e-5
"""Of the loss; of the largest element of a gradient: sums of some thousand products in f32."""

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # the row of a padding token would get no gradient
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GPT2 = {"n_embd": 24, "n_inner": 40, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 61}
NEOX = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
NEOX |= {"hidden_size": 32, "rotary_pct": 0.5}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama-biased": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-3.1": ("llama", {**SIZES, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama-linear": ("llama", {**SIZES, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("llama", {**SIZES, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-yarn": ("llama", {**SIZES, "rope_scaling": YARN}),
    "llama-gelu": ("llama", {**SIZES, "hidden_act": "gelu"}),
    "mistral-nemo": ("mistral", {**SIZES, "sliding_window": None, "head_dim": 10}),
    "mistral-window": ("mistral", {**SIZES, "sliding_window": 6}),
    "qwen2": ("qwen2", {**SIZES, "head_dim": None, "tie_word_embeddings": True}),
    "qwen2.5-yarn": ("qwen2", {**SIZES, "head_dim": None, "rope_scaling": YARN}),
    "qwen2-windows": (
        "qwen2",
        {**SIZES, "head_dim": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", SIZES),
    "qwen3-biased-windows": (
        "qwen3",
        {**SIZES, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "gemma2": ("gemma2", {**SIZES, "sliding_window": 5, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {**SIZES, "sliding_window": 5, "query_pre_attn_scalar": 16, "sliding_window_pattern": 3},
    ),
    "gemma3-scaled": (
        "gemma3_text",
        {
            **SIZES,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {**SIZES, "head_dim": None, "sliding_window": 6}),
    "phi3-partial": ("phi3", {**SIZES, "head_dim": None, "hidden_size": 32, "partial_rotary_factor": 0.75}),
    "olmo2": ("olmo2", {**SIZES, "head_dim": None, "attention_bias": True}),
    "olmo2-wide": (
        "olmo2",
        {**SIZES, "head_dim": None, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "granite": (
        "granite",
        {
            **SIZES,
            "head_dim": None,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.11,
            "logits_scaling": 8.0,
        },
    ),
    "smollm3": ("smollm3", {**SIZES, "head_dim": None}),
    "gpt2": ("gpt2", {**GPT2, **NO_DROPOUT, "initializer_range": 0.1}),
    "gpt-neox": ("gpt_neox", NEOX),
    "gpt-neox-serial": (
        "gpt_neox",
        {**NEOX, "use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500, "hidden_act": "gelu_fast"},
    ),
    "gpt-neox-scaled": (
        "gpt_neox",
        {**NEOX, "attention_bias": False, "tie_word_embeddings": True, "rope_scaling": YARN},
    ),
    "gpt2-exact": ("gpt2", {**GPT2, **NO_DROPOUT, "activation_function": "gelu", "tie_word_embeddings": False}),
}


PEERS = [*product(MODELS, (2, 4)), ("olmo2-wide", 8)]
"""Models, and how many tensor-parallel ranks share each out."""


def drawn(config: Any) -> Any:
    """A model of `transformers` with random weights, norms and biases included."""
    import torch
    import transformers

    torch.manual_seed(3)
    one_by_one = {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **one_by_one)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def saved(name: str, folder: Path) -> Any:
    """A model of `transformers` with random weights, saved in a folder."""
    import transformers

    model_type, keys = MODELS[name]
    given = {
        key: value for key, value in keys.items() if value is not None or key in ("sliding_window", "pad_token_id")
    }
    config = transformers.AutoConfig.for_model(model_type, **deepcopy(given))  # which fills in tables that it is given
    model = drawn(config)
    model.save_pretrained(folder)
    return model


def program_of(model: ModelConfig, *, length: int = SEQ_LEN, **keys: Any) -> Program:
    return make_program(
        model, seq_len=length, micro_batches=2, dp=1, cuts=(2,), **{"view_dtype": "f32", "zero": 0, **keys}
    )


def gradients(run: TrainingRun, model: ModelConfig) -> dict[str, npt.NDArray[np.float32]]:
    """Those of the first step, from the first moments it left; tied tables as one, by their names in the family's files."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    tensors = {name.split(".", 2)[2]: array for name, array in state(run).items()}
    for block in block_chain(model):
        flat = tensors[f"m1.{block}"] / np.float32(1 - BETA1)
        found |= named_parameters_of(model, block, flat)
    return {name: held.joined([found[part.name] for part in held.parts]) for name, held in stored_layout(model).items()}


def sequences(program: Program, step: int) -> Any:
    """The tokens of a step's sequences, each with the one that follows: a tensor [sequences, SEQ_LEN + 1]."""
    import torch

    plan, stream = program.plan, make_stream(program.model)
    batches = Batches(stream, plan, "sequential", 0)
    first = np.array([batches.sequence_of(step, index) for index in range(plan.global_batch)]) * plan.seq_len
    return torch.from_numpy(stream.tokens[first[:, None] + np.arange(plan.seq_len + 1)].astype(np.int64))


def loss_of(network: Any, rows: Any) -> Any:
    import torch

    logits = network(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def stored_name(name: str, model: ModelConfig) -> str:
    """What files call a parameter of a class in `transformers`, which renames the head of GPT-NeoX as it reads and writes."""
    return "embed_out.weight" if model.family == "gpt_neox" and name == "lm_head.weight" else name


def reference(network: Any, program: Program) -> tuple[float, dict[str, npt.NDArray[np.float64]]]:
    """Loss and gradients of the first step's sequences in float64."""
    network = network.double()
    loss = loss_of(network, sequences(program, 0))
    loss.backward()
    return float(loss.detach()), {
        stored_name(name, program.model): p.grad.numpy() for name, p in network.named_parameters()
    }


def same_gradients(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Check that gradients are of the same parameters, and as near as f32 has them."""
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[parameter], gradient, rtol=0, atol=GRADIENT * scale, err_msg=parameter)


@pytest.mark.parametrize("kernels", ["reference", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    network = saved(name, tmp_path)
    model = load_model(str(tmp_path))
    assert model.parameters == sum(p.numel() for p in network.parameters())
    program = program_of(model)
    run = start(program, 1, init=str(tmp_path), order="sequential", kernels=kernels)
    (step,) = run.steps()
    loss, wanted = reference(network, program)
    assert step.report.loss == pytest.approx(loss, rel=LOSS)
    found = gradients(run, model)
    same_gradients(found, wanted)


@pytest.mark.parametrize(("name", "peers"), PEERS)
def test_loss_and_gradients_of_tensor_peers_are_those_of_transformers(name: str, peers: int, tmp_path: Path) -> None:
    network = saved(name, tmp_path)
    model = load_model(str(tmp_path))
    program = program_of(model, tp=peers, sequence_sharding=peers == 2)
    run = start(program, 1, init=str(tmp_path), order="sequential")
    (step,) = run.steps()
    loss, wanted = reference(network, program)
    assert step.report.loss == pytest.approx(loss, rel=LOSS)
    blocks = training_state(run.engine, 1).blocks
    parts = {
        name: np.asarray(part)
        for block in blocks
        for name, part in named_parameters_of(model, block, blocks[block].m1 / np.float32(1 - BETA1)).items()
    }
    for parameter, held in stored_layout(model).items():
        gradient = wanted[parameter]
        found = held.joined([parts[part.name] for part in held.parts])
        np.testing.assert_allclose(found, gradient, rtol=0, atol=GRADIENT * np.abs(gradient).max(), err_msg=parameter)


CONTEXTS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "contiguous", {}),
    (3, "zigzag", {}),
    (6, "contiguous", {}),
    (2, "zigzag", {"slices": (4, 8)}),
    (2, "zigzag", {"context_exchange": "heads"}),
]


@pytest.mark.parametrize(("cp", "layout", "keys"), CONTEXTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_context_ranks_are_those_of_transformers(
    name: str, cp: int, layout: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    network = saved(name, tmp_path)
    model = load_model(str(tmp_path))
    if keys.get("context_exchange") == "heads" and (model.position == "alibi" or not shares_heads(model, cp)):
        pytest.skip("its ranks cannot share out the heads")
    program = program_of(model, cp=cp, context_layout=layout, length=12, **keys)
    run = start(program, 1, init=str(tmp_path), order="sequential")
    (step,) = run.steps()
    loss, wanted = reference(network, program)
    assert step.report.loss == pytest.approx(loss, rel=LOSS)
    same_gradients(gradients(run, model), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_has_its_loss_after_export(name: str, tmp_path: Path) -> None:
    """20 steps, exported, loaded here and by `transformers`: the loss of sequences that none of the steps saw."""
    import torch
    import transformers

    saved(name, tmp_path / "first")
    program = program_of(load_model(str(tmp_path / "first")))
    checkpoint, exported = str(tmp_path / "checkpoint"), tmp_path / "exported"
    run = train(program, 20, init=str(tmp_path / "first"), order="sequential", save=checkpoint)
    losses = [step.report.loss for step in run.done]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    (following,) = start(program, 1, order="sequential", resume=checkpoint).steps()
    export_weights(checkpoint, str(exported))
    network = transformers.AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager").double()
    with torch.no_grad():
        loss = float(loss_of(network, sequences(program, 20)))
    assert following.report.loss == pytest.approx(loss, rel=HELD_OUT)
    again = load_model(str(exported))
    assert not [*again.differences(program.model)]
    (first,) = start(program_of(again), 1, order="sequential", init=str(exported)).steps()
    with torch.no_grad():
        assert first.report.loss == pytest.approx(float(loss_of(network, sequences(program, 0))), rel=HELD_OUT)
