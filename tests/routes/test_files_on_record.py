"""Files of routes are written and read as on record, and refusals have their words.

After a change on purpose: python tests/routes/test_files_on_record.py
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import assert_on_record, every, result_of, results_of, write_record

from moe_rt.routes.file import MOST_EXPERTS, Routes, ids_of, layer_number, load, merge

RECORD = Path(__file__).with_suffix(".json")
HEADER = {"version": 1, "num_experts": 4, "num_topk": 2, "num_ranks": 3, "num_micro_batches": 2, "layers": ["a", "b"]}
IDS = np.array([[[0, 1], [2, -1]], [[3, 0], [-2, -2]], [[1, 2], [-3, -3]]], np.int16)
PLACES = {"rank": np.array([0, 2, 1], np.int32), "micro_batch": np.array([0, 0, 1], np.int32)}


def facts(routes: Routes) -> Any:
    tensors = {name: [str(t.dtype), t.tolist()] for name, t in vars(routes).items() if isinstance(t, torch.Tensor)}
    return vars(routes) | tensors | {"num_topk": routes.num_topk}


def whole(**changes: Any) -> Routes:
    ids, rank, micro_batch = (torch.from_numpy(a) for a in (IDS, *PLACES.values()))
    return replace(Routes(ids, 4, ("a", "b"), 3, 2, rank, micro_batch), **changes)


def loaded(header: Any = HEADER, num_experts: int | None = None, **arrays: Any) -> Any:
    """Return what a file with this header and these arrays holds; an array of None is missing."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    given = {"header": np.frombuffer(text, np.uint8), "topk_idx": IDS} | PLACES | arrays
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        np.savez(path, **{name: array for name, array in given.items() if array is not None})
        found = result_of(lambda: facts(load(path, num_experts)))
    return json.loads(json.dumps(found).replace(folder, "FOLDER"))


def headers() -> Any:
    changed: list[Any] = [HEADER | change for change in (
        {"version": 2}, {"num_experts": 3}, {"num_experts": 0}, {"num_experts": MOST_EXPERTS},
        {"num_experts": MOST_EXPERTS + 1}, {"num_topk": 3}, {"num_ranks": 2}, {"num_micro_batches": 1},
        {"layers": ["a"]}, {"layers": "ab"}, {"layers": ["a", 1]},
        {"num_ranks": True}, {"of_rank": 0}, {"of_rank": 3}, {"of_rank": "0"},
    )]  # fmt: skip
    changed += [b"{", b"[1]", {"version": 1}]
    return [loaded(header) for header in (HEADER, *changed)]


def arrays() -> Any:
    one = {"rank": PLACES["rank"] * 0 + 2}
    return [loaded(**change) for change in (
        {"rank": None}, {"rank": None, "topk_idx": None}, {"topk_idx": IDS[:2]}, {"topk_idx": IDS[:, 0]},
        {"topk_idx": IDS.astype(float)}, {"topk_idx": IDS - 1}, {"topk_idx": IDS.astype(np.int64) + 1},
        {"micro_batch": PLACES["micro_batch"][:2]}, {"rank": PLACES["rank"] - 1}, {"rank": PLACES["rank"] + 1},
        {"micro_batch": PLACES["micro_batch"] + 1}, {"rank": PLACES["rank"].astype(np.int64)},
        {"rank": PLACES["rank"] * 1.0}, {"rank": PLACES["rank"][:, None]}, {"micro_batch": np.array(1)},
        {"num_experts": 4}, {"num_experts": 5}, one | {"header": HEADER | {"of_rank": 2}},
        {"topk_idx": IDS[:0], "rank": PLACES["rank"][:0], "micro_batch": PLACES["micro_batch"][:0]},
    )]  # fmt: skip


