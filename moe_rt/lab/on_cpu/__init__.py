"""Runs programs written for CUDA on CPU ranks. Nothing in the library imports this, and nothing here acts unasked."""

from __future__ import annotations

from moe_rt.lab.on_cpu.hooks import NotOnCpu, activate

__all__ = ["NotOnCpu", "activate"]
