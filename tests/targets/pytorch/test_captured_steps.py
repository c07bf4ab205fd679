"""A step that is recorded once and repeated: the bits of the run whose steps the runtime issues one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, make_program, make_stream, packed, run_settings

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError  # noqa: E402
from ratrain.targets.runtime.arena.scalars import GROWTH_INTERVAL  # noqa: E402
from ratrain.targets.runtime.data.documents import Documents  # noqa: E402
from ratrain.targets.runtime.engine.evaluation import held_out  # noqa: E402
from ratrain.targets.runtime.engine.local import WARM_UP_STEPS  # noqa: E402
from ratrain.targets.runtime.kernels import kernel_set  # noqa: E402
from tests.program_files import prepare  # noqa: E402
from tests.targets.pytorch.recording import CaptureError, RecordingDevice, no_host_reads, order  # noqa: E402

if TYPE_CHECKING:
    from ratrain.targets.runtime.data.data import TokenStream

STEPS = WARM_UP_STEPS + 9
OVERFLOWS, GROWS = WARM_UP_STEPS + 3, WARM_UP_STEPS + 7
SCALES = {OVERFLOWS: (2.0**24, 5.0), OVERFLOWS + 1: (2.0**10, GROWTH_INTERVAL - (GROWS - OVERFLOWS))}
"""What a test sets the loss scale to before a step that is repeated: one that overflows, and one that grows some steps later."""
CLIPPED = evolve(OPTIMIZER, clip="global", max_norm=0.3, total_steps=STEPS - 2, min_lr=1e-4)
DECAYED = evolve(OPTIMIZER, warmup_steps=5, total_steps=STEPS - 2, min_lr=1e-4)
DYNAMIC = {"loss_scale": None, "optimizer": DECAYED}

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero0": ("ratrain", {"zero": 0, **DYNAMIC}),
    "zero1 clipped": ("ratrain", {"zero": 1, "loss_scale": None, "optimizer": CLIPPED}),
    "zero2 tied": ("ratrain", {"zero": 2, "reduce": "each-micro-batch", **DYNAMIC}),
    "zero3": ("zero3", {"zero": 3, **DYNAMIC}),
    "chunked": ("interleaved", {"chunks": 2, "micro_batches": 4, "cuts": (1, 2, 3), **DYNAMIC}),
    "sliced clipped": ("seq1f1b", {"slices": (5, 5), "loss_scale": None, "optimizer": CLIPPED}),
    "peers clipped": ("ratrain", {"tp": 2, "dp": 1, "zero": 0, "loss_scale": None, "optimizer": CLIPPED}),
    "peers zero3": ("zero3", {"tp": 2, "pp": 1, "zero": 3, **DYNAMIC}),
    "documents": ("ratrain", {"zero": 1, "attention_mask": "document", **DYNAMIC}),
}


def completions(stream: TokenStream) -> TokenStream:
    """Documents of which a part is in the loss, so that each step has another number of labels."""
    found = packed(stream)
    assert found.documents is not None
    bounds = found.documents.bounds
    counted = bounds[:-1] + (np.diff(bounds) * np.random.default_rng(3).random(len(bounds) - 1)).astype(np.int64)
    return evolve(found, documents=Documents.ending_in_answers(bounds, counted))


def begun(kind: str, *, captured: bool, completes: bool = False) -> tuple[Any, RecordingDevice]:
    name, keys = PROGRAMS[kind]
    layers = 4 if kind == "chunked" else 2
    model = evolve(MODEL, layers=layers, tied_embeddings=kind == "zero2 tied")
    program = make_program(model, name, **{"micro_batches": 2, **keys})
    stream = completions(make_stream(program.model)) if completes or kind == "documents" else make_stream(program.model)
    run = prepare(program, stream, run_settings(STEPS, kernels="torch-device"), kernel_set("torch-device"))
    device = RecordingDevice()
    if captured:
        run.engine.order = order(device)  # type: ignore[attr-defined]
        run.engine.capture_steps()
    return run, device


def states(engine: Any) -> list[bytes]:
    """The bytes of all carried tensors."""
    ranks = [rank for ranks in engine.ranks for rank in ranks]
    views = [
        view for rank in ranks for view, tensor in zip(rank.views, rank.stage.tensors, strict=True) if tensor.carried
    ]
    return [view.reshape(-1).view(torch.uint8).numpy().tobytes() for view in views]


def steps(run: Any) -> list[Any]:
    """The reports of all steps, and the state after each."""
    found = []
    for step in range(STEPS):
        if step in SCALES:
            for rank in (rank for ranks in run.engine.ranks for rank in ranks):
                rank.fill("scale", "", SCALES[step])
        found.append((run.engine.run_step(step), states(run.engine)))
    return found


def same(kind: str, **options: Any) -> Any:
    """A recorded run that is bit by bit the one that is not."""
    (plain, _), (run, device) = (begun(kind, captured=captured, **options) for captured in (False, True))
    for mine, theirs in zip(steps(run), steps(plain), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == theirs[1], f"state after step {mine[0].step}"
    (tape,) = device.tapes
    assert tape.replayed == STEPS - WARM_UP_STEPS
    return run


@pytest.mark.parametrize("kind", ["zero1 clipped", "documents"])
@pytest.mark.sampled(2)
def test_a_repeated_step_has_the_bits_of_one_that_is_issued(kind: str) -> None:
    run = same(kind)
    assert all(
        count == STEPS * len(rank.stage.streams[engine])
        for ranks in run.engine.ranks
        for rank in ranks
        for engine, count in rank.completed.items()
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_kind_of_program_repeats_its_bits(kind: str) -> None:
    same(kind)


def test_the_steps_differ_in_all_that_is_not_recorded() -> None:
    """What is compared above: an overflow, a scale that halves and grows, a rate that grows and falls, other numbers of labels."""
    run, _ = begun("documents", captured=True)
    reports = [report for report, _ in steps(run)]
    rates = [run.program.plan.optimizer.learning_rate(step) for step in range(STEPS)]
    assert len(set(rates[WARM_UP_STEPS:])) > 3
    assert len({report.loss_tokens for report in reports[WARM_UP_STEPS:]}) > 3
    assert [report.step for report in reports if report.skipped_blocks] == [OVERFLOWS]
    scales = [report.loss_scale for report in reports]
    assert scales[OVERFLOWS : GROWS + 2] == [2.0**23, *[2.0**10] * (GROWS - OVERFLOWS - 1), 2.0**11, 2.0**11]
    assert len({report.loss for report in reports}) == STEPS


def test_evaluation_between_repeated_steps_changes_no_bit() -> None:
    (plain, _), (run, _) = (begun("documents", captured=captured) for captured in (False, True))
    held = held_out(run.engine.batches.stream, run.program.plan, 1)
    for step in range(WARM_UP_STEPS + 3):
        assert run.engine.run_step(step) == plain.engine.run_step(step)
        before = states(run.engine)
        assert held.loss(run.engine) == held.loss(plain.engine)
        assert states(run.engine) == before == states(plain.engine)


@pytest.mark.parametrize("kind", ["zero1 clipped", "peers clipped", "documents"])
def test_no_step_is_read_by_the_host_before_it_has_ended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that is issued, which `RecordingDevice` would find too."""
    run, _ = begun(kind, captured=False)
    issue = run.engine._issue_until

    def unread(limit: int) -> None:
        with no_host_reads():
            issue(limit)

    monkeypatch.setattr(run.engine, "_issue_until", unread)
    for step in range(2):
        run.engine.run_step(step)


