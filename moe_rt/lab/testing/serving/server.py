"""An OpenAI server of vLLM with moe_rt: its processes, its answers, and what remains after it has ended."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.forking import fork
from moe_rt.lab.testing.ports import free_ports

START_S = 800.0
END_S = 120.0
MODULE = "vllm.entrypoints.openai.api_server"
# vLLM's message if one of its processes took longer than two minutes to import it, as on a busy machine.
IMPATIENT = "failed to report ZMQ addresses within timeout=120 seconds"


class Server:
    """vLLM's own server, all of its processes. It is not reachable from outside: it listens only on loopback.

    Args:
        model: directory where the model is saved.
        log: file for its output.
        flags: additions to the command line.
        ranks: number of data-parallel ranks.
        as_users_start_it: its processes import vLLM anew, which takes a minute. Otherwise they are forked from this
            one, which must have imported vLLM: the same program with another start method, the one of vLLM on GPUs.
        environment: additions to this process's environment.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *flags: str,
        ranks: int = 2,
        as_users_start_it: bool = False,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._port = free_ports()
        self._log, self._anew = log, as_users_start_it
        self._environment = {"MOE_RT_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        self._environment |= environment or {}
        self._flags = ["--model", str(model), "--served-model-name", "model"]
        self._flags += ["--host", "127.0.0.1", "--port", str(self._port)]
        self._flags += ["--data-parallel-size", str(ranks), "--enable-expert-parallel", "--dtype", "float32"]
        self._flags += ["--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"]
        self._flags += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20), *flags]
        self._start()

    def _start(self) -> None:
        ours, theirs = Channel.pair()
        self._process = fork(self._run, (), theirs, [ours])
        theirs.close()
        ours.close()

    def _run(self, channel: Channel) -> None:
        channel.close()
        os.setsid()  # all of its processes can then be found and interrupted
        out = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not a test's capture
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stdout)
        os.environ.update(self._environment)
        if self._anew:
            os.execv(sys.executable, [sys.executable, "-m", MODULE, *self._flags])
        sys.argv = [MODULE, *self._flags]
        context = multiprocessing.get_context

        def forks(method: str | None = None) -> Any:
            """Fork instead: vLLM asks for "spawn" without a GPU, to bind threads to cores, which is off here."""
            return context("fork" if method == "spawn" else method)

        multiprocessing.get_context = forks
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)

    @property
    def pid(self) -> int:
        """Id of the process that was started, which has started the others."""
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def await_ready(self) -> None:
        """Wait until the server answers. Raises RuntimeError with the end of the log if it does not start."""
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.has_ended() and IMPATIENT in self.log:
                self.close()
                self._start()
            if self._process.has_ended() or time.monotonic() > deadline:
                raise RuntimeError("the server did not start:\n" + self.log[-4000:])
            time.sleep(0.1)

    def complete(self, prompt: list[int], length: int) -> tuple[int, list[int]]:
        """Return the HTTP status, and the tokens of a greedy answer."""
        try:
            with self._post(prompt, length) as answer:
                choice = json.loads(answer.read())["choices"][0]
                return answer.status, choice["token_ids"]
        except urllib.error.HTTPError as error:
            return error.code, []

    def streamed(self, prompt: list[int], length: int) -> Iterator[list[int]]:
        """Yield the tokens as they arrive. A caller that stops reading hangs up."""
        with self._post(prompt, length, stream=True) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield choice["token_ids"] or []

    def workers(self) -> list[int]:
        """Return the processes of the ranks, in rank order, once they have their names."""
        named = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found = re.match(rb"VLLM::Worker_DP(\d+)", Path(f"/proc/{pid}/cmdline").read_bytes())
                if found:
                    named[int(found[1])] = pid
        return [named[rank] for rank in sorted(named)]

    def processes(self, states: str = "RSDTtI") -> list[int]:
        """Return the server's processes in any of these kernel states: those of its session, without zombies."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.pid and fields[0] in states:
                found.append(int(entry.name))
        return found

    def await_running(self, requests: int) -> bool:
        """Wait for at most END_S; True if its ranks are answering this many requests, as vLLM counts them."""
        deadline = time.monotonic() + END_S
        while self._num_running() != requests and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._num_running() == requests

    def await_end(self, but: int = 0) -> bool:
        """Wait for at most END_S; True if no process of the server is left other than `but`."""
        deadline = time.monotonic() + END_S
        while set(self.processes()) - {but} and time.monotonic() < deadline:
            time.sleep(0.05)
        return not set(self.processes()) - {but}

    def close(self) -> None:
        """End what is left of it."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=10):
                return True
        except OSError:
            return False

    def _num_running(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=END_S) as answer:
            counts = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        return int(sum(map(float, counts)))

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
