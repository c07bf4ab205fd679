"""What is mutated: small sound modules, under all kinds of plans, and the programs that are emitted from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain import api
from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch, RouterLosses
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import STORES
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.targets.machine.machine import Machine, load_machine, parse_machine
from ratrain.targets.program.program import Program, ProgramStage
from tests.end_to_end.tiny_runs import OPTIMIZER, make_plan
from tests.end_to_end.toys import UNEVEN

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module

MODEL = evolve(UNEVEN, hidden_size=32, layers=2, head_dim=8, ffn_size=48)
NEOX = in_family(MODEL, "gpt_neox", kv_heads=4)
PHI3 = in_family(MODEL, "phi3")
OLMO2 = in_family(MODEL, "olmo2", initializer_range=0.3)
"""Weights that give large branches: norms of small ones make gradients that overflow at the first loss scale."""
GEMMA2 = in_family(MODEL, "gemma2", attention_scale=0.5, embedding_scale=MODEL.hidden_size**0.5)
TIED = evolve(MODEL, tied_embeddings=True)
EXPERTS = in_family(MODEL, "olmoe", experts=4, experts_per_token=2, router_normalised=False)
SHARED_EXPERT = in_family(
    MODEL, "qwen2_moe", qkv_bias=True, experts=5, experts_per_token=3, expert_size=20, shared_expert_size=28
)
DEEP = evolve(MODEL, layers=3)
DEEPER = evolve(MODEL, layers=4)
ADAPTERS = Training(method="lora", rank=3, alpha=6.0)
FROZEN = Training(freeze="model.embed_tokens.*, model.layers.0.self_attn.*, model.layers.1.mlp.*, model.norm.*")
UPPER = Training(freeze="model.embed_tokens.*, model.layers.0.*")
"""A first layer that only goes forward."""
CLIPPED = evolve(OPTIMIZER, clip="global", max_norm=0.5)
SMALL: dict[str, Any] = {"seq_len": 16, "micro_batch_size": 1, "head_chunk": 8}
CHUNKED: dict[str, Any] = {"chunks": 2, "cuts": (1, 2, 3)}
_BUCKETS = "bucket-grad-sync{bytes=16KiB}"


def _machine(**numbers: float) -> Machine:
    machine = load_machine(None)
    changed = {name: evolve(machine.constants[name], value=value) for name, value in numbers.items()}
    return evolve(machine, constants=machine.constants | changed)


MACHINE = _machine(collective_chunk=1024.0)
"""The MT-3000 with small staging chunks: megabytes of workspace would leave room everywhere, and byte reuse nowhere."""


UNITS = {"capacity": "bytes", "store": "bytes/s", "fetch": "bytes/s"}
STORE_NUMBERS = {"capacity": 1e6, "store": 1e9, "fetch": 1e9}
"""Of each memory beside DDR: bytes, and bytes a second."""
WITH_STORES = parse_machine(
    "\n".join(
        ['base = "mt3000"', 'name = "mt3000-stores"', "collective_chunk = { value = 1024, unit = 'bytes' }"]
        + [
            f"{home.value}_{key} = {{ value = {value:.0f}, unit = '{UNITS[key]}' }}"
            for home in STORES
            for key, value in STORE_NUMBERS.items()
        ]
    ),
    file="stores.toml",
)
"""The same with memory of a host, and a file."""


@frozen(eq=False)
class Subject:
    """A sound module, and how it is made."""

    name: str
    keys: Mapping[str, Any]
    passes: str
    model: ModelConfig = MODEL
    machine: Machine = MACHINE

    def module(self) -> Module:
        """The module, made once; mutants are made of copies."""
        return _module(self.name)

    def program(self) -> Program:
        """The program emitted from it, made once."""
        return _program(self.name)


_RATRAIN = strategy("ratrain").passes

SUBJECTS: dict[str, Subject] = {
    s.name: s
    for s in (
        Subject("p1-d1-zero0", {"pp": 1, "dp": 1, "micro_batches": 2, "zero": 0}, _RATRAIN),
        Subject("p1-d2-zero2-tied", {"pp": 1, "micro_batches": 2, "zero": 2}, strategy("full-save").passes, TIED),
        Subject("p2-d2-zero1", {"micro_batches": 3}, _RATRAIN),
        Subject("p2-d2-zero1-recover-all", {"micro_batches": 2}, strategy("baseline-1f1b").passes),
        Subject(
            "p2-d2-zero2-each",
            {"micro_batches": 3, "zero": 2, "reduce": "each-micro-batch"},
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=mlp}},allocate-ddr",
        ),
        Subject("p2-d1-zero0-m4", {"dp": 1, "micro_batches": 4, "zero": 0}, strategy("full-save").passes),
        Subject("p2-d2-zero1-host", {"micro_batches": 2}, _RATRAIN, MODEL, evolve(MACHINE, update_engine=Engine.HOST)),
        Subject(
            "p3-d2-zero1-tight",
            {"pp": 3, "micro_batches": 4},
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=auto budget=120KiB}},allocate-ddr",
            DEEP,
        ),
        Subject(
            "p3-d1-zero0-tied",
            {"pp": 3, "dp": 1, "micro_batches": 3, "zero": 0},
            _RATRAIN,
            evolve(DEEP, tied_embeddings=True),
        ),
        Subject(
            "p3-d2-zero2-each-tied",
            {"pp": 3, "micro_batches": 2, "zero": 2, "reduce": "each-micro-batch"},
            strategy("baseline-1f1b-overlapped").passes,
            evolve(DEEP, tied_embeddings=True),
        ),
        Subject(
            "p2-d2-zero3-each-clip",
            {"micro_batches": 2, "zero": 3, "reduce": "each-micro-batch", "optimizer": CLIPPED},
            strategy("ratrain").passes,
        ),
        Subject("p2-d4-view-groups", {"dp": 4, "micro_batches": 2, "zero": 3, "view_group": 2}, _RATRAIN),
        Subject("p2-d2-zero3-tied", {"micro_batches": 2, "zero": 3}, strategy("zero3-blocking").passes, TIED),
        Subject(
            "p2-d2-gpipe-clip",
            {"micro_batches": 3, "schedule": "gpipe", "optimizer": CLIPPED},
            f"place-gpipe,insert-prefetch,{_BUCKETS},recompute{{policy=full}},allocate-ddr",
        ),
        Subject("p3-d2-zb-h1", {"pp": 3, "micro_batches": 3, "schedule": "zb-h1"}, strategy("zb-h1").passes, DEEP),
        Subject(
            "p2-v2-d1-interleaved",
            {"dp": 1, "micro_batches": 3, "zero": 0, "schedule": "interleaved", **CHUNKED},
            f"{_BUCKETS},recompute{{policy=mlp}},allocate-ddr",
            DEEPER,
        ),
        Subject(
            "p2-v2-d2-zb-v-tied",
            {"micro_batches": 2, "zero": 2, "schedule": "zb-v", "layout": "vee", **CHUNKED},
            _RATRAIN,
            evolve(DEEPER, tied_embeddings=True),
        ),
        Subject(
            "p2-v2-d1-breadth-first-placed",
            {"dp": 1, "micro_batches": 2, "zero": 0, "schedule": "breadth-first", **CHUNKED},
            "place-schedule",
            DEEPER,
        ),
        Subject("p2-d2-zero1-adapters", {"micro_batches": 2, "training": ADAPTERS}, _RATRAIN),
        Subject(
            "p1-d2-zero3-each-adapters-clip",
            {
                "pp": 1,
                "micro_batches": 2,
                "zero": 3,
                "reduce": "each-micro-batch",
                "optimizer": CLIPPED,
                "training": evolve(ADAPTERS, targets="q_proj, down_proj"),
            },
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=full}},allocate-ddr",
            TIED,
        ),
        Subject("p2-d1-t2-adapters", {"dp": 1, "micro_batches": 2, "zero": 0, "tp": 2, "training": ADAPTERS}, _RATRAIN),
        Subject(
            "p2-d2-zero2-packed-adapters",
            {"micro_batches": 2, "zero": 2, "training": evolve(ADAPTERS, targets="qkv_proj, gate_up_proj")},
            "place-1f1b,recompute{policy=attention},allocate-ddr",
            PHI3,
        ),
        Subject(
            "p2-d1-shared-expert-adapters",
            {"dp": 1, "micro_batches": 2, "zero": 0, "training": ADAPTERS},
            "place-1f1b,recompute{policy=mlp},allocate-ddr",
            SHARED_EXPERT,
        ),
        Subject(
            "p2-d2-zero1-experts-adapters",
            {"micro_batches": 2, "training": evolve(ADAPTERS, targets="experts.gate_up_proj, experts.down_proj")},
            "place-1f1b,recompute{policy=mlp},allocate-ddr",
            EXPERTS,
        ),
        Subject(
            "p2-d1-packed-base",
            {"dp": 1, "micro_batches": 2, "zero": 0, "training": evolve(ADAPTERS, base="int4-block")},
            "place-1f1b,recompute{policy=mlp},allocate-ddr",
        ),
        Subject(
            "p2-d1-partly-frozen-tied",
            {"dp": 1, "micro_batches": 3, "zero": 0, "training": FROZEN},
            "place-1f1b,recompute{policy=attention},allocate-ddr",
            TIED,
        ),
        Subject(
            "p3-d2-zero1-forward-only-clip",
            {"pp": 3, "micro_batches": 2, "training": UPPER, "optimizer": CLIPPED},
            _RATRAIN,
            DEEP,
        ),
        Subject("p2-d1-zero0-side-by-side", {"dp": 1, "micro_batches": 2, "zero": 0}, _RATRAIN, NEOX),
        Subject("p2-d2-zero1-slices", {"micro_batches": 2, "slices": (6, 5, 5)}, _RATRAIN),
        Subject(
            "p2-d2-zero2-each-slices-window",
            {"micro_batches": 2, "zero": 2, "reduce": "each-micro-batch", "slices": (4, 4, 4, 4)},
            f"place-schedule,insert-prefetch,{_BUCKETS},recompute{{policy=full}},allocate-ddr",
            evolve(MODEL, family="mistral", sliding_window=6),
        ),
        Subject(
            "p2-d1-slices-placed",
            {"dp": 1, "micro_batches": 2, "zero": 0, "slices": (8, 8)},
            "place-schedule,recompute{policy=attention}",
        ),
        Subject("p2-d2-zero3-placed", {"micro_batches": 2, "zero": 3}, "place-1f1b"),
        Subject("p2-d2-placed", {"micro_batches": 2}, "place-1f1b,recompute{policy=attention}"),
        Subject("p3-d1-placed", {"pp": 3, "dp": 1, "micro_batches": 4, "zero": 0}, "place-1f1b", DEEP),
        Subject(
            "p2-d2-zero2-placed-tied",
            {"micro_batches": 3, "zero": 2, "reduce": "each-micro-batch"},
            "place-1f1b,insert-prefetch",
            TIED,
        ),
        Subject(
            "p2-d1-documents",
            {"dp": 1, "micro_batches": 3, "zero": 0, "attention_mask": "document"},
            "place-1f1b,recompute{policy=attention},allocate-ddr",
        ),
        Subject(
            "p2-d1-t2-tied",
            {"dp": 1, "micro_batches": 2, "zero": 0, "tp": 2},
            _RATRAIN,
            evolve(TIED, ffn_size=47),
        ),
        Subject(
            "p2-d2-t4-zero2-each-clip",
            {
                "micro_batches": 2,
                "zero": 2,
                "reduce": "each-micro-batch",
                "tp": 4,
                "sequence_sharding": False,
                "optimizer": CLIPPED,
            },
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=attention}},allocate-ddr",
        ),
        Subject(
            "p2-t2-norms-over-heads-full",
            {"dp": 1, "micro_batches": 2, "zero": 0, "tp": 2},
            "place-1f1b,recompute{policy=full},allocate-ddr",
            OLMO2,
        ),
        Subject(
            "p2-d1-t2-layer-checkpoints",
            {"dp": 1, "micro_batches": 2, "zero": 0, "tp": 2},
            "place-1f1b,recompute{policy=full checkpoint=layer repeat=all},allocate-ddr",
        ),
        Subject("p2-d2-t2-slices-placed", {"micro_batches": 2, "tp": 2, "slices": (8, 8)}, "place-schedule", GEMMA2),
        Subject(
            "p2-d2-zero1-host-memory",
            {"micro_batches": 3},
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=none store=host}},allocate-ddr",
            MODEL,
            WITH_STORES,
        ),
        Subject(
            "p2-d1-slices-file",
            {"dp": 1, "micro_batches": 2, "zero": 0, "slices": (8, 8)},
            "place-schedule,recompute{policy=attention store=file},allocate-ddr",
            MODEL,
            WITH_STORES,
        ),
        Subject(
            "p2-d1-zero3-state-in-file",
            {"dp": 1, "micro_batches": 2, "zero": 3},
            f"place-1f1b,offload-state{{home=file}},insert-prefetch,{_BUCKETS},recompute{{policy=attention}},allocate-ddr",
            MODEL,
            WITH_STORES,
        ),
        Subject(
            "p2-d2-zero2-frozen-in-host",
            {"micro_batches": 2, "zero": 2, "training": evolve(ADAPTERS, targets="q_proj, v_proj", base="int4-block")},
            f"place-1f1b,offload-state{{what=views}},insert-prefetch,{_BUCKETS},recompute{{policy=full}},allocate-ddr",
            MODEL,
            WITH_STORES,
        ),
        Subject(
            "p2-d2-zero3-frozen-shared",
            {"micro_batches": 2, "zero": 3, "training": Training(freeze="*.q_proj.*, *.up_proj.*", base="int4-block")},
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=full}},allocate-ddr",
        ),
        Subject(
            "p2-d2-zero3-frozen-shared-in-file",
            {"micro_batches": 2, "zero": 3, "training": evolve(ADAPTERS, targets="q_proj, v_proj", base="nf4")},
            f"place-1f1b,offload-state{{home=file what=views}},insert-prefetch,{_BUCKETS},allocate-ddr",
            MODEL,
            WITH_STORES,
        ),
        Subject(
            "p2-d4-frozen-in-view-groups-placed",
            {"dp": 4, "micro_batches": 2, "zero": 3, "view_group": 2, "training": evolve(ADAPTERS, base="nf4")},
            "place-1f1b,recompute{policy=attention}",
        ),
        Subject(
            "p2-d1-partly-frozen-in-file",
            {"dp": 1, "micro_batches": 2, "zero": 0, "slices": (8, 8), "training": FROZEN},
            "place-schedule,offload-state{home=file what=views},recompute{policy=attention},allocate-ddr",
            TIED,
            WITH_STORES,
        ),
        Subject(
            "p2-d1-t2-frozen-in-file-placed",
            {"dp": 1, "micro_batches": 2, "zero": 0, "tp": 2, "training": ADAPTERS},
            "place-1f1b,offload-state{home=file what=views},recompute{policy=mlp store=host}",
            MODEL,
            WITH_STORES,
        ),
        Subject(
            "p2-d2-zero2-each-experts",
            {"micro_batches": 2, "zero": 2, "reduce": "each-micro-batch", "router": RouterLosses(bias_update=0.01)},
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=mlp}},allocate-ddr",
            EXPERTS,
        ),
        Subject(
            "p2-d1-zb-h1-shared-expert",
            {
                "dp": 1,
                "micro_batches": 2,
                "zero": 0,
                "schedule": "zb-h1",
                "router": RouterLosses(0.1, 0.01, 0.01),
            },
            "place-zb-h1,recompute{policy=attention},allocate-ddr",
            SHARED_EXPERT,
        ),
        Subject(
            "p2-d1-c2-recover-all",
            {"dp": 1, "cp": 2, "micro_batches": 2},
            "place-1f1b,recompute{policy=full},allocate-ddr",
        ),
        Subject(
            "p1-d2-c2-t2-zero2-each-documents",
            {
                "pp": 1,
                "cp": 2,
                "tp": 2,
                "micro_batches": 2,
                "zero": 2,
                "reduce": "each-micro-batch",
                "attention_mask": "document",
                "context_layout": "contiguous",
            },
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=attention}},allocate-ddr",
        ),
        Subject(
            "p2-d1-c4-zb-h1",
            {"dp": 1, "cp": 4, "micro_batches": 3, "schedule": "zb-h1", "context_layout": "contiguous"},
            "place-zb-h1,recompute{policy=attention},allocate-ddr",
            evolve(MODEL, family="mistral", sliding_window=6),
        ),
        Subject(
            "p2-d1-c2-slices",
            {"dp": 1, "cp": 2, "micro_batches": 2, "slices": (8, 4, 4)},
            "place-schedule,recompute{policy=attention},allocate-ddr",
            evolve(MODEL, family="mistral", sliding_window=6),
        ),
        Subject(
            "p2-d1-c2-heads-recover-all",
            {"dp": 1, "cp": 2, "micro_batches": 2, "context_exchange": "heads"},
            "place-1f1b,recompute{policy=full},allocate-ddr",
        ),
        Subject(
            "p1-d2-c2-heads-zb-h1-documents",
            {
                "pp": 1,
                "cp": 2,
                "micro_batches": 2,
                "context_exchange": "heads",
                "schedule": "zb-h1",
                "attention_mask": "document",
            },
            "place-zb-h1,recompute{policy=attention},allocate-ddr",
        ),
        Subject(
            "p2-d1-c2-groups-recover-all",
            {"dp": 1, "cp": 2, "micro_batches": 2, "context_groups": 2},
            "place-1f1b,recompute{policy=full},allocate-ddr",
        ),
        Subject("p2-d1-c2-groups-dataflow", {"dp": 1, "cp": 2, "micro_batches": 2, "context_groups": 4}, "", NEOX),
        Subject("p2-d1-c2-heads-dataflow", {"dp": 1, "cp": 2, "micro_batches": 2, "context_exchange": "heads"}, ""),
        Subject(
            "p2-d2-e2-recover-all",
            {"micro_batches": 2, "ep": 2, "router": RouterLosses(0.1, bias_update=0.01)},
            "place-1f1b,recompute{policy=full},allocate-ddr",
            EXPERTS,
        ),
        Subject(
            "p1-d4-e2-shared-expert-each",
            {"pp": 1, "dp": 4, "micro_batches": 2, "ep": 2, "zero": 2, "reduce": "each-micro-batch"},
            f"place-1f1b,insert-prefetch,{_BUCKETS},recompute{{policy=attention}},allocate-ddr",
            evolve(SHARED_EXPERT, experts=6),
        ),
        Subject(
            "p2-d2-e2-capacity",
            {"micro_batches": 2, "ep": 2, "zero": 3, "experts": ExpertDispatch("capacity", 0.5)},
            "place-1f1b,insert-prefetch,recompute{policy=none},allocate-ddr",
            EXPERTS,
        ),
        Subject(
            "p2-d2-e2-kept",
            {"micro_batches": 2, "ep": 2, "zero": 2},
            "place-1f1b,insert-prefetch,recompute{policy=auto},allocate-ddr",
            EXPERTS,
        ),
        Subject("p2-d2-e2-dataflow", {"micro_batches": 2, "ep": 2, "zero": 3}, "", EXPERTS),
        Subject("p2-d1-c2-dataflow", {"dp": 1, "cp": 2, "micro_batches": 2}, ""),
        Subject("p2-d2-sized", {"micro_batches": 2}, "place-1f1b,insert-prefetch,legalise"),
        Subject("p2-d2-dataflow", {"micro_batches": 2}, ""),
        Subject(
            "p2-d1-peer",
            {"dp": 1, "micro_batches": 2, "zero": 0},
            "place-1f1b,recompute{policy=none store=peer},allocate-ddr",
        ),
    )
}
"""Modules at all levels; programs are emitted from the allocated ones, and from the others after the passes they lack."""


@cache
def _module(name: str) -> Module:
    subject = SUBJECTS[name]
    plan = make_plan(subject.model, **SMALL, **subject.keys)
    return api.compile(subject.model, plan, passes=subject.passes, machine=subject.machine)


@cache
def _program(name: str) -> Program:
    return api.emit(copy_module(_module(name)), machine=SUBJECTS[name].machine)


def copy_program(program: Program) -> Program:
    """A program that shares nothing that may be changed with another."""
    stages = [
        ProgramStage(
            list(stage.tensors),
            {engine: [evolve(item) for item in stream] for engine, stream in stage.streams.items()},
            None if stage.order is None else list(stage.order),
        )
        for stage in program.stages
    ]
    return evolve(program, stages=stages, routines=list(program.routines))
