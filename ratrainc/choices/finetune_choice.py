"""Options of `finetune`."""

from __future__ import annotations

from attrs import field, frozen

from ratrain.ratrain_ir.config.training import ALL_LINEAR
from ratrain.ratrainc.choices.run_choices import DataChoice, TrackerChoice
from ratrain.targets.runtime.settings import HOST_DEVICE

AUTO = "auto"
CONSTANT = "constant"
"""Value of `decay` with which the learning rate stays."""


@frozen
class Adapting:
    """Adapters that train, or the whole model."""

    rank: int = 16
    alpha: float | None = None
    """None: twice the rank"""
    targets: str = ALL_LINEAR
    base: str = AUTO
    """storage of the frozen matrices; `AUTO`: as views, or packed in 4 bits where memory asks for it"""
    whole: bool = False
    """True: the model itself trains"""

    @property
    def scale(self) -> float:
        """The adapters' alpha."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


@frozen
class Schedule:
    """Batches, steps and learning rate; None is decided by the data or by what trains."""

    epochs: float = 3.0
    steps: int | None = None
    """replaces `epochs`"""
    batch: int = 8
    """sequences a step"""
    seq_len: int | None = None
    """None: that of the longest document, rounded up, within `LONGEST`"""
    lr: float | None = None
    decay: str = "cosine"
    decay_steps: int | None = None
    warmup_steps: int | None = None
    """None: 3 % of the steps"""


@frozen
class Judging:
    """Held-out data."""

    paths: tuple[str, ...] = ()
    fraction: float = 0.05
    every: int | None = None
    """None: twice an epoch"""
    patience: int | None = None


@frozen
class FinetuneChoice:
    """Choices of a fine-tuning."""

    model: str
    """directory of the model's config.json, weights and tokenizer"""
    output: str
    data: DataChoice
    adapting: Adapting = field(factory=Adapting)
    schedule: Schedule = field(factory=Schedule)
    judging: Judging = field(factory=Judging)
    dtype: str = AUTO
    """type of views and activations; `AUTO`: by this processor, and by memory"""
    ram_bytes: int | None = None
    """most bytes that the process may hold, or of a device its memory; None: nine tenths of what there is"""
    device: str = HOST_DEVICE
    seed: int | None = None
    resume: bool = False
    merge: bool = False
    trackers: tuple[TrackerChoice, ...] = ()
