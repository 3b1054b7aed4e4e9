"""Routes as servers return them: arrays of vLLM's engine, texts of vLLM's and SGLang's HTTP APIs."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch

from moe_rt.errors import InvalidConfig
from moe_rt.routes import UNRECORDED, Routes

E, LAYERS, K = 8, 3, 2


def ids(tokens: int, dtype: Any = np.int32) -> Any:
    return np.random.default_rng(tokens).integers(0, E, (tokens, LAYERS, K)).astype(dtype)


def as_sglang(array: Any) -> str:
    """Return the text that SGLang 0.5 returns as meta_info["routed_experts"]: int32 without a shape.

    Its tensor is int32 [tokens, layers, K], which it encodes by `pybase64.b64encode(val.numpy().tobytes())`.
    """
    return base64.b64encode(torch.from_numpy(array.astype(np.int32)).numpy().tobytes()).decode("utf-8")


def as_vllm(array: Any) -> str:
    """Return the text of `choices[i].routed_experts` in vLLM 0.32's HTTP API: a .npy of uint8, or uint16 above 256."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getbuffer()).decode("ascii")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64])
def test_arrays(dtype: Any) -> None:
    requests = [ids(5, dtype), ids(3, dtype)]
    routes = Routes.from_routed_experts(requests, num_experts=E)
    assert routes.topk_idx.dtype == torch.int16
    assert routes.topk_idx.tolist() == np.concatenate(requests).tolist()


def test_texts() -> None:
    """Texts hold the arrays; of SGLang's, the caller knows the number of layers and K."""
    plain = Routes.from_routed_experts([ids(5), ids(3)], num_experts=E, length=6)
    sglang = [as_sglang(ids(5)), as_sglang(ids(3))]
    vllm = [as_vllm(ids(5, np.uint8)), as_vllm(ids(3, np.uint8))]
    for texts, more in ((sglang, {"shape": (LAYERS, K)}), (vllm, {})):
        routes = Routes.from_routed_experts(texts, num_experts=E, length=6, **more)
        assert torch.equal(routes.topk_idx, plain.topk_idx)


def test_records_that_begin_later() -> None:
    """Tokens before the first recorded one, and padding, have no record."""
    routes = Routes.from_routed_experts([ids(2), ids(3)], num_experts=E, starts=[2, 0], length=5)
    recorded = (routes.topk_idx != UNRECORDED).all((1, 2)).reshape(2, 5)
    assert recorded.tolist() == [[False, False, True, True, False], [True, True, True, False, False]]
    assert routes.topk_idx[2:4].tolist() == ids(2).tolist()
    without_length = Routes.from_routed_experts([ids(2), ids(3)], num_experts=E, starts=[2, 0])
    assert len(without_length.topk_idx) == 2 + 2 + 3


@pytest.mark.parametrize(
    ("requests", "more", "message"),
    [
        ([as_sglang(ids(5))], {}, r"shape: got None, expected \(layers, K\) for texts without a shape"),
        ([as_sglang(ids(5))], {"shape": (4, K)}, r"requests\[0\]: got .*, expected base64 of .*int32 \[tokens, 4, 2\]"),
        (["not base64!"], {"shape": (LAYERS, K)}, r"requests\[0\]: got .*, expected base64"),
        ([ids(5)], {"length": 6, "starts": [2]}, "length: got 6, expected at least the 7 tokens of a request"),
        ([ids(5)], {"starts": [1, 1]}, r"starts: got \[1, 1\], expected numbers >= 0, one for each of 1 requests"),
        ([ids(5) + E], {}, "experts: got ids 8 to 15, expected -1 to 7"),
    ],
)
def test_errors(requests: list[Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Routes.from_routed_experts(requests, num_experts=E, **more)
