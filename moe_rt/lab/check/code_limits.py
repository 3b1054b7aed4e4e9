"""Limits on the machine code for rows of 14,336 bytes. Tighten these tables with the kernels, never loosen them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_rt.config.codec import Codec
from moe_rt.engine.gpu.launcher import RING_KERNELS
from moe_rt.lab.check.kernel_code import MachineCode

NARROW = (1, 2)
SHOWS_COPIES = "FENCE.VIEW.ASYNC.G"  # makes lanes' writes to global memory visible to bulk copies
WHOLE_KERNELS = ("dispatch_whole", "combine_whole")  # kernels of buffers for very few tokens

# Kernels between sending and receiving ones on the two-level route, with copies in place of a network.
FORWARD_KERNELS = ("dispatch_forward", "combine_forward", "combine_backward_forward")


@dataclass(frozen=True)
class Limits:
    """Limits of one kernel.

    Attributes:
        load: bytes of the loads that read rows, and the least number of such loads issued before the first is needed.
        store: bytes of the widest store.
        narrow: maximum accesses of one or two bytes. None if rows with scales, of any size, have such accesses.
        system_fences: maximum number; each waits for all writes of its lane, including those to peers. None if failure
            paths have fences.
        device_fences: maximum number; one counts blocks.
        barriers: maximum number of block barriers.
        local: maximum number of accesses to local memory.
        copies: least number of bulk copies into shared memory, of bulk copies out of it, and of fences that make lanes'
            writes to global memory visible to them.
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
    "dispatch_receive": Limits((16, 4), narrow=None, system_fences=None, barriers=13),
    "combine_send": Limits((16, 8), narrow=0, system_fences=1, barriers=5, device_fences=1),
    "combine_receive": Limits((16, 8), narrow=0, system_fences=None, barriers=4),
    "combine_backward_send": Limits((16, 4), narrow=0, system_fences=1, barriers=5, device_fences=1),
    "combine_backward_receive": Limits((16, 5), narrow=1, system_fences=None, barriers=4),
    "dispatch_whole": Limits((16, 4), narrow=None, system_fences=None, barriers=22),
    "combine_whole": Limits((16, 8), narrow=0, system_fences=None, barriers=6),
    "dispatch_forward": Limits((16, 4), narrow=None, system_fences=None, barriers=6, device_fences=1),
    "combine_forward": Limits((16, 8), narrow=None, system_fences=None, barriers=6, device_fences=1),
    "combine_backward_forward": Limits((16, 4), narrow=None, system_fences=None, barriers=6, device_fences=1),
}
_CODED = _RAW | {
    "dispatch_send": Limits((16, 8), narrow=None, system_fences=1, barriers=12, device_fences=1),
    "dispatch_receive": Limits((16, 8), narrow=None, system_fences=None, barriers=13),
    "dispatch_whole": Limits((16, 8), narrow=None, system_fences=None, barriers=22),
}


def _with(limits: Mapping[str, Limits], **changes: Mapping[str, Any]) -> dict[str, Limits]:
    """Replace limits of the named kernels."""
    return dict(limits) | {name: replace(limits[name], **what) for name, what in changes.items()}


# Blackwell's compiler unrolls the loop over peers (a lane mostly has one) by four and adds a remainder, so the fence
# before a signal appears five times. It also compiles the two-byte access to a code of another format twice.
_BLACKWELL: dict[str, dict[str, Any]] = {
    **{name: {"system_fences": 5} for name in ("dispatch_send", "combine_send", "combine_backward_send")},
    "combine_backward_receive": {"narrow": 2},
}
_RAW_BLACKWELL = _with(_RAW, **_BLACKWELL)
# 128 registers do not hold the codes of eight loads and the addresses of eight copies.
_CODED_BLACKWELL = _with(_with(_CODED, **_BLACKWELL), dispatch_receive={"load": (16, 4)})
# Nor do they hold a few further words.
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

# Kernels with rings. Rows with scales and sums of rows go through registers there as well.
_RINGED: dict[str, dict[str, Any]] = {name: {"copies": 1} for name in RING_KERNELS}
_RINGED["combine_backward_send"] |= {"load": (16, 0), "store": 0}  # no row goes through registers
RING_LIMITS: dict[str, dict[str, Limits]] = {
    "sm_90a": _with(_RAW, **_RINGED),
    "sm_100a": _with(_RAW_BLACKWELL, **_RINGED),
    "sm_120a": _with(_RAW_BLACKWELL, **_RINGED | {"dispatch_receive": {"copies": 1, "local": 19}}),
}


def find_wrong(codes: Mapping[str, MachineCode], limits: Mapping[str, Limits]) -> list[str]:
    """Return which kernels violate their limits. A kernel without a limit may not access local memory."""
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
