"""The memory of a PyTorch device: an arena is one byte tensor, everything planned is a typed view of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Dtype
from ratrain.targets.pytorch.cuda_libraries import cublas_workspace_bytes
from ratrain.targets.pytorch.device.device_scalars import log_bytes
from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch
from ratrain.targets.pytorch.device.tensors import TORCH_DTYPES, tensor_of
from ratrain.targets.pytorch.device_streams import CudaDevice, CudaStopwatch, StreamOrder
from ratrain.targets.runtime.arena.dtypes import BFLOAT16, NUMPY_DTYPES
from ratrain.targets.runtime.arena.process_memory import room
from ratrain.targets.runtime.arena.stopwatch import DeviceFacts, HostStopwatch, Stopwatch
from ratrain.targets.runtime.arena.streams import AtOnce, Order
from ratrain.targets.runtime.arena.tensor_file import PIECE_ELEMENTS

if TYPE_CHECKING:
    from ratrain.targets.runtime.arena.kernel_memory import Work

_NUMBERS = 64
"""Bytes of the numbers of one operation: PyTorch makes a tensor on the host of each."""
_PIECE_BYTES = PIECE_ELEMENTS * 4
"""Of weights on their way to where they stay."""


@contextmanager
def _refused_as_memory() -> Iterator[None]:
    """What the allocator cannot give is a MemoryError: on the CPU PyTorch has no type of its own for it."""
    try:
        yield
    except RuntimeError as error:
        raise MemoryError(str(error).splitlines()[0]) from error


_NUMPY_TYPES = {ours: numpys for numpys, ours in TORCH_DTYPES.items()}


@frozen(eq=False)
class StagedFeed:
    """`Feed` of a tensor: a buffer of the host, page-locked where the device copies by itself, is its own from the first step to the last."""

    target: torch.Tensor
    buffer: torch.Tensor
    is_ahead = True

    @property
    def values(self) -> NDArray[Any]:
        """The buffer."""
        found: NDArray[Any] = self.buffer.numpy()
        return found

    def deliver(self) -> None:
        """Copy it, without waiting for that."""
        self.target.copy_(self.buffer, non_blocking=True)


class DeviceMemory:
    """`Memory` of a device: arrays are tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def place(self) -> str:
        """The device, as PyTorch calls it."""
        return str(self.device)

    @property
    def overlaps(self) -> bool:
        """Whether its streams do several things at a time, as those of CUDA do."""
        return self.device.type == "cuda"

    def room(self) -> tuple[int, str]:
        """What is free of the device; on the CPU that of this process."""
        if self.device.type != "cuda":
            return room()
        free, _ = torch.cuda.mem_get_info(self.device)
        return free, f"the device '{self.device}' has {free} free"

    def allocate(self, count: int) -> torch.Tensor:
        """Zeroed bytes that start at a multiple of the alignment. Raises MemoryError where there are not so many."""
        with _refused_as_memory():
            raw = torch.zeros(count + ALIGNMENT_BYTES, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % ALIGNMENT_BYTES
        return raw[start : start + count]

    def scratch(self, capacity: int) -> TensorScratch:
        """What kernels take temporaries from."""
        with _refused_as_memory():
            return TensorScratch(capacity, self.device)

    def order(self) -> Order:
        """Streams of the device; on the CPU an instruction is done when it returns."""
        return StreamOrder(CudaDevice(self.device)) if self.overlaps else AtOnce()

    def stopwatch(self) -> Stopwatch:
        """Events of the device; on the CPU the clock of this process."""
        return CudaStopwatch(self.device) if self.overlaps else HostStopwatch()

    def device_facts(self) -> DeviceFacts | None:
        """What CUDA says of it: taken is what is neither free nor PyTorch's own; None of the CPU, which is the host."""
        if not self.overlaps:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        name = torch.cuda.get_device_name(self.device)
        return DeviceFacts(name, total, total - free - torch.cuda.memory_reserved(self.device))

    def typed(self, data: torch.Tensor, dtype: Dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor over contiguous bytes."""
        return data.view(TORCH_DTYPES[NUMPY_DTYPES[dtype]]).view(shape)

    def bytes_of(self, array: torch.Tensor) -> torch.Tensor:
        """The bytes of a contiguous tensor."""
        return array.view(-1).view(torch.uint8)

    def element_type(self, array: torch.Tensor) -> np.dtype[Any]:
        """The type of its elements, as numpy has it."""
        return _NUMPY_TYPES[array.dtype]

    def empty_like(self, array: torch.Tensor) -> torch.Tensor:
        """A new tensor of the same shape and type."""
        with _refused_as_memory():
            return torch.empty_like(array)

    def beside(self, count: int) -> torch.Tensor:
        """Page-locked where the device copies by itself, so that it does so beside everything else."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        with _refused_as_memory():
            raw = torch.zeros(count + ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        start = -raw.data_ptr() % ALIGNMENT_BYTES
        return raw[start : start + count]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Set target = source, without waiting for that."""
        target.copy_(source, non_blocking=True)

    def read_into(self, array: torch.Tensor, read: Callable[[NDArray[np.uint8]], None]) -> None:
        """On the CPU into the bytes themselves; else through the host."""
        data = self.bytes_of(array)
        if not self.overlaps:
            read(data.numpy())
            return
        buffer = np.empty(len(data), np.uint8)
        read(buffer)
        data.copy_(torch.from_numpy(buffer))

    def staged(self, values: NDArray[Any]) -> torch.Tensor:
        """Values of the host as a tensor of the device."""
        return tensor_of(values if values.flags.writeable else values.copy()).to(self.device)

    def write(self, target: torch.Tensor, values: Any) -> None:
        """Set a tensor to numbers of the host: one for all elements, or one for each."""
        if isinstance(values, int | float):
            target.fill_(values)
        else:
            target.copy_(tensor_of(np.array(values)))  # straight from the host: nothing of the device is asked for

    def to_host(self, array: torch.Tensor) -> NDArray[Any]:
        """The elements on the host."""
        values = array.cpu()
        if values.dtype == torch.bfloat16:
            return values.view(torch.int16).numpy().view(BFLOAT16)
        found: NDArray[Any] = values.numpy()
        return found

    def feed(self, target: torch.Tensor) -> StagedFeed:
        """Through a buffer of the host that is made here."""
        pinned = self.device.type == "cuda"
        return StagedFeed(target, torch.empty(target.shape, dtype=target.dtype, pin_memory=pinned))

    def number(self, value: float, held: Any = None) -> torch.Tensor:
        """One float64 on the device."""
        if held is None:
            held = torch.empty(1, dtype=torch.float64, device=self.device)
        found: torch.Tensor = held.fill_(value)
        return found

    def constants(self, work: Work) -> dict[str, int]:
        """Of this device: on a GPU inputs wait in pinned memory of the host, and its libraries have workspaces of the device."""
        numbers = work.denominators * torch.float64.itemsize + log_bytes(work.ranks, work.blocks)
        found = {"alignment": work.areas * ALIGNMENT_BYTES, "single numbers": numbers}
        if self.device.type == "cuda":
            workspaces = work.streams * cublas_workspace_bytes(self.device)
            return {**found, "pieces of weights": _PIECE_BYTES, "workspaces of cuBLAS": workspaces}
        inputs = sum(count * prod(shape) * dtype.itemsize for (dtype, shape), count in work.inputs.items())
        return {**found, "inputs": inputs, "numbers of an operation": _NUMBERS}
