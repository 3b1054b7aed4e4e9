"""DeepEP's Python interface over `moe_rt.Buffer`, so that programs written for it run on CPU ranks.

docs/api/deep_ep.md has every public name and how it differs from DeepEP's.
"""

from __future__ import annotations

import torch

from moe_rt.compat.deep_ep import utils
from moe_rt.compat.deep_ep.buffer import Buffer
from moe_rt.compat.deep_ep.config import Config
from moe_rt.compat.deep_ep.elastic import ElasticBuffer
from moe_rt.compat.deep_ep.expand import EPHandle
from moe_rt.compat.deep_ep.utils.envs import get_logical_domain_size, get_physical_domain_size
from moe_rt.compat.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
__version__ = "2.1.0+moe_rt"
topk_idx_t = torch.int64
