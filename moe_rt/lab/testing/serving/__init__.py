"""vLLM for tests and benchmarks: engines and servers, forked from a process that has imported it once.

Importing vLLM takes a process ten seconds of a core, and a server imports it four times in a row.
"""

from __future__ import annotations

import importlib
import os

# One thread per process, and no network access.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def import_vllm(log_level: str = "WARNING") -> None:
    """Import everything that engines and servers need, so that processes forked from this one import nothing."""
    os.environ.update(ENVIRONMENT | {"VLLM_LOGGING_LEVEL": log_level})  # vLLM reads it while it is imported
    from vllm.platforms import current_platform

    worker = "v1.worker.cpu_worker" if current_platform.is_cpu() else "v1.worker.gpu_worker"
    engine = ("v1.engine.core", "v1.engine.llm_engine", "v1.executor.multiproc_executor", worker)
    for name in ("entrypoints.openai.api_server", *engine):
        importlib.import_module(f"vllm.{name}")
