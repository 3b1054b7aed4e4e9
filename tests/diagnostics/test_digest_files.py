"""Files of digests: the bits of a digest, the lines of a run, what `moe-rt diff` says of any two runs, a full disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from routes.cases_routes import Mixed, batch

from moe_rt import diagnostics
from moe_rt.diagnostics import digests
from moe_rt.diagnostics.diff import diff
from moe_rt.diagnostics.digests import REPLICATED, row_digests
from moe_rt.errors import InvalidConfig, WriteFailed

MASK = (1 << 64) - 1


def finalised(h: int) -> int:
    """Return splitmix64's finaliser of an unsigned number, as a signed one."""
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & MASK
    h = (h ^ h >> 27) * 0x94D049BB133111EB & MASK
    h ^= h >> 31
    return h - (1 << 64) if h >> 63 else h


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.bool])
def test_a_digest_is_a_sum_of_elements_by_odd_factors(dtype: torch.dtype) -> None:
    """Elements count as signed integers; the factors depend only on the width of a row."""
    width = 5
    drawn = torch.randint(-(1 << 62), 1 << 62, (width,), generator=torch.Generator().manual_seed(9)).tolist()
    x = (50 * torch.randn(7, width, generator=torch.Generator().manual_seed(1))).to(dtype)
    bits = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).tolist()
    expected = [finalised(sum(v * (2 * f + 1) for v, f in zip(row, drawn, strict=True)) & MASK) for row in bits]
    assert row_digests(x).tolist() == expected
    assert row_digests(x.reshape(7, 1, width)).tolist() == expected
    assert row_digests(x.repeat(1, 2)[:, :width]).tolist() == expected, "of any strides"


def test_digests_are_the_same_in_every_release() -> None:
    """Files of version 1 compare, whatever wrote them."""
    assert digests.VERSION == 1
    found = row_digests(torch.tensor([[1.0, 2.0], [0.0, -0.0]])).tolist()
    assert [f"{one & MASK:016x}" for one in found] == ["14668a47c6f899ff", "49b9f458751d2734"]
    assert row_digests(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    assert row_digests(torch.zeros(0, 4)).dtype == torch.int64


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 6, 7, 100])
def test_digests_do_not_depend_on_how_many_rows_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int, width: int
) -> None:
    x = torch.randn(7, width)
    expected = row_digests(x)
    taken: list[int] = []
    split = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda t, size: taken.append(size) or split(t, size))
    monkeypatch.setattr(digests, "ROWS_BYTES", 8 * width * (rows_at_once + 1) - 1)
    assert row_digests(x).equal(expected)
    monkeypatch.setattr(digests, "ROWS_BYTES", 1)
    assert row_digests(x).equal(expected)
    assert taken == [rows_at_once, 1]


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in (path / "rank-00000.jsonl").read_text().splitlines()]


TENSORS = [
    *(("route", what) for what in ("x", "ids", "weights")), *(("dispatch", what) for what in ("rows", "weights")),
    ("experts", "rows"), ("combine", "out"),
]  # fmt: skip


def test_lines_of_a_run(tmp_path: Path) -> None:
    """Forwards are counted in each step and for each layer; a parameter's line follows the step that changed it."""
    model = Mixed(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with diagnostics.digest(model, tmp_path, tokens=True):
        for calls in (2, 1):
            for call in range(calls):
                model(batch(call))
            other.step()
            optimizer.step()
        model(batch(0))
    header, *lines = lines_of(tmp_path)
    assert header == {"version": 1, "rank": 0, "num_ranks": 1, "layers": ["moe.0", "moe.1"]}
    parameters = [
        (name, REPLICATED if ".experts." not in name else "parameter") for name, _ in model.named_parameters()
    ]
    expected: list[list[Any]] = []
    for step, calls in enumerate((2, 1, 1)):
        expected += [
            [step, call, f"moe.{layer}", op, what, "forward"]
            for call in range(calls)
            for layer in range(2)
            for op, what in TENSORS
        ]
        expected += [[step, 0, name, "step", what, "step"] for name, what in parameters if step < 2]
    assert [line[:6] for line in lines] == expected
    assert all(len(line[6]) == 16 for line in lines)
    by_token = {(line[3], line[4]) for line in lines if len(line) == 8}
    assert by_token == {("route", "x"), ("route", "ids"), ("route", "weights"), ("combine", "out")}
    for line in lines:
        if len(line) == 8:
            assert len(line[7]) == len(batch(0))
            assert sum(int(token, 16) for token in line[7]) & MASK == int(line[6], 16)
    weight = dict(model.named_parameters())["moe.0.router.weight"].detach()
    last = next(line for line in reversed(lines) if line[2] == "moe.0.router.weight")
    assert int(last[6], 16) == int(row_digests(weight.reshape(1, -1))) & MASK
    experts = dict(model.named_parameters())["moe.1.experts.down_proj"].detach()
    last = next(line for line in reversed(lines) if line[2] == "moe.1.experts.down_proj")
    assert int(last[6], 16) == int(row_digests(experts).sum()) & MASK, "rows of experts may be on any rank"
    model.close()


@pytest.mark.parametrize("pending", [1, 3, 4, 5])
def test_lines_are_written_when_enough_are_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pending: int
) -> None:
    monkeypatch.setattr(digests, "MOST_PENDING", pending)
    model = Mixed(None)
    with diagnostics.digest(model, tmp_path):
        model(batch(0))
        assert len(lines_of(tmp_path)) == 1 + len(TENSORS) * 2 // pending * pending, "before the block ends"
    assert len(lines_of(tmp_path)) == 1 + len(TENSORS) * 2
    assert [layer.watcher for layer in model.moe] == [None, None]
    model.close()


