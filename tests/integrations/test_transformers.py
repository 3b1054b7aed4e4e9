"""Transformers models on moe_rt: equal to one process in logits, gradients and tokens, for any batch of each rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.needs_transformers import require_transformers
from support.ranks import Ranks
from support.signatures import misplaced, unlike_defaults

require_transformers()

from integrations import cases_transformers as cases  # noqa: E402
from integrations.transformers_models import FAMILIES, tiny_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from moe_rt import ThreadGroup  # noqa: E402
from moe_rt.buffer.pool import GrowingOptions  # noqa: E402
from moe_rt.errors import GroupPoisoned, InvalidConfig, InvalidInput  # noqa: E402
from moe_rt.integrations import transformers as adapter  # noqa: E402
from moe_rt.integrations.routed_blocks import EXCHANGE  # noqa: E402
from moe_rt.integrations.transformers import configure  # noqa: E402

MakeRanks = Callable[[str, int], Ranks]
TWO = dict(fsdp_size=2, ep_size=2)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return saved(family, **changes), which returns the directory of a tiny model with random weights."""
    made: dict[str, str] = {}

    def make(family: str, **changes: Any) -> str:
        key = f"{family}{changes}"
        if key not in made:
            torch.manual_seed(0)
            path = tmp_path_factory.mktemp(family)
            AutoModelForCausalLM.from_config(tiny_config(family, **changes)).save_pretrained(path)
            made[key] = str(path)
        return made[key]

    return make


def assert_equal(results: list[dict[str, Any]], layers: int = 2, moe_bound: float = 1e-6) -> None:
    for r in results:
        assert r["logits"] < 1e-5
        assert r["layers"] == layers
        assert r["buffers"] == 1, "layers of one model share their buffer"
        assert r.get("same_tokens", True)
        moe = {n: d for n, d in r["grads"].items() if any(part in n for part in ("experts", "gate", "router"))}
        assert len(moe) >= 3 * layers
        assert max(moe.values()) < moe_bound, moe
        assert max(r["grads"].values()) < 1e-5, "attention under tensor parallelism rounds elsewhere"


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_one_process(make_ranks: MakeRanks, saved: Callable[..., str], family: str) -> None:
    assert_equal(make_ranks("shm", 2).run(cases.equals_one_process, saved(family), [(2, 7), (1, 1)], TWO))


@pytest.mark.parametrize(
    "distributed",
    [dict(fsdp_size=4, ep_size=4), dict(fsdp_size=4, ep_size=2), dict(fsdp_size=2, tp_size=2, ep_size=4)],
    ids=str,
)
def test_four_ranks(make_ranks: MakeRanks, saved: Callable[..., str], distributed: dict[str, int]) -> None:
    shapes = [(2, 7), (1, 1), (1, 12), (3, 2)]
    assert_equal(make_ranks("shm", 4).run(cases.equals_one_process, saved("qwen3_moe"), shapes, distributed, False))


def test_checkpointed_activations(make_ranks: MakeRanks, saved: Callable[..., str]) -> None:
    """Backward runs each layer's dispatch again, in the same order on every rank."""
    arguments = (saved("gpt_oss"), [(2, 7), (1, 1)], TWO, False, True)
    assert_equal(make_ranks("shm", 2).run(cases.equals_one_process, *arguments))


