"""What the machine code of rows of 14,336 bytes must be like: tables to tighten with the kernels, never to loosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_rt.config.codec import Codec
from moe_rt.gpucheck.sass import MachineCode
from moe_rt.native.ring import RING_KERNELS

NARROW = (1, 2)
SHOWS_COPIES = "FENCE.VIEW.ASYNC.G"  # what lanes wrote to global memory, to bulk copies
WHOLE_KERNELS = ("dispatch_whole", "combine_whole")  # kernels of buffers for very few tokens

# Those between sending and receiving ones where rows go in two levels, with copies for a network.
FORWARD_KERNELS = ("dispatch_forward", "combine_forward", "combine_backward_forward")


@dataclass(frozen=True)
class Limits:
    """Of one kernel.

    Attributes:
        load: bytes of the loads that rows are read by, and how many such loads are issued before the first is needed,
            at least.
        store: bytes of the widest store.
        narrow: accesses of one or two bytes, at most; None where rows with scales, of any size, have such.
        system_fences: at most; each waits for all that its lane has written, to peers too. None where the paths of
            failures have such.
        device_fences: at most; one counts blocks.
        barriers: of a block, at most.
        local: accesses to memory of a lane, at most.
        copies: bulk copies into shared memory, and out of it, and fences that show them what lanes wrote to global
            memory: of each as many at least.
    """

    load: tuple[int, int]
    narrow: int | None
    system_fences: int | None
    barriers: int
    store: int = 16
    device_fences: int = 0
    local: int = 0
    copies: int = 0


_RAW = {
    "dispatch_send": Limits((16, 4), narrow=None, system_fences=1, barriers=12, device_fences=1),
    "dispatch_receive": Limits((16, 4), narrow=None, system_fences=None, barriers=12),
    "combine_send": Limits((16, 8), narrow=0, system_fences=1, barriers=5, device_fences=1),
    "combine_receive": Limits((16, 8), narrow=0, system_fences=None, barriers=4),
    "combine_backward_send": Limits((16, 4), narrow=0, system_fences=1, barriers=5, device_fences=1),
    "combine_backward_receive": Limits((16, 5), narrow=1, system_fences=None, barriers=4),
    "dispatch_whole": Limits((16, 4), narrow=None, system_fences=None, barriers=21),
    "combine_whole": Limits((16, 8), narrow=0, system_fences=None, barriers=6),
    "dispatch_forward": Limits((16, 4), narrow=None, system_fences=None, barriers=6, device_fences=1),
    "combine_forward": Limits((16, 8), narrow=None, system_fences=None, barriers=6, device_fences=1),
    "combine_backward_forward": Limits((16, 4), narrow=None, system_fences=None, barriers=6, device_fences=1),
}
_CODED = _RAW | {
    "dispatch_send": Limits((16, 8), narrow=None, system_fences=1, barriers=12, device_fences=1),
    "dispatch_receive": Limits((16, 8), narrow=None, system_fences=None, barriers=12),
    "dispatch_whole": Limits((16, 8), narrow=None, system_fences=None, barriers=21),
}


def _with(limits: Mapping[str, Limits], **changes: Mapping[str, Any]) -> dict[str, Limits]:
    """By the name of a kernel, what is another."""
    return dict(limits) | {name: replace(limits[name], **what) for name, what in changes.items()}


# There the compiler writes the loop over peers, of which a lane has one mostly, four times and once, and so the fence
# before a signal; and takes the two bytes of a code of another format in two ways.
_BLACKWELL: dict[str, dict[str, Any]] = {
    **{name: {"system_fences": 5} for name in ("dispatch_send", "combine_send", "combine_backward_send")},
    "combine_backward_receive": {"narrow": 2},
}
_RAW_BLACKWELL = _with(_RAW, **_BLACKWELL)
# 128 registers do not suffice for the codes of eight loads and the places of eight copies.
_CODED_BLACKWELL = _with(_with(_CODED, **_BLACKWELL), dispatch_receive={"load": (16, 4)})
# Nor do they for a few words besides.
_CODED_120 = _with(
    _CODED_BLACKWELL, dispatch_receive={"local": 10}, dispatch_send={"local": 2}, combine_whole={"local": 4}
)

LIMITS: dict[str, dict[Codec, dict[str, Limits]]] = {
    arch: {Codec.RAW: raw, Codec.FP8: coded, Codec.INT8: coded}
    for arch, raw, coded in (
        ("sm_80", _RAW, _CODED),
        ("sm_90a", _RAW, _CODED),
        ("sm_100a", _RAW_BLACKWELL, _CODED_BLACKWELL),
        ("sm_120a", _RAW_BLACKWELL, _CODED_120),
    )
}

# Of kernels with rings, which move rows with scales, and add rows up, as the others do.
_RINGED: dict[str, dict[str, Any]] = {name: {"copies": 1} for name in RING_KERNELS}
_RINGED["combine_backward_send"] |= {"load": (16, 0), "store": 0}  # no row goes through registers
RING_LIMITS: dict[str, dict[str, Limits]] = {
    "sm_90a": _with(_RAW, **_RINGED),
    "sm_100a": _with(_RAW_BLACKWELL, **_RINGED),
    "sm_120a": _with(_RAW_BLACKWELL, **_RINGED | {"dispatch_receive": {"copies": 1, "local": 19}}),
}


def find_wrong(codes: Mapping[str, MachineCode], limits: Mapping[str, Limits]) -> list[str]:
    """What kernels miss of their limits; none may keep anything of a lane's in memory that has no limit for it."""
    wrong = [f"{name}: got no such kernel" for name in limits if name not in codes]
    for name, code in codes.items():
        most = limits[name].local if name in limits else 0
        if code.local > most:
            wrong.append(f"{name}: got {code.local} accesses to local memory, expected {most or 'none'}")
        if name in limits:
            wrong += [f"{name}: {problem}" for problem in _beyond(code, limits[name])]
    return wrong


def _beyond(code: MachineCode, limits: Limits) -> list[str]:
    width, ahead = limits.load
    problems = []
    if (got := code.ahead.get(width, 0)) < ahead:
        problems.append(f"got {got} loads of {width} bytes before the first use, expected {ahead} at least")
    if (widest := max(code.stores, default=0)) < limits.store:
        problems.append(f"got stores of at most {widest} bytes, expected {limits.store}")
    for what in ("UBLKCP.S.G", "UBLKCP.G.S"):
        if (number := code.copies.get(what, 0)) < limits.copies:
            problems.append(f"got {number} bulk copies {what}, expected {limits.copies} at least")
    if (number := code.fences.get(SHOWS_COPIES, 0)) < limits.copies:
        problems.append(f"got {number} fences {SHOWS_COPIES}, expected {limits.copies} at least")
    counts = {
        "accesses of one or two bytes": (
            sum(of.get(n, 0) for of in (code.loads, code.stores) for n in NARROW),
            limits.narrow,
        ),
        "fences of the system": (
            sum(n for kind, n in code.fences.items() if kind.endswith("SYS")),
            limits.system_fences,
        ),
        "fences of the device": (
            sum(n for kind, n in code.fences.items() if kind.endswith("GPU")),
            limits.device_fences,
        ),
        "barriers": (code.barriers, limits.barriers),
    }
    return problems + [
        f"got {got} {what}, expected {most} at most"
        for what, (got, most) in counts.items()
        if most is not None and got > most
    ]
