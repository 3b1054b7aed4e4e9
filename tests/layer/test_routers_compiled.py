"""Ways of routing as one graph, for changing numbers of tokens: equal to the same router without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer.cases_router import FAMILY, make_router, tokens

# Compiling one takes five seconds; layers that compile (test_models_as_layers.py) have routers of the other kinds.
COMPILED = ("mixtral", "softmax groups", "jittered")
compiled = pytest.mark.parametrize(
    "options",
    [pytest.param(o, id=name, marks=[] if name in COMPILED else pytest.mark.sweep) for name, o in FAMILY.items()],
)


@compiled
def test_compiles_as_one_graph(options: dict[str, Any]) -> None:
    router = make_router(**{**options, "jitter": 0.0})
    torch.compiler.reset()
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    for shape in ((2, 5), (3, 7), (4, 9)):  # dynamic from the second shape on
        x = tokens(*shape)
        got, want = compiled(x), router(x)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1])
        torch.testing.assert_close(got[2].loss, want[2].loss)
        torch.testing.assert_close(compiled(x, want[0])[1], want[1])