@pytest.mark.parametrize("shape", [(2, 7), (1, 1)], ids=str)
def test_ranks_that_share_a_batch(make_ranks: MakeRanks, saved: Callable[..., str], shape: tuple[int, int]) -> None:
    """Ranks compute uneven or empty slices of one batch and gather them; the rounding of this reaches the routers."""
    distributed = dict(tp_size=2, ep_size=2)
    results = make_ranks("shm", 2).run(cases.equals_one_process, saved("mixtral"), [shape], distributed)
    assert_equal(results, moe_bound=3e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_saves_what_one_process_loads(
    make_ranks: MakeRanks, saved: Callable[..., str], tmp_path: Path, family: str
) -> None:
    make_ranks("shm", 2).run(cases.saves, saved(family), str(tmp_path), TWO)
    before, after = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (saved(family), tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_grows_when_one_rank_outgrows_the_buffer(make_ranks: MakeRanks, saved: Callable[..., str]) -> None:
    for r in make_ranks("shm", 2).run(cases.grows, saved("qwen3_moe")):
        assert r["grads"] < 1e-6
        assert r["alive"] == [1, 2, 1], "the outgrown buffer stays for the backward of its forward, and no longer"
        assert r["sizes"] == {256}


def test_grows_by_comparing_sizes(make_ranks: MakeRanks, saved: Callable[..., str]) -> None:
    for r in make_ranks("shm", 2).run(cases.growing_by_comparing, saved("qwen3_moe")):
        assert r["difference"] < 1e-5
        assert r["buffers"] == 1


def test_fixed_size_needs_no_collective(make_ranks: MakeRanks, saved: Callable[..., str]) -> None:
    for r in make_ranks("shm", 2).run(cases.fixed_size, saved("mixtral")):
        assert r["calls"] == []
        assert r["raised"].startswith("TooManyTokens")
        assert re.search(r"9 tokens, expected at most (num_max_tokens_per_rank = )?8\b", r["raised"])


def test_different_sizes_are_refused_everywhere(make_ranks: MakeRanks, saved: Callable[..., str]) -> None:
    for raised in make_ranks("shm", 2).run(cases.configured_differently, saved("mixtral")):
        assert raised.startswith(
            "ConfigMismatch: num_max_tokens_per_rank: got None on rank 1, expected 32 as on rank 0"
        )


@pytest.mark.parametrize("size", [0, -1, 2.5, "many"])
def test_sizes_that_make_no_sense(size: Any) -> None:
    with pytest.raises(InvalidConfig, match=rf"num_max_tokens_per_rank: got '?{size}'?, expected a positive integer"):
        configure(num_max_tokens_per_rank=size)


def test_every_option_of_configure_arrives() -> None:
    given = unlike_defaults(configure)
    try:
        configure(**given)
        assert misplaced(given, {**vars(adapter._options), "send_padding": adapter._send_padding}) == {}
    finally:
        configure()
    assert adapter._options == GrowingOptions()


@pytest.mark.parametrize("name", sorted(unlike_defaults(configure)))
def test_an_option_that_is_left_out_has_its_default_again(name: str) -> None:
    try:
        configure(**{name: unlike_defaults(configure)[name]})
        configure()
        assert {**vars(adapter._options), "send_padding": adapter._send_padding} == {
            **vars(GrowingOptions()),
            "send_padding": False,
        }
    finally:
        configure()


def test_what_changes_between_two_forwards_takes_effect() -> None:
    """Each size, the dtype and the options lead to their own buffer, with a new tag; the same ones to the same."""
    asked: list[dict[str, Any]] = []

    def growing(options: GrowingOptions, **sizes: Any) -> Any:
        asked.append({"options": options, **sizes})
        return SimpleNamespace(new_tag=partial(int, len(asked)))

    layer: Any = adapter.MoeRtEP.__new__(adapter.MoeRtEP)
    layer.num_experts, layer._pool = 8, SimpleNamespace(growing=growing)
    layer._buffer, layer._buffer_key, layer._tag = None, (), 0
    x, idx = torch.zeros(3, 16), torch.zeros(3, 2, dtype=torch.int64)
    options = unlike_defaults(configure, leave_out=["send_padding"])
    given = [(x, idx), (x.bfloat16(), idx), (torch.zeros(3, 32), idx), (x, idx[:, :1]), (x, idx)]
    try:
        for number, (rows, ids) in enumerate(given, 1):
            for _ in range(2):
                layer._buffer_for(rows[:number], ids[:number])
                assert (len(asked), layer._tag) == (number, number)
            sizes = {"hidden": rows.shape[1], "num_topk": ids.shape[1], "num_experts": 8, "dtype": rows.dtype}
            assert asked[-1] == {"options": GrowingOptions(), **sizes}
        for number, (name, value) in enumerate(options.items(), 1 + len(given)):
            configure(**{name: value})
            layer._buffer_for(x, idx)
            assert (len(asked), layer._tag) == (number, number), name
            assert getattr(asked[-1]["options"], name) == value
    finally:
        configure()


@pytest.mark.parametrize("real", [None, [True, False, True]], ids=["no mask", "a mask"])
@pytest.mark.parametrize("send_padding", [False, True])
@pytest.mark.parametrize("sums", ["ranked", "invariant"])
def test_what_a_layer_sends(real: list[bool] | None, send_padding: bool, sums: Any) -> None:
    """Rows in the experts' dtype, ids without padding, the weights and the layer's tag; options of this forward."""
    sent: list[Any] = []

    class Received:
        rows, handle = torch.ones(5, 4), SimpleNamespace(offs="offs")

        def combine(self, y: torch.Tensor) -> torch.Tensor:
            return y[:3]

    def dispatch(*given: Any) -> Received:
        sent.extend(given)
        return Received()

    class Experts:
        row_wise = sums != "invariant"  # as another forward's options left it

        def dtype_of_rows(self, x: torch.Tensor) -> torch.dtype:
            return torch.bfloat16

        def __call__(self, rows: torch.Tensor, offs: str) -> torch.Tensor:
            assert offs == "offs"
            assert self.row_wise is (sums == "invariant")
            return rows * 2

    layer: Any = adapter.MoeRtEP.__new__(adapter.MoeRtEP)
    layer._experts, layer._tag, layer.tp_mesh = Experts(), 6, SimpleNamespace(size=lambda: 1)
    layer._attended = SimpleNamespace(real=lambda count: None if real is None else torch.tensor(real))
    layer._buffer_for = lambda x, ids: SimpleNamespace(dispatch=dispatch)
    x, ids, weights = torch.randn(3, 4), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    try:
        configure(sums=sums, send_padding=send_padding)
        out = layer(x, ids, weights)
    finally:
        configure()
    masked = real is not None and not send_padding
    assert torch.equal(sent[0], x.bfloat16())
    assert sent[1].tolist() == [[0, 1], [-1, -1] if masked else [2, 3], [1, 0]]
    assert torch.equal(sent[2], weights)
    assert sent[3] == 6
    assert torch.equal(out, torch.full((3, 4), 2.0))


@pytest.mark.parametrize("has_run", [False, True])
def test_a_refusal_is_of_the_layer_that_refuses(has_run: bool) -> None:
    refused: list[Any] = []

    def refuse(error: Exception, *, tag: int) -> None:
        refused.append(tag)
        raise error

    layer: Any = adapter.MoeRtEP.__new__(adapter.MoeRtEP)
    layer._tag, layer.ep_mesh = 6, ThreadGroup.make(1)[0]
    layer._buffer = SimpleNamespace(lease=SimpleNamespace(buffer=SimpleNamespace(refuse=refuse))) if has_run else None
    error = InvalidInput("x: got nothing")
    with pytest.raises(InvalidInput) as raised:
        layer.refuse(error)
    assert raised.value is error
    assert refused == [6] * has_run


def test_a_refusal_before_the_first_buffer_reaches_peers_that_come_to_make_it() -> None:
    waits, refuses = ThreadGroup.make(2)
    layer: Any = adapter.MoeRtEP.__new__(adapter.MoeRtEP)
    layer._tag, layer.ep_mesh, layer._buffer = 6, refuses, None
    with pytest.raises(InvalidInput):
        layer.refuse(InvalidInput("x: got nothing"))
    with pytest.raises(GroupPoisoned, match="rank 1 gave up: InvalidInput: x: got nothing"), waits:
        waits.raise_first_failure()


def test_a_model_without_a_plan(make_ranks: MakeRanks, saved: Callable[..., str]) -> None:
    for raised in make_ranks("shm", 2).run(cases.refusal_of_transformers, saved("llama"), TWO):
        assert "`LlamaForCausalLM` has no `ep_plan`" in raised


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("qwen3_moe", None), ("gpt_oss", None), ("gpt_oss", "batched_mm"), ("mixtral", "eager")],
)
def test_poisoned_memory_stays_out(
    make_ranks: MakeRanks, saved: Callable[..., str], family: str, implementation: str | None
) -> None:
    for finite in make_ranks("shm", 2).run(cases.finite_with_poisoned_memory, saved(family), implementation):
        assert all(finite)


