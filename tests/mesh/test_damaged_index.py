"""check_checkpoint reports damaged checkpoints of torch.distributed.checkpoint as an error of the family."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from moe_rt import MoEConfig, MoELayer
from moe_rt.errors import CorruptCheckpoint, InvalidConfig
from moe_rt.parallel import checkpoint
from moe_rt.parallel.checkpoint import check_checkpoint

INDEX, DATA = ".metadata", "__0_0.distcp"
CONFIG = MoEConfig(hidden=8, intermediate=8, num_experts=4, num_topk=2, num_max_tokens_per_rank=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[MoELayer, Path]:
    layer, path = MoELayer(CONFIG), tmp_path_factory.mktemp("saved")
    dcp.save({"model": get_model_state_dict(layer)}, checkpoint_id=path)
    return layer, path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / INDEX).unlink(), rf"{INDEX}: got FileNotFoundError"),
        (lambda path: os.truncate(path / INDEX, 0), rf"{INDEX}: got ValueError"),
        (lambda path: os.truncate(path / INDEX, 100), rf"{INDEX}: got ValueError"),
        (lambda path: (path / INDEX).write_bytes(b"I1\n."), rf"{INDEX}: got AttributeError"),
        (
            lambda path: (path / INDEX).write_bytes(b"Nr\xff\xff\xff\x7f."),
            rf"{INDEX}: got .* a table of 2147483647 entries",
        ),
        (lambda path: (path / DATA).unlink(), rf"{DATA}: got 0 bytes, expected at least \d+"),
        (lambda path: os.truncate(path / DATA, 1000), rf"{DATA}: got 1000 bytes, expected at least \d+"),
        (shutil.rmtree, rf"{INDEX}: got FileNotFoundError"),
    ],
)
def test_names_the_file(
    saved: tuple[MoELayer, Path], tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    layer, path = saved[0], Path(shutil.copytree(saved[1], tmp_path / "copy"))
    check_checkpoint(layer, path)
    damage(path)
    with pytest.raises(CorruptCheckpoint, match=message):
        check_checkpoint(layer, path)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_file_ends_with_its_last_tensor_wherever_the_index_lists_it(
    saved: tuple[MoELayer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    layer, path = saved[0], Path(shutil.copytree(saved[1], tmp_path / "copy"))
    read = FileSystemReader.read_metadata

    def sorted_index(self: FileSystemReader) -> Metadata:
        index = read(self)
        places = sorted(index.storage_data.items(), key=lambda item: item[1].offset, reverse=backwards)
        index.storage_data = dict(places)
        return index

    monkeypatch.setattr(FileSystemReader, "read_metadata", sorted_index)
    end = max(place.offset + place.length for place in FileSystemReader(path).read_metadata().storage_data.values())
    os.truncate(path / DATA, end)
    check_checkpoint(layer, path)
    os.truncate(path / DATA, end - 1)
    with pytest.raises(CorruptCheckpoint, match=rf"{DATA}: got {end - 1} bytes, expected at least {end}"):
        check_checkpoint(layer, path)


def test_no_flipped_bit_of_the_index_raises_anything_else(saved: tuple[MoELayer, Path], tmp_path: Path) -> None:
    """No flipped bit raises any other error; without a digest some bits go unnoticed."""
    layer, path = saved[0], Path(shutil.copytree(saved[1], tmp_path / "copy"))
    whole = (path / INDEX).read_bytes()
    rng, refused = random.Random(0), 0
    for _ in range(200):
        data, bit = bytearray(whole), rng.randrange(8 * len(whole))
        data[bit // 8] ^= 1 << bit % 8
        (path / INDEX).write_bytes(data)
        try:
            check_checkpoint(layer, path)
        except (CorruptCheckpoint, InvalidConfig):
            refused += 1
    assert refused > 50


def every_difference(sizes: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Size | None]]:
    """Yield each tensor with each size that differs from the saved one a little, and None for no tensor."""
    for name, size in sizes.items():
        yield name, None
        for dim in range(len(size)):
            for step in (-1, 1):
                yield name, torch.Size([n + step * (d == dim) for d, n in enumerate(size)])
        if size != size[::-1]:
            yield name, size[::-1]  # as many elements
        yield name, size[:-1]


@pytest.mark.parametrize("prefix", ["model.", "", "state.net."])
@pytest.mark.parametrize("wrapped", [False, True])
def test_each_difference_of_each_layer_is_named(monkeypatch: pytest.MonkeyPatch, prefix: str, wrapped: bool) -> None:
    model = nn.ModuleDict({"first": MoELayer(CONFIG), "second": MoELayer(CONFIG)})
    sizes = {prefix + name: p.shape for name, p in model.named_parameters()}
    if wrapped:  # wrappers whose names torch removes from what it saves
        inner = nn.Module()
        inner._checkpoint_wrapped_module = nn.Module()  # type: ignore[assignment]
        inner._checkpoint_wrapped_module._orig_mod = model["second"]
        model["second"] = inner
    monkeypatch.setattr(checkpoint, "_read_index", lambda path: saved)
    saved = dict(sizes)
    check_checkpoint(model, "here", prefix)
    for name, size in every_difference(sizes):
        saved = {**sizes, name: size} if size is not None else {n: s for n, s in sizes.items() if n != name}
        with pytest.raises(InvalidConfig, match=re.escape(name)) as raised:
            check_checkpoint(model, "here", prefix)
        got, expected = list(sizes[name]), None if size is None else list(size)
        if expected is not None and not name.endswith("router.weight"):
            assert f"{name}: got {got}, expected {expected} as in the checkpoint here" in str(raised.value)
        elif expected is not None and expected[:1] != got[:1]:
            assert f"num_experts: got 4, expected {expected[0]} as in {name}" in str(raised.value)


def test_each_of_several_files_is_compared(
    saved: tuple[MoELayer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, path = saved[0], Path(shutil.copytree(saved[1], tmp_path / "copy"))
    read, names = FileSystemReader.read_metadata, ["a", "b", "c"]

    def spread(self: FileSystemReader) -> Metadata:
        index = read(self)
        for number, place in enumerate(index.storage_data.values()):
            place.relative_path = names[number % 3]
        return index

    monkeypatch.setattr(FileSystemReader, "read_metadata", spread)
    for name in names:
        shutil.copy(path / DATA, path / name)
    check_checkpoint(layer, path)
    for name in names:
        (path / name).rename(path / "away")
        with pytest.raises(CorruptCheckpoint, match=rf"/{name}: got 0 bytes"):
            check_checkpoint(layer, path)
        (path / "away").rename(path / name)