def without_header() -> Any:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npy"
        for ids, experts in (
            (IDS, None), (IDS[:, 0], 4), (IDS[:, 0], 3), (IDS[:0], 4), (IDS[0, 0], None), (IDS * 0 - 1, None),
            (IDS.astype(np.int64) * 20000, None), (IDS, MOST_EXPERTS), (IDS, MOST_EXPERTS + 1), (IDS, 0),
            (np.full((1, 1, 1), MOST_EXPERTS - 1), None), (np.full((1, 1, 1), MOST_EXPERTS), None),
        ):  # fmt: skip
            np.save(path, ids)
            found.append(result_of(lambda experts=experts: facts(load(path, experts))))
        np.save(path, IDS)
        found.append(ids_of(path, 4))
        for name, given in (
            ("one", {"x": IDS}),
            ("named", {"x": IDS, "topk_idx": IDS[:1]}),
            ("two", {"x": IDS, "y": IDS}),
        ):
            np.savez(Path(folder) / name, **given)
            found.append(result_of(lambda name=name: facts(load(Path(folder) / f"{name}.npz"))))
        path.write_bytes(b"none")
        found += [result_of(partial(load, path)), result_of(partial(load, Path(folder) / "none"))]
    return json.loads(json.dumps([each.tolist() if isinstance(each, np.ndarray) else each for each in found]).replace(
        folder, "FOLDER"
    ))  # fmt: skip


def saved() -> Any:
    """Return the arrays of files, and that they are read again as they were written."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for routes in (whole(), whole(num_ranks=1, rank=torch.zeros(3, dtype=torch.int32)), whole().of(rank=2)):
            path = Path(folder) / "a.npz"
            routes.save(path)
            with np.load(path) as arrays:
                header = json.loads(arrays["header"].tobytes())
                names = {
                    name: [str(arrays[name].dtype), arrays[name].tolist()] for name in arrays.files if name != "header"
                }
            found.append([header, names])
            assert facts(load(path)) == facts(routes)
            assert [each.name for each in Path(folder).iterdir()] == ["a.npz"]
    return found


def parts() -> Any:
    own = [whole().of(rank=rank) for rank in range(3)]
    later = replace(own[1], num_micro_batches=4)
    alone = whole(num_ranks=1, rank=torch.zeros(3, dtype=torch.int32))
    merged = [[], own, [own[2], later, own[0]], own[:2], [own[0], own[1], own[1]], [*own, own[0]], [alone], [whole()],
              [own[0], own[1], replace(own[2], layers=("a", "c"))], [own[0], replace(own[1], num_experts=5), own[2]],
              [own[0], replace(own[1], num_ranks=2)],
              [own[0], replace(own[1], topk_idx=own[1].topk_idx[..., :1])]]  # fmt: skip
    return {
        "merged": [result_of(lambda given=given: facts(merge(given))) for given in merged],
        "of": [facts(whole().of(rank=rank, micro_batch=batch)) for rank in (None, 0, 1) for batch in (None, 0, 1)],
        "of one": [facts(alone.of(rank=0))["of_rank"], facts(own[1].of(micro_batch=1))["of_rank"]],
    }


def requests() -> Any:
    def made(*given: Any, **more: Any) -> Any:
        return result_of(lambda: facts(Routes.from_routed_experts(given, **({"num_experts": 4} | more))))

    text = base64.b64encode(IDS.astype(np.int32).tobytes()).decode()
    return [
        made(IDS), made(IDS, IDS[:1], length=3), made(IDS[:1], IDS[1:], starts=[1, 0]), made(IDS, layers=["x", "y"]),
        made(IDS, layers=["x"]), made(), made(IDS, IDS[:, :1]), made(IDS[0]), made(IDS, length=2),
        made(IDS, starts=[-1]),
        made(IDS, starts=[]), made(IDS, starts=[2], length=4), made(IDS, starts=[1], length=4),
        made(text, shape=(2, 2)),
        made(text), made(text, shape=(2, 5)), made(text[:-4], shape=(2, 2)), made("*"), made(IDS[:0]),
        made(text.encode(), shape=(4, 1)), made(IDS, num_experts=3), made(IDS * 1.0), made(IDS[:2], starts=[0]),
    ]  # fmt: skip


def numbers() -> Any:
    return every(layer_number, ("model.layers.3.mlp", "3", "a.12", "7.b", "a3.b", "a", "1.2", "x.10y", ""))


RESULTS = {each.__name__: each for each in (headers, arrays, without_header, saved, parts, requests, numbers)}


@pytest.mark.parametrize("name", RESULTS)
def test_files_are_those_on_record(name: str) -> None:
    assert_on_record(RECORD, name, result_of(RESULTS[name]))


if __name__ == "__main__":
    write_record(RECORD, results_of(RESULTS))