@pytest.mark.parametrize(
    ("changes", "distributed", "message"),
    [
        (dict(num_local_experts=6), dict(fsdp_size=4, ep_size=4), "Cannot evenly shard 6 experts"),
        (
            dict(num_local_experts=2, num_experts_per_tok=1),
            dict(fsdp_size=4, ep_size=4),
            "Cannot evenly shard 2 experts",
        ),
    ],
    ids=["uneven", "too few"],
)
def test_experts_that_do_not_fit_the_mesh(
    make_ranks: MakeRanks, saved: Callable[..., str], changes: dict[str, Any], distributed: dict[str, Any], message: str
) -> None:
    """Transformers checks the parameters first, so these refusals are its own."""
    for raised in make_ranks("shm", 4).run(cases.refusal_of_transformers, saved("mixtral", **changes), distributed):
        assert message in raised


# FSDP2 cannot train after inference_mode, also without moe_rt: it keeps the tensors that it gathered then.
EVALUATED = [(TWO, "no_grad"), (TWO, "autocast"), *((dict(tp_size=2, ep_size=2), how) for how in cases.EVALUATIONS)]


@pytest.mark.parametrize(("distributed", "evaluation"), EVALUATED, ids=str)
def test_evaluation_changes_no_gradient(
    make_ranks: MakeRanks, saved: Callable[..., str], distributed: dict[str, int], evaluation: str
) -> None:
    changed = make_ranks("shm", 2).run(cases.trains_after_evaluation, saved("qwen3_moe"), distributed, evaluation)
    assert changed == [[], []]


