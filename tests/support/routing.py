"""Seeded inputs that every rank can make for all ranks, so that each can compute the whole group's reference.

They are those of `moe-rt gpucheck`, which needs them in installations without tests.
"""

from moe_rt.lab.testing.rounds import Inputs, buffer_kwargs, make_inputs, make_spec

__all__ = ["Inputs", "buffer_kwargs", "make_inputs", "make_spec"]
