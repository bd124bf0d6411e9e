"""Copies off and onto a device: in the order that its streams keep, and plain on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from workers.cache import transfers
from workers.cache.transfers import Transfers

GPU = torch.device("cuda")


class FakeCuda:
    """Streams and events that write down what is queued on which stream, and who waits for it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream(self, "compute")
        self.streams = iter(("down", "up"))

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    """A stream, by its name in the log."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_event(self, event: "Event") -> None:
        self.cuda.log.append(f"{self.name} waits for the mark on {event.recorded_on}")

    def wait_stream(self, stream: "Stream") -> None:
        self.cuda.log.append(f"{self.name} waits for {stream.name}")


class Event:
    """An event, by the stream that it was recorded on."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.recorded_on = ""

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream.name

    def synchronize(self) -> None:
        self.cuda.log.append(f"the host waits for {self.recorded_on}")


class FakeDevice(TorchFunctionMode):
    """Runs copies on the CPU and writes down the stream that each is queued on."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        log = self.cuda.log
        if func in (Tensor.to, Tensor.copy_):
            kind = "copy" if given.get("non_blocking") else "blocking copy"
            log.append(f"{kind} on {self.cuda.current.name}")
            return args[0].clone() if func is Tensor.to else args[0].copy_(args[1])
        if func is Tensor.is_pinned:
            return False
        if func is Tensor.pin_memory:
            return args[0].clone()
        return func(*args, **given)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(fake, next(fake.streams)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(fake))
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.current)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda _, it: fake.log.append(f"kept until {it.name} is done")
    )
    monkeypatch.setattr(
        transfers, "empty_pinned", lambda size, dtype: torch.empty(size, dtype=dtype)
    )
    return fake


def test_a_copy_off_the_device_waits_for_the_mark_and_the_host_for_the_copy(cuda: FakeCuda) -> None:
    rows = torch.arange(6.0)
    copying = Transfers(GPU)
    mark = copying.mark()
    with FakeDevice(cuda):
        host = copying.to_host(rows, mark)
    assert torch.equal(host, rows)
    assert cuda.log == [
        "down waits for the mark on compute",
        "copy on down",
        "the host waits for down",
    ]
    assert cuda.current.name == "compute"


def test_copies_onto_the_device_hold_up_the_computation_alone(cuda: FakeCuda) -> None:
    rows = [torch.arange(6.0), torch.ones(2, dtype=torch.bool)]
    with FakeDevice(cuda):
        copies = Transfers(GPU).to_device(rows)
    assert all(torch.equal(copy, each) for copy, each in zip(copies, rows, strict=True))
    assert cuda.log == [
        "copy on up",
        "copy on up",
        "compute waits for up",
        "kept until compute is done",
        "kept until compute is done",
    ]


def test_on_a_cpu_nothing_is_copied() -> None:
    rows = torch.arange(6.0)
    copying = Transfers(torch.device("cpu"))
    assert copying.mark() is None
    assert copying.to_host(rows, None) is rows
    assert copying.to_device([rows])[0] is rows
