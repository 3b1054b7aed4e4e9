"""Another machine than this one, for vLLM's platform in the places that ask for it."""

from __future__ import annotations


class Platform:
    """vLLM's idea of the machine, so far as anything here asks."""

    def __init__(self, device_name: str) -> None:
        self.device_name = device_name

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"
