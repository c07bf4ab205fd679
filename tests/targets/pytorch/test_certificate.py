"""What a run holds of a device's memory is what was said before anything was allocated: measured in PyTorch's allocator, over random plans."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.strategies import Case, cases
from ratrain.targets.runtime.engine.certificate import Certificate, certificate
from ratrain.targets.runtime.engine.evaluation import HeldOut
from ratrain.targets.runtime.engine.messages_ahead import messages_ahead
from tests.end_to_end.tiny_runs import MODEL, make_plan, make_program, run_settings, stream_for
from tests.mutation.subjects import WITH_STORES
from tests.program_files import prepare

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from ratrain.targets.pytorch.device.device_kernels import TorchDevice  # noqa: E402
from ratrain.targets.pytorch.device.device_memory import _NUMBERS  # noqa: E402
from tests.targets.pytorch.allocations import Allocations, allocations  # noqa: E402

STEPS = 2
MIB = 1 << 20


def test_the_measure_sees_what_operations_ask_for_inside_themselves() -> None:
    """Against allocations that are known: 1000 float32 are 4000 bytes, and a sort makes values, indices and room of its own."""
    with allocations() as first:
        kept = torch.empty(1000)
        torch.neg(kept)
    assert (first.peak, first.held, first.count) == (8000, 4000, 2)
    with allocations() as second:
        kept.view(10, 100).add_(kept.view(10, 100))
        torch.neg(kept, out=kept)
    assert (second.peak, second.held) == (0, 0)
    with allocations() as third:
        kept.sort()
    assert third.peak > 4000 + 8000
    assert third.held == 0
    with allocations() as fourth:
        del kept
    assert (fourth.peak, fourth.held) == (0, -4000)


def measured(
    program: Program, kernels: Any, *, evaluates: bool = False, steps: int = STEPS
) -> tuple[Certificate, Allocations]:
    """What was said of a run, and what it took from its being made to the end of its last step."""
    stream, chosen = stream_for(program), run_settings(steps, kernels=kernels.name, eval_every=1 if evaluates else None)
    said = certificate(program, kernels, evaluates=evaluates)
    with allocations() as found:
        run = prepare(program, stream, chosen, kernels)
        if evaluates:
            run.held_out = HeldOut(run.engine.batches, 1)
            run.engine.expect_evaluation()
        list(run.steps())
    assert run.engine.memory_use().certified_bytes == said.total_bytes
    assert sum(1 for step in run.done if step.eval_loss is not None) == (steps if evaluates else 0)
    return said, found


def is_kept(said: Certificate, found: Allocations) -> bool:
    """Whether a run held exactly what was said, and for a moment no more than the numbers of an operation beside it."""
    return found.held == said.total_bytes - _NUMBERS and found.peak <= said.total_bytes


@st.composite
def programs(draw: st.DrawFn, **limits: int) -> Program:
    """Every family under every plan the compiler takes for it, ZeRO 3 and clipping too."""
    case: Case = draw(cases(**limits))
    plan = case.plan
    if plan.zero == 2 and plan.dp > 1 and draw(st.booleans()):
        plan = evolve(plan, zero=3)
    if draw(st.booleans()):
        plan = evolve(plan, optimizer=evolve(plan.optimizer, clip="global", max_norm=0.5))
    try:
        check_plan(plan, case.model)
        passes = draw(st.sampled_from([None, "recompute{policy=full},bucket-grad-sync{bytes=1KiB},allocate-ddr"]))
        return api.emit(api.compile(case.model, plan, **({"passes": passes} if passes else {})))
    except DiagnosticError:  # some shape that this combination cannot have
        return api.emit(api.compile(case.model, case.plan))


def _over_random_plans(count: int, *, steps: int, **limits: int) -> Any:
    def check(program: Program, evaluates: bool) -> None:
        said, found = measured(program, TorchDevice(), evaluates=evaluates, steps=steps)
        assert is_kept(said, found), (said, found)

    quiet = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    return quiet(given(programs(**limits), st.booleans())(check))


def test_peak_is_what_was_said_over_some_random_plans() -> None:
    seed(0)(_over_random_plans(6, steps=1, max_layers=2, max_stages=2, max_micro_batches=2))()


@pytest.mark.full
@pytest.mark.parametrize("group", range(5))
def test_peak_is_what_was_said_over_fifty_random_plans(group: int) -> None:
    seed(group)(_over_random_plans(10, steps=2, max_layers=4, max_micro_batches=4))()


@pytest.mark.parametrize(
    "keys",
    [
        {"pp": 1, "dp": 1, "tp": 2, "zero": 0, "micro_batches": 1},
        pytest.param({"tp": 2, "zero": 2, "reduce": "each-micro-batch"}, marks=pytest.mark.full),
        pytest.param({"tp": 4, "sequence_sharding": False, "zero": 3}, marks=pytest.mark.full),
        pytest.param({"dp": 1, "tp": 2, "head_chunk": 2, "view_dtype": "bf16"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_peak_of_tensor_peers_is_what_was_said(keys: Any) -> None:
    program = make_program(**keys)
    said, found = measured(program, TorchDevice(), evaluates=True, steps=1)
    assert is_kept(said, found), (said, found)


@pytest.mark.parametrize("passes", ["recompute{policy=none store=host}", "place-1f1b,offload-state{home=file}"])
def test_peak_of_what_uses_other_memories_is_what_was_said(passes: str) -> None:
    """Bytes of the host are among them, a file's are not."""
    module = api.compile(MODEL, make_plan(dp=1, zero=0), passes=f"{passes},allocate-ddr", machine=WITH_STORES)
    said, found = measured(api.emit(module, machine=WITH_STORES), TorchDevice(), steps=1)
    assert ("stored in 'host'" in said.constants) == ("host" in passes)
    assert is_kept(said, found), (said, found)


