"""Digests name the first op that differs, between runs of equal and of different numbers of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from diagnostics import cases_digests as cases
from routes.cases_routes import Mixed, batch
from support.ranks import Ranks
from torch.utils.checkpoint import checkpoint

from moe_rt import diagnostics
from moe_rt.cli import main
from moe_rt.diagnostics.digests import row_digests
from moe_rt.errors import InvalidConfig, WriteFailed

MakeRanks = Callable[[str, int], Ranks]


def compare(a: Path, b: Path) -> Result:
    return CliRunner().invoke(main, ["diff", str(a), str(b)])


@pytest.fixture
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's digests. Its products have as many threads as a test's, on which bits depend."""
    path = tmp_path_factory.mktemp("reference")
    cases.run(None, str(path), {"tokens": True})
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8])
def test_a_digest_is_of_bits_and_rows(dtype: torch.dtype) -> None:
    x = (10 * torch.randn(50, 7)).to(dtype)
    digests = row_digests(x)
    assert len(digests.unique()) == 50
    assert row_digests(x.flip(0)).sum() == digests.sum()
    assert (row_digests(x.flip(1)) != digests).all()
    y = x.clone()
    y[3] = -y[3]
    assert (row_digests(y) != digests).nonzero().flatten().tolist() == [3]
    assert row_digests(x[:0]).shape == (0,)


@pytest.mark.parametrize("how", [None, "reentrant", "non-reentrant"])
def test_equal_runs(tmp_path: Path, reference: Path, how: str | None) -> None:
    """A run with activation checkpointing has the digests of a run without it."""
    cases.run(None, str(tmp_path), {}, how)
    result = compare(reference, tmp_path)
    assert (result.exit_code, result.output.split(":")[0]) == (0, "equal"), result.output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"at": (1, 0, 0, 7), "tokens": True}, "step 1, micro-batch 0, layer moe.0, route forward: x: "),
        ({"weight": "moe.1.router.weight"}, "step 0, micro-batch 0, layer moe.1, route forward: weights: "),
        ({"weight": "moe.1.experts.down_proj"}, "step 0, micro-batch 0, layer moe.1, experts forward: rows: "),
    ],
)
def test_the_first_op_that_differs(tmp_path: Path, reference: Path, changes: dict[str, Any], said: str) -> None:
    cases.run(None, str(tmp_path), changes)
    result = compare(reference, tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith(f"first difference: {said}")
    assert ("1 of 48 tokens: 7" in result.output) == ("tokens" in changes)


@pytest.mark.parametrize("size", [2, 4])
def test_runs_of_other_numbers_of_ranks(make_ranks: MakeRanks, tmp_path: Path, reference: Path, size: int) -> None:
    """Forwards agree, as does the last layer's backward. A batch [T, H] is one sequence, so each rank's balance loss is
    another function of its tokens: the gradient that the first layer gets is the first to differ. See the next test for
    runs without it. A changed element is found before it.
    """
    ranks = make_ranks("threads", size)
    ranks.run(cases.run, str(tmp_path / "same"), {"tokens": True})
    result = compare(reference, tmp_path / "same")
    assert result.exit_code == 1
    assert "step 0, micro-batch 0, layer moe.0, combine backward: gradient of out" in result.output
    ranks.run(cases.run, str(tmp_path / "poked"), {"at": (0, 0, 1, 2), "tokens": True})
    place = "step 0, micro-batch 0, layer moe.0, route forward: x: "
    result = compare(reference, tmp_path / "poked")
    assert place in result.output
    assert f"1 of 48 tokens: {48 // size + 2}" in result.output
    result = compare(tmp_path / "same", tmp_path / "poked")
    assert place in result.output
    assert "on ranks 1" in result.output


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [{"options": dict(aux_loss_coef=0.0, z_loss_coef=0.0)}, {"sequences": True}],
    ids=["no losses", "sequences"],
)
def test_equal_runs_of_other_numbers_of_ranks(
    make_ranks: MakeRanks, tmp_path: Path, size: int, changes: dict[str, Any]
) -> None:
    """All digests agree without balance losses, and with those of whole sequences."""
    changes = {**changes, "options": {"sums": "invariant", **changes.get("options", {})}}
    make_ranks("threads", 1).run(cases.run, str(tmp_path / "one"), changes)
    make_ranks("threads", size).run(cases.run, str(tmp_path / "many"), changes)
    result = compare(tmp_path / "one", tmp_path / "many")
    assert (result.exit_code, result.output.split(":")[0]) == (0, "equal"), result.output


