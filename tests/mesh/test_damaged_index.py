"""check_checkpoint reports damaged checkpoints of torch.distributed.checkpoint as an error of the family."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from moe_rt import MoEConfig, MoELayer
from moe_rt.errors import CorruptCheckpoint, InvalidConfig
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
