"""Tiny models under all kinds of plans, compiled and trained inside the test process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import asdict, evolve
from attrs import fields as fields_of

from ratrain import api
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.plan import Optimizer, Plan
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrainc.choices.strategies import STRATEGIES, strategy
from ratrain.targets.program.instruction import CountWait
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.checkpoint.training_state import STATE_KINDS
from ratrain.targets.runtime.data.data import TokenStream
from ratrain.targets.runtime.data.documents import Documents, bounds_of
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import Evaluation, Execution, OptimizerKeys, RunSettings, Saving, Start, Watch
from tests.end_to_end.toys import UNEVEN as MODEL
from tests.program_files import prepare

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.training.training import TrainingRun


OPTIMIZER = Optimizer(lr=5e-3, warmup_steps=3)
WITHOUT_PEERS = [item for item in STRATEGIES if not item.needs_tensor_ranks]
"""Strategies that take plans without tensor-parallel ranks."""
WHOLE_STRATEGIES = [item for item in WITHOUT_PEERS if item.schedule in (None, "1f1b", "zb-h1")]
"""Of these those that take plans of one chunk a stage and whole micro-batches as they are."""


def make_plan(model: ModelConfig = MODEL, **keys: Any) -> Plan:
    """A plan of 2 stages, 2 replicas, 3 micro-batches of 2 sequences of 10 tokens, where `keys` do not say otherwise."""
    pp = keys.get("pp", 2)
    defaults: dict[str, Any] = {
        "pp": pp,
        "dp": 2,
        "cuts": tuple(range(1, pp)),
        "micro_batch_size": 2,
        "micro_batches": 3,
        "seq_len": 10,
        "optimizer": OPTIMIZER,
    }
    if (dtype := keys.get("view_dtype", "f16")) != "f16":
        defaults |= {"grad_dtype": dtype, "grad_shard_dtype": dtype, "loss_scale": 1.0}
    plan = Plan(**{**defaults, **keys})
    check_model(model)
    check_plan(plan, model)
    return plan


def make_program(
    model: ModelConfig = MODEL, name: str = "ratrain", *, machine: str | None = None, **keys: Any
) -> Program:
    """The program of a strategy under `make_plan`."""
    module = api.compile(model, make_plan(model, **keys), passes=strategy(name).passes, machine=machine)
    return api.emit(module, machine=machine)


def make_stream(model: ModelConfig = MODEL, count: int = 2000) -> TokenStream:
    """Tokens with something to learn: three in four follow from the one before."""
    random = np.random.default_rng(5)
    successor = random.permutation(model.vocab_size)
    tokens = random.integers(0, model.vocab_size, count).astype(np.uint16)
    follows = random.random(count) < 0.75
    for i in range(1, count):
        if follows[i]:
            tokens[i] = successor[tokens[i - 1]]
    return TokenStream("generated", tokens, "generated")


def packed(stream: TokenStream) -> TokenStream:
    """A stream as documents of uneven lengths, from 1 token to more than some sequences."""
    count = len(stream.tokens)
    bounds = bounds_of(np.random.default_rng(7).integers(1, 17, count))
    return evolve(stream, documents=Documents(np.append(bounds[bounds < count], count)))


def stream_for(program: Program) -> TokenStream:
    """What a program can be trained on."""
    stream = make_stream(program.model)
    return packed(stream) if program.plan.keeps_documents_apart else stream


_GROUPS: dict[str, tuple[type, dict[str, str]]] = {
    "start": (Start, {"init": "weights", "init_adapter": "adapter", "resume": "checkpoint", "new_data": "new_data"}),
    "saving": (Saving, {"save": "directory", "save_every": "every", "keep_last": "keep_last"}),
    "evaluation": (Evaluation, {"eval_every": "every"}),
    "execution": (
        Execution,
        {name: name for name in ("kernels", "threads", "interleave_seed", "check_memory", "poison", "graph")},
    ),
    "optimizer": (OptimizerKeys, {key.name: key.name for key in fields_of(OptimizerKeys)}),
    "watch": (Watch, {"run_folder": "folder"}),
}
"""The groups of settings; of each, the words that tests use for its fields."""


def run_settings(steps: int, **words: Any) -> RunSettings:
    """The settings of a run in short words: `save`, `resume`, `kernels` (`fast`), ..."""
    words = {"kernels": "fast", **words}
    groups: dict[str, Any] = {}
    for name, (cls, fields) in _GROUPS.items():
        groups[name] = cls(**{field: words.pop(word) for word, field in fields.items() if word in words})
    return RunSettings(steps, **words, **groups)


def start(program: Program, steps: int, *, verified: bool = True, **settings: Any) -> TrainingRun:
    """A run of a program, ready for its first step; one that a test has broken on purpose is not `verified`."""
    chosen = run_settings(steps, **settings)
    return prepare(program, stream_for(program), chosen, kernel_set(chosen.execution.kernels), verified=verified)


def train(program: Program, steps: int, **settings: Any) -> TrainingRun:
    """A run of a program after all its steps, saved where the settings say so."""
    run = start(program, steps, **settings)
    list(run.steps())
    run.save()
    return run


def losses(run: TrainingRun) -> list[float]:
    """The losses of the steps done."""
    return [step.report.loss for step in run.done]


def reports_of(run: TrainingRun) -> list[dict[str, Any]]:
    """What is reported of the steps done and is alike however it is computed: neither seconds nor resident bytes."""
    return [asdict(step.report, filter=lambda each, _: bool(each.eq)) for step in run.done]


def state(run: TrainingRun) -> dict[str, npt.NDArray[Any]]:
    """Every carried tensor of every rank: what the next step depends on."""
    found: dict[str, npt.NDArray[Any]] = {}
    for ranks in run.engine.ranks:
        for rank in ranks:
            for number, tensor in enumerate(rank.stage.tensors):
                if tensor.carried:
                    found[f"{rank.stage_index}.{rank.lane}.{tensor.name}"] = elements(rank, number)
    return found


def elements(rank: RankExecutor, number: int) -> npt.NDArray[Any]:
    """What a tensor holds, wherever it is."""
    tensor = rank.stage.tensors[number]
    if tensor.home is not Home.FILE:
        return rank.views[number]
    pieces = rank.in_file(number).pieces(0, tensor.type.elements)
    return np.concatenate([piece.copy() for _, piece in pieces])  # each is there until the next one is asked for


def same_bits(one: TrainingRun, other: TrainingRun) -> None:
    """Fail unless all carried state of two runs is equal, bit for bit."""
    mine, theirs = state(one), state(other)
    assert mine.keys() == theirs.keys()
    different = [name for name, array in mine.items() if array.tobytes() != theirs[name].tobytes()]
    assert not different


def same_state_of_blocks(one: TrainingRun, other: TrainingRun) -> None:
    """Fail unless masters and moments of all blocks are equal, bit for bit, whoever holds them."""
    mine, theirs = (training_state(run.engine, 0).blocks for run in (one, other))
    assert list(mine) == list(theirs)
    for block in mine:
        for kind in STATE_KINDS:
            assert np.array_equal(getattr(mine[block], kind), getattr(theirs[block], kind)), f"{kind} of {block}"


def instructions(program: Program, keyword: str) -> Iterator[tuple[int, Engine, int, Instruction]]:
    """Stage, engine, position and instruction of all instructions of a kind."""
    for stage, held in enumerate(program.stages):
        for engine, stream in held.streams.items():
            for position, instruction in enumerate(stream):
                if instruction.keyword == keyword:
                    yield stage, engine, position, instruction


def hanging_program() -> Program:
    """Stage 0 sends its first activation when it has received the gradient that comes of it."""
    program = make_program()
    (send, *_) = (found for stage, *_, found in instructions(program, "send") if stage == 0)
    send.waits = (*send.waits, CountWait(Engine.RECV, 1, previous_step=False))
    return program


def swap_neighbours(items: list[Any], first_one: int) -> None:
    """Swap two neighbours of a list."""
    items[first_one], items[first_one + 1] = items[first_one + 1], items[first_one]
