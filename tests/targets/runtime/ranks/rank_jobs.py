"""Trainings by ranks that are processes, over MPI or torch.distributed, and the cases that both are held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch, RouterLosses
from ratrain.ratrain_ir.config.plan import Optimizer
from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.targets.program.rtx import write_program
from tests.end_to_end.chunk_runs import program_of
from tests.end_to_end.tiny_runs import MODEL, reports_of, train
from tests.end_to_end.toys import EXPERTS, GPT2, OLMO2, SHARED_EXPERT
from tests.targets.runtime.ranks.mpi_tools import run_ranks
from tests.targets.runtime.ranks.torch_tools import run_by_torchrun

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

START = {"mpi": run_ranks, "torch": run_by_torchrun, "torch-untagged": run_by_torchrun}
"""Who starts the processes of an engine."""

TIED = evolve(MODEL, tied_embeddings=True)
WINDOW = evolve(MODEL, family="mistral", sliding_window=3)
CLIPPED = Optimizer(lr=5e-3, warmup_steps=3, clip="global")
STEPS = 3
_PACKED = {"gather_quantised": "int8-block", "reduce_quantised": "int8-block"}
PLANS: dict[str, dict[str, Any]] = {
    "2x2": {},
    "2x2-each-micro-batch": {"zero": 2, "reduce": "each-micro-batch"},
    "2x2-views-gathered-for-each-use": {"zero": 3, "reduce": "each-micro-batch"},
    "2x2-nothing-sharded-clipped": {"zero": 0, "optimizer": CLIPPED},
    "2x2-tied-clipped": {"model": TIED, "optimizer": CLIPPED},
    "2x2-baseline": {"name": "baseline-1f1b"},
    "2x2-f32": {"view_dtype": "f32"},
    "2x2-bf16": {"view_dtype": "bf16", "zero": 2, "reduce": "each-micro-batch"},
    "2x2-bf16-tied-clipped": {"model": TIED, "optimizer": CLIPPED, "view_dtype": "bf16"},
    "2x2-gpt2-clipped": {"model": GPT2, "optimizer": CLIPPED},
    "2x2-overflow": {"loss_scale": 2.0**19},
    "2x2-slices": {"slices": (4, 1, 5), "zero": 2, "reduce": "each-micro-batch"},
    "2x2-documents": {"attention_mask": "document"},
    "2x2-documents-slices-gpt2": {"model": GPT2, "attention_mask": "document", "slices": (4, 1, 5)},
    "1x4-tied": {"model": TIED, "pp": 1, "dp": 4},
    "1x4-shard-groups": {"pp": 1, "dp": 4, "shard_group": 2, "zero": 2, "reduce": "each-micro-batch"},
    "1x4-levels-clipped": {
        "pp": 1,
        "dp": 4,
        "shard_group": 2,
        "zero_blocks": ZeroLevels.parse("mlp.* 3, attention.* 0"),
        "optimizer": CLIPPED,
    },
    "1x4-view-groups-clipped": {"pp": 1, "dp": 4, "view_group": 2, "zero": 3, "optimizer": CLIPPED},
    "1x4-view-groups-levels": {
        "pp": 1,
        "dp": 4,
        "view_group": 2,
        "zero_blocks": ZeroLevels.parse("mlp.* 3"),
        "reduce": "each-micro-batch",
    },
    "1x4-packed-view-groups": {"pp": 1, "dp": 4, "view_group": 2, "zero": 3, **_PACKED},
    "2x2-packed": {**_PACKED, "zero": 2, "reduce": "each-micro-batch", "optimizer": CLIPPED},
    "2x2-packed-overflow": {**_PACKED, "loss_scale": 2.0**19},
    "1x4-packed-groups": {"pp": 1, "dp": 4, "shard_group": 2, "zero": 3, **_PACKED, "gather_quantised": "int4-block"},
    "1x4-packed-levels": {**_PACKED, "pp": 1, "dp": 4, "zero_blocks": ZeroLevels.parse("mlp.* 3, attention.* 0")},
    "2x2-experts": {
        "model": EXPERTS,
        "router": RouterLosses(0.1, bias_update=0.5),
        "zero": 3,
        "reduce": "each-micro-batch",
    },
    "1x4-shared-expert": {"model": SHARED_EXPERT, "router": RouterLosses(0.1, 0.01), "pp": 1, "dp": 4, "zero": 2},
    "4x1-tied": {"model": evolve(TIED, layers=4), "pp": 4, "dp": 1},
}

PEER_PLANS: dict[str, dict[str, Any]] = {
    "2x1x2-clipped": {"dp": 1, "tp": 2, "optimizer": CLIPPED},
    "1x2x2": {"pp": 1, "tp": 2},
    "2x1x2-tied": {"model": TIED, "dp": 1, "tp": 2},
    "1x2x2-each-micro-batch": {"pp": 1, "tp": 2, "zero": 2, "reduce": "each-micro-batch", "optimizer": CLIPPED},
    "2x1x2-overflow": {"dp": 1, "tp": 2, "loss_scale": 2.0**19},
    "1x1x4-copied-heads": {"pp": 1, "dp": 1, "tp": 4, "zero": 0, "sequence_sharding": False, "optimizer": CLIPPED},
    "1x2x2-bf16-whole-rows": {"pp": 1, "tp": 2, "zero": 3, "sequence_sharding": False, "view_dtype": "bf16"},
    "2x1x2-norms-over-heads": {"model": OLMO2, "dp": 1, "tp": 2, "loss_scale": 256.0, "optimizer": CLIPPED},
    "1x2x2-packed": {"pp": 1, "tp": 2, "zero": 3, **_PACKED},
    "2x1x2-documents": {"dp": 1, "tp": 2, "attention_mask": "document", "view_dtype": "f32"},
    "2x1c2-clipped": {"dp": 1, "cp": 2, "seq_len": 12, "optimizer": CLIPPED},
    "1x2c2-each-micro-batch": {"pp": 1, "dp": 2, "cp": 2, "seq_len": 12, "zero": 2, "reduce": "each-micro-batch"},
    "1x1c2x2-documents": {"pp": 1, "dp": 1, "cp": 2, "tp": 2, "seq_len": 12, "attention_mask": "document"},
    "1x1c4-window": {"model": WINDOW, "pp": 1, "dp": 1, "cp": 4, "seq_len": 16},
    "1x1c4-groups": {"pp": 1, "dp": 1, "cp": 4, "seq_len": 16, "context_groups": 2},
    "1x1c4-heads": {"pp": 1, "dp": 1, "cp": 4, "seq_len": 16, "context_exchange": "heads"},
    "1x1c2x2-heads-of-documents": {
        "pp": 1,
        "dp": 1,
        "cp": 2,
        "tp": 2,
        "seq_len": 12,
        "attention_mask": "document",
        "context_exchange": "heads",
    },
    "1x4e2-experts": {
        "model": EXPERTS,
        "pp": 1,
        "dp": 4,
        "ep": 2,
        "zero": 2,
        "router": RouterLosses(0.1, bias_update=0.5),
    },
    "2x2e2-experts": {"model": EXPERTS, "ep": 2, "zero": 3},
    "1x4e2-capacity": {"model": EXPERTS, "pp": 1, "dp": 4, "ep": 2, "experts": ExpertDispatch("capacity", 0.75)},
    "1x4e2-rows-again": {"model": EXPERTS, "pp": 1, "dp": 4, "ep": 2, "zero": 2, "name": "full-save"},
    "1x1c4-gathered": {"pp": 1, "dp": 1, "cp": 4, "seq_len": 16, "zero": 3, "context_layout": "contiguous"},
}
"""Of four ranks each, some of them tensor-parallel or context ranks."""

CHUNKED = {
    "interleaved": ("interleaved", PipelineShape(2, 4, 2)),
    "breadth-first": ("breadth-first", PipelineShape(2, 3, 2)),
    "zb-v": ("zb-v", PipelineShape(2, 4, 2, "vee")),
    "v-half": ("v-half", PipelineShape(2, 3, 2, "vee")),
    "three-chunks": ("breadth-first", PipelineShape(2, 2, 3, "vee")),
}


def trained_by_ranks(engine: str, folder: Path, tasks: list[dict[str, Any]], *, ranks: int = 4) -> list[dict[str, Any]]:
    for number, task in enumerate(tasks):
        path = folder / f"{number}.rtx"
        write_program(task.pop("made"), str(path))
        task["program"] = str(path)
    result = START[engine](ranks, Path(__file__).with_name("ranks_program.py"), engine, json.dumps(tasks))
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def as_read(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(reports))
    return found


def local_reports(program: Program, steps: int = STEPS, **settings: Any) -> list[dict[str, Any]]:
    """What the engine of one process reports of a training."""
    return as_read(reports_of(train(program, steps, **settings)))


def chunked_programs() -> dict[tuple[str, str], Program]:
    """Programs of two ranks with several chunks each, by schedule and state."""
    states = {"zero-0": {"zero": 0}, "tied-clipped": {"model": evolve(TIED, layers=4), "optimizer": CLIPPED}}
    programs = {}
    for name, (kind, shape) in CHUNKED.items():
        for state, keys in states.items():
            model = evolve(keys.get("model", MODEL), layers=shape.stages * shape.chunks)
            rest = {key: value for key, value in keys.items() if key != "model"}
            programs[name, state] = program_of(model, kind, shape, dp=1, **rest)
    return programs