def test_a_full_disk(tmp_path: Path) -> None:
    """Lines are buffered, so that a disk is found to be full when they are flushed, or when the file is closed."""
    full = tmp_path / "rank-00000.jsonl"
    full.symlink_to("/dev/full")
    model = Mixed(None)
    expected = r"rank-00000\.jsonl: got No space left on device, expected to write there"

    def step(forwards: int) -> None:
        with diagnostics.digest(model, tmp_path, tokens=True) as digest:
            for _ in range(forwards):
                model(batch(0))
            with pytest.raises(WriteFailed, match=expected):
                digest.step()

    for forwards in (0, 20):  # the lines of the latter are more than is buffered
        with pytest.raises(WriteFailed, match=expected):
            step(forwards)
        assert [layer.watcher for layer in model.moe] == [None, None]
    with pytest.raises(WriteFailed, match=expected), diagnostics.digest(model, tmp_path):
        pass
    model.close()


Lines = list[list[Any]]
KEY = [3, 1, "moe.0", "combine", "out", "forward"]


def write_run(path: Path, *ranks: Lines, **header: Any) -> Path:
    path.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        first = {"version": 1, "rank": rank, "num_ranks": len(ranks), "layers": [], **header}
        text = "".join(json.dumps(line) + "\n" for line in [first, *lines])
        (path / f"rank-{rank:05d}.jsonl").write_text(text)
    return path


def said(path: Path, a: list[Lines], b: list[Lines]) -> tuple[int, str]:
    done = CliRunner().invoke(diff, [str(write_run(path / "a", *a)), str(write_run(path / "b", *b))])
    return done.exit_code, done.output.removesuffix("\n")


PLACE = "first difference: step 3, micro-batch 1, layer moe.0, combine forward: out: "
ONE, TWO = "0000000000000001", "0000000000000002"


def line(*digest: Any, **changes: Any) -> list[Any]:
    names = ("step", "call", "layer", "op", "what", "way")
    return [*{**dict(zip(names, KEY, strict=True)), **changes}.values(), *digest]