def _leaking(kernels: Any) -> None:
    """Each update keeps one more tensor."""
    update = kernels.adamw_on_device

    def adamw_on_device(*arguments: Any, **options: Any) -> None:
        kernels.kept = torch.empty(16)
        update(*arguments, **options)

    kernels.adamw_on_device = adamw_on_device


def _wasting(kernels: Any) -> None:
    """Each update has one more tensor while it lasts."""
    update = kernels.adamw_on_device

    def adamw_on_device(*arguments: Any, **options: Any) -> None:
        passing = torch.empty(16)
        update(*arguments, **options)
        del passing

    kernels.adamw_on_device = adamw_on_device


def _long_tables(kernels: Any) -> None:
    """A table has more positions than there are."""
    build = kernels.build_rope_table
    kernels.build_rope_table = lambda length, *rest: build(2 * length, *rest)


@pytest.mark.parametrize("mutant", [_leaking, _wasting, _long_tables])
@pytest.mark.sampled(3)
def test_a_tensor_more_is_noticed(mutant: Any) -> None:
    """One of 64 bytes, in a run of megabytes."""
    program = make_program(evolve(MODEL, layers=1), pp=1, micro_batches=2)
    assert is_kept(*measured(program, TorchDevice()))
    kernels = TorchDevice()
    mutant(kernels)
    said, found = measured(program, kernels)
    assert not is_kept(said, found)


@pytest.mark.parametrize("evaluates", [False, True])
def test_any_order_keeps_to_what_was_said(evaluates: bool) -> None:
    """Messages are what depends on the order: no interleaving has more of them on their way than there is room for."""
    keys = {"chunks": 2, "micro_batches": 4, "cuts": (1, 2, 3), "dp": 1}
    program = make_program(evolve(MODEL, layers=4), "interleaved", **keys)
    most = messages_ahead(program, evaluates=evaluates)
    for draw in range(3):
        run = prepare(program, stream_for(program), run_settings(1, interleave_seed=draw), TorchDevice())
        engine: Any = run.engine
        if evaluates:
            engine.expect_evaluation()
            engine.run_forward(engine.batches, 0)
        engine.run_step(0)
        assert sum(map(len, engine.channels._spare.values())) == sum(most.values())


def test_side_by_side_no_more_is_held_than_was_said() -> None:
    """What threads hold at the end: the measure in the allocator sees one thread alone."""
    program = make_program(zero=2, view_dtype="bf16")
    kernels = TorchDevice()
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is torch.Tensor}
    run = prepare(program, stream_for(program), run_settings(2, threads=2), kernels)
    list(run.steps())
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and id(each) not in before]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    said = certificate(program, kernels, process_pool=True)
    assert sum(held.values()) == said.total_bytes - _NUMBERS


def test_without_held_back_gradients_more_activations_are_on_their_way() -> None:
    """A step of 1F1B lets two of them be sent ahead of the gradients; a pass of the loss alone sends all."""
    program = make_program(MODEL, dp=1, micro_batches=6)
    training, evaluating = (sum(messages_ahead(program, evaluates=each).values()) for each in (False, True))
    assert training < evaluating
    assert evaluating >= program.plan.micro_batches
    assert make_plan(MODEL, dp=2, micro_batches=6).dp * training == sum(
        messages_ahead(make_program(MODEL, dp=2, micro_batches=6), evaluates=False).values()
    )


BALLAST = Path(__file__).parents[3] / "benchmarks" / "torch_ballast.py"


def in_what_was_said(*options: str) -> subprocess.CompletedProcess[str]:
    """A training in a process whose data are limited to what it had, what is said of the run, and the constant of the benchmark."""
    size = ["--vocab", "1024", "--layers", "2", "--seq-len", "16", "--steps", "2"]
    command = [sys.executable, str(BALLAST), "cpu", *size, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is mapped on Linux")
@pytest.mark.full
def test_a_process_limited_to_what_was_said_trains_and_with_less_is_refused() -> None:
    done = in_what_was_said("--spare", "0")
    assert done.returncode == 0, done.stderr
    assert "2 steps on 'cpu'" in done.stdout
    arenas = int(re.findall(r"arenas +([0-9,]+) bytes", done.stdout)[0].replace(",", ""))
    short = in_what_was_said(f"--spare=-{arenas // 4 // MIB + 16}")
    assert short.returncode == 1
    assert re.search(
        r"refused: error\[RT093\]: all 4 ranks .* the limit on this process's data \(ulimit -d\) leaves", short.stderr
    )
    assert "Traceback" not in short.stderr


def test_what_the_allocator_refuses_is_a_memory_error() -> None:
    """Whoever finds no room although there should be: the command says so in a sentence, not in a traceback."""
    memory = TorchDevice().memory
    for refused in (memory.allocate, memory.scratch):
        with pytest.raises(MemoryError, match="alloc"):
            refused(1 << 60)
