"""Step times on a device, predicted from `ratrainc calibrate --device` for plans and models that it was not calibrated on.

    python benchmarks/predicted_device.py [cpu|cuda] [--kernels fast] [--seconds 10] [--calls 2]

In each call the device is calibrated anew, and programs run right after it: their widths, lengths, batches and counts of micro-batches are
none of those that were timed. On a processor all of it is CPU time of one thread, so that others may use the machine; how fast a shared
machine goes still differs from minute to minute, which the fastest product of each calibration shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from attrs import evolve
from threadpoolctl import threadpool_limits

from ratrain.ratrainc.calibration.device_ops import run_programs
from ratrain.ratrainc.calibration.device_programs import USUAL_DTYPE, UsualSize, compiled
from ratrain.ratrainc.calibration.from_device import DeviceChoice, machine_of_device, predicted_step_seconds
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import HOST_DEVICE, default_kernels

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.runtime.kernels import KernelSet

OF_A_HOST = (UsualSize("llama-2-7b", 384, 256, 2), UsualSize("gpt2", 640, 192, 1), UsualSize("llama-2-7b", 640, 384, 1))
OF_A_GPU = (
    UsualSize("llama-2-7b", 1536, 1536, 2),
    UsualSize("gpt2", 1280, 1024, 2),
    UsualSize("llama-2-7b", 3072, 2048, 1),
)
MICRO_BATCHES = 3


def compared(machine: Machine, kernels: KernelSet) -> Iterator[tuple[str, float, float]]:
    """Of each program its model's name, and the seconds of a step: predicted by a machine, and taken on the device."""
    overlaps = kernels.memory.overlaps
    sizes = OF_A_GPU if overlaps else OF_A_HOST
    plans = [evolve(size.plan(USUAL_DTYPE), micro_batches=MICRO_BATCHES) for size in sizes]
    programs = [compiled(size.model(), plan, machine) for size, plan in zip(sizes, plans, strict=True)]
    for run in run_programs(programs, kernels):
        predicted = predicted_step_seconds(run.program, machine, overlaps=overlaps)
        yield run.program.model.name, predicted, run.step_seconds


@click.command()
@click.argument("device", default=HOST_DEVICE)
@click.option("--kernels")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="of each calibration")
@click.option("--calls", type=click.IntRange(min=1), default=2, show_default=True)
def main(device: str, kernels: str | None, seconds: float, calls: int) -> None:
    """Calibrate, predict and run."""
    chosen = kernel_set(kernels or default_kernels(device), 1, device)
    print("| kernels | fastest product | program | predicted | ran | error |\n|---|---|---|---|---|---|")
    for _ in range(calls):
        with threadpool_limits(limits=1):
            timed = machine_of_device(DeviceChoice(device, chosen.name, seconds=seconds), "here")
            peak = timed.machine["fp16_peak"] / 1e9
            for name, predicted, ran in compared(timed.machine, chosen):
                print(
                    f"| {chosen.name} | {peak:.0f} GFLOP/s | {name} | {predicted:.3f} s | {ran:.3f} s "
                    f"| {predicted / ran - 1:+.1%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
