"""A stand-in for another machine, for vLLM's platform in the modules that read it."""

from __future__ import annotations


class Platform:
    """vLLM's description of the machine, with the members that are read here."""

    def __init__(self, device_name: str) -> None:
        self.device_name = device_name

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"
