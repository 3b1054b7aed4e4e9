"""Data: the same global batch for any number of ranks, whole files held out, and typed errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_rt.errors import InvalidConfig
from moe_rt.train import data

SEQ_LEN = 16


def test_batch_does_not_depend_on_who_asks() -> None:
    corpus = data.Corpus(train=torch.randint(256, (1000,), dtype=torch.uint8), val=torch.zeros(20, dtype=torch.uint8))
    whole, targets = corpus.train_batch(seed=3, step=5, indices=range(8), seq_len=SEQ_LEN)
    parts = [corpus.train_batch(seed=3, step=5, indices=range(i, i + 2), seq_len=SEQ_LEN)[0] for i in range(0, 8, 2)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole[:, 1:], targets[:, :-1])
    assert len({tuple(sequence) for sequence in whole.tolist()}) == 8
    for seed, step in ((4, 5), (3, 6), (5, 3), (2, 6)):
        assert not torch.equal(corpus.train_batch(seed=seed, step=step, indices=range(8), seq_len=SEQ_LEN)[0], whole)


def test_the_first_and_the_last_window_are_drawn_and_none_after_it() -> None:
    for spare in range(3):
        stream = torch.arange(SEQ_LEN + 1 + spare).to(torch.uint8)
        x, y = data.Corpus(train=stream, val=stream).train_batch(seed=0, step=0, indices=range(64), seq_len=SEQ_LEN)
        assert set(x[:, 0].tolist()) == set(range(spare + 1))
        assert y[:, -1].max() == stream[-1]


def test_a_stream_that_is_a_multiple_of_the_length() -> None:
    """The last target of a window is one byte after it, so a stream of two windows' bytes has one window."""
    stream = torch.arange(2 * SEQ_LEN).to(torch.uint8)
    ((x, _),) = data.Corpus(train=stream, val=stream).val_batches(
        num_sequences=9, batch_size=1, rows=range(1), seq_len=SEQ_LEN
    )
    assert x.tolist() == [stream[:SEQ_LEN].tolist()]


def test_validation_sequences_are_spread_over_all_bytes() -> None:
    stream = (torch.arange(104 * SEQ_LEN + 1) // SEQ_LEN).to(torch.uint8)
    corpus = data.Corpus(train=stream, val=stream)
    [(x, _)] = corpus.val_batches(num_sequences=5, batch_size=5, rows=range(5), seq_len=SEQ_LEN)
    assert x[:, 0].tolist() == [0, 20, 41, 62, 83]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_validation_set_is_shared_out_in_equal_batches(world_size: int) -> None:
    stream = torch.arange(11 * SEQ_LEN + 1).to(torch.uint8)
    corpus = data.Corpus(train=stream, val=stream)
    each = 4 // world_size
    ranks = [
        corpus.val_batches(num_sequences=100, batch_size=4, rows=range(r * each, (r + 1) * each), seq_len=SEQ_LEN)
        for r in range(world_size)
    ]
    assert [len(batches) for batches in ranks] == [3] * world_size
    assert {x.shape for batches in ranks for x, _ in batches} == {(each, SEQ_LEN)}
    targets = torch.cat([y.flatten() for batches in ranks for _, y in batches])
    assert torch.equal(targets[targets != data.IGNORE].sort().values, stream[1:].long().sort().values)


def test_default_is_the_standard_library() -> None:
    corpus = data.load(None, SEQ_LEN)
    assert len(corpus.train) > 5e6
    assert 0.02 < len(corpus.val) / len(corpus.train) < 0.1
    assert torch.equal(corpus.train, data.load(None, SEQ_LEN).train)


def test_directory(tmp_path: Path) -> None:
    for i in range(21):
        (tmp_path / f"{i:02}").write_bytes(b"%02d" % i * SEQ_LEN)
    (tmp_path / ".hidden").write_bytes(b"hidden")
    corpus = data.load(tmp_path, SEQ_LEN)
    assert bytes(corpus.val.tolist()) == b"00" * SEQ_LEN + b"\0" + b"20" * SEQ_LEN
    assert bytes(corpus.train.tolist()) == b"\0".join(b"%02d" % i * SEQ_LEN for i in range(1, 20))


def test_names_are_skipped_below_the_directory_only(tmp_path: Path) -> None:
    root = tmp_path / ".cache" / "tests"
    for name in ("b/kept", ".git/left", "tests/left", "b/site-packages/left", "b/.left", "a/deep/kept"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * SEQ_LEN)
    corpus = data.load(root, SEQ_LEN)
    assert bytes(corpus.val.tolist()) == b"a/deep/kept" * SEQ_LEN
    assert bytes(corpus.train.tolist()) == b"b/kept" * SEQ_LEN


@pytest.mark.parametrize("lengths", [(SEQ_LEN, SEQ_LEN + 1), (SEQ_LEN + 1, SEQ_LEN)])
def test_a_sequence_needs_one_byte_more_than_its_length(tmp_path: Path, lengths: tuple[int, int]) -> None:
    for name, length in zip("ab", lengths, strict=True):
        (tmp_path / name).write_bytes(bytes(length))
    with pytest.raises(InvalidConfig, match="data: got 16 bytes for training or validation, expected more than 16"):
        data.load(tmp_path, SEQ_LEN)
    corpus = data.load(tmp_path, SEQ_LEN - 1)
    assert len(corpus.train) >= SEQ_LEN <= len(corpus.val)


def test_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)) * 10)
    corpus = data.load(file, SEQ_LEN)
    assert bytes(torch.cat([corpus.train, corpus.val]).tolist()) == file.read_bytes()
    assert len(corpus.val) == 100


def test_too_little_or_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="data: got 0 bytes"):
        data.load(tmp_path, SEQ_LEN)
    with pytest.raises(InvalidConfig, match=r"data: got .*missing"):
        data.load(tmp_path / "missing", SEQ_LEN)
