"""SwiGLU's calls of a GPU's kernels: what is compiled, what a launch is given, and what is refused before."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rt.config.tuning import ACTIVATION_BLOCKS_PER_SM, ACTIVATION_THREADS
from moe_rt.engine.gpu.launcher import ELEMENT_NAMES
from moe_rt.errors import InvalidInput
from moe_rt.ops import cuda_activation
from moe_rt.ops.cuda_activation import prepare, swiglu, swiglu_backward

CPU, SMS = torch.device("cpu"), 3


class Recorder:
    """A GPU that notes what is compiled and launched."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_sms = device, SMS
        self.compiled: list[tuple[str, dict[str, Any]]] = []
        self.launched: list[Any] = []

    def kernels(self, source: str, defines: dict[str, Any]) -> Any:
        self.compiled.append((source, dict(defines)))
        return SimpleNamespace(launch=self.launch)

    def stream(self) -> str:
        return "the stream"

    def launch(self, launches: Any, **given: Any) -> None:
        words = 7 if launches[0][0] == "swiglu_backward" else 6
        params = given.pop("params")
        given["words"] = list((ctypes.c_uint64 * words).from_address(params[0]))
        self.launched.append((launches, given))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Any]:
    """Return the GPUs by device, of which the CPU is one."""
    made: dict[torch.device, Any] = {}
    monkeypatch.setattr(cuda_activation, "Gpu", Recorder)
    monkeypatch.setattr(cuda_activation, "_gpus", made)
    monkeypatch.setattr(cuda_activation, "_kernels", {})
    return made


def offs_of(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def test_kernels_are_compiled_once_for_each_dtype(gpus: dict[torch.device, Any]) -> None:
    first = prepare(CPU, torch.float32)
    assert prepare(CPU, torch.float32) is first
    assert prepare(CPU, torch.bfloat16) is not first
    swiglu(torch.ones(2, 4), offs_of(2))
    swiglu_backward(torch.ones(2, 2), torch.ones(2, 4), offs_of(2))
    assert list(gpus) == [CPU]
    names = [ELEMENT_NAMES[dtype] for dtype in (torch.float32, torch.bfloat16)]
    expected = [("activation.cu", {"MOE_RT_ELEM": name, "MOE_RT_THREADS": ACTIVATION_THREADS}) for name in names]
    assert gpus[CPU].compiled == expected


@pytest.mark.parametrize("rows", [1, 3, 100, 1000])
def test_what_a_launch_is_given(gpus: dict[torch.device, Any], rows: int) -> None:
    """A thread takes 16 bytes of the output, and blocks do not exceed what the GPU holds."""
    gate_up, offs, grad = torch.ones(rows, 200), offs_of(0, rows, rows), torch.ones(rows, 100)
    out = swiglu(gate_up, offs)
    back = swiglu_backward(grad, gate_up, offs)
    most = SMS * ACTIVATION_BLOCKS_PER_SM
    common = {"threads": ACTIVATION_THREADS, "shared_bytes": 0, "stream": "the stream"}
    for (launches, given), name, result, words in zip(
        gpus[CPU].launched,
        ("swiglu_forward", "swiglu_backward"),
        (out, back),
        ([gate_up.data_ptr()], [grad.data_ptr(), gate_up.data_ptr()]),
        strict=True,
    ):
        vectors = -(-result.numel() * 4 // 16)
        assert launches == [(name, min(most, -(-vectors // ACTIVATION_THREADS)))]
        assert given == {**common, "words": [*words, offs.data_ptr(), 3, rows, 100, result.data_ptr()]}
    assert (out.shape, back.shape) == ((rows, 100), (rows, 200))


def test_strided_tensors_are_packed(gpus: dict[torch.device, Any]) -> None:
    """Kernels read whole rows, one after the other."""
    gate_up, offs = torch.ones(6, 9)[::2, 1:], offs_of(1, 9, 3)[::2]
    swiglu(gate_up, offs)
    swiglu_backward(torch.ones(()).expand(3, 4), gate_up, offs)
    for _, given in gpus[CPU].launched:
        assert gate_up.data_ptr() not in given["words"]
        assert offs.data_ptr() not in given["words"]
        assert given["words"][-4:-1] == [2, 3, 4]


def test_nothing_is_launched_for_nothing(gpus: dict[torch.device, Any]) -> None:
    for rows, width in ((0, 8), (3, 0)):
        gate_up = torch.ones(rows, 2 * width)
        assert swiglu(gate_up, offs_of(0)).shape == (rows, width)
        assert swiglu_backward(torch.ones(rows, width), gate_up, offs_of(0)).shape == (rows, 2 * width)
    assert gpus == {}


def test_other_dtypes_are_torch_s(gpus: dict[torch.device, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(5, 16, dtype=torch.complex64, generator=generator)
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(swiglu(gate_up, offs_of(5)), F.silu(gate) * up)
    assert gpus == {}


GOOD, OFFS = torch.ones(5, 16), offs_of(2, 5)
WRONG: dict[str, tuple[Any, str]] = {
    "odd": ((GOOD[:, 1:], OFFS), "gate_up: got [5, 15], expected rows of an even number of columns"),
    "flat": ((GOOD[0], OFFS), "gate_up: got [16], expected rows of an even number of columns"),
    "long": ((GOOD, OFFS.long()), "offs: got torch.int64 [2] on cpu, expected torch.int32 [L] on cpu, L > 0"),
    "none": ((GOOD, OFFS[:0]), "offs: got torch.int32 [0] on cpu, expected torch.int32 [L] on cpu, L > 0"),
    "matrix": ((GOOD, OFFS[None]), "offs: got torch.int32 [1, 2] on cpu, expected torch.int32 [L] on cpu, L > 0"),
    "elsewhere": (
        (GOOD, OFFS.to("meta")),
        "offs: got torch.int32 [2] on meta, expected torch.int32 [L] on cpu, L > 0",
    ),
}
WRONG_GRADS: dict[str, tuple[Tensor, str]] = {
    "dtype": (GOOD[:, :8].double(), "torch.float64 [5, 8] on cpu"),
    "rows": (GOOD[:4, :8], "torch.float32 [4, 8] on cpu"),
    "columns": (GOOD, "torch.float32 [5, 16] on cpu"),
    "elsewhere": (GOOD[:, :8].to("meta"), "torch.float32 [5, 8] on meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_and_ends(gpus: dict[torch.device, Any], name: str) -> None:
    (gate_up, offs), text = WRONG[name]
    for call in (lambda: swiglu(gate_up, offs), lambda: swiglu_backward(GOOD[:, :8], gate_up, offs)):
        with pytest.raises(InvalidInput) as raised:
            call()
        assert str(raised.value).startswith(text)
    assert gpus == {}


@pytest.mark.parametrize("name", WRONG_GRADS)
def test_wrong_gradients(gpus: dict[torch.device, Any], name: str) -> None:
    grad, got = WRONG_GRADS[name]
    with pytest.raises(InvalidInput) as raised:
        swiglu_backward(grad, GOOD, OFFS)
    assert str(raised.value).startswith(f"grad: got {got}, expected torch.float32 [5, 8] on cpu")
    assert gpus == {}