CASES: dict[str, tuple[list[Lines], list[Lines], tuple[int, str]]] = {
    "equal": ([[line("1")], [line("2")]], [[line("3")]], (0, "equal: 1 digests, 2 and 1 ranks")),
    "nothing": ([[]], [[]], (0, "equal: 0 digests, 1 and 1 ranks")),
    "rows on other ranks": (
        [[line("1")], [line("2")]], [[line("2")], [line("1")]], (0, "equal: 1 digests, 2 and 2 ranks"),
    ),
    "a sum of 64 bits": ([[line("f" * 16)], [line("2")]], [[line("1")]], (0, "equal: 1 digests, 2 and 1 ranks")),
    "one rank": ([[line("1")]], [[line("2")]], (1, f"{PLACE}{ONE} and {TWO}")),
    "the first of two": (
        [[line("1"), line("7", op="route")]], [[line("2"), line("8", op="route")]], (1, f"{PLACE}{ONE} and {TWO}"),
    ),
    "the second of two": (
        [[line("7", op="route"), line("1")]], [[line("7", op="route"), line("2")]], (1, f"{PLACE}{ONE} and {TWO}"),
    ),
    "on one of three ranks": (
        [[line("1")], [line("0")], [line("0")]], [[line("1")], [line("0")], [line("1")]],
        (1, f"{PLACE}{ONE} and {TWO}, on ranks 2"),
    ),
    "a rank has none": (
        [[line("0")], [line("1")], [line("0")]], [[line("2")], [line("0")], []],
        (1, f"{PLACE}{ONE} and {TWO}, on ranks 0, 1, 2"),
    ),
    "other numbers of ranks": ([[line("1")]], [[line("1")], [line("1")]], (1, f"{PLACE}{ONE} and {TWO}")),
    "only in the first": ([[line("1")]], [[]], (1, f"{PLACE}only the first run has it")),
    "only in the second": ([[]], [[line("1")]], (1, f"{PLACE}only the second run has it")),
    "a gradient": (
        [[line("1", way="backward")]], [[line("2", way="backward")]],
        (1, f"{PLACE.replace('forward: out', 'backward: gradient of out')}{ONE} and {TWO}"),
    ),
    "a parameter of experts": (
        [[line("1", what="parameter", way="step")]], [[line("2", what="parameter", way="step")]],
        (1, f"first difference: step 3, after the optimizer: parameter moe.0: {ONE} and {TWO}"),
    ),
    "a replicated parameter": (
        [[line("1", what=REPLICATED, way="step")], [line("9", what=REPLICATED, way="step")]],
        [[line("1", what=REPLICATED, way="step")]],
        (0, "equal: 1 digests, 2 and 1 ranks"),
    ),
    "a token": (
        [[line("1", ["a", "b"])]], [[line("2", ["a", "c"])]], (1, f"{PLACE}{ONE} and {TWO}, 1 of 2 tokens: 1"),
    ),
    "tokens of several ranks": (
        [[line("1", ["a"])], [line("0", ["b"])]], [[line("2", ["c", "d"])]],
        (1, f"{PLACE}{ONE} and {TWO}, 2 of 2 tokens: 0, 1"),
    ),
    "other numbers of tokens": ([[line("1", ["a", "b"])]], [[line("2", ["a"])]], (1, f"{PLACE}{ONE} and {TWO}")),
    "tokens of one run": ([[line("1", ["a"])]], [[line("2")]], (1, f"{PLACE}{ONE} and {TWO}")),
    "tokens of no run": ([[line("1", [])]], [[line("2", [])]], (1, f"{PLACE}{ONE} and {TWO}")),
    "ten tokens": (
        [[line("1", list("abcdefghij"))]], [[line("2", list("klmnopqrst"))]],
        (1, f"{PLACE}{ONE} and {TWO}, 10 of 10 tokens: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
    ),
    "eleven tokens": (
        [[line("1", list("abcdefghijk"))]], [[line("2", list("klmnopqrstu"))]],
        (1, f"{PLACE}{ONE} and {TWO}, 11 of 11 tokens: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."),
    ),
}  # fmt: skip


def test_what_is_said_of_two_runs(tmp_path: Path) -> None:
    found = {}
    for name, (a, b, _) in CASES.items():
        (tmp_path / name).mkdir()
        found[name] = said(tmp_path / name, a, b)
    assert found == {name: expected for name, (*_, expected) in CASES.items()}


def test_tokens_are_in_the_order_of_ranks_and_not_of_files(tmp_path: Path) -> None:
    """The ranks are those in the headers of the files."""
    a = write_run(tmp_path / "a", [line("1", ["a"])], [line("0", ["b"])])
    (a / "rank-00000.jsonl").rename(a / "rank-2-of-2.jsonl")
    b = write_run(tmp_path / "b", [line("2", ["a", "c"])])
    done = CliRunner().invoke(diff, [str(a), str(b)])
    assert (done.exit_code, done.output) == (1, f"{PLACE}{ONE} and {TWO}, 1 of 2 tokens: 1\n")


Spoil = Callable[[Path], object]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda path: path.write_text(""), "{}: got Expecting value: line 1 column 1 (char 0), expected a file of"),
        (lambda path: path.write_text('{"version": 2}\n'), "{}: version: got 2, expected 1"),
        (lambda path: path.write_text('{"version": 1}\n'), "{}: got 'rank', expected a file of"),
        (
            lambda path: path.write_text('{"version": 1, "rank": 1, "num_ranks": 3}\n'),
            "{}: num_ranks: got 3, expected 2, as rank 0",
        ),
        (lambda path: path.write_bytes(b"\xff"), "{}: got 'utf-8' codec can't decode"),
        (lambda path: path.open("a").write("[1, 2]\n"), "{}: got list index out of range, expected a file of"),
        (lambda path: path.open("a").write('[1, 2, 3, 4, 5, 6, "x"]\n'), "{}: got invalid literal for int()"),
        (lambda path: path.open("a").write("7\n"), "{}: got 'int' object is not subscriptable, expected a file of"),
        (lambda path: path.unlink() or path.mkdir(), "{}: got [Errno 21] Is a directory"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_digests_is_named(tmp_path: Path, spoil: Spoil, expected: str) -> None:
    good, bad = write_run(tmp_path / "good", [line("1")]), write_run(tmp_path / "bad", [line("1")], [])
    spoil(bad / "rank-00001.jsonl")
    for paths in ((good, bad), (bad, good)):
        done = CliRunner().invoke(diff, [str(path) for path in paths])
        assert done.exit_code == 1
        begin = "Error: " + expected.format(bad / "rank-00001.jsonl")
        assert done.output.replace("\n", " ").startswith(begin), done.output


def test_directories_that_are_no_run(tmp_path: Path) -> None:
    """The files of a run are as many as its ranks."""
    for count in (0, 1, 3):
        path = write_run(tmp_path / str(count), *[[line("1")]] * count, num_ranks=2)
        done = CliRunner().invoke(diff, [str(path), str(path)])
        said = (
            f"got {count} files, expected 2, one a rank"
            if count
            else "got no file rank-*.jsonl, expected one for each rank"
        )
        assert (done.exit_code, done.output.split(" (moe-rt")[0]) == (1, f"Error: digests {path}: {said}")


def test_a_layer_that_cannot_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SimpleNamespace(watcher=None)
    monkeypatch.setattr(digests, "routed_layers", lambda model: {"first": first, "mlp": torch.nn.Linear(1, 1)})
    with pytest.raises(InvalidConfig, match=r"^model: mlp: got Linear, expected MoELayers only"):
        diagnostics.digest(torch.nn.Linear(1, 1), tmp_path)


class Layer(torch.nn.Module):
    """A layer of rank 3 of 4 that a test lets show tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.watcher: Any = None
        self.buffer = SimpleNamespace(rank=3, num_ranks=4)
        self.weight = torch.nn.Parameter(torch.ones(2, 3))


def digest_of(rows: torch.Tensor) -> str:
    return f"{int(row_digests(rows).sum()) & MASK:016x}"


def tokens_of(rows: torch.Tensor) -> list[str]:
    return [f"{int(one) & MASK:016x}" for one in row_digests(rows)]


@pytest.mark.parametrize("tokens", [False, True])
def test_what_a_layer_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: bool) -> None:
    """Rows after the last expert's do not count, and have no digests of their own; gradients have those of tensors."""
    monkeypatch.setattr(digests, "routed_layers", lambda model: {"layer": model})
    layer, x, rows = Layer(), torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    offs, plain = torch.tensor([1, 3]), torch.randn(2, 3)
    before = digest_of(rows[:3])
    parameters = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1)), layer.weight], lr=0.0)
    for _ in range(2):  # an older file is replaced
        with diagnostics.digest(layer, tmp_path / "a/b", tokens=tokens):
            for _ in range(2):
                see = layer.watcher()
                see("op", x=x, plain=plain)
                with torch.device("meta"):  # the default of a program is not where its tensors are
                    see("experts", offs, rows=rows)
                with torch.no_grad():
                    see("later", x=x)
                (x.sum() * 2 + (rows * rows).sum()).backward()
            parameters.step()
    by_token = (lambda t: [tokens_of(t)]) if tokens else (lambda t: [])
    gradient, of_rows = torch.full((4, 3), 2.0), (2 * rows).detach()
    expected: list[list[Any]] = [["header"]]
    for call in range(2):
        place = [0, call, "layer"]
        expected += [
            [*place, "op", "x", "forward", digest_of(x), *by_token(x)],
            [*place, "op", "plain", "forward", digest_of(plain), *by_token(plain)],
            [*place, "experts", "rows", "forward", before],
            [*place, "later", "x", "forward", digest_of(x), *by_token(x)],
        ]
        for n in range(call, -1, -1):  # hooks of earlier forwards stay on the same tensors
            expected += [[0, n, "layer", "op", "x", "backward", digest_of(gradient), *by_token(gradient)]]
            expected += [[0, n, "layer", "experts", "rows", "backward", digest_of(of_rows[:3])]]
    expected += [[0, 0, "weight", "step", REPLICATED, "step", digest_of(layer.weight.reshape(1, -1))]]
    found = [json.loads(text) for text in (tmp_path / "a/b/rank-00003.jsonl").read_text().splitlines()]
    assert found[0] == {"version": 1, "rank": 3, "num_ranks": 4, "layers": ["layer"]}
    assert sorted(map(str, found[1:])) == sorted(map(str, expected[1:]))
    assert [one for one in found[1:] if one[5] != "backward"] == [one for one in expected[1:] if one[5] != "backward"]
