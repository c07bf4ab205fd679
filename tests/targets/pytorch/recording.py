"""A device that records: what a step does to tensors is kept, operator by operator, and done again without any of the runtime.

While it records, nothing is done but views, as on a device whose graph is captured: an operator that writes returns what it would have
written to. One that reads a number to the host, or that asks for memory, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from attrs import define, field
from torch.utils._python_dispatch import TorchDispatchMode

from ratrain.targets.pytorch.device_streams import StreamOrder


class CaptureError(AssertionError):
    """Something that no device can record."""


@define
class Call:
    """An operator and all that it is called with."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> None:
        """Do it."""
        self.function(*self.arguments, **self.options)


class Recorder(TorchDispatchMode):
    """Keep the operators that write, without doing them; views are made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        written = [
            value
            for argument, value in zip(func._schema.arguments, _values(func, args, options), strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self.calls.append(Call(func, tuple(args), dict(options)))
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        if not all(returned.alias_info is not None for returned in func._schema.returns):  # no view
            raise CaptureError(f"{func} asks for memory, or reads what is not there yet")
        return func(*args, **options)


def _values(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Iterator[Any]:
    """The value of each argument of an operator, None where it is left out."""
    for number, argument in enumerate(func._schema.arguments):
        yield args[number] if number < len(args) else options.get(argument.name)


@define(eq=False)
class Tape:
    """`Graph` of such a device."""

    calls: list[Call]
    replayed: int = 0

    def replay(self) -> None:
        """Call every operator again, on the same bytes, with the same numbers."""
        self.replayed += 1
        for call in self.calls:
            call()


@define(eq=False)
class RecordingDevice:
    """`Device` without streams."""

    tapes: list[Tape] = field(factory=list)

    def stream(self) -> Any:
        """None."""

    def record(self, stream: Any) -> Any:
        """No event."""

    def wait(self, stream: Any, event: Any) -> None:
        """Everything is done at once."""

    def running(self, stream: Any) -> Any:
        """As it comes."""
        return nullcontext()

    def synchronize(self) -> None:
        """All is done."""

    def current(self) -> Any:
        """None."""

    def graph(self, issue: Callable[[], None]) -> Tape:
        """Record; a step that was begun is not done."""
        recorder = Recorder()
        with recorder, no_host_reads():
            issue()
        self.tapes.append(Tape(recorder.calls))
        return self.tapes[-1]


def order(device: RecordingDevice) -> StreamOrder:
    """The order of the program on it."""
    return StreamOrder(device)


_READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Fail where the host reads what a tensor holds: some ways go past dispatch. Inputs on the CPU are looked at by checks, which are off."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise CaptureError("the host reads from the device within a step")

    with pytest.MonkeyPatch.context() as patch:
        for name in _READS:
            patch.setattr(torch.Tensor, name, refuse)
        for place in ("device_common", "device_tables", "device_head", "device_router"):
            for check in ("check_documents", "check_tokens", "_check", "check_experts"):
                patch.setattr(f"ratrain.targets.pytorch.device.{place}.{check}", lambda *_: None, raising=False)
        for place in ("device_kernels", "device_attention", "device_scores"):
            patch.setattr(f"ratrain.targets.pytorch.device.{place}.check_documents", lambda *_: None)
        yield
