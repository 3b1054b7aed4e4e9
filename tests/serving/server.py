"""An OpenAI server of vLLM as its users start it: its processes, its answers, and what is left when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S = 800.0
END_S = 120.0
# What vLLM says when one of its processes has taken longer to import it than two minutes, as on a busy machine.
IMPATIENT = "failed to report ZMQ addresses within timeout=120 seconds"


class Server:
    """Of `model`, on two ranks, with moe_rt. A program without a window to the world: it listens on loopback alone.

    Args:
        model: where it is saved.
        log: its output goes there.
        flags: more of the command line.
    """

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._log = log
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self._command += ["--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", "model"]
        self._command += ["--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32"]
        self._command += ["--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"]
        self._command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20), *flags]
        self._start()

    def _start(self) -> None:
        environment = {**os.environ, "MOE_RT_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        environment["VLLM_LOGGING_LEVEL"] = "INFO"
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def await_ready(self) -> None:
        """Raises RuntimeError with the log's end if the server ends instead."""
        deadline = time.monotonic() + START_S
        while True:
            if self.process.poll() is not None and IMPATIENT in self.log:
                self.close()
                self._start()
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start:\n" + self.log[-4000:])
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=10):
                    return
            except OSError:
                time.sleep(0.2)

    def complete(self, prompt: list[int], length: int) -> tuple[int, list[int]]:
        """HTTP status, and the tokens of a greedy answer."""
        try:
            with self._post(prompt, length) as answer:
                choice = json.loads(answer.read())["choices"][0]
                return answer.status, choice["token_ids"]
        except urllib.error.HTTPError as error:
            return error.code, []

    def streamed(self, prompt: list[int], length: int) -> Iterator[list[int]]:
        """The tokens as they come; who stops reading hangs up."""
        with self._post(prompt, length, stream=True) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield choice["token_ids"] or []

    def workers(self) -> list[int]:
        """The processes of the ranks."""
        return sorted({int(pid) for pid in re.findall(r"\(VllmWorker-\d+ pid=(\d+)\)", self.log)})

    def _post(self, prompt: list[int], length: int, **more: Any) -> Any:
        body = dict(
            model="model", prompt=prompt, max_tokens=length, temperature=0, ignore_eos=True, return_token_ids=True
        )
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            data=json.dumps({**body, **more}).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=END_S)

    def processes(self) -> list[int]:
        """All of the server's, which are those of its session."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(int(entry.name))
        return found

    def interrupt(self) -> None:
        """Ctrl-C, as often as it takes: after the first, vLLM's front end waits for requests, the second ends it."""
        deadline = time.monotonic() + END_S
        while self.processes() and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
            time.sleep(2.0)
            self.process.poll()

    def await_end(self) -> bool:
        """Whether none of its processes is left, at the latest when END_S have passed."""
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            self.process.poll()
            if not self.processes():
                return True
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """Ends what is left of it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
