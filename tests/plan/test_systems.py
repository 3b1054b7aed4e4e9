"""Names of hardware, libraries and payload types give the links, the algorithm and the bytes of a row."""

from __future__ import annotations

import pytest

from moe_rt.errors import InvalidConfig
from moe_rt.plan.systems import GPUS, UNKNOWN, gpu_of, known_dtype, row_bytes, system_of


def test_links_are_those_of_a_generation() -> None:
    """NVLink has 12 or 18 links of 25 or 50 GB/s one way; Infinity Fabric has seven links."""
    links = {"A100": 12 * 25, "H100": 18 * 25, "H200": 18 * 25, "H20": 18 * 25, "B200": 18 * 50, "B300": 18 * 50}
    links |= {"GB200": 18 * 50, "GB300": 18 * 50, "H800": 8 * 25}
    links |= {"MI300X": 7 * 64, "MI325X": 7 * 64, "MI350X": 7 * 76.8, "MI355X": 7 * 76.8}
    assert {gpu.name: gpu.link_gbs for gpu in GPUS} == pytest.approx(links)
    assert all((gpu.link == "xgmi") == gpu.name.startswith("MI") for gpu in GPUS)
    assert all(gpu.memory_gbs > gpu.link_gbs > 100 and gpu.memory_gb < gpu.memory_gbs for gpu in GPUS)


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h200", "H200"),
        ("H20 SXM", "H20"),
        ("GB300 NVL72", "GB300"),
        ("B300", "B300"),
    ],
)
def test_a_name_contains_a_gpu(hardware: str, name: str) -> None:
    assert gpu_of(hardware) == next(gpu for gpu in GPUS if gpu.name == name)


@pytest.mark.parametrize("hardware", ["H2000", "XH100", "", "Instinct MI999"])
def test_an_unknown_gpu_is_guessed_on_request_only(hardware: str) -> None:
    with pytest.raises(InvalidConfig, match=f"hardware: got {hardware or 'nothing'}, expected a name with GB300, "):
        gpu_of(hardware)
    guess = gpu_of(hardware, guess=True)
    like, link = ("MI300X", "xgmi") if "MI" in hardware else ("H100", UNKNOWN)
    assert (guess.name, guess.link, guess.sms) == (hardware, link, gpu_of(like).sms)


def test_a_machine_without_gpus() -> None:
    cpu = gpu_of("cpu: EPYC, 24 cores")
    assert (cpu.name, cpu.sms, cpu.link, cpu.tflops) == ("cpu: EPYC, 24 cores", 24, "shared memory", pytest.approx(2.4))
    with pytest.raises(InvalidConfig, match="expected cpu: MODEL, N cores"):
        gpu_of("cpu: EPYC")
    assert system_of("moe_rt", "cpu: EPYC, 24 cores", "normal", 8).network == "tcp"


@pytest.mark.parametrize(
    ("library", "hardware", "mode", "network", "family"),
    [
        ("DeepEP-V1", "H100 + IB", "low_latency", "ib", "direct"),
        ("DeepEP-V1", "H100 RoCE", "normal", "roce", "channels"),
        ("DeepEP-V1", "H100 EFA", "raw_alltoall", "efa", "pairs"),
        ("MORI-EP", "MI300X", "normal", "roce", "one_sided"),
        ("DeepEP-V2", "H100", "low_latency", "ib", "one_sided"),
        ("FlashInfer", "B200", "copies", "ib", "copies"),
        ("NCCL thor", "H100", "copies", "roce", "copies"),
    ],
)
def test_words_of_a_table(library: str, hardware: str, mode: str, network: str, family: str) -> None:
    system = system_of(library, hardware, mode, 16)
    assert (system.network, system.family, system.domain, system.usual_sms) == (network, family, 16, 24)
    assert (system.library, system.hardware, system.mode, system.gpu) == (library, hardware, mode, gpu_of(hardware))
    assert system.key == f"{library}/{mode}/{hardware}"


def test_a_guessed_gpu_of_a_system_uses_infiniband() -> None:
    assert system_of("DeepEP-V1", "a new one", "normal", 8, guess=True).network == "ib"


@pytest.mark.parametrize(
    ("op", "dtype", "num_bytes"),
    [
        ("dispatch", "bf16", 2 * 256),
        ("dispatch", "float32", 4 * 256),
        ("dispatch", "FP8/bf16", 256 + 256 / 128 * 4),
        ("combine", "fp8 / bf16", 2 * 256),
        ("dispatch", "mxfp8", 256 + 256 / 32),
        ("dispatch", "fp8_e4m3fnuz", 256),
        ("dispatch", "nvfp4+bf16", 128 + 256 / 16),
        ("dispatch", "mxfp4,bf16", 128 + 256 / 32),
        ("dispatch", "fp4", 128),
        ("dispatch", "", 256 + 256 / 128 * 4),
        ("combine", "unknown", 2 * 256),
    ],
)
def test_bytes_of_a_row(op: str, dtype: str, num_bytes: float) -> None:
    """A low-latency dispatch adds a header of 16 bytes."""
    assert known_dtype(dtype)
    assert row_bytes(system_of("DeepEP-V1", "H100", "normal", 8), op, dtype, 256) == num_bytes
    direct = system_of("DeepEP-V1", "H100", "low_latency", 8)
    assert row_bytes(direct, op, dtype, 256) == num_bytes + (16 if op == "dispatch" else 0)


def test_bytes_of_other_libraries_rows() -> None:
    pairs, trtllm = (system_of(name, "H100", "raw_alltoall", 8) for name in ("NCCL", "TRTLLM"))
    assert row_bytes(pairs, "dispatch", "", 256) == 512, "only DeepEP dispatches fp8 by default"
    assert (row_bytes(pairs, "combine", "fp8", 256), row_bytes(trtllm, "combine", "fp8", 256)) == (264, 512)
    assert not known_dtype("bf16/words")
    with pytest.raises(InvalidConfig, match="dtype: got words, expected bf16"):
        row_bytes(pairs, "dispatch", "words", 256)
