"""Bytes for training and validation, and batches that do not depend on how many ranks share them."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rt.errors import InvalidConfig

IGNORE = -100  # a target without a loss; the default of torch's cross entropy
HELD_OUT = 20  # one file in this many is for validation
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Two streams of bytes, uint8 [N]; files are separated by a zero byte."""

    train: Tensor
    val: Tensor

    def train_batch(self, *, seed: int, step: int, indices: range, seq_len: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [len(indices), seq_len], of these sequences of a step's global batch.

        A sequence is a pure function of (seed, step, its index), so ranks may divide a batch in any way.
        """
        last = len(self.train) - seq_len - 1
        starts = [int(np.random.default_rng([seed, step, index]).integers(last + 1)) for index in indices]
        return _windows(self.train, starts, seq_len)

    def val_batches(
        self, *, num_sequences: int, batch_size: int, rows: range, seq_len: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's rows of each batch of a fixed set of sequences, spread evenly over the validation bytes.

        The last batch is padded with sequences whose targets are all IGNORE, so that every rank runs the same number of
        equal batches.
        """
        available = (len(self.val) - 1) // seq_len
        count = min(num_sequences, available)
        x, y = _windows(self.val, [i * available // count * seq_len for i in range(count)], seq_len)
        missing = -count % batch_size
        x, y = F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, 0, 0, missing), value=IGNORE)
        mine = slice(rows.start, rows.stop)
        return [(bx[mine], by[mine]) for bx, by in zip(x.split(batch_size), y.split(batch_size), strict=True)]


def load(path: Path | None, seq_len: int) -> Corpus:
    """Read the standard library's sources, or all files under `path`, in the order of their names.

    Hidden files, tests and installed packages are left out. Whole files are held out for validation; of a single file,
    its end.

    Raises:
        InvalidConfig: the path does not exist, or has too few bytes for one sequence of each kind.
    """
    try:
        texts = [file.read_bytes() for file in sorted(_files(path))]
    except OSError as error:
        raise InvalidConfig(f"data: got {path}, expected a readable file or directory ({error.strerror})") from error
    if len(texts) == 1:
        cut = len(texts[0]) - len(texts[0]) // HELD_OUT
        texts = [texts[0][cut:], texts[0][:cut]]
    corpus = Corpus(
        train=_stream([text for i, text in enumerate(texts) if i % HELD_OUT]), val=_stream(texts[::HELD_OUT])
    )
    shortest = min(len(corpus.train), len(corpus.val))
    if shortest <= seq_len:
        raise InvalidConfig(f"data: got {shortest} bytes for training or validation, expected more than {seq_len}")
    return corpus


def _files(path: Path | None) -> list[Path]:
    if path is not None and not path.is_dir():
        return [path]
    root, pattern = (Path(sysconfig.get_path("stdlib")), "*.py") if path is None else (path, "*")
    return [
        file for file in root.rglob(pattern) if file.is_file() and not any(map(_skipped, file.relative_to(root).parts))
    ]


def _skipped(name: str) -> bool:
    return name in SKIPPED or name.startswith(".")


def _stream(texts: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"\0".join(texts), np.uint8).copy())


def _windows(stream: Tensor, starts: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    windows = torch.stack([stream[i : i + seq_len + 1] for i in starts]).long()
    return windows[:, :-1], windows[:, 1:]
