"""What a training run is told beside its program and data, and how tokens are chosen of a trained model, in groups of what belongs together."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, TypeAlias

from attrs import frozen

from ratrain.ratrain_ir.side_by_side import usable_cores

Order: TypeAlias = Literal["shuffled", "sequential", "documents"]
"""In which order training sequences are visited: at random, as they stand, or as they stand in documents that are at random."""


@frozen
class Start:
    """What a run starts from; without weights or checkpoint, from weights drawn at random."""

    weights: str | None = None
    """file or directory, with Hugging Face names"""
    checkpoint: str | None = None
    """directory of one, or of several, to go on from"""
    new_data: bool = False
    """go on from a checkpoint whose run had other data"""


@frozen
class Saving:
    """Where and when a run saves its state."""

    directory: str | None = None
    """written at the end: a checkpoint; with `every`, or several processes, a series of them"""
    every: int | None = None
    """steps between checkpoints"""
    keep_last: int = 2
    """checkpoints of a series that are kept"""

    def is_series(self, processes: int) -> bool:
        """Whether a run of so many processes writes a series of checkpoints."""
        return self.every is not None or processes > 1


@frozen
class Evaluation:
    """When the loss of held-out data is computed, and of which."""

    every: int | None = None
    """steps from one evaluation to the next, and one at the end; None: none"""
    paths: tuple[str, ...] = ()
    """held-out data; none: the last `fraction` of the data, which is not trained on then"""
    fraction: float = 0.05
    batches: int | None = None
    """batches of one evaluation; None: all there are"""


HOST_DEVICE = "cpu"
"""The processor of this process."""


TENSOR_KERNELS = ("torch-device", "torch-triton")
"""The kernel sets whose arenas are tensors, on whatever device."""


def default_kernels(device: str) -> str:
    """The kernel set that a device is used with where none is named: fused kernels where Triton is installed."""
    if device == HOST_DEVICE:
        return "fast"
    return "torch-triton" if find_spec("triton") is not None else "torch-device"


@frozen
class Execution:
    """How a program is executed."""

    kernels: str = "fast"
    device: str = HOST_DEVICE
    """what executes it, as PyTorch calls it"""
    graph: bool = False
    """record a whole step of the device once, and repeat it"""
    threads: int = 1
    """with more than one, the engines of all ranks run side by side, and ranks share out these threads for their kernels"""
    interleave_seed: int | None = None
    """of a random order of ready instructions; None: a fixed one"""
    sums: str = "rank order"
    """how gradients are summed over replicas, or the engine whose library chooses: part of what the bits depend on"""
    check_memory: bool = False
    """hold every access against the program's lives"""
    poison: bool = False
    """fill freed bytes with NaNs; implies `check_memory`"""
    store_folder: str | None = None
    """where ranks have the files in which they store tensors; None: where this system has temporary files"""
    ram_bytes: int | None = None
    """the most that a process may hold in memory; None: what there is"""

    def kernel_threads(self, ranks: int) -> int:
        """Threads that share the work of one kernel, where so many ranks compute in this process."""
        return max(1, self.threads // ranks)


@frozen
class Watch:
    """How a run is watched over."""

    folder: str | None = None
    """where ranks say where they are, for the watchdog and for `postmortem`; None: beside a series of checkpoints, if any"""
    hang_timeout: float = 8.0
    """seconds without progress after which the watchdog judges; 0: never"""


@frozen
class OptimizerKeys:
    """Keys of the plan's optimizer that a run is told in place of the plan's; None: the plan's."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    min_lr: float | None = None
    max_norm: float | None = None


@frozen
class RunSettings:
    """What a run is told beside its program and data."""

    steps: int
    """steps of this run; a resumed one goes on from where the checkpoint stopped"""
    order: Order = "shuffled"
    seed: int | None = None
    """of initial weights and data order; None: the plan's"""
    optimizer: OptimizerKeys = OptimizerKeys()
    start: Start = Start()
    saving: Saving = Saving()
    evaluation: Evaluation = Evaluation()
    execution: Execution = Execution()
    watch: Watch = Watch()


@frozen
class Sampling:
    """How a token is chosen from its logits."""

    temperature: float = 0.0
    """logits are divided by it; 0: the likeliest token, the first of several"""
    top_p: float = 1.0
    """only the likeliest tokens are drawn from whose probabilities first add up to this"""
    seed: int = 0


def available_threads() -> int:
    """How many cores this process may use."""
    return len(usable_cores())
