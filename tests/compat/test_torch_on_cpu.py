"""Devices that `moe-rt on-cpu` maps to the CPU, by each way of naming one: by position, by keyword, or not at all."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from moe_rt.lab.on_cpu.torch import cpu_of, first_mapped, mapped

CUDA = torch.device("cuda", 1)


def given(*arguments: Any, **keywords: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, keywords


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (0, "cpu"),
        (3, "cpu"),
        ("cuda", "cpu"),
        ("cuda:1", "cpu"),
        ("cpu", "cpu"),
        ("meta", "meta"),
        ("cudagraphs", "cudagraphs"),
        (CUDA, torch.device("cpu")),
        (torch.device("meta"), torch.device("meta")),
        (None, None),
        (True, True),  # to(other, True) is non_blocking
    ],
)
def test_names_of_devices(device: Any, expected: Any) -> None:
    got = cpu_of(device)
    assert got == expected
    assert type(got) is type(expected)


def test_keywords() -> None:
    assert mapped(given)("cuda", device=CUDA, pin_memory=True) == (("cuda",), {"device": torch.device("cpu")})
    assert mapped(given)(device=None, other="cuda") == ((), {"device": None, "other": "cuda"})
    assert mapped(given, "map_location")(map_location="cuda:0", device="cuda") == (
        (), {"map_location": "cpu", "device": "cuda"},
    )  # fmt: skip


@pytest.mark.parametrize("place", [0, 1])
def test_places(place: int) -> None:
    call = first_mapped(given, "kind", place)
    devices = ["cuda", "cuda:1", "cuda:2"]
    expected = ["cpu" if i == place else device for i, device in enumerate(devices)]
    for count in range(4):
        assert call(*devices[:count]) == (tuple(expected[:count]), {})
    assert call(*devices[:place], kind=CUDA, device="cuda") == (
        tuple(devices[:place]), {"kind": torch.device("cpu"), "device": "cuda"},
    )  # fmt: skip


PROGRAM = """
import torch
from moe_rt.lab.on_cpu import torch as on_cpu
on_cpu.change()
x = torch.ones(2)
moves = [x.to("cuda"), x.to(device="cuda:0"), x.to(0), x.to("cuda", torch.float64), x.cuda(), x.cpu(), x.pin_memory()]
for moved in moves:
    assert moved.device.type == "cpu" and moved.data_ptr() != x.data_ptr(), "a move copies"
assert x.to("cuda", torch.float64).dtype == torch.float64
assert x.to(torch.float32) is x and x.to(x) is x and x.to(torch.float64).dtype == torch.float64
leaf = torch.ones(2, requires_grad=True)
assert leaf.to("cuda") is leaf and (leaf * 2).to("cuda").is_leaf is False
assert x.is_cuda and x.is_pinned() and not torch.ones(1, device="meta").is_cuda
assert x.new_zeros(3, device="cuda").shape == (3,)
assert torch.zeros(2, device=torch.device("cuda", 0), pin_memory=True).sum() == 0
assert torch.device("cuda") == torch.device("cpu") and isinstance(torch.device("cuda"), torch.device)
assert issubclass(type(torch.device("meta")), torch.device) and torch.device("meta").type == "meta"
assert torch.device() == torch.device("cpu")
torch.set_default_device("cuda"); assert torch.ones(1).device.type == "cpu"; torch.set_default_device(None)
assert torch.Generator("cuda").device.type == "cpu" and isinstance(torch.Generator(), torch.Generator)
with torch.autocast("cuda"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16, "CUDA's default"
    assert torch.is_autocast_enabled("cuda")
with torch.autocast("cuda", torch.bfloat16):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
with torch.autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16, "the CPU's default"
assert torch.version.cuda
print("passed")
"""


def test_what_programs_do_with_devices() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.stdout == "passed\n", done.stderr[-3000:]
