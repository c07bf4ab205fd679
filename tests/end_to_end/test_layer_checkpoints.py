"""`recompute{policy=full checkpoint=layer}`: the same bits as with every activation kept, from one checkpoint a layer.

Configurations are a pairwise covering array. Every run goes through its file, is checked against the planned lives of
its bytes, and has freed bytes poisoned.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.ops.base import WorkGroup
from ratrain.ratrain_ir.ops.collectives import GatherRows, ReduceRows, repeats_sum
from ratrain.ratrain_ir.ops.compute import Recompute
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from tests.end_to_end.test_equivalence import covering_rows
from tests.end_to_end.test_tensor_ranks import MODELS, whole
from tests.end_to_end.tiny_runs import OPTIMIZER, losses, make_plan, train
from tests.mutation.subjects import WITH_STORES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.runtime.training.training import TrainingRun

STEPS = 3
TWO = {"pp": 2, "cuts": (2,)}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "one stage": ("place-1f1b", {"pp": 1, "cuts": ()}),
    "1f1b": ("place-1f1b", TWO),
    "zb-h1": ("place-zb-h1{delay=1}", TWO),
    "early gathers": ("place-1f1b,overlap-tensor{pieces=apart halves=split}", TWO),
    "merged": ("place-1f1b,overlap-tensor{pieces=merged halves=whole}", TWO),
    "zb-v": ("place-schedule{kind=zb-v}", {"pp": 2, "chunks": 2, "layout": "vee", "cuts": (1, 2, 3)}),
    "slices": ("place-schedule{kind=seq1f1b}", {**TWO, "slices": (4, 4)}),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "peers": ((2, True), (4, True), (2, False), (4, False)),
    "state": ((1, 0), (2, 1), (2, 3)),
    "model": ("llama", "gpt2", "tied", "qwen3", "granite"),
    "dtype": ("f16", "f32"),
    "recompute": (
        "recompute{policy=full checkpoint=layer}",
        "recompute{policy=full checkpoint=layer repeat=all}",
        "recompute{policy=full checkpoint=layer placement=forward-side}",
    ),
}
ROWS = covering_rows(FACTORS)
GATE = ("1f1b", "zb-v", "slices", "early gathers")
"""Shapes of which the first row is in the gate."""
IN_THE_GATE = [next(row for row in ROWS if row["shape"] == shape) for shape in GATE]


def compiled(row: dict[str, Any], recompute: str, machine: Any = None, **more: Any) -> Module:
    """The module of a row under one recomputation."""
    passes, keys = SHAPES[row["shape"]]
    (tp, sharding), (dp, zero) = row["peers"], row["state"]
    keys = {**keys, "tp": tp, "sequence_sharding": sharding, "dp": dp, "zero": zero, "view_dtype": row["dtype"]}
    keys |= {"seq_len": 8, "micro_batches": 4, "micro_batch_size": 1, "optimizer": evolve(OPTIMIZER, eps=1e-5), **more}
    if row["dtype"] == "f16":
        keys["loss_scale"] = 256.0
    model = MODELS[row["model"]]
    if "forward-side" in recompute and (zero == 3 or sharding or keys["pp"] == 1):
        recompute = recompute.replace(" placement=forward-side", "")  # refused there: recovery stands inline
    text = f"{passes},insert-prefetch,{recompute},allocate-ddr"
    if "overlap-tensor" in passes and zero == 3:
        text = text.replace("insert-prefetch,", "")
    return api.compile(model, make_plan(model, **keys), passes=text, machine=machine)


def trained(module: Module, machine: Any = None) -> TrainingRun:
    return train(api.emit(module, machine=machine), STEPS, check_memory=True, poison=True)


@pytest.mark.parametrize(
    "row",
    [row if row in IN_THE_GATE else pytest.param(row, marks=pytest.mark.full) for row in ROWS],
    ids=lambda row: "-".join(str(value) for value in row.values()),
)
def test_layers_recomputed_from_one_checkpoint_train_bit_for_bit(row: dict[str, Any]) -> None:
    found, kept = (trained(compiled(row, how)) for how in (row["recompute"], "recompute{policy=none}"))
    assert losses(found) == losses(kept)
    assert losses(found)[0] != losses(found)[-1]
    assert whole(found) == whole(kept)


ROW = {"shape": "1f1b", "peers": (2, True), "state": (1, 0), "model": "llama", "dtype": "f16"}


@pytest.mark.parametrize("peers", [(2, True), (4, True), (2, False), (4, False)])
def test_a_layer_keeps_its_input_alone_and_repeats_one_sum(peers: tuple[int, bool]) -> None:
    """Checkpoints of 4 layers and 4 micro-batches; each sum in a layer is repeated once, each gather is as before."""
    row = ROW | {"peers": peers}
    block, layer, every = (
        compiled(row, f"recompute{{policy=full{more}}}")
        for more in ("", " checkpoint=layer", " checkpoint=layer repeat=all")
    )
    counts = [Counter(map(type, (op for stage in module.stages for op in stage.ops))) for module in (block, layer)]
    assert counts[1][GatherRows] == counts[0][GatherRows]
    assert counts[1][Recompute] == counts[0][Recompute] == 2 * 4 * 4
    assert counts[1][ReduceRows] == counts[0][ReduceRows] + 4 * 4
    for module, sums in ((block, 0), (layer, 1), (every, 2)):
        repeated = [op for stage in module.stages for op in stage.ops if repeats_sum(op)]
        assert len(repeated) == sums * 4 * 4
    for stage in layer.stages:
        inputs = [t for t in stage.tensors.values() if t.name.startswith("x.attention.")]
        assert {tensor.kind for tensor in inputs} <= {StateKind.CHECKPOINT, StateKind.BOUNDARY}
        between = {t for t in stage.tensors.values() if t.name.startswith("x.mlp.")}
        assert between
        assert not any(between.intersection(op.reads) for op in stage.ops if op.work_group is WorkGroup.BACKWARD)


def test_stored_checkpoints_come_back_for_the_whole_layer() -> None:
    row = ROW | {"peers": (2, False)}
    how = "recompute{policy=full checkpoint=layer store=host}"
    stored, kept = compiled(row, how, WITH_STORES), compiled(row, "recompute{policy=none}", WITH_STORES)
    found, other = trained(stored, WITH_STORES), trained(kept, WITH_STORES)
    assert losses(found) == losses(other)
    assert whole(found) == whole(other)


@pytest.mark.parametrize(
    ("more", "keys", "model", "words"),
    [
        ("checkpoint=layer", {"tp": 1}, "llama", "a layer has one checkpoint, its input"),
        ("checkpoint=layer", {}, "neox", "read one input, which is the layer's checkpoint"),
        ("repeat=all", {}, "llama", "kept with checkpoint=block"),
        ("repeat=all", {}, "neox", "no sum stands between them"),
        ("policy=mlp checkpoint=layer", {}, "llama", "by policy=full alone; the policy is 'mlp'"),
        ("policy=auto repeat=all", {}, "llama", "by policy=full alone; the policy is 'auto'"),
        ("checkpoint=layer", {}, "olmo2", "norms the output of each block, and keeps its sum"),
        ("checkpoint=layer", {}, "capped", "norms the output of each block, and keeps its sum"),
    ],
)
def test_an_option_without_effect_is_refused(more: str, keys: dict[str, Any], model: str, words: str) -> None:
    plan = make_plan(MODELS[model], **{"pp": 1, "cuts": (), "tp": 2, "seq_len": 8, **keys})
    with pytest.raises(DiagnosticError, match=words) as caught:
        api.compile(MODELS[model], plan, passes=f"place-1f1b,recompute{{{more}}},allocate-ddr")
    assert all(each.help for each in caught.value.diagnostics)


@pytest.mark.parametrize("model", ["llama", "neox"])
def test_one_rank_repeats_a_layer_whole(model: str) -> None:
    """Without tensor-parallel ranks too `repeat=all` makes the output that nothing reads, and changes no bit."""
    row = ROW | {"model": model}
    more = {"tp": 1, "sequence_sharding": True}
    runs = []
    for how in ("recompute{policy=full repeat=all}", "recompute{policy=none}"):
        module = compiled(row, how, **more)
        again = [op for stage in module.stages for op in stage.ops if type(op) is Recompute]
        outputs = [t for op in again for t in op.writes if t.kind is StateKind.ACTIVATION]
        assert len(outputs) == len(again)
        runs.append(trained(module))
    assert losses(runs[0]) == losses(runs[1])
    assert whole(runs[0]) == whole(runs[1])
