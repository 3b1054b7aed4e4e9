"""vLLM for tests and benchmarks: engines and servers, forked from a process that has imported it once.

Importing it takes a process ten seconds of a core, and a server imports it four times in a row.
"""

from __future__ import annotations

import os

# One thread for each process, and nothing asked of the network.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def import_vllm(log_level: str = "WARNING") -> None:
    """All that engines and servers need, so that what is forked from this process imports nothing."""
    os.environ.update(ENVIRONMENT | {"VLLM_LOGGING_LEVEL": log_level})  # vLLM reads it while it is imported
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
