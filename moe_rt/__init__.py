"""moe_rt: sync-free mixture-of-experts dispatch over symmetric memory."""

from moe_rt.comm.buffer import Buffer
from moe_rt.comm.handle import Handle
from moe_rt.heap.rendezvous import ThreadGroup
from moe_rt.nn.layer import MoEConfig, MoELayer

__all__ = ["Buffer", "Handle", "MoEConfig", "MoELayer", "ThreadGroup"]
__version__ = "0.1.0"