class Mesh:
    def __init__(self, size: int) -> None:
        self.ranks = size

    def size(self) -> int:
        return self.ranks


@pytest.fixture
def make_layer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return make(experts, size), which makes the layer of experts over meshes without ranks."""

    def init(self: Any, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        self.experts_forward, self.num_local_experts = experts.forward, experts.num_experts
        self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh

    monkeypatch.setattr(adapter.EPImplementation, "__init__", init)
    return lambda experts, size: adapter.MoeRtEP(experts, Mesh(size), Mesh(1))  # type: ignore[arg-type]


def experts_of(num_local: int, **parameters: int) -> Any:
    experts: Any = torch.nn.Identity()
    experts.num_experts = num_local
    for name, size in parameters.items():
        experts.register_parameter(name, torch.nn.Parameter(torch.zeros(size, 2)))
    return experts


def test_a_layer_knows_its_experts(make_layer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.BufferPool, "join", lambda mesh: ("pool of", mesh))
    experts = experts_of(3, up=3, down=3)
    layer = make_layer(experts, 1)
    assert layer.num_experts == 3
    assert layer._pool == ("pool of", layer.ep_mesh)
    assert layer._buffer is None
    assert getattr(experts, EXCHANGE) is layer
    assert layer._attended.real(4) is None  # no attention has run
    assert not layer._experts.grouped


def test_experts_that_are_not_in_equal_blocks(make_layer: Callable[..., Any]) -> None:
    each = 'whole on every rank, expected 2 on each of {} ranks; give it a "grouped_gemm" rule'
    for experts, size, expected in (
        (experts_of(2), 2, "got experts Identity without parameters, expected some to share"),
        (experts_of(2, up=4), 2, f"got Identity.up of 4 experts, {each.format(2)}"),
        (experts_of(2, up=2, down=3), 1, f"got Identity.down of 3 experts, {each.format(1)}"),
    ):
        with pytest.raises(InvalidConfig) as caught:
            make_layer(experts, size)
        assert str(caught.value).startswith(f"ep_plan: {expected} (")
