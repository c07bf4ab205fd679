"""A job that options alone describe: a model, devices and their memory, with no settings file.

Nothing decides the rest, so it is what a plain loop of PyTorch does with transformers' model classes, and the answer
lists it as assumed: f32 weights, gradients and AdamW moments, products in bf16 by autocast, every activation kept, and
FSDP2 over several devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Job, Loss, Origin, Sharding

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job_reader import Asked

FRAMEWORK = "pytorch"
ASSUMED = "assumed: no file says it"
SEQ_LEN = 2048
"""Tokens of a sequence, where no option says it: as in the paper's plans."""
_WORDS: dict[tuple[str, Any], str] = {
    ("loss", Loss.FUSED): "a fused linear cross-entropy",
    ("checkpointing", Checkpointing.FULL): "recompute each layer (torch.utils.checkpoint)",
    ("sharding", Sharding.FSDP2): "fully_shard",
    ("optimizer", "adamw-8bit"): "AdamW with 8-bit moments",
    ("attention", Attention.SDPA): "scaled_dot_product_attention",
    ("offload_optimizer", True): "optimizer state on the host",
    ("offload_activations", True): "layer inputs on the host",
}


def option_job(asked: Asked) -> Job:
    """Make the job of a model on `asked.devices` devices (one if not given).

    Raises RT063 if no model is given.
    """
    if asked.model is None:
        fail("RT063", "there is neither a settings file nor a model", help="name a file, or a model with --model M")
    several = (asked.devices or 1) > 1
    assumed: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "micro_batch_size": 1,
        "devices": 1,
        "gradient_accumulation": 1,
        "compute_dtype": "bf16",
        "autocast": not several,  # FSDP2's mixed precision casts what it gathers
        "sharding": Sharding.FSDP2 if several else Sharding.NONE,
        "optimizer": "adamw",
        "checkpointing": Checkpointing.NONE,
        "attention": Attention.SDPA,
        "loss": Loss.UPCAST,
    }
    given = {name: getattr(asked, name) for name in ("seq_len", "micro_batch_size", "devices")}
    given = {name: value for name, value in given.items() if value is not None}
    origins = {name: Origin(name, ASSUMED, default=True) for name in assumed.keys() - given.keys()}
    origins |= {name: Origin(f"--{name.replace('_', '-')}", "command line") for name in given}
    return Job(
        framework=FRAMEWORK,
        model_name=asked.model.name,
        model=asked.model,
        device_bytes=asked.device_bytes,
        origins=origins,
        **{**assumed, **given},
    )


def option_phrase(_job: Job, name: str, value: Any) -> str | None:
    """Say a change in plain words; None if a plain loop has no word for it."""
    if name == "micro_batch_size":
        return f"--micro-batch-size {value}"
    if name == "seq_len":
        return f"--seq-len {value}"
    if name == "gradient_accumulation":
        return f"accumulate gradients of {value} micro-batches"
    return _WORDS.get((name, value))
