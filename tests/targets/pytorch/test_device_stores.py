"""Other memories beside a device's: what is stored there comes back as it was, and state in files or on the host trains the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.config.types import STORES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from tests.end_to_end.tiny_runs import MODEL, instructions, losses, make_plan, same_state_of_blocks, train
from tests.mutation.subjects import WITH_STORES

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.program.program import Program

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from ratrain.targets.pytorch.device.device_kernels import TorchDevice  # noqa: E402
from ratrain.targets.pytorch.device.device_memory import DeviceMemory  # noqa: E402
from ratrain.targets.runtime.engine.engine import _check_homes  # noqa: E402
from tests.targets.pytorch.shuffled import ShuffledRun  # noqa: E402

PLANS: dict[str, dict[str, Any]] = {
    "two stages": {},
    "zero 3 each": {"zero": 3, "reduce": "each-micro-batch"},
    "bf16": {"view_dtype": "bf16", "dp": 1, "zero": 0},
    "peers": {"tp": 2, "dp": 1, "zero": 0},
}
OFFLOADED: dict[str, dict[str, Any]] = {
    "sharded": {"zero": 1},
    "gathered for each use": {"zero": 3, "reduce": "each-micro-batch"},
    "overflows": {"loss_scale": 2.0**24, "zero": 3, "dp": 1},
}
HOMES = [home.value for home in STORES]
ORDER = "recompute{policy=attention},bucket-grad-sync,schedule-update,insert-prefetch,allocate-ddr"


def program_of(plan: dict[str, Any], passes: str) -> Program:
    return api.emit(api.compile(MODEL, make_plan(**plan), passes=passes, machine=WITH_STORES), machine=WITH_STORES)


def storing(plan: dict[str, Any], home: str | None) -> Program:
    return program_of(plan, f"recompute{{policy=none{f' store={home}' if home else ''}}},allocate-ddr")


def offloading(plan: dict[str, Any], home: str | None) -> Program:
    return program_of(plan, f"place-1f1b,{f'offload-state{{home={home}}},' if home else ''}{ORDER}")


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_stored_comes_back_as_it_was(plan: str, home: str) -> None:
    stored = storing(PLANS[plan], home)
    assert any(instructions(stored, "store")), "something is stored"
    plain = train(storing(PLANS[plan], None), 3, kernels="torch-device")
    watched = train(stored, 3, kernels="torch-device", check_memory=True, poison=True, interleave_seed=3)
    assert losses(watched) == losses(plain)
    same_state_of_blocks(watched, plain)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("plan", OFFLOADED)
def test_offloaded_state_trains_the_same_bits(plan: str, home: str) -> None:
    plain = train(offloading(OFFLOADED[plan], None), 3, kernels="torch-device")
    moved = train(offloading(OFFLOADED[plan], home), 3, kernels="torch-device", check_memory=True, poison=True)
    assert losses(moved) == losses(plain)
    same_state_of_blocks(moved, plain)


@pytest.mark.parametrize("home", HOMES)
def test_a_run_goes_on_from_its_checkpoint(home: str, tmp_path: Path) -> None:
    program = offloading(OFFLOADED["sharded"], home)
    whole = train(program, 4, kernels="torch-device")
    train(program, 2, kernels="torch-device", save=str(tmp_path / "run"))
    same_state_of_blocks(train(program, 2, kernels="torch-device", resume=str(tmp_path / "run")), whole)


def test_streams_order_what_is_stored() -> None:
    """Copies to the host and back are late on streams of their own, as on a GPU; a wait that is missing would show."""
    program = storing({"dp": 1, "zero": 0, "micro_batches": 3, "seq_len": 6, "micro_batch_size": 1}, "host")
    run = ShuffledRun(program)
    assert not any(run.changes(program, seed) for seed in range(6))


class _Behind(DeviceMemory):
    """Memory of a device that works behind the program."""

    overlaps = True  # type: ignore[assignment]


def test_a_device_that_works_behind_the_program_updates_nothing_on_the_host() -> None:
    kernels = TorchDevice()
    kernels.memory = _Behind(torch.device("cpu"))
    _check_homes(offloading(OFFLOADED["sharded"], "file"), kernels)
    with pytest.raises(DiagnosticError, match="updates no state that is in the host's memory"):
        _check_homes(offloading(OFFLOADED["sharded"], "host"), kernels)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("base", ["view", "nf4"])
def test_frozen_parameters_are_fetched_as_they_were_loaded(base: str, home: str) -> None:
    plan = {"training": Training(method="lora", rank=4, base=base)}
    plain = train(offloading(plan, None), 3, kernels="torch-device")
    fetching = program_of(plan, f"place-1f1b,offload-state{{home={home} what=views}},{ORDER}")
    moved = train(fetching, 3, kernels="torch-device", check_memory=True, poison=True, interleave_seed=3)
    assert losses(moved) == losses(plain)
    same_state_of_blocks(moved, plain)


def test_parts_of_frozen_parameters_are_gathered_on_a_device() -> None:
    plan = {"training": Training(method="lora", rank=4, base="nf4")}
    whole, parts = (train(offloading(plan | {"zero": zero}, None), 3, kernels="torch-device") for zero in (2, 3))
    stored = program_of(plan | {"zero": 3}, f"place-1f1b,offload-state{{home=file what=views}},{ORDER}")
    for found in (parts, train(stored, 3, kernels="torch-device")):
        assert losses(found) == losses(whole)
        same_state_of_blocks(found, whole)
