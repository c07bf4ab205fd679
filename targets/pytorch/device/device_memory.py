"""Memory of a PyTorch device: an arena is one byte tensor, all planned tensors are typed views of it."""

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
"""Bytes of the numbers of one operation: PyTorch makes a host tensor of each."""
_PIECE_BYTES = PIECE_ELEMENTS * 4
"""Bytes of weights while they are moved to their place."""


@contextmanager
def _refused_as_memory() -> Iterator[None]:
    """Turn the allocator's refusal into MemoryError: on the CPU PyTorch has no exception type of its own for it."""
    try:
        yield
    except RuntimeError as error:
        raise MemoryError(str(error).splitlines()[0]) from error


_NUMPY_TYPES = {ours: numpys for numpys, ours in TORCH_DTYPES.items()}


@frozen(eq=False)
class StagedFeed:
    """`Feed` of a tensor by a host buffer that it keeps over all steps.

    The buffer is page-locked if the device copies by itself.
    """

    target: torch.Tensor
    buffer: torch.Tensor
    is_ahead = True

    @property
    def values(self) -> NDArray[Any]:
        """The buffer, to be written."""
        found: NDArray[Any] = self.buffer.numpy()
        return found

    def deliver(self) -> None:
        """Copy the buffer to the tensor, without waiting."""
        self.target.copy_(self.buffer, non_blocking=True)


class DeviceMemory:
    """`Memory` of a device: arrays are tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def place(self) -> str:
        """Name of the device, as PyTorch calls it."""
        return str(self.device)

    @property
    def overlaps(self) -> bool:
        """True if its streams work at the same time, as CUDA's do."""
        return self.device.type == "cuda"

    def room(self) -> tuple[int, str]:
        """Return the free bytes of the device, and a clause that says so; on the CPU this process's."""
        if self.device.type != "cuda":
            return room()
        free, _ = torch.cuda.mem_get_info(self.device)
        return free, f"the device '{self.device}' has {free} free"

    def allocate(self, count: int) -> torch.Tensor:
        """Allocate zeroed bytes at a multiple of the alignment. Raises MemoryError if they do not fit."""
        with _refused_as_memory():
            raw = torch.zeros(count + ALIGNMENT_BYTES, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % ALIGNMENT_BYTES
        return raw[start : start + count]

    def scratch(self, capacity: int) -> TensorScratch:
        """Make the scratch that kernels take temporaries from."""
        with _refused_as_memory():
            return TensorScratch(capacity, self.device)

    def order(self) -> Order:
        """Return the device's streams; on the CPU, an order whose instructions are done when they return."""
        return StreamOrder(CudaDevice(self.device)) if self.overlaps else AtOnce()

    def stopwatch(self) -> Stopwatch:
        """Return a stopwatch by events of the device; on the CPU by this process's clock."""
        return CudaStopwatch(self.device) if self.overlaps else HostStopwatch()

    def device_facts(self) -> DeviceFacts | None:
        """Return CUDA's facts about the device; None for the CPU, which is the host.

        Taken bytes are those that are neither free nor reserved by PyTorch.
        """
        if not self.overlaps:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        name = torch.cuda.get_device_name(self.device)
        return DeviceFacts(name, total, total - free - torch.cuda.memory_reserved(self.device))

    def typed(self, data: torch.Tensor, dtype: Dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View contiguous bytes as a tensor."""
        return data.view(TORCH_DTYPES[NUMPY_DTYPES[dtype]]).view(shape)

    def bytes_of(self, array: torch.Tensor) -> torch.Tensor:
        """View a contiguous tensor as bytes."""
        return array.view(-1).view(torch.uint8)

    def element_type(self, array: torch.Tensor) -> np.dtype[Any]:
        """Return numpy's type of its elements."""
        return _NUMPY_TYPES[array.dtype]

    def empty_like(self, array: torch.Tensor) -> torch.Tensor:
        """Allocate a tensor of the same shape and type."""
        with _refused_as_memory():
            return torch.empty_like(array)

    def host_buffer(self, count: int) -> torch.Tensor:
        """Allocate zeroed host bytes as a tensor; page-locked if the device copies by itself, so copies overlap."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        with _refused_as_memory():
            raw = torch.zeros(count + ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        start = -raw.data_ptr() % ALIGNMENT_BYTES
        return raw[start : start + count]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Set target = source, without waiting."""
        target.copy_(source, non_blocking=True)

    def read_into(self, array: torch.Tensor, read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Let `read` write the bytes of a tensor: directly on the CPU, else through a host buffer."""
        data = self.bytes_of(array)
        if not self.overlaps:
            read(data.numpy())
            return
        buffer = np.empty(len(data), np.uint8)
        read(buffer)
        data.copy_(torch.from_numpy(buffer))

    def staged(self, values: NDArray[Any]) -> torch.Tensor:
        """Copy host values to a new tensor of the device."""
        return tensor_of(values if values.flags.writeable else values.copy()).to(self.device)

    def write(self, target: torch.Tensor, values: Any) -> None:
        """Set a tensor to host numbers: one for all elements, or one for each."""
        if isinstance(values, int | float):
            target.fill_(values)
        else:
            target.copy_(tensor_of(np.array(values)))  # straight from the host: no device memory is allocated

    def to_host(self, array: torch.Tensor) -> NDArray[Any]:
        """Copy the elements to the host."""
        values = array.cpu()
        if values.dtype == torch.bfloat16:
            return values.view(torch.int16).numpy().view(BFLOAT16)
        found: NDArray[Any] = values.numpy()
        return found

    def feed(self, target: torch.Tensor) -> StagedFeed:
        """Make a host buffer that fills this tensor at every step."""
        pinned = self.device.type == "cuda"
        return StagedFeed(target, torch.empty(target.shape, dtype=target.dtype, pin_memory=pinned))

    def number(self, value: float, held: Any = None) -> torch.Tensor:
        """Return a float64 on the device, in `held` if that is given."""
        if held is None:
            held = torch.empty(1, dtype=torch.float64, device=self.device)
        found: torch.Tensor = held.fill_(value)
        return found

    def constants(self, work: Work) -> dict[str, int]:
        """Return the most bytes that a run's work takes here, by purpose.

        On a GPU inputs wait in pinned host memory, so they do not count, and its libraries have device workspaces.
        """
        numbers = work.denominators * torch.float64.itemsize + log_bytes(work.ranks, work.blocks)
        found = {"alignment": work.areas * ALIGNMENT_BYTES, "single numbers": numbers}
        if self.device.type == "cuda":
            workspaces = work.streams * cublas_workspace_bytes(self.device)
            return {**found, "pieces of weights": _PIECE_BYTES, "workspaces of cuBLAS": workspaces}
        inputs = sum(count * prod(shape) * dtype.itemsize for (dtype, shape), count in work.inputs.items())
        return {**found, "inputs": inputs, "numbers of an operation": _NUMBERS}
