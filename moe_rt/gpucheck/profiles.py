"""Results of torch's profiler on a GPU: kernels with their times, and waits of the host for the device."""

from __future__ import annotations

from typing import Any

from moe_rt.testing.rounds import WrongOutput

RANGE = "moe_rt measured"
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "CtxSynchronize", "StreamWaitValue")


def kernels(events: Any) -> list[Any]:
    """Events that ran on the device.

    Raises:
        WrongOutput: no event ran there, which means that the profiler cannot see the device.
    """
    found = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    if not found:
        raise WrongOutput("the profiler: got no kernels, expected some; CUPTI may lack the permission to record them")
    return found


def host_waits(events: Any) -> list[str]:
    """Calls inside the recorded RANGE that wait for the device, and copies from it."""
    marks = [e.time_range for e in events if e.name == RANGE and e.device_type.name == "CPU"]
    if len(marks) != 1:
        raise WrongOutput(f"the profiler: got {len(marks)} ranges, expected 1")
    waits = [
        e.name
        for e in events
        if e.device_type.name == "CPU"
        and e.name.startswith(("cuda", "cu"))
        and (e.name.endswith(_WAITS) or e.name in ("cudaMemcpy", "cuMemcpyDtoH", "cuMemcpyDtoH_v2"))
        and marks[0].start <= e.time_range.start <= marks[0].end
    ]
    return waits + [e.name for e in kernels(events) if "DtoH" in e.name]