# Mutants: a number that the host knows stands in the record, or is read for it.


def test_a_rate_that_is_recorded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from ratrain.targets.pytorch.device.device_kernels import TorchDevice

    update = TorchDevice.adamw_on_device

    def of_the_host(kernels: Any, *args: Any, lr: Any, scratch: Any, **options: Any) -> None:
        del lr
        rate.fill_(run.program.plan.optimizer.learning_rate(run.engine.step))
        update(kernels, *args, lr=rate, scratch=scratch, **options)

    (plain, _), (run, _) = (begun("zero0", captured=captured) for captured in (False, True))
    wanted = [plain.engine.run_step(step) for step in range(WARM_UP_STEPS + 3)]
    rate = torch.zeros(1)
    monkeypatch.setattr(TorchDevice, "adamw_on_device", of_the_host)
    found = [run.engine.run_step(step) for step in range(WARM_UP_STEPS + 3)]
    assert found[: WARM_UP_STEPS + 2] == wanted[: WARM_UP_STEPS + 2]
    assert found != wanted


def test_a_number_of_labels_that_is_recorded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from ratrain.targets.pytorch.device.device_memory import DeviceMemory

    (plain, _), (run, _) = (begun("documents", captured=captured) for captured in (False, True))
    wanted = [plain.engine.run_step(step) for step in range(WARM_UP_STEPS + 3)]
    monkeypatch.setattr(DeviceMemory, "number", lambda _self, value, _held=None: value)
    assert [run.engine.run_step(step) for step in range(WARM_UP_STEPS + 3)] != wanted


def test_a_number_that_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from ratrain.targets.pytorch.device.device_scalars import DeviceScalars
    from ratrain.targets.runtime.arena.scalars import LossScale

    monkeypatch.setattr(
        DeviceScalars,
        "advance_scale",
        lambda _self, scale, overflow, **_: LossScale(scale).advance(overflow=bool(overflow.view(torch.int32)[0])),
    )
    run, _ = begun("zero0", captured=True)
    for step in range(WARM_UP_STEPS):
        run.engine.run_step(step)
    with pytest.raises(CaptureError):
        run.engine.run_step(WARM_UP_STEPS)


def test_what_cannot_be_repeated_is_refused() -> None:
    program = make_program()
    for settings, why in (
        ({"kernels": "fast"}, "'host', not on a device of CUDA"),
        ({"kernels": "torch-device"}, "'cpu', not on a device of CUDA"),
        ({"kernels": "torch-device", "threads": 2}, "its engines are threads"),
    ):
        chosen = run_settings(1, graph=True, **settings)
        with pytest.raises(DiagnosticError, match=why) as refused:
            prepare(program, make_stream(), chosen, kernel_set(chosen.execution.kernels))
        assert refused.value.diagnostics[0].help is not None
