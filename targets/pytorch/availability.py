"""Backends of the installed PyTorch that can move bytes between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def distributed_words() -> str:
    """Return PyTorch's version and the backends of torch.distributed that it was built with, as text."""
    if not dist.is_available():
        return f"torch {torch.__version__}, without torch.distributed"
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    words = ", ".join(f"{name}: {'yes' if there else 'no'}" for name, there in built.items())
    return f"torch {torch.__version__}, torch.distributed with {words}"
