"""Work of a GPU that waits for its streams, and memory that lives until they are done, on streams of a test."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emulated_gpu import EmulatedGpu
from support.halves import OPS, halve
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.engine.gpu import driver
from moe_rt.engine.gpu.driver import Gpu

pytestmark = pytest.mark.emulated("pretends streams")


class Event:
    done = False

    def query(self) -> bool:
        return self.done


class Stream:
    """A stream that notes, in one list for all, what it waits for."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted, self.events = noted, list[Event]()

    def wait_stream(self, other: Stream) -> None:
        self.noted.append((self, "waits for", other))

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


class DeviceTensor:
    """A tensor of the GPU, which notes what uses it."""

    is_cuda = True

    def __init__(self, noted: list[Any]) -> None:
        self.noted = noted

    def record_stream(self, stream: Stream) -> None:
        self.noted.append((self, "is used by", stream))

    def to(self, device: Any) -> DeviceTensor:
        self.noted.append("copied")
        return self


@pytest.fixture
def noted() -> list[Any]:
    return []


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gpu]:
    """Return make_gpu(major, minor, current), a Gpu of this capability, where `current` is the current device."""

    def make(major: int = 9, minor: int = 0, current: int = 3, device: str = "cuda") -> Gpu:
        properties = SimpleNamespace(
            major=major, minor=minor, name="a card", multi_processor_count=7, uuid="its id",
            shared_memory_per_block_optin=1000,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return Gpu(device)

    return make


@pytest.mark.parametrize(
    ("major", "minor", "arch", "bulk_bytes"),
    [
        (8, 0, "sm_80", 0),
        (8, 9, "sm_89", 0),
        (9, 0, "sm_90a", 1000),
        (10, 0, "sm_100a", 1000),
        (12, 0, "sm_120a", 1000),
    ],
)
def test_facts_of_a_gpu(make_gpu: Callable[..., Gpu], major: int, minor: int, arch: str, bulk_bytes: int) -> None:
    gpu = make_gpu(major, minor)
    assert (gpu.arch, gpu.bulk_bytes) == (arch, bulk_bytes)
    assert (gpu.device, gpu.num_sms, gpu.name, gpu.uuid) == (torch.device("cuda", 3), 7, "a card", "its id")
    assert make_gpu(major, minor, device="cuda:1").device == torch.device("cuda", 1)


def test_another_stream_waits_before_it_uses_tensors(
    make_gpu: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch, noted: list[Any]
) -> None:
    gpu, begun, current = make_gpu(), Stream(noted), Stream(noted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    tensors: Any = [DeviceTensor(noted) for _ in range(3)]
    gpu.follow(begun, tensors)
    assert noted == [(current, "waits for", begun), *((t, "is used by", current) for t in tensors)]
    noted.clear()
    gpu.follow(current, tensors)
    assert noted == [], "one stream is in order"


def test_memory_outlives_what_the_stream_has_queued(
    make_gpu: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch, noted: list[Any]
) -> None:
    gpu, stream = make_gpu(), Stream(noted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    on_device: Any = DeviceTensor(noted)
    gpu.outlive_stream(on_device)
    assert noted == [(on_device, "is used by", stream)]
    kept = []
    for _ in range(3):
        memory = torch.zeros(4)
        kept.append(weakref.ref(memory))
        gpu.outlive_stream(memory)
    del memory
    for done, alive in (([], [True] * 3), ([1], [True, False, True]), ([0, 2], [False] * 3)):
        for number in done:
            stream.events[number].done = True
        gpu.outlive_stream(torch.zeros(4))
        gc.collect()
        assert [ref() is not None for ref in kept] == alive


def test_a_table_is_there_when_upload_returns(
    make_gpu: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch, noted: list[Any]
) -> None:
    gpu = make_gpu()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: noted.append("synchronized"))
    values: Any = DeviceTensor(noted)
    assert gpu.upload(values) is values
    assert noted == ["copied", "synchronized"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103f"])
def test_features_by_architecture(arch: str) -> None:
    new = arch not in ("sm_80", "sm_89")
    assert (driver.waits_for_launches(arch), driver.has_bulk_copies(arch)) == (new, new)


class FollowingGpu(EmulatedGpu):
    """Notes which memory the stream of an op's second half follows."""

    def __init__(self) -> None:
        super().__init__()
        self.followed: list[tuple[Any, set[int]]] = []

    def current(self) -> Any:
        return f"stream {len(self.followed)}"

    def follow(self, stream: Any, tensors: Any) -> None:
        self.followed.append((stream, {t.data_ptr() for t in tensors if t.numel()}))


def test_the_second_half_of_an_op_follows_all_tensors_of_the_first() -> None:
    gpu, spec = FollowingGpu(), make_spec(1)
    inputs = make_inputs(spec, [12], seed=1, kind="topk")
    x, weights = inputs.xs[0].requires_grad_(), inputs.topk_weights[0].requires_grad_()
    with Buffer(ThreadGroup.make(1, gpu)[0], **buffer_kwargs(spec)) as buffer:
        called: list[tuple[str, set[int]]] = []
        engine: Any = buffer._engine
        halve(engine)
        for method in OPS:
            note_memory(engine, method, called)
        recv_x, recv_weights, handle = buffer.dispatch(x, inputs.topk_idx[0], weights)
        out = buffer.combine(recv_x * 2, recv_weights, handle)
        out.backward(torch.ones_like(out))
    assert [method for method, _ in called] == ["dispatch", "combine", "combine_backward", "dispatch_backward"]
    assert [stream for stream, _ in gpu.followed] == [f"stream {n}" for n in range(4)], "the one that was current"
    for (method, memory), (_, followed) in zip(called, gpu.followed, strict=True):
        assert memory <= followed, method


def note_memory(engine: Any, method: str, called: list[tuple[str, set[int]]]) -> None:
    run = getattr(engine, method)

    def noting(*given: Any, **named: Any) -> Any:
        result = run(*given, **named)
        if "start" in named:
            return result
        outputs = result if isinstance(result, tuple) else (result,)
        tensors = [t for t in (*given, *outputs) if isinstance(t, torch.Tensor) and t.numel()]
        called.append((method, {t.data_ptr() for t in tensors}))
        return result

    setattr(engine, method, noting)
