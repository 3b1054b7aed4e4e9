"""Published systems by name: the GPU's data sheet, the class of its links, and the algorithm of a library."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from moe_rt.errors import expect


@dataclass(frozen=True)
class Gpu:
    """Data-sheet values.

    Attributes:
        sms: SMs or compute units.
        link_gbs: one direction of all links to peers together, GB/s.
        link: class of these links.
        tflops: dense bf16 products, TFLOP/s.
        memory_gbs, memory_gb: rate and size of memory.
        source: public document of these values.
    """

    name: str
    sms: int
    link_gbs: float
    link: str
    tflops: float
    memory_gbs: float
    memory_gb: float
    source: str = ""


_GB_NVL72 = "NVIDIA {0} NVL72 data sheet, divided by 72 GPUs"
# NVLink 4 carries 900 and NVLink 5 1800 GB/s in both directions; Infinity Fabric 7 x 128 or 7 x 153.6.
GPUS = (
    Gpu("GB300", 148, 900.0, "nvlink", 2500.0, 8000.0, 288.0, _GB_NVL72.format("GB300")),
    Gpu("GB200", 148, 900.0, "nvlink", 2500.0, 8000.0, 186.0, _GB_NVL72.format("GB200")),
    Gpu("B300", 148, 900.0, "nvlink", 2250.0, 8000.0, 288.0, "NVIDIA HGX data sheet: B300"),
    Gpu("B200", 148, 900.0, "nvlink", 2250.0, 8000.0, 180.0, "NVIDIA HGX data sheet: B200"),
    Gpu("H100", 132, 450.0, "nvlink", 989.0, 3350.0, 80.0, "NVIDIA H100 data sheet: SXM"),
    Gpu("H200", 132, 450.0, "nvlink", 989.0, 4800.0, 141.0, "NVIDIA H200 data sheet: SXM"),
    Gpu(
        "H800", 132, 200.0, "nvlink", 989.0, 3350.0, 80.0, "DeepSeek-V3 technical report: NVLink of 400 GB/s; else H100"
    ),
    Gpu("H20", 78, 450.0, "nvlink", 148.0, 4000.0, 96.0, "NVIDIA H20 data sheet, as resellers publish it"),
    Gpu("A100", 108, 300.0, "nvlink", 312.0, 2039.0, 80.0, "NVIDIA A100 data sheet: 80 GB SXM"),
    Gpu("MI355X", 256, 537.6, "xgmi", 2500.0, 8000.0, 288.0, "AMD Instinct MI355X data sheet"),
    Gpu("MI350X", 256, 537.6, "xgmi", 2300.0, 8000.0, 288.0, "AMD Instinct MI350X data sheet"),
    Gpu("MI325X", 304, 448.0, "xgmi", 1307.0, 6000.0, 256.0, "AMD Instinct MI325X data sheet"),
    Gpu("MI300X", 304, 448.0, "xgmi", 1307.0, 5300.0, 192.0, "AMD Instinct MI300X data sheet"),
)
UNKNOWN = "unknown"  # link class of a GPU that no row describes
CPU = "cpu: "  # starts the name of a machine without GPUs, whose ranks share memory
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
_UNSTATED = ("", "raw", "unknown")
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


def names_gpu(hardware: str, gpu: Gpu) -> bool:
    """Return True if a hardware's name contains a GPU's."""
    return re.search(rf"(?:\b|(?<=\dx)){gpu.name}(?![0-9])", hardware, re.IGNORECASE) is not None


def refuse_mixed(hardware: str) -> None:
    """Raise InvalidConfig if a name contains GPUs of several kinds, or several networks: their slowest part decides."""
    gpus = {(gpu.sms, gpu.link, gpu.link_gbs): gpu.name for gpu in GPUS if names_gpu(hardware, gpu)}
    words = (*NETWORKS, ("ib", "ib"), ("infiniband", "ib"))
    networks = {kind for word, kind in words if re.search(rf"\b{word}\b", hardware, re.IGNORECASE)}
    for found in (sorted(gpus.values()), sorted(networks)):
        got = f"{' and '.join(found)} in {hardware!r}"
        expect(len(found) < 2, "hardware", got, "one kind: plan the slower one, which all ranks wait for")


def gpu_of(hardware: str, guess: bool = False) -> Gpu:
    """Return the GPU that a name contains.

    Args:
        guess: True to take an H100 with links of an unknown class, or an MI300X for AMD, where a name contains none.

    Raises:
        InvalidConfig: it contains no known one.
    """
    if hardware.startswith(CPU):
        cores = re.search(r"(\d+) cores", hardware)
        expect(cores is not None, "hardware", hardware, f"{CPU}MODEL, N cores")
        assert cores is not None
        return Gpu(hardware, int(cores[1]), 1.0, "shared memory", 0.1 * int(cores[1]), 10.0, 16.0)
    found = next((gpu for gpu in GPUS if names_gpu(hardware, gpu)), None)
    if found is None and guess:
        if re.search(r"AMD|Instinct|\bMI\d", hardware, re.IGNORECASE):
            return replace(gpu_of("MI300X"), name=hardware)
        return replace(gpu_of("H100"), name=hardware, link=UNKNOWN)
    known = f"a name with {', '.join(gpu.name for gpu in GPUS)}; or cpu, for ranks on this machine's cores"
    expect(found is not None, "hardware", hardware or "nothing", known)
    assert found is not None
    return found


def system_of(library: str, hardware: str, mode: str, domain: float, guess: bool = False) -> System:
    """Return the system that a table's names describe.

    Raises:
        InvalidConfig: the GPU is unknown, and none may be guessed.
    """
    gpu, words = gpu_of(hardware, guess), f"{hardware} {library}".lower()
    network = next(
        (kind for word, kind in NETWORKS if word in words), "ib" if gpu.link in ("nvlink", UNKNOWN) else "roce"
    )
    network = "tcp" if gpu.link == "shared memory" else network
    deduplicates = mode != "copies" and any(word in library.lower() for word in ONE_SIDED)
    family = {"raw_alltoall": "pairs", "low_latency": "direct", "normal": "channels", "copies": "copies"}[mode]
    return System(library, hardware, gpu, mode, network, "one_sided" if deduplicates else family, domain, 24.0)


def known_dtype(dtype: str) -> bool:
    """Return True if `row_bytes` understands a payload type, or it is empty."""
    parts = [part.strip() for part in re.split("[/,+]", dtype.lower())]
    return all(part in _UNSTATED or any(re.search(pattern, part) for pattern, *_ in DTYPES) for part in parts)


def row_bytes(system: System, op: str, dtype: str, hidden: float) -> float:
    """Return the bytes of a row on a link, with scales and headers, for a payload type as tables spell it.

    A type such as "fp8/bf16" names those of dispatch and combine. Without one, DeepEP dispatches fp8, others bf16.

    Raises:
        InvalidConfig: the type is unknown.
    """
    parts = re.split("[/,+]", dtype.lower())
    name = parts[0 if op == "dispatch" else -1].strip()
    if name in _UNSTATED:
        name = "fp8" if op == "dispatch" and system.family in ("direct", "channels") else "bf16"
    if op == "combine" and "trtllm" in system.library.lower():
        name = "bf16"  # the column is the experts' type; combine returns bf16
    found = next((sizes for pattern, *sizes in DTYPES if re.search(pattern, name)), None)
    expect(found is not None, "dtype", dtype or "nothing", "bf16, fp16, fp32, fp8, mxfp8, nvfp4, mxfp4 or fp4")
    assert found is not None
    each, per_scale, scale = found
    header = 16.0 if system.family == "direct" and op == "dispatch" else 0.0
    return hidden * each + (hidden / per_scale * scale if per_scale else 0.0) + header
