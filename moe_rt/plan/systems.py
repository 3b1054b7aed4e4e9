"""Published systems by name: the GPU's data sheet, the class of its links, and the algorithm of a library."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_rt.config.expect import expect


@dataclass(frozen=True)
class Gpu:
    """Data-sheet values: SMs or compute units, one direction of all links to peers in GB/s, and the links' class."""

    name: str
    sms: int
    link_gbs: float
    link: str


# NVIDIA's and AMD's data sheets: NVLink 4 900, NVLink 5 1800 GB/s in both directions; H800 400; Infinity Fabric 7 x 128
# (MI300X) and 7 x 153.6 (MI355X). The order decides between names that contain each other.
GPUS = (
    Gpu("GB300", 148, 900.0, "nvlink"),
    Gpu("GB200", 148, 900.0, "nvlink"),
    Gpu("B300", 148, 900.0, "nvlink"),
    Gpu("B200", 148, 900.0, "nvlink"),
    Gpu("H100", 132, 450.0, "nvlink"),
    Gpu("H200", 132, 450.0, "nvlink"),
    Gpu("H800", 132, 200.0, "nvlink"),
    Gpu("H20", 78, 450.0, "nvlink"),
    Gpu("A100", 108, 300.0, "nvlink"),
    Gpu("MI355X", 256, 537.6, "xgmi"),
    Gpu("MI350X", 256, 537.6, "xgmi"),
    Gpu("MI325X", 304, 448.0, "xgmi"),
    Gpu("MI300X", 304, 448.0, "xgmi"),
)
# Networks by the words that name them; a GPU of NVIDIA's on several nodes without such a word is taken to use IB.
NETWORKS = (("efa", "efa"), ("roce", "roce"), ("ainic", "roce"), ("thor", "roce"), ("pollara", "roce"))
# Payload bytes per element, and the elements that share a scale with the scale's bytes.
DTYPES = (
    ("bf16|bfloat16|fp16|float16|half", 2.0, 0, 0),
    ("fp32|float32", 4.0, 0, 0),
    ("mxfp8", 1.0, 32, 1),
    ("fnuz", 1.0, 0, 0),
    ("fp8|e4m3|e5m2|int8", 1.0, 128, 4),
    ("nvfp4", 0.5, 16, 1),
    ("mxfp4", 0.5, 32, 1),
    ("fp4", 0.5, 0, 0),
)
# Libraries that send one row per distinct rank and have enough bytes in flight with few SMs (bulk copies, or all SMs).
ONE_SIDED = ("onesided", "trtllm", "flashinfer", "mori", "hybridep", "hybrid-ep", "deepep-v2", "deepep v2")


@dataclass(frozen=True)
class System:
    """A library on hardware, as far as a calibration distinguishes it.

    Attributes:
        family: the algorithm family (families.py).
        key: names the calibration: library, its mode, and the GPU.
        domain: ranks that reach each other over fast links.
        sms: SMs of the GPU.
        usual_sms: SMs that the op uses if nothing is stated.
    """

    library: str
    hardware: str
    gpu: Gpu
    mode: str
    network: str
    family: str
    domain: float
    usual_sms: float

    @property
    def key(self) -> str:
        return f"{self.library}/{self.mode}/{self.hardware}"

    @property
    def sms(self) -> int:
        return self.gpu.sms


def gpu_of(hardware: str) -> Gpu:
    """Return the GPU that a name contains.

    Raises:
        InvalidConfig: it contains no known one.
    """
    found = next((gpu for gpu in GPUS if re.search(rf"\b{gpu.name}(?![0-9])", hardware, re.IGNORECASE)), None)
    expect(found is not None, "hardware", hardware or "nothing", f"a name with {', '.join(gpu.name for gpu in GPUS)}")
    assert found is not None
    return found


def system_of(library: str, hardware: str, mode: str, domain: float) -> System:
    """Return the system that a table's names describe.

    Raises:
        InvalidConfig: the GPU is unknown.
    """
    gpu, words = gpu_of(hardware), f"{hardware} {library}".lower()
    network = next((kind for word, kind in NETWORKS if word in words), "ib" if gpu.link == "nvlink" else "roce")
    deduplicates = any(word in library.lower() for word in ONE_SIDED)
    family = {"raw_alltoall": "pairs", "low_latency": "direct", "normal": "channels"}[mode]
    return System(library, hardware, gpu, mode, network, "one_sided" if deduplicates else family, domain, 24.0)


def row_bytes(system: System, op: str, dtype: str, hidden: float) -> float:
    """Return the bytes of a row on a link, with scales and headers, for a payload type as tables spell it.

    Raises:
        InvalidConfig: the type is unknown.
    """
    name = dtype.lower()
    if op == "combine" and "trtllm" in system.library.lower():
        name = "bf16"  # the column is the experts' type; combine returns bf16
    found = next((sizes for pattern, *sizes in DTYPES if re.search(pattern, name)), None)
    expect(found is not None, "dtype", dtype or "nothing", "bf16, fp16, fp32, fp8, mxfp8, nvfp4, mxfp4 or fp4")
    assert found is not None
    each, per_scale, scale = found
    header = 16.0 if system.family == "direct" and op == "dispatch" else 0.0
    return hidden * each + (hidden / per_scale * scale if per_scale else 0.0) + header
