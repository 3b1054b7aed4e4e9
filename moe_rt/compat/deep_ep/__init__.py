"""DeepEP's Python interface over `moe_rt.Buffer`, so that programs written for it run on CPU ranks.

docs/api/deep_ep.md has every public name and how it differs from DeepEP's.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from moe_rt.compat.deep_ep import utils
from moe_rt.compat.deep_ep.buffer import Buffer
from moe_rt.compat.deep_ep.config import Config
from moe_rt.compat.deep_ep.utils.event import EventHandle, EventOverlap
from moe_rt.errors import InvalidConfig

__all__ = ["Buffer", "Config", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t", "utils"]
__version__ = "1.2.1+moe_rt"
topk_idx_t = torch.int64


class ElasticBuffer:
    """DeepEP V2's buffer, which is refused: only V1's `Buffer` exists here."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        _refuse_elastic()

    @staticmethod
    def get_buffer_size_hint(*arguments: object, **keywords: object) -> NoReturn:
        """Raise InvalidConfig, as the constructor does."""
        _refuse_elastic()


def _refuse_elastic() -> NoReturn:
    expected = "deep_ep.Buffer (V1), or moe_rt.Buffer, whose capacity and layouts replace V2's modes"
    raise InvalidConfig(f"deep_ep.ElasticBuffer: got a use of DeepEP V2, which is not implemented; expected {expected}")
