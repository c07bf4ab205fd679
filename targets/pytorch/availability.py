"""What the PyTorch of this environment can move bytes with."""

from __future__ import annotations

import torch
import torch.distributed as dist


def distributed_words() -> str:
    """PyTorch's version, and the backends of torch.distributed that it was built with."""
    if not dist.is_available():
        return f"torch {torch.__version__}, without torch.distributed"
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    words = ", ".join(f"{name}: {'yes' if there else 'no'}" for name, there in built.items())
    return f"torch {torch.__version__}, torch.distributed with {words}"