def test_a_forward_that_only_one_run_has(tmp_path: Path) -> None:
    model = Mixed(None)
    for name, count in (("a", 1), ("b", 2)):
        with diagnostics.digest(model, tmp_path / name):
            for _ in range(count):
                model(batch(0))
    for one, two, which in (("a", "b", "second"), ("b", "a", "first")):
        output = compare(tmp_path / one, tmp_path / two).output
        assert f"micro-batch 1, layer moe.0, route forward: x: only the {which} run has it" in output
    model.close()


def test_a_long_run_reads_rarely_and_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_rt.diagnostics.digests.MOST_PENDING", 20)
    model = Mixed(None)
    with diagnostics.digest(model, tmp_path) as digest:
        for _ in range(30):
            model(batch(0))
            assert len(digest._pending) < 20
    lines = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 30 * 2 * 7
    model.close()


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "got no file rank-*.jsonl" in compare(tmp_path / "empty", tmp_path / "empty").output
    header = {"version": 1, "rank": 0, "num_ranks": 2, "layers": []}
    (tmp_path / "rank-00000.jsonl").write_text(json.dumps(header) + "\n")
    assert "got 1 files, expected 2, one a rank" in compare(tmp_path, tmp_path).output
    (tmp_path / "rank-00000.jsonl").write_text("[1]\n")
    assert "expected a file of moe_rt.diagnostics.digest" in compare(tmp_path, tmp_path).output


def test_compiled_layers_are_refused(tmp_path: Path) -> None:
    layer = Mixed(None).moe[0]
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with diagnostics.digest(layer, tmp_path):
        with pytest.raises(Exception, match="in a graph that is being compiled") as raised:
            compiled(batch(0))
        assert isinstance(raised.value, (InvalidConfig, torch._dynamo.exc.Unsupported))
        with pytest.raises(InvalidConfig, match="watched already"), diagnostics.digest(layer, tmp_path / "two"):
            pass
    layer.buffer.close()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = Mixed(None)
    expected = r"digests .*rank-00000\.jsonl: got Not a directory, expected to write there"
    with pytest.raises(WriteFailed, match=expected), diagnostics.digest(model, tmp_path / "file/digests"):
        pass
    model.close()


def test_steps_after_the_block_are_not_watched(tmp_path: Path) -> None:
    model = Mixed(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnostics.digest(model, tmp_path) as digest:
        optimizer.step()
    lines = (tmp_path / "rank-00000.jsonl").read_text()
    optimizer.step()
    assert not digest._pending
    assert (tmp_path / "rank-00000.jsonl").read_text() == lines
    model.close()


def test_an_optimizer_of_several_models_ends_steps(tmp_path: Path) -> None:
    """Only its second group is of the watched model; optimizers of other models end no step."""
    model, other = Mixed(None), torch.nn.Linear(2, 2)
    groups = [{"params": list(other.parameters())}, {"params": list(model.parameters())}]
    with diagnostics.digest(model, tmp_path):
        for optimizer in (torch.optim.SGD(groups, lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)):
            model(batch(0))
            optimizer.step()
        model(batch(0))
    lines = [json.loads(line) for line in (tmp_path / "rank-00000.jsonl").read_text().splitlines()]
    assert {(step, call) for step, call, _, op, *_ in lines[1:] if op == "route"} == {(0, 0), (1, 0), (1, 1)}
    model.close()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_is_not_a_second_forward(tmp_path: Path, use_reentrant: bool) -> None:
    model, x = Mixed(None), batch(0).requires_grad_()
    with diagnostics.digest(model, tmp_path / "plain"):
        model(x)[0].sum().backward()
    with diagnostics.digest(model, tmp_path / "recomputed"):
        checkpoint(model, x, use_reentrant=use_reentrant)[0].sum().backward()
    assert compare(tmp_path / "plain", tmp_path / "recomputed").output.startswith("equal: ")
    plain, recomputed = ((tmp_path / n / "rank-00000.jsonl").read_text() for n in ("plain", "recomputed"))
    assert sorted(plain.splitlines()) == sorted(recomputed.splitlines())
    model.close()
