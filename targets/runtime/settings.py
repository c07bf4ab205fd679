"""Settings of a training run other than its program and data, and of token sampling, grouped by subject."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, TypeAlias

from attrs import frozen

from ratrain.ratrain_ir.process_pool import usable_cores

Order: TypeAlias = Literal["shuffled", "sequential", "documents"]
"""Order in which training sequences are visited. `shuffled`: sequences at random; `sequential`: as they stand in the
data; `documents`: documents at random, and their tokens in sequence."""


@frozen
class Start:
    """Starting point of a run; with neither weights nor checkpoint, weights are drawn at random."""

    weights: str | None = None
    """file or directory of weights under Hugging Face names"""
    adapter: str | None = None
    """folder of PEFT with the adapters to start from; None: new ones, where the program trains adapters"""
    checkpoint: str | None = None
    """directory of one checkpoint, or of a series, to resume from"""
    new_data: bool | None = False
    """resume although the checkpoint's run had other data; None: no, and the command has no option for it"""


@frozen
class Saving:
    """Place and times at which a run saves its state."""

    directory: str | None = None
    """written at the end: one checkpoint; with `every`, or several processes, a series of them"""
    every: int | None = None
    """steps from one checkpoint to the next; None: one at the end"""
    keep_last: int = 2
    """number of checkpoints of a series that are kept"""
    best: str | None = None
    """directory of the state with the lowest held-out loss so far; None: it is not kept"""

    def is_series(self, processes: int) -> bool:
        """Return True if a run of `processes` processes writes a series of checkpoints rather than one."""
        return self.every is not None or processes > 1


@frozen
class Evaluation:
    """Times at which the loss of held-out data is computed, and the data it is computed on."""

    every: int | None = None
    """steps from one evaluation to the next, with one more at the end; None: no evaluation"""
    paths: tuple[str, ...] = ()
    """files of held-out data; empty: the last `fraction` of the training data, which is then not trained on"""
    fraction: float = 0.05
    batches: int | None = None
    """batches of one evaluation; None: all of the held-out data"""
    patience: int | None = None
    """evaluations without a lower loss after which the run ends; None: it goes on"""


HOST_DEVICE = "cpu"
"""Name of the device that is the processor of this process."""


TENSOR_KERNELS = ("torch-device", "torch-triton")
"""Kernel sets whose arenas are PyTorch tensors, on any device."""


AUTO_KERNELS = "auto"
"""Word that stands for the kernel set that a run's program, device and processor ask for."""


def default_kernels(device: str) -> str:
    """Return the default kernel set of a device: `fast` on the host; elsewhere fused kernels if Triton is installed."""
    if device == HOST_DEVICE:
        return "fast"
    return "torch-triton" if find_spec("triton") is not None else "torch-device"


@frozen
class Execution:
    """Options of how a program is executed."""

    kernels: str = AUTO_KERNELS
    """a kernel set, or `auto`: chosen when the program is known"""
    kernels_reason: str = ""
    """reason for the kernel set, where it was chosen by `auto`"""
    device: str = HOST_DEVICE
    """device that executes the program, as PyTorch names it"""
    graph: bool = False
    """record one whole step on the device and replay it"""
    threads: int = 1
    """with more than one, the engines of all ranks run concurrently, and ranks share these threads for their kernels"""
    interleave_seed: int | None = None
    """seed of a random order among ready instructions; None: a fixed order"""
    sums: str = "rank order"
    """order in which gradients are summed over replicas, or the engine whose library chooses it; results depend on
    it bit for bit"""
    check_memory: bool = False
    """check every access against the lifetimes that the program declares"""
    poison: bool = False
    """fill freed bytes with NaNs; implies `check_memory`"""
    store_folder: str | None = None
    """folder of the files in which ranks store tensors; None: the system's folder for temporary files"""
    ram_bytes: int | None = None
    """memory limit of a process, in bytes; None: the memory that the machine has"""

    def kernel_threads(self, ranks: int) -> int:
        """Return the threads that one kernel may use where `ranks` ranks compute in this process: at least 1."""
        return max(1, self.threads // ranks)


@frozen
class Watch:
    """Supervision of a run: progress files and the watchdog."""

    folder: str | None = None
    """folder in which ranks record their positions, for the watchdog and for `postmortem`; None: next to the series
    of checkpoints, if there is one"""
    hang_timeout: float = 8.0
    """seconds without progress after which the watchdog looks for a hang; 0: never"""


@frozen
class OptimizerKeys:
    """Optimizer keys that a run overrides; None leaves the plan's value."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    min_lr: float | None = None
    decay: str | None = None
    decay_steps: int | None = None
    max_norm: float | None = None


@frozen
class RunSettings:
    """All settings of a run other than its program and data."""

    steps: int
    """steps of this run; a resumed run counts them from its checkpoint"""
    order: Order = "shuffled"
    seed: int | None = None
    """seed of initial weights and data order; None: the plan's"""
    optimizer: OptimizerKeys = OptimizerKeys()
    start: Start = Start()
    saving: Saving = Saving()
    evaluation: Evaluation = Evaluation()
    execution: Execution = Execution()
    watch: Watch = Watch()


@frozen
class Sampling:
    """Rule by which a token is chosen from its logits."""

    temperature: float = 0.0
    """divisor of the logits; 0: the token with the largest logit, the first one on a tie"""
    top_p: float = 1.0
    """draw only from the likeliest tokens, up to the first whose cumulative probability reaches this value"""
    seed: int = 0


def available_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(usable_cores())
